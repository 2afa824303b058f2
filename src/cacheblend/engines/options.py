"""Settings that commands have as options, as fields of frozen dataclasses; `cli.option_groups` reads them."""

from dataclasses import field
from typing import Annotated, Any

OF_THE_GROUP: Any = object()
MOST_TOKENS = 1 << 24
"""Upper bound of options that count tokens: far above any model's context, and small enough to allocate."""


def option(
    default: Any, text: str, *names: str, panel: str | None = OF_THE_GROUP, least: Any = None, most: Any = None
) -> Any:
    """A field or parameter that is an option of its name: ``--store``; ``--capture/--no-capture`` of a bool that is on.
    With the default ``...`` the user must give a value. `text` is for the help; of the further `names`, such as ``-s``,
    one that begins with ``--`` replaces its own. `panel` is its title in the help; left out: the attribute `panel` of
    the group that declares it, if any. `least` and `most` bound its number."""
    declared = {"option": (names, panel, {"help": text, "min": least, "max": most})}
    return field(metadata=declared) if default is ... else field(default=default, metadata=declared)


Shadow = Annotated[
    float, option(..., "Share of blended answers to compute again in full, and compare.", least=0, most=1, panel=None)
]
