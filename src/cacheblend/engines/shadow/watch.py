"""Everything that is known of one model's checked answers: figures by tenant and selector, history, and the floor.

Knows counts and labels. Computes nothing; engines do, and an engine's metrics show what `figures` gives.
"""

import logging
import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cacheblend.engines.shadow.comparison import Compared
from cacheblend.engines.shadow.floor import Change, Floor, factors_from, rated
from cacheblend.engines.shadow.settings import ShadowSettings

KL_BUCKETS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Nats, upper ends."""

MOST_TENANTS = 100
"""Tenants with figures of their own; further ones share those of `OTHERS`."""

OTHERS = "others"
MOST_WAITING = 8
"""Answers that wait to be compared; each holds its prompt's ids and one row of logits."""

CLOSED, NO_ANSWER, QUEUE_FULL, FAILED = "closed", "no answer", "queue full", "failed"
"""Why a drawn answer is not compared; engines have further reasons of their own."""

MOST_MOMENTS = 512
FIRST_TOKEN, ANSWER = "first_token", "answer"
"""What agreement is taken over: first tokens; or of each answer one of its first 16 tokens, drawn at random, so that
comparisons are independent and the bound is exact."""

logger = logging.getLogger("cacheblend.shadow")


class Labels(NamedTuple):
    """Whose answers, and how they were blended.

    Attributes:
        tenant: a label that other tenants may see.
        selector: its name.
        settings: ``engine``: those that the floor moves; ``request``: the request named its own, and keeps them.
    """

    tenant: str
    selector: str
    settings: str = "engine"


@dataclass(frozen=True)
class SeriesFigures:
    """The figures of one combination of labels.

    Attributes:
        labels: it.
        compared: requests since the start.
        agreed, differed: answer tokens since the start.
        kl_counts: comparisons in each of `KL_BUCKETS`, and above; not cumulated.
        kl_sum: nats.
        agreement: by `FIRST_TOKEN` and `ANSWER`, (share, exact lower bound, comparisons) of the window.
    """

    labels: Labels
    compared: int
    agreed: int
    differed: int
    kl_counts: tuple[int, ...]
    kl_sum: float
    agreement: dict[str, tuple[float, float, int]]


class Moment(NamedTuple):
    """The window of the model after a comparison.

    Attributes:
        at: seconds since the epoch.
        agreement, bound: the lower of first tokens and answers.
        rows: comparisons in the window.
        ratio: in force; 1: full recompute; None: the selector has none.
    """

    at: float
    agreement: float
    bound: float
    rows: int
    ratio: float | None


@dataclass(frozen=True)
class ShadowFigures:
    """A picture of the watch.

    Attributes:
        model: its name.
        series: by labels.
        dropped: requests that were drawn and not compared, by reason.
        raised, lowered: steps of the ratio.
        ratio: in force; 1: full recompute; None: the selector has none.
    """

    model: str
    series: tuple[SeriesFigures, ...]
    dropped: dict[str, int]
    raised: int
    lowered: int
    ratio: float | None


