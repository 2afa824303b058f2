"""The loading controller of one engine: what is loaded, and how much is recomputed, by the times that it has observed.

    look-up in a thread   plan ──> decide ──> plan without slow blocks, a higher ratio or none
    workers' report       plan, outcome ──> learn

The core's controller decides. It needs to know how long computing takes: from a cost model's file, or from the first
outcome that tells its computing time. Before that everything stored is loaded.
"""

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheblend.core.config import BlendConfig
from cacheblend.core.cost.controller import GIVEN_UP, Controller, Decision
from cacheblend.core.cost.cost_model import CostModel
from cacheblend.core.load.budget import LOAD_TIMEOUT
from cacheblend.core.plan.blocks import KVLayout
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.engines.settings import controller_of

if TYPE_CHECKING:
    from cacheblend.engines.vllm.jobs import BlendOutcome

RATIO_STEP = 0.05  # raised ratios are multiples of it more, so that blended blocks of few ratios are cached
_LENGTHS = (256, 4096)  # tokens between which a prefill's time is a line, where only its pace is known
_STORED = (Source.PREFIX, Source.LOADED)


@dataclass(frozen=True)
class LoadChoice:
    """What is loaded for a prompt."""

    plan: BlendPlan
    ratio: float | None = None  # share of the loaded rows to recompute, above the one in force; None: that one
    decision: Decision | None = None
    is_all_left_out: bool = False  # something is stored, and computing all of it takes less time than loading any


class LoadControl:
    """Decides what is loaded, and learns. May be used from several threads. `layout`: of the stored chunks;
    `cost_model`: to start from, None: nothing is known."""

    def __init__(self, config: BlendConfig, layout: KVLayout, cost_model: CostModel | None = None) -> None:
        self._config, self._layout, self._lock = config, layout, threading.Lock()
        self._controller = None if cost_model is None else controller_of(cost_model, config, layout)

    @property
    def cost_model(self) -> CostModel | None:
        with self._lock:
            return None if self._controller is None else self._controller.cost_model

    def decide(self, plan: BlendPlan, in_force: float | None = None, *, raises: bool = True) -> LoadChoice:
        """Which stored blocks of a plan are loaded. `in_force`: ratio of the request, which the floor of the shadow
        check may have raised, or its client chosen; None: the configured one. `raises`: the ratio may be raised: the
        request has none, and no selector, of its own."""
        with self._lock:
            controller = self._controller
            if controller is None or not _reads(plan):
                return LoadChoice(plan)
            decision = controller.decide(plan, in_force)
            if decision.left_out:
                plan = plan.leaving_out(decision.left_out)
            if not _reads(plan):
                controller.learn(decision, plan, None, {})  # no outcome will come: the slowness is forgotten here
        least = controller.floor if in_force is None else in_force
        steps = math.floor((decision.ratio - least) / RATIO_STEP + 1e-9)
        raised = raises and steps > 0 and decision.reused
        ratio = round(min(1.0, least + steps * RATIO_STEP), 6) if raised else None
        return LoadChoice(plan, ratio, decision, is_all_left_out=not _reads(plan))

    def compute_s(self, plan: BlendPlan) -> float | None:
        """How long computing takes what a plan loads; None: not known."""
        known = self.cost_model
        return None if known is None else known.full_s(len(plan.stored_rows))

    def learn(self, plan: BlendPlan, outcome: "BlendOutcome") -> None:
        """Learns from a prompt that was provided; a pass that lost blocks, or failed, tells nothing. One that gave a
        tier up tells that it takes as long as was waited for it at least."""
        if outcome.failure:
            with self._lock:
                if outcome.failure == LOAD_TIMEOUT and self._controller is not None and outcome.read_s:
                    load_s = self._controller.load_s([span for span in plan.spans if span.source in _STORED])
                    waits = ((tier, seconds, load_s.get(tier, 0.0)) for tier, seconds in outcome.read_s.items())
                    slow = {tier: (GIVEN_UP * max(seconds, known), known) for tier, seconds, known in waits}
                    self._controller.observe(_expectation(self._controller, plan, outcome), None, slow)
            return
        cached = outcome.hit_tokens.get("vllm", 0)  # which nothing has read
        carried_out = plan.with_resident(cached) if 0 < cached < len(plan) else plan
        if sum(outcome.hit_tokens.values()) != sum(carried_out.hit_tokens().values()):
            return
        if outcome.compute_s is not None and outcome.row_layers > 0:
            self.learn_pace(outcome.row_layers, outcome.compute_s)
        with self._lock:
            if self._controller is not None:
                decided = _expectation(self._controller, carried_out, outcome)
                self._controller.learn(decided, carried_out, outcome.compute_s, outcome.read_s)

    def learn_pace(self, row_layers: int, seconds: float) -> None:
        """Takes how long so many rows times layers took, if nothing is known of computing yet."""
        pace = seconds / row_layers * len(self._layout.layers)
        with self._lock:
            if self._controller is None and math.isfinite(pace) and pace > 0:
                cost_model = CostModel(tuple((tokens, tokens * pace) for tokens in _LENGTHS))
                self._controller = controller_of(cost_model, self._config, self._layout)


def _reads(plan: BlendPlan) -> bool:
    return any(span.source in _STORED and span.tier for span in plan.spans)


def _expectation(controller: Controller, plan: BlendPlan, outcome: "BlendOutcome") -> Decision:
    """What the controller would have expected of the pass that was carried out, by the rows that it computed."""
    known = controller.cost_model
    reused = sum(len(span) for span in plan.spans if span.source is Source.LOADED)
    full = known.full_s(len(plan))
    unit = full / len(plan) / controller.layers * (known.overhead if reused else 1.0)
    compute = known.request_s + unit * outcome.row_layers
    return Decision(controller.floor, frozenset(), 0.0, compute, compute, full, "carried out", reused)
