"""From names, selectors, ratios and check layers to arms: each combination once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selection import Selection
from cacheblend.core.select.selectors import NoRows, Selector
from cacheblend.evaluation.methods import Arm, FullRecompute, Fused, Label, MapReduce, MapRerank, PrefixCaching

ARMS = ("full", "prefix", "reuse", "blend", "map-reduce", "map-rerank")
PROFILE = "profile"
Ratios = tuple[float, ...]
"""One ratio, or falling ones, one for each check layer."""

_GIVEN_APART = ("selector", "recompute_ratio", "ratios", "check_layers")


@dataclass(frozen=True)
class SelectorChoice:
    """A selector as it was asked for: ``hkvd``, or with settings of `Selection`, ``hkvd:measure=v``.

    Attributes:
        text: as it was written.
        settings: for `Selection`.
    """

    text: str
    settings: tuple[tuple[str, Any], ...]

    @staticmethod
    def parse(text: str) -> "SelectorChoice":
        """``name`` or ``name:setting=value,setting=value``.

        Raises:
            InvalidInputError: no such setting, or no value.
        """
        name, _, rest = text.partition(":")
        known = [field.name for field in fields(Selection) if field.name not in _GIVEN_APART]
        settings: dict[str, Any] = {"selector": name.strip()}
        for part in filter(None, (part.strip() for part in rest.split(","))):
            key, equals, value = part.partition("=")
            if key not in known or not equals:
                raise InvalidInputError(
                    f"selector {text!r}: {part!r} is no setting=value; settings are {', '.join(known)}"
                )
            settings[key] = _value(value)
        return SelectorChoice(text.strip(), tuple(settings.items()))

    def selector(self, ratios: Ratios, check_layers: tuple[int, ...]) -> Selector:
        """The selector that these settings name.

        Raises:
            InvalidInputError: no selector is called that, or a value is out of its range.
        """
        settings = dict(self.settings) | {"recompute_ratio": ratios[-1], "check_layers": check_layers}
        if len(ratios) > 1:
            settings["ratios"] = ratios
        try:
            return Selection(**settings).make_selector()
        except TypeError as error:
            raise InvalidInputError(f"selector {self.text!r}: a setting has the wrong type: {error}") from error


def make_arms(
    names: Sequence[str] = ("full", "prefix", "reuse", "blend"),
    *,
    selectors: Sequence[str] = ("hkvd",),
    ratios: Sequence[Ratios | float] = (0.15,),
    check_layers: Sequence[Sequence[int]] = ((1,),),
    profile: BlendConfig | None = None,
) -> list[Arm]:
    """The named arms; ``blend`` stands for each combination of selectors, ratios and check layers.

    Falling ratios go with check layers of the same number only. Combinations that come to the same selector (of
    selectors that know no ratio, or no check layer) are one arm.

    Args:
        names: of `ARMS`.
        selectors: see `SelectorChoice`; ``profile`` blends by `profile`, whatever the ratios and check layers.
        ratios: each one ratio, or falling ones.
        check_layers: each one list.
        profile: settings of the model's own (`BlendEngine.settings`).

    Raises:
        InvalidInputError: an unknown name, or falling ratios that fit no check layers.
    """
    makers: dict[str, Any] = {
        "full": FullRecompute,
        "prefix": PrefixCaching,
        "reuse": lambda: Fused(Label("reuse", "reuse", "reuse", "none", 0.0), NoRows()),
        "map-reduce": MapReduce,
        "map-rerank": MapRerank,
    }
    arms: list[Arm] = []
    for name in dict.fromkeys(names):
        if name not in ARMS:
            raise InvalidInputError(f"no arm is called {name!r}; there are {', '.join(ARMS)}")
        arms += [makers[name]()] if name in makers else _blends(selectors, _tuples(ratios), check_layers, profile)
    if not arms:
        raise InvalidInputError(f"there is no arm to evaluate; choose from {', '.join(ARMS)}")
    return arms


def _tuples(ratios: Sequence[Ratios | float]) -> list[Ratios]:
    return [ratio if isinstance(ratio, tuple) else (float(ratio),) for ratio in ratios]


def _blends(
    selectors: Sequence[str],
    ratios: list[Ratios],
    check_layers: Sequence[Sequence[int]],
    profile: BlendConfig | None,
) -> list[Arm]:
    for falling in ratios:
        if len(falling) > 1 and not any(len(layers) == len(falling) for layers in check_layers):
            raise InvalidInputError(
                f"{len(falling)} falling ratios {falling} need as many check layers, got {list(check_layers)}"
            )
    seen: list[Selector] = []
    arms: list[Arm] = [] if PROFILE not in selectors else [_of_profile(profile)]
    for choice in (SelectorChoice.parse(text) for text in dict.fromkeys(selectors) if text != PROFILE):
        for layers in dict.fromkeys(map(tuple, check_layers)):
            for falling in ratios:
                if len(falling) not in (1, len(layers)):
                    continue
                selector = choice.selector(falling, layers)
                if selector not in seen:
                    seen.append(selector)
                    arms.append(Fused(_label(choice, falling, layers, selector), selector))
    return arms


def _of_profile(profile: BlendConfig | None) -> Arm:
    if profile is None:
        raise InvalidInputError(f"the selector {PROFILE!r} needs the settings of a model; name another one")
    selector = profile.make_selector()
    has_ratio = profile.make_selector(0.0) != profile.make_selector(1.0)
    ratio = profile.recompute_ratio if has_ratio else None
    return Fused(Label(f"blend {PROFILE}", "blend", PROFILE, PROFILE, ratio, selector.check_layers), selector)


def _label(choice: SelectorChoice, falling: Ratios, layers: tuple[int, ...], selector: Selector) -> Label:
    # A selector that comes out the same at r = 0 and r = 1 knows no ratio.
    has_ratio = choice.selector((0.0,), layers) != choice.selector((1.0,), layers)
    at = " @" + ",".join(map(str, selector.check_layers)) if selector.check_layers else ""
    family = f"{choice.text}{at}"
    name = f"blend {family}" + (" r=" + ",".join(f"{r:g}" for r in falling) if has_ratio else "")
    return Label(name, "blend", family, choice.text, falling[-1] if has_ratio else None, selector.check_layers)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
