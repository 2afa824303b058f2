"""A store on another machine: blocks, manifests and pins in an `Objects`.

A place that does not answer counts as empty: `find` finds nothing and reads are lost blocks, so requests are computed
instead of failing, and for some seconds the place is not asked again.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from cacheblend.core.errors import BlockLostError, StoreError, StoreReadOnlyError, StoreUnreachableError
from cacheblend.core.load.breaker import CircuitBreaker
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, BlockEntry, ChunkManifest, RecordMemory
from cacheblend.store.base import (
    LOGGER_NAME,
    Damage,
    FindCounter,
    KVStore,
    Progress,
    StoreStats,
    check_block,
    check_manifest,
    check_max_bytes,
)
from cacheblend.store.documents import verify_documents
from cacheblend.store.eviction import Expiry
from cacheblend.store.format.block_file import BlockHeader, encode_block
from cacheblend.store.format.manifest_file import encode_manifest
from cacheblend.store.remote.blocks import RemoteBlocks
from cacheblend.store.remote.capacity import RemoteCapacity
from cacheblend.store.remote.objects import MANIFESTS, Objects
from cacheblend.store.remote.sealed_objects import RemoteDocuments, RemoteManifestPlace, RemoteManifests

logger = logging.getLogger(LOGGER_NAME)


class RemoteStore(KVStore):
    """Blocks on another machine, least recently used evicted first.

    Args:
        objects: moves the bytes; closed with the store.
        max_bytes: bound on what all writers store; None leaves eviction to the other side.
        read_only: never write: damage is reported but not removed.
        ttl: seconds without use after which an unpinned block is removed; None: no limit.

    Raises:
        InvalidInputError: a `ttl` that is not above 0.
    """

    def __init__(
        self, objects: Objects, max_bytes: int | None = None, *, read_only: bool = False, ttl: float | None = None
    ) -> None:
        self._objects, self.read_only = objects, read_only
        self._expiry = Expiry(ttl)
        self._breaker = CircuitBreaker(objects.place)
        self._blocks = RemoteBlocks(objects, self._breaker, read_only)
        self._listing = RemoteManifests(objects, self._breaker, read_only)
        manifests = RemoteManifestPlace(objects, self._listing)
        self._capacity = RemoteCapacity(objects, max_bytes, self._blocks.drop, manifests, self._breaker.asking)
        self.documents = RemoteDocuments(objects, self._breaker, read_only, self._capacity)
        self._finds = FindCounter()
        self._lock = threading.Lock()
        self._write_failures = 0

    # ---- blocks -----------------------------------------------------------------------------------------

    @property
    def tier_names(self) -> tuple[str, ...]:
        return (self._objects.tier,)

    @property
    def is_reachable(self) -> bool:
        return not self._breaker.is_paused

    def round_trip_s(self, tier: str) -> float:
        """As the last look-ups took, and readings of headers."""
        return self._blocks.round_trip_s

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """One round trip; with a time to live two, and more if pinned blocks have expired."""
        headers: dict[BlockName, BlockHeader] = {}
        try:
            headers = self._look_up(names)
        except StoreUnreachableError:
            pass  # the breaker has logged it
        except StoreError as error:
            logger.warning("%s", error)
        entries = [self._entry(headers[name]) if name in headers else None for name in names]
        self._finds.count(entries)
        return entries

    def _entry(self, header: BlockHeader) -> BlockEntry:
        return replace(header.entry, tier=self._objects.tier)

    def _look_up(self, names: Sequence[BlockName]) -> dict[BlockName, BlockHeader]:
        """Headers of the blocks that are held; marks them as used. An expired block is held only if it is pinned."""
        since = self._expiry.since(time.time())
        held = self._blocks.look_up(names, since)
        gone = [name for name in names if name not in held]
        if since == -math.inf or not gone:
            return held
        with self._breaker.asking():
            pinned = self._objects.pinned().intersection(gone)
        return held | self._blocks.look_up(list(pinned)) if pinned else held

    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """One round trip; records are in the memory that they were received in."""
        return self._blocks.read(names, layers, heads)

    def write(self, block: Block) -> bool:
        self._require_writable()
        check_block(block)
        try:
            if self._look_up([block.name]):
                return False
            with self._breaker.asking():
                now = time.time()
                if self._expiry.is_due(now):
                    self._capacity.expire(self._expiry.since(now))
            header, *records = encode_block(block)
            nbytes = len(header) + sum(len(record) for record in records)
            with self._capacity.reserved(nbytes, block.name, "block"):
                self._objects.put(block.name, header, records)  # no pause: a place too slow to write may be read
        except StoreError:
            with self._lock:
                self._write_failures += 1
            raise
        return True

    def delete(self, name: BlockName) -> bool:
        with self._writing():
            self._objects.unpin([name])
            return self._blocks.drop([name])[0]

    # ---- pins and manifests -----------------------------------------------------------------------------

    def pin(self, names: Iterable[BlockName]) -> None:
        with self._writing():
            self._objects.pin(names)

    def unpin(self, names: Iterable[BlockName]) -> None:
        with self._writing():
            self._objects.unpin(names)

    def pinned(self) -> set[BlockName]:
        with self._breaker.asking():
            return self._objects.pinned()

    def put_manifest(self, manifest: ChunkManifest) -> None:
        self._require_writable()
        check_manifest(manifest)
        data, name = encode_manifest(manifest), manifest.chunk_id
        with self._breaker.asking(), self._capacity.reserved(len(data), name, "the manifest of chunk"):
            self._objects.put_sealed(MANIFESTS, name, data)

    def manifests(self) -> list[ChunkManifest]:
        """Manifests that did not change since the last call are not read again."""
        return self._listing.all()

    def listing_stamp(self) -> Hashable | None:
        with self._breaker.asking():
            return self._objects.listing_stamp()

    def has_manifest(self, chunk_id: BlockName) -> bool:
        with self._breaker.asking():
            return self._objects.has_sealed(MANIFESTS, chunk_id)

    def delete_manifest(self, chunk_id: BlockName) -> bool:
        with self._writing():
            return self._objects.delete_sealed(MANIFESTS, chunk_id)

    # ---- the whole store --------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._breaker.asking():
            held, pinned, chunks = self._objects.held(), self._objects.pinned(), self._objects.sealed(MANIFESTS)
            small = sum(each.nbytes for each in chunks.values()) + self._objects.documents_bytes()
        return StoreStats(
            tier=self._objects.tier,
            blocks=len(held),
            bytes=sum(block.nbytes for block in held) + small,
            max_bytes=self._capacity.max_bytes,
            chunks=len(chunks),
            pinned=sum(block.name in pinned for block in held),
            hits=self._finds.hits,
            misses=self._finds.misses,
            evictions=self._capacity.evictions,
            damaged=self._blocks.damaged + self._listing.damaged,
            write_failures=self._write_failures,
        )

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """Blocks that vanish meanwhile are not damage."""
        with self._breaker.asking():
            names = [block.name for block in self._objects.held(tidy=not self.read_only)]
        found: list[Damage] = []
        for done, name in enumerate(names, start=1):
            self._blocks.verify(name, found)
            if progress is not None:
                progress(done, len(names))
        self._listing.verify(found)
        return found + verify_documents(self.documents, removes=not self.read_only)

    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        self._require_writable()
        check_max_bytes(max_bytes)
        with self._breaker.asking():
            return self._capacity.shrink(max_bytes, progress) + self._capacity.sweep()

    def close(self) -> None:
        """Closes the objects."""
        self._objects.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The context of every call that changes something besides `write`.

        Raises:
            StoreReadOnlyError, StoreUnreachableError: the store is read only, or does not answer.
        """
        self._require_writable()
        with self._breaker.asking():
            yield

    def _require_writable(self) -> None:
        if self.read_only:
            raise StoreReadOnlyError(f"{self._objects.place} was opened read-only: open it without read_only")
