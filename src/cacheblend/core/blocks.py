"""What a store keeps: blocks of KV records, and manifests of chunks.

A record is one layer of one block, contiguous, keys beside values:

    record[h, 0, t, :] = key   of KV head h, token t      shape [kv_heads, 2, tokens, head_dim]
    record[h, 1, t, :] = value of KV head h, token t

so that one layer of a block is one read, and a tensor-parallel rank reads just its heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cacheblend.core.naming import BlockName, TokenIds


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's records: [kv_heads, 2, tokens, head_dim]."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class KVLayout:
    """The shape of a model's KV cache: its layers in order, and the element type of all of them."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' K and V for one token."""
        return sum(2 * s.kv_heads * s.head_dim for s in self.layers) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Block:
    """A block to be stored.

    Attributes:
        name: `block_name(parent, token_ids)`.
        parent: name of the block in front of it (or the root).
        token_ids: the block's own tokens, [tokens].
        records: one a layer, [kv_heads, 2, tokens, head_dim], on the CPU. The store may keep these very
            tensors: do not write to them afterwards.
    """

    name: BlockName
    parent: BlockName
    token_ids: TokenIds
    records: Sequence[torch.Tensor]


@dataclass(frozen=True, eq=False)
class BlockEntry:
    """What a store says of a block it holds, without reading its records.

    Attributes:
        token_ids: the ids stored with the block; whoever looks a block up compares them to its own.
        layout: shapes and dtype of the records.
        tier: where a read would come from, ``"memory"`` or ``"disk"``.
    """

    token_ids: TokenIds
    layout: KVLayout
    tier: str


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

    def read(self, name: BlockName, layer: int, heads: slice | None = None) -> torch.Tensor:
        """One record [kv_heads (or those in `heads`), 2, tokens, head_dim] on the CPU, verified.

        The result may share memory with the store: read it, do not write to it.

        Raises:
            BlockLostError: gone or damaged; a damaged block has been removed and reported.
        """
        ...
