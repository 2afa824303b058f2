"""Tenants: what each API key has stored and pinned, its quotas, and which chunks it may list, pin and delete."""

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial

from cacheblend.core.errors import StoreError, StoreUnreachableError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.engines.chunk_index import ChunkListing
from cacheblend.engines.documents import referring
from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.bounded_calls import BoundedCalls
from cacheblend.serve.keys import ApiKey
from cacheblend.store.base import SMALL_FILE_BYTES
from cacheblend.store.documents import DocumentRecord

LIST_REFRESH_S = 5.0
"""Seconds after which the store's list is read again, in a thread: other processes may store and drop chunks."""

_MAX_SALTS = 4096  # remembered per key
_COUNT_VALID_S = 2.0  # for which a count of a key's stored bytes is used
_COUNT_S = 2.0  # that a request waits for one: a store that hangs must not keep all requests from being read
_COUNTS_AT_ONCE = 4


def tenant_of(key: ApiKey, salt: str) -> str:
    """The name space of a key's blocks, or the part of it under a client's own salt."""
    return f"{key.tenant}\x1f{salt}" if salt else key.tenant


class Tenants:
    """The tenants of one server, and bytes that each may store and pin; safe to call from several threads."""

    def __init__(self, engine: BlendEngine, store_bytes: int | None, pin_bytes: int | None) -> None:
        self._engine, self.store_bytes, self.pin_bytes = engine, store_bytes, pin_bytes
        self._lock, self._pinning = threading.Lock(), threading.Lock()
        # Every chunk by its root: what one key asks for takes the same time whatever the others have stored.
        self._listing = ChunkListing(engine.store, None, 1, LIST_REFRESH_S)
        self.get = self._listing.get
        engine.runtime.warmer.keeper.listeners.append(lambda manifest: self._listing.add([manifest]))
        self._salts: dict[str, dict[str, None]] = {}
        self._rooted: tuple[object, dict[str, BlockName]] = None, {}  # the model, and its root of each tenant
        self._changes: dict[BlockName, int] = {}  # how often a root's documents have changed
        self._referring = lru_cache(64)(lambda root, *_: referring(engine.store, root))
        # By key's name: bytes that were stored at a time, with those reserved since, and that time; infinite: unknown.
        self._counted: dict[str, tuple[float, float]] = {}
        self._calls = BoundedCalls(_COUNTS_AT_ONCE)

    def remember_salt(self, key: ApiKey, salt: str) -> bool:
        """Notes that a client of this key uses a salt, so that chunks under it are listed and count for the quota.
        False if it has used too many: then nothing may be stored under this one. A restarted server has none."""
        with self._lock:
            salts = self._salts.setdefault(key.name, {"": None})
            if len(salts) < _MAX_SALTS:
                salts[salt] = None
            return salt in salts

    def look(self) -> None:
        """Has the store's list read where it is time for that: chunks that another process stored or dropped are known
        some seconds later. Raises `StoreError`."""
        self._listing.refresh()
        if not self._listing.has_read:
            self._listing.update()

    def manifests(self, key: ApiKey) -> list[ChunkManifest]:
        """Chunks of a key, under any of its remembered salts. Raises as `names`."""
        found = (self.get(name) for names in self.names(key) for name in names)
        return [manifest for manifest in found if manifest is not None]

    def names(self, key: ApiKey) -> list[Sequence[BlockName]]:
        """Ids of a key's chunks, ordered, of each of its remembered salts. Raises as `look`."""
        self.look()
        return [self._listing.names(root) for root in self.roots(key)]

    def roots(self, key: ApiKey) -> set[BlockName]:
        """The roots of a key's chunks, under any of its remembered salts."""
        model = self._engine.runtime.follow()
        with self._lock:
            tenants = [tenant_of(key, salt) for salt in self._salts.get(key.name, {"": None})]
            if self._rooted[0] is not model:
                self._rooted = model, {}
            known = self._rooted[1]
            known |= {each: model.planner_of(each).root for each in tenants if each not in known}
        return {known[each] for each in tenants}

    def documents(self, root: BlockName) -> Mapping[BlockName, list[DocumentRecord]]:
        """As `referring`; changes by another process are known some seconds later. Raises `StoreError`."""
        return self._referring(root, self._changes.get(root, 0), time.monotonic() // LIST_REFRESH_S)

    def forget(self, chunk_ids: Iterable[BlockName], root: BlockName | None = None, by: ApiKey | None = None) -> None:
        """Takes dropped chunks off the list, and discards the count of stored bytes of a key that has deleted them;
        `root`: its documents have changed."""
        self._listing.forget(chunk_ids)
        with self._lock:
            if root is not None:
                self._changes[root] = self._changes.get(root, 0) + 1
            self._counted.pop(by.name if by else "", None)

    def held(self, names: Iterable[BlockName]) -> set[BlockName]:
        """Those of the blocks that are held; one call of the store, which marks none of them as used."""
        asked = list(dict.fromkeys(names))
        return {name for name, is_held in zip(asked, self._engine.store.held(asked), strict=True) if is_held}

    def sizes(self, manifests: list[ChunkManifest]) -> dict[BlockName, int]:
        """Bytes of each of these chunks' blocks, held or not."""
        sizes: dict[BlockName, int] = {}
        for manifest in manifests:
            each = self.size_of(len(manifest.token_ids)) // len(manifest.block_names)
            sizes |= dict.fromkeys(manifest.block_names, each)
        return sizes

    def count(self, key: ApiKey) -> None:
        """Counts a key's stored bytes, unless that was done a moment ago; `reserve`, which must not block, uses it.
        Raises `StoreUnreachableError` where they could not be counted: nothing more is stored then."""
        if self.store_bytes is None:
            return
        with self._lock:
            held, at = self._counted.get(key.name, (math.inf, -math.inf))
        if time.monotonic() - at >= _COUNT_VALID_S:
            try:
                held = self._calls.result(key.name, partial(self._held_by, key), _COUNT_S)
            except (StoreError, TimeoutError, RuntimeError):
                held = math.inf
            with self._lock:
                self._counted[key.name] = held, time.monotonic()
        if held == math.inf:
            raise StoreUnreachableError(f"what {key.name} has stored could not be counted in {_COUNT_S:g} s; try again")

    def _held_by(self, key: ApiKey) -> int:
        manifests = self.manifests(key)
        sizes = self.sizes(manifests)
        stored = sum(sizes[name] for name in self.held(sizes))
        records = sum(len(self._engine.store.documents.names(root)) for root in self.roots(key))
        return stored + (len(manifests) + records) * SMALL_FILE_BYTES

    def reserve(self, key: ApiKey, tokens: int, files: int = 1) -> bool:
        """Reserves part of a key's quota for chunks and their files; False if the last count leaves too little."""
        need = self.size_of(tokens) + files * SMALL_FILE_BYTES
        if self.store_bytes is None:
            return True
        with self._lock:
            held, at = self._counted.get(key.name, (math.inf, -math.inf))
            if held + need > self.store_bytes:
                return False
            self._counted[key.name] = held + need, at
            return True

    def reserve_missing(self, key: ApiKey, manifests: list[ChunkManifest]) -> bool:
        """Counts a key's stored bytes and reserves what of these chunks is not stored; False if too little is left.
        Raises as `count`."""
        held = self.held(name for each in manifests for name in each.block_names)
        missing = {each.chunk_id: len(each.token_ids) for each in manifests if not held.issuperset(each.block_names)}
        self.count(key)
        return self.reserve(key, sum(missing.values()), len(missing))

    def pin(self, key: ApiKey, manifests: list[ChunkManifest]) -> bool:
        """Pins chunks; False if that would exceed the key's quota. Evicted ones count: they may be stored again."""
        with self._pinning:
            most = self.pin_bytes
            if most is not None and sum(self.sizes([*self._pinned(key), *manifests]).values()) > most:
                return False
            self._engine.store.pin(name for manifest in manifests for name in manifest.block_names)
            return True

    def unpin(self, key: ApiKey, manifest: ChunkManifest) -> None:
        """Unpins a chunk, but not the blocks that it shares with another pinned chunk."""
        with self._pinning:
            others = [each for each in self._pinned(key) if each.chunk_id != manifest.chunk_id]
            shared = {name for each in others for name in each.block_names}
            self._engine.store.unpin([name for name in manifest.block_names if name not in shared])

    def _pinned(self, key: ApiKey) -> list[ChunkManifest]:
        manifests = self.manifests(key)
        pinned = self._engine.store.are_pinned([each.chunk_id for each in manifests])
        return [each for each, is_pinned in zip(manifests, pinned, strict=True) if is_pinned]

    def close(self) -> None:
        """Ends the reading of the store's list."""
        self._listing.close()

    def size_of(self, tokens: int) -> int:
        """Bytes of the stored KV of so many tokens."""
        block = self._engine.config.block_size
        layout = self._engine.runtime.stored_layout
        whole, rest = divmod(tokens, block)
        return whole * layout.block_bytes(block) + (layout.block_bytes(rest) if rest else 0)
