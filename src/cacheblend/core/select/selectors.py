"""Selectors: which of the loaded rows are recomputed. A selector is a frozen dataclass with one method, `select`. Its
properties say when it is asked (before layer 0, at the entrance of its `check_layers`, or both) and what it needs
(deviations, the question's attention). Nobody branches on its type. `core.select.question_selectors` has the selectors
that use the question; `Late` and `Recorded` wrap others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from cacheblend.core.errors import InvalidInputError, check_fields
from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.kernels.upload import upload


@dataclass(frozen=True)
class Candidates:
    """Rows with loaded KV that are still active, ascending by position. Misses, the suffix and prefix hits are not
    candidates.

    Attributes:
        positions: [n] int64, in the prompt.
        chunk_offsets: [n] int64, the row's place inside its chunk.
        total: number of candidates before any selection; ratios refer to it.
        layer: the check layer, None before layer 0.
        deviation: [n] fp32 squared KV deviation at that layer, summed over all KV heads (and ranks).
        attention: [n] fp32, how much more the question's rows attend to the row than a generic row does, see
            `core.fuse.question`; None if the selector did not ask for it.
        words: [n] fp32 0..1, weight of the row's token as a rare word of the question, see
            `core.fuse.question`; None if the selector did not ask for it.
        hop_words: [n] fp32 0..1, weight of the row's token as a rare word of the spans that hops followed; None if none
            was followed.
        segments: [n] int64, the segment it belongs to.
        sentences: [n] int64, the sentence it belongs to; None if the tokens that end a sentence are unknown.
    """

    positions: torch.Tensor
    chunk_offsets: torch.Tensor
    total: int
    layer: int | None = None
    deviation: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    words: torch.Tensor | None = None
    hop_words: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    sentences: torch.Tensor | None = None


class FoundSpan(NamedTuple):
    """A span of the text that has been found: candidates `first` to `stop` - 1, and its highest attention."""

    first: int
    stop: int
    attention: float


class Selector(Protocol):
    """Chooses the rows that stay active; the base of all selectors.

    The properties' defaults describe a selector that decides once, before layer 0, and needs nothing for it.
    """

    @property
    def name(self) -> str:
        """What the settings call it."""
        return type(self).__name__.removesuffix("Rows").lower()

    @property
    def share(self) -> float | None:
        """Share of the candidates that is recomputed, as the settings name it; None: it depends on what is found."""
        return getattr(self, "ratio", None)

    @property
    def check_layers(self) -> tuple[int, ...]:
        """Layers, ascending, at whose entrance `select` is called with deviations."""
        return ()

    @property
    def at_start(self) -> bool:
        """Whether `select` is called before layer 0, without deviations."""
        return not self.check_layers

    @property
    def question_rows(self) -> int:
        """Most rows of the question whose attention the selector needs (at least 2); 0: it needs no attention."""
        return 0

    @property
    def correction(self) -> float:
        """Share of the mean deviation of a chunk's recomputed keys by which those of its other rows are moved, 0..1."""
        return 0.0

    @property
    def hops(self) -> int:
        """How often the words of the spans that were found are looked for in turn; 0: never."""
        return 0

    @property
    def hop_spans(self) -> int:
        """Most spans that a hop follows."""
        return 1

    def found_spans(self, candidates: Candidates, count: int) -> list[FoundSpan]:
        """The `count` spans of highest attention, the highest first; only with `hops`. Waits for the device, since the
        host looks for their words."""
        return []

    @property
    def measure(self) -> Measure:
        """Whether the deviation is taken over keys, values, or both."""
        return "kv"

    def of_model(self, layers: int) -> "Selector":
        """The same for a model of so many layers; engines ask this one."""
        return self

    def select(self, candidates: Candidates) -> torch.Tensor:
        """The candidates that stay active, on their device: [m] int64 indices into them, ascending. Or boolean [n], for
        which the host has to wait until the device knows how many there are."""


