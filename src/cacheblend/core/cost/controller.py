"""The loading controller: which stored blocks a prompt loads, and how much of them is recomputed.

    TTFT of a pass whose loading runs beside its computing  ~  max(load, compute) + min(load, compute) / layers
    load     blocks by tier: bytes / throughput, and a latency a layer and a block
    compute  rows times layers, in units of a full prefill's

Loading more spares computing and costs loading: blocks are added, those first that are soonest here, for as long as the
expected time falls. Where loading still takes longer than what is computed anyway (a latency that fewer blocks would
not shorten), more rows are recomputed for free, up to 85 % of it: two threads never overlap perfectly. The ratio never
falls below the floor, the share that quality asks for (paper, section 5.1).

Knows plans and seconds; knows neither engines nor stores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.plan import BlendPlan, Source, Span

MARGIN = 0.85
_WEIGHT = 0.2  # of a new observation in the running averages
_FARTHEST = 8.0  # that what is learnt may lie from the profile
_FORGOTTEN = 0.02  # a request, of what was learnt of a tier that is not read
_CHECK = 0.3  # of a layer's cost: norm and projections of a check


@dataclass(frozen=True)
class TierSpeed:
    """How long a tier takes.

    Attributes:
        bytes_per_s: throughput of a layer's records.
        layer_s: latency of each layer.
        block_s: of each block of a layer besides.
    """

    bytes_per_s: float
    layer_s: float = 0.0
    block_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.layer_s < 0 or self.block_s < 0:
            raise InvalidInputError(
                f"a tier needs a throughput above 0 and latencies of 0 or more, got {self.bytes_per_s} bytes/s, "
                f"{self.layer_s} s a layer, {self.block_s} s a block"
            )

    def seconds(self, blocks: int, nbytes: float, layers: int) -> float:
        """Of so many blocks, `nbytes` over all layers."""
        return 0.0 if not blocks else layers * (self.layer_s + blocks * self.block_s) + nbytes / self.bytes_per_s

    def scaled(self, factor: float) -> "TierSpeed":
        """One that takes `factor` times as long."""
        return TierSpeed(self.bytes_per_s / factor, self.layer_s * factor, self.block_s * factor)


@dataclass(frozen=True)
class CostModel:
    """What one model takes on one device.

    Attributes:
        prefill_s: (tokens, seconds of a full prefill) ascending, two points at least.
        tiers: by name.
        overhead: how much longer a row-layer takes in a blend than in a full prefill, since few rows are less well
            served.
        request_s: of a blend, whatever its size.
    """

    prefill_s: tuple[tuple[int, float], ...]
    tiers: Mapping[str, TierSpeed] = field(default_factory=dict)
    overhead: float = 1.0
    request_s: float = 0.0

    def __post_init__(self) -> None:
        lengths = [tokens for tokens, _ in self.prefill_s]
        if len(lengths) < 2 or lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise InvalidInputError(f"prefill times need two ascending lengths at least, got {lengths}")
        if any(seconds <= 0 for _, seconds in self.prefill_s) or self.overhead <= 0 or self.request_s < 0:
            raise InvalidInputError("prefill times and overhead must be above 0, the time of a request 0 or more")

    def full_s(self, tokens: int) -> float:
        """Seconds of a full prefill: on straight lines between the measured lengths, and on from the last two."""
        if tokens <= 0:
            return 0.0
        lengths, seconds = (np.array(column, dtype=float) for column in zip(*self.prefill_s, strict=True))
        seconds = np.maximum.accumulate(seconds)  # a longer one does not take less: that is noise
        if tokens < lengths[0]:
            return float(tokens / lengths[0] * seconds[0])
        slope = (seconds[-1] - seconds[-2]) / (lengths[-1] - lengths[-2])
        return float(np.interp(tokens, lengths, seconds) + max(0.0, tokens - lengths[-1]) * slope)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prefill_s": [list(point) for point in self.prefill_s],
            "tiers": {name: vars(speed) for name, speed in self.tiers.items()},
            "overhead": self.overhead,
            "request_s": self.request_s,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "CostModel":
        """The opposite of `to_dict`.

        Raises:
            InvalidInputError: a field is missing or has no such value.
        """
        try:
            return CostModel(
                tuple((int(tokens), float(seconds)) for tokens, seconds in data["prefill_s"]),
                {str(name): TierSpeed(**speed) for name, speed in data["tiers"].items()},
                float(data.get("overhead", 1.0)),
                float(data.get("request_s", 0.0)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInputError(f"a cost model cannot be read: {error!r}") from error


@dataclass(frozen=True)
class Decision:
    """What to do with a prompt.

    Attributes:
        ratio: share of the loaded rows to recompute.
        left_out: stored blocks that are computed instead of loaded.
        load_s, compute_s, ttft_s: expected.
        full_s: expected of a full prefill.
        reason: a line for people.
        reused: rows that are loaded and not exact.
    """

    ratio: float
    left_out: frozenset[BlockName]
    load_s: float
    compute_s: float
    ttft_s: float
    full_s: float
    reason: str
    reused: int = 0


class Controller:
    """Decides, and learns from what came of it.

    Args:
        profile: to begin with.
        layers: of the model.
        bytes_per_token: of stored KV, over all layers.
        floor: least ratio.
        check_layer: up to which all rows are computed; None: rows are chosen before the first.
    """

    def __init__(
        self,
        profile: CostModel,
        *,
        layers: int,
        bytes_per_token: float,
        floor: float = 0.15,
        check_layer: int | None = 1,
    ) -> None:
        if not 0 <= floor <= 1:
            raise InvalidInputError(f"the floor of the ratio must lie in 0..1, got {floor}")
        self._profile, self._layers, self._bytes_per_token, self._floor = profile, layers, bytes_per_token, floor
        self._whole = 0.0 if check_layer is None else min(check_layer + _CHECK, layers)
        self._pace = 1.0  # of full prefills, over the profile's
        self._slower: dict[str, float] = {}  # by tier, than the profile says
        self._overhead = profile.overhead

    @property
    def profile(self) -> CostModel:
        """As it stands, with what was learnt."""
        prefills = tuple((tokens, seconds * self._pace) for tokens, seconds in self._profile.prefill_s)
        tiers = {name: speed.scaled(self._slower.get(name, 1.0)) for name, speed in self._profile.tiers.items()}
        return CostModel(prefills, tiers, self._overhead, self._profile.request_s)

    def decide(self, plan: BlendPlan) -> Decision:
        """What to load of a plan's stored blocks, and the ratio."""
        stored = self._by_speed([s for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)])
        full = self._full_s(len(plan))
        taken = _Taken()
        costs = [self._expected(plan, taken, self._floor)]
        for span in stored:
            taken.add(span)
            costs.append(self._expected(plan, taken, self._floor))
        count = min(range(len(costs)), key=lambda at: (round(costs[at][2], 9), -at))
        load, compute, ttft = costs[count]
        ratio = self._floor if count else 1.0
        loaded = _Taken.of(stored[:count])
        if loaded.reused:
            more = self._largest_hidden(plan, loaded, load)
            expected = self._expected(plan, loaded, more)
            if expected[2] <= full:  # the part of a layer that nothing hides grows, too
                ratio, (load, compute, ttft) = more, expected
        left_out = frozenset(span.name for span in stored[count:]) - {span.name for span in stored[:count]}
        reason = self._reason(stored, count, ratio, load, compute)
        return Decision(ratio, left_out, load, compute, ttft, full, reason, loaded.reused)

    def learn(self, decision: Decision, plan: BlendPlan, compute_s: float | None, read_s: Mapping[str, float]) -> None:
        """Learns from a pass over a plan that was decided: its seconds of computing (None: others computed meanwhile,
        so nobody knows), and of reading each tier."""
        expected = self.load_s([span for span in plan.spans if span.source in (Source.PREFIX, Source.LOADED)])
        for tier in self._slower.keys() - read_s.keys():  # what is not read may have recovered: it is tried again
            self._slower[tier] = 1 + (self._slower[tier] - 1) * (1 - _FORGOTTEN)
        self.observe(decision, compute_s, {tier: (read_s[tier], expected[tier]) for tier in read_s.keys() & expected})

    def observe(self, decision: Decision, compute_s: float | None, read_s: Mapping[str, tuple[float, float]]) -> None:
        """Learns from a pass.

        Args:
            decision: what was done.
            compute_s: the pass without waiting; None: unknown.
            read_s: by tier, seconds that reading took, and those that the controller had expected.
        """
        if compute_s is not None and decision.compute_s > self._profile.request_s:
            taken, expected = (max(s - self._profile.request_s, 1e-9) for s in (compute_s, decision.compute_s))
            if decision.reused:
                self._overhead = _learnt(self._overhead, taken / expected, self._profile.overhead)
            else:
                self._pace = _learnt(self._pace, taken / expected, 1.0)
        if not decision.reused:  # nothing was blended: it may pay again
            self._overhead += (self._profile.overhead - self._overhead) * _FORGOTTEN
        for tier, (taken, expected) in read_s.items():
            if expected > 0:
                factor = min(max(taken / expected, 0.25), 4.0)
                self._slower[tier] = self._slower.get(tier, 1.0) * (1 + _WEIGHT * (factor - 1))

    def load_s(self, spans: Sequence[Span]) -> dict[str, float]:
        """Expected seconds of loading these spans, by tier."""
        return self._load_s(_Taken.of(spans))

    def _full_s(self, tokens: int) -> float:
        return self._pace * self._profile.full_s(tokens)

    # ---- costs ------------------------------------------------------------------------------------------

    def _by_speed(self, spans: Sequence[Span]) -> list[Span]:
        """What is to be loaded first in front: by tier, exact prefixes before others, then by position."""
        seconds = {tier: self._bytes_per_token / self._speed(tier).bytes_per_s for tier in {s.tier for s in spans}}
        return sorted(spans, key=lambda span: (seconds[span.tier], span.source is not Source.PREFIX, span.start))

    def _speed(self, tier: str) -> TierSpeed:
        """A tier that was never measured is taken for as fast as memory."""
        known = self._profile.tiers.get(tier, TierSpeed(1e10))
        return known.scaled(self._slower.get(tier, 1.0))

    def _load_s(self, taken: "_Taken") -> dict[str, float]:
        return {
            tier: self._speed(tier).seconds(blocks, tokens * self._bytes_per_token, self._layers)
            for tier, (blocks, tokens) in taken.by_tier.items()
        }

    def _expected(self, plan: BlendPlan, taken: "_Taken", ratio: float) -> tuple[float, float, float]:
        """(load, compute, TTFT) in seconds."""
        load, compute = sum(self._load_s(taken).values()), self._compute_s(plan, taken, ratio)
        return load, compute, max(load, compute) + min(load, compute) / self._layers

    def _compute_s(self, plan: BlendPlan, taken: "_Taken", ratio: float) -> float:
        full = self._full_s(len(plan))
        if not taken.names:
            return full
        rows = len(plan) - taken.exact
        unit = (full - self._full_s(taken.exact)) / max(1, rows) / self._layers
        fresh = rows - taken.reused + ratio * taken.reused
        row_layers = rows * self._whole + fresh * (self._layers - self._whole)
        return self._profile.request_s + unit * row_layers * (self._overhead if taken.reused else 1.0)

    def _largest_hidden(self, plan: BlendPlan, loaded: "_Taken", load: float) -> float:
        """The largest ratio that is computed while it loads; the floor at least."""
        low, high = (self._compute_s(plan, loaded, ratio) for ratio in (0.0, 1.0))
        hidden = (MARGIN * load - low) / (high - low) if high > low else 0.0
        return float(min(1.0, max(self._floor, hidden)))

    def _reason(self, stored: Sequence[Span], count: int, ratio: float, load: float, compute: float) -> str:
        if not stored:
            return "nothing is stored"
        if not count:
            return "computing all of it is expected to be sooner than loading any"
        tiers = ", ".join(dict.fromkeys(span.tier or "memory" for span in stored[:count]))
        what = "all" if count == len(stored) else f"{count} of {len(stored)}"
        why = "computing takes longer than loading" if compute >= load else "loading takes longer than computing"
        return f"{what} stored blocks from {tiers}; recompute {ratio:.2f}: {why} ({compute:.3f} s, {load:.3f} s)"


def _learnt(value: float, factor: float, start: float) -> float:
    """A running average's next value, where `factor` times as much was seen; never far from where it began."""
    value *= 1 + _WEIGHT * (min(max(factor, 0.25), 4.0) - 1)
    return min(max(value, start / _FARTHEST), start * _FARTHEST)


class _Taken:
    """What is loaded: a repeated chunk is read once.

    Attributes:
        names: of the blocks.
        by_tier: [blocks, tokens] that are read.
        exact, reused: rows of the prompt.
    """

    def __init__(self) -> None:
        self.names: set[BlockName] = set()
        self.by_tier: dict[str, list[int]] = {}
        self.exact = self.reused = 0

    @staticmethod
    def of(spans: Sequence[Span]) -> "_Taken":
        """All of these."""
        taken = _Taken()
        for span in spans:
            taken.add(span)
        return taken

    def add(self, span: Span) -> None:
        """One more."""
        if span.source is Source.PREFIX:
            self.exact += len(span)
        else:
            self.reused += len(span)
        if span.name not in self.names:
            self.names.add(span.name)
            counts = self.by_tier.setdefault(span.tier, [0, 0])
            counts[0] += 1
            counts[1] += span.record_tokens or len(span)
