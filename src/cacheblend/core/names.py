"""Names of blocks: hash chains over token ids. A block's name covers all tokens in front of it.

    root   = H(format, model fingerprint, KV dtype and codec, tenant salt)
    name_0 = H(root, tokens_0)
    name_i = H(name_{i-1}, tokens_i)

So the KV stored under a name is exactly what a plain prefill of that chain computes. This module knows hashes and
token ids; it does not know models, files or tensors.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NewType, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

BlockName = NewType("BlockName", bytes)
"""32 bytes (SHA-256). Files and messages write it as `name.hex()`."""

TokenIds = npt.NDArray[np.uint32]
"""Token ids, shape [tokens], little-endian uint32: hashed, stored and compared in this form."""

NAME_FORMAT = 1  # incremented when the meaning of a name changes; names of different formats are never equal
STATE_IDS: TokenIds = np.array([0xFFFFFFFF], dtype="<u4")
"""The only token id of a snapshot, which no prompt has: a snapshot is a block behind the chain that it sums up."""


def as_token_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenIds:
    """Token ids as a contiguous uint32 array [tokens]; raises `OverflowError` on a negative or huge id."""
    array = np.asarray(ids)
    if array.ndim != 1:
        raise TypeError(f"token ids must be one list of integers, not of shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype="<u4")
    if array.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, not {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF:
        raise OverflowError(f"token ids must be in 0..{0xFFFFFFFF}, got {array.min()}..{array.max()}")
    return np.ascontiguousarray(array, dtype="<u4")


def join_ids(parts: Iterable[TokenIds]) -> TokenIds:
    """The parts concatenated; empty without parts."""
    return np.concatenate([np.empty(0, dtype="<u4"), *parts]).astype("<u4", copy=False)


def equal_length(ours: TokenIds, theirs: TokenIds) -> int:
    """Number of leading ids that are equal; takes time in proportion to them."""
    end, at, step = min(len(ours), len(theirs)), 0, 512
    while at < end:
        stop = min(end, at + step)
        differing = np.flatnonzero(ours[at:stop] != theirs[at:stop])
        if len(differing):
            return at + int(differing[0])
        at, step = stop, 2 * step
    return end


def root_name(fingerprint: str, kv_dtype: str, codec: str = "raw", salt: str = "") -> BlockName:
    """The start of every chain of one model, dtype (e.g. ``"bfloat16"``), codec and tenant. `fingerprint`: identifies
    the weights and the config fields that shape K and V. `codec`: ``"raw"`` for lossless records; records of a lossy
    codec have different names. `salt`: separates tenants who must not share a store's contents."""
    parts = (str(NAME_FORMAT), fingerprint, kv_dtype, codec, salt)
    # Length-prefixed, so that no two tuples of parts give the same bytes.
    framed = b"".join(len(p.encode()).to_bytes(4, "little") + p.encode() for p in parts)
    return BlockName(hashlib.sha256(b"cacheblend-root\0" + framed).digest())


def block_name(parent: BlockName, token_ids: TokenIds) -> BlockName:
    """Name of the block that holds `token_ids` directly after the chain named `parent`."""
    return BlockName(hashlib.sha256(parent + token_ids.tobytes()).digest())


def state_name(parent: BlockName) -> BlockName:
    """Name of the snapshot of recurrent layers' states at the end of the chain named `parent`."""
    return block_name(parent, STATE_IDS)


def grouped(items: Iterable[T], joins: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """The items in their order, in lists; `joins(group, item)`: the item goes to the last group, and begins none."""
    group: list[T] = []
    for item in items:
        if group and not joins(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def split_blocks(token_ids: TokenIds, block_size: int) -> list[TokenIds]:
    """The blocks of one segment: `block_size` tokens each, the last one may be shorter; none if it is empty."""
    return [token_ids[start : start + block_size] for start in range(0, len(token_ids), block_size)]


def chain_names(parent: BlockName, blocks: Sequence[TokenIds]) -> list[BlockName]:
    """Names of consecutive blocks after `parent`."""
    names = []
    for tokens in blocks:
        parent = block_name(parent, tokens)
        names.append(parent)
    return names
