"""Poisoned context: prompts that carry other context to a chunk, and the comparison of what is stored in the end.

A chunk's KV that was computed in a context of an attacker's choosing would answer for that context wherever the chunk
is used. Every record of a store is therefore compared with what the model's own forward (transformers, float32) gives
for the tokens of its name's chain and nothing else: anchor and chunk, or a prompt's text from its beginning.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cacheblend.core.errors import BlockLostError, StoreFullError
from cacheblend.core.plan.blocks import KVLayout
from cacheblend.engines.provenance import stamp
from cacheblend.store import KVStore, MemoryStore

HISTORIES = int(os.environ.get("CACHEBLEND_HISTORIES", "16"))
"""Random histories of each engine. The run of 600 and 400 is recorded in docs/results/poisoned.json."""

RECORDED = os.environ.get("CACHEBLEND_POISONED_JSON")
"""A file to which each engine's counts are added."""

TOLERANCE = 1e-4
"""Largest error of a record that is not poisoned, relative to the layer's largest value.

Float32 rounds at 6e-8; the same rows in a batch, behind a stored prefix or in another kernel's tiles add up in another
order, and random weights amplify that from layer to layer: to less than 1e-5 (`largest_error` of the recorded run). A
row that has seen a single other token is off by 0.01 at least (`test_a_neighbour_that_was_seen_is_far_from_rounding`).
"""

COMPRESSED_TOLERANCE = 1e-2
"""The same of int8 records: half of one of 127 steps, and a bit."""

Part = tuple[list[int], bool]
"""Token ids, and whether they are a chunk."""
KV = tuple[torch.Tensor, torch.Tensor]
Prefill = Callable[[bytes, Sequence[int]], Sequence[KV]]
"""From a chain's root and its ids to the keys and values of each layer, [kv_heads, tokens, head_dim]."""


class Written(NamedTuple):
    """What a name was written as."""

    parent: bytes
    token_ids: list[int]


@dataclass
class Tally:
    """What was compared.

    Attributes:
        histories: random sequences of requests.
        records: one for each layer of each block that a store holds.
        blocks: of these records.
        poisoned: blocks that differ from the plain prefill of their chain, or whose name is not that of one.
        largest: error of a record that is not poisoned.
        smallest_poison: the largest error in a poisoned block's records, of that block in which it is smallest.
        what: about poisoned blocks.
        met: how often something happened that the histories are about.
    """

    histories: int = 0
    records: int = 0
    blocks: int = 0
    poisoned: int = 0
    largest: float = 0.0
    smallest_poison: float = float("inf")
    what: list[str] = field(default_factory=list)
    met: dict[str, int] = field(default_factory=dict)

    def meet(self, what: str, times: int = 1) -> None:
        """Something happened."""
        self.met[what] = self.met.get(what, 0) + times

    def add(self, other: "Tally") -> None:
        """Counts another one's, too."""
        self.histories += other.histories
        self.records += other.records
        self.blocks += other.blocks
        self.poisoned += other.poisoned
        self.largest = max(self.largest, other.largest)
        self.smallest_poison = min(self.smallest_poison, other.smallest_poison)
        self.what += other.what
        for what, times in other.met.items():
            self.meet(what, times)

    def report(self, engine: str, note: Callable[[str, object], None], command: str) -> None:
        """Passes the counts on to pytest's summary, and to the file `RECORDED`."""
        note("poisoned_blocks", [engine, self.histories, self.blocks, self.poisoned])
        if RECORDED:
            path = Path(RECORDED)
            known = json.loads(path.read_text()) if path.exists() else {}
            found = {
                "histories": self.histories,
                "blocks": self.blocks,
                "records": self.records,
                "poisoned_blocks": self.poisoned,
                "tolerance": TOLERANCE,
                "largest_error": self.largest,
                "met": dict(sorted(self.met.items())),
                "command": command,
                **stamp(),
            }
            path.write_text(json.dumps({**known, engine: found}, indent=1) + "\n")


class Witness:
    """Mixed into a store: remembers what was written under which name, and fails where it is told to."""

    written: dict[bytes, Written]
    draw: random.Random | None = None
    """Half of the writes and a tenth of the reads fail while there is one."""

    def write(self, block: Any) -> bool:
        return self.write_all([block])[0]

    def write_all(self, blocks: Sequence[Any]) -> list[bool]:
        # Before it fails: what is behind a block that was not stored may be.
        for block in blocks:
            what = Written(bytes(block.parent), block.token_ids.tolist())
            self.__dict__.setdefault("written", {})[bytes(block.name)] = what
        if self.draw is None:
            return self._written(blocks)
        count = next((at for at in range(len(blocks)) if self.draw.random() < 0.5), len(blocks))
        written = self._written(blocks[:count])
        if count < len(blocks):
            raise StoreFullError("no space, for a test")
        return written

    def _written(self, blocks: Sequence[Any]) -> list[bool]:
        if isinstance(self, MemoryStore):  # whose write_all would write one by one, and note each again
            return [bool(super(Witness, self).write(block)) for block in blocks]  # type: ignore[misc]
        return list(super().write_all(blocks))  # type: ignore[misc]

    def read_layers(self, names: Sequence[Any], layers: range, *others: Any) -> Any:
        read = super().read_layers(names, layers, *others)  # type: ignore[misc]
        if self.draw is None:
            return read
        lost = [self.draw.random() < 0.1 for _ in names]
        return [
            BlockLostError([name], "lost, for a test") if gone else each
            for name, each, gone in zip(names, read, lost, strict=True)
        ]


class WitnessMemory(Witness, MemoryStore):
    """In memory."""


