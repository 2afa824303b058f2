"""Several folders that share the blocks between them."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.store import DiskStore, open_store
from cacheblend.store.combined import striped
from cacheblend.store.combined.striped import StripedStore
from store_blocks import holds, make_block, make_manifest


def url_of(folder: Path, names: str) -> str:
    return "file://" + ":".join(str(folder / name) for name in names)


def test_blocks_are_spread_and_found_again(tmp_path: Path) -> None:
    blocks = [make_block(seed) for seed in range(60)]
    with open_store(url_of(tmp_path, "abc")) as store:
        for block in blocks:
            store.write(block)
    for name in "abc":
        with DiskStore(tmp_path / name) as part:
            assert 8 <= part.stats().blocks <= 32
    with open_store(url_of(tmp_path, "cab")) as store:
        assert all(holds(store, block) for block in blocks)
        assert store.stats().blocks == 60
        assert len(store.stats().tiers) == 3


def test_a_folder_more_moves_only_what_it_takes(tmp_path: Path) -> None:
    blocks = [make_block(seed) for seed in range(90)]
    with open_store(url_of(tmp_path, "ab")) as store:
        for block in blocks:
            store.write(block)
    with open_store(url_of(tmp_path, "abc")) as store:
        found = sum(entry is not None for entry in store.find([block.name for block in blocks]))
    assert 45 <= found <= 75


def test_a_lost_folder_costs_its_own_blocks(tmp_path: Path) -> None:
    blocks = [make_block(seed) for seed in range(60)]
    with open_store(url_of(tmp_path, "abc")) as store:
        for block in blocks:
            store.write(block)
        for path in (tmp_path / "b" / "blocks").rglob("*.safetensors"):
            path.unlink()
        entries = store.find([block.name for block in blocks])
        left = [block for block, entry in zip(blocks, entries, strict=True) if entry is not None]
        assert 25 <= len(left) < 55
        assert all(holds(store, block) for block in left)


def test_prune_keeps_the_manifests_of_what_other_folders_hold(tmp_path: Path) -> None:
    with open_store(url_of(tmp_path, "ab")) as store:
        made = [make_block(seed) for seed in range(20)]
        for block in made:
            store.write(block)
            store.put_manifest(make_manifest(block))
        store.pin([block.name for block in made[:7]])
        assert store.prune(0) > 0
        assert {manifest.chunk_id for manifest in store.manifests()} == {block.name for block in made[:7]}
        with pytest.raises(InvalidInputError, match="-1"):
            store.prune(-1)


def test_the_bound_is_shared(tmp_path: Path) -> None:
    with open_store(url_of(tmp_path, "ab"), max_bytes=40_000) as store:
        for seed in range(40):
            store.write(make_block(seed))
        assert store.stats().bytes <= 40_000
        assert store.stats().max_bytes == 40_000


def test_no_store_and_a_folder_given_twice(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a store at least"):
        StripedStore({})
    with pytest.raises(InvalidInputError, match="twice"):
        open_store(url_of(tmp_path, "aa"))


def test_a_read_that_hangs_in_one_folder_stops_nobody_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait for it: an engine has sixteen threads that read."""
    store, answers = open_store(url_of(tmp_path, "ab")), threading.Event()
    blocks = [make_block(seed) for seed in range(20)]
    for block in blocks:
        store.write(block)
    hanging, other = store.members  # type: ignore[attr-defined]
    read = hanging.read_layers
    monkeypatch.setattr(hanging, "read_layers", lambda *arguments: answers.wait(60) and read(*arguments))
    in_hanging = [block.name for block in blocks if hanging.find([block.name])[0] is not None]
    in_other = [block.name for block in blocks if other.find([block.name])[0] is not None]
    readers = [threading.Thread(target=store.read_many, args=(in_hanging[:1], 0)) for _ in range(16)]
    for reader in readers:
        reader.start()
    try:
        found: list[object] = []
        third = threading.Thread(target=lambda: found.extend(store.read_many(in_other[:1], 0)))
        third.start()
        third.join(30)
        assert len(found) == 1 and isinstance(found[0], torch.Tensor)
    finally:
        answers.set()
    for reader in readers:
        reader.join()
    store.close()


def test_a_store_is_closed_although_a_read_hangs_and_who_waits_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striped, "CLOSE_S", 0.1)
    store, answers, told = open_store(url_of(tmp_path, "ab")), threading.Event(), list[Exception]()
    block = make_block(0)
    store.write(block)
    (holder,) = [each for each in store.members if each.find([block.name]) != [None]]  # type: ignore[attr-defined]
    begun = threading.Semaphore(0)

    def read_layers(*arguments: object) -> list[object]:
        begun.release()
        answers.wait(60)
        return [[None]]

    def reader() -> None:
        try:
            store.read_many([block.name], 0)
        except Exception as error:
            told.append(error)

    monkeypatch.setattr(holder, "read_layers", read_layers)
    readers = [threading.Thread(target=reader) for _ in range(striped.CALLS + 3)]
    for each in readers:
        each.start()
    for _ in range(striped.CALLS):
        assert begun.acquire(timeout=30)
    while len(store._pools[store.members.index(holder)]._shared.waiting) < 3:  # type: ignore[attr-defined]
        time.sleep(0.001)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    answers.set()
    for each in readers:
        each.join(30)
    assert [type(error) for error in told] == [StoreError] * 3


ENDS = """
import sys, threading
from cacheblend.store import open_store
store = open_store(sys.argv[1])
for member in store.members:
    member.read_layers = lambda *arguments: threading.Event().wait()
threading.Thread(target=store.read_many, args=([bytes(32)], 0), daemon=True).start()
"""


def test_a_process_ends_although_a_read_hangs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, url_of(tmp_path, "ab")], timeout=120)
    assert done.returncode == 0
