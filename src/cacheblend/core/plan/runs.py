"""The block size of a stored chunk, which its manifest does not name: guessed from its length, known from its blocks.

    chunk of T tokens in n blocks of s   | s | s | ... | s | T - (n - 1) s |      so (n - 1) s < T <= n s

Blocks of a chunk that was stored with another block size than the planner's are cut where they were cut then.
"""

from collections.abc import Mapping

import numpy as np

from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import BlockEntry, ChunkManifest


def guessed_size(chunk: ChunkManifest, configured: int) -> int:
    """A block size with which the chunk has its number of blocks: the configured one, if it fits, or a round one."""
    count, tokens = len(chunk.block_names), len(chunk.token_ids)
    if count <= 1 or _fits(configured, count, tokens):
        return configured
    least, most = -(-tokens // count), (tokens - 1) // (count - 1)
    if least > most:
        return configured  # no size fits: the manifest's names and tokens do not belong together
    steps = (1 << power for power in reversed(range(most.bit_length())))
    return next(size for size in (-(-least // step) * step for step in steps) if size <= most)


def held_size(chunk: ChunkManifest, entries: Mapping[BlockName, BlockEntry | None]) -> int | None:
    """The block size with which the chunk was stored; None if none of its blocks is held, or it has a single block.

    Args:
        chunk: a stored chunk.
        entries: of its blocks, by name. One whose ids are not the chunk's is not believed.
    """
    count, tokens = len(chunk.block_names), len(chunk.token_ids)
    for number, name in enumerate(chunk.block_names if count > 1 else ()):
        entry = entries.get(name)
        if entry is None:
            continue
        length, is_last = len(entry.token_ids), number == count - 1
        size, rest = divmod(tokens - length, count - 1) if is_last else (length, 0)
        start = number * size
        if rest or not _fits(size, count, tokens):
            continue
        if np.array_equal(entry.token_ids, chunk.token_ids[start : min(start + size, tokens)]):
            return size
    return None


def _fits(size: int, count: int, tokens: int) -> bool:
    return (count - 1) * size < tokens <= count * size
