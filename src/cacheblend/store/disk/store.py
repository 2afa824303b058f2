"""A store in a folder, that processes may share (docs/format.md has every byte). A block is held completely or not at
all: a file appears once complete, one that fails its checksum is reported, removed and not held."""

# ruff: noqa: PTH110 - system calls on strings, since this is the hot path

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from cacheblend.core.errors import BlockLostError, StoreError, StoreFullError, check_type
from cacheblend.core.load.threads import DaemonPool, results_of, submit_or_call
from cacheblend.core.names import BlockName, grouped
from cacheblend.core.plan.blocks import Block, BlockEntry, RecordMemory
from cacheblend.store.base import LOGGER_NAME, SMALL_FILE_BYTES, Progress, StoreStats, check_block, check_max_bytes
from cacheblend.store.disk.block_files import BlockFiles
from cacheblend.store.disk.capacity import Capacity
from cacheblend.store.disk.folder import (
    OWNER_ONLY,
    Folder,
    SealedFiles,
    is_full,
    store_error,
    sync_folder,
    unlink,
    unreadable,
    whole_pages,
)
from cacheblend.store.eviction import Expiry, LeastWorth, eviction_of
from cacheblend.store.format.block_file import CHAIN_FORMAT, encode_chain
from cacheblend.store.sealed import SharedStore

logger = logging.getLogger(LOGGER_NAME)

DEFAULT_DISK_BYTES = 50 << 30  # bound of a folder for which none is given
_FULL_DISK_TRIES = 4
# A layer of a file's blocks is one read: of a longer one the first bytes have left the caches when they are checked.
_READ_BYTES = 512 << 10
_MOST_READS = 8  # at the same time, for one request
_BYTES_A_THREAD = 2 << 20  # a thread is asked for at least so many bytes: threads contend for the interpreter


