"""Opens prefills on a transformers model: plan, loading decision, layer runner and loader. Knows no decoding."""

import time
from collections.abc import Callable
from dataclasses import replace
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
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import AllRows, NoRows, Selector
from cacheblend.engines.cost_model import controller_of, floor_of, read_cost_model
from cacheblend.engines.hf.compiling import compile_layers
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.survey import Survey
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
            decision = self.controller.decide(plan)
            plan = plan.leaving_out(decision.left_out)
            if decision.ratio > floor_of(self._config):
                selector = raised(decision.ratio)
        chosen = NoRows() if mode == "reuse" else selector
        self._survey.check_selector(chosen)
        options = self._options(chosen, decision)
        return BlendedPrefill(plan, self._open_runner, self.open_loader, chosen, options, started=started)

    def open_full(self, prompt: Prompt, planner: Planner, last_rows: int) -> BlendedPrefill:
        """A full prefill for its logits alone: asks the store for nothing, and keeps the KV of one layer at a time.

        Args:
            prompt: of plain text.
            planner: any tenant's.
            last_rows: see `PrefillOptions`.
        """
        options = replace(self._options(AllRows(), None), last_rows=last_rows, on_layer=lambda layer, kv: None)
        plan = planner.plan(prompt, EmptySource())
        return BlendedPrefill(plan, self._open_runner, self.open_loader, AllRows(), options)

    def open_loader(self, plan: BlendPlan, first_reused_layer: int) -> LayerLoader:
        """Opens a loader for the plan; see `LayerLoader`."""
        return LayerLoader(
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

    def _open_runner(self, plan: BlendPlan) -> HfLayerRunner:
        first = plan.prefix_length
        ids, positions = upload_together([plan.prompt.token_ids[first:], np.arange(first, len(plan))], self.device)
        return HfLayerRunner(self._view, ids, positions)

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
