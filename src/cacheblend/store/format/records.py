"""A chunk's manifest and a document's record, byte for byte (docs/format.md). Each is a JSON object on one line that
begins with a checksum of everything behind it."""

import base64
import json
import zlib
from typing import Any

import numpy as np

from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store.documents import Blocks, DocumentRecord
from cacheblend.store.format.block_file import FORMAT, NAME_BYTES
from cacheblend.store.format.checksum import DIGITS, DamagedError, is_sealed, seal

_OPENING = b'{"checksum":"'


def encode_manifest(manifest: ChunkManifest) -> bytes:
    """The manifest's bytes."""
    return _encode(
        {
            "format": FORMAT,
            "chunk_id": manifest.chunk_id.hex(),
            "root": manifest.root.hex(),
            "model": manifest.model,
            "label": manifest.label,
            "anchor_ids": _packed_ids(manifest.anchor_ids),
            "token_ids": _packed_ids(manifest.token_ids),
            "block_names": _packed(manifest.block_names),
        }
    )


def decode_manifest(data: bytes, chunk_id: BlockName) -> ChunkManifest:
    """The manifest, all of it checked; raises `DamagedError`, also if it is another chunk's."""
    fields = _decode(data, "manifest")
    try:
        names = base64.b64decode(fields["block_names"])
        manifest = ChunkManifest(
            chunk_id=BlockName(bytes.fromhex(fields["chunk_id"])),
            root=BlockName(bytes.fromhex(fields["root"])),
            anchor_ids=_unpacked_ids(fields["anchor_ids"]),
            token_ids=_unpacked_ids(fields["token_ids"]),
            block_names=tuple(BlockName(names[at : at + NAME_BYTES]) for at in range(0, len(names), NAME_BYTES)),
            model=fields["model"],
            label=fields["label"].encode("utf-8", "replace").decode(),  # titles were not checked always
        )
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise DamagedError(f"the manifest cannot be understood: {error!r}") from error
    if manifest.chunk_id != chunk_id:
        raise DamagedError(f"the file holds the manifest of chunk {manifest.chunk_id.hex()}")
    return manifest


def _packed_ids(token_ids: TokenIds) -> str:
    return base64.b64encode(zlib.compress(token_ids.tobytes())).decode()


def _unpacked_ids(text: str) -> TokenIds:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u4")


def encode_document(record: DocumentRecord) -> bytes:
    """The record's bytes."""
    return _encode(
        {
            "format": FORMAT,
            "root": record.root.hex(),
            "collection": record.collection,
            "id": record.id,
            "digest": record.digest,
            "tokens": record.tokens,
            "chunks": [_packed(chunk) for chunk in record.chunks],
            "stale": [_packed(chunk) for chunk in record.stale],
        }
    )


def decode_document(data: bytes, name: BlockName) -> DocumentRecord:
    """The record, all of it checked; raises `DamagedError`, also if it is another document's."""
    fields = _decode(data, "document record")
    try:
        record = DocumentRecord(
            root=BlockName(bytes.fromhex(fields["root"])),
            collection=fields["collection"],
            id=fields["id"],
            digest=fields["digest"],
            tokens=int(fields["tokens"]),
            chunks=tuple(map(_unpacked, fields["chunks"])),
            stale=tuple(map(_unpacked, fields["stale"])),
        )
        found = record.name
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"the document record cannot be understood: {error!r}") from error
    if found != name:
        raise DamagedError(f"the file holds the record of document {record.id[:80]!r}, which has another name")
    return record


def _packed(blocks: Blocks) -> str:
    return base64.b64encode(b"".join(blocks)).decode()


def _unpacked(text: str) -> Blocks:
    names = base64.b64decode(text, validate=True)
    if not names or len(names) % NAME_BYTES:
        raise ValueError(f"{len(names)} bytes of block names")
    return tuple(BlockName(names[at : at + NAME_BYTES]) for at in range(0, len(names), NAME_BYTES))


def _encode(fields: dict[str, Any]) -> bytes:
    return seal(_OPENING, b'",' + json.dumps(fields, separators=(",", ":")).encode()[1:] + b"\n")


def _decode(data: bytes, what: str) -> dict[str, Any]:
    """The object's fields, its checksum among them; `what` names it in a `DamagedError`."""
    if len(data) < len(_OPENING) + DIGITS or not data.startswith(_OPENING):
        raise DamagedError(f"not a {what}")
    if not is_sealed(data, len(_OPENING)):
        raise DamagedError(f"the {what} does not match its checksum")
    try:
        fields: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise DamagedError(f"the {what} cannot be understood: {error!r}") from error
    return fields
