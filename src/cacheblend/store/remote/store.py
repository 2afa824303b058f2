"""A store on another machine, in an `Objects`. A place that does not answer counts as empty: `find` finds nothing and
reads are lost blocks, so requests are computed instead of failing, and for some seconds the place is not asked
again."""

import contextlib
import itertools
import logging
import math
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

import torch

from cacheblend.core.errors import BlockDamagedError, BlockLostError, StoreError, StoreUnreachableError
from cacheblend.core.load.budget import PAUSE_S
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, RecordMemory
from cacheblend.store.base import (
    LOGGER_NAME,
    Progress,
    StoreStats,
    check_block,
    check_layer,
    check_max_bytes,
    head_range,
)
from cacheblend.store.eviction import Expiry
from cacheblend.store.format.block_file import BlockHeader, check_heads, decode_headers, encode_block, header_of
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.remote.capacity import RemoteCapacity
from cacheblend.store.remote.objects import Objects, Range
from cacheblend.store.sealed import MANIFESTS, Bytes, SharedStore

_MAX_KNOWN = 65_536  # headers that are cached
T = TypeVar("T")
_ROUND_TRIPS = 8  # the shortest of the last ones counts: others were behind a reading, or long
logger = logging.getLogger(LOGGER_NAME)
warnings.filterwarnings("ignore", message="The given buffer is not writable")  # records are never written to


