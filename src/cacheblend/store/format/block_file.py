"""A block, or a chain of blocks, as one file, byte for byte (docs/format.md); a valid safetensors file.

    | 8 bytes     | header                            | padding | layer 0 | layer 1 | ...
    | length, LE  | {"__metadata__":{"checksum":...}} | spaces  | one record per layer and block, no gaps
    ^0                                                          ^multiple of 4096

The records of a layer lie behind each other, in the order of the chain, so that a layer of all of them is one read.
"""

import base64
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName, TokenIds, block_name
from cacheblend.core.plan.blocks import Block, BlockEntry, KVLayout, LayerShape
from cacheblend.store.format.checksum import DIGITS, DamagedError, digest, is_sealed, seal

FORMAT = 1  # version of files of one block, of manifests and of documents' records
CHAIN_FORMAT = 2  # version of files of several blocks, and of the folders that may have some
ALIGNMENT = 4096  # records begin at a multiple of this
NAME_BYTES = 32  # length of a block's name
_OPENING = b'{"__metadata__":{"checksum":"'
_CHECKSUM_AT = 8 + len(_OPENING)
_FIRST_OBJECT_AT = len(b'{"__metadata__":')
_DECODER = json.JSONDecoder()

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a file's header says of one of its blocks."""

    name: BlockName
    entry: BlockEntry  # token ids [tokens], layout and the preceding block's name
    digests: bytes  # 8 bytes per layer and head, layers in order
    data_at: int  # offset of the first record in the file
    file_bytes: int  # size that the whole file must have
    geometry: "Geometry"  # sizes of its records
    place: "RecordPlace"  # where they are, relative to `data_at`
    names: tuple[BlockName, ...]  # all blocks of the file, in order


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Sizes of the records of a layout; shared by all blocks of one layout and token count."""

    layout: KVLayout
    # offset of each layer's record in a file of one block, relative to `data_at`, then the end of the last
    offsets: tuple[int, ...]
    dtype: torch.dtype  # of the records
    shapes: tuple[tuple[int, ...], ...]  # of each layer's record
    head_bytes: tuple[int, ...]  # bytes of one head of each layer
    first_digest: tuple[int, ...]  # index of the digest of each layer's head 0, then the number of digests


@dataclass(frozen=True, slots=True, eq=False)
class RecordPlace:
    """Where a block's records are in a file; shared by all that have the same place in files of the same geometry."""

    begins: tuple[int, ...]  # offset of each layer's record, relative to `data_at`
    end: int  # of the last record of all blocks


@lru_cache(maxsize=4096)
def geometry_of(layers: str, dtype: str, codec: str, tokens: int) -> Geometry:
    """Geometry of ``"24*2x64"`` (24 layers of 2 heads of 64), a safetensors dtype, a codec and a number of tokens."""
    shapes: list[LayerShape] = []
    for run in layers.split(","):
        count, _, shape = run.partition("*")
        heads, _, head_dim = shape.partition("x")
        shapes += [LayerShape(int(heads), int(head_dim))] * int(count)
    layout = KVLayout(tuple(shapes), _DTYPES[dtype], codec)
    head_bytes = tuple(layout.head_bytes(layer, tokens) for layer in range(len(shapes)))
    sizes = (size * shape.kv_heads for size, shape in zip(head_bytes, shapes, strict=True))
    return Geometry(
        layout=layout,
        offsets=tuple(itertools.accumulate(sizes, initial=0)),
        dtype=layout.record_dtype,
        shapes=tuple(layout.record_shape(layer, tokens) for layer in range(len(shapes))),
        head_bytes=head_bytes,
        first_digest=tuple(itertools.accumulate((s.kv_heads for s in shapes), initial=0)),
    )


@lru_cache(maxsize=4096)
def _places_of(geometries: tuple[Geometry, ...]) -> tuple[RecordPlace, ...]:
    begins: list[list[int]] = [[] for _ in geometries]
    end = 0
    for layer in range(len(geometries[0].head_bytes)):
        for own, each in zip(begins, geometries, strict=True):
            own.append(end)
            end += each.offsets[layer + 1] - each.offsets[layer]
    return tuple(RecordPlace(tuple(own), end) for own in begins)


