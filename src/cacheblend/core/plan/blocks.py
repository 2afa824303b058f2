"""What a store keeps: blocks of KV records, and manifests of chunks.

A record is one layer of one block, contiguous, keys beside values:

    record[h, 0, t, :] = key   of KV head h, token t      shape [kv_heads, 2, tokens, head_dim]
    record[h, 1, t, :] = value of KV head h, token t

so that one layer of a block is one read, and a tensor-parallel rank reads just its heads. Compressed (`codec`), a
record is uint8 [kv_heads, bytes of a head].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.naming import BlockName, TokenIds
from cacheblend.core.plan.codec import codec_of

UNKNOWN = BlockName(b"")
"""Parent of a block of which only the records matter."""


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's records: [kv_heads, 2, tokens, head_dim]."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class KVLayout:
    """The shape of a model's KV cache: its layers in order, the element type of all of them, and their codec."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    codec: str = "raw"

    def head_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of one head of a record of so many tokens."""
        return codec_of(self.codec).head_bytes(tokens, self.layers[layer].head_dim, self.dtype)

    def block_bytes(self, tokens: int) -> int:
        """Bytes of all records of a block of so many tokens."""
        return sum(shape.kv_heads * self.head_bytes(layer, tokens) for layer, shape in enumerate(self.layers))

    def record_shape(self, layer: int, tokens: int) -> tuple[int, ...]:
        """Shape of a record of so many tokens, as it is stored."""
        shape = self.layers[layer]
        if self.codec == "raw":
            return (shape.kv_heads, 2, tokens, shape.head_dim)
        return (shape.kv_heads, self.head_bytes(layer, tokens))

    @property
    def record_dtype(self) -> torch.dtype:
        """Of a record, as it is stored."""
        return self.dtype if self.codec == "raw" else torch.uint8

    def encode(self, record: torch.Tensor) -> torch.Tensor:
        """A record [kv_heads, 2, tokens, head_dim] as it is stored."""
        return codec_of(self.codec).encode(record)

    def decode(self, layer: int, record: torch.Tensor, tokens: int) -> torch.Tensor:
        """A stored record of a layer, of all or some heads, as [kv_heads, 2, tokens, head_dim]."""
        return codec_of(self.codec).decode(record, tokens, self.layers[layer].head_dim, self.dtype)


@dataclass(frozen=True, eq=False)
class Block:
    """A block to be stored.

    Attributes:
        name: `block_name(parent, token_ids)`.
        parent: name of the block in front of it (or the root).
        token_ids: the block's own tokens, [tokens].
        records: one a layer, as `layout` has them, on the CPU. The store may keep these very tensors: do not write
            to them afterwards.
        layout: of the records.
    """

    name: BlockName
    parent: BlockName
    token_ids: TokenIds
    records: Sequence[torch.Tensor]
    layout: KVLayout


@dataclass(frozen=True, eq=False)
class BlockEntry:
    """What a store says of a block it holds, without reading its records.

    Attributes:
        token_ids: the ids stored with the block; whoever looks a block up compares them to its own.
        layout: shapes and dtype of the records.
        tier: where a read would come from, ``"memory"``, ``"disk"``, ``"redis"`` or ``"s3"``.
        parent: name of the block in front of it, for who copies the block.
    """

    token_ids: TokenIds
    layout: KVLayout
    tier: str
    parent: BlockName = UNKNOWN


@dataclass(frozen=True)
class ChunkManifest:
    """A chunk as a store lists it: what content matching, listing, pinning and deleting work on.

    Attributes:
        chunk_id: name of the chunk's last block (it covers anchor and all tokens).
        root: the chain's root: which model, dtype, codec and tenant.
        anchor_ids: tokens that stand in front of the chunk in its chain.
        token_ids: the chunk's own tokens.
        block_names: the chunk's own blocks in order (not the anchor's).
        model: a name for people, e.g. the model folder's.
        label: a name for people, e.g. a title or a file name.
    """

    chunk_id: BlockName
    root: BlockName
    anchor_ids: TokenIds
    token_ids: TokenIds
    block_names: tuple[BlockName, ...]
    model: str = ""
    label: str = field(default="", compare=False)


class BlockSource(Protocol):
    """What planning and loading need of a store."""

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """Entries of the named blocks, None where the block is not held. Marks them as used. Never raises for
        a damaged or vanished block: that is a None."""
        ...

    def read_many(
        self, names: Sequence[BlockName], layer: int, heads: slice | None = None
    ) -> list[torch.Tensor | BlockLostError]:
        """A layer's records of several blocks, of all heads or of those in `heads`, as each block's layout has it.

        They are on the CPU and verified, and may share memory with the store: read them, do not write to them.
        Where a block is gone or damaged there is the error; a damaged block has been removed and reported.
        """
        ...
