"""From a URL to a store: parsing and checking (`check_store_url`), then opening (`open_store`). A URL names a place: a
frozen dataclass with a field for each option, which is checked when it is made (it raises `InvalidInputError` and
touches no file, server or bucket) and opened by its `open`."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import torch

from cacheblend.core.errors import InvalidInputError, check_type
from cacheblend.store.base import KVStore
from cacheblend.store.combined import CascadeStore, TieredStore
from cacheblend.store.disk.folder import FORMAT_FILE, OWNER_ONLY
from cacheblend.store.disk.store import DEFAULT_DISK_BYTES, DiskStore
from cacheblend.store.eviction import eviction_of
from cacheblend.store.memory import MemoryStore
from cacheblend.store.remote.bucket import BucketObjects, check_keys
from cacheblend.store.remote.redis import RedisObjects
from cacheblend.store.remote.store import RemoteStore
from cacheblend.store.residence import HERE, SPARE_BYTES, OnDevice, PageLocked, Residence

SUPPORTED = (
    '"memory", "memory://?max_bytes=8GiB", "cuda://?max_bytes=8GiB", a folder, '
    '"file:///folder?max_bytes=200GiB&ram_bytes=4GiB", "redis://host:6379/0?ram_bytes=4GiB", or "s3://bucket/folder?region=eu-central-1"'
)

_NO_OPTIONS = ("path", "url", "index", "is_lock_required")  # fields of places
_FORMS = {"memory": "memory", "cuda": "cuda://?max_bytes=8GiB", "file": "file:///folder", "s3": "s3://bucket/folder"}
"""What to write of each scheme; the others are servers."""
_SIZES = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_TIMES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def open_store(
    url: str | Path | None = None,
    *,
    max_bytes: int | str | None = None,
    ram_bytes: int | str | None = None,
    read_only: bool = False,
    page_locked: bool = False,
) -> KVStore:
    """Opens the store that `url` names; the caller closes it.

    Args:
        url: one of these, or several separated by commas, nearest first, which makes a cascade:
            ``"memory://?max_bytes=8GiB, file:///nvme?max_bytes=500GiB, s3://bucket/kv"``.

            - None, ``"memory"`` or ``"memory://"``: memory.
            - ``"cuda://?max_bytes=8GiB"``: a GPU's memory, ``cuda://1`` that of the second one; alone, or in front of
              other stores as a cache of them.
            - a folder's path or ``"file:///folder"``: a folder, made if it does not exist. A text that looks like a
              scheme or like a typo of one (``"redis"``, ``"memroy"``, ``":memory:"``) is refused, unless a store of
              that name is there; ``"./redis"`` is a folder.
            - ``"redis://host:port/database"`` (``rediss``, ``valkey``): a server.
            - ``"s3://bucket/folder"``: a bucket; its keys are taken from AWS's usual environment variables.

            Options follow a question mark, ``?max_bytes=200GiB&ram_bytes=4GiB``:

            - ``max_bytes``, ``ram_bytes``: as the arguments; an argument overrides the URL.
            - ``ttl=30d``: unpinned blocks are removed after this time without use.
            - ``evict=lru`` or ``worth`` (memory, a GPU, folders): the policy, see `eviction`.
            - ``page_locked=true`` (memory, ``ram_bytes``): in page-locked memory, from which a GPU copies without the
              host; ``false``: in ordinary memory.
            - ``mode=0640`` (folders): permissions of new files; 0600, for their owner only, unless given.
            - ``locks=false`` (folders): for network file systems whose locks are slow or hang.
            - ``timeout`` (servers, buckets): seconds that an answer may take.
            - ``prefix``, ``cluster=true`` (servers): prefix of all keys; the server is a node of a cluster.
            - ``endpoint``, ``region`` (buckets).
        max_bytes: bound of the memory, folder or server; a server and a bucket have none unless one is given.
        ram_bytes: memory in front of the folder, server or bucket; 0 (the default) for none.
        read_only: never write to the folder, server or bucket.
        page_locked: memory of which the URL does not say otherwise is page-locked, as far as memory can be locked: for
            an engine on a GPU.

    Raises:
        InvalidInputError: as `check_store_url`.
        StoreError: the folder cannot be used as a store (`StoreFormatError`: it has a newer format).
    """
    place = parse_store_url(url, max_bytes=max_bytes, ram_bytes=ram_bytes)
    return (page_locking(place) if page_locked else place).open(read_only)


def check_store_url(
    url: str | Path | None, *, max_bytes: int | str | None = None, ram_bytes: int | str | None = None
) -> None:
    """Checks what `open_store` is given; opens nothing, and touches no file, server or bucket. Raises
    `InvalidInputError`: an unknown scheme, option or policy, a value out of range, a missing package, or stores that
    cannot be combined in this way."""
    parse_store_url(url, max_bytes=max_bytes, ram_bytes=ram_bytes)


def parse_store_url(
    url: str | Path | None, *, max_bytes: int | str | None = None, ram_bytes: int | str | None = None
) -> "StorePlace":
    """The place that a URL and these arguments of `open_store` name, checked but not opened."""
    check_type(url, str | Path | None, "a store", f"a store object or one of {SUPPORTED}")
    if isinstance(url, str) and len(urls := _each(url)) > 1:
        return _cascade(urls, max_bytes, ram_bytes)
    scheme, where, options = _split(url)
    arguments = {"max_bytes": max_bytes, "ram_bytes": ram_bytes}
    options |= {key: str(value) for key, value in arguments.items() if value is not None}
    allowed = [each.name for each in fields(_PLACES[scheme]) if each.name not in _NO_OPTIONS]
    if scheme not in ("memory", "cuda"):  # with memory in front
        allowed = [allowed[0], "ram_bytes", *allowed[1:], "page_locked"]
    for key in options:
        if key not in allowed:
            raise InvalidInputError(f"a {scheme} store has no option {key!r}; it has {', '.join(allowed)}")
    values = {key: _value(key, text) for key, text in options.items()}
    if scheme in ("memory", "cuda"):
        return _front(scheme, where, values)
    ram, page_locked = values.pop("ram_bytes", 0), values.pop("page_locked", None)
    if scheme == "file" and re.search(r":[/~]", where) and not Path(where).is_dir():
        raise InvalidInputError(
            f"store {where!r} names several folders; name one: disks side by side become one by LVM or RAID 0, and "
            "several stores behind each other are separated by commas, each with its scheme"
        )
    place: StorePlace = _PLACES[scheme](Path(where) if scheme == "file" else where, **values)
    if page_locked is not None and not ram and ram_bytes is None:  # 0 as an argument overrides the URL's
        raise InvalidInputError("page_locked is of the memory in front of a store: set ram_bytes, too, or leave it out")
    return TieredPlace(MemoryPlace(ram, page_locked=page_locked), place) if ram else place


def lasting_url(url: str) -> str:
    """A store's URL without the memory in front of it: what is left when a process has ended. Raises
    `InvalidInputError`: nothing is left; or as `check_store_url`."""
    check_store_url(url)
    lasting = [each for each in _each(url) if _split(each)[0] not in ("memory", "cuda")]
    if not lasting:
        raise InvalidInputError(f"the store {url!r} ends with this command; name a folder, a server or a bucket")
    return ", ".join(lasting)


def existing_url(url: str) -> str:
    """A lasting store's URL without folders that do not exist, which opening it would make; ``memory`` if none does."""
    places = ((each, *_split(each)[:2]) for each in _each(url))
    return ", ".join(each for each, of, at in places if of != "file" or Path(at).expanduser().exists()) or "memory"


