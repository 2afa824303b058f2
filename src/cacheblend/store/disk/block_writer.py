"""Writes blocks as files of a folder: small ones of a chain together, within the bound.

A file of several blocks stands under the name of each, as hard links, so that whoever looks for a block finds it by its
name alone, and the last name that is removed frees the bytes.

Knows the folder and its bound; does not know what is read.
"""

import logging
import time
from collections.abc import Sequence

from cacheblend.core.errors import StoreError, StoreFullError
from cacheblend.core.plan.blocks import Block
from cacheblend.store.base import LOGGER_NAME
from cacheblend.store.disk.capacity import Capacity
from cacheblend.store.disk.folder import Folder, is_full, store_error
from cacheblend.store.format.block_file import CHAIN_FORMAT, encode_chain

logger = logging.getLogger(LOGGER_NAME)

_FULL_DISK_TRIES = 4
# A layer of a file's blocks is one read: of a longer one the first bytes have left the caches when they are checked.
_READ_BYTES = 512 << 10


class BlockWriter:
    """Writes blocks that are not held; safe to call from several threads.

    Args:
        folder: the store's folder.
        capacity: its bound.
    """

    def __init__(self, folder: Folder, capacity: Capacity) -> None:
        self._folder, self._capacity = folder, capacity
        self._has_links = True

    def write(self, blocks: Sequence[Block]) -> None:
        """Writes blocks in order, each checked by `check_block`.

        Raises:
            StoreFullError: a block does not fit, and nothing unpinned is left to evict; those before it are written.
            StoreError: a write failed otherwise.
        """
        # No chains in a folder that an older cacheblend made, and may have open: it would take such files for damaged.
        writes_chains = self._has_links and self._folder.format >= CHAIN_FORMAT
        for chain in chains_of(blocks) if writes_chains else [[block] for block in blocks]:
            try:
                self._write_file(chain)
            except StoreError as error:
                if len(chain) == 1:
                    raise
                for block in chain:
                    self._write_file([block])
                if self._has_links and not isinstance(error, StoreFullError):  # it was for the links: no other is tried
                    self._has_links = False
                    logger.warning(
                        "%s; blocks are written to files of their own (is this a file system without links?)", error
                    )

    def _write_file(self, chain: Sequence[Block]) -> None:
        """Writes a file, evicting blocks while the disk is full."""
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


def chains_of(blocks: Sequence[Block]) -> list[list[Block]]:
    """What is written as one file: blocks that follow each other, of one layout, up to `_READ_BYTES` of a layer.

    A block that is longer than the one before it begins a passage behind what many passages begin with. It lies apart:
    what they share stays for long, and must not keep the bytes of one that is deleted.
    """
    chains: list[list[Block]] = []
    for block in blocks:
        if chains and _continues(chains[-1], block):
            chains[-1].append(block)
        else:
            chains.append([block])
    return chains


def _continues(chain: Sequence[Block], block: Block) -> bool:
    first, last = chain[0], chain[-1]
    if block.parent != last.name or block.layout != last.layout:
        return False
    if not len(block.token_ids) <= len(last.token_ids) == len(first.token_ids):
        return False
    largest, own = (max(record.nbytes for record in each.records) for each in (first, block))
    return len(chain) * largest + own <= _READ_BYTES
