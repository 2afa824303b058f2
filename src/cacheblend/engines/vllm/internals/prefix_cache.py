"""Groups of KV cache, and vLLM's own prefix cache.

    group 0, all rows       | 7 | 2 | 9 | 4 | 1 | 11 |      blocks of the prompt, from one pool
    group 1, window of 40   | 0 | 0 | 0 | 3 | 8 | 5  |      0: the null block, for rows that the window has passed

A group's layers share a table of blocks. vLLM's hybrid manager gives a group of window layers only the blocks that the
next token still sees, and a hit of its prefix cache needs only those that the token behind the hit sees.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from cacheblend.core.kernels.attention import first_key
from cacheblend.engines.vllm.internals.interface import has_images

NULL_BLOCK = 0  # vLLM's block that belongs to no request, and stands in tables for rows that a window has passed
_KINDS = {"FullAttentionSpec": False, "SlidingWindowSpec": True}  # of groups side by side; have they a window?


def windows_of(kv_cache_config: Any) -> list[int | None]:
    """Of each group of KV cache, the rows that a row attends to at most, its own among them; None: any."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or []
    specs = [_specs(group.kv_cache_spec)[0] for group in groups]
    return [int(each.sliding_window) if _KINDS.get(type(each).__name__) else None for each in specs] or [None]


def groups_of(kv_cache_config: Any, layer_names: Sequence[str]) -> list[int]:
    """The group of each of these attention modules."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    found = {name: number for number, group in groups for name in group.layer_names}
    return [found[name] for name in layer_names]


def refused_groups(kv_cache_config: Any) -> str:
    """What is refused about a model's groups of KV cache; or ""."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or []
    if len(groups) < 2:
        return ""
    way_out = "--disable-hybrid-kv-cache-manager makes one of them"
    names = {type(spec).__name__ for group in groups for spec in _specs(group.kv_cache_spec)}
    if others := sorted(names - _KINDS.keys()):
        return f"groups of KV cache of the kind {', '.join(others)} beside others ({way_out})"
    sizes = sorted({int(group.kv_cache_spec.block_size) for group in groups})
    return f"groups of KV cache with blocks of {' and '.join(map(str, sizes))} tokens ({way_out})" if sizes[1:] else ""


def keeps_prompts(kv_cache_config: Any) -> bool:
    """Whether a prompt's blocks lie in the cache under their names until another request writes to them. Not where
    blocks are cleared when a request gets them; and of windows vLLM names the last blocks alone."""
    is_zeroed = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
    return not is_zeroed and not any(windows_of(kv_cache_config))


def salt_from(request: Any, first_token: int, block_size: int, salt: bytes) -> int:
    """Renames a request's blocks from that of `first_token` on, so that no plain request finds them; returns leading
    tokens whose blocks keep their names, and are shared with plain requests."""
    hashes = request.block_hashes
    kept = first_token // block_size
    if kept < len(hashes) == request.num_tokens // block_size:
        # Of images each name is salted by itself: those that vLLM makes from the middle of a prompt may lack one.
        plain = hashes[kept:] if has_images(request) else hashes[kept : kept + 1]
        hashes[kept:] = [_salted(name, salt) for name in plain]
    else:  # that block is not full yet, or a hash covers another span than a block: salt all of them
        kept = 0
        request.cache_salt = f"{request.cache_salt or ''}{salt.hex()}"
        hashes.clear()
    request.update_block_hashes()
    return kept * block_size


