"""From a URL to a store."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from cacheblend.core.errors import InvalidInputError
from cacheblend.store.base import KVStore
from cacheblend.store.combined.cascade import CascadeStore, close_all
from cacheblend.store.combined.striped import StripedStore
from cacheblend.store.combined.tiered import TieredStore
from cacheblend.store.disk.disk import DEFAULT_DISK_BYTES, DiskStore
from cacheblend.store.expiry import parse_seconds
from cacheblend.store.memory import MemoryStore, default_memory_bytes
from cacheblend.store.remote.bucket import BucketObjects
from cacheblend.store.remote.objects import Objects
from cacheblend.store.remote.redis import RedisObjects
from cacheblend.store.remote.remote import RemoteStore

SUPPORTED = (
    '"memory", "memory://?max_bytes=8GiB", a folder, "file:///folder?max_bytes=200GiB&ram_bytes=4GiB", '
    '"redis://host:6379/0?ram_bytes=4GiB", or "s3://bucket/folder?region=eu-central-1"'
)

_REDIS = ("redis", "rediss", "valkey")
_OPTIONS = {
    "memory": ("max_bytes", "ttl", "evict"),
    "file": ("max_bytes", "ram_bytes", "ttl", "direct", "evict", "locks"),
    **dict.fromkeys(_REDIS, ("max_bytes", "ram_bytes", "ttl", "prefix", "timeout", "cluster")),
    "s3": ("max_bytes", "ram_bytes", "ttl", "timeout", "endpoint", "region"),
}
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"8GiB"``, ``"500 MB"`` or ``"1024"``; `InvalidInputError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2] not in _UNITS:
        raise InvalidInputError(f"{text!r} is not a size: write e.g. 8GiB, 500MB or 1048576 (bytes)")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def open_store(
    url: str | Path | None = None,
    *,
    max_bytes: int | str | None = None,
    ram_bytes: int | str | None = None,
    read_only: bool = False,
) -> KVStore:
    """Opens the store that `url` names; the caller closes it.

    Args:
        url: None or ``"memory"`` for memory; a folder's path, or ``"file:///folder"``, for a folder, made if it is not
            there (several, ``file:///a:/b``, share blocks and bound between them);
            ``"redis://host:port/database"`` (``rediss``, ``valkey``) for a server; ``"s3://bucket/folder"`` for a
            bucket. Several of these with commas between them stand behind each other, nearest first:
            ``"memory://?max_bytes=8GiB, file:///nvme?max_bytes=500GiB, s3://bucket/kv"``. A URL may carry options:
            ``?max_bytes=200GiB&ram_bytes=4GiB``; ``ttl=30d`` (what nobody used for so long is gone, unless pinned);
            for memory and folders ``evict=lru`` or ``worth`` (see `eviction`); for folders ``direct=true`` (read past
            the page cache) and ``locks=false`` (on a network file system whose locks are slow, or hang); where there is
            a network ``timeout`` (seconds that an answer may take); for servers
            ``prefix`` (of all keys) and ``cluster=true``; for buckets ``endpoint`` and ``region`` (the keys are taken
            from AWS's usual environment variables).
        max_bytes: bound of the memory, folder or server; a server has none unless one is given. An argument goes
            before the URL's.
        ram_bytes: memory in front of a folder or server; 0 (the default) for none.
        read_only: never write to the folder or server.

    Raises:
        InvalidInputError: an unknown scheme, option or size.
        StoreError: the folder cannot be used as a store (`StoreFormatError`: a newer format).
    """
    if isinstance(url, str) and len(urls := re.split(r",(?=\s*[a-z0-9]+://)", url)) > 1:
        return _cascade([each.strip() for each in urls], max_bytes, ram_bytes, read_only)
    place = _split(url)
    arguments = {"max_bytes": max_bytes, "ram_bytes": ram_bytes}
    options = dict(place.options) | {key: str(value) for key, value in arguments.items() if value is not None}
    allowed = _OPTIONS[place.scheme]
    for key in options:
        if key not in allowed:
            raise InvalidInputError(f"a {place.scheme} store has no option {key!r}; it has {', '.join(allowed)}")
    sizes = {key: parse_bytes(options.pop(key)) for key in ("max_bytes", "ram_bytes") if key in options}
    bound, ram = sizes.get("max_bytes"), sizes.get("ram_bytes", 0)
    eviction, ttl = options.pop("evict", "lru"), options.pop("ttl", None)
    kept_s = None if ttl is None else parse_seconds(ttl)
    if place.scheme == "memory":
        return MemoryStore(bound, eviction=eviction, ttl=kept_s)
    back: KVStore
    if place.scheme == "file":
        kept = DEFAULT_DISK_BYTES if bound is None else bound
        direct, locks = _flag(options, "direct"), _flag(options, "locks", default="true")
        back = _folders(
            place.path, kept, read_only=read_only, direct=direct, eviction=eviction, ttl=kept_s, locks=locks
        )
    else:
        back = RemoteStore(_remote(place, options), bound, read_only=read_only, ttl=kept_s)
    return TieredStore(MemoryStore(ram), back) if ram else back


def _cascade(urls: list[str], max_bytes: int | str | None, ram_bytes: int | str | None, read_only: bool) -> KVStore:
    """Stores behind each other; memory in front of all is a cache of what the others hold."""
    if max_bytes is not None:
        raise InvalidInputError("of several stores each has a bound of its own: write ?max_bytes=... behind its URL")
    in_front = _split(urls[0])
    if in_front.scheme == "memory":
        if ram_bytes is not None:
            raise InvalidInputError("memory:// in front and ram_bytes are the same thing; keep one of the two")
        others = set(in_front.options) - {"max_bytes"}
        if others:
            raise InvalidInputError(
                f"memory:// in front of other stores has no option {min(others)!r}; it has max_bytes"
            )
        ram_bytes = dict(in_front.options).get("max_bytes", str(default_memory_bytes()))
        urls = urls[1:]
    if any(_split(each).scheme == "memory" for each in urls):
        raise InvalidInputError("memory:// can only stand in front of other stores")
    opened: list[KVStore] = []
    try:
        for each in urls:
            opened.append(open_store(each, read_only=read_only))
    except BaseException:
        close_all(opened)
        raise
    back = opened[0] if len(opened) == 1 else CascadeStore(opened)
    ram = parse_bytes(ram_bytes or 0)
    return TieredStore(MemoryStore(ram), back) if ram else back


def _folders(path: Path, max_bytes: int, **options: Any) -> KVStore:
    """One folder, or several that share the load and the bound."""
    paths = [Path(part) for part in re.split(r":(?=[/~])", str(path))]
    parts = {str(each): DiskStore(_expanded(each), max_bytes=max_bytes // len(paths), **options) for each in paths}
    if len(parts) < len(paths):
        raise InvalidInputError(f"the store {str(path)!r} names a folder twice")
    return StripedStore(dict(parts)) if len(parts) > 1 else next(iter(parts.values()))


def _flag(options: Mapping[str, str], name: str, default: str = "false") -> bool:
    given = options.get(name, default)
    if given not in ("true", "false"):
        raise InvalidInputError(f"{name} must be true or false, got {given!r}")
    return given == "true"


def _remote(place: "_Place", options: dict[str, str]) -> Objects:
    seconds = options.pop("timeout", "5" if place.scheme == "s3" else "2")
    try:
        timeout = float(seconds)
    except ValueError:
        timeout = 0.0
    if not 0 < timeout < math.inf:
        raise InvalidInputError(f"timeout must be a number of seconds above 0, got {seconds!r}")
    if place.scheme == "s3":
        return BucketObjects(place.url, timeout=timeout, options=options)
    prefix = options.get("prefix", "cacheblend")
    return RedisObjects(place.url, prefix=prefix, timeout=timeout, cluster=_flag(options, "cluster"))


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise InvalidInputError(f"{path} begins with the home folder of a user who is not known") from error


class _Place(NamedTuple):
    """A URL's parts; `url` is all of it but the options, `path` a folder's."""

    scheme: str
    url: str = ""
    path: Path = Path()
    options: Mapping[str, str] = MappingProxyType({})


def _split(url: str | Path | None) -> _Place:
    if url is None or url == "memory":
        return _Place("memory")
    if isinstance(url, Path) or "://" not in url:
        if str(url) == "":
            raise InvalidInputError(f"an empty store name; use {SUPPORTED}")
        return _Place("file", path=Path(url))
    parts = urlsplit(url)
    if parts.scheme not in _OPTIONS:
        raise InvalidInputError(f"store {url!r} has the unknown scheme {parts.scheme!r}; use {SUPPORTED}")
    where = parts.netloc + parts.path
    if parts.scheme == "memory" and where:
        raise InvalidInputError(f"store {url!r} names a place in memory ({where!r}); use memory://?max_bytes=8GiB")
    if parts.scheme == "file" and (parts.netloc or not parts.path):
        raise InvalidInputError(f"store {url!r} needs an absolute path behind three slashes: file:///folder")
    if parts.scheme in _REDIS and not parts.hostname:
        raise InvalidInputError(f"store {url!r} names no server; use {parts.scheme}://host:6379/0")
    if parts.scheme == "s3" and not parts.netloc:
        raise InvalidInputError(f"store {url!r} names no bucket; use s3://bucket/folder")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    return _Place(parts.scheme, bare, Path(unquote(parts.path)), options)
