"""The worker side: fills the paged cache for prompts and captures chunks, a few layers in each engine step.

    start_load_kv -> step(jobs): as many layers as the budget allows; oldest job first, captures after all prompts, then
                               the shadow check (`AnswerChecks`)
                      prompt: load, fuse, write each finished layer to the paged cache -> done
                      chunk:  compute alone, with its anchor in front -> store
                      error:  vLLM computes the prompt; a chunk is not stored

Every rank computes the same rows in the same order, and they fail together (`Ranks`): a section is the opening of a
job, a layer of a batch, or the finishing of a job.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.fuse.batching import PrefillBatcher, let_go
from cacheblend.core.load.budget import LOAD_TIMEOUT
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.shadow import CLOSED
from cacheblend.engines.vllm.internals.prefix_cache import NULL_BLOCK
from cacheblend.engines.vllm.jobs import BlendJob, BlendOutcome, CaptureJob, StepJobs, StepReport
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.reasons import LOST_BLOCK, NO_SLOT, OTHER_WEIGHTS, RESET, SLOW_STORE, UNREADABLE
from cacheblend.engines.vllm.worker.adapters import AdapterChangedError, WorkerAdapters
from cacheblend.engines.vllm.worker.capture_writer import CaptureWriter
from cacheblend.engines.vllm.worker.layers import join
from cacheblend.engines.vllm.worker.prefill_factory import Opener
from cacheblend.engines.vllm.worker.ranks import RankFailedError
from cacheblend.engines.vllm.worker.shadow_prefills import AnswerChecks
from cacheblend.engines.vllm.worker.tasks import LATE, READY, SLOW, WAITING, Readiness, Task

IDLE_TIMES = 2  # budgets of a step in which vLLM computes nothing: no token waits for it
READ_TIMEOUT_S = 10.0
WRITER_S = 0.01  # that an idle step waits for the chunk being written, so that an idle engine does not spin
logger = logging.getLogger("cacheblend.vllm")


NOT_BLENDABLE = "not blendable"  # why vLLM computes a request, where nothing can be blended


class Outbox:
    """Requests that a worker has provided or given up, until vLLM and the scheduler's side collect them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._provided: set[str] = set()
        self._outcomes: dict[str, BlendOutcome] = {}
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self.counts = Counts()

    def take_provided(self) -> set[str]:
        provided, self._provided = self._provided, set()
        return provided

    def take_failed_blocks(self) -> set[int]:
        """Blocks of the paged cache that could not be filled: vLLM recomputes them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests of which vLLM recomputes everything; they are among those provided."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_outcomes(self) -> dict[str, BlendOutcome]:
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    def _end(self, request_id: str, outcome: BlendOutcome) -> None:
        self._provided.add(request_id)
        self._outcomes[request_id] = outcome

    def _end_unfilled(self, job: BlendJob, reason: str, read_s: Mapping[str, float] | None = None) -> None:
        """A request whose blocks hold nothing: vLLM computes it. `read_s`: see `BlendOutcome`."""
        tables = job.block_ids
        # Blocks do not tell what is missing where a window has passed some, nor in which group.
        if len(tables) > 1 or NULL_BLOCK in tables[0]:
            self._failed_requests.add(job.request_id)
        else:
            self._failed_blocks.update(tables[0][job.local_tokens // self._block_size :])
        self._end(job.request_id, BlendOutcome(failure=reason, read_s=read_s or {}))


class IdleWorker(Outbox):
    """The worker of a model that cannot be blended, or is not the one that blocks are named by: gives all jobs back,
    and says why (no handshake does: vLLM passes on one connector's of several). `label`: the reason as it is
    counted."""

    is_follower = False

    def __init__(self, block_size: int, reason: str, label: str = NOT_BLENDABLE) -> None:
        super().__init__(block_size)
        self._reason, self._label, self._captured = reason, label, 0

    def step(self, jobs: StepJobs) -> None:
        for job in jobs.blend:
            self._end_unfilled(job, self._label)
        self._captured += len(jobs.capture)

    def report(self) -> StepReport:
        has_others = self._label == OTHER_WEIGHTS
        why = "" if has_others else self._reason
        return StepReport(self._captured, self.take_outcomes(), has_other_weights=has_others, unblendable=why)

    def take_read(self) -> set[str]:
        return set()

    def capture(self, jobs: Sequence[CaptureJob]) -> NoReturn:
        raise ModelNotBlendableError(self._reason)

    def close(self) -> None:
        """Has nothing to end."""


class Worker(Outbox):
    """The worker side of one rank. `budget` is in row-layers of an engine step, up to a tile more, and `IDLE_TIMES` as
    large if vLLM computes nothing; `name`: of the model, for people."""

    def __init__(
        self, opener: Opener, selector: Selector, budget: int, name: str = "", read_timeout_s: float = READ_TIMEOUT_S
    ) -> None:
        super().__init__(opener.block_size)
        self._opener, self._model, self._store, self._ranks = opener, opener.model, opener.store, opener.ranks
        tile_rows, last_check = opener.tile_rows, max(selector.check_layers, default=0)
        alone, self._budget = self._ranks.size == 1, budget
        self._blends: PrefillBatcher[Task] = PrefillBatcher(last_check + 1, tile_rows, join, isolate=alone)
        self._captures: PrefillBatcher[Task] = PrefillBatcher(1, tile_rows, join, isolate=alone)
        self._readiness = Readiness(self._ranks, read_timeout_s)
        self.adapters = WorkerAdapters(self._model.adapters, self._ranks, read_timeout_s)
        self._is_idle, self._owed, self._chunks, self._capture_work = False, 0, 0, 0
        self._arrived: list[BlendJob] = []
        self._capture_writer = CaptureWriter(self._model, self._store, self.counts, name, self._ranks)
        self.checks = AnswerChecks(opener, self.adapters)

    # ---- an engine step ---------------------------------------------------------------------------------

    def step(self, jobs: StepJobs) -> None:
        """As `_step`, for which most steps of an engine that decodes have no work."""
        if not jobs.is_nothing or self._arrived or self._blends or self._captures or self.adapters.is_asked:
            return self._step(jobs)
        self._owed = 0

    @torch.inference_mode()
    def _step(self, jobs: StepJobs) -> None:
        """Takes new jobs and computes layers until the step's budget is used or all jobs wait for the store; at least
        one tile of a layer if one is there. New prompts are begun in the next step, see `StepJobs`. By as many rows as
        the shadow check computes beyond the budget, the next step's is smaller."""
        self._is_idle = jobs.is_idle
        self.adapters.begin_step(jobs.adapters, is_idle=jobs.is_idle)
        self._take(jobs)
        tasks = [*self._blends, *self._captures]
        for late in self.adapters.overdue([task.adapter for task in tasks]):
            self._give_up(tasks[late], NO_SLOT)
        self._readiness.begin_step(is_idle=jobs.is_idle and all(task.reads for task in self._captures))
        left = budget = max(1, self._budget * (IDLE_TIMES if jobs.is_idle else 1) - self._owed)
        while left > 0:
            tasks = self._choose()
            if not tasks:
                break
            left -= self._advance(tasks, left)
        checked = self.checks.step(jobs, has_time=left > 0)
        self._owed = max(0, checked - max(0, left))
        if jobs.is_idle and left == budget and not jobs.may_check:
            self._capture_writer.wait(WRITER_S)

    def capture(self, jobs: Sequence[CaptureJob]) -> None:
        self.step(StepJobs(capture=list(jobs), is_idle=True))
        while self._captures:
            self.step(StepJobs(is_idle=True))
        while self.captured < self._chunks:
            self._capture_writer.wait(1.0)  # the last ones are being written
        self._store.flush()  # in farther stores, too

    def report(self) -> StepReport:
        checked, seconds = self.checks.take_ended()
        stalled_s = min((task.waiting_s for task in self._blends), default=0.0)
        told = self.take_outcomes(), checked, seconds, self.adapters.take_seen(), stalled_s
        return StepReport(self.captured, *told, capture_work=self._capture_work + self._capture_writer.written)

    def take_read(self) -> set[str]:
        return self.checks.take_read()

    def is_any(self, own: bool) -> bool:
        """Whether it is so on any rank; all ranks call it."""
        return bool(self._ranks.agree_each([int(own)])[0])

    @property
    def is_follower(self) -> bool:
        """Another rank does the same work and reports it."""
        return self._ranks.rank > 0

    @property
    def captured(self) -> int:
        return self._capture_writer.done

    def close(self) -> None:
        """Ends unfinished jobs without waiting for reads; waits some seconds for the chunk that is being written."""
        for task in [*self._blends, *self._captures]:
            task.close()
        self.checks.drop_all(CLOSED)
        self._opener.close()
        self._capture_writer.close()

    # ---- jobs -------------------------------------------------------------------------------------------

    def _take(self, jobs: StepJobs) -> None:
        for job in [job for job in self._arrived if job.request_id in jobs.dropped]:
            self._arrived.remove(job)
            self._provided.add(job.request_id)  # so that vLLM frees its blocks
        for task in [*self._blends]:
            if isinstance(task.job, BlendJob) and task.job.request_id in jobs.dropped:
                self._forget(task)
                self._provided.add(task.job.request_id)
        if jobs.is_reset:  # gives up everything that has not been finished
            for task in [*self._blends, *(Task(job) for job in self._arrived), *self._captures]:
                self._give_up(task, RESET)
            self._arrived.clear()
            self._capture_writer.drop()
            self.checks.drop_all(RESET)
            self._store.drop_copies()  # nobody asks for their names any more
        for blend in self._arrived:
            self._blends.add(Task(blend))
        self._arrived = [*jobs.blend]
        # Of a store that takes nothing at the moment no chunk is computed for nothing; they end in the order of sending
        is_refused = bool(jobs.capture) and self.is_any(not self._captures and self._capture_writer.is_refusing)
        for number, capture in enumerate(jobs.capture, self._chunks):
            if is_refused:
                self._capture_writer.refuse(number)
            elif capture.pages is not None:
                self._copy(capture, number)
            else:
                self._captures.add(Task(capture, number=number))
        self._chunks += len(jobs.capture)

    def _choose(self) -> list[Task]:
        tasks = [*self._blends, *self._captures]
        states = self._readiness.of([task for task in tasks if task.prefill is not None])
        for task, state in states.items():
            if state not in (READY, WAITING):
                logger.warning(
                    "the store does not give a layer; vLLM computes this request, or a history is not stored"
                )
                reason = {SLOW: LOAD_TIMEOUT, LATE: SLOW_STORE}.get(state, UNREADABLE)
                tier = task.prefill.reading if state == SLOW and task.prefill is not None else ""
                self._give_up(task, reason, {tier: task.waited_s + task.waiting_s} if tier else None)
        unfinished = [*self._blends, *self._captures]
        admitted = dict(zip(unfinished, self.adapters.admits([task.adapter for task in unfinished]), strict=True))
        for batcher in (self._blends, self._captures):
            while batcher:
                tasks = batcher.next(lambda task: admitted[task] and states.get(task, READY) == READY)
                if not tasks:
                    break
                if admitted[tasks[0]]:  # it was not asked about one that has not begun, and passes it over from now on
                    return [task for task in tasks if task.adapter == tasks[0].adapter]
        return []

    def _advance(self, tasks: Sequence[Task], left: int) -> int:
        started, rows = time.perf_counter(), sum(task.active_rows for task in tasks)
        if tasks[0].prefill is None:
            self._attempt(tasks[0], self._start)
        else:
            rows = self._compute(tasks, left) or rows  # rows that ask the question are not among those of the batch
            self._capture_work += rows if isinstance(tasks[0].job, CaptureJob) else 0
        for task in tasks:
            task.busy_s += time.perf_counter() - started
            # A device goes on with vLLM's own work while the host is here.
            task.is_alone &= len(tasks) == 1 and (self._is_idle or self._model.device.type == "cpu")
            if task.prefill is None or not task.prefill.done or not self._attempt(task, self._finish):
                continue
            job, kv = task.job, task.kv  # from here on nothing fails on one rank only
            self._forget(task)
            if isinstance(job, CaptureJob):
                self._capture_writer.write(task.number, job, kv)
            elif task.ended is not None:
                self.counts.add_work(*task.ended)
                self._end(job.request_id, task.ended[0])
        return max(rows, 1)

    def _compute(self, tasks: Sequence[Task], most_rows: int) -> int:
        batcher = self._batcher_of(tasks[0])
        try:
            with self._ranks.section():
                self.adapters.use(tasks[0].adapter)
                # In the next step its slot may be another one's: no layer is left half done.
                ended = batcher.advance(tasks, most_rows if tasks[0].adapter is None else None)
            rows = batcher.rows
        except Exception as error:
            ended = [(task, error) for task in tasks]
            rows = most_rows  # the same on all ranks, however far each of them came
        for task, failure in ended:
            if failure is not None:
                self._fail(task, failure)
        return rows

    def _attempt(self, task: Task, what: Callable[[Task], None]) -> bool:
        try:
            with self._ranks.section():
                what(task)
        except Exception as error:
            self._fail(task, error)
            return False
        return True

    def _start(self, task: Task) -> None:
        if self._is_idle and self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # the step before may go on there: its time is not this task's
        task.started = time.perf_counter()
        job = task.job
        self.adapters.use(job.adapter)
        task.prefill = self._opener.blend(job) if isinstance(job, BlendJob) else self._opener.capture(job, task.kv)

    def _finish(self, task: Task) -> None:
        assert task.prefill is not None
        if isinstance(task.job, CaptureJob):
            task.kv = self._capture_writer.gather(task.kv)
            return
        if task.is_alone and self._model.device.type == "cuda":
            waited = time.perf_counter()
            torch.cuda.synchronize(self._model.device)
            task.busy_s += time.perf_counter() - waited
        result = task.prefill.result()
        hits, report = result.plan.hit_tokens(), result.report
        local = min(task.job.local_tokens, hits["prefix"])  # 0 if a lost block forced all of them to be computed
        by_source = {**hits, "vllm": local, "prefix": hits["prefix"] - local}
        outcome = BlendOutcome(
            hit_tokens={source: count for source, count in by_source.items() if count},
            prompt_tokens=len(result.plan),
            recomputed_tokens=report.recomputed_tokens,
            row_layers=report.row_layers,
            prefill_share=report.row_layers / (len(result.plan) * len(self._model.layout.layers)),
            seconds=time.perf_counter() - task.started,
            compute_s=task.busy_s - report.wait_s if task.is_alone and not report.fallbacks else None,
            read_s=result.read_s,
        )
        task.ended = outcome, result

    def _copy(self, job: CaptureJob, number: int) -> None:
        """Has rows of vLLM's cache stored, which this step has computed by now: see `start_load_kv`."""
        self._capture_work += job.tokens * len(self._model.layout.layers)
        try:
            with self._ranks.section():
                kv = self._capture_writer.gather(self._opener.read_pages(job))
        except Exception as error:
            self._fail(Task(job, number=number), error)
        else:
            self._capture_writer.write(number, job, kv)

    def _fail(self, task: Task, error: Exception) -> None:
        is_capture = isinstance(task.job, CaptureJob)
        what = "a chunk or a history is not stored" if is_capture else "blending failed; vLLM computes this request"
        if isinstance(error, RankFailedError | AdapterChangedError):
            logger.warning("%s: %s", what, error)
            self._give_up(task, error.reason)
        else:
            logger.error(what, exc_info=error)
            self._give_up(task, type(error).__name__)
        let_go(error)

    def _give_up(self, task: Task, reason: str, read_s: Mapping[str, float] | None = None) -> None:
        self.counts.add_fallback(reason)
        self._forget(task)
        if isinstance(task.job, CaptureJob):
            self._capture_writer.end(task.number)
        else:
            self._end_unfilled(task.job, reason, read_s)

    def _batcher_of(self, task: Task) -> PrefillBatcher[Task]:
        return self._captures if isinstance(task.job, CaptureJob) else self._blends

    def _forget(self, task: Task) -> None:
        for _ in range(0 if task.prefill is None else task.prefill.lost_reads):  # also of one that fails since
            self.counts.add_fallback(LOST_BLOCK)
        self._batcher_of(task).remove(task)
        task.close()
