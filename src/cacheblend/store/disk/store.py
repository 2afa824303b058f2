"""A store in a folder, which several processes may share (docs/format.md has every byte).

A block is held completely or not at all: a file appears under its final name once it is complete, and a file that
fails its checksum is reported, removed and counts as not held.
"""

# ruff: noqa: PTH110 - system calls on strings, since this is the hot path

import contextlib
import os
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from cacheblend.core.errors import BlockLostError, StoreError, check_type
from cacheblend.core.load.threads import DaemonPool, results_of, submit_or_call
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, ChunkManifest, RecordMemory
from cacheblend.store.base import (
    SMALL_FILE_BYTES,
    Damage,
    FindCounter,
    KVStore,
    Progress,
    StoreStats,
    check_block,
    check_manifest,
    check_max_bytes,
)
from cacheblend.store.disk.block_files import BlockFiles
from cacheblend.store.disk.block_writer import BlockWriter
from cacheblend.store.disk.capacity import Capacity
from cacheblend.store.disk.folder import OWNER_ONLY, Folder, store_error, sync_folder, unlink, unreadable
from cacheblend.store.disk.sealed_files import SealedFiles, whole_pages
from cacheblend.store.documents import verify_documents
from cacheblend.store.eviction import Expiry, eviction_of
from cacheblend.store.format.records import encode_manifest
from cacheblend.store.sealed import MANIFESTS, Documents, Manifests

DEFAULT_DISK_BYTES = 50 << 30
"""Bound of a folder for which none is given."""

_MOST_READS = 8  # at the same time, for one request
_BYTES_A_THREAD = 2 << 20  # a thread is asked for at least so many bytes: threads contend for the interpreter,
_DIRECT_BYTES_A_THREAD = 256 << 10  # and for so many if each read waits for the device


