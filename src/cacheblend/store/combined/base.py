"""What stores made of other stores share: pins, manifests and checks go to all of them.

Does not know how blocks are read or written.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import BlockEntry, ChunkManifest
from cacheblend.store.base import Damage, KVStore, Progress
from cacheblend.store.documents import DamagedRecord, DocumentRecord, DocumentRecords

T = TypeVar("T")


class CombinedDocuments(DocumentRecords):
    """The records of several stores.

    Args:
        members: the stores, nearest first.
    """

    def __init__(self, members: Sequence[KVStore]) -> None:
        self._members = members

    def put(self, record: DocumentRecord) -> None:
        """See `DocumentRecords`. In all members."""
        for member in self._members:
            member.documents.put(record)

    def get(self, root: BlockName, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        """See `DocumentRecords`. The nearest member's, an intact one before a damaged one."""
        found = [member.documents.get(root, name) for member in self._members]
        return _best(each for each in found if each is not None) if any(found) else None

    def all(self, root: BlockName) -> list[DocumentRecord | DamagedRecord]:
        """See `DocumentRecords`."""
        found: dict[BlockName, list[DocumentRecord | DamagedRecord]] = {}
        for member in self._members:
            for record in member.documents.all(root):
                found.setdefault(record.name, []).append(record)
        return [_best(found[name]) for name in sorted(found)]

    def names(self, root: BlockName) -> list[BlockName]:
        """See `DocumentRecords`."""
        return sorted({name for member in self._members for name in member.documents.names(root)})

    def delete(self, root: BlockName, name: BlockName) -> bool:
        """See `DocumentRecords`."""
        deleted = [member.documents.delete(root, name) for member in self._members]
        return any(deleted)

    def roots(self) -> list[BlockName]:
        """See `DocumentRecords`."""
        return sorted({root for member in self._members for root in member.documents.roots()})

    def changing(self, root: BlockName) -> AbstractContextManager[None]:
        """See `DocumentRecords`. By the last member's lock: a near one may be each machine's own."""
        return self._members[-1].documents.changing(root)


def _best(found: Iterable[DocumentRecord | DamagedRecord]) -> DocumentRecord | DamagedRecord:
    records = list(found)
    return next((each for each in records if isinstance(each, DocumentRecord)), records[0])


class TierNames:
    """Names that tell the tiers of several stores apart, where some of them are of one kind.

    Args:
        stores: fastest first.

    Attributes:
        all: of all stores, in order.
    """

    def __init__(self, stores: Sequence[KVStore]) -> None:
        taken: dict[str, None] = {}
        self._renamed: list[dict[str, str]] = []
        for store in stores:
            self._renamed.append({})
            for name in store.tier_names:
                kind = re.sub(r"-\d+$", "", name)
                free = (name, *(f"{kind}-{number}" for number in range(2, len(taken) + 3)))
                self._renamed[-1][name] = new = next(each for each in free if each not in taken)
                taken[new] = None
        self.all = tuple(taken)

    def of(self, number: int, name: str) -> str:
        """The name of a tier that store `number` itself calls `name`."""
        return self._renamed[number].get(name, name)

    def own(self, tier: str) -> tuple[int, str] | None:
        """The store that has a tier of this name, and what it calls it itself; None: no store has."""
        for number, renamed in enumerate(self._renamed):
            for name, new in renamed.items():
                if new == tier:
                    return number, name
        return None

    def entry(self, number: int, entry: BlockEntry) -> BlockEntry:
        """An entry of store `number`, with this name of its tier."""
        name = self.of(number, entry.tier)
        return entry if name == entry.tier else replace(entry, tier=name)


class CombinedStore(KVStore):
    """A store that keeps everything in its members.

    A call goes to all of them, and what they return is merged: sets are united, lists joined, truth values or-ed. Where
    and whether a block is read or written is up to the subclass, and so is `stats`.

    Attributes:
        members: the stores that keep blocks, pins and manifests, nearest first; closed with this store.
    """

    def __init__(self, members: Sequence[KVStore]) -> None:
        self.members = tuple(members)
        self.documents = CombinedDocuments(self.members)

    def _ask(self, members: Sequence[KVStore], call: Callable[[KVStore], T]) -> list[T]:
        """The members' answers. A subclass may leave out members that fail."""
        return [call(member) for member in members]

    @property
    def is_reachable(self) -> bool:
        """See `KVStore.is_reachable`. All members, as each may be the one that holds a block."""
        return all(member.is_reachable for member in self.members)

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        """See `KVStore.held`. In any member."""
        return [any(there) for there in zip(*(member.held(names) for member in self.members), strict=True)]

    def delete(self, name: BlockName) -> bool:
        """See `KVStore.delete`."""
        return any(self._ask(self.members, lambda member: member.delete(name)))

    # ---- pins and manifests -----------------------------------------------------------------------------

    def pin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.pin`."""
        pinned = list(names)
        self._ask(self.members, lambda member: member.pin(pinned))

    def unpin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.unpin`."""
        unpinned = list(names)
        self._ask(self.members, lambda member: member.unpin(unpinned))

    def pinned(self) -> set[BlockName]:
        """See `KVStore.pinned`."""
        return set().union(*self._ask(self.members, lambda member: member.pinned()))

    def put_manifest(self, manifest: ChunkManifest) -> None:
        """See `KVStore.put_manifest`."""
        self._ask(self.members, lambda member: member.put_manifest(manifest))

    def manifests(self) -> list[ChunkManifest]:
        """See `KVStore.manifests`. The nearest member's where several list a chunk."""
        listed = self._ask(self.members, lambda member: member.manifests())
        if len(listed) == 1:
            return listed[0]
        found = {manifest.chunk_id: manifest for each in reversed(listed) for manifest in each}
        return [found[chunk_id] for chunk_id in sorted(found)]

    def listing_stamp(self) -> Hashable | None:
        """See `KVStore.listing_stamp`."""
        stamps = tuple(self._ask(self.members, lambda member: member.listing_stamp()))
        return None if None in stamps else stamps

    def has_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.has_manifest`."""
        return any(self._ask(self.members, lambda member: member.has_manifest(chunk_id)))

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.delete_manifest`."""
        return any(self._ask(self.members, lambda member: member.delete_manifest(chunk_id)))

    # ---- the whole store --------------------------------------------------------------------------------

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """See `KVStore.verify`. Progress is reported member by member."""
        return [damage for found in self._ask(self.members, lambda member: member.verify(progress)) for damage in found]

    def flush(self) -> None:
        """See `KVStore.flush`."""
        for member in self.members:
            member.flush()

    def drop_copies(self) -> None:
        """See `KVStore.drop_copies`. Those of all members."""
        for member in self.members:
            member.drop_copies()

    def close(self) -> None:
        """See `KVStore.close`. Closes all members."""
        for member in self.members:
            member.close()
