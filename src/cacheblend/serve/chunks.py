"""The chunk API: what ingestion calls when a document is indexed."""

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, Request
from starlette.concurrency import run_in_threadpool

from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.prompt import chunk
from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.errors import ApiError
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.schemas import WarmRequest
from cacheblend.serve.tenants import tenant_of

if TYPE_CHECKING:
    from cacheblend.serve.app import Server


def add_routes(app: FastAPI, server: "Server") -> None:
    """The routes under ``/v1/chunks``."""
    key_of = Annotated[ApiKey, Depends(server.key_of)]

    @app.post("/v1/chunks")
    async def warm(request: Request, asked: WarmRequest, key: key_of) -> dict[str, Any]:
        return await server.beside(request, lambda: _warm(server, asked, key))

    @app.get("/v1/chunks")
    async def listed(key: key_of) -> dict[str, Any]:
        return await run_in_threadpool(_listed, server, key)

    @app.delete("/v1/chunks/{chunk_id}")
    async def delete(chunk_id: str, key: key_of) -> dict[str, Any]:
        return await run_in_threadpool(_delete, server, key, chunk_id)

    @app.post("/v1/chunks/{chunk_id}/pin")
    async def pin(chunk_id: str, key: key_of) -> dict[str, Any]:
        return await run_in_threadpool(_pin, server, key, chunk_id)

    @app.delete("/v1/chunks/{chunk_id}/pin")
    async def unpin(chunk_id: str, key: key_of) -> dict[str, Any]:
        return await run_in_threadpool(_unpin, server, key, chunk_id)


def _warm(server: "Server", asked: WarmRequest, key: ApiKey) -> dict[str, Any]:
    engine, tenants = server.engine, server.tenants
    builder = engine.builder
    if builder is None:
        raise ApiError(400, "this server has no tokenizer")
    if not tenants.seen(key, asked.salt):
        raise ApiError(403, "this key has used too many salts; nothing is stored under a new one", code="quota")
    segments = [chunk(each.token_ids or builder.encode(each.text or ""), each.title) for each in asked.chunks]
    if any(len(segment) == 0 for segment in segments):
        raise ApiError(400, "a chunk without a token cannot be stored", param="chunks")
    tenant = tenant_of(key, asked.salt)
    found = [_manifest(engine, tenant, segment) for segment in segments]
    missing = {each.chunk_id: len(each.token_ids) for each in found if not all(engine.store.held(each.block_names))}
    tenants.count(key)
    if not tenants.take_room(key, sum(missing.values())):
        raise ApiError(403, f"this key may store {tenants.store_bytes} bytes; delete chunks first", code="quota")
    engine.warm(segments, tenant=tenant)
    if asked.pin:
        _pin_all(server, key, found)
    return _list_of(server, found)


def _manifest(engine: BlendEngine, tenant: str, segment: Any) -> ChunkManifest:
    planner = engine.planner_of(tenant)
    anchor = tuple(planner.anchor.segments(None)) if planner.anchor.rule != "system" else ()
    return manifest_of(ChunkJob(anchor, segment.token_ids, segment.label), planner, engine.name)


def _listed(server: "Server", key: ApiKey) -> dict[str, Any]:
    return _list_of(server, server.tenants.manifests(key))


def _list_of(server: "Server", manifests: list[ChunkManifest]) -> dict[str, Any]:
    pinned = server.engine.store.pinned()
    return {"object": "list", "data": [_told(server, manifest, pinned) for manifest in manifests]}


def _told(server: "Server", manifest: ChunkManifest, pinned: set[BlockName]) -> dict[str, Any]:
    """A chunk as clients know it. Its text is not told."""
    held = server.engine.store.held(manifest.block_names)
    return {
        "id": manifest.chunk_id.hex(),
        "object": "chunk",
        "title": manifest.label,
        "tokens": len(manifest.token_ids),
        "bytes": server.tenants.bytes_of([manifest]),
        "held": all(held),
        "pinned": manifest.chunk_id in pinned,
    }


def _found(server: "Server", key: ApiKey, chunk_id: str) -> ChunkManifest:
    """The chunk; another tenant's is as little there as one that never was."""
    try:
        name = BlockName(bytes.fromhex(chunk_id))
    except ValueError:
        name = BlockName(b"")
    manifest = server.tenants.manifest(key, name)
    if manifest is None:
        raise ApiError(404, f"there is no chunk {chunk_id[:80]!r}", code="chunk_not_found")
    return manifest


def _delete(server: "Server", key: ApiKey, chunk_id: str) -> dict[str, Any]:
    manifest = _found(server, key, chunk_id)
    store = server.engine.store
    kept = {name for other in server.tenants.manifests(key) if other is not manifest for name in other.block_names}
    for name in manifest.block_names:
        if name not in kept or name == manifest.chunk_id:
            store.delete(name)
    store.delete_manifest(manifest.chunk_id)
    server.tenants.forget_count(key)
    return {"id": chunk_id, "object": "chunk", "deleted": True}


def _pin(server: "Server", key: ApiKey, chunk_id: str) -> dict[str, Any]:
    manifest = _found(server, key, chunk_id)
    _pin_all(server, key, [manifest])
    return {"id": chunk_id, "object": "chunk", "pinned": True}


def _pin_all(server: "Server", key: ApiKey, manifests: list[ChunkManifest]) -> None:
    if not server.tenants.pin(key, manifests):
        raise ApiError(403, f"this key may pin {server.tenants.pin_bytes} bytes; unpin chunks first", code="quota")


def _unpin(server: "Server", key: ApiKey, chunk_id: str) -> dict[str, Any]:
    manifest = _found(server, key, chunk_id)
    server.tenants.unpin(key, manifest)
    return {"id": chunk_id, "object": "chunk", "pinned": False}
