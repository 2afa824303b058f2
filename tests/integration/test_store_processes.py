"""Several processes on one folder."""

from pathlib import Path

from cacheblend.store import DiskStore
from store_blocks import holds
from store_workers import CHURN_MAX_BYTES, WARM_BLOCKS, churn, run_together, shared_block, warm


def test_two_processes_warm_the_same_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"  # which they also make at the same time
    results = run_together(warm, folder, 2)
    made = [shared_block(seed) for seed in range(WARM_BLOCKS)]
    with DiskStore(folder) as store:
        assert store.verify() == []
        assert all(holds(store, block) for block in made)
        assert store.stats().blocks == WARM_BLOCKS
        assert {manifest.chunk_id for manifest in store.manifests()} == {block.name for block in made}
    assert list((folder / "tmp").iterdir()) == []
    assert all(damaged == 0 for _, damaged in results)
    written = sum(new for new, _ in results)
    print(f"two processes wrote {written} files for {WARM_BLOCKS} blocks")
    assert WARM_BLOCKS <= written <= 2 * WARM_BLOCKS


def test_processes_write_read_delete_and_evict_at_the_same_time(tmp_path: Path) -> None:
    results = run_together(churn, tmp_path / "s", 3)
    reads, lost, wrong, damaged = (sum(column) for column in zip(*results, strict=True))
    print(f"{reads} reads, {lost} lost under the reader, {wrong} wrong, {damaged} damaged")
    assert (wrong, damaged) == (0, 0)
    assert reads > 500
    assert lost > 0  # else this test does not test it
    with DiskStore(tmp_path / "s") as store:
        assert store.verify() == []
        assert 0 < store.stats().bytes <= CHURN_MAX_BYTES * 34 // 32
