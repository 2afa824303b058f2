"""Blocks in Redis or Valkey: one value for a block's header and one per layer, so that a layer is read by one GET.

    {prefix}:{<name>}:h      header               {prefix}:{<name>}:<layer>    record
    {prefix}:used            name -> when         {prefix}:sizes               name -> "bytes layers"
    {prefix}:manifests       name -> manifest     {prefix}:marks               name -> when it was put
    {prefix}:pins            names                {prefix}:changes             when manifests last changed

Names are written as hexadecimal digits; the braces keep a block's values on one node of a cluster. A block's header is
written last, and its layers expire unless that happens, so a writer that dies leaves nothing.
"""

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cacheblend.core.errors import InvalidInputError, StoreError, StoreFullError, StoreUnreachableError
from cacheblend.core.naming import BlockName
from cacheblend.store.remote.objects import Bytes, HeldBlock, Range

_MAX_COMMANDS = 10_000  # per pipeline
_PUBLISHED_S = 60.0  # a block is listed up to this long before it can be found
_HALF_WRITTEN_S = 3600  # after which the layers of a writer that died expire
_TICK_S = 1e-6  # time between blocks of one call, so that the first counts as used last


class RedisObjects:
    """See `Objects`.

    Args:
        url: ``redis://``, ``rediss://`` or ``valkey://`` host:port/database.
        prefix: prefix of all keys.
        timeout: seconds that a connection or an answer may take.
        cluster: the server is a node of a cluster.

    Raises:
        InvalidInputError: redis-py is not installed.
    """

    tier = "redis"

    def __init__(self, url: str, *, prefix: str = "cacheblend", timeout: float = 2.0, cluster: bool = False) -> None:
        try:
            import redis
        except ImportError as error:
            raise InvalidInputError("a store in Redis needs redis-py: pip install 'cacheblend[redis]'") from error
        parts = urlsplit(url)
        scheme = parts.scheme.replace("valkey", "redis")
        self.place = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisClusterException
        from redis.retry import Retry

        options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 1),  # for a connection that was closed while idle
        }
        if cluster:
            options["retry"] = Retry(NoBackoff(), 0)  # the cluster's client repeats commands of a lost node by itself
        kind = redis.RedisCluster if cluster else redis.Redis
        self._no_answer = (redis.ConnectionError, redis.TimeoutError, RedisClusterException, OSError)
        self._full, self._refused = redis.OutOfMemoryError, redis.RedisError
        self._prefix = prefix
        self._open = partial(kind.from_url, urlunsplit((scheme, *parts[1:3], "", "")), **options)
        self._client: Any = None  # opened on first use: a cluster's client connects at once
        self._opening = threading.Lock()

    # ---- blocks -----------------------------------------------------------------------------------------

    def look_up(
        self, names: Sequence[BlockName], unknown: AbstractSet[BlockName] = frozenset(), since: float = -math.inf
    ) -> list[Bytes | None]:
        """See `Objects`. One round trip; two with `since`, as only then some blocks must not be marked.

        A server without memory left does not record the use, but still answers.
        """
        now, expires = time.time(), since > -math.inf
        if not names:
            return []

        def ask(pipe: Any) -> None:
            for name in names:
                (pipe.get if name in unknown else pipe.exists)(self._piece(name, "h"))
            if expires:
                pipe.zmscore(self._key("used"), [name.hex() for name in names])
            else:
                mark(pipe, names)

        def mark(pipe: Any, used: Sequence[BlockName]) -> None:
            times = {name.hex(): now - at * _TICK_S for at, name in enumerate(dict.fromkeys(used))}
            pipe.zadd(self._key("used"), times, xx=True)

        *there, last = self._together(ask, all_of=len(names) + expires)
        found = [_header(answer) for answer in there]
        if expires:
            fresh = [when is not None and when >= since for when in last]
            found = [header if is_fresh else None for header, is_fresh in zip(found, fresh, strict=True)]
            used = [name for name, is_fresh in zip(names, fresh, strict=True) if is_fresh]
            if used:
                self._together(lambda pipe: mark(pipe, used), all_of=0)
        return found

    def headers(self, names: Sequence[BlockName]) -> list[Bytes | None]:
        """See `Objects`."""
        return self._together(lambda pipe: [pipe.get(self._piece(name, "h")) for name in names])

    def records(self, ranges: Sequence[Range]) -> list[Bytes | None]:
        """See `Objects`. An empty value means that the record is gone: no record has 0 bytes."""

        def ask(pipe: Any) -> None:
            for each in ranges:
                key = self._piece(each.name, str(each.layer))
                if (each.start, each.stop) == (0, each.size):
                    pipe.get(key)
                else:
                    pipe.getrange(key, each.start, each.stop - 1)

        return [data or None for data in self._together(ask)]

    def put(self, name: BlockName, header: Bytes, records: Sequence[Bytes]) -> None:
        """See `Objects`."""
        size = len(header) + sum(len(record) for record in records)
        pieces = [self._piece(name, str(layer)) for layer in range(len(records))]

        def write(pipe: Any) -> None:
            for key, record in zip(pieces, records, strict=True):
                pipe.set(key, bytes(record), ex=_HALF_WRITTEN_S)

        def publish(pipe: Any) -> None:
            for key in pieces:
                pipe.persist(key)
            pipe.hset(self._key("sizes"), name.hex(), f"{size} {len(records)}")
            pipe.zadd(self._key("used"), {name.hex(): time.time()})
            pipe.set(self._piece(name, "h"), bytes(header))

        self._together(write)
        self._together(publish)

    def delete(self, names: Sequence[BlockName]) -> list[bool]:
        """See `Objects`."""
        digits = [name.hex() for name in names]
        sizes = self._together(lambda pipe: pipe.hmget(self._key("sizes"), digits))[0]

        def remove(pipe: Any) -> None:
            for name in names:
                pipe.unlink(self._piece(name, "h"))
            for name, size in zip(names, sizes, strict=True):
                for layer in range(int(size.split()[1]) if size else 0):
                    pipe.unlink(self._piece(name, str(layer)))
            pipe.hdel(self._key("sizes"), *digits)
            pipe.zrem(self._key("used"), *digits)

        return [bool(was) for was in self._together(remove)[: len(names)]]

    def held(self, *, tidy: bool = False) -> list[HeldBlock]:
        """See `Objects`. Checks that each block still exists, as the server may have evicted it by itself."""
        sizes, used = self._together(
            lambda pipe: (pipe.hgetall(self._key("sizes")), pipe.zrange(self._key("used"), 0, -1, withscores=True))
        )
        when = dict(used)
        blocks = [
            HeldBlock(_name(digits), int(size.split()[0]), float(when.get(digits, 0.0)))
            for digits, size in sizes.items()
        ]
        there = self._exist([block.name for block in blocks])
        published = time.time() - _PUBLISHED_S
        gone = [block.name for block, held in zip(blocks, there, strict=True) if not held and block.used < published]
        if gone and tidy:
            self.delete(gone)
        return [block for block, held in zip(blocks, there, strict=True) if held]

    def _exist(self, names: Sequence[BlockName]) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(names), _MAX_COMMANDS):
            part = names[start : start + _MAX_COMMANDS]
            asked = self._together(lambda pipe, part=part: [pipe.exists(self._piece(name, "h")) for name in part])
            found += [bool(there) for there in asked]
        return found

    # ---- pins and manifests -----------------------------------------------------------------------------

    def pin(self, names: Iterable[BlockName]) -> None:
        """See `Objects`."""
        self._with_names("sadd", names)

    def unpin(self, names: Iterable[BlockName]) -> None:
        """See `Objects`."""
        self._with_names("srem", names)

    def pinned(self) -> set[BlockName]:
        """See `Objects`."""
        return {_name(digits) for digits in self._together(lambda pipe: pipe.smembers(self._key("pins")))[0]}

    def put_manifest(self, name: BlockName, data: Bytes) -> None:
        """See `Objects`."""

        def put(pipe: Any) -> None:
            pipe.hset(self._key("manifests"), name.hex(), bytes(data))
            pipe.hset(self._key("marks"), name.hex(), time.time_ns())
            pipe.set(self._key("changes"), time.time_ns())

        self._together(put)

    def manifests(self) -> Mapping[BlockName, str]:
        """See `Objects`."""
        marks = self._together(lambda pipe: pipe.hgetall(self._key("marks")))[0]
        return {_name(digits): mark.decode() for digits, mark in marks.items()}

    def read_manifests(self, names: Sequence[BlockName]) -> list[Bytes | None]:
        """See `Objects`."""
        if not names:
            return []
        digits = [name.hex() for name in names]
        found: list[Bytes | None] = self._together(lambda pipe: pipe.hmget(self._key("manifests"), digits))[0]
        return found

    def has_manifest(self, name: BlockName) -> bool:
        """See `Objects`."""
        return bool(self._together(lambda pipe: pipe.hexists(self._key("marks"), name.hex()))[0])

    def delete_manifest(self, name: BlockName) -> bool:
        """See `Objects`."""

        def delete(pipe: Any) -> None:
            pipe.hdel(self._key("marks"), name.hex())
            pipe.hdel(self._key("manifests"), name.hex())
            pipe.set(self._key("changes"), time.time_ns())

        return bool(self._together(delete)[0])

    def listing_stamp(self) -> str | None:
        """See `Objects`."""
        return str(self._together(lambda pipe: pipe.get(self._key("changes")))[0])

    def close(self) -> None:
        """See `Objects`."""
        if self._client is not None:
            self._client.close()

    # ---- the connection ---------------------------------------------------------------------------------

    def _together(self, ask: Any, all_of: int | None = None) -> list[Any]:
        """The answers to the commands that `ask` adds to a pipeline; commands after the first `all_of` may fail.

        Raises:
            StoreUnreachableError, StoreFullError, StoreError: no answer in time, no memory left, or refused.
        """

        def run() -> list[Any]:
            with self._opening:  # a second client, once garbage, would close connections that are in use
                if self._client is None:
                    self._client = self._open()
            with self._client.pipeline(transaction=False) as pipe:
                ask(pipe)
                answers: list[Any] = pipe.execute(raise_on_error=False)
            for answer in answers[:all_of]:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        try:
            return run()
        except self._no_answer as error:
            message = f"{self.place} does not answer: {error or type(error).__name__}"
            raise StoreUnreachableError(message) from error
        except self._full as error:
            raise StoreFullError(f"{self.place} has no memory left: {error}") from error
        except self._refused as error:
            raise StoreError(f"{self.place} refused: {error}") from error

    def _with_names(self, command: str, names: Iterable[BlockName]) -> None:
        digits = [name.hex() for name in names]
        if digits:
            self._together(lambda pipe: getattr(pipe, command)(self._key("pins"), *digits))

    def _key(self, what: str) -> str:
        return f"{self._prefix}:{what}"

    def _piece(self, name: BlockName, piece: str) -> str:
        return f"{self._prefix}:{{{name.hex()}}}:{piece}"


def _header(answer: bytes | int | None) -> Bytes | None:
    """What `look_up` gives for an answer to EXISTS or GET."""
    if isinstance(answer, int):
        return b"" if answer else None
    return answer


def _name(digits: bytes) -> BlockName:
    return BlockName(bytes.fromhex(digits.decode()))
