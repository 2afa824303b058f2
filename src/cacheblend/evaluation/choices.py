"""Makes methods from names, selectors, ratios and check layers: each combination once."""

from collections.abc import Sequence
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selection import Ratios, SelectorChoice
from cacheblend.core.select.selectors import Gradual, NoRows, Selector
from cacheblend.evaluation.methods import FullRecompute, Fused, Label, MapReduce, MapRerank, Method, PrefixCaching

METHODS = ("full", "prefix", "reuse", "blend", "map-reduce", "map-rerank")
PROFILE = "profile"


def make_methods(
    names: Sequence[str] = ("full", "prefix", "reuse", "blend"),
    *,
    selectors: Sequence[str] = ("hkvd",),
    ratios: Sequence[Ratios | float] = (0.15,),
    check_layers: Sequence[Sequence[int] | None] = (None,),
    profile: BlendConfig | None = None,
) -> list[Method]:
    """Makes the named methods; ``blend`` makes one for each combination of selectors, ratios and check layers.

    Decreasing ratios are only combined with as many check layers. Combinations with equal selectors (of selectors
    without a ratio, or without check layers) make one method.

    Args:
        names: of `METHODS`.
        selectors: see `SelectorChoice`; ``profile`` blends with `profile` and ignores ratios and check layers.
        ratios: each is one ratio, or decreasing ones.
        check_layers: each is one list of check layers, or None for the selector's own: hkvd then filters gradually.
        profile: the model's own settings (`BlendEngine.settings`).

    Raises:
        InvalidInputError: an unknown name, or decreasing ratios without as many check layers.
    """
    makers: dict[str, Any] = {
        "full": FullRecompute,
        "prefix": PrefixCaching,
        "reuse": lambda: Fused(Label("reuse", "reuse", "reuse", "none", 0.0), NoRows()),
        "map-reduce": MapReduce,
        "map-rerank": MapRerank,
    }
    methods: list[Method] = []
    for name in dict.fromkeys(names):
        if name not in METHODS:
            raise InvalidInputError(f"there is no method {name!r}; choose from {', '.join(METHODS)}")
        methods += [makers[name]()] if name in makers else _blends(selectors, _tuples(ratios), check_layers, profile)
    if not methods:
        raise InvalidInputError(f"there is no method to evaluate; choose from {', '.join(METHODS)}")
    return methods


def _tuples(ratios: Sequence[Ratios | float]) -> list[Ratios]:
    return [ratio if isinstance(ratio, tuple) else (float(ratio),) for ratio in ratios]


def _blends(
    selectors: Sequence[str],
    ratios: list[Ratios],
    check_layers: Sequence[Sequence[int] | None],
    profile: BlendConfig | None,
) -> list[Method]:
    checks = list(dict.fromkeys(None if layers is None else tuple(layers) for layers in check_layers))
    for decreasing in ratios:
        if len(decreasing) > 1 and not any(layers and len(layers) == len(decreasing) for layers in checks):
            raise InvalidInputError(
                f"{len(decreasing)} decreasing ratios {decreasing} need as many check layers, got {checks}"
            )
    seen: list[Selector] = []
    methods: list[Method] = [] if PROFILE not in selectors else [_of_profile(profile)]
    for choice in (SelectorChoice.parse(text) for text in dict.fromkeys(selectors) if text != PROFILE):
        for layers in checks:
            for decreasing in ratios:
                if len(decreasing) not in (1, len(layers or (1,))):
                    continue
                selector = choice.selector(decreasing, layers)
                if selector not in seen:
                    seen.append(selector)
                    methods.append(Fused(_label(choice, decreasing, layers, selector), selector))
    return methods


def _of_profile(profile: BlendConfig | None) -> Method:
    if profile is None:
        raise InvalidInputError(f"the selector {PROFILE!r} needs a model's settings; choose another selector")
    selector = profile.make_selector()
    has_ratio = profile.make_selector(0.0) != profile.make_selector(1.0)
    ratio = profile.recompute_ratio if has_ratio else None
    return Fused(Label(f"blend {PROFILE}", "blend", PROFILE, PROFILE, ratio, selector.check_layers), selector)


def _label(choice: SelectorChoice, decreasing: Ratios, layers: tuple[int, ...] | None, selector: Selector) -> Label:
    # A selector that is the same at r = 0 and r = 1 has no ratio.
    has_ratio = choice.selector((0.0,), layers) != choice.selector((1.0,), layers)
    at = " @" + ",".join(map(str, selector.check_layers)) if selector.check_layers else ""
    if isinstance(selector, Gradual):
        at = " gradual"  # where it checks depends on the model
    family = f"{choice.text}{at}"
    name = f"blend {family}" + (" r=" + ",".join(f"{r:g}" for r in decreasing) if has_ratio else "")
    return Label(name, "blend", family, choice.text, decreasing[-1] if has_ratio else None, selector.check_layers)
