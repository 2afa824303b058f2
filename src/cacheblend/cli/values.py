"""Values of options that are written as text: numbers and names with commas between them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

N = TypeVar("N", int, float)


def numbers(option: str, text: str, of: Callable[[str], N]) -> tuple[N, ...]:
    """``"0.45,0.3"`` as numbers.

    Raises:
        InvalidInputError: one of them is none; names the option.
    """
    import math

    from cacheblend.core.errors import InvalidInputError

    try:
        found = tuple(of(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInputError(f"{option} {text}: expected a number, or several with commas") from error
    if not all(math.isfinite(number) for number in found):
        raise InvalidInputError(f"{option} {text}: expected finite numbers")
    return found


def names(values: Sequence[str] | None) -> tuple[str, ...]:
    """``["full,blend", "miss"]`` as single names."""
    return tuple(name.strip() for value in values or () for name in value.split(",") if name.strip())
