"""What a user sets of blending; engines and the command line derive from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.select.question_selectors import Hybrid, Pool, Query, Rank
from cacheblend.core.select.selectors import (
    AllRows,
    Head,
    Hkvd,
    NoRows,
    RandomRows,
    Selector,
    Threshold,
    check_ratio,
    check_schedule,
)

AnchorKind = Literal["auto", "none", "bos", "system"]


@dataclass(frozen=True)
class BlendConfig:
    """How prompts are blended. The defaults are the paper's (section 5: check layer 1, r = 0.15).

    Attributes:
        recompute_ratio: share of the loaded, non-prefix tokens that are recomputed, 0..1.
        selector: hkvd, query, hybrid, threshold, head, random, none or all.
        check_layers: layers at whose entrance deviation is measured; several are gradual filtering.
        ratios: one ratio for each check layer, falling; None: `recompute_ratio` at all of them.
        measure: deviation over ``"kv"``, ``"k"`` or ``"v"``.
        threshold: bound of the squared deviation, for the selector of that name.
        pool: query and hybrid take rows by ``"sentence"``, or in spans of so many tokens (1: row by row).
        lead: sentences (or spans) in front of an attended one that query and hybrid take with it.
        question_rows: rows of the question, at most, whose attention query and hybrid ask for.
        question_words: weight of the question's rare words, by token id, beside its attention; 0: none.
        early_ratio: share that hybrid keeps from layer 0 on, raised to the first ratio where that is larger; None:
            three times the last ratio.
        rank: at check layers hybrid ranks by ``"deviation"``, or by ``"either"`` of deviation and attention.
        anchor: what stands in front of a chunk when it is computed alone: the BOS token, the prompt's whole
            system prompt, or nothing; auto: BOS where the tokenizer sets one.
        block_size: tokens of a block at most.
        codec: how stored chunks are compressed: raw (not at all), fp8, int8 or int4.
        salt: separates tenants who must not share a store's contents.
        tile_rows: rows that go through a layer at once; bounds the memory of a long prompt.
        read_ahead: layers loaded ahead of the one being computed.
        cost_model: a cost model's file (`cacheblend calibrate`), by which the loading controller decides what is
            loaded, and raises the ratio where loading takes longer. None: all that is stored is loaded.
        capture: store missed chunks after the request, in the background.
        capture_queue: missed chunks that wait for that at most; more are dropped and counted.
        capture_batch_tokens: tokens (padding included) that `warm` computes at once.
    """

    recompute_ratio: float = 0.15
    selector: str = "hkvd"
    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] | None = None
    measure: Literal["kv", "k", "v"] = "kv"
    threshold: float | None = None
    pool: Pool = "sentence"
    lead: int = 1
    question_rows: int = 64
    question_words: float = 0.0
    early_ratio: float | None = None
    rank: Rank = "either"
    anchor: AnchorKind = "auto"
    block_size: int = 256
    codec: str = "raw"
    salt: str = ""
    tile_rows: int = 1024
    read_ahead: int = 2
    cost_model: str | None = None
    capture: bool = True
    capture_queue: int = 256
    capture_batch_tokens: int = 4096

    def __post_init__(self) -> None:
        check_ratio(self.recompute_ratio)
        for name in ("block_size", "tile_rows", "capture_batch_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("read_ahead", "capture_queue"):
            if getattr(self, name) < 0:
                raise InvalidInputError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.anchor not in get_args(AnchorKind):
            raise InvalidInputError(f"anchor must be one of {', '.join(get_args(AnchorKind))}, got {self.anchor!r}")
        codec_of(self.codec)
        self.make_selector()

    def make_selector(self, ratio: float | None = None) -> Selector:
        """The selector these settings name; `ratio` overrides the configured one (and `ratios`)."""
        if ratio is not None:
            check_ratio(ratio)
        share = self.recompute_ratio if ratio is None else ratio
        falling = self.ratios if self.ratios and ratio is None else (share,) * len(self.check_layers)
        makers: dict[str, Callable[[], Selector]] = {
            "hkvd": lambda: Hkvd(self.check_layers, falling, self.measure),
            "query": lambda: Query(share, *self._asking),
            "hybrid": lambda: self._hybrid(falling),
            "threshold": lambda: Threshold(self._bound(), self.check_layers, self.measure),
            "head": lambda: Head(share),
            "random": lambda: RandomRows(share),
            "none": NoRows,
            "all": AllRows,
        }
        if self.selector not in makers:
            raise InvalidInputError(f"no selector is called {self.selector!r}; there are {', '.join(makers)}")
        return makers[self.selector]()

    def _hybrid(self, ratios: tuple[float, ...]) -> Hybrid:
        check_schedule(self.check_layers, ratios)
        early = min(1.0, 3 * ratios[-1]) if self.early_ratio is None else self.early_ratio
        check_ratio(early)
        early = max(early, ratios[0])
        return Hybrid(self.check_layers, ratios, early, self.rank, self.measure, *self._asking)

    @property
    def _asking(self) -> tuple[Pool, int, int, float]:
        """How the question is asked, in the order of the selectors' fields."""
        return self.pool, self.lead, self.question_rows, self.question_words

    def _bound(self) -> float:
        if self.threshold is None:
            raise InvalidInputError("the selector 'threshold' needs a bound; set `threshold`")
        return self.threshold
