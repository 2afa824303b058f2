"""What a store URL names, as values: each place is checked when it is made, and opened by `open`.

Making a place touches no file, server or bucket. Knows how stores are made; does not know URLs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.store.base import KVStore
from cacheblend.store.combined.cascade import CascadeStore, close_all
from cacheblend.store.combined.tiered import TieredStore
from cacheblend.store.disk.folder import OWNER_ONLY
from cacheblend.store.disk.store import DEFAULT_DISK_BYTES, DiskStore
from cacheblend.store.eviction import eviction_of
from cacheblend.store.memory import MemoryStore
from cacheblend.store.remote.bucket import BucketObjects, check_keys
from cacheblend.store.remote.redis import RedisObjects
from cacheblend.store.remote.store import RemoteStore
from cacheblend.store.residence import HERE, SPARE_BYTES, OnDevice, PageLocked, Residence


class StorePlace(Protocol):
    """A place where a store is, or can be made."""

    def open(self, read_only: bool = False) -> KVStore:
        """Opens the store; the caller closes it.

        Raises:
            InvalidInputError, StoreError: as the store's class says.
        """
        ...


@dataclass(frozen=True)
class MemoryPlace:
    """This process's memory; see `MemoryStore`.

    Attributes:
        page_locked: in page-locked memory; None: not said, so it is the opener's choice (`page_locking`).
        is_lock_required: memory that cannot be locked counts as full; False: ordinary memory takes its place.

    Raises:
        InvalidInputError: an unknown eviction policy.
    """

    max_bytes: int | None = None
    ttl_s: float | None = None
    eviction: str = "lru"
    page_locked: bool | None = None
    is_lock_required: bool = True

    def __post_init__(self) -> None:
        eviction_of(self.eviction)

    def open(self, read_only: bool = False) -> MemoryStore:
        """See `StorePlace`. Memory is always writable."""
        residence: Residence = HERE
        if self.page_locked:
            residence = PageLocked(spare_bytes=SPARE_BYTES, is_required=self.is_lock_required)
        return MemoryStore(self.max_bytes, eviction=self.eviction, ttl=self.ttl_s, residence=residence)


@dataclass(frozen=True)
class DevicePlace:
    """A GPU's memory; see `MemoryStore`.

    Raises:
        InvalidInputError: an unknown eviction policy.
    """

    max_bytes: int
    index: int | None = None
    ttl_s: float | None = None
    eviction: str = "lru"

    def __post_init__(self) -> None:
        eviction_of(self.eviction)

    def open(self, read_only: bool = False) -> MemoryStore:
        """See `StorePlace`.

        Raises:
            InvalidInputError: there is no such GPU.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = self.index if self.index is not None or not count else torch.cuda.current_device()
        if index is None or index >= count:
            asked = "cuda://" if self.index is None else f"cuda://{self.index}"
            raise InvalidInputError(f"store {asked}: there are {count} GPUs here; leave it out, or name one of them")
        residence = OnDevice(torch.device("cuda", index))
        return MemoryStore(self.max_bytes, eviction=self.eviction, ttl=self.ttl_s, residence=residence)


@dataclass(frozen=True)
class FolderPlace:
    """A folder; see `DiskStore`.

    Raises:
        InvalidInputError: the folder is in an unknown user's home, the bound is 0, or the policy is unknown.
    """

    path: Path
    max_bytes: int = DEFAULT_DISK_BYTES
    ttl_s: float | None = None
    eviction: str = "lru"
    direct: bool = False
    locks: bool = True
    mode: int = OWNER_ONLY

    def __post_init__(self) -> None:
        eviction_of(self.eviction)
        _expanded(self.path)
        if self.max_bytes < 1:
            raise InvalidInputError(f"max_bytes must be above 0, got {self.max_bytes}")

    def open(self, read_only: bool = False) -> KVStore:
        """See `StorePlace`."""
        return DiskStore(
            _expanded(self.path),
            max_bytes=self.max_bytes,
            read_only=read_only,
            direct=self.direct,
            eviction=self.eviction,
            ttl=self.ttl_s,
            locks=self.locks,
            mode=self.mode,
        )


