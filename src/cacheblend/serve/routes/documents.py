"""Documents that change: stored by id, of an edited one what changed; their chunks go when no document has them.

POST, GET /v1/documents   DELETE /v1/documents/{id}, /v1/documents?id=
"""

import logging
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request

from cacheblend.core.names import BlockName
from cacheblend.engines.documents import COLLECTION, LONGEST_ID, Document
from cacheblend.engines.hf import DocumentSync
from cacheblend.engines.tokens.chunker import Cutting
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fair_queue import SLICE_CHARACTERS, SLICE_TOKENS
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.routes.chunks import After, Limit, page_of
from cacheblend.serve.schemas import DocumentsRequest
from cacheblend.serve.state import ServerState
from cacheblend.serve.tenants import tenant_of
from cacheblend.store.documents import DamagedRecord, DocumentRecord, document_name

logger = logging.getLogger("cacheblend.serve")
Collection = Annotated[str, Query(min_length=1, max_length=LONGEST_ID)]
Salt = Annotated[str, Query(max_length=256)]


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""
    Key = Annotated[ApiKey, Depends(state.authenticate)]  # noqa: N806

    @app.post("/v1/documents")
    async def put(request: Request, asked: DocumentsRequest, key: Key) -> dict[str, Any]:
        return await state.run_serially(request, lambda: _put(state, asked, key))

    @app.get("/v1/documents")
    def listed(
        key: Key, collection: Collection = COLLECTION, salt: Salt = "", limit: Limit = 100, after: After = ""
    ) -> dict[str, Any]:
        root = state.engine.follow().planner_of(tenant_of(key, salt)).root
        kept = state.engine.store.documents

        def read(name: BlockName) -> DocumentRecord | DamagedRecord | None:
            record = kept.get(root, name)
            return None if isinstance(record, DocumentRecord) and record.collection != collection else record

        def show(page: list[DocumentRecord | DamagedRecord]) -> list[dict[str, Any]]:
            return [_shown(state, each) for each in page]

        return page_of(kept.names(root), limit, after, read, show)

    @app.delete("/v1/documents/{document_id:path}")
    def delete(document_id: str, key: Key, collection: Collection = COLLECTION, salt: Salt = "") -> dict[str, Any]:
        # Another key's document is reported in the same way as one that does not exist.
        sync = DocumentSync(state.engine, tenant=tenant_of(key, salt), collection=collection, reads_all=False)
        root, kept = sync.root, state.engine.store.documents
        found = kept.get(root, document_name(root, collection, document_id))
        if found is None:
            raise ApiError(404, f"there is no document {document_id[:80]!r}", code="document_not_found")
        if isinstance(found, DamagedRecord):
            kept.delete(root, found.name)  # its chunks are unknown, and evicted in their turn
        else:
            sync.drop([document_id])
        report = sync.finish()
        state.tenants.forget_chunks(sync.dropped_chunks)
        state.tenants.forget_count(key)
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


def _put(state: ServerState, asked: DocumentsRequest, key: ApiKey) -> Generator[None, None, dict[str, Any]]:
    """Stores documents; a dry run says first whether they fit into the key's quota.

    What was stored stays if it ends early, for whatever reason: the next post of the same documents goes on from there.
    """
    engine, tenants = state.engine, state.tenants
    if not tenants.remember_salt(key, asked.salt):
        raise ApiError(403, "this key has used too many salts; nothing is stored under a new one", code="quota")
    documents = [Document(each.id, each.text, each.title) for each in asked.documents]
    model = engine.follow()
    cutting = Cutting(asked.chunk_tokens, min(64, asked.chunk_tokens // 2))
    dry, sync = (
        DocumentSync(
            engine,
            tenant=tenant_of(key, asked.salt),
            collection=asked.collection,
            cutting=cutting,
            state=model,
            dry_run=dry_run,
            reads_all=False,
        )
        for dry_run in (True, False)
    )
    yield from _in_slices(dry, documents)
    tenants.count(key)
    needed = dry.report
    if not tenants.reserve(key, needed.computed_tokens, needed.computed_chunks + needed.added):
        raise ApiError(403, f"this key may store {tenants.store_bytes} bytes; delete documents first", code="quota")
    try:
        yield from _in_slices(sync, documents)
        report = sync.finish()
    finally:
        tenants.forget_chunks(sync.dropped_chunks)
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


def _shown(state: ServerState, record: DocumentRecord | DamagedRecord) -> dict[str, Any]:
    """A document as clients see it, without its text; a damaged one, whose id is unknown, by its record's name."""
    if isinstance(record, DamagedRecord):
        return {"id": None, "object": "document", "damaged": True, "record": record.name.hex()}
    names = [name for blocks in record.chunks for name in blocks]
    return {
        "id": record.id,
        "object": "document",
        "collection": record.collection,
        "tokens": record.tokens,
        "chunks": [blocks[-1].hex() for blocks in record.chunks],
        "held": all(state.engine.store.held(names)),
    }
