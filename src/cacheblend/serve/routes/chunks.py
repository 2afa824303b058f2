"""The chunk API, which ingestion calls when a document is indexed: store, list, delete, pin and unpin chunks.

POST, GET /v1/chunks   DELETE /v1/chunks/{id}   POST, DELETE /v1/chunks/{id}/pin
"""

from collections.abc import Generator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from starlette.concurrency import run_in_threadpool

from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.names import BlockName, state_name
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Segment, chunk
from cacheblend.engines.documents import referring
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.document_sync import slices
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fair_queue import SLICE_CHARACTERS, SLICE_TOKENS
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.pages import After, Limit, page_of
from cacheblend.serve.schemas import WarmRequest
from cacheblend.serve.state import ServerState
from cacheblend.serve.tenants import tenant_of


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""
    Key = Annotated[ApiKey, Depends(state.authenticate)]  # noqa: N806

    @app.post("/v1/chunks")
    async def warm(request: Request, asked: WarmRequest, key: Key) -> dict[str, Any]:
        return await state.run_serially(request, lambda: _warm(state, asked, key))

    @app.get("/v1/chunks")
    async def listed(key: Key, limit: Limit = 100, after: After = "") -> dict[str, Any]:
        return await run_in_threadpool(_list, state, key, limit, after)

    @app.delete("/v1/chunks/{chunk_id}")
    async def delete(chunk_id: str, key: Key) -> dict[str, Any]:
        return await run_in_threadpool(_delete, state, key, chunk_id)

    @app.post("/v1/chunks/{chunk_id}/pin")
    async def pin(chunk_id: str, key: Key) -> dict[str, Any]:
        return await run_in_threadpool(_pin, state, key, chunk_id)

    @app.delete("/v1/chunks/{chunk_id}/pin")
    async def unpin(chunk_id: str, key: Key) -> dict[str, Any]:
        return await run_in_threadpool(_unpin, state, key, chunk_id)


def _warm(state: ServerState, asked: WarmRequest, key: ApiKey) -> Generator[None, None, dict[str, Any]]:
    engine, tenants = state.engine, state.tenants
    builder = engine.builder
    if builder is None:
        raise ApiError(400, "this server has no tokenizer")
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
    tenant, model = tenant_of(key, asked.salt), engine.follow()
    manifests = [manifest_for(engine, model.planner_of(tenant), segment) for segment in segments]
    if not tenants.reserve_missing(key, manifests):
        raise ApiError(403, f"this key may store {tenants.store_bytes} bytes; delete chunks first", code="quota")
    for some in slices(segments, SLICE_TOKENS):
        yield
        engine.warm(some, tenant=tenant, state=model)
    if asked.pin:
        _pin_all(state, key, manifests)
    return {"object": "list", "data": _shown(state, manifests)}


def manifest_for(engine: BlendEngine, planner: Planner, segment: Segment) -> ChunkManifest:
    """The manifest that `BlendEngine.warm` will store for a chunk: of a part of one, that of the whole chunk."""
    anchor = tuple(planner.anchor.segments(None)) if planner.anchor.rule != "system" else ()
    return manifest_of(ChunkJob(anchor, segment.stored_ids, segment.label), planner, engine.name)


def _list(state: ServerState, key: ApiKey, limit: int, after: str) -> dict[str, Any]:
    """A page of the key's chunks. How long it takes says nothing of what other keys have stored."""
    manifests = {manifest.chunk_id: manifest for manifest in state.tenants.manifests(key)}
    documents = [referring(state.engine.store, root) for root in state.tenants.roots(key)]
    of_chunk = {chunk_id: found for each in documents for chunk_id, found in each.items()}

    def show(page: list[ChunkManifest]) -> list[dict[str, Any]]:
        having = [sorted(record.id for record in of_chunk.get(manifest.chunk_id, ())) for manifest in page]
        return [shown | {"documents": ids} for shown, ids in zip(_shown(state, page), having, strict=True)]

    return page_of(sorted(manifests), limit, after, manifests.get, show)


def _shown(state: ServerState, manifests: list[ChunkManifest]) -> list[dict[str, Any]]:
    pinned = state.engine.store.are_pinned([manifest.chunk_id for manifest in manifests])
    return [_as_object(state, manifest, each) for manifest, each in zip(manifests, pinned, strict=True)]


def _as_object(state: ServerState, manifest: ChunkManifest, is_pinned: bool) -> dict[str, Any]:
    """A chunk as clients see it, without its text."""
    held = state.engine.store.held(manifest.block_names)
    return {
        "id": manifest.chunk_id.hex(),
        "object": "chunk",
        "title": manifest.label,
        "tokens": len(manifest.token_ids),
        "bytes": state.tenants.bytes_of([manifest]),
        "held": all(held),
        "pinned": is_pinned,
    }


def _find(state: ServerState, key: ApiKey, chunk_id: str) -> ChunkManifest:
    """The key's chunk; another key's chunk is reported in the same way as one that does not exist.

    Raises:
        ApiError: this key has no such chunk.
    """
    try:
        name = BlockName(bytes.fromhex(chunk_id))
    except ValueError:
        name = BlockName(b"")
    manifest = state.tenants.manifest(key, name)
    if manifest is None:
        raise ApiError(404, f"there is no chunk {chunk_id[:80]!r}", code="chunk_not_found")
    return manifest


def _delete(state: ServerState, key: ApiKey, chunk_id: str) -> dict[str, Any]:
    """Removes a chunk and its blocks, except blocks that it shares with other chunks of the key."""
    manifest = _find(state, key, chunk_id)
    store = state.engine.store
    shared = {name for other in state.tenants.manifests(key) if other is not manifest for name in other.block_names}
    gone = [name for name in manifest.block_names if name not in shared or name == manifest.chunk_id]
    for name in (*gone, *map(state_name, gone)):
        store.delete(name)
    store.delete_manifest(manifest.chunk_id)
    state.tenants.forget_chunks([manifest.chunk_id])
    state.tenants.forget_count(key)
    return {"id": chunk_id, "object": "chunk", "deleted": True}


def _pin(state: ServerState, key: ApiKey, chunk_id: str) -> dict[str, Any]:
    manifest = _find(state, key, chunk_id)
    _pin_all(state, key, [manifest])
    return {"id": chunk_id, "object": "chunk", "pinned": True}


def _pin_all(state: ServerState, key: ApiKey, manifests: list[ChunkManifest]) -> None:
    if not state.tenants.pin(key, manifests):
        raise ApiError(403, f"this key may pin {state.tenants.pin_bytes} bytes; unpin chunks first", code="quota")


def _unpin(state: ServerState, key: ApiKey, chunk_id: str) -> dict[str, Any]:
    manifest = _find(state, key, chunk_id)
    state.tenants.unpin(key, manifest)
    return {"id": chunk_id, "object": "chunk", "pinned": False}
