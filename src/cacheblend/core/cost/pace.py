"""How fast a model computes on this device, learnt from the passes that it has computed. Knows rows and seconds."""

_KEPT = 0.8  # share of what was learnt before that counts beside a new pass


class Pace:
    """Seconds of rows times layers. Short passes count less than long ones, which use a device better."""

    def __init__(self) -> None:
        self._row_layers = self._seconds = 0.0

    def learn(self, row_layers: int, seconds: float) -> None:
        """A pass computed so many rows times layers in so many seconds."""
        if row_layers > 0 and seconds > 0:
            self._row_layers = _KEPT * self._row_layers + row_layers
            self._seconds = _KEPT * self._seconds + seconds

    def seconds(self, row_layers: int) -> float | None:
        """How long so many take; None: no pass has been computed."""
        return row_layers * self._seconds / self._row_layers if self._row_layers else None
