"""Checks that every store makes on what it is given. Knows blocks, layouts and manifests; keeps no state."""

from cacheblend.core.errors import InvalidInputError, check_type
from cacheblend.core.names import block_name
from cacheblend.core.plan.blocks import Block, ChunkManifest, KVLayout, LayerShape


def check_block(block: Block) -> None:
    """Checks that name, token ids, records and layout of a block belong together.

    Raises:
        InvalidInputError: the name is not that of parent and token ids, there is no token or no layer, or a record
            is not what the layout says, on the CPU.
    """
    tokens, layout = len(block.token_ids), block.layout
    if tokens == 0 or not block.records:
        raise InvalidInputError(f"a block needs at least 1 token and 1 layer, got {tokens} and {len(block.records)}")
    if len(block.records) != len(layout.layers):
        raise InvalidInputError(f"a block of {len(layout.layers)} layers has {len(block.records)} records")
    if block.name != block_name(block.parent, block.token_ids):
        raise InvalidInputError(
            f"block {block.name.hex()} is not named after its parent and its {tokens} token ids: "
            "use block_name(parent, token_ids)"
        )
    for layer, record in enumerate(block.records):
        shape = layout.record_shape(layer, tokens)
        if tuple(record.shape) != shape or record.dtype != layout.record_dtype or record.device.type != "cpu":
            raise InvalidInputError(
                f"layer {layer}: a record of {tokens} tokens must be {layout.record_dtype} {list(shape)} on the CPU, "
                f"got {record.dtype} {list(record.shape)} on {record.device}"
            )


def check_layer(layout: KVLayout, layer: int) -> LayerShape:
    """Shape of the layer; `InvalidInputError` if the layout has no such layer."""
    if not 0 <= layer < len(layout.layers):
        raise InvalidInputError(f"layer {layer} of a block with layers 0..{len(layout.layers) - 1}")
    return layout.layers[layer]


def head_range(heads: slice | None, kv_heads: int) -> tuple[int, int]:
    """The heads [start, stop) that a slice names; `InvalidInputError` unless it is a run of them."""
    if heads is None:
        return 0, kv_heads
    start, stop, step = heads.indices(kv_heads)
    if step != 1 or start >= stop or (heads.stop is not None and heads.stop > kv_heads):
        raise InvalidInputError(f"heads {heads} must be a non-empty run of the layer's {kv_heads} KV heads")
    return start, stop


def check_manifest(manifest: ChunkManifest) -> None:
    """Raises `InvalidInputError` unless the chunk is named by its last block."""
    if not manifest.block_names or manifest.block_names[-1] != manifest.chunk_id:
        raise InvalidInputError(
            f"chunk {manifest.chunk_id.hex()} must be named by the last of its block names "
            f"({len(manifest.block_names)} given)"
        )


def check_max_bytes(max_bytes: int) -> int:
    """`max_bytes` itself; `InvalidInputError` if it is negative, or no whole number."""
    check_type(max_bytes, int, "max_bytes", "a whole number of bytes (parse_bytes reads 8GiB)")
    if max_bytes < 0:
        raise InvalidInputError(f"max_bytes must be 0 or more, got {max_bytes}")
    return max_bytes