def encode_block(block: Block) -> list[memoryview]:
    """A file of one block; see `encode_chain`."""
    return encode_chain([block])


def encode_chain(blocks: Sequence[Block]) -> list[memoryview]:
    """The file's bytes in order: the header, then the records' own memory (copied only if not contiguous). `blocks`:
    each checked by `check_block`, of one layout, each the parent of the next. Raises `InvalidInputError`: a dtype that
    the format does not know."""
    layout = blocks[0].layout
    if layout.dtype not in _DTYPE_NAMES:
        known = ", ".join(str(dtype) for dtype in _DTYPE_NAMES)
        raise InvalidInputError(f"block files cannot hold {layout.dtype}; they hold {known}")
    records = [[record_bytes(record) for record in block.records] for block in blocks]
    digests = b"".join(
        digest(data[at : at + len(data) // shape.kv_heads])
        for own in records
        for data, shape in zip(own, layout.layers, strict=True)
        for at in range(0, len(data), len(data) // shape.kv_heads)
    )
    by_layer = [record for layer in zip(*records, strict=True) for record in layer]
    return [memoryview(_encode_header(blocks, digests)), *by_layer]


def record_bytes(record: torch.Tensor) -> memoryview:
    """The tensor's memory, flat; a copy only if it is not contiguous."""
    return record.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _encode_header(blocks: Sequence[Block], digests: bytes) -> bytes:
    tokens, layout, is_chain = [len(block.token_ids) for block in blocks], blocks[0].layout, len(blocks) > 1
    runs = [f"{shape.kv_heads}x{shape.head_dim}" for shape in layout.layers]
    layers = ",".join(f"{len(list(group))}*{run}" for run, group in itertools.groupby(runs))
    dtype = _DTYPE_NAMES[layout.dtype]
    metadata = {
        "format": str(CHAIN_FORMAT if is_chain else FORMAT),
        "name": ",".join(block.name.hex() for block in blocks),
        "parent": blocks[0].parent.hex(),
        "layers": layers,
        "dtype": dtype,
        "tokens": ",".join(map(str, tokens)),
        "token_ids": base64.b64encode(b"".join(block.token_ids.tobytes() for block in blocks)).decode(),
        "digests": base64.b64encode(digests).decode(),
    }
    if layout.codec != "raw":
        metadata["codec"] = layout.codec
    geometries = tuple(geometry_of(layers, dtype, layout.codec, count) for count in tokens)
    places, tensors = _places_of(geometries), {}
    for layer in range(len(layout.layers)):
        for number, count in enumerate(tokens):
            begin, offsets = places[number].begins[layer], geometries[number].offsets
            tensors[f"layer.{layer:05d}" + (f".block.{number:05d}" if is_chain else "")] = {
                "dtype": _DTYPE_NAMES[layout.record_dtype],
                "shape": layout.record_shape(layer, count),
                "data_offsets": [begin, begin + offsets[layer + 1] - offsets[layer]],
            }
    rest = b'",' + _json(metadata)[1:] + b"," + _json(tensors)[1:]
    length = len(_OPENING) + DIGITS + len(rest)
    length += -(8 + length) % ALIGNMENT
    rest = rest.ljust(length - len(_OPENING) - DIGITS)
    return seal(length.to_bytes(8, "little") + _OPENING, rest)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def header_bytes(first: bytes, file_bytes: int) -> int:
    """Bytes from the start of the file to its records, from its first 8 bytes or more; `DamagedError` if the file of
    `file_bytes` cannot have such a header."""
    data_at = 8 + int.from_bytes(first[:8], "little")
    if len(first) < 8 or data_at > file_bytes or data_at % ALIGNMENT:
        raise DamagedError(f"a file of {file_bytes} bytes cannot have a header of {data_at} bytes")
    return data_at


def name_of_file(file: str, suffix: str = "") -> BlockName | None:
    """The block name in a file's name, None if it has another form."""
    text = file.removesuffix(suffix)
    if len(file) != 2 * NAME_BYTES + len(suffix) or len(text) != 2 * NAME_BYTES or text.lower() != text:
        return None
    try:
        return BlockName(bytes.fromhex(text))
    except ValueError:
        return None


def header_of(headers: Sequence[BlockHeader], name: BlockName) -> BlockHeader:
    """The one of this name; raises `DamagedError` if there is none."""
    for header in headers:
        if header.name == name:
            return header
    raise DamagedError(f"the file holds block {', '.join(header.name.hex() for header in headers)}")


def decode_headers(header: bytes, file_bytes: int | None) -> list[BlockHeader]:
    """Decodes and checks all of a header, the file up to its records: what it says of each of its blocks, in order.
    `header`: the bytes. `file_bytes`: the file's size; None where header and records are not one file. Raises
    `DamagedError`: a byte of the header is wrong, or the header states another size or names than its content has."""
    if header[8:_CHECKSUM_AT] != _OPENING or not is_sealed(header, _CHECKSUM_AT):
        raise DamagedError("the header does not match its checksum")
    try:
        metadata, _ = _DECODER.raw_decode(header[8:].decode(), _FIRST_OBJECT_AT)
        if metadata["format"] not in (str(FORMAT), str(CHAIN_FORMAT)):
            raise DamagedError(f"block format {metadata['format']}, this version reads {FORMAT} and {CHAIN_FORMAT}")
        found = _blocks_of(metadata, len(header))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"the header cannot be understood: {error!r}") from error
    if file_bytes is not None and found[0].file_bytes != file_bytes:
        raise DamagedError(f"the file has {file_bytes} bytes, its header says {found[0].file_bytes}")
    for each in found:
        if block_name(each.entry.parent, each.entry.token_ids) != each.name:
            raise DamagedError(f"the file holds block {each.name.hex()}, whose name is not that of its content")
    return found


def _blocks_of(metadata: dict[str, str], data_at: int) -> list[BlockHeader]:
    """Raises `DamagedError`, `ValueError`, `KeyError` and `TypeError`."""
    names = tuple(BlockName(bytes.fromhex(name)) for name in metadata["name"].split(","))
    token_ids: TokenIds = np.frombuffer(base64.b64decode(metadata["token_ids"]), dtype="<u4")
    counts = [int(count) for count in metadata["tokens"].split(",")]
    ends = list(itertools.accumulate(counts))
    if len(counts) != len(names) or min(counts) < 1 or ends[-1] != len(token_ids):
        raise DamagedError(f"{len(names)} blocks of {metadata['tokens']} tokens, with {len(token_ids)} token ids")
    how = metadata["layers"], metadata["dtype"], metadata.get("codec", "raw")
    geometries = tuple(geometry_of(*how, count) for count in counts)
    of_a_block = 8 * geometries[0].first_digest[-1]
    digests = base64.b64decode(metadata["digests"])
    if len(digests) != of_a_block * len(names):
        raise DamagedError(f"{len(digests)} bytes of digests for {of_a_block // 8} heads of {len(names)} blocks")
    parents = (BlockName(bytes.fromhex(metadata["parent"])), *names)
    return [
        BlockHeader(
            name=name,
            entry=BlockEntry(token_ids[end - counts[number] : end], geometry.layout, "disk", parents[number]),
            digests=digests[number * of_a_block : (number + 1) * of_a_block],
            data_at=data_at,
            file_bytes=data_at + place.end,
            geometry=geometry,
            place=place,
            names=names,
        )
        for number, (name, end, geometry, place) in enumerate(
            zip(names, ends, geometries, _places_of(geometries), strict=True)
        )
    ]


def check_heads(header: BlockHeader, layer: int, start: int, data: memoryview) -> None:
    """Checks the bytes of a layer's heads from `start` on; raises `DamagedError` if one differs from its digest."""
    size, digests = header.geometry.head_bytes[layer], header.digests
    at = 8 * (header.geometry.first_digest[layer] + start)
    for offset in range(0, len(data), size):
        if digest(data[offset : offset + size]) != digests[at : at + 8]:
            raise DamagedError(f"layer {layer}, head {start + offset // size} does not match its checksum")
        at += 8