def _each(url: str) -> list[str]:
    return [each.strip() for each in re.split(r",(?=\s*[a-z0-9]+://)", url)]


def _cascade(urls: list[str], max_bytes: int | str | None, ram_bytes: int | str | None) -> "StorePlace":
    """Places in order; a GPU's memory, and memory, as the first ones are caches of all others."""
    if max_bytes is not None:
        raise InvalidInputError("of several stores each has a bound of its own: write ?max_bytes=... after its URL")
    fronts: list[MemoryPlace | DevicePlace] = []
    for scheme, allowed in (("cuda", ("max_bytes",)), ("memory", ("max_bytes", "page_locked"))):
        found, where, options = _split(urls[0])
        if found != scheme or len(urls) == 1:
            continue
        if others := set(options) - set(allowed):  # the stores behind say how long blocks live, and which are evicted
            raise InvalidInputError(
                f"{scheme}:// in front of other stores has no option {min(others)!r}; it has {', '.join(allowed)}"
            )
        if scheme == "memory" and ram_bytes is not None:
            raise InvalidInputError("memory:// as the first store and ram_bytes mean the same; keep one of the two")
        fronts.append(_front(scheme, where, {key: _value(key, text) for key, text in options.items()}))
        del urls[0]
    schemes = [_split(each)[0] for each in urls]
    if "cuda" in schemes:
        raise InvalidInputError("cuda:// can only stand in front of other stores, memory:// among them")
    if "memory" in schemes and (len(urls) > 1 or any(isinstance(front, MemoryPlace) for front in fronts)):
        raise InvalidInputError("memory:// can only stand in front of other stores")
    places = [parse_store_url(each) for each in urls]
    back = places[0] if len(places) == 1 else CascadePlace(tuple(places))
    if ram := parse_bytes(ram_bytes or 0):
        fronts.append(MemoryPlace(ram))
    for front in reversed(fronts):
        back = TieredPlace(front, back)
    return back


