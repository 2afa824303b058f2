"""Several processes on one folder, and `kill -9` at any moment: what was acknowledged is there, nothing else half."""

import random
import time
from pathlib import Path

from cacheblend.store import DiskStore
from campaign import share
from faults import Faults
from store_blocks import holds
from store_workers import (
    CHURN_MAX_BYTES,
    WARM_BLOCKS,
    churn,
    context,
    killable_chain,
    run_together,
    shared_block,
    warm,
    write_until_killed,
)


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


# ---- kill -9 -----------------------------------------------------------------------------------------------


KILLS = max(20, share(100))


def run_and_kill(folder: Path, first: int, after_s: float) -> list[int]:
    """Seeds of the blocks that a writer acknowledged before it was killed `after_s` into its writing."""
    receive, acknowledge = context().Pipe(duplex=False)
    process = context().Process(target=write_until_killed, args=(acknowledge, folder, first))
    process.start()
    acknowledge.close()
    assert receive.recv_bytes() == b"ready"
    time.sleep(after_s)
    process.kill()
    acknowledged = []
    while True:
        try:
            acknowledged.append(int(receive.recv_bytes()))
        except EOFError:
            break
    process.join(10)
    assert process.exitcode == -9
    return acknowledged


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, faults: Faults) -> None:
    rng = random.Random(0)
    folder = tmp_path / "s"
    acknowledged: list[int] = []
    torn = 0
    for kill in range(KILLS):
        acknowledged += run_and_kill(folder, 1000 * kill, rng.uniform(0.0, 0.15))
        torn += len(list((folder / "tmp").iterdir()))
    with DiskStore(folder) as store:
        left = list((folder / "tmp").iterdir())
        damaged = store.verify()
        chains = {seed: killable_chain(seed) for seed in acknowledged}
        lost = [seed for seed, chain in chains.items() if not all(holds(store, block) for block in chain)]
        listed = {manifest.chunk_id for manifest in store.manifests()}
        unlisted = [seed for seed in acknowledged if chains[seed][-1].name not in listed]
        blocks = store.stats().blocks
    assert (lost, unlisted, damaged, left) == ([], [], [], [])
    assert len(acknowledged) >= KILLS
    assert 0 <= blocks - sum(map(len, chains.values())) <= 3 * KILLS
    faults.count("writers killed with kill -9", KILLS)
    faults.count("files torn by a kill", torn)
