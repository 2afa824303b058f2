"""What the parameters of selectors may be; each check names the value and the limit."""

import math
from typing import get_args

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels.deviation import Measure


def check_ratio(ratio: float) -> None:
    """Raises `InvalidInputError` unless 0 <= ratio <= 1."""
    is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if not (is_number and math.isfinite(ratio) and 0 <= ratio <= 1):
        raise InvalidInputError(f"a recompute ratio must be in 0..1, got {ratio!r}")


def check_schedule(layers: tuple[int, ...], ratios: tuple[float, ...]) -> None:
    """Raises `InvalidInputError` unless every check layer has a ratio in 0..1 and the ratios do not rise."""
    check_layer_numbers(layers)
    if len(ratios) != len(layers):
        raise InvalidInputError(f"{len(layers)} check layers {layers} need as many ratios, got {ratios}")
    if any(not 0 <= ratio <= 1 for ratio in ratios):
        raise InvalidInputError(f"recompute ratios must be in 0..1, got {ratios}")
    if list(ratios) != sorted(ratios, reverse=True):
        raise InvalidInputError(f"ratios must not rise from one check layer to the next, got {ratios}")


def check_measure(measure: Measure) -> None:
    """Raises `InvalidInputError` unless it is one of `Measure`."""
    if measure not in get_args(Measure):
        raise InvalidInputError(f"measure must be one of {', '.join(get_args(Measure))}, got {measure!r}")


def check_layer_numbers(layers: tuple[int, ...]) -> None:
    """Raises `InvalidInputError` unless they are whole numbers, ascending, at least 1."""
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
    if not layers or not whole or list(layers) != sorted(set(layers)) or layers[0] < 1:
        raise InvalidInputError(
            f"check layers must be whole numbers, ascending, at least 1 (layer 0 has no deviation), got {layers}"
        )
