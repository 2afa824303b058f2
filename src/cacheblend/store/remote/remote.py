"""A store on another machine: blocks, manifests and pins kept by an `Objects`, checked here.

What does not answer is as good as empty: `find` finds nothing, a `read` is a lost block, so requests are computed and
not failed, and for some seconds nobody waits for it again.
"""

import contextlib
import logging
import math
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from cacheblend.core.errors import (
    BlockDamagedError,
    BlockLostError,
    InvalidInputError,
    StoreError,
    StoreReadOnlyError,
    StoreUnreachableError,
)
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, ChunkManifest
from cacheblend.store.base import (
    LOGGER_NAME,
    Damage,
    KVStore,
    Progress,
    StoreStats,
    check_block,
    check_layer,
    check_manifest,
    head_range,
)
from cacheblend.store.disk.manifests import decode_manifest, encode_manifest
from cacheblend.store.disk.record_file import BlockHeader, DamagedError, check_heads, decode_header, encode_block
from cacheblend.store.expiry import Expiry
from cacheblend.store.remote.capacity import RemoteCapacity
from cacheblend.store.remote.objects import Bytes, Objects, Range

PAUSE_S = 5.0
"""For so long nobody asks a place that did not answer."""

_KNOWN = 65_536  # headers that are remembered
logger = logging.getLogger(LOGGER_NAME)
warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to a record
T = TypeVar("T")


class _Gone(NamedTuple):
    """A record that is not there, though its block's header may be."""

    header_held: bool