class PrefixCache:
    """vLLM's own prefix cache, as its scheduler's process sees it; empty until it is bound."""

    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.block_size, self._windows = block_size, windows
        self._pool: Any = None
        self._manager: Any = None
        self._kept: dict[str, list[Any]] = {}

    def bind(self, manager: Any) -> None:
        self._manager, self._pool = manager, manager.block_pool

    def tokens(self, request: Any) -> int:
        """Leading tokens of a request's prompt that vLLM will find under its blocks' present names."""
        most = request.num_tokens - 1  # vLLM computes at least the last token: a block that holds it does not count
        if self._manager is None or not self._manager.enable_caching:
            return 0
        found = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, most)
        return int(found[1]) // self.block_size * self.block_size

    def holds_salted(self, request: Any, first_token: int, salt: bytes) -> bool:
        """Whether it holds, for some group, the first block that `salt_from` would rename."""
        kept = first_token // self.block_size
        if self._pool is None or not kept < len(request.block_hashes) == request.num_tokens // self.block_size:
            return False
        name = _salted(request.block_hashes[kept], salt)
        return any(self._find(name, group) for group in range(len(self._windows)))

    def plain_names(self, request: Any, plain_tokens: int | None, most: int) -> tuple[bytes, ...]:
        """The names of the blocks of a request's first `most` tokens that plain requests find: their KV is exact;
        `plain_tokens`: what `salt_from` has left them, None: all."""
        names, size = request.block_hashes, self.block_size
        if len(names) != request.num_tokens // size:  # a hash covers another span than a block
            return ()
        return tuple(names[: (most if plain_tokens is None else min(most, plain_tokens)) // size])

    def pages_of(
        self, names: tuple[bytes, ...], first: int, stop: int
    ) -> tuple[list[list[int]] | None, tuple[bytes, ...]]:
        """The blocks of these names that hold rows `first`..`stop` - 1, for each group, and the names. None: some are
        gone; and the names in front of these.

        They are not held: vLLM refuses to forget its cache while blocks are. Asked for when a step has been scheduled,
        they hold these rows once it is computed, until the next one is."""
        groups, found = [*range(len(self._windows))], list[Sequence[Any]]()
        for at in range(first // self.block_size, -(-stop // self.block_size)):
            blocks = None if self._pool is None else self._pool.get_cached_block(names[at], groups)
            if blocks is None:
                return None, names[:at]
            found.append(blocks)
        return [[block.block_id for block in blocks] for blocks in zip(*found, strict=True)], names

    @property
    def is_empty(self) -> bool:
        """It holds no block under any name."""
        return self._pool is None or all(block.block_hash is None for block in self._pool.blocks)

    def has_room(self, tokens: int, spare: int) -> bool:
        """Whether an empty cache holds so many tokens of one prompt, and so many blocks beside."""
        if self._pool is None:
            return True
        needed = sum(window is None for window in self._windows) * -(-tokens // self.block_size)
        return needed + spare < int(self._pool.num_gpu_blocks)  # one is the null block

    def keep(self, request: Any, stop: int, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """The blocks that vLLM holds of the rows in front of `stop`, a multiple of the block size, as far as later rows
        see them, for each group. A window that ends far behind `stop` has passed the blocks that rows right behind it
        need: they are not in the request's own table. They are then kept from being used otherwise, until `let_go`. The
        null block stands for those that no later row sees, and for those that are gone already."""
        count = -(-stop // self.block_size)
        found, kept = [], []
        for group, (window, table) in enumerate(zip(self._windows, tables, strict=True)):
            own = list(table[:count])
            first = first_key(stop, window) // self.block_size
            for at in range(first, count if self._manager is not None else 0):
                if own[at] == NULL_BLOCK and (block := self._find(request.block_hashes[at], group)):
                    own[at] = block[0].block_id
                    kept.append(block[0])
            found.append([NULL_BLOCK] * min(first, count) + own[first:])
        if kept:
            self._pool.touch(kept)
            self._kept[request.request_id] = kept
        return found

    def let_go(self, request_id: str) -> None:
        if kept := self._kept.pop(request_id, None):
            self._pool.free_blocks(reversed(kept))

    def _find(self, name: bytes, group: int) -> Any:
        return self._pool.get_cached_block(name, [group])


def _salted(name: bytes, salt: bytes) -> bytes:
    return type(name)(hashlib.sha256(salt + bytes(name)).digest()[: len(name)])


def _specs(spec: Any) -> list[Any]:
    """The layers' own specs of a group whose layers differ in their heads; else the group's."""
    return list((getattr(spec, "kv_cache_specs", None) or {"": spec}).values())
