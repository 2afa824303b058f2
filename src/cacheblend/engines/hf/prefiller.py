"""Opens prefills on a transformers model: plan, loading decision, layer runner and loader. Knows no decoding."""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.cost.controller import GIVEN_UP, Controller, Decision
from cacheblend.core.failures import count_failure
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillOptions, PrefillResult
from cacheblend.core.kernels.operations import serve
from cacheblend.core.kernels.upload import upload_together
from cacheblend.core.load.budget import LOOK_UP, BudgetedSource, LateTiers, LoadBudget
from cacheblend.core.load.layer_kv import LayerCache, LayerKV
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.names import BlockName
from cacheblend.core.openmp import end_team
from cacheblend.core.plan.blocks import BlockSource, EmptySource, KVLayout
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.selectors import AllRows, NoRows, Selector
from cacheblend.engines.hf.ambient import without_ambient
from cacheblend.engines.hf.layer_graphs import CudaRecorder, graphed_layers
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.recurrent import LayerKinds, Resuming
from cacheblend.engines.hf.survey import Survey
from cacheblend.engines.hf.thread_count import ThreadCount
from cacheblend.engines.histories import plan_of_held
from cacheblend.store import KVStore


class SparseLoader(LayerLoader):
    """A `LayerLoader` whose layers are numbered as the model's. Layers without attention have KV of no heads. `layout`
    and `rotations` are those of the layers with attention, `first_reused_layer` is one of the model's."""

    def __init__(
        self,
        kinds: LayerKinds,
        plan: BlendPlan,
        source: BlockSource,
        layout: KVLayout,
        rotations: Any,
        *,
        first_reused_layer: int,
        **options: Any,
    ) -> None:
        self._numbers = {layer: number for number, layer in enumerate(kinds.kv_layers)}
        reused = sum(layer < first_reused_layer for layer in kinds.kv_layers)
        super().__init__(plan, source, layout, rotations, first_reused_layer=reused, **options)
        nothing = torch.zeros(0, len(plan), 0, dtype=layout.dtype, device=self._device)
        self._nothing = LayerKV(nothing, nothing)

    def layer(self, index: int) -> LayerCache:
        number = self._numbers.get(index)
        return self._nothing if number is None else super().layer(number)

    def awaited(self, index: int) -> "Future[Any] | None":
        """See `LayerLoader`. In front of a layer without attention the next one is read ahead."""
        number = self._numbers.get(index)
        if number is not None:
            return super().awaited(number)
        if (following := next((n for layer, n in self._numbers.items() if layer > index), None)) is not None:
            super().awaited(following)
        return None

    def release(self, index: int) -> None:
        if (number := self._numbers.get(index)) is not None:
            super().release(number)


class Pace:
    """Seconds of rows times layers. Short passes count less than long ones, which use a device better."""

    def __init__(self) -> None:
        self._row_layers = self._seconds = 0.0

    def learn(self, row_layers: int, seconds: float) -> None:
        """A pass computed so many rows times layers in so many seconds; what was learnt before counts less."""
        if row_layers > 0 and seconds > 0:
            self._row_layers = 0.8 * self._row_layers + row_layers
            self._seconds = 0.8 * self._seconds + seconds

    def seconds(self, row_layers: int) -> float | None:
        """How long so many take; None: no pass has been computed."""
        return row_layers * self._seconds / self._row_layers if self._row_layers else None


THREADS = 16  # that ask the store. When all hang in it, further prompts wait for one as long as their budget lasts
CLOSE_S = 5.0  # seconds that `close` waits for calls of the store that are under way
UNMEASURED = "pace"  # the model's pace could not be measured; see `failures`
PACE_ROWS = 256  # rows by which the model's pace is measured before a prompt has been computed
logger = logging.getLogger("cacheblend.engine")
Mode = Literal["blend", "reuse", "prefix", "full"]
"""Which stored KV is used: all, with the selector's rows recomputed (``blend``); all, with no rows recomputed
(``reuse``); only the exact prefix (``prefix``); none (``full``)."""


