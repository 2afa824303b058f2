"""The contract of a KV store, and what every implementation shares. Knows blocks, manifests and what may go wrong; does
not know where the bytes are kept."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from cacheblend.core.closable import Closable
from cacheblend.core.errors import BlockLostError, InvalidInputError, check_type
from cacheblend.core.names import BlockName, block_name, state_name
from cacheblend.core.plan.blocks import (
    Block,
    BlockEntry,
    BlockSource,
    ChunkManifest,
    KVLayout,
    LayerShape,
    RecordMemory,
)
from cacheblend.store.documents import Damage as Damage
from cacheblend.store.documents import DocumentRecords

Progress = Callable[[int, int], None]  # called with (blocks done, blocks in all)
SMALL_FILE_BYTES = 4096  # what a manifest, or a document's record, counts at least: file systems give it a page
LOGGER_NAME = "cacheblend.store"  # damage, dropped writes and ignored failures are reported to this logger as warnings


@dataclass(frozen=True)
class StoreStats:
    """A store's state, and its counters since it was opened in this process.

    Attributes:
        tier: ``"memory"``, ``"disk"``, ``"redis"``, ``"s3"`` (see `KVStore.tier_names`) or ``"tiered"``.
        blocks: blocks held.
        bytes: bytes that they, their manifests and documents' records take (of these, whole pages in a folder).
        max_bytes: the bound; None where the store is unbounded.
        chunks: manifests held.
        pinned: blocks held that are pinned.
        hits: names that `find` had.
        misses: names that `find` did not have.
        evictions: blocks removed by `write`, `prune` or a time to live.
        damaged: damaged blocks and manifests that were found (and removed, where the store can be written).
        write_failures: calls of `write` that raised a `StoreError`.
        tiers: the same of each tier, fastest first; empty for a store with one tier.
    """

    tier: str
    blocks: int
    bytes: int
    max_bytes: int | None
    chunks: int
    pinned: int
    hits: int
    misses: int
    evictions: int
    damaged: int
    write_failures: int
    tiers: tuple["StoreStats", ...] = ()


class KVStore(Closable, BlockSource):
    """Blocks and manifests, bounded in bytes; unpinned blocks are evicted, by default least recently used first.

    Every method may be called from any thread at any time; a store on a folder shares it with other
    processes. Use as a context manager, or call `close`.

    Methods that list, count or change something raise `StoreError` where the store cannot be read, those that change
    something `StoreReadOnlyError` where it cannot be written to. Reads and look-ups raise neither.

    Attributes:
        documents: what is known of the documents that its chunks are parts of.
        read_only: nothing is ever written to it.
    """

    documents: DocumentRecords
    read_only: bool = False

    @abstractmethod
    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """Entries of the named blocks, None where a block is not held.

        Mutates only recency and counters: found blocks count as used, and a damaged block is reported, removed and
        returned as None. An entry is valid for the time of the call only: another thread or process may evict the
        block at once, and reading it then fails with `BlockLostError`. Never raises for a damaged or vanished
        block, nor for a store that does not answer.
        """

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The tiers that entries of this store name, fastest first, each once.

        The second one of a kind is ``"disk-2"``, the third ``"disk-3"``: devices of one kind differ in speed. The names
        depend only on the order of the stores, so they are the same in every process that opens the same URL.
        """
        return (self.stats().tier,)

    def tiers(self) -> dict[str, "KVStore"]:
        """The stores behind the `tier_names`, fastest first."""
        return {self.tier_names[0]: self}

    @property
    def is_reachable(self) -> bool:
        """Whether the store answered its last request; `find` of one that did not finds nothing."""
        return True

    @property
    def is_away(self) -> bool:
        """Whether nothing of it answered: that `find` finds nothing says nothing then."""
        return not self.is_reachable

    @property
    def writing_s(self) -> float:
        """Seconds that a write in the background has taken so far; 0: there is none."""
        return 0.0

    @property
    def lasting(self) -> "KVStore":
        """Of several stores the one that outlives the others: what it holds need not be computed and stored again."""
        return self

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        """Whether each block is held. Mutates no recency and no counters, where the store can tell without."""
        return [entry is not None for entry in self.find(names)]

    @abstractmethod
    def read_layers(
        self, names: Sequence[BlockName], layers: range, heads: slice | None = None, memory: RecordMemory | None = None
    ) -> list[list[torch.Tensor] | BlockLostError]:
        """See `BlockSource.read_layers`. A remote store asks once for all blocks and layers.

        A tensor stays valid for as long as it is referenced, whatever happens to the block; in `memory`, for as long as
        that does.

        Raises:
            InvalidInputError: no such layer, or `heads` is not a non-empty run of its heads.
        """

    def read_many(
        self, names: Sequence[BlockName], layer: int, heads: slice | None = None
    ) -> list[torch.Tensor | BlockLostError]:
        """One layer's records of several blocks, as `read_layers` returns them; the error where a block is lost."""
        read = self.read_layers(names, range(layer, layer + 1), heads)
        return [each if isinstance(each, BlockLostError) else each[0] for each in read]

    def read(self, name: BlockName, layer: int, heads: slice | None = None) -> torch.Tensor:
        """One block's record, as `read_many` returns it.

        Raises:
            BlockLostError: not held, gone or damaged.
            InvalidInputError: as for `read_many`.
        """
        (record,) = self.read_many([name], layer, heads)
        if isinstance(record, BlockLostError):
            raise record
        return record

    def promote(self, names: Sequence[BlockName]) -> None:
        """Hints that these blocks will be read: a store with tiers copies them to its fastest. Ignores lost blocks."""

    def drop_copies(self) -> None:
        """Hints that what was stored so far is not read again: a store with tiers drops what it keeps in memory, or on
        a device, of the stores behind. These lose nothing."""

    @abstractmethod
    def write(self, block: Block) -> bool:
        """Holds the block from now on; True if it was new, False if it was held already (marks it as used).

        Evicts unpinned blocks to stay within the bound. A store on a folder has the block safely on disk when this
        returns. May keep the block's tensors: do not write to them afterwards.

        Raises:
            InvalidInputError: name, token ids and records do not belong together.
            StoreFullError: the block does not fit, and nothing unpinned is left to evict; no part of it is kept.
            StoreReadOnlyError: the store cannot be written to.
            StoreError: the write failed otherwise.
        """

    def write_all(self, blocks: Sequence[Block]) -> list[bool]:
        """Writes blocks in order, as `write` does each. A store may keep those that follow each other together.

        Raises:
            InvalidInputError, StoreError: as `write`; blocks before the one that failed may be held.
        """
        return [self.write(block) for block in blocks]

    @abstractmethod
    def delete(self, name: BlockName) -> bool:
        """Removes a block, pinned or not, and its pin; False if it was not held."""

    @abstractmethod
    def pin(self, names: Iterable[BlockName]) -> None:
        """Keeps these blocks from eviction, including blocks that are written later.

        Pins last as long as the store does (on a folder: across processes and restarts).
        """

    @abstractmethod
    def unpin(self, names: Iterable[BlockName]) -> None:
        """Removes pins; names without a pin are ignored."""

    @abstractmethod
    def pinned(self) -> set[BlockName]:
        """Names with a pin; blocks of these names need not be held. The set is a snapshot that the caller owns."""

    def are_pinned(self, names: Sequence[BlockName]) -> list[bool]:
        """Whether each block has a pin. Raises `StoreError` where the store cannot be read."""
        pinned = self.pinned()
        return [name in pinned for name in names]

    @abstractmethod
    def put_manifest(self, manifest: ChunkManifest) -> None:
        """Lists a chunk, replacing one with the same `chunk_id`. Put it after the chunk's blocks.

        Raises:
            InvalidInputError: `chunk_id` is not the last of `block_names`.
            StoreFullError, StoreReadOnlyError, StoreError: as for `write`.
        """

    @abstractmethod
    def manifests(self) -> list[ChunkManifest]:
        """All chunks listed, ordered by `chunk_id`; a snapshot. Their blocks may have been evicted.

        A damaged manifest is reported, removed and left out.
        """

    def listing_stamp(self) -> Hashable | None:
        """A value that changes whenever a chunk is listed or taken off the list; None: the store cannot tell."""
        return None

    @abstractmethod
    def has_manifest(self, chunk_id: BlockName) -> bool:
        """Whether the chunk is listed. Cheap: reads no manifest, so a damaged one counts until it is found."""

    @abstractmethod
    def delete_manifest(self, chunk_id: BlockName) -> bool:
        """Takes a chunk off the list, its blocks stay; False if it was not listed."""

    def delete_chunk(self, block_names: Sequence[BlockName], kept: Container[BlockName] = ()) -> None:
        """Removes a chunk's blocks, pinned or not, and what follows them (`state_name`), but not those in `kept`, which
        other chunks share, and takes it off the list: the last step, so that it can be done again."""
        for name in block_names:
            if name not in kept:
                self.delete(name)
                self.delete(state_name(name))
        self.delete_manifest(block_names[-1])

    @abstractmethod
    def stats(self) -> StoreStats:
        """State and counters, a snapshot. On a folder this lists the files (about 5 us per block)."""

    @abstractmethod
    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """Reads and checks everything; damaged blocks and manifests are reported, removed if possible, and returned."""

    @abstractmethod
    def prune(self, max_bytes: int, progress: Progress | None = None) -> int:
        """Evicts unpinned blocks until at most `max_bytes` are held; the bytes freed.

        Also drops manifests of which no block is held. Manifests and documents' records count. The store's own bound
        stays as it is.

        Args:
            max_bytes: what may stay.
            progress: called with (bytes freed, bytes to free), where that takes a while.

        Raises:
            InvalidInputError: `max_bytes` is negative.
            StoreReadOnlyError: the store cannot be written to.
        """

    def flush(self, timeout_s: float | None = None) -> bool:
        """Returns when every block that was accepted before has been written; at once where `write` waits for it. False
        if that takes longer than `timeout_s`."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Releases memory, files and connections; may be called twice. A closed store must not be used."""


