"""What a store on another machine is made of: blocks in pieces, manifests, pins, and when a block was last used.

    block      header | record of layer 0 | record of layer 1 | ...     the bytes of a block file (docs/format.md)
    manifest   the bytes of a manifest's file
    pin        a name

Implementations know how to move these; `RemoteStore` knows what they mean. Each call is one round trip, or a few that
are under way together. All of them raise `StoreUnreachableError` where the other side does not answer in time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from cacheblend.core.naming import BlockName

Bytes = bytes | bytearray | memoryview


class Range(NamedTuple):
    """Bytes start..stop - 1 of one layer's record.

    Attributes:
        name: of the block.
        layer: whose record.
        offset: of that record in the block file.
        start, stop: within the record.
        size: of the whole record.
    """

    name: BlockName
    layer: int
    offset: int
    start: int
    stop: int
    size: int


class HeldBlock(NamedTuple):
    """A block that is held.

    Attributes:
        name: its own.
        nbytes: of all its pieces.
        used: seconds, by any clock that all who use the store share.
    """

    name: BlockName
    nbytes: int
    used: float


class Objects(Protocol):
    """One place elsewhere; safe to call from several threads."""

    @property
    def tier(self) -> str:
        """``"redis"`` or ``"s3"``."""
        ...

    @property
    def place(self) -> str:
        """The place for people, without passwords."""
        ...

    def use(self, names: Sequence[BlockName], since: float = -math.inf) -> list[bool]:
        """Whether the blocks are held and were used at `since` (by `HeldBlock.used`'s clock) or later; marks those as
        used, the first one last."""
        ...

    def headers(self, names: Sequence[BlockName]) -> list[Bytes | None]:
        """Headers (see `record_file`), None where there is none."""
        ...

    def records(self, ranges: Sequence[Range]) -> list[Bytes | None]:
        """Bytes of records, None where they are gone."""
        ...

    def put(self, name: BlockName, header: Bytes, records: Sequence[Bytes]) -> None:
        """Holds a block; nobody sees it before all of it is there."""
        ...

    def delete(self, names: Sequence[BlockName]) -> list[bool]:
        """Removes blocks; whether they were held."""
        ...

    def held(self, *, tidy: bool = False) -> list[HeldBlock]:
        """All blocks; `tidy`: takes those off its lists that went without its doing."""
        ...

    def pin(self, names: Iterable[BlockName]) -> None:
        """Adds pins."""
        ...

    def unpin(self, names: Iterable[BlockName]) -> None:
        """Takes pins away."""
        ...

    def pinned(self) -> set[BlockName]:
        """All pins."""
        ...

    def put_manifest(self, name: BlockName, data: Bytes) -> None:
        """Holds a manifest, in place of one of that name."""
        ...

    def manifests(self) -> Mapping[BlockName, str]:
        """All manifests, each with a mark that changes when it does."""
        ...

    def read_manifests(self, names: Sequence[BlockName]) -> list[Bytes | None]:
        """Manifests, None where there is none."""
        ...

    def has_manifest(self, name: BlockName) -> bool:
        """Whether there is one."""
        ...

    def delete_manifest(self, name: BlockName) -> bool:
        """Removes a manifest; whether there was one."""
        ...

    def listing_stamp(self) -> str | None:
        """Equal marks: no manifest came, changed or went in between. None: it cannot tell."""
        ...

    def close(self) -> None:
        """Gives connections back."""
        ...
