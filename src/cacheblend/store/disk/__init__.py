"""A store in a folder that several processes may share: its layout, block files, manifests, bound and eviction. Does
not know what the bytes mean (`store.format`) nor other kinds of store."""

from cacheblend.store.disk.store import DEFAULT_DISK_BYTES, DiskStore

__all__ = ["DEFAULT_DISK_BYTES", "DiskStore"]