class FindCounter:
    """Hits and misses of a store's `find`; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def count(self, found: Sequence[object | None]) -> None:
        """Counts one call's answers: a None is a miss."""
        hits = sum(each is not None for each in found)
        with self._lock:
            self.hits += hits
            self.misses += len(found) - hits


# ---- what every store checks on what it is given ------------------------------------------------------------


def check_block(block: Block) -> None:
    """Checks that name, token ids, records and layout of a block belong together. Raises `InvalidInputError`: the name
    is not that of parent and token ids, there is no token or no layer, or a record is not what the layout says, on the
    CPU."""
    tokens, layout = len(block.token_ids), block.layout
    if tokens == 0 or not block.records:
        raise InvalidInputError(f"a block needs at least 1 token and 1 layer, got {tokens} and {len(block.records)}")
    if len(block.records) != len(layout.layers):
        raise InvalidInputError(f"a block of {len(layout.layers)} layers has {len(block.records)} records")
    if block.name != block_name(block.parent, block.token_ids):
        raise InvalidInputError(
            f"block {block.name.hex()} is not named after its parent and its {tokens} token ids: "
            "use block_name(parent, token_ids)"
        )
    for layer, record in enumerate(block.records):
        shape = layout.record_shape(layer, tokens)
        if tuple(record.shape) != shape or record.dtype != layout.record_dtype or record.device.type != "cpu":
            raise InvalidInputError(
                f"layer {layer}: a record of {tokens} tokens must be {layout.record_dtype} {list(shape)} on the CPU, "
                f"got {record.dtype} {list(record.shape)} on {record.device}"
            )


