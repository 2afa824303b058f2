"""What a remote store needs of a server or bucket: an interface for blocks in pieces, small files, pins and last uses.

    block      header | record of layer 0 | record of layer 1 | ...     the bytes of a block file (docs/format.md)
    sealed     the bytes of a small file with a checksum, of some kind: a manifest, a document's record
    pin        a name

Implementations move bytes; `RemoteStore` knows their meaning. Each call is one round trip, or several at the same time.
Every call raises `StoreUnreachableError` where the other side does not answer in time, and
`StoreError` where it refuses.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from cacheblend.core.names import BlockName, grouped
from cacheblend.store.sealed import Bytes, SealedPlace


class Range(NamedTuple):
    """Bytes [start, stop) of one layer's record."""

    name: BlockName
    layer: int
    offset: int  # where the record begins in the block file
    start: int  # of the bytes, relative to the record's begin
    stop: int
    size: int  # bytes of the whole record

    @property
    def first(self) -> int:  # where the bytes begin in the block file
        return self.offset + self.start

    @property
    def last(self) -> int:  # where they end in the block file
        return self.offset + self.stop


class HeldBlock(NamedTuple):
    """A block that is held."""

    name: BlockName
    nbytes: int  # bytes of all its pieces
    used: float  # time of its last use in seconds, by a clock that all users of the store share


class Objects(SealedPlace, Protocol):
    """One server or bucket; safe to call from several threads. Returned values are snapshots that the caller owns."""

    tier: str  # "redis" or "s3"
    place: str  # its name for messages, without passwords

    def look_up(
        self,
        names: Sequence[BlockName],
        unknown: AbstractSet[BlockName] = frozenset(),
        since: float = -math.inf,
        *,
        marks: bool = True,
    ) -> list[Bytes | None]:
        """Which blocks are held and were last used at the time `since` (see `HeldBlock.used`) or later, and headers.
        `marks`: those blocks as used now; of one call's blocks the first counts as used last. None where a block is not
        held, or was used before `since`; else its header (see `store.format.block_file`) if `unknown` has the name, and
        no bytes if it has not."""

    def exist(self, names: Sequence[BlockName]) -> list[bool]:
        """Whether each block is held; marks none as used."""

    def records(self, ranges: Sequence[Range]) -> list[Bytes | None]:
        """Bytes of records, None where they are not held."""

    def put(self, name: BlockName, header: Bytes, records: Sequence[Bytes]) -> None:
        """Stores a block; it is not visible before it is complete."""

    def delete(self, names: Sequence[BlockName]) -> list[bool]:
        """Removes blocks; whether each was held."""

    def held(self, *, tidy: bool = False) -> list[HeldBlock]:
        """All blocks held; `tidy` also cleans up after blocks that the other side evicted by itself."""

    def pin(self, names: Iterable[BlockName]) -> None: ...

    def unpin(self, names: Iterable[BlockName]) -> None: ...

    def pinned(self) -> set[BlockName]: ...

    def where(self, kind: str, name: BlockName) -> str:
        return f"{kind}/{name.hex()} in {self.place}"

    def documents_bytes(self) -> int: ...

    def close(self) -> None: ...


def runs_of(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """The ranges in their order, those together that continue the one before them."""
    return grouped(ranges, lambda run, each: run[-1].name == each.name and run[-1].last == each.first)


def parts_of(run: Sequence[Range], data: Bytes | None) -> list[Bytes | None]:
    """What was received of a run, range by range; a part that is too short is found to be damaged by its reader."""
    if data is None:
        return [None] * len(run)
    if len(run) == 1:
        return [data]
    begin, view = run[0].first, memoryview(data)
    # Copies, so that a record that is kept does not keep all that was received with it.
    return [bytes(view[each.first - begin : each.last - begin]) for each in run]
