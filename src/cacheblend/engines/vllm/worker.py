"""The worker side: fills the paged cache for prompts and captures chunks, a few layers in each engine step.

    start_load_kv -> step(jobs): as many layers as the budget allows; oldest job first, captures after all prompts
                      prompt: load, fuse, write each finished layer to the paged cache -> done
                      chunk:  compute alone, with its anchor in front -> store

Jobs of one kind with few rows are computed as a batch (`PrefillBatcher`).

Every rank computes the same rows in the same order; for chosen rows and lost blocks the ranks exchange their results.
"""

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.fuse.batching import LayerSteps, PrefillBatcher
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillOptions
from cacheblend.core.fuse.result import PrefillResult
from cacheblend.core.load.loader import LayerKV, LayerLoader
from cacheblend.core.plan.blocks import BlockSource, KVLayout
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.selectors import NoRows, Selector
from cacheblend.engines.vllm import compat
from cacheblend.engines.vllm.capture_writer import CaptureWriter
from cacheblend.engines.vllm.jobs import BlendJob, BlendOutcome, CaptureJob, StepJobs
from cacheblend.engines.vllm.layers import VllmLayerRunner, join
from cacheblend.engines.vllm.loading import AgreedLoader, EmptySource
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.model import BlendModel
from cacheblend.engines.vllm.paged import NULL_BLOCK, PagedLayer
from cacheblend.engines.vllm.paged_attention import PagedAttention
from cacheblend.store import KVStore

IDLE_TIMES = 2
"""How many budgets a step has in which vLLM computes nothing: no token waits for it, and each step costs some time."""

READ_AHEAD = 2  # layers
logger = logging.getLogger("cacheblend.vllm")


@dataclass(eq=False)
class _Task:
    """A job that has not finished; `prefill` is None until its first step."""

    job: BlendJob | CaptureJob
    prefill: BlendedPrefill | None = None
    started: float = 0.0
    kv: list[LayerKV] = field(default_factory=list)

    @property
    def layer(self) -> int:
        """The next layer."""
        return self.prefill.layer if self.prefill else 0

    @property
    def active_rows(self) -> int:
        """The most rows that the next layer computes."""
        return self.prefill.active_rows if self.prefill else 0

    def next_layer(self) -> LayerSteps:
        """See `BlendedPrefill.next_layer`; the task is open."""
        assert self.prefill is not None
        return self.prefill.next_layer()


