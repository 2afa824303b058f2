"""The shadow check: a share of the blended requests is computed once more in full and compared, and the recompute ratio
is held to a floor of agreement. Shared by both engines, which compute; nothing here does.

    request ──> draw ──> answered ──> engine: full prefill, when there is time ──> compare ──> watch ──> floor
                                                                                   (metrics, history)   (ratio)
"""

import logging
import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.bounds import allowed_errors, check_share, lower_bound, needed_rows

# ---- settings -----------------------------------------------------------------------------------------------

WINDOW = 200  # comparisons of a window where no floor asks for more
ERRORS = 4  # disagreements that a window of its own size forgives; with fewer, chance alone would raise a ratio often
MOST_WINDOW = 20_000


@dataclass(frozen=True)
class ShadowSettings:
    """How answers are checked. Raises `InvalidInputError`: a value outside its limits, or a window too small for the
    floor."""

    # of the blended requests, drawn at random, that are computed once more in full; above 0, at most 1. While an engine
    # is never idle it is also the share of the time that this may take.
    share: float
    floor: float | None = None  # least agreement with full prefill, between 0 and 1; None: the ratio stays as it is
    confidence: float = 0.95  # of the one-sided bounds
    # comparisons that agreement is taken over; None: the fewest with which four disagreements reach the floor (181 for
    # 0.95), or 200 without one
    window: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise InvalidInputError(
                f"the share of requests that are checked must be above 0 and at most 1, got {self.share!r}"
            )
        check_share("the confidence of the shadow check", self.confidence)
        if self.window is not None and not 1 <= self.window <= MOST_WINDOW:
            raise InvalidInputError(f"the window of the shadow check must be in 1..{MOST_WINDOW}, got {self.window}")
        if self.floor is None:
            return
        check_share("the floor of the shadow check", self.floor)
        if self.rows > MOST_WINDOW:
            raise InvalidInputError(
                f"a floor of {self.floor} takes {self.rows} comparisons to decide, and at most {MOST_WINDOW} are kept; "
                "lower it"
            )
        if allowed_errors(self.rows, self.floor, self.confidence) < 0:
            least = needed_rows(self.floor, self.confidence)
            raise InvalidInputError(
                f"a window of {self.window} cannot show an agreement of {self.floor}: at least {least} are needed"
            )

    @property
    def rows(self) -> int:
        if self.window is not None:
            return self.window
        if self.floor is None:
            return WINDOW
        return needed_rows(self.floor, self.confidence, ERRORS)


# ---- one answer ---------------------------------------------------------------------------------------------
#
#   prompt ............ | a0 a1 a2 ... a14      the rows of full prefill over the prompt and what was answered
#                     ^   ^  ^  ^               the rows whose logits are compared
#   blend's likeliest a0  a1 .. a15             at each of them; what was answered, if the answer was greedy
#   full's likeliest  ?   ?  ?                  same or not
#
# A token counts as chosen by full prefill too if both find the same one likeliest, whatever was drawn: a sampled
# answer, or one with a repetition penalty, says nothing by its tokens alone. After a difference the following tokens
# are compared on what was answered.

ANSWER_TOKENS = 16  # the most tokens of an answer that are compared
MOST_KL = 100.0  # nats; a distribution that is not finite counts as this far away


@dataclass(frozen=True)
class Compared:
    """One answer, compared with full prefill."""

    kl: float  # KL(full || blended) of the first token, in nats
    agreed: tuple[bool, ...]  # of each compared token, at least one: whether both find the same likeliest

    @property
    def first(self) -> bool:
        return self.agreed[0]


def compare(first: torch.Tensor, likeliest: Sequence[int], full: torch.Tensor) -> Compared:
    """Compares an answer with full prefill over the same tokens: the [vocab] logits that its first token was drawn
    from, and the ids that were `likeliest` at its first n tokens, with the [n, vocab] logits of full prefill at the
    prompt's last row and behind each answered token but the last."""
    wanted = full.argmax(-1).tolist()
    return Compared(kl_divergence(full[0], first), tuple(a == b for a, b in zip(likeliest, wanted, strict=True)))


def agreement(logits: torch.Tensor, full: torch.Tensor) -> Compared:
    """Compares the [vocab] logits of a first token with those of full prefill."""
    return compare(logits, [int(logits.argmax())], full[None])


