"""The KV cache store: blocks and manifests in memory, in a folder, or both."""

from cacheblend.store.base import Damage, KVStore, StoreStats
from cacheblend.store.combined.tiered import TieredStore
from cacheblend.store.disk.disk import DiskStore
from cacheblend.store.memory import MemoryStore
from cacheblend.store.open import open_store, parse_bytes
from cacheblend.store.writer import WriteBehind, WriterStats

__all__ = [
    "Damage",
    "DiskStore",
    "KVStore",
    "MemoryStore",
    "StoreStats",
    "TieredStore",
    "WriteBehind",
    "WriterStats",
    "open_store",
    "parse_bytes",
]
