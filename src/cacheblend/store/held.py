"""What a `MemoryStore` holds of a block, under which key, and in which tensors. Knows no bound and no eviction."""

from dataclasses import dataclass

import torch

from cacheblend.core.naming import BlockName, TokenIds, as_token_ids
from cacheblend.core.plan.blocks import UNKNOWN, BlockEntry, KVLayout


@dataclass(slots=True)
class Held:
    """A block in memory, or some heads of one.

    Attributes:
        token_ids, parent, layout: the block's; of some heads nobody knows them.
        records: `records[i]` is None until layer i has been offered; of some heads there may be fewer than layers.
        nbytes: of the records.
        missing: records that are still missing; above 0 for some heads, which are never a whole block.
        used: time of the last use.
    """

    token_ids: TokenIds
    parent: BlockName
    layout: KVLayout
    records: list[torch.Tensor | None]
    nbytes: int = 0
    missing: int = 0
    used: float = 0.0

    @staticmethod
    def of_heads(dtype: torch.dtype) -> "Held":
        """Some heads of a block, none of whose layers has been offered."""
        return Held(as_token_ids([]), UNKNOWN, KVLayout((), dtype), [], missing=1)

    @staticmethod
    def of_block(entry: BlockEntry) -> "Held":
        """A block of which no layer has been offered yet."""
        layers = len(entry.layout.layers)
        return Held(entry.token_ids, entry.parent, entry.layout, [None] * layers, 0, layers)

    def put(self, layer: int, record: torch.Tensor, nbytes: int) -> None:
        """Holds a layer's record, which takes so many bytes."""
        self.records += [None] * (layer + 1 - len(self.records))
        self.records[layer] = record
        self.nbytes += nbytes

    def record(self, layer: int) -> torch.Tensor | None:
        """The record of a layer, None where none was offered."""
        return self.records[layer] if 0 <= layer < len(self.records) else None


def heads_key(name: BlockName, start: int, stop: int) -> BlockName:
    """Under which heads [start, stop) of a block are held; longer than any block's name, and begins with this one's."""
    return BlockName(name + start.to_bytes(4, "little") + stop.to_bytes(4, "little"))