@dataclass(frozen=True)
class Hkvd(Selector):
    """The rows of highest KV deviation (paper section 4.3); several check layers are gradual filtering.

    One check at layer 1 over the values alone is what the authors' code does; the paper describes `Gradual`.

    Attributes:
        check_layers: ascending, each at least 1 (layer 0's deviation is zero by construction).
        ratios: for each check layer, the share of all candidates that stays active after it.
        measure: deviation over K and V, or one of them.
    """

    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.15,)
    measure: Measure = "kv"

    def __post_init__(self) -> None:
        check_schedule(self.check_layers, self.ratios)
        check_fields(self, ("measure",))

    @property
    def share(self) -> float:
        return self.ratios[-1]

    def select(self, candidates: Candidates) -> torch.Tensor:
        deviation, layer = measured(candidates)
        ratio = self.ratios[self.check_layers.index(layer)]
        count = min(row_count(ratio, candidates.total), len(deviation))
        return deviation.topk(count).indices.sort().values


@dataclass(frozen=True)
class Gradual(Selector):
    """HKVD as the paper describes it (section 4.3, figure 9): at each of the first layers some rows are dropped.

    The paper gives no ratios. Those of `GRADUAL_SHARES` are scaled so that a pass costs what one check at layer 1 with
    the ratio costs: over the layers behind the first, the mean share of active rows is the ratio.

    Attributes:
        ratio: that mean share.
        measure: deviation over K and V, or one of them.
    """

    ratio: float
    measure: Measure = "kv"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_fields(self, ("measure",))

    @property
    def name(self) -> str:
        return "hkvd"

    @property
    def check_layers(self) -> tuple[int, ...]:  # of a model that has them all
        return tuple(range(1, 1 + len(GRADUAL_SHARES)))

    def of_model(self, layers: int) -> Selector:
        """The check layers that the model has, and their ratios, without checks that would drop nothing."""
        checks = self.check_layers[: max(1, layers - 1)]
        lasting = [*(1 for _ in checks[1:]), max(1, layers - checks[-1])]
        ratios = scaled_shares(GRADUAL_SHARES[: len(checks)], lasting, self.ratio)
        dropping = {check: ratio for check, ratio in zip(checks, ratios, strict=True) if ratio < 1 - 1e-9}
        return Hkvd(tuple(dropping), tuple(dropping.values()), self.measure) if dropping else AllRows()

    def select(self, candidates: Candidates) -> torch.Tensor:
        raise InvalidInputError("how many rows gradual filtering keeps depends on the model; ask of_model(layers)")


GRADUAL_SHARES = (0.5, 0.35, 0.18, 0.05)
"""Shares that stay active after layers 1 to 4, before they are scaled (measured: docs/log.md)."""


def scaled_shares(shares: Sequence[float], lasting: Sequence[int], mean: float) -> tuple[float, ...]:
    """Falling shares above 0 times one factor, each at most 1, so that they have this mean over the layers, of which
    `lasting` run with each share."""
    budget = mean * sum(lasting)
    for full in range(len(shares)):  # the first `full` shares are 1, the factor gives the others
        left = max(0.0, budget - sum(lasting[:full]))
        factor = left / sum(share * count for share, count in zip(shares[full:], lasting[full:], strict=True))
        if factor * shares[full] <= 1:
            return (1.0,) * full + tuple(factor * share for share in shares[full:])
    return (1.0,) * len(shares)


@dataclass(frozen=True)
class Threshold(Selector):
    """Every row whose squared deviation exceeds a bound (the paper's definition before it fixes a share)."""

    bound: float
    check_layers: tuple[int, ...] = (1,)
    measure: Measure = "kv"

    def __post_init__(self) -> None:
        check_layer_numbers(self.check_layers)
        check_fields(self, ("measure",))
        if not (math.isfinite(self.bound) and self.bound >= 0):
            raise InvalidInputError(f"a deviation bound is finite and at least 0, got {self.bound}")

    def select(self, candidates: Candidates) -> torch.Tensor:
        return measured(candidates)[0] > self.bound  # how many they are depends on the numbers


