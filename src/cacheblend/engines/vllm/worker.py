"""The workers' side: provides prompts and captures chunks, some layers an engine step.

    start_load_kv -> step(jobs): as many layers as the budget allows; oldest first, captures behind all prompts
                      prompt: load, fuse, write each finished layer to the paged cache -> done
                      chunk:  compute alone behind its anchor -> store

Jobs of a kind go through their layers side by side where they have few rows (`PrefillBatcher`).

Every rank does the same rows in the same order; where ranks must agree (chosen rows, lost blocks), they are asked.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.errors import BlockLostError, StoreError
from cacheblend.core.fuse.batching import PrefillBatcher, run_together
from cacheblend.core.fuse.prefill import OnLayer, PrefillRun
from cacheblend.core.load.capture import ChunkJob, blocks_of, manifest_of
from cacheblend.core.load.loader import LayerKV, LayerLoader
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, BlockSource
from cacheblend.core.plan.plan import RESIDENT, BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.selectors import NoRows, Selector
from cacheblend.engines.vllm import compat
from cacheblend.engines.vllm.jobs import BlendJob, StepJobs
from cacheblend.engines.vllm.layers import VllmLayerRunner, join
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.model import BlendModel
from cacheblend.engines.vllm.paged import NULL_BLOCK, PagedLayer
from cacheblend.engines.vllm.paged_attention import PagedAttention
from cacheblend.store import KVStore

PAUSE_S = 60  # behind a store that cannot take a chunk
READ_AHEAD = 2  # layers
logger = logging.getLogger("cacheblend.vllm")


@dataclass(eq=False)
class _Task:
    """A job under way; `run` is None until its first step."""

    job: BlendJob | ChunkJob
    run: PrefillRun | None = None
    started: float = 0.0
    kv: list[LayerKV] = field(default_factory=list)

    @property
    def layer(self) -> int:
        """The next layer."""
        return self.run.layer if self.run else 0

    @property
    def active_rows(self) -> int:
        """Rows that the next layer computes at most."""
        return self.run.active_rows if self.run else 0


class Worker:
    """One rank's.

    Args:
        model: its part of the model.
        store: where chunks lie.
        planner: names blocks; captures are planned by it.
        selector: which loaded rows are recomputed.
        block_size: of the paged cache.
        budget: row-layers of an engine step.
        tile_rows: rows that go through a layer at once.
        builder: of attention metadata, where the backend's own kernel is to attend (`PagedAttention`); None: torch's.
        sentence_end_ids: see `FusedPrefill`.
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
        self._model, self._store, self._planner, self._selector = model, store, planner, selector
        self._budget, self._tile_rows, self._sentence_end_ids = budget, tile_rows, sentence_end_ids
        self._name, self._block_size, self._builder = name, block_size, builder
        self._paged = [
            PagedLayer(layer, shape.kv_heads, shape.head_dim, block_size)
            for layer, shape in zip(model.attention, model.layout.layers, strict=True)
        ]
        self._over_ranks = compat.over_ranks if model.tp_size > 1 else None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-writer")
        last_check = max(selector.check_layers, default=0)
        self._blends: PrefillBatcher[_Task] = PrefillBatcher(last_check + 1, tile_rows)
        self._captures: PrefillBatcher[_Task] = PrefillBatcher(1, tile_rows)
        self._provided: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._resume_at = 0.0
        self._captured, self._captured_lock = 0, threading.Lock()
        self.counts = Counts()

    # ---- an engine step ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, jobs: StepJobs) -> None:
        """Takes what is new, and works for as long as the step's budget lasts; at least a layer."""
        for request_id in jobs.dropped:
            self._drop(request_id)
        for blend in jobs.blend:
            self._blends.add(_Task(blend))
        for capture in jobs.capture:
            self._captures.add(_Task(capture))
        left = self._budget
        while left > 0 and (self._blends or self._captures):
            batcher = self._blends or self._captures
            left -= self._advance(batcher.next())

    def capture(self, jobs: Sequence[ChunkJob]) -> None:
        """Chunks, computed and stored before this returns."""
        wanted = self._captured + len(jobs)
        self.step(StepJobs(capture=list(jobs)))
        while self._captures:
            self.step(StepJobs())
        while self._captured < wanted:
            time.sleep(0.001)  # the last ones are being written

    def take_provided(self) -> set[str]:
        """Requests whose prompts stand in the paged cache since the last call."""
        provided, self._provided = self._provided, set()
        return provided

    def take_failed_blocks(self) -> set[int]:
        """Blocks of the paged cache that could not be provided since the last call: vLLM computes them anew."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @property
    def is_follower(self) -> bool:
        """Another rank does the same and tells of it."""
        return self._model.tp_rank > 0

    @property
    def captured(self) -> int:
        """Chunks that are done with, stored or not, since the start."""
        return self._captured

    def close(self) -> None:
        """Gives up what is under way; waits for what is being written."""
        for task in [*self._blends, *self._captures]:
            if task.run is not None:
                task.run.close()
        self._writer.shutdown(wait=True, cancel_futures=True)

    # ---- jobs -------------------------------------------------------------------------------------------

    def _advance(self, tasks: Sequence[_Task]) -> int:
        """One layer of each; the row-layers it took. The first one also finds what to load and asks the question."""
        opened = [task for task in tasks if self._is_open(task)]
        runs = [task.run for task in opened if task.run is not None]
        rows = sum(run.active_rows for run in runs)
        steps = [run.next_layer() for run in runs]
        ended = run_together(steps, join, self._tile_rows, isolate=self._over_ranks is None)
        for task, run, error in zip(opened, runs, ended, strict=True):
            if error is not None:
                self._fail(task, error)
            elif run.done:
                self._attempt(task, self._finish)
        return max(rows, 1)

    def _is_open(self, task: _Task) -> bool:
        """Whether it is under way; its first step makes it so."""
        if task.run is None:
            self._attempt(task, self._start)
        return task.run is not None

    def _attempt(self, task: _Task, what: Callable[[_Task], None]) -> None:
        try:
            what(task)
        except Exception as error:
            self._fail(task, error)

    def _fail(self, task: _Task, error: Exception) -> None:
        """Whatever it is, the engine goes on: this request is computed by vLLM."""
        if self._over_ranks is not None:
            raise error  # ranks that are out of step cannot be brought together again
        logger.error("a blend failed and is left to vLLM", exc_info=error)
        traceback.clear_frames(error.__traceback__)  # which would keep its tensors
        self._give_up(task, type(error).__name__)

    def _start(self, task: _Task) -> None:
        task.started, task.run = time.perf_counter(), self._open(task)

    def _give_up(self, task: _Task, reason: str) -> None:
        if task.run is not None:
            task.run.close()
        self.counts.add_fallback(reason)
        self._forget(task)
        if isinstance(task.job, ChunkJob):
            self._count_captured()
        elif task.job.request_id not in self._provided:
            self._failed_blocks.update(task.job.block_ids[task.job.local_tokens // self._block_size :])
            self._provided.add(task.job.request_id)

    def _forget(self, task: _Task) -> None:
        (self._captures if isinstance(task.job, ChunkJob) else self._blends).remove(task)

    def _count_captured(self) -> None:
        with self._captured_lock:
            self._captured += 1

    def _open(self, task: _Task) -> PrefillRun:
        if isinstance(task.job, ChunkJob):
            return self._open_capture(task, task.job)
        return self._open_blend(task.job)

    def _open_blend(self, job: BlendJob) -> PrefillRun:
        plan, first = job.plan, job.local_tokens
        # Behind a sliding window vLLM gives blocks back: then what stood there is provided once more, and not written.
        resident = first > 0 and NULL_BLOCK not in job.block_ids[: first // self._block_size]
        if resident:
            plan = plan.with_resident(first)

        def held(layer: int) -> torch.Tensor:
            return self._paged[layer].read(job.block_ids, first)

        slots = self._paged[0].slots(job.block_ids, first, len(plan))
        if self._builder is not None and resident == (first > 0) and NULL_BLOCK not in job.block_ids:
            attention = PagedAttention(self._paged, self._builder, job.block_ids, first, slots)
            return self._run(plan, self._store, self._selector, _nothing, resident=held, attention=attention)

        def write(layer: int, kv: LayerKV) -> None:
            self._paged[layer].write(kv.keys[:, first:], kv.values[:, first:], slots)

        return self._run(plan, self._store, self._selector, write, resident=held)

    def _open_capture(self, task: _Task, job: ChunkJob) -> PrefillRun:
        prompt = Prompt.of([text(part) for part in (*job.anchor, job.token_ids)])
        plan = self._planner.plan(prompt, _Nothing())
        return self._run(plan, _Nothing(), NoRows(), lambda layer, kv: task.kv.append(kv))

    def _run(
        self,
        plan: BlendPlan,
        source: BlockSource,
        selector: Selector,
        on_layer: OnLayer,
        *,
        resident: Callable[[int], torch.Tensor] | None = None,
        **options: Any,
    ) -> PrefillRun:
        model = self._model

        def open_runner(plan: BlendPlan) -> VllmLayerRunner:
            ids = torch.from_numpy(plan.prompt.token_ids.astype("i8"))[plan.prefix_length :]
            positions = torch.arange(plan.prefix_length, len(plan))
            return VllmLayerRunner(model, ids.to(model.device), positions.to(model.device))

        def open_loader(plan: BlendPlan, first_reused_layer: int) -> LayerLoader:
            kind = LayerLoader if model.tp_size == 1 else _AgreedLoader
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

        return PrefillRun(
            plan,
            open_runner,
            open_loader,
            selector,
            over_ranks=self._over_ranks,
            tile_rows=self._tile_rows,
            sentence_end_ids=self._sentence_end_ids,
            on_layer=on_layer,
            **options,
        )

    def _finish(self, task: _Task) -> None:
        assert task.run is not None
        task.run.close()
        if isinstance(task.job, ChunkJob):
            self._keep(task.job, task.kv)
        else:
            self.counts.add_blend(task.run.result(), task.job.local_tokens, time.perf_counter() - task.started)
            self._provided.add(task.job.request_id)
        self._forget(task)

    def _keep(self, job: ChunkJob, kv: Sequence[LayerKV]) -> None:
        """Stores a captured chunk behind the engine's back: all ranks' heads, written by the first."""
        if self._model.tp_size > 1:
            kv = [self._all_heads(layer) for layer in kv]
        if self._model.tp_rank or time.monotonic() < self._resume_at:
            self._count_captured()
            return
        self._writer.submit(self._write, job, blocks_of(job, self._planner, kv))

    def _write(self, job: ChunkJob, blocks: Sequence[Block]) -> None:
        try:
            for block in blocks:
                self._store.write(block)
            self._store.put_manifest(manifest_of(job, self._planner, self._name))
            self.counts.add("captured_tokens", len(job.token_ids))
        except StoreError as error:
            self._resume_at = time.monotonic() + PAUSE_S
            self.counts.add_fallback("store write")
            logger.warning("missed chunks are not stored for %d s: %s", PAUSE_S, error)
        except Exception:
            logger.exception("a missed chunk is not stored")
        finally:
            self._count_captured()

    def _all_heads(self, kv: LayerKV) -> LayerKV:
        """Of replicated heads one each."""
        copies = max(1, self._model.tp_size // self._model.total_kv_heads)
        keys, values = (compat.gather_heads(part)[::copies] for part in kv)
        return LayerKV(keys, values)

    def _drop(self, request_id: str) -> None:
        """A request that ended is reported as provided, so that vLLM frees its blocks, and not worked on any more."""
        for task in self._blends:
            if isinstance(task.job, BlendJob) and task.job.request_id == request_id:
                self._blends.remove(task)
                if task.run is not None:
                    task.run.close()
                self._provided.add(request_id)


def _nothing(layer: int, kv: LayerKV) -> None:
    """A layer that is in the paged cache already."""


class _Nothing:
    """A source that holds nothing: a chunk to be captured is computed whole."""

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [None] * len(names)

    def read_many(
        self, names: Sequence[BlockName], layer: int, heads: slice | None = None
    ) -> list[torch.Tensor | BlockLostError]:
        return [BlockLostError([name], "nothing is held here") for name in names]


class _AgreedLoader(LayerLoader):
    """A loader whose layers all ranks have, or none: a rank that went on alone would wait for the others for ever."""

    def layer(self, index: int) -> LayerKV:
        """See `LayerLoader.layer`; where any rank lost a block, all of them lost all."""
        known, lost, kv = index in self._given, "", None
        try:
            kv = super().layer(index)
        except Exception as error:  # of whatever kind: the others must hear of it
            lost = f"{type(error).__name__}: {error}"
        if known and kv is not None:
            return kv
        flag = torch.tensor([float(bool(lost))], device=self._device)
        if float(compat.over_ranks(flag, "max")) or kv is None:
            names = list({span.name for span in self._plan.spans if span.name != RESIDENT})
            raise BlockLostError(names, lost or f"layer {index}: another rank lost a block")
        return kv
