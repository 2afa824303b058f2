"""Where to keep KV caches: loading time against recomputing time, by device (paper, section 5.2 and figure 10)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cacheblend.core.cost.cost_model import MARGIN
from cacheblend.core.errors import InvalidInputError


@dataclass(frozen=True)
class Device:
    """A place for KV caches."""

    name: str  # for display
    bytes_per_s: float  # reading throughput
    price: float  # of a GB (10^9 bytes) a month, in any currency; 0: no extra cost

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.price >= 0:
            raise InvalidInputError(
                f"device {self.name!r} needs a throughput above 0 and a price of 0 or more, "
                f"got {self.bytes_per_s} bytes/s and {self.price}"
            )

    @staticmethod
    def parse(text: str, measured: Mapping[str, float] = MappingProxyType({})) -> "Device":
        """From ``name:GB/s:price``, or ``name::price`` for a tier that was `measured` (bytes/s by tier). Raises
        `InvalidInputError`: the text has another form, or the tier was not measured."""
        try:
            name, speed, price = text.split(":")
            if not speed and name not in measured:
                known = ", ".join(measured) or "none; --cost-model has them"
                raise InvalidInputError(f"device {text!r} has no GB/s, and no tier {name!r} was measured ({known})")
            return Device(name, float(speed) * 1e9 if speed else measured[name], float(price))
        except ValueError as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"a device is name:GB/s:price, e.g. nvme:3:0.1, got {text!r}") from error


@dataclass(frozen=True)
class DeviceCost:
    """A context's caches on one device."""

    device: Device  # that stores them
    load_s: float  # T_load of the context
    ratio: float  # the floor, or the largest ratio whose recomputing is hidden behind the loading
    recompute_s: float  # T_recompute at that ratio
    ttft_s: float  # the longer of the two times
    hides: bool  # loading takes no longer than recomputing at the floor
    monthly: float  # price of all stored bytes


def place(
    devices: Sequence[Device],
    *,
    prefill_s: float,
    layers: int,
    context_bytes: float,
    stored_bytes: float,
    floor: float = 0.15,
) -> list[DeviceCost]:
    """The placement of a context on each device, in the order given. `context_bytes`, `stored_bytes`: size of its KV,
    and of all KV to be kept; `floor`: the least ratio. The first layer is always computed for all rows. Raises
    `InvalidInputError`: a time or size that is not above 0, or a floor outside 0..1."""
    if min(prefill_s, context_bytes, stored_bytes) <= 0 or layers < 1 or not 0 <= floor <= 1:
        raise InvalidInputError(
            f"prefill time, bytes and layers must be above 0 and the floor in 0..1, got {prefill_s} s, "
            f"{context_bytes} and {stored_bytes} bytes, {layers} layers, {floor}"
        )
    placed = []
    for device in devices:
        load = context_bytes / device.bytes_per_s
        hidden = (MARGIN * load / prefill_s - 1 / layers) / (1 - 1 / layers) if layers > 1 else 1.0
        ratio = min(1.0, max(floor, hidden))
        recompute, least = (recompute_s(prefill_s, layers, each) for each in (ratio, floor))
        monthly = device.price * stored_bytes / 1e9
        placed.append(DeviceCost(device, load, ratio, recompute, max(load, recompute), load <= least, monthly))
    return placed


def recompute_s(prefill_s: float, layers: int, ratio: float) -> float:
    """T_recompute: all rows in the first layer, a share of them in the others."""
    return prefill_s * (1 / layers + ratio * (1 - 1 / layers))


def cheapest(placements: Sequence[DeviceCost], prefill_s: float) -> DeviceCost | None:
    """The cheapest device that hides its loading, or else the fastest; None: none is faster than a full prefill."""
    hiding = [each for each in placements if each.hides]
    if hiding:
        return min(hiding, key=lambda each: (each.monthly, each.ttft_s))
    faster = [each for each in placements if each.ttft_s < prefill_s]
    return min(faster, key=lambda each: each.ttft_s, default=None)
