"""Settings of the shadow check."""

import math
from dataclasses import dataclass

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.bounds import allowed_errors, check_share, needed_rows

WINDOW = 200
"""Comparisons of a window where no floor asks for more."""

ERRORS = 4
"""Disagreements that a window of its own size forgives; with fewer, chance alone would raise a ratio often."""

MOST_WINDOW = 20_000


@dataclass(frozen=True)
class ShadowSettings:
    """How answers are checked.

    Attributes:
        share: of the blended requests, drawn at random, that are computed once more in full; above 0, at most 1. While
            an engine is never idle it is also the share of the time that this may take.
        floor: least agreement with full prefill, between 0 and 1; None: the ratio stays as it is.
        confidence: of the one-sided bounds.
        window: comparisons that agreement is taken over; None: the fewest with which four disagreements reach the floor
            (181 for 0.95), or 200 without one.

    Raises:
        InvalidInputError: a value outside its limits, or a window too small for the floor.
    """

    share: float
    floor: float | None = None
    confidence: float = 0.95
    window: int | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.share) and 0 < self.share <= 1):
            raise InvalidInputError(
                f"the share of requests that are checked must be above 0 and at most 1, got {self.share!r}"
            )
        check_share("the confidence of the shadow check", self.confidence)
        if self.window is not None and not 1 <= self.window <= MOST_WINDOW:
            raise InvalidInputError(f"the window of the shadow check must be in 1..{MOST_WINDOW}, got {self.window}")
        if self.floor is None:
            return
        if not _is_number(self.floor):
            raise InvalidInputError(f"the floor of the shadow check must be a number, got {self.floor!r}")
        check_share("the floor of the shadow check", self.floor)
        if self.rows > MOST_WINDOW:
            raise InvalidInputError(
                f"a floor of {self.floor} takes {self.rows} comparisons to decide, and at most {MOST_WINDOW} are kept; "
                "lower it"
            )
        if allowed_errors(self.rows, self.floor, self.confidence) < 0:
            least = needed_rows(self.floor, self.confidence)
            raise InvalidInputError(
                f"a window of {self.window} cannot show an agreement of {self.floor}: at least {least} are needed"
            )

    @property
    def rows(self) -> int:
        """Comparisons of a window."""
        if self.window is not None:
            return self.window
        if self.floor is None:
            return WINDOW
        return needed_rows(self.floor, self.confidence, ERRORS)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
