"""Placing: a layer's records, as they are stored, become rows of its KV buffers, keys at their new positions.

Plain PyTorch: serves everywhere, and is what a device's kernel is compared with.

    records   [ a a a a a a | b b b ]      pieces: rows of a record that go to a place in the prompt
    buffers   . . . a a a a . . b b b      decompressed, rounded to the buffers' type, keys moved by the piece's offset
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels.float8 import FLOAT8, Float8, as_bytes
from cacheblend.core.kernels.rope import KeyRotation, Turn, reposition_keys, turn_by
from cacheblend.core.kernels.upload import upload, waits_on
from cacheblend.core.plan.codec import codec_of

ROWS_AT_ONCE = 4096  # bounds the fp32 copies that re-positioning makes


@dataclass(frozen=True)
class Piece:
    """Rows of a record that stand next to each other in the prompt."""

    # record, tokens: index into the layer's records, and tokens of that one
    record: int
    tokens: int
    # first, start, rows: the first of the rows in the record, and in the prompt, and how many
    first: int
    start: int
    rows: int
    offset: int = 0  # new position minus stored position; 0: its keys are not moved

    @property
    def stop(self) -> int:
        return self.start + self.rows


Kind = tuple[int, torch.dtype, torch.device]  # bytes, type and device of a record


@dataclass(frozen=True, eq=False)
class Located(Sequence[torch.Tensor]):
    """One layer's records in one memory on a device; a tensor is made only of those that are asked for."""

    memory: torch.Tensor  # [numbers] of the records' type
    starts: Sequence[int]  # of each record, its first number there, at a multiple of 16 bytes
    shapes: Sequence[torch.Size]
    kinds: Sequence[Kind]
    table: torch.Tensor  # int64 [records] on the device: their addresses

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: Any) -> Any:
        start, shape = self.starts[index], self.shapes[index]
        return self.memory[start : start + shape.numel()].view(shape)


class Placement:
    """Where the records of one codec go in a prompt: the same for each layer, so that it is made once. `pieces`: in any
    order; no two of them share a row of the prompt. `codec`: of the records. Raises `InvalidInputError`: a piece that
    its record or a prompt cannot have, or an unknown codec."""

    def __init__(self, pieces: Sequence[Piece], codec: str = "raw") -> None:
        codec_of(codec)
        for piece in pieces:
            fits = piece.first >= 0 and 0 < piece.rows <= piece.tokens - piece.first
            if not fits or piece.start < 0 or piece.record < 0:
                raise InvalidInputError(f"there are no such rows of a record of {piece.tokens} tokens: {piece}")
        self.pieces, self.codec = tuple(pieces), codec
        self.records = list(dict.fromkeys((piece.record, piece.tokens) for piece in pieces))
        self.stop = max((piece.stop for piece in pieces), default=0)
        # runs of neighbouring rows whose keys are moved, and the offsets of their pieces; long runs take fewer calls
        self._runs = list[tuple[int, list[torch.Tensor]]]()
        stop = -1
        for piece in sorted((each for each in pieces if each.offset), key=lambda each: each.start):
            offsets = torch.full((piece.rows,), piece.offset, dtype=torch.int64)
            if stop == piece.start and piece.stop - self._runs[-1][0] <= ROWS_AT_ONCE:
                self._runs[-1][1].append(offsets)
            else:
                self._runs.append((piece.start, [offsets]))
            stop = piece.stop
        # by stream, since no other one waits for what is uploaded on it
        self._moves: dict[tuple[KeyRotation, Hashable], list[tuple[int, int, Turn]]] = {}
        self._tables: dict[tuple[KeyRotation | int, Hashable], torch.Tensor] = {}
        self._offsets = sorted({piece.offset for piece in self.pieces})
        self._kinds: dict[tuple[int, int, torch.dtype, torch.device], list[tuple[int, Kind]]] = {}

    def kinds(self, kv_heads: int, head_dim: int, numbers: torch.dtype, device: torch.device) -> list[tuple[int, Kind]]:
        """(record, what it must be) of each record, where a layer has such heads in a type."""
        key = kv_heads, head_dim, numbers, device
        if key not in self._kinds:
            codec, dtype = codec_of(self.codec), numbers if self.codec == "raw" else torch.uint8
            nbytes = [kv_heads * codec.head_bytes(tokens, head_dim, numbers) for _, tokens in self.records]
            self._kinds[key] = [
                (record, (size, dtype, device)) for (record, _), size in zip(self.records, nbytes, strict=True)
            ]
        return self._kinds[key]

    def moves(self, rotation: KeyRotation, device: torch.device) -> list[tuple[int, int, Turn]]:
        """(start, stop, turn) of runs of neighbouring rows whose keys are moved."""
        key = rotation, waits_on(device)
        if key not in self._moves:
            self._moves[key] = [
                (start, start + sum(map(len, offsets)), turn_by(rotation, torch.cat(offsets), device))
                for start, offsets in self._runs
            ]
        return self._moves[key]

    def turns(self, rotation: KeyRotation, device: torch.device) -> torch.Tensor:
        """[2, offsets, rotary_dim / 2] fp32: cosines and sines of each offset of a piece, ascending."""
        key = rotation, waits_on(device)
        if key not in self._tables:
            turn = turn_by(rotation, torch.tensor(self._offsets, dtype=torch.int64))
            self._tables[key] = upload(torch.stack([turn.cos, turn.sin]), device)
        return self._tables[key]

    def tiles(self, rows: int, device: torch.device) -> torch.Tensor:
        """[n, 6] int64, pieces cut to at most so many rows: record, its tokens, first row in it, first row in the
        prompt, rows, and the index of the offset in `turns`, -1 for 0."""
        key = rows, waits_on(device)
        if key not in self._tables:
            turn = {offset: index if offset else -1 for index, offset in enumerate(self._offsets)}
            cut = [
                (p.record, p.tokens, p.first + at, p.start + at, min(rows, p.rows - at), turn[p.offset])
                for p in self.pieces
                for at in range(0, p.rows, rows)
            ]
            self._tables[key] = upload(torch.tensor(cut, dtype=torch.int64).view(-1, 6), device)
        return self._tables[key]


