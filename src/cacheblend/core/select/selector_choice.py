"""A selector with its settings as one text, as people write it: ``query:question_words=1,hops=1``."""

import json
from dataclasses import dataclass, fields
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selection import Selection
from cacheblend.core.select.selectors import Selector

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

    def selector(self, ratios: Ratios, check_layers: tuple[int, ...] | None) -> Selector:
        """The selector with these settings.

        Raises:
            InvalidInputError: an unknown selector, or a value outside its range.
        """
        settings = dict(self.settings) | {"recompute_ratio": ratios[-1], "check_layers": check_layers}
        if len(ratios) > 1:
            settings["ratios"] = ratios
        return Selection(**settings).make_selector()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