@dataclass(frozen=True)
class Head(Selector):
    """The first tokens of each chunk (EPIC, LegoLink), which became attention sinks when the chunk was computed alone.
    Every chunk gets the same number of rows; with `recency` 1 in proportion to its place, 1, 2, ..., since a question
    attends most to what stands right in front of it; in between, a mixture."""

    ratio: float
    recency: float = 0.0

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_ratio(self.recency, "recency")

    def select(self, candidates: Candidates) -> torch.Tensor:
        """The rows nearest to the start of their chunk; ties go to the row that comes first in the prompt."""
        rank = candidates.chunk_offsets
        if self.recency and candidates.segments is not None:
            place = (runs(candidates.segments) + 1).double()  # in which every device rounds alike
            rank = (rank + 1) / (1 - self.recency + self.recency * (place / place[-1]))
        return torch.argsort(rank, stable=True)[: row_count(self.ratio, candidates.total)].sort().values


@dataclass(frozen=True)
class RandomRows(Selector):
    """A baseline: rows drawn uniformly at random, the same rows for the same seed."""

    ratio: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def select(self, candidates: Candidates) -> torch.Tensor:
        n = len(candidates.positions)
        generator = torch.Generator().manual_seed(self.seed)  # on the CPU, so that every device draws the same rows
        drawn = torch.randperm(n, generator=generator)[: row_count(self.ratio, candidates.total)]
        return upload(drawn.sort().values, candidates.positions.device)


@dataclass(frozen=True)
class AllRows(Selector):
    """All loaded rows are recomputed: full recompute through the fused path."""

    @property
    def share(self) -> float:
        return 1.0

    def select(self, candidates: Candidates) -> torch.Tensor:
        return torch.arange(len(candidates.positions), device=candidates.positions.device)


@dataclass(frozen=True)
class NoRows(Selector):
    """No loaded row is recomputed: full reuse."""

    @property
    def name(self) -> str:
        return "none"

    @property
    def share(self) -> float:
        return 0.0

    def select(self, candidates: Candidates) -> torch.Tensor:
        return candidates.positions.new_empty(0)


def runs(values: torch.Tensor) -> torch.Tensor:
    """The run of equal values that each belongs to, [n] int64 from 0."""
    numbers = torch.zeros_like(values)
    numbers[1:] = (values[1:] != values[:-1]).cumsum(0)
    return numbers


def row_count(ratio: float, total: int) -> int:
    """Number of rows that a share of `total` amounts to, rounded to the nearest."""
    return round(ratio * total)


def measured(candidates: Candidates) -> tuple[torch.Tensor, int]:
    """The candidates' deviations [n] and their check layer. Raises `InvalidInputError` before layer 0."""
    if candidates.deviation is None or candidates.layer is None:
        raise InvalidInputError("this selector decides at check layers and was called without deviations")
    return candidates.deviation, candidates.layer


def check_ratio(ratio: float, name: str = "a recompute ratio") -> None:
    """Raises `InvalidInputError` unless 0 <= ratio <= 1."""
    is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if not (is_number and math.isfinite(ratio) and 0 <= ratio <= 1):
        raise InvalidInputError(f"{name} must be in 0..1, got {ratio!r}")


def check_schedule(layers: tuple[int, ...], ratios: tuple[float, ...]) -> None:
    """Raises `InvalidInputError` unless every check layer has a ratio in 0..1 and the ratios do not rise."""
    check_layer_numbers(layers)
    if len(ratios) != len(layers):
        raise InvalidInputError(f"{len(layers)} check layers {layers} need as many ratios, got {ratios}")
    if any(not 0 <= ratio <= 1 for ratio in ratios):
        raise InvalidInputError(f"recompute ratios must be in 0..1, got {ratios}")
    if list(ratios) != sorted(ratios, reverse=True):
        raise InvalidInputError(f"ratios must not rise from one check layer to the next, got {ratios}")


