"""One layer of a request's KV cache, in buffers of its own or wherever an engine keeps it, and what is placed there."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.operations import attend_rows, kv_deviation, place
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.core.plan.plan import Source, Span

MOVED_AT_ONCE = 16384
"""That are moved together, which bounds the memory of a long prompt."""


class LayerCache(Protocol):
    """One layer of a request's KV cache; positions are [n] int64 on its device. Rows that were neither placed nor
    written hold anything."""

    @property
    def keys(self) -> torch.Tensor:
        """[kv_heads, length, head_dim]; a copy of the whole layer where it does not lie in one piece."""

    @property
    def values(self) -> torch.Tensor:
        """As `keys`."""

    def rows(self, positions: torch.Tensor) -> "LayerKV":
        """A copy of the rows at these positions."""

    def write(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrites the rows at these positions, ascending, with [kv_heads, n, head_dim]."""

    def move_keys(self, positions: torch.Tensor, shifts: torch.Tensor, of_all: torch.Tensor) -> None:
        """Adds to the keys of the rows at `positions`, [m] int64, what `of_all`, [length] int64, takes for them of
        `shifts`, [kv_heads, shifts, head_dim]; for all other rows it takes the last one, which is 0."""

    def place(self, records: Sequence[torch.Tensor], placement: Placement, rotation: KeyRotation | None = None) -> None:
        """Overwrites rows with stored records; see `kv_placement.place`."""

    def deviation(self, fresh: Sequence[torch.Tensor], measure: Measure, positions: torch.Tensor) -> torch.Tensor:
        """Squared distance of fresh keys and values from the rows at these positions, [n] fp32."""

    def attend(self, query: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Attention of rows [heads, n, head_dim] up to their own positions, as [n, heads, head_dim]."""


class LayerKV(NamedTuple):
    """One layer in buffers, each [kv_heads, length, head_dim]; a `LayerCache`."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def unwritten(cls, shape: LayerShape, length: int, dtype: torch.dtype, device: torch.device) -> "LayerKV":
        """Buffers that hold anything: each row is placed or written before a later one attends. Those in front of its
        window, too: attention reads some of them, and NaN with the weight 0 is NaN."""
        return cls(*torch.empty(2, shape.kv_heads, length, shape.head_dim, dtype=dtype, device=device).unbind())

    def rows(self, positions: torch.Tensor) -> "LayerKV":
        return LayerKV(self.keys[:, positions], self.values[:, positions])

    def write(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys.index_copy_(1, positions, keys)
        self.values.index_copy_(1, positions, values)

    def move_keys(self, positions: torch.Tensor, shifts: torch.Tensor, of_all: torch.Tensor) -> None:
        shifts = shifts.to(self.keys.dtype)
        for keys, part in zip(
            torch.split(self.keys, MOVED_AT_ONCE, 1), torch.split(of_all, MOVED_AT_ONCE), strict=True
        ):
            keys.add_(shifts.index_select(1, part))  # all rows in their order: gathering those that move takes longer

    def place(self, records: Sequence[torch.Tensor], placement: Placement, rotation: KeyRotation | None = None) -> None:
        place(records, placement, self.keys, self.values, rotation)

    def deviation(self, fresh: Sequence[torch.Tensor], measure: Measure, positions: torch.Tensor) -> torch.Tensor:
        return kv_deviation(fresh, self, measure, positions)

    def attend(self, query: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return attend_rows(query, self.keys, self.values, positions, spec)


class PlacedSpans(NamedTuple):
    """Where the records of some spans go: the records' names, in the order of the placement's indices."""

    names: list[BlockName]
    placement: Placement

    @classmethod
    def of(cls, spans: Sequence[Span], codec: str) -> "PlacedSpans":
        """Each name once, however often its rows stand in the prompt; exact rows are not moved."""
        indices = {name: index for index, name in enumerate(dict.fromkeys(span.name for span in spans))}
        pieces = [
            Piece(
                indices[span.name],
                span.record_tokens,
                span.record_start,
                span.start,
                len(span),
                span.start - span.stored_start if span.source is Source.LOADED else 0,
            )
            for span in spans
        ]
        return cls(list(indices), Placement(pieces, codec))

    @classmethod
    def by_codec(cls, spans: Sequence[Span], codec: str) -> "list[PlacedSpans]":
        """Those whose records are as they were computed, exact rows among them, and those in the chunks' `codec`."""
        alike: dict[str, list[Span]] = {}
        for span in spans:  # behind a lost block the rest of the exact prefix is reused like a chunk
            is_raw = span.is_raw or span.source is Source.PREFIX
            alike.setdefault("raw" if is_raw else codec, []).append(span)
        return [cls.of(each, kept) for kept, each in alike.items()]