class RemoteStore(KVStore):
    """Blocks elsewhere, least recently used evicted first.

    Args:
        objects: where.
        max_bytes: bound on the blocks of all who write there; None leaves it to the other side.
        read_only: never write.
        ttl: seconds without use behind which an unpinned block is gone; None: for ever.
    """

    def __init__(
        self, objects: Objects, max_bytes: int | None = None, *, read_only: bool = False, ttl: float | None = None
    ) -> None:
        self._objects, self.read_only = objects, read_only
        self._expiry = Expiry(ttl)
        self._room = RemoteCapacity(objects, max_bytes, self._drop)
        self._known: OrderedDict[BlockName, BlockHeader] = OrderedDict()
        self._manifests: dict[BlockName, tuple[str, ChunkManifest]] = {}
        self._lock = threading.Lock()
        self._resume_at = 0.0
        self._hits = self._misses = self._damaged = self._write_failures = 0

    # ---- blocks -----------------------------------------------------------------------------------------

    @property
    def is_reachable(self) -> bool:
        """See `KVStore.is_reachable`."""
        return time.monotonic() >= self._resume_at

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """See `KVStore.find`. One round trip for known blocks, two for others."""
        headers: list[BlockHeader | None] = [None] * len(names)
        try:
            with self._answering():
                held = self._used(names)
            headers = self._headers([name for name, there in zip(names, held, strict=True) if there], names)
        except StoreUnreachableError:
            pass  # said already
        except StoreError as error:
            logger.warning("%s", error)
        found = sum(header is not None for header in headers)
        with self._lock:
            self._hits += found
            self._misses += len(headers) - found
        return [None if header is None else self._entry(header) for header in headers]

    def read(self, name: BlockName, layer: int, heads: slice | None = None) -> torch.Tensor:
        """See `KVStore.read`."""
        (record,) = self.read_many([name], layer, heads)
        if isinstance(record, BlockLostError):
            raise record
        return record

    def read_many(
        self, names: Sequence[BlockName], layer: int, heads: slice | None = None
    ) -> list[torch.Tensor | BlockLostError]:
        """See `KVStore.read_many`. One round trip."""
        wanted = list(dict.fromkeys(names))
        with self._lock:
            remembered = [name for name in wanted if name in self._known]
        try:
            found = self._records(wanted, layer, heads)
            suspect = [name for name in remembered if isinstance(found[name], DamagedError)]
            if suspect:  # somebody else may have written it anew since its header was read
                with self._lock:
                    for name in suspect:
                        self._known.pop(name, None)
                found |= self._records(suspect, layer, heads)
        except StoreError as error:
            return [BlockLostError([name], str(error)) for name in names]
        given = {
            name: part if isinstance(part, torch.Tensor) else self._lost(name, part) for name, part in found.items()
        }
        return [given[name] for name in names]

    def write(self, block: Block) -> bool:
        """See `KVStore.write`."""
        self._require_writable()
        check_block(block)
        with self._counting_failures():
            with self._answering():
                if self._used([block.name])[0]:
                    return False
                now = time.time()
                if self._expiry.is_due(now):
                    self._room.expire(self._expiry.since(now))
            header, *records = encode_block(block)
            with self._room.reserved(len(header) + sum(len(record) for record in records), block.name, self._answering):
                self._objects.put(block.name, header, records)  # one that is too slow to write may be read all the same
        return True

    def _used(self, names: Sequence[BlockName]) -> list[bool]:
        """Which are held; an expired one is, if it is pinned."""
        since = self._expiry.since(time.time())
        held = self._objects.use(names, since)
        gone = [name for name, there in zip(names, held, strict=True) if not there]
        if since == -math.inf or not gone or not (pinned := self._objects.pinned().intersection(gone)):
            return held
        kept = dict(zip(pinned, self._objects.use(list(pinned)), strict=True))
        return [there or kept.get(name, False) for name, there in zip(names, held, strict=True)]

    def delete(self, name: BlockName) -> bool:
        """See `KVStore.delete`."""
        self._require_writable()
        with self._answering():
            self._objects.unpin([name])
            return self._drop([name])[0]

    # ---- pins and manifests -----------------------------------------------------------------------------

    def pin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.pin`."""
        self._require_writable()
        with self._answering():
            self._objects.pin(names)

    def unpin(self, names: Iterable[BlockName]) -> None:
        """See `KVStore.unpin`."""
        self._require_writable()
        with self._answering():
            self._objects.unpin(names)

    def pinned(self) -> set[BlockName]:
        """See `KVStore.pinned`."""
        with self._answering():
            return self._objects.pinned()

    def put_manifest(self, manifest: ChunkManifest) -> None:
        """See `KVStore.put_manifest`."""
        self._require_writable()
        check_manifest(manifest)
        with self._answering():
            self._objects.put_manifest(manifest.chunk_id, encode_manifest(manifest))

    def manifests(self) -> list[ChunkManifest]:
        """See `KVStore.manifests`. Those that did not change since the last call are not read again."""
        return [manifest for _, manifest in sorted(self._listed(self._manifests, []).items())]

    def listing_stamp(self) -> Hashable | None:
        """See `KVStore.listing_stamp`."""
        with self._answering():
            return self._objects.listing_stamp()

    def has_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.has_manifest`."""
        with self._answering():
            return self._objects.has_manifest(chunk_id)

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        """See `KVStore.delete_manifest`."""
        self._require_writable()
        with self._answering():
            return self._objects.delete_manifest(chunk_id)

    # ---- the whole --------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """See `KVStore.stats`."""
        with self._answering():
            held, pinned, chunks = self._objects.held(), self._objects.pinned(), len(self._objects.manifests())
        return StoreStats(
            tier=self._objects.tier,
            blocks=len(held),
            bytes=sum(block.nbytes for block in held),
            max_bytes=self._room.max_bytes,
            chunks=chunks,
            pinned=sum(block.name in pinned for block in held),
            hits=self._hits,
            misses=self._misses,
            evictions=self._room.evictions,
            damaged=self._damaged,
            write_failures=self._write_failures,
        )

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """See `KVStore.verify`. Blocks that vanish meanwhile are not damage."""
        with self._answering():
            names = [block.name for block in self._objects.held()]
        found: list[Damage] = []
        for done, name in enumerate(names, start=1):
            with self._lock:
                self._known.pop(name, None)
            try:
                (header,) = self._headers([name], [name], found)
                for layer in range(len(header.entry.layout.layers) if header else 0):
                    self.read(name, layer)
            except BlockDamagedError as error:
                found.append(Damage("block", name, error.reason, error.removed))
            except BlockLostError:
                pass
            if progress is not None:
                progress(done, len(names))
        self._listed({}, found)
        return found

    def prune(self, max_bytes: int) -> int:
        """See `KVStore.prune`."""
        self._require_writable()
        if max_bytes < 0:
            raise InvalidInputError(f"max_bytes must be 0 or more, got {max_bytes}")
        with self._answering():
            freed = self._room.shrink(max_bytes)
            held = {block.name for block in self._objects.held(tidy=True)}
            for manifest in self.manifests():
                if held.isdisjoint(manifest.block_names):
                    self._objects.delete_manifest(manifest.chunk_id)
        return freed

    def flush(self) -> None:
        """Nothing to do: `write` returns when the block is there."""

    def close(self) -> None:
        """See `KVStore.close`."""
        self._objects.close()

    # ---- the other side ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Around every call: a place that did not answer is left alone for a while.

        Raises:
            StoreUnreachableError: it does not answer, or did not a moment ago.
        """
        left = self._resume_at - time.monotonic()
        if left > 0:
            raise StoreUnreachableError(f"{self._objects.place} did not answer; asked again in {left:.0f} s")
        try:
            yield
        except StoreUnreachableError as error:
            self._resume_at = time.monotonic() + PAUSE_S
            logger.warning("%s; requests are computed without it, and it is asked again in %.0f s", error, PAUSE_S)
            raise

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            with self._lock:
                self._write_failures += 1
            raise

    def _require_writable(self) -> None:
        if self.read_only:
            raise StoreReadOnlyError(f"{self._objects.place} was opened to be read only")

    # ---- headers and records ----------------------------------------------------------------------------

    def _headers(
        self, names: Sequence[BlockName], of: Sequence[BlockName], found: list[Damage] | None = None
    ) -> list[BlockHeader | None]:
        """Headers of `names`, in the order of `of`, None for all others; read and checked once."""
        with self._lock:
            known = {name: self._known[name] for name in names if name in self._known}
        missing = list(dict.fromkeys(name for name in names if name not in known))
        if missing:
            with self._answering():
                data = self._objects.headers(missing)
            for name, header in zip(missing, data, strict=True):
                decoded = None if header is None else self._decoded(name, header, found)
                if decoded is not None:
                    known[name] = decoded
            with self._lock:
                self._known.update(known)
                while len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
        return [known.get(name) for name in of]

    def _decoded(self, name: BlockName, header: Bytes, found: list[Damage] | None) -> BlockHeader | None:
        try:
            return decode_header(bytes(header), None, name)
        except DamagedError as error:
            damaged = self._damage(name, str(error))
        if found is not None:
            found.append(Damage("block", name, damaged.reason, damaged.removed))
        return None

    def _entry(self, header: BlockHeader) -> BlockEntry:
        return replace(header.entry, tier=self._objects.tier)

    def _records(
        self, names: Sequence[BlockName], layer: int, heads: slice | None
    ) -> dict[BlockName, torch.Tensor | DamagedError | _Gone]:
        """What is there of a layer, each block by itself."""
        headers = self._headers(names, names)
        ranges = [None if header is None else _range(header, layer, heads) for header in headers]
        with self._answering():
            parts = iter(self._objects.records([each for each in ranges if each is not None]))
        found: dict[BlockName, torch.Tensor | DamagedError | _Gone] = {}
        for name, header, wanted in zip(names, headers, ranges, strict=True):
            data = None if wanted is None else next(parts)
            if header is None or wanted is None or data is None:
                found[name] = _Gone(header_held=header is not None)
                continue
            try:
                found[name] = _checked(header, wanted, data)
            except DamagedError as error:
                found[name] = error
        return found

    def _lost(self, name: BlockName, found: DamagedError | _Gone) -> BlockLostError:
        if isinstance(found, DamagedError):
            return self._damage(name, str(found))
        self._forget(name, held=found.header_held)
        return BlockLostError([name], f"{name.hex()} is not in {self._objects.place} (never written, or evicted)")

    def _forget(self, name: BlockName, *, held: bool) -> None:
        """A block that is gone, or of which a piece is, which makes the rest of it useless."""
        with self._lock:
            self._known.pop(name, None)
        if held and not self.read_only:
            with contextlib.suppress(StoreError):
                self._drop([name])

    def _damage(self, name: BlockName, reason: str) -> BlockDamagedError:
        """Reports and removes a damaged block."""
        removed = False
        if not self.read_only:
            try:
                removed = self._drop([name])[0]
            except StoreError:
                removed = False
        with self._lock:
            self._damaged += 1
            self._known.pop(name, None)
        how = "removed" if removed else "could not be removed"
        logger.warning("damaged block %s in %s: %s; %s", name.hex(), self._objects.place, reason, how)
        return BlockDamagedError(name, reason, removed)

    def _listed(
        self, known: dict[BlockName, tuple[str, ChunkManifest]], found: list[Damage]
    ) -> dict[BlockName, ChunkManifest]:
        """All manifests; damaged ones are reported, removed and put on the list `found`."""
        with self._answering():
            marks = self._objects.manifests()
            changed = [name for name, mark in marks.items() if name not in known or known[name][0] != mark]
            data = self._objects.read_manifests(changed)
        listed = {name: known[name] for name in marks if name in known and name not in set(changed)}
        for name, part in zip(changed, data, strict=True):
            if part is None:
                continue
            try:
                listed[name] = (marks[name], decode_manifest(bytes(part), name))
            except DamagedError as error:
                removed = not self.read_only and self.delete_manifest(name)
                logger.warning("damaged manifest %s in %s: %s", name.hex(), self._objects.place, error)
                found.append(Damage("manifest", name, str(error), removed))
                with self._lock:
                    self._damaged += 1
        with self._lock:
            self._manifests = listed
        return {name: manifest for name, (_, manifest) in listed.items()}

    def _drop(self, names: Sequence[BlockName]) -> list[bool]:
        with self._lock:
            for name in names:
                self._known.pop(name, None)
        return self._objects.delete(names) if names else []


def _checked(header: BlockHeader, wanted: Range, data: Bytes) -> torch.Tensor:
    """Bytes as a tensor that shares them; `DamagedError` if they are not what the header says."""
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


def in_time(place: str, errors: tuple[type[Exception], ...], call: Callable[[], T]) -> T:
    """`call()`, its library's errors as this package's.

    Raises:
        StoreUnreachableError: any of `errors` was raised.
    """
    try:
        return call()
    except errors as error:
        raise StoreUnreachableError(f"{place} does not answer: {error or type(error).__name__}") from error
