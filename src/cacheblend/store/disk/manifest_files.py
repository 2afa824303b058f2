"""The manifest files of a folder: writing, listing and reading them, with those already read kept in memory."""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH108, PTH110, PTH116, PTH123

import errno
import os
import threading
import time
from collections.abc import Hashable

from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store.disk.folder import Folder, named_files
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.format.manifest_file import decode_manifest, encode_manifest

SUFFIX = ".json"
STAMP_SETTLES_NS = 2 * 10**9
"""Two changes within one tick of a file system's clock have the same time; the coarsest ticks are 2 s."""


class ManifestFiles:
    """The manifests of a folder; a file is not read again while it does not change.

    Safe to call from several threads.

    Args:
        folder: the store's folder.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[BlockName, tuple[tuple[int, int, int], ChunkManifest]] = {}

    def path(self, chunk_id: BlockName) -> str:
        """Path of the chunk's manifest, whether the file exists or not."""
        return f"{self._folder.manifests}/{chunk_id.hex()}{SUFFIX}"

    def put(self, manifest: ChunkManifest) -> None:
        """Writes a manifest, all or nothing; raises `OSError`."""
        self._folder.publish(self.path(manifest.chunk_id), [memoryview(encode_manifest(manifest))])

    def names(self) -> list[BlockName]:
        """The chunks that have a manifest, sorted. Raises `OSError`."""
        return named_files(str(self._folder.manifests), SUFFIX)

    def stamp(self) -> Hashable | None:
        """A value that changes when a file is added or removed; None while a change may still go unnoticed.

        Raises `OSError`.
        """
        try:
            status = os.stat(self._folder.manifests)
        except FileNotFoundError:
            return None  # `names` finds none either
        settled = time.time_ns() - status.st_mtime_ns > STAMP_SETTLES_NS
        return (status.st_ino, status.st_mtime_ns) if settled else None

    def has(self, chunk_id: BlockName) -> bool:
        """Whether the chunk has a manifest; does not read it."""
        return os.path.exists(self.path(chunk_id))

    def read(self, chunk_id: BlockName, fresh: bool = False) -> ChunkManifest | None:
        """The manifest, None if there is none.

        Args:
            chunk_id: the chunk.
            fresh: read the file even if it has not changed.

        Raises:
            DamagedError: see `decode_manifest`; an I/O error of the disk counts as damage.
            OSError: the file cannot be read for another reason (permissions, no descriptors left).
        """
        path = self.path(chunk_id)
        try:
            status = os.stat(path)
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            with self._lock:
                known = self._known.get(chunk_id)
            if known is not None and known[0] == stamp and not fresh:
                return known[1]
            with open(path, "rb") as file:
                manifest = decode_manifest(file.read(), chunk_id)
        except FileNotFoundError:
            with self._lock:
                self._known.pop(chunk_id, None)
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise DamagedError(f"cannot be read: {error}") from error
        with self._lock:
            self._known[chunk_id] = (stamp, manifest)
        return manifest

    def remove(self, chunk_id: BlockName) -> bool:
        """Removes the file; False if there was none. Raises other `OSError`s."""
        with self._lock:
            self._known.pop(chunk_id, None)
        try:
            os.unlink(self.path(chunk_id))
        except FileNotFoundError:
            return False
        return True
