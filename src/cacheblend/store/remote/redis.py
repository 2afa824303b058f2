"""Blocks in Redis or Valkey: one value for a block's header and one per layer, so that a layer is read by one GET.

    {prefix}:{<name>}:h      header               {prefix}:{<name>}:<layer>    record
    {prefix}:used            name -> when         {prefix}:sizes               name -> "bytes layers"
    {prefix}:manifests       name -> manifest     {prefix}:marks               name -> "when-it-was-put bytes"
    {prefix}:<kind>          name -> bytes        {prefix}:<kind>:marks       likewise, of documents' records
    {prefix}:kinds           of these             {prefix}:<kind>:lock        whose holder decides what is referred to
    {prefix}:pins            names                {prefix}:changes             when manifests last changed

Names are written as hexadecimal digits; the braces keep a block's values on one node of a cluster. They are written by
one command, so there are all of a writer's values, or none. A mark of an older version has no bytes, and counts none.
"""

import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cacheblend.core.errors import StoreError, StoreFullError, StoreUnreachableError
from cacheblend.core.names import BlockName
from cacheblend.store.base import LOGGER_NAME
from cacheblend.store.remote.objects import HeldBlock, Objects, Range
from cacheblend.store.sealed import MANIFESTS, Bytes, Sealed

LOCK_S = 60  # after which a lock is let go, in case its holder has died
# One step: between two the lock may expire, and be another's.
_RELEASE = 'if redis.call("get", KEYS[1]) == ARGV[1] then redis.call("del", KEYS[1]) end'
_MAX_COMMANDS = 10_000  # per pipeline
_PUBLISHED_S = 60.0  # a block is listed up to this long before it can be found
_MOST_LAYERS = 512  # of a block whose number of layers is not known
_DIGITS = re.compile(rb"(?:[0-9a-f]{2})+")
_TICK_S = 1e-6  # time between blocks of one call, so that the first counts as used last
logger = logging.getLogger(LOGGER_NAME)


