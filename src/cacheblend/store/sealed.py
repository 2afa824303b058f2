"""Manifests and documents' records where several processes keep them: small objects with a checksum of their own.

    manifests/<chunk>             the kind of manifests
    documents/<root>/<document>   each root's documents are a kind

Folders, servers and buckets move their bytes (`SealedPlace`); `SharedStore` is what stores on these have in common.
"""

import contextlib
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from cacheblend.core.errors import (
    BlockDamagedError,
    BlockLostError,
    StoreError,
    StoreReadOnlyError,
    StoreUnreachableError,
)
from cacheblend.core.load.threads import standing_aside
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store.base import LOGGER_NAME, Damage, FindCounter, KVStore, Progress, StoreStats, check_manifest
from cacheblend.store.documents import DamagedRecord, DocumentRecord, DocumentRecords, verify_documents
from cacheblend.store.eviction import Listed
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.format.records import decode_document, decode_manifest, encode_document, encode_manifest

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview
logger = logging.getLogger(LOGGER_NAME)

MANIFESTS = "manifests"  # the kind of manifests
DOCUMENTS = "documents/"  # what the kinds of documents' records begin with; the root follows


class Sealed(NamedTuple):
    """A manifest or a document's record as it is listed."""

    mark: Hashable  # changes when it does
    nbytes: int  # what it counts


class SealedPlace(Protocol):
    """Where they are. Every call raises `StoreError` where the place cannot be asked, or refuses."""

    def where(self, kind: str, name: BlockName) -> str:
        """Where one is, for messages."""

    def put_sealed(self, kind: str, name: BlockName, data: Bytes) -> None:
        """Stores a manifest or a document's record, replacing one of the same kind and name; all or nothing."""

    def sealed(self, kind: str) -> Mapping[BlockName, Sealed]:
        """Names of all of a kind."""

    def read_sealed(self, kind: str, names: Sequence[BlockName]) -> Sequence[Bytes | DamagedError | None]:
        """Their bytes, None where there is none."""

    def has_sealed(self, kind: str, name: BlockName) -> bool:
        """Whether there is one of this kind and name; does not read it."""

    def delete_sealed(self, kind: str, name: BlockName) -> bool:
        """Removes one; whether there was one."""

    def kinds(self) -> list[str]:
        """The kinds of documents' records of which there is any, ordered."""

    def lock(self, kind: str) -> AbstractContextManager[object]:
        """A context that one process holds at a time; of no effect where there are no locks."""
        return nullcontext()

    def listing_stamp(self) -> Hashable | None:
        """A value that changes when any manifest is added, changed or removed; None: unknown."""
        return None


Asking = Callable[[], AbstractContextManager[None]]
"""Makes the context of calls to a place, which turns what goes wrong there into `StoreError`."""


class SealedRecords(Generic[T]):
    """All of one kind in one place, read again only where they changed; safe to call from several threads. `place`,
    `asking`: where they are, and around calls to it where it is not said that the caller is within it. `kind`: what is
    read. `decode`: of the bytes and the name; raises `DamagedError`."""

    def __init__(self, place: SealedPlace, asking: Asking, kind: str, decode: Callable[[bytes, BlockName], T]) -> None:
        self._place, self._asking, self._kind, self._decode = place, asking, kind, decode
        self._known: dict[BlockName, tuple[Sealed, T | DamagedError]] = {}  # intact, as each was listed
        self._lock = threading.Lock()

    def listed(self, *, fresh: bool = False) -> dict[BlockName, tuple[Sealed, T | DamagedError]]:
        """What there is and how it is listed, ordered by name; `fresh`: all is read again. Raises `StoreError`."""
        known = {} if fresh else self._known
        with self._asking():
            marks = self._place.sealed(self._kind)
            changed = [name for name, mark in marks.items() if name not in known or known[name][0] != mark]
            data = self._place.read_sealed(self._kind, changed)
        listed = {name: known[name] for name in marks.keys() - set(changed)}
        for name, part in standing_aside(zip(changed, data, strict=True)):
            if part is not None:
                listed[name] = (marks[name], self.decoded(part, name))
        with self._lock:  # damage is read again: a new file may look like the one that was removed
            self._known = {name: each for name, each in listed.items() if not isinstance(each[1], DamagedError)}
        return {name: listed[name] for name in sorted(listed)}

    def delete(self, name: BlockName) -> bool:
        """Removes one; whether there was one. The caller is within `asking`."""
        with self._lock:
            self._known.pop(name, None)
        return self._place.delete_sealed(self._kind, name)

    def decoded(self, data: Bytes | DamagedError, name: BlockName) -> T | DamagedError:
        """What was read, or what is wrong with it."""
        try:
            return data if isinstance(data, DamagedError) else self._decode(bytes(data), name)
        except DamagedError as error:
            return error


