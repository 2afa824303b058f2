"""What a store keeps: blocks of KV records, and manifests of chunks.

A record is one layer of one block, contiguous, keys and values of a head next to each other:

    record[h, 0, t, :] = key   of KV head h, token t      shape [kv_heads, 2, tokens, head_dim]
    record[h, 1, t, :] = value of KV head h, token t

so that a layer of a block is one read, and a tensor-parallel rank reads only its heads. A compressed record (`codec`)
is uint8 [kv_heads, bytes of a head].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.codec import codec_of

UNKNOWN = BlockName(b"")  # parent of a block of which only the records are used
_LONGEST_BLOCK = 1024  # tokens of blocks whose sizes are kept
RecordMemory = Callable[[int], torch.Tensor]
"""Gives memory for records of so many bytes: uint8 [bytes] on the CPU, writable, at a multiple of 4096 if it can.

Called by several threads; who gives it says how long it lasts.
"""


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's records: [kv_heads, 2, tokens, head_dim]."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class KVLayout:
    """The shape of a model's KV cache: its layers in order, their element type, and their codec."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    codec: str = "raw"

    def head_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of one head of a record of this many tokens."""
        return codec_of(self.codec).head_bytes(tokens, self.layers[layer].head_dim, self.dtype)

    def block_bytes(self, tokens: int) -> int:
        """Bytes of all records of a block of this many tokens."""
        found = self._block_bytes.get(tokens)
        if found is None:
            found = sum(shape.kv_heads * self.head_bytes(layer, tokens) for layer, shape in enumerate(self.layers))
            if tokens <= _LONGEST_BLOCK:
                self._block_bytes[tokens] = found
        return found

    @cached_property
    def _block_bytes(self) -> dict[int, int]:  # it is asked for every block of every request, and a sum over all layers
        return {}

    def record_shape(self, layer: int, tokens: int) -> tuple[int, ...]:
        """Shape of a record of this many tokens, as it is stored."""
        shape = self.layers[layer]
        if self.codec == "raw":
            return (shape.kv_heads, 2, tokens, shape.head_dim)
        return (shape.kv_heads, self.head_bytes(layer, tokens))

    @property
    def record_dtype(self) -> torch.dtype:  # element type of a record, as it is stored
        return self.dtype if self.codec == "raw" else torch.uint8

    def encode(self, record: torch.Tensor) -> torch.Tensor:
        """Compresses a record [kv_heads, 2, tokens, head_dim] to the form in which it is stored."""
        return codec_of(self.codec).encode(record)

    def decode(self, layer: int, record: torch.Tensor, tokens: int) -> torch.Tensor:
        """Decompresses a stored record of a layer, of all or some heads, to [kv_heads, 2, tokens, head_dim]."""
        return codec_of(self.codec).decode(record, tokens, self.layers[layer].head_dim, self.dtype)


@dataclass(frozen=True, eq=False)
class Block:
    """A block to be stored.

    Attributes:
        name: `block_name(parent, token_ids)`.
        parent: name of the preceding block (or the root).
        token_ids: the block's own tokens, [tokens].
        records: one for each layer, in the form of `layout`, on the CPU. The store may keep these tensors without a
            copy: do not write to them afterwards.
        layout: of the records.
    """

    name: BlockName
    parent: BlockName
    token_ids: TokenIds
    records: Sequence[torch.Tensor]
    layout: KVLayout


@dataclass(frozen=True, eq=False)
class BlockEntry:
    """A block that a store holds, without its records.

    Attributes:
        token_ids: the ids stored with the block; a caller that looks a block up must compare them to its own.
        layout: shapes and dtype of the records.
        tier: where its records would be read from, ``"memory"``, ``"disk"``, ``"redis"`` or ``"s3"``; of a
            store's two disks the second is ``"disk-2"``.
        parent: name of the preceding block, for copies of the block.
    """

    token_ids: TokenIds
    layout: KVLayout
    tier: str
    parent: BlockName = UNKNOWN


@dataclass(frozen=True)
class ChunkManifest:
    """A chunk as a store lists it, for content matching, listing, pinning and deleting.

    Attributes:
        chunk_id: name of the chunk's last block (it covers anchor and all tokens).
        root: the chain's root, which covers model, dtype, codec and tenant.
        anchor_ids: tokens in front of the chunk in its chain.
        token_ids: the chunk's own tokens.
        block_names: the chunk's own blocks in order (not the anchor's).
        model: for display, e.g. the name of the model's folder.
        label: for display, e.g. a title or a file name.
    """

    chunk_id: BlockName
    root: BlockName
    anchor_ids: TokenIds
    token_ids: TokenIds
    block_names: tuple[BlockName, ...]
    model: str = ""
    label: str = field(default="", compare=False)


class BlockSource(Protocol):
    """What planning and loading need from a store."""

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """Entries of the named blocks, None where the block is not held. Marks the blocks as used. Never raises for a
        damaged or vanished block, but returns None for it."""

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """Records of some layers of several blocks: for each block one for each layer, in the form of its layout.

        They are on the CPU, or on the device that the store keeps them on, and verified. They may share memory with the
        store: do not write to them. A block of which a layer is gone or damaged gives the error instead; a damaged
        block has been reported and removed.

        Args:
            layers: with a step of 1; layers that lie next to each other are read at once.
            heads: a run of heads, the same in each layer; None: all.
            memory: where records that the store does not hold in memory are put; None: in memory of their own.
        """

    def round_trip_s(self, tier: str) -> float:
        """Seconds that a read of this tier takes however little is read; 0: next to none, or not known yet. So many
        layers are best read at once that their bytes take as long."""
        return 0.0


class EmptySource(BlockSource):
    """A source that holds no block: everything planned with it is computed."""

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [None] * len(names)

    def read_layers(self, names: Sequence[BlockName], *_: object) -> list[list[torch.Tensor] | BlockLostError]:
        return [BlockLostError([name], "nothing is held here") for name in names]
