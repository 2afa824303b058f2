"""What each key has stored and pinned: its quotas, and what it may list, pin and delete."""

import threading
import time
from dataclasses import dataclass

from cacheblend.core.errors import StoreError
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.keys import ApiKey

_SALTS = 4096  # of a key, that are remembered
_COUNT_S = 2.0  # for which a count of what a key has stored is good


@dataclass
class _Counted:
    """Bytes that a key has stored, by `time.monotonic`, and what was let in since."""

    bytes: int
    at: float


def tenant_of(key: ApiKey, salt: str) -> str:
    """The name space of a key, or the part of it that a client's own salt sets aside."""
    return f"{key.tenant}\x1f{salt}" if salt else key.tenant


class Tenants:
    """Of one server.

    Args:
        engine: whose store it is.
        store_bytes, pin_bytes: that a key may have; None: no bound but the store's.
    """

    def __init__(self, engine: BlendEngine, store_bytes: int | None, pin_bytes: int | None) -> None:
        self._engine, self.store_bytes, self.pin_bytes = engine, store_bytes, pin_bytes
        self._lock, self._pinning = threading.Lock(), threading.Lock()
        self._salts: dict[str, dict[str, None]] = {}
        self._counted: dict[str, _Counted] = {}

    def seen(self, key: ApiKey, salt: str) -> bool:
        """A client of this key uses a salt: what lies under it counts. A restart forgets salts until they are used.

        False: the key has used so many that this one is not remembered; nothing may be stored under it.
        """
        with self._lock:
            salts = self._salts.setdefault(key.name, {"": None})
            if len(salts) < _SALTS:
                salts[salt] = None
            return salt in salts

    def manifests(self, key: ApiKey) -> list[ChunkManifest]:
        """Chunks of a key, under any of its salts that were seen."""
        with self._lock:
            salts = list(self._salts.get(key.name, {"": None}))
        roots = {self._engine.planner_of(tenant_of(key, salt)).root for salt in salts}
        return [manifest for manifest in self._engine.store.manifests() if manifest.root in roots]

    def manifest(self, key: ApiKey, chunk_id: BlockName) -> ChunkManifest | None:
        """One of them."""
        return next((each for each in self.manifests(key) if each.chunk_id == chunk_id), None)

    def bytes_of(self, manifests: list[ChunkManifest]) -> int:
        """Bytes of these chunks' blocks that are held; to look marks none of them as used."""
        sizes: dict[BlockName, int] = {}
        for manifest in manifests:
            each = self.size_of(len(manifest.token_ids)) // len(manifest.block_names)
            sizes |= dict.fromkeys(manifest.block_names, each)
        held = self._engine.store.held(list(sizes))
        return sum(size for size, there in zip(sizes.values(), held, strict=True) if there)

    def count(self, key: ApiKey) -> None:
        """Finds out what a key has stored, unless that was a moment ago: `take_room` is asked where nobody may wait."""
        if self.store_bytes is None:
            return
        with self._lock:
            now, counted = time.monotonic(), self._counted.get(key.name)
        if counted is not None and now - counted.at < _COUNT_S:
            return
        try:
            held = self.bytes_of(self.manifests(key))
        except StoreError:
            held = self.store_bytes  # nothing is stored under a bound that cannot be kept
        with self._lock:
            self._counted[key.name] = _Counted(held, now)

    def take_room(self, key: ApiKey, tokens: int) -> bool:
        """Whether a key may store chunks of so many tokens more, by what was counted last; if so, they count too."""
        if self.store_bytes is None:
            return True
        with self._lock:
            counted = self._counted.get(key.name)
            if counted is None or counted.bytes + self.size_of(tokens) > self.store_bytes:
                return False
            counted.bytes += self.size_of(tokens)
            return True

    def forget_count(self, key: ApiKey) -> None:
        """What the key has stored has changed by its own doing."""
        with self._lock:
            self._counted.pop(key.name, None)

    def pin(self, key: ApiKey, manifests: list[ChunkManifest]) -> bool:
        """Pins chunks; False where a key may not pin these besides what it has pinned."""
        with self._pinning:
            if self.pin_bytes is not None and self.bytes_of([*self._pinned(key), *manifests]) > self.pin_bytes:
                return False
            self._engine.store.pin(name for manifest in manifests for name in manifest.block_names)
            return True

    def unpin(self, key: ApiKey, manifest: ChunkManifest) -> None:
        """Unpins a chunk, but not blocks that it shares with another one which is pinned."""
        with self._pinning:
            others = [each for each in self._pinned(key) if each.chunk_id != manifest.chunk_id]
            shared = {name for each in others for name in each.block_names}
            self._engine.store.unpin([name for name in manifest.block_names if name not in shared])

    def _pinned(self, key: ApiKey) -> list[ChunkManifest]:
        pinned = self._engine.store.pinned()
        return [each for each in self.manifests(key) if each.chunk_id in pinned]

    def size_of(self, tokens: int) -> int:
        """Bytes of the KV of so many tokens."""
        block = self._engine.config.block_size
        layout = self._engine.stored_layout
        whole, rest = divmod(tokens, block)
        return whole * layout.block_bytes(block) + (layout.block_bytes(rest) if rest else 0)