class Hostile:
    """Draws prompts around a few chunks, with neighbours that would poison them if they were seen.

    Args:
        rng: of everything drawn.
        vocabulary: token ids to draw from.
        block_size: of the stored blocks; chunks are shorter, as long, and longer.
        most: tokens of a prompt.
    """

    def __init__(self, rng: random.Random, vocabulary: range, block_size: int, most: int) -> None:
        self.rng, self._vocabulary, self._most = rng, vocabulary, most
        lengths = [1, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + rng.randrange(9)]
        self.chunks = [self.ids(max(1, each)) for each in rng.sample(lengths, 3)]
        self.fronts = [self.ids(rng.randint(1, block_size)), self.ids(block_size + 3), list(self.chunks[0]), []]

    def ids(self, count: int) -> list[int]:
        """Random tokens."""
        return self.rng.choices(self._vocabulary, k=count)

    def prompt(self) -> list[Part]:
        """A front that other prompts have, too, chunks between hostile neighbours, and a question."""
        parts: list[Part] = [(self.rng.choice(self.fronts), False)]
        for _ in range(self.rng.randint(1, 3)):
            chunk = self.rng.choice(self.chunks)
            new = [*self._beside(chunk), (chunk, True), *self._beside(chunk)]
            if sum(len(ids) for ids, _ in (*parts, *new)) > self._most:
                break
            parts += new
        return [part for part in (*parts, (self.ids(self.rng.randint(1, 9)), False)) if part[0]]

    def _beside(self, chunk: list[int]) -> list[Part]:
        """What stands directly in front of a chunk, or behind it."""
        rng, cut = self.rng, self.rng.randint(0, len(chunk))
        other = rng.choice(self.chunks)
        way: list[Part] = rng.choice(
            [
                [],
                [(self.ids(rng.randint(1, 12)), False)],
                [(chunk, False)],  # as text
                [(chunk[:cut], False)],
                [(chunk[cut:], False)],
                [(chunk, True)],  # once more
                [(chunk[:cut], True)],
                [(chunk[cut:], True)],
                [(other, True)],
                [(chunk + other, True)],  # both at once
                [(other + chunk, True)],
                [(chunk[:cut], True), (chunk[cut:], False)],
                [([chunk[0]] * rng.randint(2, 20), False)],
                [([self._vocabulary[0]], False)],
            ]
        )
        return way


def names_in(store: Any) -> set[bytes]:
    """Of every whole block that a store in memory or in a folder holds, not of what was written to it."""
    if isinstance(store, MemoryStore):
        return {bytes(name) for name, held in store._held.items() if not held.missing}
    files = (file.stem for file in store.path.rglob("*") if "manifest" not in str(file.parent))
    names = [bytes.fromhex(stem) for stem in files if len(stem) == 64]
    return {name for name, is_held in zip(names, store.held(names), strict=True) if is_held}


def name_of(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a block behind a chain, hashed without the project's code."""
    return hashlib.sha256(parent + np.array(token_ids, dtype="<u4").tobytes()).digest()


def compare(
    store: KVStore,
    names: Collection[bytes],
    written: Mapping[bytes, Written],
    roots: Collection[bytes],
    prefill: Prefill,
) -> Tally:
    """Compares every record of a store with the plain prefill of its chain.

    Args:
        store: read, layer by layer.
        names: of all blocks that it holds.
        written: names that were written, those that are gone since among them: a chain may be longer than what is left.
        roots: in which a chain may begin.
        prefill: independent of the project.
    """
    tally = Tally()
    for name in sorted(names):
        chain = _chain(name, written, roots)
        tally.blocks += 1
        if chain is None:
            tally.poisoned += 1
            tally.what.append(f"{name.hex()} is the name of no chain")
            continue
        root, ids = chain
        tokens = len(written[name].token_ids)
        entry = store.find([name])[0]  # type: ignore[list-item]
        assert entry is not None and entry.token_ids.tolist() == written[name].token_ids
        is_raw = entry.layout.codec == "raw"
        errors = _errors(store, name, entry.layout, ids, tokens, prefill(root, ids))
        tally.records += len(errors)
        tally.meet("blocks compressed", not is_raw)
        if max(errors) <= (TOLERANCE if is_raw else COMPRESSED_TOLERANCE):
            tally.largest = max(tally.largest, *errors) if is_raw else tally.largest
        else:
            tally.poisoned += 1
            tally.smallest_poison = min(tally.smallest_poison, max(errors))
            tally.what.append(f"{tokens} tokens behind {ids[: len(ids) - tokens]} are off by {max(errors):.1e}")
    return tally


def _chain(name: bytes, written: Mapping[bytes, Written], roots: Collection[bytes]) -> tuple[bytes, list[int]] | None:
    """Root and ids of the chain that a name is the hash of; None if there is none."""
    ids: list[int] = []
    while name not in roots:
        if name not in written:
            return None
        parent, tokens = written[name]
        if name_of(parent, tokens) != name:
            return None
        name, ids = parent, [*tokens, *ids]
    return name, ids


def _errors(
    store: KVStore, name: bytes, layout: KVLayout, ids: list[int], tokens: int, expected: Sequence[KV]
) -> list[float]:
    """Of each layer's record: the largest error, relative to the largest value of the chain's keys or values."""
    errors = []
    for layer, kv in enumerate(expected):
        found = layout.decode(layer, store.read(name, layer), tokens)  # type: ignore[arg-type]
        assert found.shape[2] == tokens and found.dtype == torch.float32
        for part, right in enumerate(kv):
            off = (found[:, part] - right[:, len(ids) - tokens :]).abs().max() / right.abs().max()
            errors.append(float(off) if part == 0 else max(errors.pop(), float(off)))
    return errors