def check_layer_numbers(layers: tuple[int, ...]) -> None:
    """Raises `InvalidInputError` unless they are whole numbers, ascending, at least 1."""
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
    if not layers or not whole or list(layers) != sorted(set(layers)) or layers[0] < 1:
        raise InvalidInputError(
            f"check layers must be whole numbers, ascending, at least 1 (layer 0 has no deviation), got {layers}"
        )


# ---- in front of others -------------------------------------------------------------------------------------


class Wrapper(Selector):
    """Asked in place of the selector `inner`, whose every property and choice is its own unless it says otherwise."""

    inner: Selector

    def found_spans(self, candidates: Candidates, count: int) -> list[FoundSpan]:
        return self.inner.found_spans(candidates, count)


def _inner(name: str) -> property:
    return property(lambda wrapper: getattr(wrapper.inner, name))


for _name, _declared in vars(Selector).items():
    if isinstance(_declared, property):
        setattr(Wrapper, _name, _inner(_name))


@dataclass(frozen=True)
class Corrected(Wrapper):
    """Another selector, beside whose rows the keys of the others are corrected, see `core.fuse.correction`."""

    inner: Selector
    weight: float

    def __post_init__(self) -> None:
        check_ratio(self.weight, "correction")

    @property
    def correction(self) -> float:
        return self.weight

    def of_model(self, layers: int) -> Selector:
        return replace(self, inner=self.inner.of_model(layers))

    def select(self, candidates: Candidates) -> torch.Tensor:
        return self.inner.select(candidates)


@dataclass(frozen=True)
class Late(Wrapper):
    """Another selector, asked later than it says because earlier layers need all rows. Checks that fall on the same
    layer are made once, with what the last of them keeps. `moved`: for each layer with a check, ascending, the own
    check layer of the inner selector, which does without the question's attention."""

    inner: Selector
    moved: tuple[tuple[int, int], ...]

    @staticmethod
    def of(selector: Selector, layers: Sequence[int]) -> Selector:
        """The selector for a model in which only these layers, ascending, can be checked; itself if nothing changes."""
        moved = dict[int, int]()
        for check in selector.check_layers:
            if (layer := next((layer for layer in layers if layer >= check), None)) is not None:
                moved[layer] = check
        same = tuple(moved.items()) == tuple((check, check) for check in selector.check_layers)
        return selector if same else Late(selector, tuple(moved.items()))

    @property
    def check_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, _ in self.moved)

    def select(self, candidates: Candidates) -> torch.Tensor:
        own = None if candidates.layer is None else dict(self.moved)[candidates.layer]
        return self.inner.select(replace(candidates, layer=own))


@dataclass
class Recorded(Wrapper):
    """Selects as `inner` does, and records every call, for inspection: candidates, and [candidates] bool, True for the
    rows that were kept. A pass that is restarted selects again."""

    inner: Selector
    asked: list[Candidates] = field(default_factory=list)
    keeps: list[torch.Tensor] = field(default_factory=list)

    @property
    def kept(self) -> list[int]:  # positions that the last call kept, ascending
        return self.asked[-1].positions[self.keeps[-1]].tolist() if self.asked else []

    def of_model(self, layers: int) -> Selector:
        return replace(self, inner=self.inner.of_model(layers))  # which records into the same lists

    def select(self, candidates: Candidates) -> torch.Tensor:
        selected = self.inner.select(candidates)
        keep = torch.zeros(len(candidates.positions), dtype=torch.bool, device=selected.device)
        keep[selected] = True  # indices or a mask
        self.asked.append(candidates)
        self.keeps.append(keep)
        return selected