def place(
    records: Sequence[torch.Tensor],
    placement: Placement,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotation: KeyRotation | None = None,
    block_table: torch.Tensor | None = None,
    float8: Float8 | None = None,
) -> None:
    """Writes the pieces of some records into a layer's buffers; all other rows stay as they are.

    Args:
        records: of one layer, on the buffers' device, in the form in which they are stored: [kv_heads, 2, tokens,
            head_dim] of the buffers' dtype, or uint8 [kv_heads, bytes of a head].
        placement: where they go.
        keys: [kv_heads, length, head_dim]; with `block_table` a paged cache [blocks, block_size, kv_heads, head_dim].
        values: of the keys' shape.
        rotation: of the layer's keys; None: they have no position.
        block_table: [n] int32 or int64; row j is in block `block_table[j // block_size]`. None: dense buffers.
        float8: how a paged cache in its `kind` keeps numbers, rounded to its `dtype` first; None: as they are.
    """
    if block_table is not None:
        _place_in_pages(records, placement, keys, values, rotation, block_table, float8)
        return
    codec = codec_of(placement.codec)
    for piece in placement.pieces:
        record = codec.decode(records[piece.record], piece.tokens, keys.shape[-1], keys.dtype)
        rows = slice(piece.first, piece.first + piece.rows)
        keys[:, piece.start : piece.stop] = record[:, 0, rows]
        values[:, piece.start : piece.stop] = record[:, 1, rows]
    if rotation is None:
        return
    for start, stop, turn in placement.moves(rotation, keys.device):
        moved = keys[:, start:stop]
        moved.copy_(reposition_keys(moved, turn))


def check_records(
    records: Sequence[torch.Tensor],
    placement: Placement,
    keys: torch.Tensor,
    kv_heads: int,
    length: int,
    float8: Float8 | None = None,
) -> None:
    """Checks what a kernel takes for granted of `place`'s arguments and of buffers of `length` rows: it would read and
    write where nothing is. Raises `InvalidInputError`: a piece ends behind the buffers, its record is elsewhere or of
    another type or size, or the buffers are of another type than `float8` says."""
    if keys.dtype in FLOAT8 and (float8 is None or float8.kind != keys.dtype):
        raise InvalidInputError(f"pages are in {keys.dtype}, and their numbers are described by {float8}")
    if placement.stop > length:
        raise InvalidInputError(f"a piece ends at {placement.stop}, but there are {length} rows")
    head_dim, numbers = keys.shape[-1], keys.dtype if float8 is None else float8.dtype
    kinds = records.kinds if isinstance(records, Located) else [(r.nbytes, r.dtype, r.device) for r in records]
    for at, (record, kind) in enumerate(placement.kinds(kv_heads, head_dim, numbers, keys.device)):
        if record >= len(kinds):
            raise InvalidInputError(f"a piece is of record {record}, but there are {len(kinds)}")
        if kinds[record] != kind:
            tokens, found = placement.records[at][1], kinds[record]
            raise InvalidInputError(
                f"a record of {tokens} tokens is {found[0]} bytes of {found[1]} on {found[2]}; {kv_heads} heads of "
                f"{head_dim} in {numbers} and {placement.codec} are {kind[0]} of {kind[1]} on {kind[2]}"
            )


def _place_in_pages(
    records: Sequence[torch.Tensor],
    placement: Placement,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotation: KeyRotation | None,
    block_table: torch.Tensor,
    float8: Float8 | None,
) -> None:
    (page, kv_heads, head_dim), dtype = keys.shape[1:], keys.dtype if float8 is None else float8.dtype
    dense = [keys.new_empty(kv_heads, placement.stop, head_dim, dtype=dtype) for _ in range(2)]
    place(records, placement, dense[0], dense[1], rotation)
    keys, values = as_bytes(keys), as_bytes(values)
    for piece in placement.pieces:
        rows = torch.arange(piece.start, piece.stop, device=keys.device)
        at = block_table[rows // page].to(torch.int64), rows % page
        placed = [each[:, piece.start : piece.stop].transpose(0, 1) for each in dense]
        keys[at], values[at] = placed if float8 is None else map(as_bytes, float8.encode(placed))