class RemoteStore(SharedStore):
    """Blocks on another machine, least recently used evicted first; headers are cached. `objects` moves the bytes, and
    is closed with the store. `max_bytes`: bound on what all writers store; None leaves eviction to the other side.
    `read_only`: damage is reported but not removed, and no block is marked as used. `ttl`: see `Expiry`."""

    def __init__(
        self, objects: Objects, max_bytes: int | None = None, *, read_only: bool = False, ttl: float | None = None
    ) -> None:
        self._objects, self._expiry = objects, Expiry(ttl)
        self._resume_at = -math.inf  # until then the place, which did not answer, is not asked
        super().__init__(objects, read_only, f"{objects.place} was opened read-only: open it without read_only")
        self._capacity: RemoteCapacity = RemoteCapacity(objects, max_bytes, self._drop, self._manifests, self.asking)
        self._known: OrderedDict[BlockName, BlockHeader] = OrderedDict()
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self._damaged = 0

    @property
    def tier_names(self) -> tuple[str, ...]:
        return (self._objects.tier,)

    @property
    def is_reachable(self) -> bool:
        return time.monotonic() >= self._resume_at

    def round_trip_s(self, tier: str) -> float:
        """As the last look-ups took, and readings of headers; 0: none yet."""
        with self._lock:
            return min(self._round_trips, default=0.0)

    @contextlib.contextmanager
    def _round_trip(self) -> Iterator[None]:
        """The context of a call that brings hardly any bytes."""
        began = time.perf_counter()
        with self.asking():
            yield
        with self._lock:
            self._round_trips.append(time.perf_counter() - began)

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """One round trip; with a time to live two, and more if pinned blocks have expired."""
        headers: dict[BlockName, BlockHeader] = {}
        try:
            headers = self._unless_expired(names, self._used_since)
        except StoreUnreachableError:
            pass  # `asking` has logged it
        except StoreError as error:
            logger.warning("%s", error)
        found = [replace(headers[name].entry, tier=self._objects.tier) if name in headers else None for name in names]
        self._finds.count(found)
        return found

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        """As `find`, but no header is read, so a damaged one counts."""
        there: dict[BlockName, Bytes] = {}

        def used_since(asked: Sequence[BlockName], since: float) -> dict[BlockName, Bytes]:
            with self.asking():
                data = self._objects.look_up(asked, since=since, marks=False)
            return {name: each for name, each in zip(asked, data, strict=True) if each is not None}

        with contextlib.suppress(StoreError):
            there = self._unless_expired(names, used_since)
        return [name in there for name in names]

    def _unless_expired(
        self, names: Sequence[BlockName], used_since: Callable[[Sequence[BlockName], float], dict[BlockName, T]]
    ) -> dict[BlockName, T]:
        """What `used_since` finds of the blocks that are held; an expired block is held only if it is pinned."""
        names, since = list(dict.fromkeys(names)), self._expiry.since(time.time())
        held = used_since(names, since) if names else {}
        gone = [name for name in names if name not in held]
        if since == -math.inf or not gone:
            return held
        try:
            with self.asking():
                pinned = self._objects.pinned().intersection(gone)
            return held | used_since(list(pinned), -math.inf) if pinned else held
        except StoreUnreachableError:
            pass  # `asking` has logged it
        except StoreError as error:
            logger.warning("%s", error)
        return held  # what was found without the pins stays found

    def _used_since(self, names: Sequence[BlockName], since: float) -> dict[BlockName, BlockHeader]:
        """Headers of the blocks that are held and were last used at `since` or later; marks them as used. One call."""
        known = self._cached(names)
        with self._round_trip():
            data = self._objects.look_up(names, set(names) - set(known), since, marks=not self.read_only)
        held = dict(zip(names, data, strict=True))
        learnt = self._learnt({name: header for name, header in held.items() if name not in known})
        return {name: header for name, header in (known | learnt).items() if held[name] is not None}

    def _cached(self, names: Sequence[BlockName]) -> dict[BlockName, BlockHeader]:
        with self._lock:
            return {name: self._known[name] for name in names if name in self._known}

    def _learnt(self, data: Mapping[BlockName, Bytes | None]) -> dict[BlockName, BlockHeader]:
        """The intact headers, cached from then on."""
        found = {name: self._decoded(name, part) for name, part in data.items() if part is not None}
        return {name: header for name, header in found.items() if isinstance(header, BlockHeader)}

    def _decoded(self, name: BlockName, data: Bytes) -> BlockHeader | BlockDamagedError:
        try:
            header = header_of(decode_headers(bytes(data), None), name)
        except DamagedError as error:
            return self._damage(name, str(error))
        with self._lock:
            self._known[name] = header
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return header

    def _forget(self, names: Sequence[BlockName]) -> None:
        with self._lock:
            for name in names:
                self._known.pop(name, None)

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """One round trip; records are in the memory that they were received in."""
        wanted = list(dict.fromkeys(names))
        cached = self._cached(wanted)
        try:
            found = self._records(wanted, layers, heads)
            suspect = [name for name in cached if isinstance(found[name], DamagedError)]
            if suspect:  # another process may have replaced the block since its header was read
                self._forget(suspect)
                found |= self._records(suspect, layers, heads)
        except StoreError as error:
            return [BlockLostError([name], str(error)) for name in names]
        given = {name: self._damage(name, str(p)) if isinstance(p, DamagedError) else p for name, p in found.items()}
        return [given[name] for name in names]

    def _records(
        self, names: Sequence[BlockName], layers: range, heads: slice | None
    ) -> dict[BlockName, list[torch.Tensor] | BlockLostError | DamagedError]:
        """Records of each block, or what is wrong with it; `names` are distinct. Of a block whose header is held
        without its records the rest is removed."""
        headers = self._cached(names)
        unknown = [name for name in names if name not in headers]
        if unknown:
            with self._round_trip():
                read = self._objects.look_up(unknown, set(unknown), marks=False)
            headers |= self._learnt(dict(zip(unknown, read, strict=True)))
        ranges = [_range(header, layer, heads) for header in headers.values() for layer in layers]
        with self.asking():
            data = iter(self._objects.records(ranges))
        found: dict[BlockName, list[torch.Tensor] | BlockLostError | DamagedError] = {}
        for at, (name, header) in enumerate(headers.items()):
            parts, asked = list(itertools.islice(data, len(layers))), ranges[at * len(layers) : (at + 1) * len(layers)]
            try:
                records = [_checked(header, r, p) for r, p in zip(asked, parts, strict=False) if p is not None]
            except DamagedError as error:
                found[name] = error
                continue
            if len(records) == len(layers):
                found[name] = records
            elif not self.read_only:
                with contextlib.suppress(StoreError):
                    self._drop([name])
        gone = [name for name in names if name not in found]
        self._forget(gone)
        for name in gone:
            reason = f"{name.hex()} is not in {self._objects.place} (never written, or evicted)"
            found[name] = BlockLostError([name], reason)
        return found

    def _damage(self, name: BlockName, reason: str) -> BlockDamagedError:
        """Reports and removes a damaged block."""
        removed = False
        if not self.read_only:
            with contextlib.suppress(StoreError):
                removed = self._drop([name])[0]
        self._forget([name])
        with self._lock:
            self._damaged += 1
        outcome = "removed" if removed else "could not be removed"
        logger.warning("damaged block %s in %s: %s; %s", name.hex(), self._objects.place, reason, outcome)
        return BlockDamagedError(name, reason, removed)

    def write(self, block: Block) -> bool:
        with self._counted():
            self.require_writable()
            check_block(block)
            if self._unless_expired([block.name], self._used_since):
                return False
            with self.asking():
                if self._expiry.is_due():
                    self._capacity.expire(self._expiry.since(time.time()))
            header, *records = encode_block(block)
            nbytes = len(header) + sum(len(record) for record in records)
            with self._capacity.reserved(nbytes, block.name, "block"):
                self._objects.put(block.name, header, records)  # no pause: a place too slow to write may be read
        return True

    def delete(self, name: BlockName) -> bool:
        self.require_writable()
        with self.asking():
            self._objects.unpin([name])
            return self._drop([name])[0]

    def _drop(self, names: Sequence[BlockName]) -> list[bool]:
        """Removes blocks; which of them were held. The caller is within `asking`."""
        self._forget(names)
        return self._objects.delete(names) if names else []

    def pin(self, names: Iterable[BlockName]) -> None:
        self.require_writable()
        with self.asking():
            self._objects.pin(names)

    def unpin(self, names: Iterable[BlockName]) -> None:
        self.require_writable()
        with self.asking():
            self._objects.unpin(names)

    def pinned(self) -> set[BlockName]:
        with self.asking():
            return self._objects.pinned()

    def stats(self) -> StoreStats:
        with self.asking():
            held, pinned, chunks = self._objects.held(), self._objects.pinned(), self._objects.sealed(MANIFESTS)
            small = sum(each.nbytes for each in chunks.values()) + self._objects.documents_bytes()
        nbytes = sum(block.nbytes for block in held) + small
        return self._stats(len(held), nbytes, len(chunks), sum(each.name in pinned for each in held), self._damaged)

    def _block_names(self) -> list[BlockName]:
        return [block.name for block in self._objects.held(tidy=not self.read_only)]

    def _layers_of(self, name: BlockName) -> int:
        self._forget([name])
        with self._round_trip():
            (data,) = self._objects.look_up([name], {name}, marks=False)
        header = None if data is None else self._decoded(name, data)
        if isinstance(header, BlockDamagedError):
            raise header
        return 0 if header is None else len(header.entry.layout.layers)

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        self.require_writable()
        check_max_bytes(max_bytes)
        with self.asking():
            return self._capacity.shrink(max_bytes, progress)

    def close(self) -> None:
        self._objects.close()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """A circuit breaker: after a call that was not answered, or too late, others raise `StoreUnreachableError` at
        once for `PAUSE_S`, so that requests wait for the place once, and not for every block."""
        left = self._resume_at - time.monotonic()
        if left > 0:
            raise StoreUnreachableError(f"{self._objects.place} did not answer; asked again in {left:.0f} s")
        try:
            yield
        except StoreUnreachableError as error:
            self._resume_at = max(self._resume_at, time.monotonic() + PAUSE_S)
            logger.warning("%s; requests are computed without it, and it is asked again in %.0f s", error, PAUSE_S)
            raise

    def reserved(self, nbytes: int, name: BlockName, what: str) -> AbstractContextManager[None]:
        return self._capacity.reserved(nbytes, name, what)


def _checked(header: BlockHeader, wanted: Range, data: Bytes) -> torch.Tensor:
    """The bytes as a tensor that shares their memory; `DamagedError` if they are not what the header says."""
    head_bytes = header.geometry.head_bytes[wanted.layer]
    if len(data) != wanted.stop - wanted.start:
        raise DamagedError(f"layer {wanted.layer} has {len(data)} bytes, not {wanted.stop - wanted.start}")
    check_heads(header, wanted.layer, wanted.start // head_bytes, memoryview(data))
    dtype, shape = header.geometry.dtype, header.geometry.shapes[wanted.layer]
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(-1, *shape[1:])


def _range(header: BlockHeader, layer: int, heads: slice | None) -> Range:
    geometry = header.geometry
    shape = check_layer(geometry.layout, layer)
    start, stop = head_range(heads, shape.kv_heads)
    size = geometry.head_bytes[layer]
    offset = header.data_at + geometry.offsets[layer]
    return Range(header.name, layer, offset, start * size, stop * size, shape.kv_heads * size)
