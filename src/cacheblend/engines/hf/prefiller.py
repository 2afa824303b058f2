"""Opens prefills on a transformers model: plan, loading decision, layer runner and loader. Knows no decoding."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.cost.controller import Controller, Decision
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillOptions
from cacheblend.core.fuse.result import PrefillResult
from cacheblend.core.kernels.operations import serve
from cacheblend.core.kernels.upload import upload_together
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.blocks import EmptySource, KVLayout
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import AllRows, NoRows, Selector
from cacheblend.engines.cost_model import controller_of, floor_of, read_cost_model
from cacheblend.engines.hf.compiling import compile_layers
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.recurrent import LayerKinds
from cacheblend.engines.hf.resuming import Resuming
from cacheblend.engines.hf.sparse_loader import open_loader_of
from cacheblend.engines.hf.survey import Survey
from cacheblend.engines.hf.thread_count import ThreadCount
from cacheblend.engines.hf.view import ModelView
from cacheblend.store import KVStore

Mode = Literal["blend", "reuse", "prefix", "full"]
"""Which stored KV is used: all, with the selector's rows recomputed (``blend``); all, with no rows recomputed
(``reuse``); only the exact prefix (``prefix``); none (``full``)."""


class Prefiller:
    """Opens prefills on one model and one store.

    Args:
        view: view of the model.
        survey: survey of the model.
        store: the store to load KV from.
        config: the blend configuration.
        controller: decides which stored blocks are loaded; None: all of them.
        device: the model's device.
        sentence_end_ids: returns the ids of the tokens that end a sentence; called if a selector uses the question.
    """

    def __init__(
        self,
        view: ModelView,
        survey: Survey,
        store: KVStore,
        config: BlendConfig,
        controller: Controller | None,
        device: torch.device,
        sentence_end_ids: Callable[[], npt.NDArray[np.int64] | None],
    ) -> None:
        self._view, self._survey, self._store, self._config = view, survey, store, config
        self.controller, self.device, self._sentence_end_ids = controller, device, sentence_end_ids
        serve(device, survey.layout.dtype, survey.head_shapes)
        if config.compile_layers:
            compile_layers(view, device)

    @property
    def kinds(self) -> LayerKinds:
        """Which of the model's layers have attention, and which keep a state."""
        return self._survey.kinds

    @property
    def threads(self) -> ThreadCount:
        """How many threads compute a layer."""
        return self._view.threads

    def of_view(self, view: ModelView, survey: Survey) -> "Prefiller":
        """The same for another view of the model."""
        return Prefiller(view, survey, self._store, self._config, self.controller, self.device, self._sentence_end_ids)

    def open(
        self,
        prompt: Prompt,
        planner: Planner,
        selector: Selector,
        mode: Mode = "blend",
        *,
        raised: Callable[[float], Selector] | None = None,
    ) -> BlendedPrefill:
        """Plans a prompt's prefill without starting it.

        Args:
            prompt: a prompt that was checked against the model's limits.
            planner: the tenant's planner.
            selector: chooses the loaded rows to recompute.
            mode: see `Mode`.
            raised: makes the selector for a higher ratio. If given, the loading controller (if any) decides.
        """
        started = time.perf_counter()
        plan = plan_in_mode(planner.plan(prompt, self._store), mode)
        decision = None
        if self.controller is not None and raised is not None and mode == "blend":
            in_force = selector.share if selector.share is not None else floor_of(self._config)
            decision = self.controller.decide(plan, in_force)
            plan = plan.leaving_out(decision.left_out)
            if decision.ratio > in_force:
                selector = raised(decision.ratio)
        chosen = NoRows() if mode == "reuse" else selector
        options = self._options(chosen, decision)
        return self._begin(plan, self._survey.fit_selector(chosen), options, started, named=chosen)

    def open_full(self, prompt: Prompt, planner: Planner, last_rows: int) -> BlendedPrefill:
        """A full prefill for its logits alone: asks the store for nothing, and keeps the KV of one layer at a time.

        Args:
            prompt: of plain text.
            planner: any tenant's.
            last_rows: see `PrefillOptions`.
        """
        options = replace(self._options(AllRows(), None), last_rows=last_rows, on_layer=lambda layer, kv: None)
        return self._begin(planner.plan(prompt, EmptySource()), AllRows(), options)

    def open_alone(self, prompt: Prompt, planner: Planner) -> BlendedPrefill:
        """A full prefill that keeps everything: KV, and snapshots of recurrent layers.

        Args:
            prompt: an anchor and a chunk.
            planner: the tenant's.
        """
        return self._begin(planner.plan(prompt, EmptySource()), AllRows(), self._options(AllRows(), None))

    def open_loader(self, plan: BlendPlan, first_reused_layer: int) -> LayerLoader:
        """Opens a loader for the plan; see `LayerLoader`. Layers are the model's."""
        return open_loader_of(
            self._survey.kinds,
            plan,
            self._store,
            self._survey.layout,
            self._survey.rotations,
            first_reused_layer=first_reused_layer,
            device=self.device,
            read_ahead=self._config.read_ahead,
            codec=self._config.codec,
        )

    def synchronize(self) -> None:
        """Waits for the device, so that times measured afterwards are correct."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _begin(
        self,
        plan: BlendPlan,
        selector: Selector,
        options: PrefillOptions,
        started: float | None = None,
        named: Selector | None = None,
    ) -> BlendedPrefill:
        """`named`: the selector as settings name it, for the report."""
        begin = partial(BlendedPrefill, started=started, named=named)
        if not self._survey.kinds.has_other_layers:
            return begin(plan, self._open_runner, self.open_loader, selector, options)
        exact, a_token = codec_of(self._config.codec).is_exact, self._survey.layout.block_bytes(1)
        resuming = Resuming(self._survey.kinds, self._store, self.device, a_token, chunks=exact)
        tile_rows = len(plan) if self._survey.kinds.stepped else options.tile_rows
        options = replace(options, recurrence=resuming, tile_rows=tile_rows)
        opens = partial(self._open_runner, resuming=resuming)
        return begin(plan, opens, self.open_loader, selector, options)

    def _open_runner(self, plan: BlendPlan, resuming: Resuming | None = None) -> HfLayerRunner:
        first = plan.prefix_length
        ids, positions = upload_together([plan.prompt.token_ids[first:], np.arange(first, len(plan))], self.device)
        if resuming is None:
            return HfLayerRunner(self._view, ids, positions)
        return HfLayerRunner(self._view, ids, positions, resuming.states, resuming.row_cuts())

    def _options(self, selector: Selector, decision: Decision | None) -> PrefillOptions:
        return PrefillOptions(
            tile_rows=self._config.tile_rows,
            sentence_end_ids=self._sentence_end_ids() if selector.question_rows else None,
            synchronize=self.synchronize,
            on_result=None if decision is None else lambda result, alone: self._learn(decision, result, alone),
        )

    def _learn(self, decision: Decision, result: PrefillResult, alone: bool) -> None:
        """Reports the measured times to the controller, unless lost blocks made the pass differ from its decision."""
        result.report.decision = decision.reason
        if self.controller is not None and not result.report.fallbacks:
            compute_s = result.report.compute_s if alone else None
            self.controller.learn(decision, result.plan, compute_s, result.read_s)


def controller_for(config: BlendConfig, fingerprint: str, stored: KVLayout, device: torch.device) -> Controller | None:
    """The loading controller for a configuration; None if it names no cost model.

    Raises:
        InvalidInputError: the cost model cannot be read, or was measured with another model, codec or device type.
    """
    if config.cost_model is None:
        return None
    return controller_of(read_cost_model(config.cost_model, fingerprint, stored, device.type), config, stored)


def plan_in_mode(plan: BlendPlan, mode: Mode) -> BlendPlan:
    """The plan without the blocks that the mode does not use."""
    if mode == "prefix":
        return plan.exact_only()
    if mode == "full":
        return plan.leaving_out(frozenset(s.name for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)))
    return plan
