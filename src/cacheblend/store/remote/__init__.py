"""Stores on other machines: `RemoteStore` keeps the contract, `RedisObjects` and `BucketObjects` move the bytes."""

from cacheblend.store.remote.bucket import BucketObjects
from cacheblend.store.remote.objects import Objects
from cacheblend.store.remote.redis import RedisObjects
from cacheblend.store.remote.store import RemoteStore

__all__ = ["BucketObjects", "Objects", "RedisObjects", "RemoteStore"]
