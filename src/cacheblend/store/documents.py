"""What a store knows of documents: which chunks each of them is cut into. The contract, and its memory. Records lie
under their root, so that what one tenant does is as quick whatever the others have stored. A chunk is referred to by
every record that names it; nobody counts, so nothing is wrong after a process that was killed."""

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from cacheblend.core.names import BlockName

OBJECT_BYTES, NAME_OBJECT_BYTES = 512, 80
"""What a manifest or record takes in memory besides its numbers and texts, and a name in it; measured with CPython."""

Blocks = tuple[BlockName, ...]  # a chunk's own blocks in order; the last one's name is the chunk's id


@dataclass(frozen=True, slots=True)
class DocumentRecord:
    """One document."""

    root: BlockName  # of its chunks' chains, which covers model, dtype, codec and tenant
    collection: str  # documents of different collections may have the same id
    id: str  # who gave the document calls it so
    digest: str  # of its text and of how that is cut, hexadecimal; equal texts are not cut again
    tokens: int  # of all its chunks
    chunks: tuple[Blocks, ...]  # in the order of the text; a chunk may occur twice
    stale: tuple[Blocks, ...] = ()  # chunks of an earlier text, to be dropped once those of this one are stored

    @property
    def name(self) -> BlockName:
        return document_name(self.root, self.collection, self.id)


@dataclass(frozen=True)
class DamagedRecord:
    """A record that cannot be read; it stays where it is."""

    name: BlockName  # of the document (`document_name`)
    reason: str


@dataclass(frozen=True)
class Damage:
    """One damaged block, manifest or record of a document that `verify` found.

    Attributes:
        kind: ``"block"``, ``"manifest"`` or ``"document"``.
        name: name of the block, of the chunk, or of the document.
        reason: what is wrong.
        removed: whether it has been removed; False where the store cannot be written to.
    """

    kind: str
    name: BlockName
    reason: str
    removed: bool


def document_name(root: BlockName, collection: str, document_id: str) -> BlockName:
    """Name of a document's record: 32 bytes, whatever characters the id has."""
    parts = [part.encode() for part in (collection, document_id)]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return BlockName(hashlib.sha256(b"cacheblend-document\0" + root + framed).digest())


class DocumentRecords(ABC):
    """The records of one store, for all tenants. Every method may be called from any thread at any time. Every method
    raises `StoreError` where the store cannot be read, or is read-only and should be written."""

    @abstractmethod
    def put(self, record: DocumentRecord) -> None:
        """Keeps a record, all or nothing, in place of the one of the same name."""

    @abstractmethod
    def get(self, root: BlockName, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        """The record of this name, None if there is none."""

    @abstractmethod
    def all(self, root: BlockName) -> list[DocumentRecord | DamagedRecord]:
        """All records of a root, ordered by name; a snapshot."""

    @abstractmethod
    def names(self, root: BlockName) -> list[BlockName]:
        """Names of all records of a root, damaged ones included, ordered; reads none of them."""

    @abstractmethod
    def delete(self, root: BlockName, name: BlockName) -> bool:
        """Removes a record, damaged or not; False if there was none."""

    @abstractmethod
    def roots(self) -> list[BlockName]:
        """The roots that have records, ordered."""

    @abstractmethod
    def changing(self, root: BlockName) -> AbstractContextManager[object]:
        """A context that one thread of one process holds at a time, for each root: what is referred to does not change.
        A bucket has no locks: there, a chunk that is dropped while another process begins to refer to it is a miss, and
        is computed by the next sync."""


class MemoryDocuments(DocumentRecords):
    """Records in memory. `make_room`: called with the bytes of a record before it is kept; raises `StoreFullError`.
    `lock`: held meanwhile, the store's own."""

    def __init__(self, make_room: Callable[[int], None], lock: AbstractContextManager[object]) -> None:
        self._records: dict[BlockName, dict[BlockName, DocumentRecord]] = {}
        self._make_room, self._lock, self._changing = make_room, lock, threading.Lock()
        self.nbytes = 0

    def put(self, record: DocumentRecord) -> None:
        with self._lock:
            old = self._records.get(record.root, {}).get(record.name)
            more = _memory_bytes(record) - (0 if old is None else _memory_bytes(old))
            self._make_room(more)
            self._records.setdefault(record.root, {})[record.name] = record
            self.nbytes += more

    def get(self, root: BlockName, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        with self._lock:
            return self._records.get(root, {}).get(name)

    def all(self, root: BlockName) -> list[DocumentRecord | DamagedRecord]:
        with self._lock:
            return [record for _, record in sorted(self._records.get(root, {}).items())]

    def names(self, root: BlockName) -> list[BlockName]:
        with self._lock:
            return sorted(self._records.get(root, {}))

    def delete(self, root: BlockName, name: BlockName) -> bool:
        with self._lock:
            old = self._records.get(root, {}).pop(name, None)
            self.nbytes -= 0 if old is None else _memory_bytes(old)
            return old is not None

    def roots(self) -> list[BlockName]:
        with self._lock:
            return sorted(root for root, records in self._records.items() if records)

    def changing(self, root: BlockName) -> AbstractContextManager[object]:
        return self._changing


def _memory_bytes(record: DocumentRecord) -> int:
    names = sum(len(blocks) for blocks in (*record.chunks, *record.stale))
    return OBJECT_BYTES + 4 * len(record.id) + NAME_OBJECT_BYTES * names


def verify_documents(records: DocumentRecords, *, removes: bool) -> list[Damage]:
    """The damaged records of all roots, removed if that is asked for: what they referred to is then unknown."""
    found = []
    for root in records.roots():
        for record in records.all(root):
            if isinstance(record, DamagedRecord):
                removed = removes and records.delete(root, record.name)
                found.append(Damage("document", record.name, record.reason, removed))
    return found
