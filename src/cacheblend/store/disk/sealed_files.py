"""Manifests and documents' records as files of a folder, named by a block name.

manifests/<name>.json
documents/<root>/<name>.json
documents/<root>/lock             locked while it is decided what is referred to
"""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH110, PTH116, PTH123, PTH208

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from cacheblend.core.names import BlockName
from cacheblend.store.base import LOGGER_NAME, SMALL_FILE_BYTES
from cacheblend.store.disk.folder import Folder, name_of_file, named_files, remove_entry, store_error, unlink
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.sealed import DOCUMENTS, MANIFESTS, Bytes, Sealed

SUFFIX = ".json"
STAMP_SETTLES_NS = 2 * 10**9
"""Two changes within one tick of a file system's clock have the same time; the coarsest ticks are 2 s."""

logger = logging.getLogger(LOGGER_NAME)


class SealedFiles:
    """See `SealedPlace`. Raises `OSError` where the folder cannot be read."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._path = folder, str(folder.path)
        self._locks: dict[str, threading.Lock] = {}

    def where(self, kind: str, name: BlockName) -> str:
        return f"{self._path}/{kind}/{name.hex()}{SUFFIX}"

    def put_sealed(self, kind: str, name: BlockName, data: Bytes) -> None:
        path = self.where(kind, name)
        try:
            self._folder.publish(path, [memoryview(data)])
        except OSError as error:
            raise store_error(error, f"cannot write {path}") from error

    def sealed(self, kind: str) -> Mapping[BlockName, Sealed]:
        found: dict[BlockName, Sealed] = {}
        for name in named_files(f"{self._path}/{kind}", SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(self.where(kind, name))
                mark = status.st_ino, status.st_size, status.st_mtime_ns
                found[name] = Sealed(mark, whole_pages(status.st_size))
        return found

    def read_sealed(self, kind: str, names: Sequence[BlockName]) -> list[Bytes | DamagedError | None]:
        """An I/O error of the disk counts as damage; a manifest that cannot be opened is left out."""
        return [self._read(kind, name) for name in names]

    def _read(self, kind: str, name: BlockName) -> Bytes | DamagedError | None:
        path = self.where(kind, name)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would never end
                return DamagedError("it is no regular file")
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                return DamagedError(f"cannot be read: {error}")
            if kind != MANIFESTS:
                raise
            logger.warning("manifest %s cannot be read: %s; left out", path, error.strerror)
            return None

    def has_sealed(self, kind: str, name: BlockName) -> bool:
        return os.path.exists(self.where(kind, name))

    def delete_sealed(self, kind: str, name: BlockName) -> bool:
        return unlink(self.where(kind, name), remove_entry)

    def kinds(self) -> list[str]:
        """Folders that are empty but for the lock have no records."""
        try:
            folders = os.listdir(self._folder.documents)
        except FileNotFoundError:
            return []
        roots = [folder for folder in sorted(folders) if name_of_file(folder, "") is not None]
        return [f"{DOCUMENTS}{root}" for root in roots if named_files(f"{self._folder.documents}/{root}", SUFFIX)]

    @contextmanager
    def lock(self, kind: str) -> Iterator[None]:
        """By flock, where the file system has it."""
        place = self._folder.path / kind
        try:
            self._folder.make(place)
        except OSError as error:
            raise store_error(error, f"cannot make {place}") from error
        with self._locks.setdefault(kind, threading.Lock()), self._folder.locked(place):
            yield

    def listing_stamp(self) -> Hashable | None:
        """When the folder of manifests last changed; None while a change may still go unnoticed."""
        try:
            status = os.stat(self._folder.manifests)
        except FileNotFoundError:
            return None  # `sealed` finds none either
        settled = time.time_ns() - status.st_mtime_ns > STAMP_SETTLES_NS
        return (status.st_ino, status.st_mtime_ns) if settled else None


def whole_pages(nbytes: int) -> int:
    """What a small file occupies on a disk."""
    return -(-nbytes // SMALL_FILE_BYTES) * SMALL_FILE_BYTES
