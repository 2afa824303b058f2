"""What a user sets of blending; engines and the command line derive from it."""

from dataclasses import dataclass
from typing import Literal, get_args

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.selection import Hkvd, Selector, make_selector
from cacheblend.core.selection import check_ratio as check_ratio

AnchorKind = Literal["auto", "none", "bos", "system"]


@dataclass(frozen=True)
class BlendConfig:
    """How prompts are blended. The defaults are the paper's (section 5: check layer 1, r = 0.15).

    Attributes:
        recompute_ratio: share of the loaded, non-prefix tokens that are recomputed, 0..1.
        selector: hkvd, threshold, head, random, none or all.
        check_layers: layers at whose entrance deviation is measured; several are gradual filtering.
        ratios: one ratio for each check layer, falling; None: `recompute_ratio` at all of them.
        measure: deviation over ``"kv"``, ``"k"`` or ``"v"``.
        threshold: bound of the squared deviation, for the selector of that name.
        anchor: what stands in front of a chunk when it is computed alone: the BOS token, the prompt's whole
            system prompt, or nothing; auto: BOS where the tokenizer sets one.
        block_size: tokens of a block at most.
        salt: separates tenants who must not share a store's contents.
        tile_rows: rows that go through a layer at once; bounds the memory of a long prompt.
        read_ahead: layers loaded ahead of the one being computed.
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
    anchor: AnchorKind = "auto"
    block_size: int = 256
    salt: str = ""
    tile_rows: int = 1024
    read_ahead: int = 2
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
        self.make_selector()

    def make_selector(self, ratio: float | None = None) -> Selector:
        """The selector these settings name; `ratio` overrides the configured one (and `ratios`)."""
        if ratio is not None:
            check_ratio(ratio)
        if self.selector == "hkvd":
            ratios = self.ratios if ratio is None and self.ratios else None
            target = self.recompute_ratio if ratio is None else ratio
            return Hkvd(self.check_layers, ratios or (target,) * len(self.check_layers), self.measure)
        return make_selector(
            self.selector,
            ratio=self.recompute_ratio if ratio is None else ratio,
            check_layers=self.check_layers,
            measure=self.measure,
            threshold=self.threshold,
        )
