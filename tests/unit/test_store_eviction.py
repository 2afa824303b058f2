"""Which blocks go first: the policies by themselves, in stores, and against one that knows the future."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.names import BlockName
from cacheblend.store import DiskStore, MemoryStore
from cacheblend.store.eviction import POLICIES, Eviction, eviction_of
from lab.speed.eviction import belady
from store_blocks import make_block


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


def test_worth_keeps_what_is_used_often_and_what_is_dear() -> None:
    policy = eviction_of("worth")
    for number in (1, 1, 1, 2, 3):
        policy.used(name_of(number), 2.0 if number == 3 else 1.0)
    assert list(policy.victims()) == [name_of(2), name_of(3), name_of(1)]
    assert list(policy.victims()) == [name_of(2), name_of(3), name_of(1)]  # asking changes nothing


def test_a_name_that_went_and_came_back_is_there_once() -> None:
    policy = eviction_of("worth")
    policy.used(name_of(1), 1.0)
    policy.gone(name_of(1))
    policy.used(name_of(1), 1.0)
    assert list(policy.victims()) == [name_of(1)]


def test_what_was_popular_once_grows_old() -> None:
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
