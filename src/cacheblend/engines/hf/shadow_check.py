"""The shadow check of one engine: which answers are compared, and the full prefills that they are compared with.

    prefill done ─> begin: drawn? ─> each token: add ─> answer done: submit ─> queue ─> advance, a tile at a time
                                                                               │full: the oldest is dropped, and counted

A full prefill holds one layer's KV at a time. Whatever goes wrong in it ends this check, never a request: the answer
has been sent. Knows prefills and the watch; when to compute is for `Background` and the scheduler.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cacheblend.core.failures import CHECK, count_failure
from cacheblend.core.fuse.batching import TogetherPass, let_go
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillResult
from cacheblend.core.names import TokenIds
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines.hf.layers import JoinedRows
from cacheblend.engines.shadow import (
    ANSWER_TOKENS,
    CLOSED,
    FAILED,
    MOST_WAITING,
    NO_ANSWER,
    QUEUE_FULL,
    Labels,
    ShadowWatch,
    compare,
)

OTHER_ADAPTERS = "adapters changed"
logger = logging.getLogger("cacheblend.shadow")


class Origin(NamedTuple):
    """What a prompt is prefilled with."""

    version: int  # of the model's adapters
    step: int | None = None  # of the floor; None: the request names a mode, ratio or selector, which stays
    tenant: str = ""  # a label that other tenants may see


@dataclass(eq=False)
class WatchedAnswer:
    """An answer that was drawn to be compared."""

    labels: Labels
    origin: Origin
    prompt_ids: TokenIds
    first: torch.Tensor  # [vocab] logits of its first token
    token_ids: list[int] = field(default_factory=list)  # as far as they are compared
    likeliest: list[torch.Tensor] = field(default_factory=list)  # scalars on the device, which nothing waits for

    def add(self, token: int, logits: torch.Tensor) -> None:
        """Adds the answer's next token, and its logits [vocab] before penalties and temperature."""
        if len(self.token_ids) < ANSWER_TOKENS:
            self.token_ids.append(token)
            self.likeliest.append(logits.argmax())

    def forced(self) -> Prompt:
        """The prompt followed by the answer without its last compared token, behind which nothing is compared."""
        return Prompt.of([text(self.prompt_ids), text(self.token_ids[:-1])])


class ShadowCheck:
    """The shadow check of one engine. `begin` and `submit` may be called from several threads, `advance` from one at a
    time. `open_full` opens a full prefill of a prompt that keeps the logits of so many last rows; `version` is of the
    model's adapters, as they are now; `wake` is called when there is something to compute."""

    def __init__(
        self,
        watch: ShadowWatch,
        open_full: Callable[[Prompt, int], BlendedPrefill],
        version: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self.watch, self._open_full, self._version, self._wake = watch, open_full, version, wake
        self._queue: deque[WatchedAnswer] = deque()
        self._current: WatchedAnswer | None = None  # since it left the queue: opening its prefill takes a while
        self._prefill: BlendedPrefill | None = None
        self._layer: TogetherPass | None = None  # under way
        self._lock, self._closed = threading.Lock(), False
        self._last_version: int | None = None

    @property
    def waiting(self) -> int:
        """Number of answers that wait or are being compared."""
        with self._lock:
            return len(self._queue) + (self._current is not None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) and not self._closed

    def begin(self, result: PrefillResult, origin: Origin) -> WatchedAnswer | None:
        """Called after a prompt's prefill; None if its answer is exact or was not drawn."""
        report, plan = result.report, result.plan
        candidates, own = len(plan.candidate_rows), origin.step is not None
        if self._last_version not in (None, origin.version):
            self.watch.begin_anew()  # other adapters make another model, which what was seen does not describe
        self._last_version = origin.version
        if not self.watch.takes(candidates, report.recomputed_tokens, by_floor=own and bool(plan.left_out)):
            return None
        labels = Labels(origin.tenant, report.selector, "engine" if own else "request")
        return WatchedAnswer(labels, origin, plan.prompt.token_ids, result.logits)

    def submit(self, watched: WatchedAnswer) -> None:
        """Called when the answer has ended, was cancelled or failed; its tokens are compared when there is time."""
        if not watched.token_ids:
            self.watch.drop(NO_ANSWER)
            return
        with self._lock:
            if self._closed:
                self.watch.drop(CLOSED)
                return
            if len(self._queue) >= MOST_WAITING:
                self._queue.popleft()
                self.watch.drop(QUEUE_FULL)
            self._queue.append(watched)
        self._wake()

    @torch.no_grad()
    def advance(self) -> None:
        """Computes a tile of a layer, or the comparison. Never raises."""
        try:
            if self._prefill is None:
                self._open()
                return
            if self._layer is None:
                self._layer = TogetherPass([self._prefill.next_layer()], JoinedRows, 1, isolate=False)
            self._layer.advance(1)
            if self._layer.done:
                self._layer = None
            if self._prefill.done:
                watched, full = self._current, self._prefill.result().logits
                if watched is not None and not self._is_stale(watched):  # adapters may have been switched meanwhile
                    likeliest = torch.stack(watched.likeliest).tolist()
                    compared = compare(watched.first, likeliest, full.reshape(len(likeliest), -1))
                    self.watch.add(watched.labels, compared, watched.origin.step)
                self._end()
        except Exception as error:
            logger.warning("a shadow check failed; its request is not affected", exc_info=True)
            self.watch.drop(FAILED)
            count_failure(CHECK)
            self._end()
            let_go(error)

    def close(self) -> None:
        """Drops all waiting answers; call it once nothing is computed any more. Idempotent."""
        with self._lock:
            self._closed, left = True, len(self._queue) + (self._current is not None)
            self._queue.clear()
        self._end()
        for _ in range(left):
            self.watch.drop(CLOSED)

    def _open(self) -> None:
        with self._lock:
            if not self._queue:
                return
            watched = self._current = self._queue.popleft()
        if self._is_stale(watched):
            self._end()
        else:
            self._prefill = self._open_full(watched.forced(), len(watched.token_ids))

    def _end(self) -> None:
        done, self._prefill, self._current, self._layer = self._prefill, None, None, None
        if done is not None:
            done.close()

    def _is_stale(self, watched: WatchedAnswer) -> bool:
        if self._version() == watched.origin.version:
            return False
        self.watch.drop(OTHER_ADAPTERS)
        return True
