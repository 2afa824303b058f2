"""Tensor-parallel ranks that fail together, so that an error in one rank's blending ends no engine.

    rank 0   section:  check, all-reduce   check, all-reduce   check                      RankFailedError
                         |                   |                   |
    rank 1   section:  check, all-reduce   check, all-reduce   an error: says FAILED      the error

A section is a stretch of work whose end all ranks reach. In it, each collective is preceded by an exchange of states on
the host. A rank that fails takes part in one more exchange, whichever the others are at, and says so there: no rank
enters a collective that another one has left. The same exchange shows ranks whose work has diverged.
"""

import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from cacheblend.core.errors import CacheBlendError
from cacheblend.engines.vllm.reasons import RANK_FAILED

if TYPE_CHECKING:
    from cacheblend.engines.vllm.internals.tensor_parallel import TensorParallel

FINE, LOST, FAILED = 0, 1, 2
"""A rank's state in an exchange: nothing happened, it lost a block, it failed. The worst counts for all ranks."""

_END = "end of a section"
logger = logging.getLogger("cacheblend.vllm")


class RankFailedError(CacheBlendError):
    """Another rank failed in this section: all ranks give up what they computed in it."""

    reason = RANK_FAILED

    def __init__(self) -> None:
        super().__init__("another tensor-parallel rank failed; its log has the error")


class Ranks:
    """What one rank knows of the others. With one rank nothing is exchanged."""

    def __init__(self, group: "TensorParallel") -> None:
        self._group = group
        self.size, self.rank = group.size, group.rank
        self._is_over = False  # a rank failed in the section that is under way

    @contextmanager
    def section(self) -> Iterator[None]:
        """Work that succeeds on all ranks or on none. Raises RankFailedError: another rank failed in it."""
        if self.size == 1:
            yield
            return
        self._is_over = False
        try:
            with self._group.guarded(partial(self.agree, FINE)):
                yield
            self.agree(FINE, _END)
        except Exception:
            if not self._is_over:
                self._exchange(FAILED, _END)
            raise
        finally:
            self._is_over = False

    def agree(self, state: int, at: str) -> int:
        """The worst state of any rank, inside a section; `state`: this one's, `FINE` or `LOST`. Raises RankFailedError:
        another rank failed, or ranks have diverged, which is when they meet at places of different names."""
        if self._is_over:  # somebody caught the error; the other ranks have left
            raise RankFailedError
        found = state if self.size == 1 else self._exchange(state, at)
        if found == FAILED:
            self._is_over = True
            raise RankFailedError
        return found

    def agree_each(self, states: Sequence[int]) -> list[int]:
        """The maximum of each state over all ranks, outside of sections; all ranks give as many."""
        return self._group.maximum(list(states)) if self.size > 1 and states else list(states)

    def combine(self, value: torch.Tensor, how: Literal["sum", "max"]) -> torch.Tensor:
        """The sum or the maximum of `value` over all ranks, inside a section; raises as `agree`."""
        return value if self.size == 1 else self._group.combine(value, how, partial(self.agree, FINE))

    def gather_heads(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenates [kv_heads of a rank, ...] over all ranks, inside a section; raises as `agree`."""
        return part if self.size == 1 else self._group.gather_heads(part)

    def _exchange(self, state: int, at: str) -> int:
        place = zlib.crc32(at.encode())
        worst, highest, lowest = self._group.maximum([state, place, -place])
        if worst != FAILED and highest != -lowest:
            logger.error("the ranks' work has diverged: this one is at '%s'", at)
            return FAILED
        return worst
