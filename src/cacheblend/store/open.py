"""From a URL to a store."""

import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from cacheblend.core.errors import InvalidInputError
from cacheblend.store.base import KVStore
from cacheblend.store.disk import DEFAULT_DISK_BYTES, DiskStore
from cacheblend.store.memory import MemoryStore
from cacheblend.store.tiered import TieredStore

SUPPORTED = '"memory", "memory://?max_bytes=8GiB", a folder, or "file:///folder?max_bytes=200GiB&ram_bytes=4GiB"'

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
        url: None or ``"memory"`` for memory; a folder's path, or ``"file:///folder"``, for a folder, made
            if it is not there. A URL may carry the sizes: ``?max_bytes=200GiB&ram_bytes=4GiB``.
        max_bytes: bound of the memory, or of the folder. An argument goes before the URL's.
        ram_bytes: memory in front of a folder; 0 (the default) for none.
        read_only: never write to the folder.

    Raises:
        InvalidInputError: an unknown scheme, option or size.
        StoreError: the folder cannot be used as a store (`StoreFormatError`: a newer format).
    """
    scheme, path, options = _split(url)
    arguments = {"max_bytes": max_bytes, "ram_bytes": ram_bytes}
    sizes = options | {key: value for key, value in arguments.items() if value is not None}
    allowed = {"memory": ("max_bytes",), "file": ("max_bytes", "ram_bytes")}[scheme]
    for key in sizes:
        if key not in allowed:
            raise InvalidInputError(f"a {scheme} store has no option {key!r}; it has {', '.join(allowed)}")
    limits = {key: parse_bytes(value) for key, value in sizes.items()}
    if scheme == "memory":
        return MemoryStore(limits.get("max_bytes"))
    return _open_folder(path, limits, read_only)


def _open_folder(path: Path, limits: dict[str, int], read_only: bool) -> KVStore:
    disk = DiskStore(path, max_bytes=limits.get("max_bytes", DEFAULT_DISK_BYTES), read_only=read_only)
    ram_bytes = limits.get("ram_bytes", 0)
    return TieredStore(MemoryStore(ram_bytes), disk) if ram_bytes else disk


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise InvalidInputError(f"{path} begins with the home folder of a user who is not known") from error


def _split(url: str | Path | None) -> tuple[str, Path, dict[str, str]]:
    """(scheme, folder, options) of a URL."""
    if url is None or url == "memory":
        return "memory", Path(), {}
    if isinstance(url, Path) or "://" not in url:
        if str(url) == "":
            raise InvalidInputError(f"an empty store name; use {SUPPORTED}")
        return "file", _expanded(Path(url)), {}
    parts = urlsplit(url)
    if parts.scheme not in ("memory", "file"):
        raise InvalidInputError(f"store {url!r} has the unknown scheme {parts.scheme!r}; use {SUPPORTED}")
    where = parts.netloc + parts.path
    if parts.scheme == "memory" and where:
        raise InvalidInputError(f"store {url!r} names a place in memory ({where!r}); use memory://?max_bytes=8GiB")
    if parts.scheme == "file" and (parts.netloc or not parts.path):
        raise InvalidInputError(f"store {url!r} needs an absolute path behind three slashes: file:///folder")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    return parts.scheme, Path(unquote(parts.path)), options
