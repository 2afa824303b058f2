"""Counting what tests break on purpose."""

from collections.abc import Callable


class Faults:
    """What a test broke on purpose, for the summary of the whole run."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def count(self, what: str, number: int = 1) -> None:
        """So many more, all of them answered as they must be."""
        self._record("faults", [what, number])
