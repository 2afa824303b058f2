"""Small files with a checksum, named by a block name: written, listed and read, those already read kept in memory.

Manifests, and records of documents. Knows files; does not know what is in them.
"""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH110, PTH116, PTH123

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

from cacheblend.core.names import BlockName
from cacheblend.store.disk.folder import Folder, named_files, remove_entry
from cacheblend.store.format.checksum import DamagedError

T = TypeVar("T")
SUFFIX = ".json"
STAMP_SETTLES_NS = 2 * 10**9
"""Two changes within one tick of a file system's clock have the same time; the coarsest ticks are 2 s."""


class SealedFiles(Generic[T]):
    """Files of one kind in one place; a file is not read again while it does not change.

    Safe to call from several threads.

    Args:
        folder: the store's folder.
        place: where the files lie, in it.
        decode: of a file's bytes and its name; raises `DamagedError`.
    """

    def __init__(self, folder: Folder, place: Path, decode: Callable[[bytes, BlockName], T]) -> None:
        self._folder, self._place, self._decode = folder, place, decode
        self._lock = threading.Lock()
        self._known: dict[BlockName, tuple[tuple[int, int, int], T]] = {}

    def path(self, name: BlockName) -> str:
        """Path of the file, whether it exists or not."""
        return f"{self._place}/{name.hex()}{SUFFIX}"

    def put(self, name: BlockName, data: bytes) -> None:
        """Writes a file, all or nothing; raises `OSError`."""
        self._folder.publish(self.path(name), [memoryview(data)])

    def names(self) -> list[BlockName]:
        """Names of the files, sorted. Raises `OSError`."""
        return named_files(str(self._place), SUFFIX)

    def stamp(self) -> Hashable | None:
        """A value that changes when a file is added or removed; None while a change may still go unnoticed.

        Raises `OSError`.
        """
        try:
            status = os.stat(self._place)
        except FileNotFoundError:
            return None  # `names` finds none either
        settled = time.time_ns() - status.st_mtime_ns > STAMP_SETTLES_NS
        return (status.st_ino, status.st_mtime_ns) if settled else None

    def has(self, name: BlockName) -> bool:
        """Whether there is a file of this name; does not read it."""
        return os.path.exists(self.path(name))

    def read(self, name: BlockName, fresh: bool = False) -> T | None:
        """What the file says, None if there is none.

        Args:
            name: of the file.
            fresh: read the file even if it has not changed.

        Raises:
            DamagedError: as `decode` raises it; an I/O error of the disk counts as damage.
            OSError: the file cannot be read for another reason (permissions, no descriptors left).
        """
        path = self.path(name)
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):  # a pipe would never end
                raise DamagedError("it is no regular file")
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            with self._lock:
                known = self._known.get(name)
            if known is not None and known[0] == stamp and not fresh:
                return known[1]
            with open(path, "rb") as file:
                value = self._decode(file.read(), name)
        except FileNotFoundError:
            with self._lock:
                self._known.pop(name, None)
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise DamagedError(f"cannot be read: {error}") from error
        with self._lock:
            self._known[name] = (stamp, value)
        return value

    def size(self, name: BlockName) -> int:
        """Bytes of a file that was read; 0 if it was not."""
        with self._lock:
            known = self._known.get(name)
        return 0 if known is None else known[0][1]

    def remove(self, name: BlockName) -> bool:
        """Removes the file; False if there was none. Raises other `OSError`s."""
        with self._lock:
            self._known.pop(name, None)
        try:
            remove_entry(self.path(name))
        except FileNotFoundError:
            return False
        return True
