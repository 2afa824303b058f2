"""What ingestion calls when a document is indexed: chunks, and documents that change.

POST, GET /v1/chunks      DELETE /v1/chunks/{id}   POST, DELETE /v1/chunks/{id}/pin
POST, GET /v1/documents   DELETE /v1/documents/{id}, /v1/documents?id=

A document is stored by id, of an edited one what changed; its chunks go when no document has them.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from heapq import merge
from itertools import islice
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request

from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Segment, chunk
from cacheblend.engines.documents import COLLECTION, LONGEST_ID, Document
from cacheblend.engines.hf import BlendEngine, DocumentSync
from cacheblend.engines.hf.document_sync import slices
from cacheblend.engines.tokens.chunker import Cutting
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fair_queue import SLICE_CHARACTERS, SLICE_TOKENS
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.schemas import DocumentsRequest, WarmRequest
from cacheblend.serve.state import Key, ServerState
from cacheblend.serve.tenants import tenant_of
from cacheblend.store.documents import DamagedRecord, DocumentRecord, document_name

logger = logging.getLogger("cacheblend.serve")
T = TypeVar("T")
Collection = Annotated[str, Query(min_length=1, max_length=LONGEST_ID)]
Salt = Annotated[str, Query(max_length=256)]
Limit = Annotated[int, Query(ge=1, le=1000, description="Entries of a page, at most.")]
After = Annotated[str, Query(max_length=64, description="`last_id` of the page before; empty: the first page.")]


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""
    store, tenants = state.engine.store, state.tenants

    @app.post("/v1/chunks")
    async def warm(request: Request, asked: WarmRequest, key: Key) -> dict[str, Any]:
        return await state.run_serially(request, lambda: _warm(state, asked, key))

    @app.get("/v1/chunks")
    def listed(key: Key, limit: Limit = 100, after: After = "") -> dict[str, Any]:
        # How long it takes says nothing of what other keys have stored.
        def show(page: list[ChunkManifest]) -> list[dict[str, Any]]:
            having = [tenants.documents(manifest.root).get(manifest.chunk_id, ()) for manifest in page]
            shown = zip(_shown(state, page), having, strict=True)
            return [each | {"documents": sorted(record.id for record in records)} for each, records in shown]

        return page_of(tenants.names(key), limit, after, tenants.get, show)

    @app.delete("/v1/chunks/{chunk_id}")
    def delete(chunk_id: str, key: Key) -> dict[str, Any]:
        manifest = _find(state, key, chunk_id)
        shared = {name for other in tenants.manifests(key) if other is not manifest for name in other.block_names}
        store.delete_chunk(manifest.block_names, shared)
        tenants.forget([manifest.chunk_id], by=key)
        return {"id": chunk_id, "object": "chunk", "deleted": True}

    @app.post("/v1/chunks/{chunk_id}/pin")
    def pin(chunk_id: str, key: Key) -> dict[str, Any]:
        _pin(state, key, [_find(state, key, chunk_id)])
        return {"id": chunk_id, "object": "chunk", "pinned": True}

    @app.delete("/v1/chunks/{chunk_id}/pin")
    def unpin(chunk_id: str, key: Key) -> dict[str, Any]:
        tenants.unpin(key, _find(state, key, chunk_id))
        return {"id": chunk_id, "object": "chunk", "pinned": False}

    _add_document_routes(app, state)


def _add_document_routes(app: FastAPI, state: ServerState) -> None:
    store, tenants = state.engine.store, state.tenants

    @app.post("/v1/documents")
    async def put(request: Request, asked: DocumentsRequest, key: Key) -> dict[str, Any]:
        return await state.run_serially(request, lambda: _put(state, asked, key))

    @app.get("/v1/documents")
    def listed(
        key: Key, collection: Collection = COLLECTION, salt: Salt = "", limit: Limit = 100, after: After = ""
    ) -> dict[str, Any]:
        root, kept = state.engine.runtime.follow().planner_of(tenant_of(key, salt)).root, store.documents

        def read(name: BlockName) -> DocumentRecord | DamagedRecord | None:
            record = kept.get(root, name)
            return None if isinstance(record, DocumentRecord) and record.collection != collection else record

        def show(page: list[DocumentRecord | DamagedRecord]) -> list[dict[str, Any]]:
            records = [each for each in page if isinstance(each, DocumentRecord)]
            held = tenants.held(name for each in records for blocks in each.chunks for name in blocks)
            return [_document(each, held) for each in page]

        return page_of([kept.names(root)], limit, after, read, show)

    @app.delete("/v1/documents/{document_id:path}")
    def delete(document_id: str, key: Key, collection: Collection = COLLECTION, salt: Salt = "") -> dict[str, Any]:
        # Another key's document is reported in the same way as one that does not exist.
        sync = DocumentSync(state.engine, tenant=tenant_of(key, salt), collection=collection, reads_all=False)
        root, kept = sync.root, store.documents
        found = kept.get(root, document_name(root, collection, document_id))
        if found is None:
            raise ApiError(404, f"there is no document {document_id[:80]!r}", code="document_not_found")
        if isinstance(found, DamagedRecord):
            kept.delete(root, found.name)  # its chunks are unknown, and evicted in their turn
        else:
            sync.drop([document_id])
        report = sync.finish()
        tenants.forget(sync.dropped_chunks, root, by=key)
        return {
            "id": document_id,
            "object": "document",
            "deleted": True,
            "dropped_chunks": report.dropped_chunks,
            "pinned_chunks": report.pinned_chunks,
        }

    @app.delete("/v1/documents")
    def delete_any(
        document_id: Annotated[str, Query(alias="id", min_length=1, max_length=LONGEST_ID)],
        key: Key,
        collection: Collection = COLLECTION,
        salt: Salt = "",
    ) -> dict[str, Any]:  # an id of line ends or dots, which clients and paths do not keep
        return delete(document_id, key, collection, salt)


def _warm(state: ServerState, asked: WarmRequest, key: ApiKey) -> Generator[None, None, dict[str, Any]]:
    engine, tenants = state.engine, state.tenants
    builder = state.builder()
    if not tenants.remember_salt(key, asked.salt):
        raise ApiError(403, "this key has used too many salts; nothing is stored under a new one", code="quota")
    segments, characters = list[Segment](), 0
    for number, each in enumerate(asked.chunks):
        characters += len(each.text or "")
        if characters > SLICE_CHARACTERS:
            characters = 0
            yield
        state.text_limit.check([each.text or ""], f"chunks.{number}")
        segments.append(chunk(each.token_ids or builder.encode(each.text or ""), each.title))
    if any(len(segment) == 0 for segment in segments):
        raise ApiError(400, "a chunk without a token cannot be stored", param="chunks")
    tenant, model = tenant_of(key, asked.salt), engine.runtime.follow()
    manifests = [manifest_for(engine, model.planner_of(tenant), segment) for segment in segments]
    if not tenants.reserve_missing(key, manifests):
        raise ApiError(403, f"this key may store {tenants.store_bytes} bytes; delete chunks first", code="quota")
    for some in slices(segments, SLICE_TOKENS):
        yield
        engine.warm(some, tenant=tenant, state=model)
    if asked.pin:
        _pin(state, key, manifests)
    return {"object": "list", "data": _shown(state, manifests)}


def manifest_for(engine: BlendEngine, planner: Planner, segment: Segment) -> ChunkManifest:
    """The manifest that `BlendEngine.warm` will store for a chunk: of a part of one, that of the whole chunk."""
    anchor = tuple(planner.anchor.segments(None)) if planner.anchor.rule != "system" else ()
    return manifest_of(ChunkJob(anchor, segment.stored_ids, segment.label), planner, engine.name)


def _find(state: ServerState, key: ApiKey, chunk_id: str) -> ChunkManifest:
    """The key's chunk; another key's chunk is reported in the same way as one that does not exist. Raises `ApiError`,
    and as `Tenants.look`."""
    state.tenants.look()
    try:
        name = BlockName(bytes.fromhex(chunk_id))
    except ValueError:
        name = BlockName(b"")
    manifest = state.tenants.get(name)
    if manifest is None or manifest.root not in state.tenants.roots(key):
        raise ApiError(404, f"there is no chunk {chunk_id[:80]!r}", code="chunk_not_found")
    return manifest


def _pin(state: ServerState, key: ApiKey, manifests: list[ChunkManifest]) -> None:
    if not state.tenants.pin(key, manifests):
        raise ApiError(403, f"this key may pin {state.tenants.pin_bytes} bytes; unpin chunks first", code="quota")


def _shown(state: ServerState, manifests: list[ChunkManifest]) -> list[dict[str, Any]]:
    """Chunks as clients see them, without their text."""
    tenants = state.tenants
    pinned = state.engine.store.are_pinned([manifest.chunk_id for manifest in manifests])
    held = tenants.held(name for manifest in manifests for name in manifest.block_names)
    return [
        {
            "id": manifest.chunk_id.hex(),
            "object": "chunk",
            "title": manifest.label,
            "tokens": len(manifest.token_ids),
            "bytes": sum(size for name, size in tenants.sizes([manifest]).items() if name in held),
            "held": held.issuperset(manifest.block_names),
            "pinned": is_pinned,
        }
        for manifest, is_pinned in zip(manifests, pinned, strict=True)
    ]


def page_of(
    names: Sequence[Sequence[BlockName]],
    limit: int,
    after: str,
    read: Callable[[BlockName], T | None],
    show: Callable[[list[T]], list[Any]],
) -> dict[str, Any]:
    """One page of the entries that `read` finds for names, lists of which are ordered, as `show` has them; only its own
    are read. `after` names the last entry of the page before, which may be gone; raises `ApiError` if it is no
    hexadecimal name."""
    try:
        before = BlockName(bytes.fromhex(after))
    except ValueError:
        raise ApiError(400, f"after {after!r} is not the last_id of a page; leave it out", param="after") from None
    left = merge(*(map(each.__getitem__, range(bisect_right(each, before), len(each))) for each in names))
    found = ((name, entry) for name in left if (entry := read(name)) is not None)
    page = list(islice(found, limit))
    last = page[-1][0].hex() if page else None
    has_more = next(found, None) is not None
    return {"object": "list", "data": show([entry for _, entry in page]), "has_more": has_more, "last_id": last}


def _put(state: ServerState, asked: DocumentsRequest, key: ApiKey) -> Generator[None, None, dict[str, Any]]:
    """Stores documents; a dry run says first whether they fit into the key's quota. What was stored stays if it ends
    early, for whatever reason: the next post of the same documents goes on from there."""
    engine, tenants = state.engine, state.tenants
    if not tenants.remember_salt(key, asked.salt):
        raise ApiError(403, "this key has used too many salts; nothing is stored under a new one", code="quota")
    documents = [Document(each.id, each.text, each.title) for each in asked.documents]
    tenant, cutting = tenant_of(key, asked.salt), Cutting(asked.chunk_tokens, min(64, asked.chunk_tokens // 2))
    sync_of = partial(DocumentSync, engine, collection=asked.collection, state=engine.runtime.follow(), reads_all=False)
    dry, sync = (sync_of(tenant=tenant, cutting=cutting, dry_run=dry_run) for dry_run in (True, False))
    yield from _in_slices(dry, documents)
    tenants.count(key)
    needed = dry.report
    if not tenants.reserve(key, needed.computed_tokens, needed.computed_chunks + needed.added):
        raise ApiError(403, f"this key may store {tenants.store_bytes} bytes; delete documents first", code="quota")
    try:
        yield from _in_slices(sync, documents)
        report = sync.finish()
    finally:
        tenants.forget(sync.dropped_chunks, sync.root)
    # Paths of files are the server's own.
    for reason in report.damaged:
        logger.warning("a document's record was damaged, and is written anew: %s", reason)
    return {"object": "documents", "documents": report.documents, **asdict(report), "damaged": len(report.damaged)}


def _in_slices(sync: DocumentSync, documents: list[Document]) -> Iterator[None]:
    """Puts documents; others have their turn between two steps, and behind so many characters that were cut."""
    characters = at = 0
    for done in sync.steps(documents, SLICE_TOKENS):
        if done is not None:
            characters += len(documents[at].text)
            at = done
        if done is None or characters > SLICE_CHARACTERS:
            characters = 0
            yield


def _document(record: DocumentRecord | DamagedRecord, held: set[BlockName]) -> dict[str, Any]:
    """A document as clients see it, without its text; a damaged one, whose id is unknown, by its record's name. `held`:
    the blocks that are."""
    if isinstance(record, DamagedRecord):
        return {"id": None, "object": "document", "damaged": True, "record": record.name.hex()}
    return {
        "id": record.id,
        "object": "document",
        "collection": record.collection,
        "tokens": record.tokens,
        "chunks": [blocks[-1].hex() for blocks in record.chunks],
        "held": all(held.issuperset(blocks) for blocks in record.chunks),
    }
