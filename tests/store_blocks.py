"""Blocks, manifests and comparisons for the store's tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cacheblend.core.names import BlockName, TokenIds, as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import Block, ChunkManifest, KVLayout, LayerShape
from cacheblend.store import KVStore
from cacheblend.store.format.block_file import decode_headers, header_bytes, header_of

ROOT = root_name("test model", "bfloat16")
SHAPES = (LayerShape(2, 4), LayerShape(2, 4), LayerShape(1, 8))


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of any bit patterns, NaNs included."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(rng.integers(0, 256, count, dtype=np.uint8)).view(dtype).view(*shape)


def make_block(
    seed: int,
    tokens: int = 5,
    shapes: Sequence[LayerShape] = SHAPES,
    dtype: torch.dtype = torch.bfloat16,
    parent: BlockName = ROOT,
    codec: str = "raw",
) -> Block:
    ids, layout = as_token_ids([seed, *range(tokens - 1)]), KVLayout(tuple(shapes), dtype, codec)
    records = [
        random_bits(layout.record_shape(layer, tokens), layout.record_dtype, seed * 31 + layer)
        for layer in range(len(shapes))
    ]
    return Block(block_name(parent, ids), parent, ids, records, layout)


def make_chain(
    count: int, seed: int = 0, tokens: int = 5, parent: BlockName = ROOT, last: int | None = None
) -> list[Block]:
    """Blocks that follow each other; the last one of `last` tokens."""
    blocks: list[Block] = []
    for number in range(count):
        size = tokens if last is None or number < count - 1 else last
        blocks.append(make_block(seed + number, size, parent=blocks[-1].name if blocks else parent))
    return blocks


def record_at(path: Path, block: Block, layer: int) -> tuple[int, int]:
    """Begin and end of a block's record in the file at `path`."""
    data = path.read_bytes()
    header = header_of(decode_headers(data[: header_bytes(data, len(data))], len(data)), block.name)
    begin = header.data_at + header.place.begins[layer]
    return begin, begin + block.records[layer].nbytes


def raw_block(name: BlockName, parent: BlockName, ids: TokenIds, records: Sequence[torch.Tensor]) -> Block:
    """A block whose layout is what its records look like."""
    shapes = tuple(LayerShape(record.shape[0], record.shape[3]) for record in records)
    return Block(name, parent, ids, records, KVLayout(shapes, records[0].dtype if records else torch.bfloat16))


def make_manifest(block: Block, label: str = "a title", token_count: int = 40) -> ChunkManifest:
    ids = as_token_ids(np.arange(token_count) % 977)
    return ChunkManifest(block.name, ROOT, as_token_ids([1]), ids, (block.parent, block.name), "model", label)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    )


def holds(store: KVStore, block: Block) -> bool:
    """Whether the store finds the block and every record reads back bit for bit."""
    entry = store.find([block.name])[0]
    return (
        entry is not None
        and np.array_equal(entry.token_ids, block.token_ids)
        and all(same_bits(store.read(block.name, i), record) for i, record in enumerate(block.records))
    )


def before(store: KVStore, call: str, what: Callable[..., object]) -> None:
    """From now on `what` is called with the arguments of each such call, in front of it: it notes, waits or raises."""
    real = getattr(store, call)

    def called(*args: Any, **options: Any) -> Any:
        what(*args)
        return real(*args, **options)

    setattr(store, call, called)
