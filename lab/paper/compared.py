"""The methods that the figures compare, by family: a family has the same name and colour in all of them."""

from cacheblend.core.config import BlendConfig
from cacheblend.core.select.selectors import Gradual, Hkvd, NoRows, Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation.methods import FullRecompute, Fused, Label, Method, PrefixCaching

FULL, PREFIX, REUSE, BLEND, GRADUAL, ONE_CHECK = "full", "prefix", "reuse", "blend", "gradual", "one check"
TITLES = {
    FULL: "full recompute",
    PREFIX: "prefix caching",
    REUSE: "full reuse",
    BLEND: "blend",
    GRADUAL: "HKVD, gradual (paper)",
    ONE_CHECK: "HKVD, one check (authors' code)",
}
"""Names of the families, in their order in legends and tables."""
RATIOS = {GRADUAL: 0.15, ONE_CHECK: 0.16}
"""The paper's recompute ratio, and that of the authors' code."""


def methods(engine: BlendEngine) -> list[Method]:
    """One method of each family; ``blend`` has the model's own settings."""
    return [
        FullRecompute(Label(TITLES[FULL], FULL, FULL)),
        PrefixCaching(Label(TITLES[PREFIX], PREFIX, PREFIX)),
        Fused(Label(TITLES[REUSE], REUSE, REUSE), NoRows()),
        *blends(engine),
    ]


def blends(engine: BlendEngine) -> list[Fused]:
    """The blends among `methods`."""
    own = engine.settings.config
    ratio = own.recompute_ratio if _has_ratio(own) else None
    return [
        Fused(Label(TITLES[BLEND], BLEND, BLEND, own.selector, ratio), engine.settings.selector()),
        *(_hkvd(family, RATIOS[family], TITLES[family]) for family in (GRADUAL, ONE_CHECK)),
    ]


def at_ratios(engine: BlendEngine, ratios: tuple[float, ...]) -> list[Method]:
    """Every blend at each ratio, except those among `methods`; the model's own settings only if they have a ratio."""
    own = engine.settings.config
    found: list[Method] = []
    for ratio in dict.fromkeys(ratios):
        if _has_ratio(own) and ratio != own.recompute_ratio:
            label = Label(f"{TITLES[BLEND]}, r = {ratio:g}", BLEND, BLEND, own.selector, ratio)
            found.append(Fused(label, own.make_selector(ratio)))
        for family, usual in RATIOS.items():
            if ratio != usual:
                found.append(_hkvd(family, ratio, f"{TITLES[family]}, r = {ratio:g}"))
    return found


def own_is(engine: BlendEngine) -> str:
    """The family that the model's own settings are the same as; empty if they are none of the others."""
    own = engine.settings.selector()
    return next((family for family, ratio in RATIOS.items() if _selector(family, ratio) == own), "")


def _hkvd(family: str, ratio: float, name: str) -> Fused:
    return Fused(Label(name, BLEND, family, "hkvd", ratio), _selector(family, ratio))


def _selector(family: str, ratio: float) -> Selector:
    return Gradual(ratio) if family == GRADUAL else Hkvd((1,), (ratio,), "v")


def _has_ratio(own: BlendConfig) -> bool:
    return own.make_selector(0.0) != own.make_selector(1.0)
