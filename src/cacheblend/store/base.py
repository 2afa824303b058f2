"""The contract of a KV store, and the checks every store makes on what it is given.

Knows blocks, manifests and what may go wrong; does not know where the bytes lie.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError
from cacheblend.core.naming import BlockName, block_name
from cacheblend.core.plan.blocks import Block, BlockEntry, BlockSource, ChunkManifest, KVLayout, LayerShape

Progress = Callable[[int, int], None]
"""Called with (blocks done, blocks in all)."""

LOGGER_NAME = "cacheblend.store"
"""Damage, dropped writes and ignored failures are reported to this logger as warnings."""


@dataclass(frozen=True)
class StoreStats:
    """A store's state and what happened since it was opened in this process.

    Attributes:
        tier: ``"memory"``, ``"disk"``, ``"redis"``, ``"s3"`` or ``"tiered"``.
        blocks: blocks held.
        bytes: bytes they take (file sizes on disk).
        max_bytes: the bound; None where the store is unbounded.
        chunks: manifests held.
        pinned: blocks held that are pinned.
        hits: names that `find` had.
        misses: names that `find` did not have.
        evictions: blocks removed to make room, by `write` or `prune`.
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


@dataclass(frozen=True)
class Damage:
    """One damaged thing that `verify` found.

    Attributes:
        kind: ``"block"`` or ``"manifest"``.
        name: the block's, or the chunk's.
        reason: what is wrong.
        removed: it is gone now; False where the store cannot be written to.
    """

    kind: str
    name: BlockName
    reason: str
    removed: bool