def _front(scheme: str, where: str, options: Mapping[str, Any]) -> "MemoryPlace | DevicePlace":
    if scheme == "memory":
        return MemoryPlace(**options)
    if "max_bytes" not in options:
        raise InvalidInputError(
            "a cuda store needs a bound, since models need the GPU's memory: cuda://?max_bytes=8GiB"
        )
    return DevicePlace(index=int(where) if where else None, **options)


# ---- one URL ----------------------------------------------------------------------------------------------


def _split(url: str | Path | None) -> tuple[str, str, dict[str, str]]:
    """A store's scheme, a key of `_PLACES`; where it is: a folder, a GPU's number or a URL; its options as text."""
    if url is None or url == "memory":
        return "memory", "", {}
    if isinstance(url, Path) or "://" not in url:
        if str(url) == "":
            raise InvalidInputError(f"an empty store name; use {SUPPORTED}")
        if isinstance(url, str):
            _check_bare(url)
        return "file", str(url), {}
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidInputError(f"store {shown_url(url)!r} is not a URL ({error}); use {SUPPORTED}") from error
    scheme, where = parts.scheme, parts.netloc + parts.path
    if parts.fragment or url.endswith("#"):
        raise InvalidInputError(f"the {scheme} store's URL has a #, behind which nothing is read; write it as %23")
    if scheme not in _PLACES:
        raise InvalidInputError(f"store {shown_url(url)!r} has the unknown scheme {scheme!r}; use {SUPPORTED}")
    if scheme == "memory" and where:
        raise InvalidInputError(f"store {url!r} names a place in memory ({where!r}); use memory://?max_bytes=8GiB")
    if scheme == "cuda" and not re.fullmatch(r"(\d{1,4})?", where):
        raise InvalidInputError(f"store {url!r} must name a GPU by its number, or none: cuda://0?max_bytes=8GiB")
    if scheme == "file":
        if parts.netloc or not parts.path:
            raise InvalidInputError(f"store {url!r} needs an absolute path after three slashes: file:///folder")
        _check_commas(parts.path, Path(unquote(parts.path)))
        where = unquote(parts.path)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    return scheme, where if scheme in ("file", "cuda") else f"{scheme}://{where}", options