@dataclass
class _Series:
    labels: Labels
    window: int
    compared: int = 0
    agreed: int = 0
    differed: int = 0
    kl_counts: list[int] = field(default_factory=lambda: [0] * (len(KL_BUCKETS) + 1))
    kl_sum: float = 0.0
    windows: dict[str, deque[bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.windows = {of: deque(maxlen=self.window) for of in (FIRST_TOKEN, ANSWER)}

    def add(self, compared: Compared, drawn: bool, *, is_current: bool) -> None:
        self.compared += 1
        self.agreed += sum(compared.agreed)
        self.differed += len(compared.agreed) - sum(compared.agreed)
        self.kl_counts[sum(compared.kl > end for end in KL_BUCKETS)] += 1
        self.kl_sum += compared.kl
        if is_current:
            self.windows[FIRST_TOKEN].append(compared.first)
            self.windows[ANSWER].append(drawn)


class ShadowWatch:
    """The watch of one model. May be used from several threads.

    Args:
        settings: of the check.
        model: its name, for logs and labels.
        ratio: the configured one; None: the selector has none.
        on_change: called with the new factor of the ratio, infinite for full recompute; without the watch's lock.
        seed: of everything that is drawn; None: another one each time.
    """

    def __init__(
        self,
        settings: ShadowSettings,
        model: str,
        ratio: float | None,
        on_change: Callable[[float], None] = lambda factor: None,
        seed: int | None = None,
    ) -> None:
        self.settings, self.model, self._ratio, self._on_change = settings, model, ratio, on_change
        self._factors = factors_from(ratio)
        self._floor = Floor(settings, len(self._factors))
        self._lock, self._random = threading.Lock(), random.Random(seed)
        self._series: dict[Labels, _Series] = {}
        self._dropped: Counter[str] = Counter()
        self._moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)

    @property
    def step(self) -> int:
        """Of the floor: how often the ratio is raised at present."""
        return self._floor.step

    @property
    def is_full(self) -> bool:
        """The floor has everything recomputed that is not exact."""
        return math.isinf(self._factors[self._floor.step])

    @property
    def ratio(self) -> float | None:
        """In force, for requests that name none; 1 for full recompute; None: the selector has none."""
        factor = self._factors[self._floor.step]
        return 1.0 if math.isinf(factor) else None if self._ratio is None else min(1.0, self._ratio * factor)

    def draws(self) -> bool:
        """Whether a blended request is one of those that are checked."""
        with self._lock:
            return self._random.random() < self.settings.share

    def takes(self, loaded: int, recomputed: int, *, by_floor: bool = False) -> bool:
        """Whether the answer to a prompt is compared: it is not exact, and was drawn.

        Args:
            loaded: its tokens whose KV is not exact in it.
            recomputed: how many of these were recomputed.
            by_floor: the floor had them computed instead of loaded: it agrees if it is drawn, without being compared.
                Without that nothing would lead back from full recompute.
        """
        if by_floor and not loaded and self.is_full:
            if self.draws():
                self._add_exact()
            return False
        return recomputed < loaded and self.draws()

    def add(self, labels: Labels, compared: Compared, step: int | None) -> Labels:
        """Takes a comparison, and moves the ratio if it calls for that.

        Args:
            labels: of the request.
            compared: the result.
            step: the floor's when the request was blended; None: the request had settings of its own.

        Returns:
            The labels under which it is counted.
        """
        with self._lock:
            drawn = self._random.choice(compared.agreed)
            is_current = step is None or step == self._floor.step
            series = self._series_of(labels)
            series.add(compared, drawn, is_current=is_current)
            change = self._hold(compared.first, drawn) if is_current and step is not None else None
        self._apply(change)
        return series.labels

    def _add_exact(self) -> None:
        with self._lock:
            change = self._hold(first=True, token=True)
        self._apply(change)

    def drop(self, reason: str) -> None:
        """Counts a request that was drawn and will not be compared."""
        with self._lock:
            self._dropped[reason] += 1

    def begin_anew(self) -> None:
        """Forgets what describes a model that is no longer the same (its adapters were switched); counters stay."""
        with self._lock:
            self._floor.begin_anew()
            self._clear_windows()

    def history(self) -> list[Moment]:
        """The model's window after each of the last comparisons with the engine's own settings, oldest first."""
        with self._lock:
            return list(self._moments)

    def figures(self) -> ShadowFigures:
        """The present figures."""
        with self._lock:
            confidence = self.settings.confidence
            series = tuple(
                SeriesFigures(
                    labels,
                    each.compared,
                    each.agreed,
                    each.differed,
                    tuple(each.kl_counts),
                    each.kl_sum,
                    {of: rated(window, confidence) for of, window in each.windows.items()},
                )
                for labels, each in self._series.items()
            )
            floor = self._floor
            return ShadowFigures(self.model, series, dict(self._dropped), floor.raised, floor.lowered, self.ratio)

    def _hold(self, first: bool, token: bool) -> Change | None:
        ratio = self.ratio
        change = self._floor.add(first, token)
        found = self._floor.worst() if change is None else (change.agreement, change.bound, change.rows)
        self._moments.append(Moment(time.time(), *found, ratio))
        if change is not None:
            self._clear_windows()
            logger.warning(
                "%s: recompute ratio %s to %s: agreement with full prefill %.3f, lower bound %.3f (%d), floor %s",
                self.model,
                "raised" if change.raised else "lowered",
                "full recompute"
                if self.is_full
                else "the selector's own"
                if self.ratio is None
                else f"{self.ratio:.3g}",
                *found,
                self.settings.floor,
            )
        return change

    def _apply(self, change: Change | None) -> None:
        if change is not None:
            self._on_change(self._factors[change.step])

    def _clear_windows(self) -> None:
        """Those of the settings that have changed."""
        for labels, each in self._series.items():
            if labels.settings == "engine":
                for window in each.windows.values():
                    window.clear()

    def _series_of(self, labels: Labels) -> _Series:
        tenants = {each.tenant for each in self._series}
        if labels.tenant not in tenants and len(tenants - {OTHERS}) >= MOST_TENANTS:
            labels = labels._replace(tenant=OTHERS)
        return self._series.setdefault(labels, _Series(labels, self.settings.rows))