class DiskStore(KVStore):
    """Blocks in a folder, at most `max_bytes` of files.

    Args:
        path: the folder; made if it does not exist.
        max_bytes: bound on the files of all models in the folder; None for no bound but the disk's.
            Each process that writes keeps the bound that it was given.
        read_only: never write: no block is marked as used, damage is reported but not removed.
        durable: fsync every block, so that it also survives a power failure. Without it a block survives the
            end of the process, `kill -9` included.
        direct: bypass the page cache, where the file system can: for devices that are as fast as copies in memory, or
            folders that are read once and are much larger than memory.
        eviction: the policy's name, see `eviction_of`; of other processes' uses only their time is known.
        ttl: seconds without use after which an unpinned block is removed; None: no limit.
        locks, mode: lock files while they are written; permissions of new files; see `Folder`.

    Raises:
        InvalidInputError: a bound or `ttl` that is not above 0, or an unknown policy.
        StoreFormatError: the folder was written in a newer format.
        StoreError: the folder contains other files, or cannot be read or made.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_bytes: int | None = DEFAULT_DISK_BYTES,
        read_only: bool = False,
        durable: bool = True,
        direct: bool = False,
        eviction: str = "lru",
        ttl: float | None = None,
        locks: bool = True,
        mode: int = OWNER_ONLY,
    ) -> None:
        check_type(path, str | Path, "the path of a store's folder")
        self._folder, expiry = Folder(Path(path), read_only, durable, locks, mode), Expiry(ttl)
        self._files = BlockFiles(self._folder, direct=direct, expiry=expiry)
        # For lru no policy is needed: the files' times say when they were used, and all processes see them.
        policy = None if eviction == "lru" else eviction_of(eviction)
        self._sealed = SealedFiles(self._folder)
        self._manifests = Manifests(self._sealed, self._reading, self.read_only, SMALL_FILE_BYTES)
        self._capacity = Capacity(self._folder, self._files, self._manifests, max_bytes, policy, expiry)
        self._writer = BlockWriter(self._folder, self._capacity)
        self.documents = Documents(self._sealed, self._reading, self._folder.require_writable, self._reserved)
        self._finds = FindCounter()
        self._lock, self._write_failures = threading.Lock(), 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._reads_at_once = _MOST_READS if direct else min(_MOST_READS, cores)
        self._bytes_a_thread = _DIRECT_BYTES_A_THREAD if direct else _BYTES_A_THREAD
        self._readers = DaemonPool(self._reads_at_once, "cacheblend-disk")

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    def file_of(self, name: BlockName) -> str:
        """Path of a block's file, whether it exists or not."""
        return self._folder.block_path(name)

    @property
    def read_only(self) -> bool:
        """Whether writes raise `StoreReadOnlyError`."""
        return self._folder.read_only

    # ---- blocks -----------------------------------------------------------------------------------------

    @property
    def tier_names(self) -> tuple[str, ...]:
        return ("disk",)

    @property
    def is_reachable(self) -> bool:
        """Whether the folder is still a store: it may be deleted, or its disk unmounted."""
        return self._folder.is_there

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """One stat for a known block; reads the header of others."""
        headers = self._files.find(names)
        found = [header for header in reversed(headers) if header is not None]
        used = [(each.name, len(each.entry.token_ids) * len(each.names) / each.file_bytes) for each in found]
        self._capacity.used(used)
        self._finds.count(headers)
        return [None if header is None else header.entry for header in headers]

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        return self._files.held(names)

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """One pread for a block's layers, checked head by head; by threads if it is much.

        Each thread reads a part of the blocks: between small reads threads would only wait for the interpreter.
        """
        nbytes = len(names) * self._files.record_bytes(names, layers)
        parts = min(self._reads_at_once, len(names), nbytes // self._bytes_a_thread)
        if parts <= 1:
            return self._files.read(names, layers, heads, memory)
        step = -(-len(names) // parts)
        first, *others = [names[at : at + step] for at in range(0, len(names), step)]
        asked = [submit_or_call(self._readers, self._files.read, part, layers, heads, memory) for part in others]
        read = self._files.read(first, layers, heads, memory)
        return [*read, *(each for part in results_of(asked) for each in part)]

    def write(self, block: Block) -> bool:
        """The records are written from their own memory, without a copy."""
        return self.write_all([block])[0]

    def write_all(self, blocks: Sequence[Block]) -> list[bool]:
        """Small blocks that follow each other share a file, where the folder can have some."""
        self._folder.require_writable()
        for block in blocks:
            check_block(block)
        held = self._files.find([block.name for block in blocks])
        new = {block.name: block for block, header in zip(blocks, held, strict=True) if header is None}
        try:
            self._writer.write(list(new.values()))
        except StoreError:
            with self._lock:
                self._write_failures += 1
            raise
        return [new.pop(block.name, None) is not None for block in blocks]

    def delete(self, name: BlockName) -> bool:
        self._folder.require_writable()
        self.unpin([name])
        self._files.forget(name)
        self._capacity.gone(name)
        return unlink(self._folder.block_path(name))

    # ---- pins and manifests -----------------------------------------------------------------------------

    def pin(self, names: Iterable[BlockName]) -> None:
        """Each pin is an empty file."""
        self._folder.require_writable()
        try:
            for name in names:
                self._folder.touch(self._folder.pins / name.hex())
            if self._folder.durable:
                sync_folder(str(self._folder.pins))
        except OSError as error:
            raise store_error(error, f"cannot pin blocks in {self.path}") from error

    def unpin(self, names: Iterable[BlockName]) -> None:
        self._folder.require_writable()
        for name in names:
            unlink(str(self._folder.pins / name.hex()))

    def pinned(self) -> set[BlockName]:
        with self._reading():
            return self._capacity.pinned()

    def are_pinned(self, names: Sequence[BlockName]) -> list[bool]:
        """One stat for each."""
        return [os.path.exists(self._folder.pins / name.hex()) for name in names]

    def put_manifest(self, manifest: ChunkManifest) -> None:
        self._folder.require_writable()
        check_manifest(manifest)
        data, name = encode_manifest(manifest), manifest.chunk_id
        with self._reading(), self._reserved(len(data), name, "manifest"):
            self._sealed.put_sealed(MANIFESTS, name, data)

    def _reserved(self, nbytes: int, name: BlockName, what: str) -> AbstractContextManager[None]:
        return self._capacity.reserved(whole_pages(nbytes))

    def manifests(self) -> list[ChunkManifest]:
        """Files that have not changed since the last call are not read again."""
        return self._manifests.intact([])

    def listing_stamp(self) -> Hashable | None:
        """When the folder of manifests last changed; None for 2 s after a change."""
        with self._reading():
            return self._sealed.listing_stamp()

    def has_manifest(self, chunk_id: BlockName) -> bool:
        """One stat."""
        return self._sealed.has_sealed(MANIFESTS, chunk_id)

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        self._folder.require_writable()
        return self._manifests.delete(chunk_id)

    # ---- the whole store --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns a system error while the folder is listed into a `StoreError`."""
        try:
            yield
        except OSError as error:
            raise unreadable(self.path, error) from error

    def stats(self) -> StoreStats:
        with self._reading():
            count, nbytes, pinned = 0, float(self._capacity.small_bytes()[0]), 0
            for block in self._capacity.blocks():
                count, nbytes, pinned = count + 1, nbytes + block.nbytes, pinned + block.pinned
            chunks = self._manifests.count()
        return StoreStats(
            tier="disk",
            blocks=count,
            bytes=round(nbytes),
            max_bytes=self._capacity.max_bytes,
            chunks=chunks,
            pinned=pinned,
            hits=self._finds.hits,
            misses=self._finds.misses,
            evictions=self._capacity.evictions,
            damaged=self._files.damaged + self._manifests.damaged,
            write_failures=self._write_failures,
        )

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """Blocks that vanish meanwhile are not damage."""
        with self._reading():
            names = [block.name for block in self._capacity.blocks()]
        found: list[Damage] = []
        for done, name in enumerate(names, start=1):
            damage = self._files.verify(name)
            if damage is not None:
                found.append(damage)
            if progress is not None:
                progress(done, len(names))
        self._manifests.intact(found, fresh=True)
        return found + verify_documents(self.documents, removes=not self.read_only)

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        self._folder.require_writable()
        check_max_bytes(max_bytes)
        try:
            return self._capacity.shrink(max_bytes, progress) + self._capacity.sweep()
        except OSError as error:
            raise store_error(error, f"cannot prune {self.path}") from error

    def close(self) -> None:
        self._readers.close()
        self._files.close()
