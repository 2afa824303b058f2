"""A document's record as a small JSON file with a checksum of its own, byte for byte (docs/format.md)."""

import base64

from cacheblend.core.names import BlockName
from cacheblend.store.documents import Blocks, DocumentRecord
from cacheblend.store.format.block_file import FORMAT, NAME_BYTES
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.format.sealed_json import decode_sealed, encode_sealed


def encode_document(record: DocumentRecord) -> bytes:
    """The record's bytes."""
    return encode_sealed(
        {
            "format": FORMAT,
            "root": record.root.hex(),
            "collection": record.collection,
            "id": record.id,
            "digest": record.digest,
            "tokens": record.tokens,
            "chunks": [_pack(chunk) for chunk in record.chunks],
            "stale": [_pack(chunk) for chunk in record.stale],
        }
    )


def decode_document(data: bytes, name: BlockName) -> DocumentRecord:
    """Decodes a record and checks all of it.

    Raises:
        DamagedError: a byte is wrong, or it is the record of another document than `name`.
    """
    fields = decode_sealed(data, "document record")
    try:
        record = DocumentRecord(
            root=BlockName(bytes.fromhex(fields["root"])),
            collection=fields["collection"],
            id=fields["id"],
            digest=fields["digest"],
            tokens=int(fields["tokens"]),
            chunks=tuple(map(_unpack, fields["chunks"])),
            stale=tuple(map(_unpack, fields["stale"])),
        )
        found = record.name
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"the document record cannot be understood: {error!r}") from error
    if found != name:
        raise DamagedError(f"the file holds the record of document {record.id[:80]!r}, which has another name")
    return record


def _pack(blocks: Blocks) -> str:
    return base64.b64encode(b"".join(blocks)).decode()


def _unpack(text: str) -> Blocks:
    names = base64.b64decode(text, validate=True)
    if not names or len(names) % NAME_BYTES:
        raise ValueError(f"{len(names)} bytes of block names")
    return tuple(BlockName(names[at : at + NAME_BYTES]) for at in range(0, len(names), NAME_BYTES))
