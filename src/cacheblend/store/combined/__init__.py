"""Stores made of other stores, and a store that is slowed down for measurements.

tiered       memory as a cache of one store
cascade      stores in order, nearest first
throttled    memory as slow as a given device
"""

from cacheblend.store.combined.cascade import CascadeStore
from cacheblend.store.combined.throttled import ThrottledStore
from cacheblend.store.combined.tiered import TieredStore

__all__ = ["CascadeStore", "ThrottledStore", "TieredStore"]