def check_layer(layout: KVLayout, layer: int) -> LayerShape:
    """Shape of the layer; `InvalidInputError` if the layout has no such layer."""
    if not 0 <= layer < len(layout.layers):
        raise InvalidInputError(f"layer {layer} of a block with layers 0..{len(layout.layers) - 1}")
    return layout.layers[layer]


def head_range(heads: slice | None, kv_heads: int) -> tuple[int, int]:
    """The heads [start, stop) that a slice names; `InvalidInputError` unless it is a run of them."""
    if heads is None:
        return 0, kv_heads
    start, stop, step = heads.indices(kv_heads)
    if step != 1 or start >= stop or (heads.stop is not None and heads.stop > kv_heads):
        raise InvalidInputError(f"heads {heads} must be a non-empty run of the layer's {kv_heads} KV heads")
    return start, stop


def check_manifest(manifest: ChunkManifest) -> None:
    """Raises `InvalidInputError` unless the chunk is named by its last block."""
    if not manifest.block_names or manifest.block_names[-1] != manifest.chunk_id:
        raise InvalidInputError(
            f"chunk {manifest.chunk_id.hex()} must be named by the last of its block names "
            f"({len(manifest.block_names)} given)"
        )


def check_max_bytes(max_bytes: int) -> int:
    """`max_bytes` itself; `InvalidInputError` if it is negative, or no whole number."""
    check_type(max_bytes, int, "max_bytes", "a whole number of bytes (parse_bytes reads 8GiB)")
    if max_bytes < 0:
        raise InvalidInputError(f"max_bytes must be 0 or more, got {max_bytes}")
    return max_bytes
