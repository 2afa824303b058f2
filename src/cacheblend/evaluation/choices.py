"""Makes methods from names, selectors, ratios and check layers: each combination once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selection import Selection
from cacheblend.core.select.selectors import NoRows, Selector
from cacheblend.evaluation.methods import FullRecompute, Fused, Label, MapReduce, MapRerank, Method, PrefixCaching

METHODS = ("full", "prefix", "reuse", "blend", "map-reduce", "map-rerank")
PROFILE = "profile"
Ratios = tuple[float, ...]
"""One ratio, or decreasing ones, one for each check layer."""

_SEPARATE_OPTIONS = ("selector", "recompute_ratio", "ratios", "check_layers")


@dataclass(frozen=True)
class SelectorChoice:
    """A selector as requested: ``hkvd``, or with settings of `Selection`, ``hkvd:measure=v``.

    Attributes:
        text: as given by the user.
        settings: fields for `Selection`.
    """

    text: str
    settings: tuple[tuple[str, Any], ...]

    @staticmethod
    def parse(text: str) -> "SelectorChoice":
        """``name`` or ``name:setting=value,setting=value``.

        Raises:
            InvalidInputError: an unknown setting, or a setting without a value.
        """
        name, _, rest = text.partition(":")
        known = [field.name for field in fields(Selection) if field.name not in _SEPARATE_OPTIONS]
        settings: dict[str, Any] = {"selector": name.strip()}
        for part in filter(None, (part.strip() for part in rest.split(","))):
            key, equals, value = part.partition("=")
            if equals and key not in known:
                raise InvalidInputError(
                    f"selector {text!r}: there is no setting {key!r} here; settings are {', '.join(known)}"
                )
            if not equals:
                raise InvalidInputError(
                    f"selector {text!r}: {part!r} is not of the form setting=value; settings are {', '.join(known)}"
                )
            settings[key] = _value(value)
        return SelectorChoice(text.strip(), tuple(settings.items()))

    def selector(self, ratios: Ratios, check_layers: tuple[int, ...]) -> Selector:
        """The selector with these settings.

        Raises:
            InvalidInputError: an unknown selector, or a value outside its range.
        """
        settings = dict(self.settings) | {"recompute_ratio": ratios[-1], "check_layers": check_layers}
        if len(ratios) > 1:
            settings["ratios"] = ratios
        try:
            return Selection(**settings).make_selector()
        except TypeError as error:
            raise InvalidInputError(f"selector {self.text!r}: a setting has the wrong type: {error}") from error


def make_methods(
    names: Sequence[str] = ("full", "prefix", "reuse", "blend"),
    *,
    selectors: Sequence[str] = ("hkvd",),
    ratios: Sequence[Ratios | float] = (0.15,),
    check_layers: Sequence[Sequence[int]] = ((1,),),
    profile: BlendConfig | None = None,
) -> list[Method]:
    """Makes the named methods; ``blend`` makes one for each combination of selectors, ratios and check layers.

    Decreasing ratios are only combined with as many check layers. Combinations with equal selectors (of selectors
    without a ratio, or without check layers) make one method.

    Args:
        names: of `METHODS`.
        selectors: see `SelectorChoice`; ``profile`` blends with `profile` and ignores ratios and check layers.
        ratios: each is one ratio, or decreasing ones.
        check_layers: each is one list of check layers.
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
    check_layers: Sequence[Sequence[int]],
    profile: BlendConfig | None,
) -> list[Method]:
    for decreasing in ratios:
        if len(decreasing) > 1 and not any(len(layers) == len(decreasing) for layers in check_layers):
            raise InvalidInputError(
                f"{len(decreasing)} decreasing ratios {decreasing} need as many check layers, got {list(check_layers)}"
            )
    seen: list[Selector] = []
    methods: list[Method] = [] if PROFILE not in selectors else [_of_profile(profile)]
    for choice in (SelectorChoice.parse(text) for text in dict.fromkeys(selectors) if text != PROFILE):
        for layers in dict.fromkeys(map(tuple, check_layers)):
            for decreasing in ratios:
                if len(decreasing) not in (1, len(layers)):
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


def _label(choice: SelectorChoice, decreasing: Ratios, layers: tuple[int, ...], selector: Selector) -> Label:
    # A selector that is the same at r = 0 and r = 1 has no ratio.
    has_ratio = choice.selector((0.0,), layers) != choice.selector((1.0,), layers)
    at = " @" + ",".join(map(str, selector.check_layers)) if selector.check_layers else ""
    family = f"{choice.text}{at}"
    name = f"blend {family}" + (" r=" + ",".join(f"{r:g}" for r in decreasing) if has_ratio else "")
    return Label(name, "blend", family, choice.text, decreasing[-1] if has_ratio else None, selector.check_layers)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
