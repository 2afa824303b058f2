"""Tenants: what each API key has stored and pinned, its quotas, and which chunks it may list, pin and delete."""

import threading
import time
from dataclasses import dataclass

from cacheblend.core.errors import StoreError
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.keys import ApiKey

_MAX_SALTS = 4096  # remembered per key
_COUNT_VALID_S = 2.0  # for which a count of a key's stored bytes is used


@dataclass
class _Counted:
    """Bytes that a key had stored at the time `at` (`time.monotonic`), plus the bytes reserved since."""

    bytes: int
    at: float


def tenant_of(key: ApiKey, salt: str) -> str:
    """The name space of a key's blocks, or the part of it under a client's own salt."""
    return f"{key.tenant}\x1f{salt}" if salt else key.tenant


class Tenants:
    """The tenants of one server; safe to call from several threads.

    Args:
        engine: the engine whose store is used.
        store_bytes, pin_bytes: bytes that a key may store and pin; None: no bound but the store's.
    """

    def __init__(self, engine: BlendEngine, store_bytes: int | None, pin_bytes: int | None) -> None:
        self._engine, self.store_bytes, self.pin_bytes = engine, store_bytes, pin_bytes
        self._lock, self._pinning = threading.Lock(), threading.Lock()
        self._salts: dict[str, dict[str, None]] = {}
        self._counted: dict[str, _Counted] = {}

    def remember_salt(self, key: ApiKey, salt: str) -> bool:
        """Notes that a client of this key uses a salt, so that chunks under it are listed and count for the quota.

        Salts are forgotten when the server restarts, until they are used again.

        Returns:
            False if the key has used too many salts to remember this one: then nothing may be stored under it.
        """
        with self._lock:
            salts = self._salts.setdefault(key.name, {"": None})
            if len(salts) < _MAX_SALTS:
                salts[salt] = None
            return salt in salts

    def manifests(self, key: ApiKey) -> list[ChunkManifest]:
        """Chunks of a key, under any of its remembered salts. Raises `StoreError`."""
        with self._lock:
            salts = list(self._salts.get(key.name, {"": None}))
        model = self._engine.follow()
        roots = {model.planner_of(tenant_of(key, salt)).root for salt in salts}
        return [manifest for manifest in self._engine.store.manifests() if manifest.root in roots]

    def manifest(self, key: ApiKey, chunk_id: BlockName) -> ChunkManifest | None:
        """The key's chunk of this id, None if it has none. Raises `StoreError`."""
        return next((each for each in self.manifests(key) if each.chunk_id == chunk_id), None)

    def bytes_of(self, manifests: list[ChunkManifest]) -> int:
        """Bytes of these chunks' blocks that are held; marks none of them as used."""
        sizes: dict[BlockName, int] = {}
        for manifest in manifests:
            each = self.size_of(len(manifest.token_ids)) // len(manifest.block_names)
            sizes |= dict.fromkeys(manifest.block_names, each)
        held = self._engine.store.held(list(sizes))
        return sum(size for size, there in zip(sizes.values(), held, strict=True) if there)

    def count(self, key: ApiKey) -> None:
        """Counts a key's stored bytes, unless that was done a moment ago; `reserve`, which must not block, uses it."""
        if self.store_bytes is None:
            return
        with self._lock:
            now, counted = time.monotonic(), self._counted.get(key.name)
        if counted is not None and now - counted.at < _COUNT_VALID_S:
            return
        try:
            held = self.bytes_of(self.manifests(key))
        except StoreError:
            held = self.store_bytes  # the quota cannot be checked, so nothing more is stored
        with self._lock:
            self._counted[key.name] = _Counted(held, now)

    def reserve(self, key: ApiKey, tokens: int) -> bool:
        """Reserves part of a key's quota for chunks of so many tokens; False if the last count leaves too little."""
        if self.store_bytes is None:
            return True
        with self._lock:
            counted = self._counted.get(key.name)
            if counted is None or counted.bytes + self.size_of(tokens) > self.store_bytes:
                return False
            counted.bytes += self.size_of(tokens)
            return True

    def forget_count(self, key: ApiKey) -> None:
        """Discards the count of a key's stored bytes, after it has deleted chunks."""
        with self._lock:
            self._counted.pop(key.name, None)

    def pin(self, key: ApiKey, manifests: list[ChunkManifest]) -> bool:
        """Pins chunks; False if that would exceed the key's quota."""
        with self._pinning:
            if self.pin_bytes is not None and self.bytes_of([*self._pinned(key), *manifests]) > self.pin_bytes:
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
        pinned = self._engine.store.pinned()
        return [each for each in self.manifests(key) if each.chunk_id in pinned]

    def size_of(self, tokens: int) -> int:
        """Bytes of the stored KV of so many tokens."""
        block = self._engine.config.block_size
        layout = self._engine.stored_layout
        whole, rest = divmod(tokens, block)
        return whole * layout.block_bytes(block) + (layout.block_bytes(rest) if rest else 0)
