"""Records of documents as files, in a folder for each root.

documents/<root>/<name>.json      a record
documents/<root>/lock             locked while it is decided what is referred to
"""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH208

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cacheblend.core.names import BlockName
from cacheblend.store.disk.capacity import Capacity, whole_pages
from cacheblend.store.disk.folder import Folder, store_error, unreadable
from cacheblend.store.disk.sealed_files import SealedFiles
from cacheblend.store.documents import DamagedRecord, DocumentRecord, DocumentRecords
from cacheblend.store.format.block_file import NAME_BYTES
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.format.document_file import decode_document, encode_document


class FolderDocuments(DocumentRecords):
    """The records of one store's folder.

    Args:
        folder: the store's folder.
        capacity: of the store; records count against its bound, and blocks are evicted for them.
    """

    def __init__(self, folder: Folder, capacity: Capacity) -> None:
        self._folder, self._capacity = folder, capacity
        self._lock = threading.Lock()
        self._files: dict[BlockName, SealedFiles[DocumentRecord]] = {}
        self._changing: dict[BlockName, threading.Lock] = {}

    def put(self, record: DocumentRecord) -> None:
        self._folder.require_writable()
        data = encode_document(record)
        try:
            with self._capacity.reserved(whole_pages(len(data))):
                self._files_of(record.root).put(record.name, data)
        except OSError as error:
            raise store_error(error, f"cannot write the record of document {record.id[:80]!r}") from error

    def get(self, root: BlockName, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        """Reads the file if it has changed."""
        files = self._files_of(root)
        try:
            return files.read(name)
        except DamagedError as error:
            return DamagedRecord(name, f"{files.path(name)}: {error}")
        except OSError as error:
            raise unreadable(self._folder.path, error) from error

    def all(self, root: BlockName) -> list[DocumentRecord | DamagedRecord]:
        """Reads the files that have changed."""
        found = (self.get(root, name) for name in self.names(root))
        return [record for record in found if record is not None]

    def names(self, root: BlockName) -> list[BlockName]:
        """Lists a folder."""
        try:
            return self._files_of(root).names()
        except OSError as error:
            raise unreadable(self._folder.path, error) from error

    def delete(self, root: BlockName, name: BlockName) -> bool:
        self._folder.require_writable()
        try:
            return self._files_of(root).remove(name)
        except OSError as error:
            raise store_error(error, f"cannot remove the record of document {name.hex()}") from error

    def roots(self) -> list[BlockName]:
        """Folders that are empty but for the lock have no records."""
        try:
            folders = os.listdir(self._folder.documents)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self._folder.path, error) from error
        roots = sorted(root for folder in folders if (root := _root(folder)) is not None)
        return [root for root in roots if self._files_of(root).names()]

    @contextmanager
    def changing(self, root: BlockName) -> Iterator[None]:
        """By flock, where the file system has it."""
        self._folder.require_writable()
        with self._lock:
            own = self._changing.setdefault(root, threading.Lock())
        place = self._folder.documents / root.hex()
        try:
            self._folder.make(place)
        except OSError as error:
            raise store_error(error, f"cannot make {place}") from error
        with own, self._folder.locked(place):
            yield

    def _files_of(self, root: BlockName) -> SealedFiles[DocumentRecord]:
        with self._lock:
            if root not in self._files:
                place = self._folder.documents / root.hex()
                self._files[root] = SealedFiles(self._folder, place, decode_document)
            return self._files[root]


def _root(folder: str) -> BlockName | None:
    """The root in a folder's name, None if it has another form."""
    try:
        return BlockName(bytes.fromhex(folder)) if len(folder) == 2 * NAME_BYTES else None
    except ValueError:
        return None
