"""One block as one file, byte for byte (docs/format.md); a valid safetensors file.

    | 8 bytes     | header                            | padding | layer 0 | layer 1 | ...
    | length, LE  | {"__metadata__":{"checksum":...}} | spaces  | one record per layer, no gaps
    ^0                                                          ^multiple of 4096

Knows bytes; does not know folders, processes or eviction.
"""

import base64
import itertools
import json
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.naming import BlockName, TokenIds, block_name
from cacheblend.core.plan.blocks import Block, BlockEntry, KVLayout, LayerShape
from cacheblend.store.format.checksum import DIGITS, DamagedError, digest, is_sealed, seal

FORMAT = 1
"""Version of the folder, of the block files and of the manifests in it."""

ALIGNMENT = 4096
"""Records begin at a multiple of this."""

NAME_BYTES = 32
"""Length of a block's name."""

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
    """What a block file's header says.

    Attributes:
        name: the block's name.
        parent: the preceding block's name.
        entry: token ids [tokens] and layout.
        digests: 8 bytes per layer and head, layers in order.
        data_at: offset of layer 0's record in the file.
        file_bytes: size that the whole file must have.
        geometry: where the records are, relative to `data_at`.
    """

    name: BlockName
    parent: BlockName
    entry: BlockEntry
    digests: bytes
    data_at: int
    file_bytes: int
    geometry: "Geometry"


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Where the records of a layout are; shared by all blocks of one layout and token count.

    Attributes:
        layout: the layout that it describes.
        offsets: offset of each layer's record relative to `data_at`, then the end of the last one.
        head_bytes: bytes of one head of each layer.
        first_digest: index of the digest of each layer's head 0, then the number of digests.
    """

    layout: KVLayout
    offsets: tuple[int, ...]
    head_bytes: tuple[int, ...]
    first_digest: tuple[int, ...]


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
        head_bytes=head_bytes,
        first_digest=tuple(itertools.accumulate((s.kv_heads for s in shapes), initial=0)),
    )


def encode_block(block: Block) -> list[memoryview]:
    """The file's bytes in order: the header, then the records' own memory (copied only if not contiguous).

    Args:
        block: checked by `check_block`.

    Raises:
        InvalidInputError: a dtype that the format does not know.
    """
    layout = block.layout
    if layout.dtype not in _DTYPE_NAMES:
        known = ", ".join(str(dtype) for dtype in _DTYPE_NAMES)
        raise InvalidInputError(f"block files cannot hold {layout.dtype}; they hold {known}")
    records = [record_bytes(record) for record in block.records]
    digests = b"".join(
        digest(data[at : at + len(data) // shape.kv_heads])
        for data, shape in zip(records, layout.layers, strict=True)
        for at in range(0, len(data), len(data) // shape.kv_heads)
    )
    return [memoryview(_encode_header(block, digests)), *records]


def record_bytes(record: torch.Tensor) -> memoryview:
    """The tensor's memory, flat; a copy only if it is not contiguous."""
    return record.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _encode_header(block: Block, digests: bytes) -> bytes:
    tokens, layout = len(block.token_ids), block.layout
    runs = [f"{shape.kv_heads}x{shape.head_dim}" for shape in layout.layers]
    layers = ",".join(f"{len(list(group))}*{run}" for run, group in itertools.groupby(runs))
    dtype = _DTYPE_NAMES[layout.dtype]
    metadata = {
        "format": str(FORMAT),
        "name": block.name.hex(),
        "parent": block.parent.hex(),
        "layers": layers,
        "dtype": dtype,
        "tokens": str(tokens),
        "token_ids": base64.b64encode(block.token_ids.tobytes()).decode(),
        "digests": base64.b64encode(digests).decode(),
    }
    if layout.codec != "raw":
        metadata["codec"] = layout.codec
    offsets = geometry_of(layers, dtype, layout.codec, tokens).offsets
    tensors = {
        f"layer.{layer:05d}": {
            "dtype": _DTYPE_NAMES[layout.record_dtype],
            "shape": layout.record_shape(layer, tokens),
            "data_offsets": [offsets[layer], offsets[layer + 1]],
        }
        for layer in range(len(layout.layers))
    }
    rest = b'",' + _json(metadata)[1:] + b"," + _json(tensors)[1:]
    length = len(_OPENING) + DIGITS + len(rest)
    length += -(8 + length) % ALIGNMENT
    rest = rest.ljust(length - len(_OPENING) - DIGITS)
    return seal(length.to_bytes(8, "little") + _OPENING, rest)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def header_bytes(first: bytes, file_bytes: int) -> int:
    """Bytes from the start of the file to its records, from its first 8 bytes or more.

    Raises:
        DamagedError: the length is impossible for a file of `file_bytes`.
    """
    data_at = 8 + int.from_bytes(first[:8], "little")
    if len(first) < 8 or data_at > file_bytes or data_at % ALIGNMENT:
        raise DamagedError(f"a file of {file_bytes} bytes cannot have a header of {data_at} bytes")
    return data_at


def decode_header(header: bytes, file_bytes: int | None, name: BlockName) -> BlockHeader:
    """Decodes a header and checks all of it.

    Args:
        header: the file up to its records.
        file_bytes: the file's size; None where header and records are not one file.
        name: the block's name according to the file's name.

    Raises:
        DamagedError: a byte of the header is wrong, or the header states another size or name than the file has.
    """
    if header[8:_CHECKSUM_AT] != _OPENING or not is_sealed(header, _CHECKSUM_AT):
        raise DamagedError("the header does not match its checksum")
    try:
        metadata, _ = _DECODER.raw_decode(header[8:].decode(), _FIRST_OBJECT_AT)
        if metadata["format"] != str(FORMAT):
            raise DamagedError(f"block format {metadata['format']}, this version reads {FORMAT}")
        token_ids: TokenIds = np.frombuffer(base64.b64decode(metadata["token_ids"]), dtype="<u4")
        codec = metadata.get("codec", "raw")
        geometry = geometry_of(metadata["layers"], metadata["dtype"], codec, len(token_ids))
        result = BlockHeader(
            name=BlockName(bytes.fromhex(metadata["name"])),
            parent=BlockName(bytes.fromhex(metadata["parent"])),
            entry=BlockEntry(token_ids, geometry.layout, "disk", BlockName(bytes.fromhex(metadata["parent"]))),
            digests=base64.b64decode(metadata["digests"]),
            data_at=len(header),
            file_bytes=len(header) + geometry.offsets[-1],
            geometry=geometry,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"the header cannot be understood: {error!r}") from error
    if file_bytes is not None and result.file_bytes != file_bytes:
        raise DamagedError(f"the file has {file_bytes} bytes, its header says {result.file_bytes}")
    if result.name != name or block_name(result.parent, token_ids) != name:
        raise DamagedError(f"the file holds block {result.name.hex()}")
    if len(result.digests) != 8 * geometry.first_digest[-1]:
        raise DamagedError(f"{len(result.digests)} bytes of digests for {geometry.first_digest[-1]} heads")
    return result


def check_heads(header: BlockHeader, layer: int, start: int, data: memoryview) -> None:
    """Checks the bytes of a layer's heads from `start` on against their digests.

    Raises:
        DamagedError: a head differs.
    """
    size, digests = header.geometry.head_bytes[layer], header.digests
    at = 8 * (header.geometry.first_digest[layer] + start)
    for offset in range(0, len(data), size):
        if digest(data[offset : offset + size]) != digests[at : at + 8]:
            raise DamagedError(f"layer {layer}, head {start + offset // size} does not match its checksum")
        at += 8