class RedisObjects(Objects):
    """See `Objects`; ``redis://``, ``rediss://`` or ``valkey://`` host:port/database. The connection is opened on first
    use; it and each answer may take `timeout` seconds. `prefix`: of all keys; `cluster`: the server is a node of one.
    Needs redis-py."""

    tier = "redis"

    def __init__(self, url: str, *, prefix: str = "cacheblend", timeout: float = 2.0, cluster: bool = False) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisClusterException
        from redis.retry import Retry

        parts = urlsplit(url)
        scheme = parts.scheme.replace("valkey", "redis")
        self.place = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        self._prefix = prefix
        # One retry, for a connection that was closed while idle; a cluster's client repeats commands by itself.
        options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0 if cluster else 1)}
        options |= dict.fromkeys(("socket_timeout", "socket_connect_timeout"), timeout)
        self._demoted = redis.ReadOnlyError
        kind = redis.RedisCluster if cluster else redis.Redis
        self._no_answer = (redis.ConnectionError, redis.TimeoutError, RedisClusterException, OSError)
        self._full, self._refused = redis.OutOfMemoryError, redis.RedisError
        self._open = partial(kind.from_url, urlunsplit((scheme, *parts[1:3], "", "")), **options)
        self._client: Any = None  # opened on first use: a cluster's client connects at once
        self._opening = threading.Lock()

    def _together(self, ask: Any, all_of: int | None = None) -> list[Any]:
        """The answers to the commands that `ask` adds to a pipeline; commands after the first `all_of` may fail."""
        try:
            with self._opening:  # a second client, once garbage, would close connections that are in use
                if self._client is None:
                    self._client = self._open()
            answers = self._asked(ask)
            pool = getattr(self._client, "connection_pool", None)  # a cluster has none: its nodes say where else to ask
            if pool is not None and any(isinstance(answer, self._demoted) for answer in answers[:all_of]):
                pool.disconnect(inuse_connections=False)  # its name may be another node's by now
                answers = self._asked(ask)
            for answer in answers[:all_of]:
                if isinstance(answer, Exception):
                    raise answer
            return answers
        except self._no_answer as error:
            message = f"{self.place} does not answer: {error or type(error).__name__}"
            raise StoreUnreachableError(message) from error
        except self._full as error:
            raise StoreFullError(f"{self.place} has no memory left: {error}") from error
        except self._refused as error:
            raise StoreError(f"{self.place} refused: {error}") from error

    def _asked(self, ask: Any) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            ask(pipe)
            return list(pipe.execute(raise_on_error=False))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def look_up(
        self,
        names: Sequence[BlockName],
        unknown: AbstractSet[BlockName] = frozenset(),
        since: float = -math.inf,
        *,
        marks: bool = True,
    ) -> list[Bytes | None]:
        """One round trip; two with `since`, as only then some blocks must not be marked. A server without memory left
        does not record the use, but still answers."""
        now, expires = time.time(), since > -math.inf
        if not names:
            return []

        def ask(pipe: Any) -> None:
            for name in names:
                (pipe.get if name in unknown else pipe.exists)(self._piece(name, "h"))
            if expires:
                pipe.zmscore(self._key("used"), [name.hex() for name in names])
            elif marks:
                mark(pipe, names)

        def mark(pipe: Any, used: Sequence[BlockName]) -> None:
            times = {name.hex(): now - at * _TICK_S for at, name in enumerate(dict.fromkeys(used))}
            pipe.zadd(self._key("used"), times, xx=True)

        answers = self._together(ask, all_of=len(names) + expires)
        # What EXISTS says is a number, what GET gives is the header.
        found = [(b"" if each else None) if isinstance(each, int) else each for each in answers[: len(names)]]
        if expires:
            fresh = [when is not None and when >= since for when in answers[-1]]
            found = [header if is_fresh else None for header, is_fresh in zip(found, fresh, strict=True)]
            used = [name for name, is_fresh in zip(names, fresh, strict=True) if is_fresh]
            if used and marks:
                self._together(lambda pipe: mark(pipe, used), all_of=0)
        return found

    def records(self, ranges: Sequence[Range]) -> list[Bytes | None]:
        """An empty value means that the record is gone: no record has 0 bytes."""

        def ask(pipe: Any) -> None:
            for each in ranges:
                key = self._piece(each.name, str(each.layer))
                if (each.start, each.stop) == (0, each.size):
                    pipe.get(key)
                else:
                    pipe.getrange(key, each.start, each.stop - 1)

        return [data or None for data in self._together(ask)]

    def put(self, name: BlockName, header: Bytes, records: Sequence[Bytes]) -> None:
        """The first of two writers at once wins, since readers may have its header already."""
        size = len(header) + sum(len(record) for record in records)
        pieces = {"h": header, **{str(layer): record for layer, record in enumerate(records)}}
        values = [each for piece, value in pieces.items() for each in (self._piece(name, piece), bytes(value))]

        def put(pipe: Any) -> None:  # listed first: what is listed and is not there, `held` finds and removes
            pipe.hset(self._key("sizes"), name.hex(), f"{size} {len(records)}")
            pipe.zadd(self._key("used"), {name.hex(): time.time()})
            pipe.execute_command("MSETNX", *values)

        if not self._together(put)[-1] and not self.exist([name])[0]:  # layers whose header the server evicted
            self._together(lambda pipe: pipe.execute_command("MSET", *values))

    def delete(self, names: Sequence[BlockName]) -> list[bool]:
        digits = [name.hex() for name in names]
        sizes = self._together(lambda pipe: pipe.hmget(self._key("sizes"), digits))[0]

        def remove(pipe: Any) -> None:
            for name in names:
                pipe.unlink(self._piece(name, "h"))
            for name, size in zip(names, sizes, strict=True):
                for layer in range(0 if size is None else (_size(size) or (0, _MOST_LAYERS))[1]):
                    pipe.unlink(self._piece(name, str(layer)))
            pipe.hdel(self._key("sizes"), *digits)
            pipe.zrem(self._key("used"), *digits)

        return [bool(was) for was in self._together(remove)[: len(names)]]

    def held(self, *, tidy: bool = False) -> list[HeldBlock]:
        """Checks that each block still exists, as the server may have evicted it by itself."""
        sizes, used = self._together(
            lambda pipe: (pipe.hgetall(self._key("sizes")), pipe.zrange(self._key("used"), 0, -1, withscores=True))
        )
        when = dict(used)
        blocks = [
            HeldBlock(name, self._bytes_of(name, sizes[digits], tidy=tidy), float(when.get(digits, 0.0)))
            for digits, name in _names(sizes).items()
        ]
        there = self.exist([block.name for block in blocks])
        published = time.time() - _PUBLISHED_S
        gone = [block.name for block, held in zip(blocks, there, strict=True) if not held and block.used < published]
        if gone and tidy:
            self.delete(gone)
        return [block for block, held in zip(blocks, there, strict=True) if held]

    def _bytes_of(self, name: BlockName, written: bytes, *, tidy: bool) -> int:
        """A block's bytes, measured where the list of sizes has something else than two numbers; `tidy` mends it."""
        size = _size(written)
        if size is not None:
            return size[0]
        keys = [self._piece(name, part) for part in ("h", *map(str, range(_MOST_LAYERS)))]
        lengths = self._together(lambda pipe: [pipe.strlen(key) for key in keys])
        layers = sum(length > 0 for length in lengths[1:])
        logger.warning("the size of block %s in %s is damaged: %r; it was measured", name.hex(), self.place, written)
        if tidy:
            self._together(lambda pipe: pipe.hset(self._key("sizes"), name.hex(), f"{sum(lengths)} {layers}"))
        return int(sum(lengths))

    def exist(self, names: Sequence[BlockName]) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(names), _MAX_COMMANDS):
            part = names[start : start + _MAX_COMMANDS]
            asked = self._together(lambda pipe, part=part: [pipe.exists(self._piece(name, "h")) for name in part])
            found += [bool(there) for there in asked]
        return found

    def pin(self, names: Iterable[BlockName]) -> None:
        if digits := [name.hex() for name in names]:
            self._together(lambda pipe: pipe.sadd(self._key("pins"), *digits))

    def unpin(self, names: Iterable[BlockName]) -> None:
        if digits := [name.hex() for name in names]:
            self._together(lambda pipe: pipe.srem(self._key("pins"), *digits))

    def pinned(self) -> set[BlockName]:
        return set(_names(self._together(lambda pipe: pipe.smembers(self._key("pins")))[0]).values())

    def put_sealed(self, kind: str, name: BlockName, data: Bytes) -> None:
        def put(pipe: Any) -> None:
            pipe.hset(self._key(kind), name.hex(), bytes(data))
            pipe.hset(self._marks(kind), name.hex(), f"{time.time_ns()} {len(data)}")
            self._note_change(pipe, kind)

        self._together(put)

    def sealed(self, kind: str) -> Mapping[BlockName, Sealed]:
        return self._sealed([kind])[0]

    def documents_bytes(self) -> int:
        kinds = self._all_kinds()
        return sum(each.nbytes for listed in self._sealed(kinds) for each in listed.values()) if kinds else 0

    def _sealed(self, kinds: Sequence[str]) -> list[dict[BlockName, Sealed]]:
        """What there is of each kind. A mark that something else wrote counts no bytes."""
        marks = self._together(lambda pipe: [pipe.hgetall(self._marks(kind)) for kind in kinds])
        return [
            {
                name: Sealed(each[digits].decode(errors="replace"), (_size(each[digits]) or (0, 0))[1])
                for digits, name in _names(each).items()
            }
            for each in marks
        ]

    def read_sealed(self, kind: str, names: Sequence[BlockName]) -> list[Bytes | None]:
        if not names:
            return []
        digits = [name.hex() for name in names]
        found: list[Bytes | None] = self._together(lambda pipe: pipe.hmget(self._key(kind), digits))[0]
        return found

    def has_sealed(self, kind: str, name: BlockName) -> bool:
        return bool(self._together(lambda pipe: pipe.hexists(self._marks(kind), name.hex()))[0])

    def delete_sealed(self, kind: str, name: BlockName) -> bool:
        def delete(pipe: Any) -> None:
            pipe.hdel(self._marks(kind), name.hex())
            pipe.hdel(self._key(kind), name.hex())
            self._note_change(pipe, kind)

        return bool(self._together(delete)[0])

    def kinds(self) -> list[str]:
        kinds = self._all_kinds()
        counts = self._together(lambda pipe: [pipe.hlen(self._marks(kind)) for kind in kinds]) if kinds else []
        return sorted(kind for kind, count in zip(kinds, counts, strict=True) if count)

    def _all_kinds(self) -> list[str]:
        return [kind.decode() for kind in self._together(lambda pipe: pipe.smembers(self._key("kinds")))[0]]

    @contextmanager
    def lock(self, kind: str) -> Iterator[None]:
        key, token = self._key(f"{kind}:lock"), secrets.token_hex(8).encode()
        while not self._together(lambda pipe: pipe.set(key, token, nx=True, ex=LOCK_S))[0]:
            time.sleep(0.02)
        try:
            yield
        finally:
            try:
                self._together(lambda pipe: pipe.eval(_RELEASE, 1, key, token))
            except StoreError:  # this user may run no scripts
                if self._together(lambda pipe: pipe.get(key))[0] == token:
                    self._together(lambda pipe: pipe.delete(key))

    def _note_change(self, pipe: Any, kind: str) -> None:
        if kind == MANIFESTS:
            pipe.set(self._key("changes"), time.time_ns())
        else:
            pipe.sadd(self._key("kinds"), kind)

    def _marks(self, kind: str) -> str:
        return self._key("marks" if kind == MANIFESTS else f"{kind}:marks")

    def listing_stamp(self) -> str | None:
        return str(self._together(lambda pipe: pipe.get(self._key("changes")))[0])

    def _key(self, what: str) -> str:
        return f"{self._prefix}:{what}"

    def _piece(self, name: BlockName, piece: str) -> str:
        return f"{self._prefix}:{{{name.hex()}}}:{piece}"


def _names(found: Iterable[bytes]) -> dict[bytes, BlockName]:
    """By what the server has as a name; what is none is left out."""
    return {digits: BlockName(bytes.fromhex(digits.decode())) for digits in found if _DIGITS.fullmatch(digits)}


def _size(value: bytes | None) -> tuple[int, int] | None:
    """Two numbers: (bytes, layers) of a block, (time, bytes) of a mark; None: something else wrote it."""
    parts = (value or b"").split()
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(bytes.isdigit, parts)) else None