@without_ambient
class HfPrefill(BlendedPrefill):
    """A prefill that is advanced by whoever has it, inside of whatever settings of PyTorch."""

    def __init__(self, threads: ThreadCount, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._thread_count = threads

    def run(self) -> PrefillResult:
        try:
            for _ in self.slices(1):
                pass
            return self.result()
        finally:
            end_team()

    def slices(self, row_layers: int) -> Iterator[None]:
        """Computes all layers, as many at a time as have about so many rows, but at least one."""
        while not self.done:
            with self._thread_count.held():
                self.advance(max(1, row_layers // max(1, self.active_rows)))
            yield


class Prefiller:
    """Opens prefills on one model and one store. A `controller` decides which stored blocks are loaded; None: all of
    them. `sentence_end_ids` is called if a selector uses the question. `late_tiers` are passed over for a while."""

    def __init__(
        self,
        survey: Survey,
        store: KVStore,
        config: BlendConfig,
        controller: Controller | None,
        device: torch.device,
        sentence_end_ids: Callable[[], npt.NDArray[np.int64] | None],
    ) -> None:
        self._survey, self._store, self._config = survey, store, config
        self.controller, self.device, self._sentence_end_ids = controller, device, sentence_end_ids
        self._threads, self._pace = DaemonPool(THREADS, "cacheblend-reader"), Pace()
        self.late_tiers = LateTiers()
        serve(device, survey.layout.dtype, layers=zip(survey.head_shapes, survey.rotations, strict=True))
        if config.layer_graphs and device.type == "cuda":
            survey.view.run_as(graphed_layers(survey.view.layers, CudaRecorder(device)))

    def of(self, survey: Survey) -> "Prefiller":
        """The same for the model with other adapters or weights."""
        same = Prefiller(survey, self._store, self._config, self.controller, self.device, self._sentence_end_ids)
        same._threads, same._pace, same.late_tiers = self._threads, self._pace, self.late_tiers
        return same

    def close(self) -> None:
        """Ends the threads that ask the store; waits some seconds for calls that are under way."""
        self._threads.close()
        self._threads.join(CLOSE_S)

    def open(
        self,
        prompt: Prompt,
        planner: Planner,
        selector: Selector,
        mode: Mode = "blend",
        *,
        raised: Callable[[float], Selector] | None = None,
        moved: Callable[[float], Selector] | None = None,
        match: Callable[[Prompt, Collection[BlockName]], Prompt] = lambda asked, lost: asked,
    ) -> HfPrefill:
        """Plans the prefill of a checked prompt without starting it. `raised` makes the selector for a higher ratio; if
        it is given, the loading controller (if any) decides. `moved` is that of prompts of which nothing else is loaded
        than moved runs; None: the same. `match`: see `plan_of_held`."""
        started = time.perf_counter()
        budget = LoadBudget(
            self._config.load_timeout_s, lambda: self._compute_s(len(prompt), planner), late_tiers=self.late_tiers
        )
        plan, decision = plan_of_held(prompt, lambda each: self._look_up(each, planner, budget), match), None
        if mode == "prefix":
            plan = plan.exact_only()
        elif mode == "full":
            plan = plan.leaving_out(frozenset(s.name for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)))
        if moved is not None and plan.is_moved:
            selector, raised = moved(0.0), moved
        if self.controller is not None and raised is not None and mode == "blend":
            in_force = selector.share if selector.share is not None else self._config.selection.final_ratio
            decision = self.controller.decide(plan, in_force)
            plan = plan.leaving_out(decision.left_out)
            if decision.ratio > in_force:
                selector = raised(decision.ratio)
        chosen = NoRows() if mode == "reuse" else selector
        budget.measured_by(lambda: self._compute_s(len(plan.stored_rows), planner))
        options = self._options(chosen, decision, budget)
        return self._begin(plan, self._survey.fit_selector(chosen), options, started, named=chosen)

    def _look_up(self, prompt: Prompt, planner: Planner, budget: LoadBudget) -> BlendPlan:
        source = BudgetedSource(self._store, budget, self._threads)
        plan = planner.plan(prompt, source)
        if source.is_late:  # who knows what is stored: nothing is captured
            return plan.leaving_out("all")
        self.late_tiers.answered([LOOK_UP])
        stored = [span for span in plan.spans if span.source in (Source.PREFIX, Source.LOADED)]
        late = {tier for tier in {span.tier for span in stored} if budget.skips("loading", tier)}
        return plan.leaving_out(frozenset(span.name for span in stored if span.tier in late)) if late else plan

    def open_full(self, prompt: Prompt, planner: Planner, last_rows: int) -> HfPrefill:
        """A full prefill of plain text for its last rows' logits: asks no store, and keeps one layer's KV at a time."""
        options = replace(self._options(AllRows()), last_rows=last_rows, on_layer=lambda layer, kv: None)
        return self._begin(planner.plan(prompt, EmptySource()), AllRows(), options)

    def open_alone(self, prompt: Prompt, planner: Planner) -> HfPrefill:
        """A full prefill of an anchor and a chunk that keeps everything: KV, and snapshots of recurrent layers."""
        return self._begin(planner.plan(prompt, EmptySource()), AllRows(), self._options(AllRows()))

    def open_loader(self, plan: BlendPlan, first_reused_layer: int, budget: LoadBudget | None = None) -> LayerLoader:
        """Opens a loader for the plan; see `LayerLoader`. Layers are the model's. No budget: no bound."""
        kinds, has_all = self._survey.kinds, len(self._survey.kinds.kv_layers) == self._survey.num_layers
        opens: Callable[..., LayerLoader] = LayerLoader if has_all else partial(SparseLoader, kinds)
        return opens(
            plan,
            self._store,
            self._survey.layout,
            self._survey.rotations,
            first_reused_layer=first_reused_layer,
            device=self.device,
            read_ahead=self._config.read_ahead,
            codec=self._config.codec,
            budget=budget,
            threads=None if budget is None else self._threads,
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
    ) -> HfPrefill:
        """`named`: the selector as settings name it, for the report."""
        open_loader, kinds, resuming = partial(self.open_loader, budget=options.budget), self._survey.kinds, None
        if kinds.has_other_layers:
            exact, a_token = codec_of(self._config.codec).is_exact, self._survey.layout.block_bytes(1)
            source = BudgetedSource(self._store, options.budget, self._threads)
            resuming = Resuming(kinds, source, self.device, a_token, chunks=exact)
            tile_rows = len(plan) if kinds.stepped else options.tile_rows
            options = replace(options, recurrence=resuming, tile_rows=tile_rows)
        open_runner = partial(self._open_runner, resuming=resuming)
        threads = self._survey.view.threads
        return HfPrefill(threads, plan, open_runner, open_loader, selector, options, started=started, named=named)

    def _open_runner(self, plan: BlendPlan, resuming: Resuming | None) -> HfLayerRunner:
        first, view = plan.prefix_length, self._survey.view
        ids, positions = upload_together([plan.prompt.token_ids[first:], np.arange(first, len(plan))], self.device)
        if resuming is None:
            return HfLayerRunner(view, ids, positions)
        return HfLayerRunner(view, ids, positions, resuming.states, [cut - first for cut in resuming.cuts(plan)])

    def _options(
        self, selector: Selector, decision: Decision | None = None, budget: LoadBudget | None = None
    ) -> PrefillOptions:
        on_result = None  # a pass without a budget is computed in pieces, between others: its times say little
        if budget is not None:
            on_result = partial(self._learn, decision, budget)
        return PrefillOptions(
            tile_rows=self._config.tile_rows,
            sentence_end_ids=self._sentence_end_ids() if selector.question_rows else None,
            synchronize=self.synchronize,
            budget=budget or LoadBudget(),
            on_result=on_result,
        )

    def _learn(self, decision: Decision | None, budget: LoadBudget, result: PrefillResult, alone: bool) -> None:
        """Takes the measured times, and reports them to the controller unless lost blocks made the pass differ from its
        decision; of tiers that were too slow, that they took as long as was waited for them at least."""
        report = result.report
        self.late_tiers.answered(result.read_s.keys() - budget.late.keys())
        compute_s = report.compute_s if alone else None
        if compute_s is not None and not budget.late and not report.fallbacks:  # else it has waited, too
            self._pace.learn(report.row_layers, compute_s)
        if decision is None:
            return
        report.decision, result.slow = decision.reason, decision.left_out
        if self.controller is not None and budget.late:
            expected, late = decision.load_s, {tier: s for tier, s in budget.late.items() if tier != LOOK_UP}
            observed = {tier: (GIVEN_UP * max(seconds, expected), expected) for tier, seconds in late.items()}
            self.controller.observe(decision, None, observed)
        elif self.controller is not None and not report.fallbacks:
            self.controller.learn(decision, result.plan, compute_s, result.read_s)

    def _compute_s(self, tokens: int, planner: Planner) -> float:
        if self.controller is not None:
            return self.controller.cost_model.full_s(tokens)
        row_layers = tokens * self._survey.kinds.num_layers
        if self._pace.seconds(row_layers) is None:
            try:
                self._measure_pace(planner)
            except (RuntimeError, MemoryError) as error:  # torch's of memory are RuntimeErrors
                count_failure(UNMEASURED)  # a request waits no longer than `LEAST_S` then
                logger.warning("how fast the model computes could not be measured: %s", error)
        return self._pace.seconds(row_layers) or 0.0

    @torch.no_grad()
    def _measure_pace(self, planner: Planner) -> None:
        """By a layer of some rows, in front of the last one, which computes hardly any."""
        rows = min(PACE_ROWS, self._survey.max_length or PACE_ROWS)
        prompt = Prompt.of([text(np.arange(rows) % self._survey.vocab_size)])
        for _ in range(2 if self._config.layer_graphs else 1):  # the first time graphs are captured
            with self.open_full(prompt, planner, 1) as prefill:
                if self._survey.num_layers > 2:
                    prefill.advance()  # warms the device up
                self.synchronize()
                started = time.perf_counter()
                prefill.advance()
                self.synchronize()
                taken = time.perf_counter() - started
        self._pace.learn(rows, taken)
