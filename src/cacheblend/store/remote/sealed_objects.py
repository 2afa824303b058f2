"""Manifests and documents' records in an `Objects`: those that did not change are not read again.

Knows which bytes belong to which kind; does not know blocks.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from cacheblend.core.errors import StoreError, StoreReadOnlyError
from cacheblend.core.load.breaker import CircuitBreaker
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store.base import LOGGER_NAME, Damage
from cacheblend.store.documents import DamagedRecord, DocumentRecord, DocumentRecords
from cacheblend.store.eviction import Listed
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.format.document_file import decode_document, encode_document
from cacheblend.store.format.manifest_file import decode_manifest
from cacheblend.store.remote.capacity import RemoteCapacity
from cacheblend.store.remote.objects import DOCUMENTS, MANIFESTS, Objects, Sealed

T = TypeVar("T")
logger = logging.getLogger(LOGGER_NAME)


class SealedObjects(Generic[T]):
    """All of one kind in one place; safe to call from several threads.

    Args:
        objects: the place.
        breaker: around every call to it.
        kind: what is read.
        decode: of the bytes and the name; raises `DamagedError`.
    """

    def __init__(
        self, objects: Objects, breaker: CircuitBreaker, kind: str, decode: Callable[[bytes, BlockName], T]
    ) -> None:
        self._objects, self._breaker, self._kind, self._decode = objects, breaker, kind, decode
        self._known: dict[BlockName, tuple[Sealed, T | DamagedError]] = {}  # as each was listed when it was read
        self._lock = threading.Lock()

    def all(self, *, fresh: bool = False) -> dict[BlockName, T | DamagedError]:
        """What there is, ordered by name; `fresh`: all of it is read again. Raises `StoreError`."""
        return {name: each for name, (_, each) in self.listed(fresh=fresh).items()}

    def listed(self, *, fresh: bool = False) -> dict[BlockName, tuple[Sealed, T | DamagedError]]:
        """The same, each as it is listed. Raises `StoreError`."""
        known = {} if fresh else self._known
        with self._breaker.asking():
            marks = self._objects.sealed(self._kind)
            changed = [name for name, mark in marks.items() if name not in known or known[name][0] != mark]
            data = self._objects.read_sealed(self._kind, changed)
        listed = {name: known[name] for name in marks.keys() - set(changed)}
        for name, part in zip(changed, data, strict=True):
            if part is not None:
                listed[name] = (marks[name], self._decoded(bytes(part), name))
        with self._lock:
            self._known = listed
        return {name: listed[name] for name in sorted(listed)}

    def _decoded(self, data: bytes, name: BlockName) -> T | DamagedError:
        try:
            return self._decode(data, name)
        except DamagedError as error:
            return error


class RemoteManifests:
    """The manifests of one place; safe to call from several threads.

    Args:
        objects: the place.
        breaker: around every call to it.
        read_only: damaged manifests are reported but not removed.

    Attributes:
        damaged: manifests found damaged so far.
    """

    def __init__(self, objects: Objects, breaker: CircuitBreaker, read_only: bool) -> None:
        self._objects, self._breaker, self._read_only = objects, breaker, read_only
        self._sealed = SealedObjects(objects, breaker, MANIFESTS, decode_manifest)
        self.damaged = 0

    def all(self) -> list[ChunkManifest]:
        """All manifests, ordered by chunk; see `KVStore.manifests`."""
        return self._intact([], fresh=False)

    def listed(self) -> list[Listed]:
        """All that are intact, each with its bytes; damaged ones are left to those who list manifests."""
        found = self._sealed.listed().values()
        return [(each, sealed.nbytes) for sealed, each in found if not isinstance(each, DamagedError)]

    def verify(self, found: list[Damage]) -> None:
        """Reads all manifests again and appends damage to `found`."""
        self._intact(found, fresh=True)

    def _intact(self, found: list[Damage], *, fresh: bool) -> list[ChunkManifest]:
        intact = []
        for name, manifest in self._sealed.all(fresh=fresh).items():
            if isinstance(manifest, DamagedError):
                found.append(Damage("manifest", name, str(manifest), self._remove(name, manifest)))
            else:
                intact.append(manifest)
        return intact

    def _remove(self, name: BlockName, error: DamagedError) -> bool:
        """Reports a damaged manifest and removes it; whether that succeeded."""
        removed = False
        if not self._read_only:
            with contextlib.suppress(StoreError), self._breaker.asking():
                removed = self._objects.delete_sealed(MANIFESTS, name)
        self.damaged += 1
        outcome = "removed" if removed else "could not be removed"
        logger.warning("damaged manifest %s in %s: %s; %s", name.hex(), self._objects.place, error, outcome)
        return removed


class RemoteManifestPlace:
    """Within `CircuitBreaker.asking`; every method raises `StoreError`.

    Args:
        objects: the place.
        manifests: its manifests.

    Attributes:
        blocks: those that were listed last, without those that were removed since; others are asked for.
    """

    def __init__(self, objects: Objects, manifests: RemoteManifests) -> None:
        self._objects, self._manifests = objects, manifests
        self.blocks: set[BlockName] = set()

    def count(self) -> int:
        return len(self._objects.sealed(MANIFESTS))

    def all(self) -> list[Listed]:
        """Those that did not change since the last call are not read again."""
        return self._manifests.listed()

    def some(self, chunk_ids: Sequence[BlockName]) -> Iterator[Listed]:
        for name, data in zip(chunk_ids, self._objects.read_sealed(MANIFESTS, chunk_ids), strict=True):
            if data is not None:
                with contextlib.suppress(DamagedError):
                    yield decode_manifest(bytes(data), name), len(data)

    def held(self, names: Sequence[BlockName]) -> set[BlockName]:
        unknown = [name for name in names if name not in self.blocks]
        written = {name for name, there in zip(unknown, self._objects.exist(unknown), strict=True) if there}
        return self.blocks.intersection(names) | written

    def remove(self, chunk_ids: Sequence[BlockName]) -> None:
        for chunk_id in chunk_ids:
            self._objects.delete_sealed(MANIFESTS, chunk_id)


class RemoteDocuments(DocumentRecords):
    """The records of one place; each root is a kind of its own.

    Args:
        objects: the place.
        breaker: around every call to it.
        read_only: nothing is written.
        capacity: of the store; records count against its bound, and blocks are evicted for them.
    """

    def __init__(self, objects: Objects, breaker: CircuitBreaker, read_only: bool, capacity: RemoteCapacity) -> None:
        self._objects, self._breaker, self._read_only, self._capacity = objects, breaker, read_only, capacity
        self._sealed: dict[BlockName, SealedObjects[DocumentRecord]] = {}

    def put(self, record: DocumentRecord) -> None:
        with self._writing():
            data = encode_document(record)
            with self._capacity.reserved(len(data), record.name, "record"):
                self._objects.put_sealed(_kind(record.root), record.name, data)

    def get(self, root: BlockName, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        with self._breaker.asking():
            (data,) = self._objects.read_sealed(_kind(root), [name])
        try:
            return None if data is None else decode_document(bytes(data), name)
        except DamagedError as error:
            return self._damaged(root, name, error)

    def all(self, root: BlockName) -> list[DocumentRecord | DamagedRecord]:
        kept = self._sealed.setdefault(root, SealedObjects(self._objects, self._breaker, _kind(root), decode_document))
        found = kept.all().items()
        return [self._damaged(root, name, each) if isinstance(each, DamagedError) else each for name, each in found]

    def names(self, root: BlockName) -> list[BlockName]:
        with self._breaker.asking():
            return sorted(self._objects.sealed(_kind(root)))

    def delete(self, root: BlockName, name: BlockName) -> bool:
        with self._writing():
            return self._objects.delete_sealed(_kind(root), name)

    def roots(self) -> list[BlockName]:
        with self._breaker.asking():
            return [BlockName(bytes.fromhex(kind.removeprefix(DOCUMENTS))) for kind in self._objects.kinds(DOCUMENTS)]

    @contextmanager
    def changing(self, root: BlockName) -> Iterator[None]:
        with self._writing():
            lock = self._objects.lock(_kind(root))
        with lock:
            yield

    def _damaged(self, root: BlockName, name: BlockName, error: DamagedError) -> DamagedRecord:
        return DamagedRecord(name, f"{_kind(root)}/{name.hex()} in {self._objects.place}: {error}")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self._read_only:
            raise StoreReadOnlyError(f"{self._objects.place} was opened read-only: open it without read_only")
        with self._breaker.asking():
            yield


def _kind(root: BlockName) -> str:
    return f"{DOCUMENTS}{root.hex()}"