class DiskStore(SharedStore):
    """Blocks in a folder, which is made if it does not exist. Raises `InvalidInputError`: a bound or `ttl` that is not
    above 0, or an unknown policy; `StoreFormatError` and `StoreError` as `Folder`.

        max_bytes  bound on the files of all models in the folder; None: no bound but the disk's. Each process that
                   writes keeps the bound that it was given
        read_only  never write: no block is marked as used, damage is reported but not removed
        durable    fsync every block, so that it also survives a power failure; without it, the end of the process
        eviction   the policy's name, see `eviction_of`; of other processes' uses only their time is known
        ttl        seconds without use after which an unpinned block is removed; None: no limit
        locks, mode  see `Folder`
    """

    tier_names = ("disk",)

    def __init__(
        self,
        path: str | Path,
        *,
        max_bytes: int | None = DEFAULT_DISK_BYTES,
        read_only: bool = False,
        durable: bool = True,
        eviction: str = "lru",
        ttl: float | None = None,
        locks: bool = True,
        mode: int = OWNER_ONLY,
    ) -> None:
        check_type(path, str | Path, "the path of a store's folder")
        self._folder, expiry = Folder(Path(path), read_only, durable, locks, mode), Expiry(ttl)
        refusal = f"{self.path} is opened read-only or cannot be written to"
        refusal += ": check its permissions and its mount, or use another folder"
        super().__init__(SealedFiles(self._folder), self._folder.read_only, refusal, SMALL_FILE_BYTES)
        self._files = BlockFiles(self._folder, expiry=expiry)
        # For lru no policy is needed: the files' times say when they were used, and all processes see them.
        policy = each if isinstance(each := eviction_of(eviction), LeastWorth) else None
        self._capacity: Capacity = Capacity(self._folder, self._files, self._manifests, max_bytes, policy, expiry)
        # No chains in a folder that an older cacheblend made, and may have open: it would take such files for damaged.
        self._writes_chains = self._folder.format >= CHAIN_FORMAT
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._reads_at_once = min(_MOST_READS, cores)
        self._readers = DaemonPool(self._reads_at_once, "cacheblend-disk")

    @property
    def path(self) -> Path:  # the folder
        return self._folder.path

    def file_of(self, name: BlockName) -> str:
        """Path of a block's file, whether it exists or not."""
        return self._folder.block_path(name)

    @property
    def is_reachable(self) -> bool:  # whether the folder is still a store: it may be deleted, or its disk unmounted
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
        """One pread for a block's layers, checked head by head; by threads if it is much. Each thread reads a part of
        the blocks: between small reads threads would only wait for the interpreter."""
        nbytes = len(names) * self._files.record_bytes(names, layers)
        parts = min(self._reads_at_once, len(names), nbytes // _BYTES_A_THREAD)
        if parts <= 1:
            return self._files.read(names, layers, heads, memory)
        step = -(-len(names) // parts)
        first, *others = [names[at : at + step] for at in range(0, len(names), step)]
        asked = [submit_or_call(self._readers, self._files.read, part, layers, heads, memory) for part in others]
        read = self._files.read(first, layers, heads, memory)
        return [*read, *(each for part in results_of(asked) for each in part)]

    def write(self, block: Block) -> bool:
        return self.write_all([block])[0]

    def write_all(self, blocks: Sequence[Block]) -> list[bool]:
        """Small blocks that follow each other share a file, where the folder can have some."""
        with self._counted():
            self.require_writable()
            for block in blocks:
                check_block(block)
            held = self._files.find([block.name for block in blocks])
            new = {block.name: block for block, header in zip(blocks, held, strict=True) if header is None}
            missing = list(new.values())
            for chain in chains_of(missing) if self._writes_chains else [[block] for block in missing]:
                self._write_chain(chain)
        return [new.pop(block.name, None) is not None for block in blocks]

    def _write_chain(self, chain: Sequence[Block]) -> None:
        """Writes a file, which stands under the name of each block as hard links, or where that fails one for each: so
        whoever looks for a block finds it by its name alone, and the last name that is removed frees the bytes."""
        try:
            self._write_file(chain)
        except StoreError as error:
            if len(chain) == 1:
                raise
            for block in chain:
                self._write_file([block])
            if self._writes_chains and not isinstance(error, StoreFullError):  # it was for the links: no other is tried
                self._writes_chains = False
                logger.warning(
                    "%s; blocks are written to files of their own (is this a file system without links?)", error
                )

    def _write_file(self, chain: Sequence[Block]) -> None:
        buffers = encode_chain(chain)
        need = sum(len(buffer) for buffer in buffers)
        path, *others = (self._folder.block_path(block.name) for block in chain)
        try:
            with self._capacity.reserved(need):
                for tries_left in reversed(range(_FULL_DISK_TRIES)):
                    try:
                        self._folder.publish(path, buffers, time.time_ns(), others)
                        break
                    except OSError as error:
                        if not is_full(error):
                            raise
                        if not tries_left or not self._capacity.free(need):
                            raise StoreFullError(
                                f"cannot write {need} bytes to {path}: {error.strerror}, and nothing unpinned is "
                                "left to evict: free some space on the disk, raise the quota, or unpin blocks"
                            ) from error
        except OSError as error:
            raise store_error(error, f"cannot write {path}") from error
        self._capacity.used([(block.name, len(block.token_ids) * len(chain) / need) for block in chain])

    def delete(self, name: BlockName) -> bool:
        self.require_writable()
        self.unpin([name])
        self._files.forget(name)
        self._capacity.gone(name)
        return unlink(self._folder.block_path(name))

    def pin(self, names: Iterable[BlockName]) -> None:
        """Each pin is an empty file."""
        self.require_writable()
        try:
            for name in names:
                self._folder.touch(self._folder.pins / name.hex())
            if self._folder.durable:
                sync_folder(str(self._folder.pins))
        except OSError as error:
            raise store_error(error, f"cannot pin blocks in {self.path}") from error

    def unpin(self, names: Iterable[BlockName]) -> None:
        self.require_writable()
        for name in names:
            unlink(str(self._folder.pins / name.hex()))

    def pinned(self) -> set[BlockName]:
        with self.asking():
            return self._capacity.pinned()

    def are_pinned(self, names: Sequence[BlockName]) -> list[bool]:
        """One stat for each."""
        return [os.path.exists(self._folder.pins / name.hex()) for name in names]

    def reserved(self, nbytes: int, name: BlockName, what: str) -> AbstractContextManager[None]:
        return self._capacity.reserved(whole_pages(nbytes))

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unreadable(self.path, error) from error

    def stats(self) -> StoreStats:
        with self.asking():
            count, nbytes, pinned = 0, float(self._capacity.small_bytes()[0]), 0
            for block in self._capacity.blocks():
                count, nbytes, pinned = count + 1, nbytes + block.nbytes, pinned + block.pinned
            return self._stats(count, round(nbytes), self._manifests.count(), pinned, self._files.damaged)

    def _block_names(self) -> list[BlockName]:
        return [block.name for block in self._capacity.blocks()]

    def _layers_of(self, name: BlockName) -> int:
        return len(self._files.header(name).entry.layout.layers)

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        self.require_writable()
        check_max_bytes(max_bytes)
        try:
            return self._capacity.shrink(max_bytes, progress)
        except OSError as error:
            raise store_error(error, f"cannot prune {self.path}") from error

    def close(self) -> None:
        self._readers.close()
        self._files.close()


def chains_of(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """What is written as one file: blocks that follow each other, of one layout, up to `_READ_BYTES` of a layer. A
    block that is longer than the one before it begins a passage behind what many passages begin with. It lies apart:
    what they share stays for long, and must not keep the bytes of one that is deleted."""
    return grouped(blocks, _continues)


def _continues(chain: Sequence[Block], block: Block) -> bool:
    first, last = chain[0], chain[-1]
    if block.parent != last.name or block.layout != last.layout:
        return False
    if not len(block.token_ids) <= len(last.token_ids) == len(first.token_ids):
        return False
    largest, own = (max(record.nbytes for record in each.records) for each in (first, block))
    return len(chain) * largest + own <= _READ_BYTES
