"""The loading controller: which stored blocks a prompt loads, and how many of its rows are recomputed.

    TTFT of a pass that loads while it computes  ~  max(load, compute) + min(load, compute) / layers
    load     by tier: bytes / throughput, and a latency for each layer and each block
    compute  rows times layers, in units of a full prefill

Loading a block saves computing and costs loading time. Blocks are added, those of the fastest tier first, as long as
the expected TTFT falls. Where loading still takes longer than computing (because of a latency that fewer blocks would
not shorten), more rows are recomputed at no cost, until computing takes `MARGIN` of the loading time. The ratio never
falls below the floor, the share that quality requires (paper, section 5.1), or what a prompt is recomputed with anyway.

Knows plans and seconds; knows neither engines nor stores.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cacheblend.core.cost.cost_model import MARGIN, CostModel, TierSpeed
from cacheblend.core.names import BlockName
from cacheblend.core.plan.plan import BlendPlan, Source, Span
from cacheblend.core.select.selectors import check_ratio

GIVEN_UP = 2.0
"""What loading from a tier that was given up is taken to last, over the seconds for which it was waited for."""

_WEIGHT = 0.2  # of a new observation in the running averages
_FARTHEST = 8.0  # factor by which a learnt value may differ from the cost model's
_FORGOTTEN = 0.02  # share that is forgotten, each request, of what was learnt of a tier that is not read
_CHECK = 0.3  # of a layer's cost: norm and projections of a check
_FASTEST = 1e-2  # of the loading time that is assumed of a tier of which nothing is known
_FIRST = 3  # passes that read such a tier before their median is believed: the first read opens connections


@dataclass(frozen=True)
class Decision:
    """What a prompt loads and recomputes."""

    ratio: float  # share of the loaded rows to recompute
    left_out: frozenset[BlockName]  # stored blocks that are computed instead of loaded
    # load_s, compute_s, ttft_s, full_s: expected times, the last of a full prefill
    load_s: float
    compute_s: float
    ttft_s: float
    full_s: float
    reason: str  # one line for display
    reused: int = 0  # rows that are loaded and not exact


class Controller:
    """Decides for each prompt, and adjusts its cost model to the times observed. `bytes_per_token`: of stored KV, over
    all layers; `floor`: the least ratio; `check_layer`: all rows are computed before this layer, None: rows are
    selected before layer 0. Raises `InvalidInputError`: a floor outside 0..1."""

    def __init__(
        self,
        cost_model: CostModel,
        *,
        layers: int,
        bytes_per_token: float,
        floor: float = 0.15,
        check_layer: int | None = 1,
    ) -> None:
        check_ratio(floor)
        self._measured, self.layers, self._bytes_per_token, self.floor = cost_model, layers, bytes_per_token, floor
        self._whole = 0.0 if check_layer is None else min(check_layer + _CHECK, layers)
        self._pace = 1.0  # time of full prefills, over the measured
        self._slower: dict[str, float] = {}  # by tier, loading time over the measured
        self._met: dict[str, list[float]] = {}  # the same of tiers that were not measured, of their first passes
        self._overhead = cost_model.overhead

    @property
    def cost_model(self) -> CostModel:  # the initial cost model with the corrections learnt so far
        prefills = tuple((tokens, seconds * self._pace) for tokens, seconds in self._measured.prefill_s)
        tiers = {name: speed.scaled(self._slower.get(name, 1.0)) for name, speed in self._measured.tiers.items()}
        return CostModel(prefills, tiers, self._overhead, self._measured.request_s)

    def decide(self, plan: BlendPlan, least: float | None = None) -> Decision:
        """Which of the stored blocks are loaded, and the ratio; at least `least`, None: the floor. Raises
        `InvalidInputError`: a ratio outside 0..1."""
        least = self.floor if least is None else least
        check_ratio(least)
        found = [s for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED)]
        pace = {tier: self._bytes_per_token / self._speed(tier).bytes_per_s for tier in {s.tier for s in found}}
        # by tier, exact prefixes before others, then by position
        stored = sorted(found, key=lambda span: (pace[span.tier], span.source is not Source.PREFIX, span.start))
        full = self._full_s(len(plan))
        taken = _Taken()
        costs = [self._expected(plan, taken, least)]
        for span in stored:
            taken.add(span)
            costs.append(self._expected(plan, taken, least))
        count = min(range(len(costs)), key=lambda at: (round(costs[at][2], 9), -at))
        load, compute, ttft = costs[count]
        ratio = least if count else 1.0
        loaded = _Taken(stored[:count])
        if loaded.reused:
            low, high = (self._compute_s(plan, loaded, each) for each in (0.0, 1.0))
            hidden = (MARGIN * load - low) / (high - low) if high > low else 0.0  # recomputed behind the loading
            more = float(min(1.0, max(least, hidden)))
            expected = self._expected(plan, loaded, more)
            if expected[2] <= full:  # recomputing more also lengthens the part of a layer that does not overlap
                ratio, (load, compute, ttft) = more, expected
        left_out = frozenset(span.name for span in stored[count:]) - {span.name for span in stored[:count]}
        reason = self._reason(stored, count, ratio, load, compute)
        return Decision(ratio, left_out, load, compute, ttft, full, reason, loaded.reused)

    def learn(self, decision: Decision, plan: BlendPlan, compute_s: float | None, read_s: Mapping[str, float]) -> None:
        """Learns from a finished pass. `plan`: as it was carried out. `compute_s`: without waiting for the loader;
        None: unknown, because other requests computed at the same time. `read_s`: time of reading, by tier."""
        expected = self.load_s([span for span in plan.spans if span.source in (Source.PREFIX, Source.LOADED)])
        for tier in self._slower.keys() - read_s.keys():  # may have become faster since: read from it again some day
            self._slower[tier] = 1 + (self._slower[tier] - 1) * (1 - _FORGOTTEN)
        self.observe(decision, compute_s, {tier: (read_s[tier], expected[tier]) for tier in read_s.keys() & expected})

    def observe(self, decision: Decision, compute_s: float | None, read_s: Mapping[str, tuple[float, float]]) -> None:
        """As `learn`, with the seconds that reading took, and those that were expected, by tier. What the first three
        passes tell of a tier that was not measured is believed at once."""
        if compute_s is not None and decision.compute_s > self._measured.request_s:
            taken, expected = (max(s - self._measured.request_s, 1e-9) for s in (compute_s, decision.compute_s))
            if decision.reused:
                self._overhead = _learnt(self._overhead, taken / expected, self._measured.overhead)
            else:
                self._pace = _learnt(self._pace, taken / expected, 1.0)
        if not decision.reused:  # nothing was blended: blending is tried again some day
            self._overhead += (self._measured.overhead - self._overhead) * _FORGOTTEN
        for tier, (taken, expected) in read_s.items():
            if expected > 0:
                factor = min(max(taken / expected, 0.25), 4.0)
                if tier in self._measured.tiers or tier in self._slower:
                    self._slower[tier] = self._slower.get(tier, 1.0) * (1 + _WEIGHT * (factor - 1))
                else:
                    seen = self._met.setdefault(tier, [])
                    seen.append(taken / expected)
                    if len(seen) == _FIRST:
                        self._slower[tier] = max(statistics.median(self._met.pop(tier)), _FASTEST)

    def load_s(self, spans: Sequence[Span]) -> dict[str, float]:
        """Expected seconds to load these spans, by tier."""
        return self._load_s(_Taken(spans))

    def _full_s(self, tokens: int) -> float:
        return self._pace * self._measured.full_s(tokens)

    def _speed(self, tier: str) -> TierSpeed:
        """Speed of a tier; one that was not measured counts as fast as memory."""
        known = self._measured.tiers.get(tier, TierSpeed(1e10))
        return known.scaled(self._slower.get(tier, 1.0))

    def _load_s(self, taken: "_Taken") -> dict[str, float]:
        return {
            tier: self._speed(tier).seconds(blocks, tokens * self._bytes_per_token, self.layers)
            for tier, (blocks, tokens) in taken.by_tier.items()
        }

    def _expected(self, plan: BlendPlan, taken: "_Taken", ratio: float) -> tuple[float, float, float]:
        """(load, compute, TTFT) in seconds."""
        load, compute = sum(self._load_s(taken).values()), self._compute_s(plan, taken, ratio)
        return load, compute, max(load, compute) + min(load, compute) / self.layers

    def _compute_s(self, plan: BlendPlan, taken: "_Taken", ratio: float) -> float:
        full = self._full_s(len(plan))
        if not taken.names:
            return full
        rows = len(plan) - taken.exact
        unit = (full - self._full_s(taken.exact)) / max(1, rows) / self.layers
        fresh = rows - taken.reused + ratio * taken.reused
        row_layers = rows * self._whole + fresh * (self.layers - self._whole)
        return self._measured.request_s + unit * row_layers * (self._overhead if taken.reused else 1.0)

    def _reason(self, stored: Sequence[Span], count: int, ratio: float, load: float, compute: float) -> str:
        if not stored:
            return "nothing is stored"
        if not count:
            return "computing the whole prompt is expected to be faster than loading any of it"
        tiers = ", ".join(dict.fromkeys(span.tier or "memory" for span in stored[:count]))
        what = "all" if count == len(stored) else f"{count} of {len(stored)}"
        why = "computing takes longer than loading" if compute >= load else "loading takes longer than computing"
        return f"{what} stored blocks from {tiers}; recompute {ratio:.2f}: {why} ({compute:.3f} s, {load:.3f} s)"


def _learnt(value: float, factor: float, start: float) -> float:
    """The next value of a running average after `factor` times it was observed; at most `_FARTHEST` times `start`."""
    value *= 1 + _WEIGHT * (min(max(factor, 0.25), 4.0) - 1)
    return min(max(value, start / _FARTHEST), start * _FARTHEST)


class _Taken:
    """A set of spans to load. A repeated chunk is read once."""

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self.names: set[BlockName] = set()  # of the blocks
        self.by_tier: dict[str, list[int]] = {}  # [blocks, tokens] that are read
        self.exact = self.reused = 0  # rows of the prompt that are exact prefix, and all others
        for span in spans:
            self.add(span)

    def add(self, span: Span) -> None:
        if span.source is Source.PREFIX:
            self.exact += len(span)
        else:
            self.reused += len(span)
        if span.name not in self.names:
            self.names.add(span.name)
            counts = self.by_tier.setdefault(span.tier, [0, 0])
            counts[0] += 1
            counts[1] += span.record_tokens
