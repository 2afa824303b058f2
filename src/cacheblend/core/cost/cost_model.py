"""The cost model: how long a model's prefill and its tiers' loading take on one device. Knows seconds, not plans."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cacheblend.core.errors import InvalidInputError

MARGIN = 0.85  # share of the loading time that recomputing may fill: two threads never overlap perfectly


@dataclass(frozen=True)
class TierSpeed:
    """How long a tier takes to load from."""

    bytes_per_s: float  # throughput of a layer's records
    layer_s: float = 0.0  # latency of each layer
    block_s: float = 0.0  # additional latency of each block of a layer

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.layer_s < 0 or self.block_s < 0:
            raise InvalidInputError(
                f"a tier needs a throughput above 0 and latencies of 0 or more, got {self.bytes_per_s} bytes/s, "
                f"{self.layer_s} s a layer, {self.block_s} s a block"
            )

    def seconds(self, blocks: int, nbytes: float, layers: int) -> float:
        """Time to load this many blocks, `nbytes` over all layers."""
        return 0.0 if not blocks else layers * (self.layer_s + blocks * self.block_s) + nbytes / self.bytes_per_s

    def scaled(self, factor: float) -> "TierSpeed":
        """A tier that takes `factor` times as long."""
        return TierSpeed(self.bytes_per_s / factor, self.layer_s * factor, self.block_s * factor)


@dataclass(frozen=True)
class CostModel:
    """How long one model takes on one device."""

    prefill_s: tuple[tuple[int, float], ...]  # (tokens, seconds of a full prefill), ascending, at least two points
    tiers: Mapping[str, TierSpeed] = field(default_factory=dict)  # by name
    # time of a row-layer in a blend over that in a full prefill; few rows use the device less well
    overhead: float = 1.0
    request_s: float = 0.0  # fixed time of a blend, whatever its size

    def __post_init__(self) -> None:
        lengths = [tokens for tokens, _ in self.prefill_s]
        if len(lengths) < 2 or lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise InvalidInputError(f"prefill times need two ascending lengths at least, got {lengths}")
        if any(seconds <= 0 for _, seconds in self.prefill_s) or self.overhead <= 0 or self.request_s < 0:
            raise InvalidInputError("prefill times and overhead must be above 0, the time of a request 0 or more")

    def full_s(self, tokens: int) -> float:
        """Seconds of a full prefill: interpolated linearly, extrapolated from the last two measured lengths."""
        if tokens <= 0:
            return 0.0
        lengths, seconds = (np.array(column, dtype=float) for column in zip(*self.prefill_s, strict=True))
        seconds = np.maximum.accumulate(seconds)  # a longer prompt that took less time is noise
        if tokens < lengths[0]:
            return float(tokens / lengths[0] * seconds[0])
        slope = (seconds[-1] - seconds[-2]) / (lengths[-1] - lengths[-2])
        return float(np.interp(tokens, lengths, seconds) + max(0.0, tokens - lengths[-1]) * slope)

    def to_dict(self) -> dict[str, Any]:
        return {
            "prefill_s": [list(point) for point in self.prefill_s],
            "tiers": {name: vars(speed) for name, speed in self.tiers.items()},
            "overhead": self.overhead,
            "request_s": self.request_s,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "CostModel":
        """The opposite of `to_dict`. Raises `InvalidInputError`: a field is missing or has a wrong value."""
        try:
            return CostModel(
                tuple((int(tokens), float(seconds)) for tokens, seconds in data["prefill_s"]),
                {str(name): TierSpeed(**speed) for name, speed in data["tiers"].items()},
                float(data.get("overhead", 1.0)),
                float(data.get("request_s", 0.0)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInputError(f"a cost model cannot be read: {error!r}") from error
