"""Manifests and documents' records where several processes keep them: small objects with a checksum of their own.

    manifests/<chunk>             the kind of manifests
    documents/<root>/<document>   each root's documents are a kind

Folders, servers and buckets move their bytes (`SealedPlace`). Knows what is in them; does not know where they lie.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

from cacheblend.core.errors import StoreError, StoreUnreachableError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store.base import LOGGER_NAME, Damage
from cacheblend.store.documents import DamagedRecord, DocumentRecord, DocumentRecords
from cacheblend.store.eviction import Listed
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.format.records import decode_document, decode_manifest, encode_document

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview
logger = logging.getLogger(LOGGER_NAME)

MANIFESTS = "manifests"
"""The kind of manifests."""

DOCUMENTS = "documents/"
"""What the kinds of documents' records begin with; the root follows."""


class Sealed(NamedTuple):
    """A manifest or a document's record as it is listed.

    Attributes:
        mark: changes when it does.
        nbytes: what it counts.
    """

    mark: Hashable
    nbytes: int


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

    def listing_stamp(self) -> Hashable | None:
        """A value that changes when any manifest is added, changed or removed; None: unknown."""


Asking = Callable[[], AbstractContextManager[None]]
"""Makes the context of calls to a place, which turns what goes wrong there into `StoreError`."""


class SealedRecords(Generic[T]):
    """All of one kind in one place, read again only where they changed; safe to call from several threads.

    Args:
        place: where they are.
        asking: around every call to it.
        kind: what is read.
        decode: of the bytes and the name; raises `DamagedError`.
    """

    def __init__(self, place: SealedPlace, asking: Asking, kind: str, decode: Callable[[bytes, BlockName], T]) -> None:
        self._place, self._asking, self._kind, self._decode = place, asking, kind, decode
        self._known: dict[BlockName, tuple[Sealed, T | DamagedError]] = {}  # intact, as each was listed
        self._lock = threading.Lock()

    def all(self, *, fresh: bool = False) -> dict[BlockName, tuple[Sealed, T | DamagedError]]:
        """What there is and how it is listed, ordered by name; `fresh`: all is read again. Raises `StoreError`."""
        known = {} if fresh else self._known
        with self._asking():
            marks = self._place.sealed(self._kind)
            changed = [name for name, mark in marks.items() if name not in known or known[name][0] != mark]
            data = self._place.read_sealed(self._kind, changed)
        listed = {name: known[name] for name in marks.keys() - set(changed)}
        for name, part in zip(changed, data, strict=True):
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


class Manifests:
    """The manifests of one place, see `ManifestPlace`; safe to call from several threads.

    Args:
        place: where they are.
        asking: around calls to it, but for those of `ManifestPlace`, whose caller is within it.
        read_only: damaged manifests are reported but not removed.
        page_bytes: a manifest takes whole pages of this size.

    Attributes:
        delete: of `SealedRecords`.
        damaged: manifests found damaged so far.
    """

    def __init__(self, place: SealedPlace, asking: Asking, read_only: bool, page_bytes: int = 1) -> None:
        self._place, self._asking, self._read_only, self._page_bytes = place, asking, read_only, page_bytes
        self._records = SealedRecords(place, asking, MANIFESTS, decode_manifest)
        self.delete = self._records.delete
        self.damaged = 0

    def intact(self, found: list[Damage], *, fresh: bool = False) -> list[ChunkManifest]:
        """All manifests, ordered by chunk. Damaged ones are reported, removed and appended to `found`.

        Raises:
            StoreError: the place cannot be listed.
        """
        intact = []
        for name, (_, manifest) in self._records.all(fresh=fresh).items():
            if not isinstance(manifest, DamagedError):
                intact.append(manifest)
                continue
            removed = False
            if not self._read_only:
                with contextlib.suppress(StoreError), self._asking():
                    removed = self._records.delete(name)
            self.damaged += 1
            outcome = "removed" if removed else "could not be removed"
            logger.warning("damaged manifest %s: %s; %s", self._place.where(MANIFESTS, name), manifest, outcome)
            found.append(Damage("manifest", name, str(manifest), removed))
        return intact

    def count(self) -> int:
        return len(self._place.sealed(MANIFESTS))

    def all(self) -> list[Listed]:
        """Damaged ones are left to those who list manifests."""
        found = self._records.all().values()
        return [(each, sealed.nbytes) for sealed, each in found if not isinstance(each, DamagedError)]

    def some(self, chunk_ids: Sequence[BlockName]) -> Iterator[Listed]:
        for name, data in zip(chunk_ids, self._place.read_sealed(MANIFESTS, chunk_ids), strict=True):
            manifest = None if data is None else self._records.decoded(data, name)
            if isinstance(manifest, ChunkManifest) and not isinstance(data, DamagedError | None):
                yield manifest, -(-len(data) // self._page_bytes) * self._page_bytes

    def remove(self, chunk_ids: Sequence[BlockName]) -> None:
        """One that cannot be removed stays, and is counted again."""
        for chunk_id in chunk_ids:
            try:
                self._records.delete(chunk_id)
            except StoreUnreachableError:
                raise
            except StoreError:
                continue


class Documents(DocumentRecords):
    """The records of one place; each root is a kind of its own.

    Args:
        place: where they are.
        asking: around every call to it.
        require_writable: raises `StoreReadOnlyError` where nothing may be written.
        reserved: makes the context in which a record of so many bytes may be written: blocks are evicted for it. It is
            given the record's name and what it is, too.
    """

    def __init__(
        self,
        place: SealedPlace,
        asking: Asking,
        require_writable: Callable[[], None],
        reserved: Callable[[int, BlockName, str], AbstractContextManager[None]],
    ) -> None:
        self._place, self._asking, self._require_writable, self._reserved = place, asking, require_writable, reserved
        self._records: dict[BlockName, SealedRecords[DocumentRecord]] = {}

    def put(self, record: DocumentRecord) -> None:
        self._require_writable()
        data = encode_document(record)
        with self._asking(), self._reserved(len(data), record.name, "record"):
            self._place.put_sealed(_kind(record.root), record.name, data)

    def get(self, root: BlockName, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        with self._asking():
            (data,) = self._place.read_sealed(_kind(root), [name])
        return None if data is None else self._checked(root, name, self._of(root).decoded(data, name))

    def all(self, root: BlockName) -> list[DocumentRecord | DamagedRecord]:
        return [self._checked(root, name, each) for name, (_, each) in self._of(root).all().items()]

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
        self._require_writable()
        with self._asking():
            return self._of(root).delete(name)

    def roots(self) -> list[BlockName]:
        with self._asking():
            return [BlockName(bytes.fromhex(kind.removeprefix(DOCUMENTS))) for kind in self._place.kinds()]

    @contextmanager
    def changing(self, root: BlockName) -> Iterator[None]:
        self._require_writable()
        with self._asking():
            lock = self._place.lock(_kind(root))
        with lock:
            yield


def _kind(root: BlockName) -> str:
    return f"{DOCUMENTS}{root.hex()}"