class KVStore(BlockSource):
    """Blocks and manifests, bounded in bytes, least recently used evicted first, pinned blocks kept.

    Every method may be called from any thread at any time; a store on a folder shares it with other
    processes. Use as a context manager, or call `close`.
    """

    @abstractmethod
    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        """Entries of the named blocks, None where a block is not held; marks them as used.

        Changes nothing but recency and counters (a block found damaged is reported, removed and a None).
        An entry says what was held at the time of the call: another thread or process may evict the block
        at once, and `read` then raises. Never raises for a damaged or vanished block.
        """

    @property
    def is_reachable(self) -> bool:
        """Whether it answered when it was last asked; one that did not is as good as empty, and nobody knows."""
        return True

    def held(self, names: Sequence[BlockName]) -> list[bool]:
        """Whether each block is there; marks none as used and counts nothing, where the place allows that."""
        return [entry is not None for entry in self.find(names)]

    @abstractmethod
    def read(self, name: BlockName, layer: int, heads: slice | None = None) -> torch.Tensor:
        """One record of all heads, or of those in `heads`, as the block's layout has it, on the CPU, verified.

        The tensor stays valid for as long as it is referenced, whatever happens to the block; it may share
        memory with the store, so do not write to it.

        Raises:
            BlockLostError: not held, gone or damaged; a damaged block has been reported and removed.
            InvalidInputError: no such layer, or `heads` is not a non-empty run of its heads.
        """

    def read_many(
        self, names: Sequence[BlockName], layer: int, heads: slice | None = None
    ) -> list[torch.Tensor | BlockLostError]:
        """The same layer's record of several blocks, as `read` gives them; the error where one is lost.

        A store that is far away asks once for all of them.

        Raises:
            InvalidInputError: as for `read`.
        """
        return [_read_or_error(self, name, layer, heads) for name in names]

    def promote(self, names: Sequence[BlockName]) -> None:
        """A hint that these blocks will be read, where what was read is kept nearer; blocks that are lost are left."""
        return

    @abstractmethod
    def write(self, block: Block) -> bool:
        """Holds the block from now on; True if it was new, False if it was held already (marks it as used).

        Evicts least recently used unpinned blocks for room. A store on a folder has the block safely on disk
        when this returns. May keep the block's tensors: do not write to them afterwards.

        Raises:
            InvalidInputError: name, token ids and records do not belong together.
            StoreFullError: no room, and nothing unpinned left to evict; no part of the block is kept.
            StoreReadOnlyError: the store cannot be written to.
            StoreError: the write failed otherwise.
        """

    @abstractmethod
    def delete(self, name: BlockName) -> bool:
        """Removes a block, pinned or not, and its pin; False if it was not held.

        Raises:
            StoreReadOnlyError: the store cannot be written to.
        """

    @abstractmethod
    def pin(self, names: Iterable[BlockName]) -> None:
        """Keeps these blocks from eviction, also those that are only written later.

        Pins last as long as the store does (on a folder: across processes and restarts).

        Raises:
            StoreReadOnlyError: the store cannot be written to.
        """

    @abstractmethod
    def unpin(self, names: Iterable[BlockName]) -> None:
        """Takes pins back; names without a pin are ignored.

        Raises:
            StoreReadOnlyError: the store cannot be written to.
        """

    @abstractmethod
    def pinned(self) -> set[BlockName]:
        """Names with a pin, a snapshot; blocks of these names need not be held.

        Raises:
            StoreError: the store cannot be read.
        """

    @abstractmethod
    def put_manifest(self, manifest: ChunkManifest) -> None:
        """Lists a chunk, in place of one with the same `chunk_id`. Put it after the chunk's blocks.

        Raises:
            InvalidInputError: `chunk_id` is not the last of `block_names`.
            StoreFullError, StoreReadOnlyError, StoreError: as for `write`.
        """

    @abstractmethod
    def manifests(self) -> list[ChunkManifest]:
        """All chunks listed, ordered by `chunk_id`; a snapshot. Their blocks may have been evicted.

        A damaged manifest is reported, removed and left out.

        Raises:
            StoreError: the store cannot be read.
        """

    def listing_stamp(self) -> Hashable | None:
        """Equal stamps: no chunk was listed or taken off the list in between. None: it cannot tell.

        Raises:
            StoreError: the store cannot be read.
        """
        return None

    @abstractmethod
    def has_manifest(self, chunk_id: BlockName) -> bool:
        """Whether the chunk is listed. Cheap: reads no manifest, so a damaged one counts until it is found."""

    @abstractmethod
    def delete_manifest(self, chunk_id: BlockName) -> bool:
        """Takes a chunk off the list, its blocks stay; False if it was not listed.

        Raises:
            StoreReadOnlyError: the store cannot be written to.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """State and counters, a snapshot. On a folder this lists the files (about 5 us a block).

        Raises:
            StoreError: the store cannot be read.
        """

    @abstractmethod
    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """Reads everything and checks it; damaged things are reported, removed where possible, and returned.

        Raises:
            StoreError: the store cannot be read.
        """

    @abstractmethod
    def prune(self, max_bytes: int) -> int:
        """Evicts least recently used unpinned blocks until at most `max_bytes` are held; the bytes freed.

        Also drops manifests of which no block is held. The store's own bound stays as it is.

        Raises:
            InvalidInputError: `max_bytes` is negative.
            StoreReadOnlyError: the store cannot be written to.
        """

    @abstractmethod
    def flush(self) -> None:
        """Returns when everything accepted before is where it belongs."""

    @abstractmethod
    def close(self) -> None:
        """Gives back memory and file descriptors; may be called twice. A closed store must not be used."""

    def __enter__(self) -> "KVStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_all(store: KVStore, names: Sequence[BlockName]) -> None:
    """Finds these blocks and reads every layer of them, a block after the other; what is lost is left."""
    for name, entry in zip(names, store.find(names), strict=True):
        for layer in range(len(entry.layout.layers) if entry else 0):
            if isinstance(store.read_many([name], layer)[0], BlockLostError):
                break


def _read_or_error(store: KVStore, name: BlockName, layer: int, heads: slice | None) -> torch.Tensor | BlockLostError:
    try:
        return store.read(name, layer, heads)
    except BlockLostError as error:
        return error


def check_block(block: Block) -> None:
    """Checks that name, token ids, records and layout of a block belong together.

    Raises:
        InvalidInputError: the name is not that of parent and token ids, there is no token or no layer, or a record
            is not what the layout says, on the CPU.
    """
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
