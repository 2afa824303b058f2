"""Full disks, limits on the size of files, and a store's own bound, which its small files count against."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cacheblend.core.errors import StoreFullError
from cacheblend.core.names import as_token_ids
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store import DiskStore
from cacheblend.store.documents import DocumentRecord
from store_blocks import ROOT, holds, make_block, make_manifest
from store_folders import block_files, disk, everything, failing

# ---- the disk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["writev", "fsync", "rename"])
def test_a_full_disk_evicts_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    made = [make_block(seed) for seed in range(4)]
    new = make_block(9)
    with DiskStore(tmp_path) as store:
        for block in made:
            store.write(block)
        store.pin([made[0].name])
        free = len(made) - 1  # the disk holds this many blocks besides the one being written

        def is_full(first: int | str, *_: object) -> bool:
            is_folder = isinstance(first, int) and stat.S_ISDIR(os.fstat(first).st_mode)
            return not is_folder and len(block_files(tmp_path)) > free

        full = failing(number, is_full, getattr(os, call))
        monkeypatch.setattr(os, call, full)
        assert store.write(new)
        monkeypatch.undo()
        assert [holds(store, b) for b in [*made, new]] == [True, False, True, True, True]
        assert list((tmp_path / "tmp").iterdir()) == []
        assert (store.stats().evictions, store.stats().write_failures) == (1, 0)


def test_a_full_disk_with_nothing_to_evict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, new = make_block(1), make_block(2)
    with disk(tmp_path) as store:
        store.write(block)
        store.pin([block.name])
        before = everything(tmp_path)
        monkeypatch.setattr(os, "writev", failing(errno.ENOSPC, lambda *a: True, os.writev))
        with pytest.raises(StoreFullError, match=r"No space left.*free some space"):
            store.write(new)
        with pytest.raises(StoreFullError, match="No space left"):
            store.put_manifest(make_manifest(new))
        monkeypatch.undo()
        assert everything(tmp_path) == before | {"lock"}
        assert holds(store, block)
        assert store.write(new)


def test_a_limit_on_file_sizes_leaves_nothing_behind(tmp_path: Path) -> None:
    script = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from store_blocks import make_block, holds
from cacheblend.core.errors import StoreFullError
from cacheblend.store import DiskStore
store = DiskStore(sys.argv[1])
small, large = make_block(1), make_block(2, tokens=400)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
store.write(small)
try:
    store.write(large)
except StoreFullError as error:
    print("ulimit" in str(error), store.find([large.name]) == [None], holds(store, small))
"""
    tests = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "s"), str(tests)], capture_output=True, text=True
    )
    assert run.stdout.split() == ["True"] * 3, run.stderr
    assert list((tmp_path / "s" / "tmp").iterdir()) == []
    assert len(block_files(tmp_path / "s")) == 1


# ---- the bound --------------------------------------------------------------------------------------------


def occupied(folder: Path) -> int:
    """Bytes of all files: blocks as they are, small files in whole pages."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.parent != folder]
    return sum(_size(file) for file in files)


def _size(file: Path) -> int:
    size = file.stat().st_size
    return size if file.suffix == ".safetensors" else -(-size // 4096) * 4096


@pytest.mark.parametrize("blocks", [1, 3])
def test_manifests_and_records_count_against_the_bound(tmp_path: Path, blocks: int) -> None:
    """Many chunks of a few tokens in a small store: nothing stays of those whose blocks were evicted."""
    bound, count = 1 << 20, 700
    with DiskStore(tmp_path / "s", max_bytes=bound, durable=False) as store:
        for seed in range(count):
            chain = [make_block(seed)]
            for _ in range(blocks - 1):
                chain.append(make_block(seed, parent=chain[-1].name))
            for block in chain:
                store.write(block)
            names = tuple(block.name for block in chain)
            ids = as_token_ids([seed, 1, 2])
            store.put_manifest(ChunkManifest(names[-1], ROOT, as_token_ids([]), ids, names))
            if seed % 7 == 0:
                store.documents.put(DocumentRecord(ROOT, "c", str(seed), "", 3, (names,)))
            if seed % 50 == 0:
                assert occupied(tmp_path / "s") <= bound
        assert occupied(tmp_path / "s") <= bound
        assert store.stats().bytes == occupied(tmp_path / "s")
        last = store.manifests()
        assert 20 < len(last) < count
        assert sum(all(store.held(each.block_names)) for each in last) > len(last) // 2
        assert len(store.documents.all(ROOT)) == count // 7  # nothing asked for is dropped without a word
        store.prune(0)
        assert store.manifests() == [] and store.stats().blocks == 0


def test_a_bound_that_records_of_documents_fill_is_named(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "s", max_bytes=10 * 4096, durable=False) as store:
        with pytest.raises(StoreFullError, match="records of documents"):
            for number in range(20):
                store.documents.put(DocumentRecord(ROOT, "c", str(number), "", 0, ()))
        assert len(store.documents.all(ROOT)) == 10
