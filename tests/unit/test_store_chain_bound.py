"""A store's bound on files of several blocks: their bytes are freed with the last name, by eviction or by age."""

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.errors import StoreFullError
from cacheblend.core.plan.blocks import Block
from store_blocks import holds, make_block, make_chain
from store_folders import disk, file_bytes, occupied


@pytest.mark.parametrize("eviction", ["lru", "worth"])
@pytest.mark.parametrize("seed", range(12))
def test_the_bound_holds_and_what_is_held_is_right(seed: int, eviction: str, tmp_path: Path) -> None:
    """Chains and single blocks are written, found, pinned, deleted, pruned; another store has the folder open, too."""
    draw = random.Random(f"{seed} {eviction}")
    chains = [make_chain(draw.randrange(1, 8), 10 * n, draw.choice([4, 40])) for n in range(12)]
    most = draw.choice([3, 6]) * max(map(file_bytes, chains))
    pinned: list[Block] = []
    with disk(tmp_path, max_bytes=most, eviction=eviction) as store, disk(tmp_path, max_bytes=None) as other:
        for _ in range(150):
            chain = draw.choice(chains)
            some = draw.sample(chain, draw.randrange(1, len(chain) + 1))
            match draw.choice(["write", "write", "write", "find", "delete", "pin", "prune", "other", "one"]):
                case "write":
                    try:
                        store.write_all(chain)
                        held = store.find([block.name for block in chain])
                        assert eviction == "worth" or None not in held  # which may prefer others to new blocks
                    except StoreFullError:
                        assert pinned
                case "one":
                    try:
                        store.write(some[0])
                    except StoreFullError:
                        assert pinned
                case "find":
                    store.find([block.name for block in some])
                case "delete":
                    other.delete(some[0].name)
                    pinned = [block for block in pinned if block is not some[0]]
                case "pin":
                    store.unpin([block.name for block in pinned])
                    pinned = some[:2]
                    store.pin([block.name for block in pinned])
                case "prune":
                    store.prune(draw.randrange(most))
                case "other":
                    assert other.stats().bytes == occupied(tmp_path)
            assert occupied(tmp_path) <= most
            assert abs(store.stats().bytes - occupied(tmp_path)) == 0
        for store_or_other in (store, other):
            for chain in chains:
                held = store_or_other.held([block.name for block in chain])
                assert [holds(store_or_other, block) for block in chain] == held
        assert store.stats().damaged == other.stats().damaged == 0


def test_a_small_need_evicts_a_whole_chain(tmp_path: Path) -> None:
    """A share of the file is all that is needed, and the file goes with its last name only."""
    old, new = make_chain(8), make_block(50)
    with disk(tmp_path) as store:
        store.write_all(old)
    with disk(tmp_path, max_bytes=file_bytes(old)) as store:
        assert store.write(new) and holds(store, new)
        assert store.stats().blocks == 1


@pytest.mark.parametrize("length", [1, 4])
def test_a_store_of_which_there_is_a_snapshot_of_links_is_not_emptied(length: int, tmp_path: Path) -> None:
    with disk(tmp_path / "store") as store:
        for seed in range(0, 40, length):
            store.write_all(make_chain(length, seed, 40))
    shutil.copytree(tmp_path / "store", tmp_path / "snapshot", copy_function=os.link)  # as by `cp -al`
    with disk(tmp_path / "store") as store:
        most = store.stats().bytes
    with disk(tmp_path / "store", max_bytes=most) as store:
        assert store.write(make_block(90)) and 30 <= store.stats().blocks <= 40


def test_a_pinned_block_keeps_its_file_and_the_others_go(tmp_path: Path) -> None:
    chain = make_chain(4)
    with disk(tmp_path) as store:
        store.write_all(chain)
        store.pin([chain[1].name])
        assert store.prune(0) == 0  # the file stays
        assert [holds(store, block) for block in chain] == [False, True, False, False]
        assert store.stats().bytes == occupied(tmp_path) == file_bytes(chain)
        store.unpin([chain[1].name])
        assert store.prune(0) == file_bytes(chain)


def test_what_cannot_fit_beside_pinned_blocks_evicts_nothing(tmp_path: Path) -> None:
    """A pinned block keeps the bytes of all blocks of its file, so that removing those is in vain."""
    chains = [make_chain(4, seed) for seed in (0, 10, 20)]
    with disk(tmp_path, max_bytes=sum(map(file_bytes, chains))) as store:
        for chain in chains:
            store.write_all(chain)
        store.pin([chain[0].name for chain in chains])
        with pytest.raises(StoreFullError, match="unpin blocks"):
            store.write(make_block(50))
        assert store.stats().blocks == 12 and store.stats().evictions == 0


def test_a_name_that_another_process_removed_has_freed_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_chain(2, tokens=400), make_block(50, tokens=400)
    with disk(tmp_path) as store, disk(tmp_path, max_bytes=file_bytes(old) + 9000) as other:
        store.write_all(old)
        real = other._capacity._victims

        def victims(surplus: int) -> Any:
            found = real(surplus)
            if store.held([found[0].name]) == [True]:
                store.delete(found[0].name)
                return found[:1]
            return found

        monkeypatch.setattr(other._capacity, "_victims", victims)
        other.write(new)
        assert holds(other, new) and occupied(tmp_path) <= file_bytes(old) + 9000


def test_a_chain_larger_than_the_bound_is_stored_as_far_as_it_fits(tmp_path: Path) -> None:
    chain = make_chain(6, tokens=500)
    one = file_bytes(chain[:1])
    with disk(tmp_path, max_bytes=2 * one) as store:
        assert store.write_all(chain) == [True] * 6
        assert store.stats().blocks == 2 and occupied(tmp_path) <= 2 * one
    with disk(tmp_path / "tiny", max_bytes=one - 1) as store, pytest.raises(StoreFullError, match="raise max_bytes"):
        store.write_all(chain)


def test_time_to_live_removes_all_of_a_chain(tmp_path: Path) -> None:
    chain = make_chain(3)
    with disk(tmp_path) as store:
        store.write_all(chain)
        old = time.time_ns() - 100 * 10**9
        os.utime(store.file_of(chain[0].name), ns=(old, old))
    with disk(tmp_path, ttl=50) as store:
        assert store.find([block.name for block in chain]) == [None] * 3 and occupied(tmp_path) == 0