@dataclass(frozen=True)
class RedisPlace:
    """A Redis or Valkey server; see `RedisObjects`.

    Raises:
        InvalidInputError: redis-py is not installed, the URL names no server, or its port or database is not a
            number.
    """

    url: str
    max_bytes: int | None = None
    ttl_s: float | None = None
    timeout_s: float = 2.0
    prefix: str = "cacheblend"
    cluster: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without a password
        form = f"use {parts.scheme}://host:6379/0"
        if not parts.hostname:
            raise InvalidInputError(f"store {shown!r} names no server; {form}")
        try:
            port = parts.port
        except ValueError as error:
            raise InvalidInputError(f"store {shown!r}: the port must be a number from 1 to 65535; {form}") from error
        if port == 0:
            raise InvalidInputError(f"store {shown!r}: the port must be a number from 1 to 65535; {form}")
        database = parts.path.strip("/")
        if database and not database.isdecimal():
            raise InvalidInputError(f"store {shown!r}: the database must be a number, got {database!r}; {form}")
        if find_spec("redis") is None:
            raise InvalidInputError("a store in Redis needs redis-py: pip install 'cacheblend[redis]'")

    def open(self, read_only: bool = False) -> KVStore:
        """See `StorePlace`. Connects on first use."""
        objects = RedisObjects(self.url, prefix=self.prefix, timeout=self.timeout_s, cluster=self.cluster)
        return RemoteStore(objects, self.max_bytes, read_only=read_only, ttl=self.ttl_s)


@dataclass(frozen=True)
class BucketPlace:
    """A folder in an S3-compatible bucket; see `BucketObjects`.

    Raises:
        InvalidInputError: obstore is not installed, the URL names no bucket, one of the two keys is missing, or the
            endpoint is not an HTTP URL.
    """

    url: str
    max_bytes: int | None = None
    ttl_s: float | None = None
    timeout_s: float = 5.0
    endpoint: str | None = None
    region: str | None = None

    def __post_init__(self) -> None:
        if not urlsplit(self.url).netloc:
            raise InvalidInputError(f"store {self.url!r} names no bucket; use s3://bucket/folder")
        if self.endpoint is not None and urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise InvalidInputError(f"endpoint must begin with http:// or https://, got {self.endpoint!r}")
        if find_spec("obstore") is None:
            raise InvalidInputError("a store in a bucket needs obstore: pip install 'cacheblend[s3]'")
        check_keys(self.url)

    def open(self, read_only: bool = False) -> KVStore:
        """See `StorePlace`. Connects on first use."""
        given = {"endpoint": self.endpoint, "region": self.region}
        options = {key: value for key, value in given.items() if value is not None}
        objects = BucketObjects(self.url, timeout=self.timeout_s, options=options)
        return RemoteStore(objects, self.max_bytes, read_only=read_only, ttl=self.ttl_s)


@dataclass(frozen=True)
class TieredPlace:
    """Memory, or a GPU's, in front of another place; see `TieredStore`."""

    front: MemoryPlace | DevicePlace
    back: StorePlace
    keeps_written: bool = True

    def open(self, read_only: bool = False) -> KVStore:
        """See `StorePlace`."""
        front = self.front.open()
        return TieredStore(front, self.back.open(read_only), keeps_written=self.keeps_written)


@dataclass(frozen=True)
class CascadePlace:
    """Places in order, nearest first; see `CascadeStore`."""

    places: Sequence[StorePlace]

    def open(self, read_only: bool = False) -> KVStore:
        """See `StorePlace`. Closes the first ones if a later one cannot be opened."""
        opened: list[KVStore] = []
        try:
            for place in self.places:
                opened.append(place.open(read_only))
        except BaseException:
            close_all(opened)
            raise
        return CascadeStore(opened)


def page_locking(place: StorePlace) -> StorePlace:
    """The same place for an engine on a GPU: memory of which the URL does not say otherwise is page-locked, as far as
    memory can be locked."""
    if isinstance(place, MemoryPlace) and place.page_locked is None:
        return replace(place, page_locked=True, is_lock_required=False)
    if isinstance(place, TieredPlace):
        front = page_locking(place.front)
        assert isinstance(front, MemoryPlace | DevicePlace)
        return replace(place, front=front, back=page_locking(place.back))
    return place


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise InvalidInputError(f"{path} begins with the home folder of a user who is not known") from error