class Worker:
    """The worker side of one rank.

    Args:
        model: this rank's part of the model.
        store: where stored chunks are read and written.
        planner: gives the stored chunks' codec.
        selector: the configured one; requests may have others.
        block_size: of the paged cache, in tokens.
        budget: row-layers computed in an engine step, up to a tile more; `IDLE_TIMES` as many if vLLM computes nothing.
        tile_rows: rows that go through a layer at once.
        builder: of attention metadata for the backend's own kernel (`PagedAttention`); None: attend with torch.
        sentence_end_ids: see `PrefillOptions`.
        name: of the model, for people.
    """

    def __init__(
        self,
        model: BlendModel,
        store: KVStore,
        planner: Planner,
        selector: Selector,
        *,
        block_size: int,
        budget: int,
        tile_rows: int,
        builder: Any = None,
        sentence_end_ids: npt.NDArray[np.int64] | None = None,
        name: str = "",
    ) -> None:
        self._model, self._store, self._planner = model, store, planner
        self._budget, self._block_size, self._builder = budget, block_size, builder
        self._paged = [
            PagedLayer(layer, shape.kv_heads, shape.head_dim, block_size)
            for layer, shape in zip(model.attention, model.layout.layers, strict=True)
        ]
        self._options = PrefillOptions(
            tile_rows=tile_rows,
            sentence_end_ids=sentence_end_ids,
            over_ranks=compat.over_ranks if model.tp_size > 1 else None,
        )
        alone = model.tp_size == 1
        last_check = max(selector.check_layers, default=0)
        self._blends: PrefillBatcher[_Task] = PrefillBatcher(last_check + 1, tile_rows, join, isolate=alone)
        self._captures: PrefillBatcher[_Task] = PrefillBatcher(1, tile_rows, join, isolate=alone)
        self._arrived: list[BlendJob] = []
        self._provided: set[str] = set()
        self._outcomes: dict[str, BlendOutcome] = {}
        self._failed_blocks: set[int] = set()
        self.counts = Counts()
        self._capture_writer = CaptureWriter(model, store, self.counts, name)

    # ---- an engine step ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, jobs: StepJobs) -> None:
        """Takes new jobs and computes layers, or tiles of them, until the step's budget is used; at least one tile.

        New prompts are begun in the next step, see `StepJobs.blend`.
        """
        for request_id in jobs.dropped:
            self._drop(request_id)
        for blend in self._arrived:
            self._blends.add(_Task(blend))
        self._arrived = list(jobs.blend)
        for capture in jobs.capture:
            self._captures.add(_Task(capture))
        left = self._budget * (IDLE_TIMES if jobs.is_idle else 1)
        while left > 0 and (self._blends or self._captures):
            batcher = self._blends or self._captures
            left -= self._advance(batcher, left)

    def capture(self, jobs: Sequence[CaptureJob]) -> None:
        """Computes chunks and stores them before it returns."""
        wanted = self.captured + len(jobs)
        self.step(StepJobs(capture=list(jobs)))
        while self._captures:
            self.step(StepJobs())
        while self.captured < wanted:
            time.sleep(0.001)  # the last ones are being written

    def take_provided(self) -> set[str]:
        """Requests whose prompts were completed in the paged cache since the last call."""
        provided, self._provided = self._provided, set()
        return provided

    def take_failed_blocks(self) -> set[int]:
        """Blocks of the paged cache that could not be filled since the last call: vLLM recomputes them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_outcomes(self) -> dict[str, BlendOutcome]:
        """How the prompts ended that were provided or given up since the last call."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    @property
    def is_follower(self) -> bool:
        """Another rank does the same work and reports it."""
        return self._model.tp_rank > 0

    @property
    def captured(self) -> int:
        """Chunks that need no more work since the start, whether they were stored or not."""
        return self._capture_writer.done

    def close(self) -> None:
        """Ends unfinished jobs; waits for the chunk that is being written."""
        for task in [*self._blends, *self._captures]:
            if task.prefill is not None:
                task.prefill.close()
        self._capture_writer.close()

    # ---- jobs -------------------------------------------------------------------------------------------

    def _advance(self, batcher: PrefillBatcher[_Task], most_rows: int) -> int:
        """Computes the next layer of the batch, or tiles of it that reach so many rows; returns the row-layers it took.

        A task's first step also opens it.
        """
        tasks = [task for task in batcher.next() if self._is_open(task)]
        rows = sum(task.active_rows for task in tasks)
        for task, error in batcher.advance(tasks, most_rows):
            if error is not None:
                self._fail(task, error)
            elif task.prefill is not None and task.prefill.done:
                self._attempt(task, self._finish)
        return max(batcher.rows or rows, 1)  # rows that ask the question are not among those of the batch

    def _is_open(self, task: _Task) -> bool:
        """Whether the task has a prefill; opens it on the task's first step."""
        if task.prefill is None:
            self._attempt(task, self._start)
        return task.prefill is not None

    def _attempt(self, task: _Task, what: Callable[[_Task], None]) -> None:
        try:
            what(task)
        except Exception as error:
            self._fail(task, error)

    def _fail(self, task: _Task, error: Exception) -> None:
        """Disables blending for this request only: vLLM computes it, whatever the error was."""
        if self._model.tp_size > 1:
            raise error  # the other ranks have gone on, and the ranks cannot be synchronised again
        logger.error("blending failed; vLLM computes this request", exc_info=error)
        traceback.clear_frames(error.__traceback__)  # the frames would keep tensors alive
        self._give_up(task, type(error).__name__)

    def _start(self, task: _Task) -> None:
        task.started, task.prefill = time.perf_counter(), self._open(task)

    def _give_up(self, task: _Task, reason: str) -> None:
        if task.prefill is not None:
            task.prefill.close()
        self.counts.add_fallback(reason)
        self._forget(task)
        if isinstance(task.job, CaptureJob):
            self._capture_writer.count_done()
        elif task.job.request_id not in self._provided:
            self._failed_blocks.update(task.job.block_ids[task.job.local_tokens // self._block_size :])
            self._end(task.job.request_id, BlendOutcome(failure=reason))

    def _end(self, request_id: str, outcome: BlendOutcome) -> None:
        self._provided.add(request_id)
        self._outcomes[request_id] = outcome

    def _forget(self, task: _Task) -> None:
        (self._captures if isinstance(task.job, CaptureJob) else self._blends).remove(task)

    def _open(self, task: _Task) -> BlendedPrefill:
        if isinstance(task.job, CaptureJob):
            return self._open_capture(task, task.job)
        return self._open_blend(task.job)

    def _open_blend(self, job: BlendJob) -> BlendedPrefill:
        plan, first = job.plan, job.local_tokens
        # vLLM frees blocks that a sliding window has passed: their rows are computed again here, and not written.
        resident = first > 0 and NULL_BLOCK not in job.block_ids[: first // self._block_size]
        if resident:
            plan = plan.with_resident(first)

        def held(layer: int) -> torch.Tensor:
            return self._paged[layer].read(job.block_ids, first)

        slots = self._paged[0].slots(job.block_ids, first, len(plan))
        if self._builder is not None and resident == (first > 0) and NULL_BLOCK not in job.block_ids:
            attention = PagedAttention(self._paged, self._builder, job.block_ids, first, slots)
            options = replace(self._options, on_layer=_nothing, attention=attention)
            return self._prefill(plan, self._store, job.selector, options, held)

        def write(layer: int, kv: LayerKV) -> None:
            self._paged[layer].write(kv.keys[:, first:], kv.values[:, first:], slots)

        return self._prefill(plan, self._store, job.selector, replace(self._options, on_layer=write), held)

    def _open_capture(self, task: _Task, job: CaptureJob) -> BlendedPrefill:
        prompt = Prompt.of([text(part) for part in (*job.chunk.anchor, job.chunk.token_ids)])
        plan = job.planner.plan(prompt, EmptySource())
        options = replace(self._options, on_layer=lambda layer, kv: task.kv.append(kv))
        return self._prefill(plan, EmptySource(), NoRows(), options)

    def _prefill(
        self,
        plan: BlendPlan,
        source: BlockSource,
        selector: Selector,
        options: PrefillOptions,
        resident: Callable[[int], torch.Tensor] | None = None,
    ) -> BlendedPrefill:
        model = self._model

        def open_runner(plan: BlendPlan) -> VllmLayerRunner:
            ids = torch.from_numpy(plan.prompt.token_ids.astype("i8"))[plan.prefix_length :]
            positions = torch.arange(plan.prefix_length, len(plan))
            return VllmLayerRunner(model, ids.to(model.device), positions.to(model.device))

        def open_loader(plan: BlendPlan, first_reused_layer: int) -> LayerLoader:
            kind = LayerLoader if model.tp_size == 1 else AgreedLoader
            return kind(
                plan,
                source,
                model.layout,
                model.rotations,
                first_reused_layer=first_reused_layer,
                device=model.device,
                read_ahead=READ_AHEAD,
                heads=model.heads,
                codec=self._planner.codec,
                resident=resident,
            )

        return BlendedPrefill(plan, open_runner, open_loader, selector, options)

    def _finish(self, task: _Task) -> None:
        assert task.prefill is not None
        task.prefill.close()
        if isinstance(task.job, CaptureJob):
            self._capture_writer.write(task.job, task.kv)
        else:
            result, seconds = task.prefill.result(), time.perf_counter() - task.started
            outcome = outcome_of(result, task.job.local_tokens, self._model.layout, seconds)
            self.counts.add_blend(outcome, result)
            self._end(task.job.request_id, outcome)
        self._forget(task)

    def _drop(self, request_id: str) -> None:
        """Stops work on a request that ended, and reports it as provided, so that vLLM frees its blocks."""
        for job in self._arrived:
            if job.request_id == request_id:
                self._arrived.remove(job)
                self._provided.add(request_id)
        for task in self._blends:
            if isinstance(task.job, BlendJob) and task.job.request_id == request_id:
                self._blends.remove(task)
                if task.prefill is not None:
                    task.prefill.close()
                self._provided.add(request_id)


def outcome_of(result: PrefillResult, local_tokens: int, layout: KVLayout, seconds: float) -> BlendOutcome:
    """The outcome of a prompt that was provided.

    Args:
        result: of its prefill.
        local_tokens: leading tokens that vLLM's own prefix cache held.
        layout: of the model.
        seconds: see `BlendOutcome`.
    """
    hits, report = result.plan.hit_tokens(), result.report
    local = min(local_tokens, hits["prefix"])  # 0 if a lost block forced all of them to be computed
    by_source = {**hits, "vllm": local, "prefix": hits["prefix"] - local}
    return BlendOutcome(
        hit_tokens={source: count for source, count in by_source.items() if count},
        recomputed_tokens=report.recomputed_tokens,
        row_layers=report.row_layers,
        prefill_share=report.row_layers / (len(result.plan) * len(layout.layers)),
        seconds=seconds,
        read_s=result.read_s,
    )


def _nothing(layer: int, kv: LayerKV) -> None:
    """Does nothing: the layer was written to the paged cache during attention."""
