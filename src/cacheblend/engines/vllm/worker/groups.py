"""Where the rows of a request lie in vLLM's cache: each group of layers has a table of blocks of its own.

    prompt               | held by vLLM  | chunk A | text | chunk B | question |
    group of all rows    | 7 | 2 | 9 | 4 | 1 | 11  | 5 | 12 | 6   | 13       |    written from the held rows on
    group with a window  | 0 | 0 | 0 | 0 | 0 | 0   | 0 | 0  | 8   | 3        |    written from the first block on
      held for it        | 0 | 0 | 0 | 5 |                                         what rows right behind them see

Rows that are recomputed may see rows that the window of the prompt's last token has passed: a layer of such a group is
computed in buffers of the prompt's length, one layer at a time, and what the last token still sees is copied to vLLM's
blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend.engines.vllm.internals.prefix_cache import NULL_BLOCK, first_seen
from cacheblend.engines.vllm.jobs import BlendJob
from cacheblend.engines.vllm.worker.paged_cache import PagedLayer, RequestBlocks


@dataclass(frozen=True)
class LayerGroups:
    """The model's groups of KV cache.

    Attributes:
        windows: of each group, the rows that a row attends to at most, its own among them; None: any.
    """

    of_layer: Sequence[int]
    windows: Sequence[int | None] = (None,)


@dataclass(frozen=True)
class GroupRows:
    """A request's rows in one group.

    Attributes:
        is_whole: all of its rows have blocks of its own, or held ones that can be read.
        held: [n] int64 blocks of the held rows from `first_held` on, which is a block's first row.
        first_held: no row behind the held ones sees one in front of it.
    """

    blocks: RequestBlocks
    is_whole: bool
    held: torch.Tensor
    first_held: int

    def read(self, layer: PagedLayer, stop: int) -> torch.Tensor:
        """The held rows 0..stop - 1 as one record, [kv_heads, 2, stop, head_dim]; zeros in front of `first_held`."""
        record = layer.read(self.held, stop - self.first_held)
        return torch.nn.functional.pad(record, (0, 0, self.first_held, 0))


class RequestRows:
    """Where the rows of one request lie.

    Attributes:
        held_tokens: leading rows that vLLM holds.
        is_held: there are some, and all of them that later rows see can be read.
    """

    def __init__(self, job: BlendJob, groups: LayerGroups, block_size: int, device: torch.device) -> None:
        self.held_tokens = first = job.local_tokens
        self._groups = groups
        held, starts = [], []
        for window, table in zip(groups.windows, job.held_ids or job.block_ids, strict=True):
            start = first_seen(first, window) // block_size
            starts.append(start)
            held.append(table[start : -(-first // block_size)])
        self.is_held = first > 0 and not any(NULL_BLOCK in table for table in held)
        self._rows = []
        for table, own, start in zip(held, job.block_ids, starts, strict=True):
            blocks = RequestBlocks.of(own, first, len(job.plan), block_size, device)
            is_whole = self.is_held == (first > 0) and NULL_BLOCK not in own
            self._rows.append(GroupRows(blocks, is_whole, torch.tensor(table).to(device), start * block_size))

    def of(self, layer: int) -> GroupRows:
        """In a layer's group."""
        return self._rows[self._groups.of_layer[layer]]

    @property
    def groups(self) -> Sequence[GroupRows]:
        """Of each group."""
        return self._rows

    @property
    def is_whole(self) -> bool:
        """In all groups, see `GroupRows`."""
        return all(rows.is_whole for rows in self._rows)
