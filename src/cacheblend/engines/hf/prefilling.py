"""A prompt's prefill under way: the fused pass, and the report that comes of it."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from cacheblend.core.cost.controller import Controller, Decision
from cacheblend.core.fuse.batching import LayerSteps
from cacheblend.core.fuse.prefill import Prefill, PrefillRun
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.request import report_of

Mode = Literal["blend", "reuse", "prefix", "full"]
"""How much of what is stored is used: all of it, recomputing what the selector chooses (``blend``) or nothing
(``reuse``); what is exact (``prefix``); nothing (``full``)."""


def plan_in_mode(plan: BlendPlan, mode: Mode) -> BlendPlan:
    """The plan with what the mode does not use left out."""
    unused = {"full": (Source.PREFIX, Source.LOADED), "prefix": (Source.LOADED,)}.get(mode, ())
    names = frozenset(span.name for span in plan.spans if span.source in unused)
    return plan.leaving_out(names) if names else plan


class Prefilling:
    """One prompt's; a layer at a time by itself (`advance`) or beside others (`next_layer`).

    Args:
        run: the pass, not begun.
        synchronize: waits for the device.
        started: when the request came, by `time.perf_counter`.
        controller: told of what came of its decision; None: nothing was decided.
        decision: the controller's.
    """

    def __init__(
        self,
        run: PrefillRun,
        synchronize: Callable[[], None],
        started: float,
        controller: Controller | None = None,
        decision: Decision | None = None,
    ) -> None:
        self._run, self._synchronize, self._controller, self._decision = run, synchronize, controller, decision
        self._started, self._planned = started, time.perf_counter()
        self._is_alone = True

    @property
    def layer(self) -> int:
        """The next layer to be computed."""
        return self._run.layer

    @property
    def active_rows(self) -> int:
        """Rows that the next step computes at most."""
        return self._run.active_rows

    @property
    def done(self) -> bool:
        """All layers are computed."""
        return self._run.done

    def advance(self) -> bool:
        """Computes a layer; True when all are done."""
        return self._run.advance()

    def next_layer(self) -> LayerSteps:
        """The next layer, for `run_together`."""
        return self._run.next_layer()

    def share(self) -> None:
        """Something else is computed before this is done: how long it takes says little about the machine."""
        self._is_alone = False

    def result(self) -> tuple[Prefill, BlendReport]:
        """What the pass leaves behind, and its report; valid once `done`, asked for once."""
        result = self._run.result()
        self._synchronize()
        now = time.perf_counter()
        report = report_of(result, self._planned - self._started, now - self._planned)
        if self._decision is not None and self._controller is not None:
            report.decision = self._decision.reason
            if not report.fallbacks:
                compute_s = report.compute_s if self._is_alone else None
                self._controller.learn(self._decision, result.plan, compute_s, result.read_s)
        return result, report

    def close(self) -> None:
        """Stops loading and lets go of buffers. Idempotent."""
        self._run.close()

    def __enter__(self) -> "Prefilling":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
