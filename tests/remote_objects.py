"""A server in memory that is as far away as a test says, by a clock that only it moves: round trips are counted."""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext

from cacheblend.core.names import BlockName
from cacheblend.store.remote.objects import HeldBlock, Range
from cacheblend.store.sealed import Bytes


class FarObjects:
    """See `Objects`, of which only blocks are here.

    Args:
        latency_s: of each call.
        bytes_per_s: of records.

    Attributes:
        now: the clock.
        calls: so far, by name of the method.
    """

    tier, place = "far", "far://away"

    def __init__(self, latency_s: float, bytes_per_s: float = math.inf) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.now = 0.0
        self.calls: list[str] = []
        self._blocks: dict[BlockName, tuple[bytes, bytes]] = {}

    def clock(self) -> float:
        return self.now

    def look_up(
        self, names: Sequence[BlockName], unknown: AbstractSet[BlockName] = frozenset(), since: float = -math.inf
    ) -> list[Bytes | None]:
        self._answer("look_up")
        held = [self._blocks.get(name) for name in names]
        return [block and (block[0] if n in unknown else b"") for n, block in zip(names, held, strict=True)]

    def headers(self, names: Sequence[BlockName]) -> list[Bytes | None]:
        self._answer("headers")
        return [self._blocks[name][0] if name in self._blocks else None for name in names]

    def records(self, ranges: Sequence[Range]) -> list[Bytes | None]:
        self._answer("records", sum(each.stop - each.start for each in ranges))
        return [bytearray(self._blocks[each.name][1][each.first : each.last]) for each in ranges]

    def put(self, name: BlockName, header: Bytes, records: Sequence[Bytes]) -> None:
        self._blocks[name] = bytes(header), b"".join((header, *records))

    def pinned(self) -> set[BlockName]:
        return set()

    def held(self, *, tidy: bool = False) -> list[HeldBlock]:
        return [HeldBlock(name, len(data), 0.0) for name, (_, data) in self._blocks.items()]

    def lock(self, kind: str) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        return

    def _answer(self, call: str, nbytes: int = 0) -> None:
        self.calls.append(call)
        self.now += self.latency_s + nbytes / self.bytes_per_s
