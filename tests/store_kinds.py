"""Every kind of store, opened on a path."""

import atexit
import os
from functools import cache
from pathlib import Path

import pytest

from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend.store.combined import CascadeStore
from cacheblend.store.remote.bucket import BucketObjects
from cacheblend.store.remote.redis import RedisObjects
from cacheblend.store.remote.store import RemoteStore
from moto_bucket import BUCKET, bucket, needs_bucket
from redis_server import RedisServer, needs_redis

REDIS = pytest.param("redis", marks=needs_redis)
S3 = pytest.param("s3", marks=needs_bucket)
KINDS = (
    "memory",
    "disk",
    "relative",
    "tiered",
    "tiered without memory",
    "direct",
    "cascade",
    REDIS,
    S3,
    pytest.param("tiered redis", marks=needs_redis),
)


@cache
def redis() -> str:
    """One server for all tests of this process."""
    server = RedisServer()
    server.start()
    atexit.register(server.kill)
    return server.url


def open_kind(kind: str, path: Path, max_bytes: int = 1 << 24, ttl: float | None = None) -> KVStore:
    if kind == "memory":
        return MemoryStore(max_bytes, ttl=ttl)
    if "redis" in kind:
        back = RemoteStore(RedisObjects(redis(), prefix=str(path)), max_bytes, ttl=ttl)
        return back if kind == "redis" else TieredStore(MemoryStore(1 << 20), back)
    if kind == "s3":
        url = f"s3://{BUCKET}{path}"
        objects = BucketObjects(url, timeout=60, options=bucket().options)  # the machine may be busy
        return RemoteStore(objects, max_bytes, ttl=ttl)
    if kind == "cascade":
        options = {"max_bytes": max_bytes, "durable": False, "ttl": ttl}
        return CascadeStore([DiskStore(path / each, **options) for each in ("near", "far")])  # type: ignore[arg-type]
    if kind == "relative":
        path = Path(os.path.relpath(path))
    disk = DiskStore(path, max_bytes=max_bytes, durable=False, direct=kind == "direct", ttl=ttl)
    if kind in ("disk", "relative", "direct"):
        return disk
    return TieredStore(MemoryStore(0 if "without" in kind else 1 << 20), disk)
