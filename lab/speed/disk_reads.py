"""A request's blocks read from a folder by layer, as the loader reads them, against plain reads of as many bytes.

A plain read puts every MiB into the same memory, where the next one replaces it.

warm     everything in the page cache
cold     nothing in it
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError
from cacheblend.core.load.loader import ReadSize
from cacheblend.core.load.staging_buffers import StagingMemory, memory_of
from cacheblend.core.names import BlockName, as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import Block, KVLayout
from cacheblend.store import DiskStore, KVStore
from lab.bench import alternating

WAYS = ("warm", "cold")
BLOCK = 256
"""Tokens of a block."""

_AHEAD = 2  # reads that are under way or wait to be used, besides the one being used


def measure(layout: KVLayout, chunks: int, chunk_tokens: int, folder: Path | None, runs: int) -> dict[str, Any]:
    """For each of `WAYS` seconds, bytes per second and their ratio. `folder` is on the disk to measure; None: the
    temporary folder."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-", dir=folder)))
        store = DiskStore(path / "store", max_bytes=None)
        stack.enter_context(store)
        names, nbytes = fill(store, layout, chunks, chunk_tokens)
        plain = path / "plain"
        part = os.urandom(1 << 20)
        with plain.open("wb") as file:
            for _ in range(-(-nbytes // len(part))):
                file.write(part)
            file.truncate(nbytes)
            os.fsync(file.fileno())
        files = [plain, *(Path(store.file_of(name)) for name in names)]
        places = len({file.stat().st_ino for file in files[1:]})
        result: dict[str, Any] = {"bytes": nbytes, "blocks": len(names), "files": places}
        for way in WAYS:
            reader = stack.enter_context(DiskStore(path / "store", max_bytes=None))
            reader.find(names)

            def timed(read: Callable[[], float], dropped: Sequence[Path]) -> float:
                for file in dropped:
                    drop_pages(file)
                return read()

            arms = {
                "by_layer": partial(read_by_layer, reader, names, layout),
                "plain": partial(_read_plain, plain),
            }
            asked = {name: partial(timed, read) for name, read in arms.items()}
            seconds = alternating(asked, lambda: files if way != "warm" else [], runs, swaps=False)  # noqa: B023
            rates = {name: nbytes / statistics.median(taken) for name, taken in seconds.items()}
            share = rates["by_layer"] / rates["plain"]
            result[way] = {"seconds": seconds, "bytes_per_s": rates, "share": share}
        return result


def fill(store: KVStore, layout: KVLayout, chunks: int, chunk_tokens: int) -> tuple[list[BlockName], int]:
    """Stores chunks of random blocks, as passages are; returns the blocks' names and the bytes of their records."""
    root, names = root_name("bench", "load"), []
    for number in range(chunks):
        blocks: list[Block] = []
        for _ in range(-(-chunk_tokens // BLOCK)):
            parent = blocks[-1].name if blocks else root
            blocks.append(random_block(layout, number, BLOCK, parent))
        store.write_all(blocks)
        names += [block.name for block in blocks]
    store.find(names)
    return names, len(names) * layout.block_bytes(BLOCK)


def random_block(layout: KVLayout, number: int, tokens: int, parent: BlockName) -> Block:
    """A block of random numbers; its name depends on `number` and `parent`."""
    ids = as_token_ids([number, *range(tokens - 1)])
    records = [
        layout.encode(torch.randn(shape.kv_heads, 2, tokens, shape.head_dim).to(layout.dtype))
        for shape in layout.layers
    ]
    return Block(block_name(parent, ids), parent, ids, records, layout)


def read_by_layer(
    store: KVStore, names: Sequence[BlockName], layout: KVLayout, memory: StagingMemory | None = None
) -> float:
    """Seconds of reading every layer as `LayerLoader` does: into staging memory, small layers several at once."""
    memory = memory or memory_of(torch.device("cpu"))
    size, first, layers, leases = ReadSize(layout, BLOCK, BLOCK), 0, len(layout.layers), []
    started = time.perf_counter()
    while first < layers:
        asked = range(first, min(layers, first + size.of()))
        begun = time.perf_counter()
        leases.append(memory.lease())
        for read in store.read_layers(names, asked, None, leases[-1].take):
            if isinstance(read, BlockLostError):
                raise InvalidInputError(f"a block was lost while it was measured: {read.reason}")
        size.learn(len(asked), time.perf_counter() - begun)
        first = asked.stop
        if len(leases) > _AHEAD:
            leases.pop(0).release()
    taken = time.perf_counter() - started
    for lease in leases:
        lease.release()
    return taken


def _read_plain(path: Path) -> float:
    """Seconds of sequential reads of 1 MiB into the same memory."""
    memory = bytearray(1 << 20)
    with _opened(path) as fd:
        started = time.perf_counter()
        offset = 0
        while count := os.preadv(fd, [memory], offset):
            offset += count
            if count % 4096:
                break
        return time.perf_counter() - started


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def drop_pages(path: Path) -> None:
    """Takes a file's pages out of the page cache, so that the next read of it is cold."""
    with _opened(path) as fd:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path: Path) -> bool | None:
    """Whether the page cache has the beginning of a file; None: its file system does not tell. Asking reads nothing."""
    with _opened(path) as fd:
        try:
            return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) > 0
        except BlockingIOError:  # it would have to be read
            return False
        except OSError:
            return None