def _check_bare(path: str) -> None:
    """Refuses a folder's name that is meant as a URL; opened as it is, its options would be ignored in silence."""
    if option := re.search(r"\?(?=\w+=)", path):
        form = "memory://" if path[: option.start()].lower() == "memory" else "file:///abs/path"
        raise InvalidInputError(
            f"store {path!r}: options need a URL with a scheme; write {form}?{path[option.end() :]}"
        )
    _check_commas(path, Path(path))
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(?!//)", path):  # one letter is a drive
        raise InvalidInputError(
            f"store {path!r} looks like a URL without its two slashes; use {SUPPORTED}, or ./{path} for a folder of "
            "that name"
        )
    if (scheme := _meant_scheme(path)) and not (Path(path) / FORMAT_FILE).is_file():
        raise InvalidInputError(
            f"store {path!r} looks like {scheme!r}: write {_FORMS.get(scheme, 'redis://host:6379/0')}, or "
            f"./{path.strip()} for a folder of that name"
        )


def _meant_scheme(path: str) -> str | None:
    """The scheme that a bare name looks like: in another case, between colons or blanks, or a letter away from it. Of
    the short ones only the name itself: many words are a letter away."""
    word = re.sub(r"//.*", "", path).strip(": ").lower()
    if word in _PLACES:
        return word
    if not word.isalpha():  # a path, or a name with a number
        return None
    return next((scheme for scheme in _PLACES if len(scheme) > 4 and _is_a_letter_away(word, scheme)), None)


def _is_a_letter_away(word: str, other: str) -> bool:
    """One letter is missing, too many or wrong, or two neighbours are swapped."""
    for at in range(len(other)):
        left, right = word[at:], other[at:]
        swapped = right[1:2] + right[:1] + right[2:]
        if word[:at] == other[:at] and (left in (right[1:], swapped) or left[1:] in (right, right[1:])):
            return True
    return False


def _check_commas(path: str, folder: Path) -> None:
    """Refuses a list of stores in which one has no scheme; a folder that exists may have commas in its name."""
    parts = [part.strip() for part in path.split(",")]
    names_another = any(re.match(r"\.?\.?/|~", part) or _meant_scheme(part) for part in parts[1:])
    is_list = len(parts) > 1 and (names_another or not all(parts) or _meant_scheme(parts[0]) is not None)
    if is_list and not folder.is_dir():
        raise InvalidInputError(
            f"store {path!r}: of several stores each needs a scheme; write e.g. "
            '"memory://?max_bytes=1GiB, file:///abs/path", or create the folder first if its name has commas'
        )


def shown_url(url: str) -> str:
    """A store's URL, or several, without users and their passwords."""
    return re.sub(r"(?<=://)[^/?]*@", "", url)


def _value(name: str, text: str) -> Any:
    """The value of an option; `InvalidInputError` names it and the way out."""
    match name:
        case "max_bytes" | "ram_bytes":
            return parse_bytes(text)
        case "ttl":
            return parse_seconds(text)
        case "evict":
            eviction_of(text)
        case "page_locked" | "locks" | "cluster":
            if text not in ("true", "false"):
                raise InvalidInputError(f"{name} must be true or false, got {text!r}")
            return text == "true"
        case "mode":
            if not re.fullmatch("0?[67][0-7]{2}", text):
                raise InvalidInputError(
                    f"mode must be octal permissions that let the owner read and write (0640), got {text!r}"
                )
            return int(text, 8) & 0o666  # without the right to execute
        case "timeout":
            try:
                seconds = float(text)
            except ValueError:
                seconds = 0.0
            if not 0 < seconds < math.inf:
                raise InvalidInputError(f"timeout must be a number of seconds above 0, got {text!r}")
            return seconds
    return text


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"8GiB"``, ``"500 MB"`` or ``"1024"``; `InvalidInputError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2] not in _SIZES:
        raise InvalidInputError(f"{text!r} is not a size: write e.g. 8GiB, 500MB or 1048576 (bytes)")
    return int(float(match[1]) * _SIZES[match[2]]) if "." in match[1] else int(match[1]) * _SIZES[match[2]]


def parse_seconds(text: str | float) -> float:
    """Seconds of ``"30d"``, ``"12h"``, ``"90m"`` or ``"3600"``; `InvalidInputError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", str(text))
    seconds = float(match[1]) * _TIMES[match[2]] if match else 0.0
    if not seconds > 0:
        raise InvalidInputError(f"{text!r} is not a time to live: write e.g. 30d, 12h, 90m or 3600 (seconds)")
    return seconds


# ---- places -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryPlace:
    """This process's memory; see `MemoryStore`."""

    max_bytes: int | None = None
    ttl: float | None = None
    evict: str = "lru"
    page_locked: bool | None = None  # None: not said, so it is the opener's choice (`page_locking`)
    is_lock_required: bool = True  # memory that cannot be locked counts as full; False: ordinary takes its place

    def open(self, read_only: bool = False) -> MemoryStore:
        """Memory is always writable."""
        residence: Residence = HERE
        if self.page_locked:
            residence = PageLocked(spare_bytes=SPARE_BYTES, is_required=self.is_lock_required)
        return MemoryStore(self.max_bytes, eviction=self.evict, ttl=self.ttl, residence=residence)


@dataclass(frozen=True)
class DevicePlace:
    """A GPU's memory; see `MemoryStore`."""

    max_bytes: int
    index: int | None = None
    ttl: float | None = None
    evict: str = "lru"

    def open(self, read_only: bool = False) -> MemoryStore:
        """Raises `InvalidInputError` if there is no such GPU."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = self.index if self.index is not None or not count else torch.cuda.current_device()
        if index is None or index >= count:
            asked = "cuda://" if self.index is None else f"cuda://{self.index}"
            raise InvalidInputError(f"store {asked}: there are {count} GPUs here; leave it out, or name one of them")
        residence = OnDevice(torch.device("cuda", index))
        return MemoryStore(self.max_bytes, eviction=self.evict, ttl=self.ttl, residence=residence)


@dataclass(frozen=True)
class FolderPlace:
    """A folder; see `DiskStore`."""

    path: Path
    max_bytes: int = DEFAULT_DISK_BYTES
    ttl: float | None = None
    evict: str = "lru"
    locks: bool = True
    mode: int = OWNER_ONLY

    def __post_init__(self) -> None:
        try:
            self.path.expanduser()
        except RuntimeError as error:
            raise InvalidInputError(f"{self.path} begins with the home folder of a user who is not known") from error
        if self.max_bytes < 1:
            raise InvalidInputError(f"max_bytes must be above 0, got {self.max_bytes}")

    def open(self, read_only: bool = False) -> KVStore:
        return DiskStore(
            self.path.expanduser(),
            max_bytes=self.max_bytes,
            read_only=read_only,
            eviction=self.evict,
            ttl=self.ttl,
            locks=self.locks,
            mode=self.mode,
        )


@dataclass(frozen=True)
class RedisPlace:
    """A Redis or Valkey server; see `RedisObjects`."""

    url: str
    max_bytes: int | None = None
    ttl: float | None = None
    prefix: str = "cacheblend"
    timeout: float = 2.0
    cluster: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        shown = shown_url(f"{parts.scheme}://{parts.netloc}{parts.path}")
        form = f"use {parts.scheme}://host:6379/0"
        if not parts.hostname:
            raise InvalidInputError(f"store {shown!r} names no server; {form}")
        try:
            is_port = parts.port != 0
        except ValueError:
            is_port = False
        if not is_port:
            raise InvalidInputError(f"store {shown!r}: the port must be a number from 1 to 65535; {form}")
        database = parts.path.strip("/")
        if database and not database.isdecimal():
            raise InvalidInputError(f"store {shown!r}: the database must be a number, got {database!r}; {form}")
        if find_spec("redis") is None:
            raise InvalidInputError("a store in Redis needs redis-py: pip install 'cacheblend[redis]'")

    def open(self, read_only: bool = False) -> KVStore:
        """Connects on first use."""
        objects = RedisObjects(self.url, prefix=self.prefix, timeout=self.timeout, cluster=self.cluster)
        return RemoteStore(objects, self.max_bytes, read_only=read_only, ttl=self.ttl)


@dataclass(frozen=True)
class BucketPlace:
    """A folder in an S3-compatible bucket; see `BucketObjects`."""

    url: str
    max_bytes: int | None = None
    ttl: float | None = None
    timeout: float = 5.0
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
        """Connects on first use."""
        given = {"endpoint": self.endpoint, "region": self.region}
        options = {key: value for key, value in given.items() if value is not None}
        objects = BucketObjects(self.url, timeout=self.timeout, options=options)
        return RemoteStore(objects, self.max_bytes, read_only=read_only, ttl=self.ttl)


@dataclass(frozen=True)
class TieredPlace:
    """Memory, or a GPU's, in front of another place; see `TieredStore`."""

    front: MemoryPlace | DevicePlace
    back: "StorePlace"
    keeps_written: bool = True

    def open(self, read_only: bool = False) -> KVStore:
        front = self.front.open()
        return TieredStore(front, self.back.open(read_only), keeps_written=self.keeps_written)


@dataclass(frozen=True)
class CascadePlace:
    """Places in order, nearest first; see `CascadeStore`."""

    places: Sequence["StorePlace"]

    def open(self, read_only: bool = False) -> KVStore:
        with ExitStack() as opened:  # the first ones are closed if a later one cannot be opened
            store = CascadeStore([opened.enter_context(place.open(read_only)) for place in self.places])
            opened.pop_all()
        return store


StorePlace = MemoryPlace | DevicePlace | FolderPlace | RedisPlace | BucketPlace | TieredPlace | CascadePlace
_PLACES: dict[str, Any] = {"memory": MemoryPlace, "cuda": DevicePlace, "file": FolderPlace, "s3": BucketPlace}
_PLACES |= dict.fromkeys(("redis", "rediss", "valkey"), RedisPlace)
"""By a URL's scheme; their fields are its options."""


def page_locking(place: StorePlace) -> StorePlace:
    """The same place for an engine on a GPU: memory of which the URL does not say otherwise is page-locked, as far as
    memory can be locked."""
    if isinstance(place, MemoryPlace) and place.page_locked is None:
        return replace(place, page_locked=True, is_lock_required=False)
    if isinstance(place, TieredPlace):
        front = page_locking(place.front)
        assert isinstance(front, MemoryPlace | DevicePlace)
        return replace(place, front=front, back=page_locking(place.back))
    if isinstance(place, CascadePlace):
        return replace(place, places=tuple(map(page_locking, place.places)))
    return place
