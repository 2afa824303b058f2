"""Which blocks go first: the policies by themselves, in stores, against one that knows the future, against a model."""

import contextlib
import random
import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cacheblend.core.errors import StoreFullError
from cacheblend.core.names import BlockName
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend.store.eviction import POLICIES, Eviction, eviction_of
from cacheblend.store.format.block_file import encode_block
from campaign import share
from lab.speed.eviction import belady
from store_blocks import holds, make_block, same_bits


def name_of(number: int) -> BlockName:
    return BlockName(bytes([number]))


def hits_of(policy: Eviction, uses: list[int], capacity: int, worth: dict[int, float] | None = None) -> int:
    """A cache of equal blocks, by the policy."""
    held: set[BlockName] = set()
    hits = 0
    for number in uses:
        name = name_of(number)
        hits += name in held
        if name not in held and len(held) >= capacity:
            victim = next(policy.victims())
            policy.evicted(victim)
            held.remove(victim)
        held.add(name)
        policy.used(name, (worth or {}).get(number, 1.0))
    return hits


def test_lru_lets_go_of_what_was_not_used_for_longest() -> None:
    policy = eviction_of("lru")
    for number in (1, 2, 3, 1):
        policy.used(name_of(number), 1)
    assert list(policy.victims()) == [name_of(2), name_of(3), name_of(1)]
    policy.gone(name_of(3))
    assert list(policy.victims()) == [name_of(2), name_of(1)]


def test_worth_keeps_what_is_used_often_and_what_is_dear_until_it_has_grown_old() -> None:
    policy = eviction_of("worth")
    for number in (1, 1, 1, 2, 3):
        policy.used(name_of(number), 2.0 if number == 3 else 1.0)
    for _ in range(2):  # asking changes nothing
        assert list(policy.victims()) == [name_of(2), name_of(3), name_of(1)]
    policy.gone(name_of(3))
    policy.used(name_of(3), 2.0)  # went and came back: it is there once
    assert list(policy.victims()) == [name_of(2), name_of(3), name_of(1)]
    policy = eviction_of("worth")
    for _ in range(5):
        policy.used(name_of(0), 1.0)
    for number in range(1, 200):
        policy.used(name_of(number), 1.0)
        victim = next(policy.victims())
        policy.evicted(victim)
        if victim == name_of(0):
            break
    assert victim == name_of(0) and number < 20


def test_a_scan_does_not_empty_a_cache_of_what_is_used_often() -> None:
    rng = random.Random(0)
    uses = []
    for step in range(3000):
        uses.append(rng.randrange(10) if step % 2 else 10 + step % 240)
    lru, worth = (hits_of(eviction_of(name), uses, 12) for name in ("lru", "worth"))
    assert worth > 1.1 * lru


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 6))
def test_no_policy_is_better_than_the_optimum(name: str, uses: list[int], capacity: int) -> None:
    best = belady([name_of(number) for number in uses], capacity)
    assert hits_of(eviction_of(name), uses, capacity) <= best <= len(uses) - len(set(uses))
    assert belady([name_of(number) for number in uses], 10) == len(uses) - len(set(uses))


def brute_force(uses: list[int], capacity: int, at: int = 0, held: frozenset[int] = frozenset()) -> int:
    if at == len(uses):
        return 0
    number = uses[at]
    if number in held:
        return 1 + brute_force(uses, capacity, at + 1, held)
    choices = [brute_force(uses, capacity, at + 1, held)]  # not admitting it is allowed
    if len(held) < capacity:
        choices.append(brute_force(uses, capacity, at + 1, held | {number}))
    choices += [brute_force(uses, capacity, at + 1, held - {victim} | {number}) for victim in held]
    return max(choices)


@given(st.lists(st.integers(0, 4), max_size=9), st.integers(1, 3))
def test_belady_is_the_best_of_all(uses: list[int], capacity: int) -> None:
    assert belady([name_of(number) for number in uses], capacity) == brute_force(uses, capacity)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_store_keeps_what_is_found_often(kind: str, tmp_path: Path) -> None:
    often = make_block(0)
    size = 12_000 if kind == "disk" else 3 * sum(record.nbytes for record in often.records) + 10
    made = {
        "memory": lambda policy: MemoryStore(size, eviction=policy),
        "disk": lambda policy: DiskStore(tmp_path / policy, max_bytes=3 * size, durable=False, eviction=policy),
    }[kind]
    for policy, kept in (("lru", False), ("worth", True)):
        with made(policy) as store:
            store.write(often)
            for _ in range(20):
                store.find([often.name])
            for seed in range(1, 13):
                store.write(make_block(seed))
                store.find([make_block(seed).name])
            assert (store.find([often.name])[0] is not None) == kept


def test_the_trace_of_real_requests() -> None:
    trace = Path(__file__).parents[3] / "shared" / "data" / "ragpulse"
    if not trace.is_dir():
        pytest.skip("needs the RAGPulse trace in ../shared/data/ragpulse")
    from lab.speed.eviction import run

    rates = run(trace, (0.05, 0.2, 1.0))["hit_rate"]
    assert all(worth > lru for lru, worth in zip(rates["lru"][:2], rates["worth"][:2], strict=True))
    assert all(best >= worth for best, worth in zip(rates["belady"], rates["worth"], strict=True))
    assert len({each[-1] for each in rates.values()}) == 1  # all of it fits


# ---- stores against an obvious model ------------------------------------------------------------------------


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
