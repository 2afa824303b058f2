"""Stores against an obvious model: least recently used first out, pinned blocks stay, the bound holds."""

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cacheblend.core.errors import StoreFullError
from cacheblend.core.names import BlockName
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend.store.format.block_file import encode_block
from campaign import share
from store_blocks import holds, make_block, same_bits

BLOCKS = [make_block(seed, tokens=1 + seed * 5) for seed in range(10)]
index = st.integers(0, len(BLOCKS) - 1)


class StoreMachine(RuleBasedStateMachine):
    """The model: names from least to most recently used, and the set of pins."""

    kind: ClassVar[str]
    max_bytes: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = self.open()
        self.order: list[BlockName] = []
        self.pins: set[BlockName] = set()
        self.sizes = {block.name: self.size(block) for block in BLOCKS}

    def size(self, block: object) -> int:
        if self.kind == "memory":
            return sum(record.nbytes for record in block.records)
        return sum(len(part) for part in encode_block(block))

    def open(self) -> KVStore:
        if self.kind == "memory":
            return MemoryStore(self.max_bytes)
        disk = DiskStore(self.folder / "store", max_bytes=self.max_bytes, durable=False)
        return TieredStore(MemoryStore(6_000), disk) if self.kind == "tiered" else disk

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def use(self, name: BlockName) -> None:
        self.order.remove(name)
        self.order.append(name)

    def admit(self, need: int) -> bool:
        """Evicts in the model as the store should; False if the block cannot be had."""
        total = sum(self.sizes[name] for name in self.order)
        kept = sum(self.sizes[name] for name in self.order if name in self.pins)
        if need + kept > self.max_bytes:
            return False
        if total + need > self.max_bytes:
            slack = 0 if self.kind == "memory" else self.max_bytes // 64
            for name in [name for name in self.order if name not in self.pins]:
                if total + need <= self.max_bytes - slack:
                    break
                self.order.remove(name)
                total -= self.sizes[name]
        return True

    @rule(i=index)
    def write(self, i: int) -> None:
        block = BLOCKS[i]
        if block.name in self.order:
            assert not self.store.write(block)
            self.use(block.name)
        elif self.admit(self.sizes[block.name]):
            assert self.store.write(block)
            self.order.append(block.name)
        else:
            with pytest.raises(StoreFullError):
                self.store.write(block)

    @rule(chosen=st.lists(index, unique=True, max_size=4))
    def find(self, chosen: list[int]) -> None:
        names = [BLOCKS[i].name for i in chosen]
        got = [entry is not None for entry in self.store.find(names)]
        assert got == [name in self.order for name in names]
        for name in reversed(names):  # of one call's blocks the first are evicted last
            if name in self.order:
                self.use(name)

    @rule(i=index, layer=st.integers(0, 2))
    def read(self, i: int, layer: int) -> None:
        if BLOCKS[i].name in self.order:
            assert same_bits(self.store.read(BLOCKS[i].name, layer), BLOCKS[i].records[layer])

    @rule(i=index)
    def pin(self, i: int) -> None:
        self.store.pin([BLOCKS[i].name])
        self.pins.add(BLOCKS[i].name)

    @rule(i=index)
    def unpin(self, i: int) -> None:
        self.store.unpin([BLOCKS[i].name])
        self.pins.discard(BLOCKS[i].name)

    @rule(i=index)
    def delete(self, i: int) -> None:
        assert self.store.delete(BLOCKS[i].name) == (BLOCKS[i].name in self.order)
        self.pins.discard(BLOCKS[i].name)
        with contextlib.suppress(ValueError):
            self.order.remove(BLOCKS[i].name)

    @rule()
    def hold_what_the_model_holds(self) -> None:
        held = [block for block in BLOCKS if block.name in self.order]
        for block in held:
            assert holds(self.store, block)
            self.use(block.name)

    @invariant()
    def agree(self) -> None:
        stats = self.store.stats()
        assert stats.blocks == len(self.order)
        assert stats.bytes == sum(self.sizes[name] for name in self.order) <= self.max_bytes
        assert self.store.pinned() == self.pins
        assert stats.pinned == len(self.pins.intersection(self.order))
        assert all(tier.bytes <= (tier.max_bytes or 0) for tier in stats.tiers)
        assert stats.damaged == 0


@pytest.mark.parametrize(("kind", "max_bytes"), [("memory", 6_000), ("disk", 30_000), ("tiered", 30_000)])
def test_store_behaves_as_the_model(kind: str, max_bytes: int) -> None:
    machine = type(f"{kind}Machine", (StoreMachine,), {"kind": kind, "max_bytes": max_bytes})
    run_state_machine_as_test(machine, settings=settings(max_examples=share(60), stateful_step_count=30))