class Manifests(SealedRecords[ChunkManifest]):
    """The manifests of one place, see `ManifestPlace`, whose caller is within `asking`. A manifest takes whole pages of
    `page_bytes`. `read_only`: damaged ones are reported but not removed."""

    def __init__(self, place: SealedPlace, asking: Asking, read_only: bool, page_bytes: int = 1) -> None:
        super().__init__(place, asking, MANIFESTS, decode_manifest)
        self._read_only, self._page_bytes = read_only, page_bytes
        self.damaged = 0  # found so far

    def intact(self, found: list[Damage], *, fresh: bool = False) -> list[ChunkManifest]:
        """All manifests, ordered by chunk. Damaged ones are reported, removed and appended to `found`."""
        intact = []
        for name, (_, manifest) in self.listed(fresh=fresh).items():
            if not isinstance(manifest, DamagedError):
                intact.append(manifest)
                continue
            removed = False
            if not self._read_only:
                with contextlib.suppress(StoreError), self._asking():
                    removed = self.delete(name)
            self.damaged += 1
            outcome = "removed" if removed else "could not be removed"
            logger.warning("damaged manifest %s: %s; %s", self._place.where(MANIFESTS, name), manifest, outcome)
            found.append(Damage("manifest", name, str(manifest), removed))
        return intact

    def count(self) -> int:
        return len(self._place.sealed(MANIFESTS))

    def all(self) -> list[Listed]:
        """Damaged ones are left to those who list manifests."""
        return [(each, sealed.nbytes) for sealed, each in self.listed().values() if not isinstance(each, DamagedError)]

    def some(self, chunk_ids: Sequence[BlockName]) -> Iterator[Listed]:
        for name, data in zip(chunk_ids, self._place.read_sealed(MANIFESTS, chunk_ids), strict=True):
            manifest = None if data is None else self.decoded(data, name)
            if isinstance(manifest, ChunkManifest) and not isinstance(data, DamagedError | None):
                yield manifest, -(-len(data) // self._page_bytes) * self._page_bytes

    def remove(self, chunk_ids: Sequence[BlockName]) -> None:
        """One that cannot be removed stays, and is counted again."""
        for chunk_id in chunk_ids:
            try:
                self.delete(chunk_id)
            except StoreUnreachableError:
                raise
            except StoreError:
                continue


class Documents(DocumentRecords):
    """The records of one place; each root is a kind of its own. `store`: theirs, which says whether they may be
    written, and makes room for them. `place`: where they are."""

    def __init__(self, store: "SharedStore", place: SealedPlace) -> None:
        self._store, self._place, self._asking = store, place, store.asking
        self._records: dict[BlockName, SealedRecords[DocumentRecord]] = {}

    def put(self, record: DocumentRecord) -> None:
        self._store.require_writable()
        data = encode_document(record)
        with self._asking(), self._store.reserved(len(data), record.name, "record"):
            self._place.put_sealed(_kind(record.root), record.name, data)

    def get(self, root: BlockName, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        with self._asking():
            (data,) = self._place.read_sealed(_kind(root), [name])
        return None if data is None else self._checked(root, name, self._of(root).decoded(data, name))

    def all(self, root: BlockName) -> list[DocumentRecord | DamagedRecord]:
        return [self._checked(root, name, each) for name, (_, each) in self._of(root).listed().items()]

    def _of(self, root: BlockName) -> SealedRecords[DocumentRecord]:
        made = SealedRecords(self._place, self._asking, _kind(root), decode_document)
        return self._records.setdefault(root, made)

    def _checked(
        self, root: BlockName, name: BlockName, found: DocumentRecord | DamagedError
    ) -> DocumentRecord | DamagedRecord:
        if isinstance(found, DocumentRecord):
            return found
        return DamagedRecord(name, f"{self._place.where(_kind(root), name)}: {found}")

    def names(self, root: BlockName) -> list[BlockName]:
        with self._asking():
            return sorted(self._place.sealed(_kind(root)))

    def delete(self, root: BlockName, name: BlockName) -> bool:
        self._store.require_writable()
        with self._asking():
            return self._of(root).delete(name)

    def roots(self) -> list[BlockName]:
        with self._asking():
            return [BlockName(bytes.fromhex(kind.removeprefix(DOCUMENTS))) for kind in self._place.kinds()]

    @contextmanager
    def changing(self, root: BlockName) -> Iterator[None]:
        self._store.require_writable()
        with self._asking():
            lock = self._place.lock(_kind(root))
        with lock:
            yield


def _kind(root: BlockName) -> str:
    return f"{DOCUMENTS}{root.hex()}"


class SharedStore(KVStore):
    """A store in a folder, on a server or in a bucket, which several processes may share. `place`: where manifests and
    documents' records are; blocks and pins are the subclass's. `read_only`: whether writes raise `StoreReadOnlyError`,
    with the text `refusal`. `page_bytes`: a manifest takes whole pages of this size."""

    _capacity: Any  # with `max_bytes` and `evictions`

    def __init__(self, place: SealedPlace, read_only: bool, refusal: str, page_bytes: int = 1) -> None:
        self._place, self.read_only, self._refusal = place, read_only, refusal
        self._manifests = Manifests(place, self.asking, read_only, page_bytes)
        self.documents = Documents(self, place)
        self._finds, self._lock, self._write_failures = FindCounter(), threading.Lock(), 0

    @abstractmethod
    def asking(self) -> AbstractContextManager[None]:
        """The context of calls to the place, which turns what goes wrong there into `StoreError`."""

    def require_writable(self) -> None:
        """Raises `StoreReadOnlyError` where nothing may be written."""
        if self.read_only:
            raise StoreReadOnlyError(self._refusal)

    @abstractmethod
    def reserved(self, nbytes: int, name: BlockName, what: str) -> AbstractContextManager[None]:
        """The context in which something small of so many bytes may be written: blocks are evicted for it."""

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """The context of a write, whose failure counts."""
        try:
            yield
        except StoreError:
            with self._lock:
                self._write_failures += 1
            raise

    def put_manifest(self, manifest: ChunkManifest) -> None:
        self.require_writable()
        check_manifest(manifest)
        data, name = encode_manifest(manifest), manifest.chunk_id
        with self.asking(), self.reserved(len(data), name, "the manifest of chunk"):
            self._place.put_sealed(MANIFESTS, name, data)

    def manifests(self) -> list[ChunkManifest]:
        """Those that did not change since the last call are not read again."""
        return self._manifests.intact([])

    def listing_stamp(self) -> Hashable | None:
        with self.asking():
            return self._place.listing_stamp()

    def has_manifest(self, chunk_id: BlockName) -> bool:
        with self.asking():
            return self._place.has_sealed(MANIFESTS, chunk_id)

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        self.require_writable()
        with self.asking():
            return self._manifests.delete(chunk_id)

    @abstractmethod
    def _block_names(self) -> list[BlockName]:
        """Names of all blocks. The caller is within `asking`."""

    @abstractmethod
    def _layers_of(self, name: BlockName) -> int:
        """Number of a block's layers, by its header, which is read anew. Raises `BlockLostError`."""

    def _read_whole(self, name: BlockName) -> None:
        for layer in range(self._layers_of(name)):  # a whole block at once may exceed a timeout
            self.read(name, layer)

    def _stats(self, blocks: int, nbytes: int, chunks: int, pinned: int, damaged: int) -> StoreStats:
        """The store's state, of which these are counted when it is asked for; `damaged`: blocks."""
        return StoreStats(
            tier=self.tier_names[0],
            blocks=blocks,
            bytes=nbytes,
            max_bytes=self._capacity.max_bytes,
            chunks=chunks,
            pinned=pinned,
            hits=self._finds.hits,
            misses=self._finds.misses,
            evictions=self._capacity.evictions,
            damaged=damaged + self._manifests.damaged,
            write_failures=self._write_failures,
        )

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        with self.asking():
            names = self._block_names()
        found, lost = list[Damage](), set[BlockName]()
        for done, name in enumerate(names, start=1):
            try:
                self._read_whole(name)
            except BlockDamagedError as error:
                found.append(Damage("block", name, error.reason, error.removed))
            except BlockLostError:
                lost.add(name)
            if progress is not None:
                progress(done, len(names))
        if lost:
            with self.asking():
                lost.intersection_update(self._block_names())  # others have vanished meanwhile
        for name in sorted(lost):
            try:
                self._read_whole(name)  # it may have been written again
            except BlockLostError as error:
                found.append(Damage("block", name, str(error), False))
        self._manifests.intact(found, fresh=True)
        return found + verify_documents(self.documents, removes=not self.read_only)