def kl_divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full || other) of the distributions of two logits, [vocab] each, in nats; at most `MOST_KL`."""
    log_full, log_other = full.double().cpu().log_softmax(-1), other.double().cpu().log_softmax(-1)
    share = log_full.exp()
    kl = float(torch.where(share == 0, 0.0, share * (log_full - log_other)).sum())
    return MOST_KL if math.isnan(kl) else min(max(kl, 0.0), MOST_KL)


# ---- the floor ----------------------------------------------------------------------------------------------

STEP = 1.5
LEAST = 0.01  # lower ratios are too many steps from full recompute to be raised; 0 has none at all
FULL_ABOVE = 2 / 3  # ratios above it are full recompute: loading, and choosing rows, would cost more than the rows left
MOST_WINDOWS = 16  # windows that a step is kept at most before the next lower one is tried again


def factors_from(ratio: float | None) -> tuple[float, ...]:
    """The factor of the ratio at each step, infinite for full recompute. A ratio of 1 has no further step; None, or one
    below `LEAST`, cannot be raised in steps."""
    factors = [1.0]
    if ratio is not None and ratio >= 1:
        return (1.0,)
    if ratio is not None and ratio >= LEAST:
        while ratio * factors[-1] * STEP <= FULL_ABOVE:
            factors.append(factors[-1] * STEP)
    return (*factors, math.inf)


@dataclass(frozen=True)
class Change:
    """A step. `agreement`, `bound` and `rows` are of the window that decided; `step` is the new one."""

    raised: bool
    agreement: float
    bound: float
    rows: int
    step: int


class Floor:
    """Holds agreement to a floor by steps of the recompute ratio. Not thread-safe.

    step    0       1        2         ...   last
    ratio   r       1.5 r    2.25 r          full recompute

    The lower bound of a window of W comparisons has to reach the floor, which allows it e disagreements. The ratio is
    raised as soon as the window has more than e, also before it is full: however the rest turned out, it could not
    reach the floor. It is lowered a step after a full window that reaches it. The window begins anew with each change,
    since comparisons with another ratio do not tell of this one. Where a lowered ratio fails, the next attempt waits
    for twice as many windows. Without a floor in the settings no step is made.
    """

    def __init__(self, settings: ShadowSettings, steps: int) -> None:
        self._settings, self._steps, rows = settings, steps, settings.rows
        self._allowed = None if settings.floor is None else allowed_errors(rows, settings.floor, settings.confidence)
        self._windows: tuple[deque[bool], ...] = (deque(maxlen=rows), deque(maxlen=rows))
        self._since = 0  # comparisons since the last change
        self._wait, self._is_trial = 1, False
        self.step = self.raised = self.lowered = 0  # in force; how often so far

    def worst(self) -> tuple[float, float, int]:
        """(agreement, its lower bound, comparisons) of the window with the lower agreement; 1, 0, 0 of empty ones."""
        return min(rated(window, self._settings.confidence) for window in self._windows)

    def add(self, first: bool, token: bool) -> Change | None:
        """Takes whether first tokens agree, and a token of the answer drawn at random, of a comparison made with the
        step in force; the change that follows from it, if any."""
        for window, agreed in zip(self._windows, (first, token), strict=True):
            window.append(agreed)
        self._since += 1
        if self._allowed is None:
            return None
        if any(len(window) - sum(window) > self._allowed for window in self._windows):
            if self.step == self._steps - 1:
                return None
            self._wait = min(2 * self._wait, MOST_WINDOWS) if self._is_trial else 1
            self._is_trial = False
            self.raised += 1
            return self._change(self.step + 1, raised=True)
        if self._is_trial and self._since >= self._settings.rows:
            self._is_trial, self._wait = False, 1
        if self.step and self._since >= self._settings.rows * self._wait:
            self._is_trial = True
            self.lowered += 1
            return self._change(self.step - 1, raised=False)
        return None

    def begin_anew(self) -> None:
        """Forgets the comparisons, not the step: the model is another one."""
        self._since = 0
        for window in self._windows:
            window.clear()

    def _change(self, step: int, *, raised: bool) -> Change:
        change = Change(raised, *self.worst(), step)
        self.step = step
        self.begin_anew()
        return change


def rated(window: Sequence[bool] | deque[bool], confidence: float) -> tuple[float, float, int]:
    """(share, its exact lower bound, count) of a window; 1, 0, 0 of an empty one."""
    count, agreed = len(window), sum(window)
    return (agreed / count, lower_bound(agreed, count, confidence), count) if count else (1.0, 0.0, 0)


# ---- figures ------------------------------------------------------------------------------------------------

KL_BUCKETS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # nats, upper ends
MOST_TENANTS = 100  # tenants with figures of their own; further ones share those of `OTHERS`
OTHERS = "others"
MOST_WAITING = 8  # answers that wait to be compared; each holds its prompt's ids and one row of logits
CLOSED, NO_ANSWER, QUEUE_FULL, FAILED = "closed", "no answer", "queue full", "failed"  # why none is compared
MOST_MOMENTS = 512
FIRST_TOKEN, ANSWER = "first_token", "answer"
"""What agreement is taken over: first tokens; or of each answer one of its first 16 tokens, drawn at random, so that
comparisons are independent and the bound is exact."""

logger = logging.getLogger("cacheblend.shadow")


class Labels(NamedTuple):
    """Whose answers, and how they were blended."""

    tenant: str  # a label that other tenants may see
    selector: str
    settings: str = "engine"  # ``engine``: those that the floor moves; ``request``: the request's own, which it keeps


@dataclass
class SeriesFigures:
    """The figures of one combination of labels."""

    labels: Labels
    confidence: float
    windows: dict[str, deque[bool]]  # by `FIRST_TOKEN` and `ANSWER`: of the last ones with the ratio in force
    compared: int = 0  # requests since the start
    agreed: int = 0  # answer tokens since the start
    differed: int = 0
    kl_counts: list[int] = field(default_factory=lambda: [0] * (len(KL_BUCKETS) + 1))  # not cumulated
    kl_sum: float = 0.0  # nats

    @property
    def agreement(self) -> dict[str, tuple[float, float, int]]:
        """By `FIRST_TOKEN` and `ANSWER`, (share, exact lower bound, comparisons) of the window."""
        return {of: rated(window, self.confidence) for of, window in self.windows.items()}


class Moment(NamedTuple):
    """The window of the model after a comparison."""

    at: float  # seconds since the epoch
    agreement: float  # the lower one of first tokens and answers
    bound: float
    rows: int  # comparisons in the window
    ratio: float | None  # in force; 1: full recompute; None: the selector has none


@dataclass(frozen=True)
class ShadowFigures:
    """A snapshot of the watch."""

    model: str
    series: tuple[SeriesFigures, ...]
    dropped: dict[str, int]  # requests that were drawn and not compared, by reason
    raised: int  # steps of the ratio so far
    lowered: int
    ratio: float | None  # in force; 1: full recompute; None: the selector has none


# ---- the watch ----------------------------------------------------------------------------------------------


class ShadowWatch:
    """Figures, history and floor of one model's checked answers. May be used from several threads. `ratio` is the
    configured one, None: the selector has none; `on_change` is called with its new factor, infinite for full recompute,
    without the watch's lock; `seed` is of everything that is drawn, None: another one each time."""

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
        self._series: dict[Labels, SeriesFigures] = {}
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

    def takes(self, loaded: int, recomputed: int, *, by_floor: bool = False) -> bool:
        """Whether the answer to a prompt is compared: it is not exact, since of its `loaded` tokens, whose KV is not
        exact in it, fewer were recomputed, and it was drawn. `by_floor`: the floor had them computed instead of loaded:
        it agrees if it is drawn, without being compared; without that nothing would lead back from full recompute."""
        if by_floor and not loaded and self.is_full:
            with self._lock:
                is_drawn = self._random.random() < self.settings.share
                change = self._hold(first=True, token=True) if is_drawn else None
            if change is not None:
                self._on_change(self._factors[change.step])
            return False
        with self._lock:
            return recomputed < loaded and self._random.random() < self.settings.share

    def add(self, labels: Labels, compared: Compared, step: int | None) -> Labels:
        """Takes a comparison, and moves the ratio if it calls for that; returns the labels under which it is counted.
        `step` is the floor's when the request was blended; None: the request had settings of its own."""
        with self._lock:
            drawn = self._random.choice(compared.agreed)
            is_current = step is None or step == self._floor.step
            tenants = {each.tenant for each in self._series}
            if labels.tenant not in tenants and len(tenants - {OTHERS}) >= MOST_TENANTS:
                labels = labels._replace(tenant=OTHERS)
            if labels not in self._series:
                windows = {of: deque[bool](maxlen=self.settings.rows) for of in (FIRST_TOKEN, ANSWER)}
                self._series[labels] = SeriesFigures(labels, self.settings.confidence, windows)
            series = self._series[labels]
            series.compared += 1
            series.agreed += sum(compared.agreed)
            series.differed += len(compared.agreed) - sum(compared.agreed)
            series.kl_counts[sum(compared.kl > end for end in KL_BUCKETS)] += 1
            series.kl_sum += compared.kl
            if is_current:
                series.windows[FIRST_TOKEN].append(compared.first)
                series.windows[ANSWER].append(drawn)
            change = self._hold(compared.first, drawn) if is_current and step is not None else None
        if change is not None:
            self._on_change(self._factors[change.step])
        return labels

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
        with self._lock:
            series = tuple(
                replace(each, kl_counts=[*each.kl_counts], windows={of: w.copy() for of, w in each.windows.items()})
                for each in self._series.values()
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
            now = "the selector's own" if self.ratio is None else f"{self.ratio:.3g}"
            logger.warning(
                "%s: recompute ratio %s to %s: agreement with full prefill %.3f, lower bound %.3f (%d), floor %s",
                self.model,
                "raised" if change.raised else "lowered",
                "full recompute" if self.is_full else now,
                *found,
                self.settings.floor,
            )
        return change

    def _clear_windows(self) -> None:
        """Those of the settings that have changed."""
        for labels, each in self._series.items():
            if labels.settings == "engine":
                for window in each.windows.values():
                    window.clear()
