"""Headers and records of the blocks in an `Objects`: read, checked, and removed where they are damaged.

Headers are cached. Knows the bytes of blocks; does not know the bound, pins or manifests.
"""

import contextlib
import itertools
import logging
import math
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from cacheblend.core.errors import BlockDamagedError, BlockLostError, StoreError
from cacheblend.core.load.breaker import CircuitBreaker
from cacheblend.core.names import BlockName
from cacheblend.store.base import LOGGER_NAME, Damage, check_layer, head_range
from cacheblend.store.format.block_file import BlockHeader, check_heads, decode_header
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.remote.objects import Bytes, Objects, Range

_MAX_KNOWN = 65_536  # headers that are cached
_ROUND_TRIPS = 8  # the shortest of the last ones counts: others were behind a reading, or long
logger = logging.getLogger(LOGGER_NAME)
warnings.filterwarnings("ignore", message="The given buffer is not writable")  # records are never written to


class _Gone(NamedTuple):
    """A record that is missing, though its block's header may be held."""

    header_held: bool


class RemoteBlocks:
    """The blocks of one place; safe to call from several threads.

    Args:
        objects: the place.
        breaker: around every call to it.
        read_only: damaged blocks are reported but not removed.

    Attributes:
        damaged: blocks found damaged so far.
    """

    def __init__(self, objects: Objects, breaker: CircuitBreaker, read_only: bool) -> None:
        self._objects, self._breaker, self._read_only = objects, breaker, read_only
        self._known: OrderedDict[BlockName, BlockHeader] = OrderedDict()
        self._lock = threading.Lock()
        self.damaged = 0
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)

    @property
    def round_trip_s(self) -> float:
        """Seconds that the place takes to answer at least; 0: it has not been asked yet."""
        with self._lock:
            return min(self._round_trips, default=0.0)

    @contextlib.contextmanager
    def _round_trip(self) -> Iterator[None]:
        """The context of a call that brings hardly any bytes."""
        began = time.perf_counter()
        with self._breaker.asking():
            yield
        with self._lock:
            self._round_trips.append(time.perf_counter() - began)

    def headers(self, names: Sequence[BlockName], found: list[Damage] | None = None) -> dict[BlockName, BlockHeader]:
        """Headers of the blocks that are held, from the cache or in one call; damage is appended to `found`.

        Raises:
            StoreError: the place cannot be asked.
        """
        known = self._cached(names)
        missing = list(dict.fromkeys(name for name in names if name not in known))
        if missing:
            with self._round_trip():
                data = self._objects.headers(missing)
            known |= self._learnt(dict(zip(missing, data, strict=True)), found)
        return known

    def look_up(self, names: Sequence[BlockName], since: float = -math.inf) -> dict[BlockName, BlockHeader]:
        """Headers of the blocks that are held and were last used at `since` or later; marks them as used. One call.

        Raises:
            StoreError: the place cannot be asked.
        """
        names = list(dict.fromkeys(names))
        known, data = self._cached(names), list[Bytes | None]()
        if names:
            with self._round_trip():
                data = self._objects.look_up(names, set(names) - set(known), since)
        held = dict(zip(names, data, strict=True))
        learnt = self._learnt({name: header for name, header in held.items() if name not in known})
        return {name: header for name, header in (known | learnt).items() if held[name] is not None}

    def _cached(self, names: Sequence[BlockName]) -> dict[BlockName, BlockHeader]:
        with self._lock:
            return {name: self._known[name] for name in names if name in self._known}

    def _learnt(
        self, data: Mapping[BlockName, Bytes | None], found: list[Damage] | None = None
    ) -> dict[BlockName, BlockHeader]:
        """Decodes headers and caches them; damage is appended to `found`."""
        decoded = {name: None if part is None else self._decoded(name, part, found) for name, part in data.items()}
        learnt = {name: header for name, header in decoded.items() if header is not None}
        with self._lock:
            self._known.update(learnt)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return learnt

    def read(
        self, names: Sequence[BlockName], layers: range, heads: slice | None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """One call for all records."""
        wanted = list(dict.fromkeys(names))
        with self._lock:
            cached = [name for name in wanted if name in self._known]
        try:
            found = self._records(wanted, layers, heads)
            suspect = [name for name in cached if isinstance(found[name], DamagedError)]
            if suspect:  # another process may have replaced the block since its header was read
                with self._lock:
                    for name in suspect:
                        self._known.pop(name, None)
                found |= self._records(suspect, layers, heads)
        except StoreError as error:
            return [BlockLostError([name], str(error)) for name in names]
        given = {name: part if isinstance(part, list) else self._lost(name, part) for name, part in found.items()}
        return [given[name] for name in names]

    def verify(self, name: BlockName, found: list[Damage]) -> None:
        """Reads a whole block and appends its damage to `found`; a block that is gone has none."""
        with self._lock:
            self._known.pop(name, None)
        header = self.headers([name], found).get(name)
        for layer in range(len(header.entry.layout.layers) if header else 0):
            (record,) = self.read([name], range(layer, layer + 1), None)
            if isinstance(record, BlockDamagedError):
                found.append(Damage("block", name, record.reason, record.removed))
            if isinstance(record, BlockLostError):
                return

    def drop(self, names: Sequence[BlockName]) -> list[bool]:
        """Removes blocks; which of them were held. Not through the breaker: the caller's call is.

        Raises:
            StoreError: the place cannot be asked, or refuses.
        """
        with self._lock:
            for name in names:
                self._known.pop(name, None)
        return self._objects.delete(names) if names else []

    def _decoded(self, name: BlockName, header: Bytes, found: list[Damage] | None) -> BlockHeader | None:
        try:
            return decode_header(bytes(header), None, name)
        except DamagedError as error:
            damaged = self._damage(name, str(error))
        if found is not None:
            found.append(Damage("block", name, damaged.reason, damaged.removed))
        return None

    def _records(
        self, names: Sequence[BlockName], layers: range, heads: slice | None
    ) -> dict[BlockName, list[torch.Tensor] | DamagedError | _Gone]:
        """Records of each block, or what is wrong with it."""
        headers = self.headers(names)
        ranges = [_range(header, layer, heads) for header in headers.values() for layer in layers]
        with self._breaker.asking():
            data = iter(self._objects.records(ranges))
        found: dict[BlockName, list[torch.Tensor] | DamagedError | _Gone] = {
            name: _Gone(header_held=False) for name in names
        }
        for at, (name, header) in enumerate(headers.items()):
            parts, asked = list(itertools.islice(data, len(layers))), ranges[at * len(layers) : (at + 1) * len(layers)]
            try:
                records = [None if p is None else _checked(header, r, p) for r, p in zip(asked, parts, strict=False)]
            except DamagedError as error:
                found[name] = error
                continue
            held = [record for record in records if record is not None]
            found[name] = held if len(held) == len(layers) else _Gone(header_held=True)
        return found

    def _lost(self, name: BlockName, found: DamagedError | _Gone) -> BlockLostError:
        if isinstance(found, DamagedError):
            return self._damage(name, str(found))
        with self._lock:
            self._known.pop(name, None)
        if found.header_held and not self._read_only:  # the rest of the block is useless
            with contextlib.suppress(StoreError):
                self.drop([name])
        return BlockLostError([name], f"{name.hex()} is not in {self._objects.place} (never written, or evicted)")

    def _damage(self, name: BlockName, reason: str) -> BlockDamagedError:
        """Reports and removes a damaged block."""
        removed = False
        if not self._read_only:
            with contextlib.suppress(StoreError):
                removed = self.drop([name])[0]
        with self._lock:
            self.damaged += 1
            self._known.pop(name, None)
        outcome = "removed" if removed else "could not be removed"
        logger.warning("damaged block %s in %s: %s; %s", name.hex(), self._objects.place, reason, outcome)
        return BlockDamagedError(name, reason, removed)


def _checked(header: BlockHeader, wanted: Range, data: Bytes) -> torch.Tensor:
    """The bytes as a tensor that shares their memory; `DamagedError` if they are not what the header says."""
    head_bytes = header.geometry.head_bytes[wanted.layer]
    if len(data) != wanted.stop - wanted.start:
        raise DamagedError(f"layer {wanted.layer} has {len(data)} bytes, not {wanted.stop - wanted.start}")
    check_heads(header, wanted.layer, wanted.start // head_bytes, memoryview(data))
    layout = header.geometry.layout
    rest = layout.record_shape(wanted.layer, len(header.entry.token_ids))[1:]
    return torch.frombuffer(data, dtype=torch.uint8).view(layout.record_dtype).view(-1, *rest)


def _range(header: BlockHeader, layer: int, heads: slice | None) -> Range:
    geometry = header.geometry
    shape = check_layer(geometry.layout, layer)
    start, stop = head_range(heads, shape.kv_heads)
    size = geometry.head_bytes[layer]
    offset = header.data_at + geometry.offsets[layer]
    return Range(header.name, layer, offset, start * size, stop * size, shape.kv_heads * size)
