"""Blocks in an S3-compatible bucket: one object per block, read by ranges, one layer at a time.

    blocks/<name>            the bytes of a block file
    manifests/<name>         the bytes of a manifest's file
    documents/<root>/<name>  the bytes of a document's record
    pins/<name>              empty

An object appears complete or not at all. A bucket does not record when an object was read: a block counts as used when
it was written, or when this process last found it. It has no locks, and tells of no change but by listing.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

from cacheblend.core.errors import InvalidInputError, StoreError, StoreUnreachableError
from cacheblend.core.load.threads import DaemonPool, results_of, submit_or_call
from cacheblend.core.names import BlockName
from cacheblend.store.format.block_file import name_of_file
from cacheblend.store.remote.objects import HeldBlock, Objects, Range, parts_of, runs_of
from cacheblend.store.sealed import DOCUMENTS, Bytes, Sealed

AT_ONCE = 32  # requests
ASIDE_AT_ONCE = 8  # of these for what may be thousands: listing, eviction and pins, behind which no request waits
CLOSE_S = 5.0  # that `close` waits for requests that are under way
UPLOAD_S = 60.0  # that writing an object may take; no request waits for it
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")  # environment variables with the credentials
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

# In errors of the service that is asked for credentials where the environment has none.
_INSTANCE_METADATA = ("169.254.", "/latest/api/token", "/latest/meta-data")
_FIRST_READ = 32 << 10  # covers most headers
_LONGEST_HEADER = 64 << 20
_TICK_S = 1e-6  # time between blocks of one call, so that the first counts as used last
S = TypeVar("S")
T = TypeVar("T")


class BucketObjects(Objects):
    """See `Objects`; ``s3://bucket/folder``. A request may take `timeout` seconds, writing a block `UPLOAD_S` if that
    is more. `options`: obstore's for S3 (``endpoint``, ``region``, ``access_key_id``, ...); missing ones are taken from
    AWS's usual environment variables. Raises `InvalidInputError`: obstore, which must be installed, rejects the URL or
    an option, or one of the two keys is missing."""

    tier = "s3"

    def __init__(self, url: str, *, timeout: float = 5.0, options: Mapping[str, str] | None = None) -> None:
        import obstore
        from obstore import exceptions
        from obstore.store import S3Store

        if "access_key_id" not in (options or {}):
            check_keys(url)
        self.place = url
        settings = cast(Any, {"virtual_hosted_style_request": False, **(options or {})})
        given = ((options or {}).get("endpoint"), *map(os.environ.get, ENDPOINTS))
        plain = next(filter(None, given), "").startswith("http://")

        def opened(seconds: float) -> Any:
            limits = {"timeout": timedelta(seconds=seconds), "connect_timeout": timedelta(seconds=timeout)}
            retries = {"max_retries": 2, "retry_timeout": timedelta(seconds=seconds)}
            client = cast(Any, {**limits, "allow_http": plain})
            return S3Store.from_url(url, config=settings, client_options=client, retry_config=cast(Any, retries))

        try:
            self._bucket, self._uploads = opened(timeout), opened(max(timeout, UPLOAD_S))
        except exceptions.BaseError as error:
            raise InvalidInputError(f"the bucket {url!r} cannot be opened: {_first_line(error)}") from error
        self._obstore: Any = obstore
        self._missing = (exceptions.NotFoundError, FileNotFoundError)
        self._refused = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
        self._no_answer = (exceptions.BaseError, OSError)
        self._pool = DaemonPool(AT_ONCE - ASIDE_AT_ONCE, "cacheblend-bucket")
        self._aside = DaemonPool(ASIDE_AT_ONCE, "cacheblend-bucket-aside")
        self._used: dict[BlockName, float] = {}
        self._lock = threading.Lock()

    def look_up(
        self,
        names: Sequence[BlockName],
        unknown: AbstractSet[BlockName] = frozenset(),
        since: float = -math.inf,
        *,
        marks: bool = True,
    ) -> list[Bytes | None]:
        """A request for each block, at the same time; a second one where an unknown header is long."""

        def ask(name: BlockName) -> tuple[float, Bytes] | None:
            if name in unknown:
                return self._begin(name)
            meta = self._head(_block(name))
            return None if meta is None else (meta["last_modified"].timestamp(), b"")

        asked = self._each(names, ask)
        now = time.time()
        found: list[Bytes | None] = [None] * len(names)
        with self._lock:
            for at, (name, answer) in reversed(list(enumerate(zip(names, asked, strict=True)))):
                if answer is not None and max(answer[0], self._used.get(name, 0.0)) >= since:
                    found[at] = answer[1]
                    if marks:
                        self._used[name] = now - at * _TICK_S
        return found

    def _begin(self, name: BlockName) -> tuple[float, Bytes] | None:
        """When a block was written, and its header."""

        def ask() -> tuple[float, memoryview]:
            got = self._obstore.get(self._bucket, _block(name), options={"range": (0, _FIRST_READ)})
            return got.meta["last_modified"].timestamp(), memoryview(got.bytes())

        begun = self._if_there(ask, (time.time(), memoryview(b"")))
        if begun is None:
            return None
        written, first = begun
        end = 8 + int.from_bytes(first[:8], "little")
        if end <= len(first) or len(first) < _FIRST_READ or end > _LONGEST_HEADER:
            return written, first[:end]  # complete, or damaged
        rest = self._range(_block(name), len(first), end)
        return None if rest is None else (written, bytes(first) + bytes(rest))

    def records(self, ranges: Sequence[Range]) -> list[Bytes | None]:
        """Records that lie next to each other come in one request."""
        runs = list(runs_of(ranges))
        found = self._each(runs, lambda run: self._range(_block(run[0].name), run[0].first, run[-1].last))
        return [part for run, data in zip(runs, found, strict=True) for part in parts_of(run, data)]

    def put(self, name: BlockName, header: Bytes, records: Sequence[Bytes]) -> None:
        self._put(_block(name), b"".join((header, *records)))
        with self._lock:
            self._used[name] = time.time()

    def delete(self, names: Sequence[BlockName]) -> list[bool]:
        there = self.exist(names)
        paths = [_block(name) for name, held in zip(names, there, strict=True) if held]
        self._delete(paths)
        with self._lock:
            for name in names:
                self._used.pop(name, None)
        return there

    def exist(self, names: Sequence[BlockName]) -> list[bool]:
        return [each is not None for each in self._each(names, lambda name: self._head(_block(name)), self._aside)]

    def held(self, *, tidy: bool = False) -> list[HeldBlock]:
        found = []
        listed = self._named("blocks")
        with self._lock:
            for name, meta in listed:
                used = max(meta["last_modified"].timestamp(), self._used.get(name, 0.0))
                found.append(HeldBlock(name, int(meta["size"]), used))
            self._used = {block.name: self._used[block.name] for block in found if block.name in self._used}
        return found

    def pin(self, names: Iterable[BlockName]) -> None:
        self._each(list(names), lambda name: self._put(f"pins/{name.hex()}", b""), self._aside)

    def unpin(self, names: Iterable[BlockName]) -> None:
        self._delete([f"pins/{name.hex()}" for name in names])

    def pinned(self) -> set[BlockName]:
        return {name for name, _ in self._named("pins")}

    def put_sealed(self, kind: str, name: BlockName, data: Bytes) -> None:
        self._put(f"{kind}/{name.hex()}", bytes(data))

    def sealed(self, kind: str) -> Mapping[BlockName, Sealed]:
        return {
            name: Sealed(f"{meta['e_tag']} {meta['last_modified']}", int(meta["size"]))
            for name, meta in self._named(kind)
        }

    def documents_bytes(self) -> int:
        return sum(int(meta["size"]) for meta in self._list(DOCUMENTS.rstrip("/")))

    def read_sealed(self, kind: str, names: Sequence[BlockName]) -> list[Bytes | None]:
        def ask(name: BlockName) -> memoryview | None:
            path = f"{kind}/{name.hex()}"
            return self._if_there(lambda: memoryview(self._obstore.get(self._bucket, path).bytes()))

        return self._each(names, ask, self._aside)

    def has_sealed(self, kind: str, name: BlockName) -> bool:
        return self._head(f"{kind}/{name.hex()}") is not None

    def delete_sealed(self, kind: str, name: BlockName) -> bool:
        there = self.has_sealed(kind, name)
        self._delete([f"{kind}/{name.hex()}"])
        return there

    def kinds(self) -> list[str]:
        """Lists all documents' records; what others put among them is none."""
        paths = (str(meta["path"]).rpartition("/") for meta in self._list(DOCUMENTS.rstrip("/")))
        folders = {
            folder for folder, _, name in paths if name_of_file(folder.rpartition("/")[2]) and name_of_file(name)
        }
        return sorted("/".join(folder.split("/")[-2:]) for folder in folders)

    def close(self) -> None:
        for pool in (self._pool, self._aside):
            pool.close()
        for pool in (self._pool, self._aside):
            pool.join(CLOSE_S)

    def _head(self, path: str) -> Any:
        return self._if_there(lambda: self._obstore.head(self._bucket, path))

    def _range(self, path: str, start: int, end: int) -> memoryview | None:
        """Bytes [start, end), fewer or none where the object ends earlier; None where it is missing."""
        ask = partial(self._obstore.get_range, self._bucket, path, start=start, end=end)
        return self._if_there(lambda: memoryview(ask()), memoryview(b""))

    def _put(self, path: str, data: bytes) -> None:
        self._ask(lambda: self._obstore.put(self._uploads, path, data))

    def _delete(self, paths: Sequence[str]) -> None:
        if paths:
            self._ask(lambda: self._obstore.delete(self._bucket, paths))

    def _named(self, folder: str) -> list[tuple[BlockName, Any]]:
        """What lies in a folder under a block's name; what else others put there is none of the store's."""
        listed = [(meta, str(meta["path"]).rpartition("/")) for meta in self._list(folder)]
        found = [(name_of_file(file), meta) for meta, (parent, _, file) in listed if parent.endswith(folder)]
        return [(name, meta) for name, meta in found if name is not None]

    def _list(self, folder: str) -> list[Any]:
        return self._ask(lambda: list(self._obstore.list(self._bucket, f"{folder}/").collect()))

    def _if_there(self, call: Callable[[], T], if_empty: T | None = None) -> T | None:
        """The answer; None where the object is missing, `if_empty` where it has no such bytes."""
        try:
            return self._ask(call)
        except StoreError as error:
            if isinstance(error.__cause__, self._missing):
                return None
            if if_empty is not None and "416 Range Not Satisfiable" in str(error.__cause__):
                return if_empty
            raise

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (*self._missing, *self._refused) as error:
            raise StoreError(f"{self.place} refused: {_first_line(error)}") from error
        except self._no_answer as error:
            if any(part in _first_line(error) for part in _INSTANCE_METADATA):
                raise StoreUnreachableError(
                    f"{self.place} has no credentials: set {' and '.join(_missing_keys())}, or run where the instance "
                    "has a role that may use the bucket"
                ) from error
            raise StoreUnreachableError(f"{self.place} does not answer: {_first_line(error)}") from error

    def _each(self, what: Sequence[S], ask: Callable[[S], T], pool: DaemonPool | None = None) -> list[T]:
        """The answers to several requests, made at the same time."""
        if len(what) == 1:
            return [ask(what[0])]
        return results_of([submit_or_call(pool or self._pool, ask, each) for each in what])


def check_keys(place: str) -> None:
    """Raises `InvalidInputError` if the environment has one of the two `KEYS` but not the other. With neither, an
    instance's role may still open the bucket."""
    missing = _missing_keys()
    if len(missing) == 1:
        raise InvalidInputError(f"{place} has no complete credentials: set {missing[0]}, too")


def _missing_keys() -> list[str]:
    return [key for key in KEYS if not os.environ.get(key)]


def _first_line(error: Exception) -> str:
    """The first line of an error: obstore appends a page of debug output."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _block(name: BlockName) -> str:
    return f"blocks/{name.hex()}"
