"""Manifests in a folder: one small JSON file a chunk, with a checksum of its own (docs/format.md)."""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH108, PTH110, PTH116, PTH123, PTH208

import base64
import errno
import json
import os
import threading
import time
import zlib
from collections.abc import Hashable

import numpy as np

from cacheblend.core.naming import BlockName, TokenIds
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store.checksum import DIGITS, is_sealed, seal
from cacheblend.store.disk.folder import Folder
from cacheblend.store.disk.record_file import FORMAT, DamagedError

SUFFIX = ".json"
_OPENING = b'{"checksum":"'
_NAME_BYTES = 32


def encode_manifest(manifest: ChunkManifest) -> bytes:
    """The manifest's file."""
    fields = {
        "format": FORMAT,
        "chunk_id": manifest.chunk_id.hex(),
        "root": manifest.root.hex(),
        "model": manifest.model,
        "label": manifest.label,
        "anchor_ids": _pack(manifest.anchor_ids.tobytes()),
        "token_ids": _pack(manifest.token_ids.tobytes()),
        "block_names": base64.b64encode(b"".join(manifest.block_names)).decode(),
    }
    return seal(_OPENING, b'",' + json.dumps(fields, separators=(",", ":")).encode()[1:] + b"\n")


def decode_manifest(data: bytes, chunk_id: BlockName) -> ChunkManifest:
    """The manifest, checked.

    Raises:
        DamagedError: a byte is wrong, or the file goes by another name than `chunk_id`.
    """
    if len(data) < len(_OPENING) + DIGITS or not data.startswith(_OPENING):
        raise DamagedError("not a manifest")
    if not is_sealed(data, len(_OPENING)):
        raise DamagedError("the manifest does not match its checksum")
    try:
        fields = json.loads(data)
        names = base64.b64decode(fields["block_names"])
        manifest = ChunkManifest(
            chunk_id=BlockName(bytes.fromhex(fields["chunk_id"])),
            root=BlockName(bytes.fromhex(fields["root"])),
            anchor_ids=_unpack(fields["anchor_ids"]),
            token_ids=_unpack(fields["token_ids"]),
            block_names=tuple(BlockName(names[at : at + _NAME_BYTES]) for at in range(0, len(names), _NAME_BYTES)),
            model=fields["model"],
            label=fields["label"],
        )
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise DamagedError(f"the manifest cannot be understood: {error!r}") from error
    if manifest.chunk_id != chunk_id:
        raise DamagedError(f"the file holds the manifest of chunk {manifest.chunk_id.hex()}")
    return manifest


def _pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _unpack(text: str) -> TokenIds:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u4")


STAMP_SETTLES_NS = 2 * 10**9
"""A change within a file system's tick of another leaves no trace of its own; the coarsest ticks are 2 s."""


class ManifestFiles:
    """The manifests of a folder; remembers those it has read for as long as their files do not change.

    Safe to call from several threads.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[BlockName, tuple[tuple[int, int, int], ChunkManifest]] = {}

    def path(self, chunk_id: BlockName) -> str:
        """Where the manifest's file is, if there is one."""
        return f"{self._folder.manifests}/{chunk_id.hex()}{SUFFIX}"

    def put(self, manifest: ChunkManifest) -> None:
        """Writes a manifest, all or nothing; raises `OSError`."""
        self._folder.publish(self.path(manifest.chunk_id), [memoryview(encode_manifest(manifest))])

    def names(self) -> list[BlockName]:
        """The chunks that have a manifest's file."""
        return named_files(str(self._folder.manifests), SUFFIX)

    def stamp(self) -> Hashable | None:
        """Changes when a file comes or goes; None where one may have, unseen, since the folder was last touched.

        Raises `OSError`.
        """
        try:
            status = os.stat(self._folder.manifests)
        except FileNotFoundError:
            return None  # as `names`: there are none
        settled = time.time_ns() - status.st_mtime_ns > STAMP_SETTLES_NS
        return (status.st_ino, status.st_mtime_ns) if settled else None

    def has(self, chunk_id: BlockName) -> bool:
        """Whether the chunk has a manifest's file; does not read it."""
        return os.path.exists(self.path(chunk_id))

    def read(self, chunk_id: BlockName, fresh: bool = False) -> ChunkManifest | None:
        """The manifest, None if there is none.

        Args:
            chunk_id: the chunk.
            fresh: read the file even if it has not changed.

        Raises:
            DamagedError: see `decode_manifest`; a disk's I/O error is damage, too.
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


def named_files(folder: str, suffix: str = "") -> list[BlockName]:
    """Names, in order, of the files in `folder` called by a block name in hexadecimal and `suffix`."""
    try:
        files = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for file in files if (name := name_of_file(file, suffix)) is not None)


def name_of_file(file: str, suffix: str) -> BlockName | None:
    """The block name in a file's name, None if it has another form."""
    text = file.removesuffix(suffix)
    if len(file) != 2 * _NAME_BYTES + len(suffix) or len(text) != 2 * _NAME_BYTES or text.lower() != text:
        return None
    try:
        return BlockName(bytes.fromhex(text))
    except ValueError:
        return None
