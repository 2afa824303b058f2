"""Several folders that share the blocks between them."""

from pathlib import Path

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.store import DiskStore, open_store
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
