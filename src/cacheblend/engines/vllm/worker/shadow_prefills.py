"""The shadow check on one rank: what an answer was drawn from, and the full prefill that it is compared with.

    CheckJob ─> read ─────────────────────> waiting ─> full prefill, a tile of a layer at a time ─> compared
                the answer's rows over the  │full: the oldest is dropped
                blended KV in vLLM's cache,
                in the step that delivers it

Nothing is written to vLLM's cache. Whatever goes wrong ends a check, never a request.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass

import torch

from cacheblend.core.failures import CHECK, count_failure
from cacheblend.core.fuse.batching import PrefillBatcher, let_go
from cacheblend.core.fuse.prefill import BlendedPrefill
from cacheblend.engines.shadow import FAILED, MOST_WAITING, QUEUE_FULL, Compared, compare
from cacheblend.engines.vllm.jobs import CheckJob, StepJobs
from cacheblend.engines.vllm.reasons import NO_SLOT
from cacheblend.engines.vllm.worker.adapters import WorkerAdapters
from cacheblend.engines.vllm.worker.layers import join
from cacheblend.engines.vllm.worker.prefill_factory import Opener
from cacheblend.engines.vllm.worker.ranks import RankFailedError

logger = logging.getLogger("cacheblend.vllm")


@dataclass(eq=False)
class AnswerToCheck:
    """An answer that waits to be compared, or is. On ranks that do not sample the tensors are empty."""

    job: CheckJob
    first: torch.Tensor  # [vocab] logits that its first token was drawn from
    likeliest: torch.Tensor  # [n] the likeliest token of each compared one
    prefill: BlendedPrefill | None = None  # the full one over prompt and answer
    steps: PrefillBatcher[BlendedPrefill] | None = None


class AnswerChecks:
    """The checks of one rank."""

    def __init__(self, opener: Opener, adapters: WorkerAdapters) -> None:
        self._opener, self._adapters, self._ranks, self._device = opener, adapters, opener.ranks, opener.model.device
        self._waiting: deque[AnswerToCheck] = deque()
        self._under_way: AnswerToCheck | None = None
        self._ended: dict[int, Compared | str] = {}
        self._read: set[str] = set()
        self._seconds = 0.0

    def step(self, jobs: StepJobs, *, has_time: bool) -> int:
        """Reads, opens or computes a little in an engine step; returns the rows of a layer that it computed. Never
        raises. Beside requests a tile is computed whether they have left time (`has_time`) or not: `may_check` comes as
        rarely as its share of the time demands, and under a load that never leaves any nothing would be compared
        otherwise."""
        self._read.update(jobs.released)
        goes_on = jobs.may_check and (has_time or not jobs.is_check_free)
        if jobs.check is None and not (goes_on and (self._waiting or self._under_way)):
            return 0
        began, rows = self._now(), 0
        if jobs.check is not None:
            self._take(jobs.check)
        if goes_on and (self._waiting or self._under_way):
            rows = self._advance()
        if not jobs.is_check_free:
            self._seconds += self._now() - began
        return rows

    def take_read(self) -> set[str]:
        read, self._read = self._read, set()
        return read

    def take_ended(self) -> tuple[dict[int, Compared | str], float]:
        """Results, see `StepReport`, and the seconds that the check took."""
        found, self._ended, self._seconds = (self._ended, self._seconds), {}, 0.0
        return found

    def drop_all(self, reason: str) -> None:
        if self._under_way is not None:
            self._waiting.appendleft(self._under_way)
        while self._waiting:
            self._end(self._waiting.popleft(), reason)

    def _take(self, job: CheckJob) -> None:
        """Computes the answer's rows once more, over the KV that they were computed with, for the logits it was drawn
        from."""
        if job.is_held:
            self._read.add(job.request_id)
        if self._adapters.admits([job.adapter]) != [True]:
            self._ended[job.number] = NO_SLOT
            return
        try:
            with self._ranks.section():
                self._adapters.use(job.adapter)
                logits = self._opener.read_answer(job)
                answer = AnswerToCheck(job, logits[:1].flatten().clone(), logits.argmax(-1) if len(logits) else logits)
        except Exception as error:
            self._fail(job, error)
            return
        if len(self._waiting) >= MOST_WAITING:
            self._end(self._waiting.popleft(), QUEUE_FULL)
        self._waiting.append(answer)

    def _advance(self) -> int:
        if self._under_way is None:
            self._under_way = self._waiting.popleft()
        answer = self._under_way
        if self._adapters.admits([answer.job.adapter]) != [True]:
            return 0  # in a later step
        result = None
        try:
            with self._ranks.section():
                self._adapters.use(answer.job.adapter)
                if answer.prefill is None or answer.steps is None:
                    answer.prefill = self._opener.full(answer.job)
                    answer.steps = PrefillBatcher(1, self._opener.tile_rows, join, isolate=False)
                    answer.steps.add(answer.prefill)
                else:
                    answer.steps.advance(answer.steps.next(), 1)
                    if (
                        answer.prefill.done and (full := answer.prefill.result().logits).numel()
                    ):  # else not sampled here
                        likeliest = answer.likeliest.tolist()
                        result = compare(answer.first, likeliest, full.reshape(len(likeliest), -1))
            rows = answer.steps.rows
        except Exception as error:
            self._fail(answer.job, error)
            self._close(answer)
            return self._opener.tile_rows  # the same on all ranks, however far each of them came
        if answer.prefill.done:
            self._end(answer, result)
        return rows

    def _end(self, answer: AnswerToCheck, result: Compared | str | None) -> None:
        if result is not None:
            self._ended[answer.job.number] = result
        self._close(answer)

    def _close(self, answer: AnswerToCheck) -> None:
        if answer is self._under_way:
            self._under_way = None
        if answer.prefill is not None:
            answer.prefill.close()
        answer.prefill = answer.steps = None

    def _fail(self, job: CheckJob, error: Exception) -> None:
        if isinstance(error, RankFailedError):
            logger.warning("a shadow check failed; its request is not affected: %s", error)
        else:
            logger.warning("a shadow check failed; its request is not affected", exc_info=error)
        self._ended[job.number] = FAILED
        count_failure(CHECK)
        let_go(error)

    def _now(self) -> float:
        """A clock that includes the device's pending work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
