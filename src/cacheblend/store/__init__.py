"""The KV cache store: blocks and manifests in memory, in folders, on servers, in buckets, or in several of these.
`open_store` makes a store from a URL; `check_store_url` reports a wrong URL without opening anything."""

from cacheblend.store.base import Damage, KVStore, StoreStats
from cacheblend.store.combined import CascadeStore, TieredStore
from cacheblend.store.disk import DiskStore
from cacheblend.store.memory import MemoryStore
from cacheblend.store.open import check_store_url, lasting_url, open_store, parse_bytes
from cacheblend.store.remote.store import RemoteStore
from cacheblend.store.writer import WriteBehind

__all__ = [
    "CascadeStore",
    "Damage",
    "DiskStore",
    "KVStore",
    "MemoryStore",
    "RemoteStore",
    "StoreStats",
    "TieredStore",
    "WriteBehind",
    "check_store_url",
    "lasting_url",
    "open_store",
    "parse_bytes",
]
