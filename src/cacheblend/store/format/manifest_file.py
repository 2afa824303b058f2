"""A chunk's manifest as a small JSON file with a checksum of its own, byte for byte (docs/format.md)."""

import base64
import zlib

import numpy as np

from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store.format.block_file import FORMAT, NAME_BYTES
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.format.sealed_json import decode_sealed, encode_sealed


def encode_manifest(manifest: ChunkManifest) -> bytes:
    """The manifest's bytes."""
    fields = {
        "format": FORMAT,
        "chunk_id": manifest.chunk_id.hex(),
        "root": manifest.root.hex(),
        "model": manifest.model,
        "label": manifest.label,
        "anchor_ids": _pack(manifest.anchor_ids.tobytes()),
        "token_ids": _pack(manifest.token_ids.tobytes()),
        "block_names": base64.b64encode(b"".join(manifest.block_names)).decode(),
    }
    return encode_sealed(fields)


def decode_manifest(data: bytes, chunk_id: BlockName) -> ChunkManifest:
    """Decodes a manifest and checks all of it.

    Raises:
        DamagedError: a byte is wrong, or it is the manifest of another chunk than `chunk_id`.
    """
    fields = decode_sealed(data, "manifest")
    try:
        names = base64.b64decode(fields["block_names"])
        manifest = ChunkManifest(
            chunk_id=BlockName(bytes.fromhex(fields["chunk_id"])),
            root=BlockName(bytes.fromhex(fields["root"])),
            anchor_ids=_unpack(fields["anchor_ids"]),
            token_ids=_unpack(fields["token_ids"]),
            block_names=tuple(BlockName(names[at : at + NAME_BYTES]) for at in range(0, len(names), NAME_BYTES)),
            model=fields["model"],
            label=fields["label"].encode("utf-8", "replace").decode(),  # titles were not checked always
        )
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise DamagedError(f"the manifest cannot be understood: {error!r}") from error
    if manifest.chunk_id != chunk_id:
        raise DamagedError(f"the file holds the manifest of chunk {manifest.chunk_id.hex()}")
    return manifest


def _pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _unpack(text: str) -> TokenIds:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u4")
