"""A store's folder: of an earlier version, damaged, used by processes and threads at once, killed at any moment.

Whatever byte is wrong, nothing wrong is ever read; what was acknowledged is there, and nothing else half."""

import json
import logging
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import BlockLostError, StoreFullError
from cacheblend.core.plan.blocks import Block, LayerShape
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import BlendEngine
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore, open_store
from cacheblend.store.format.block_file import encode_block, encode_chain
from campaign import SEED, TURNS, rotating, share
from faults import Faults
from redis_server import redis_server
from store_blocks import holds, make_block, make_chain, make_manifest, record_at, same_bits
from store_folders import disk
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

SHAPES = [LayerShape(3, 4), LayerShape(2, 8)]
BLOCK = make_block(1, tokens=5, shapes=SHAPES)
OF_THIS_RUN = slice(SEED % TURNS, None, TURNS)
"""Of the bytes of a file, of its lengths: five seeds one after the other have them all."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with disk(tmp_path / "s") as store:
        store.write(BLOCK)
        store.put_manifest(make_manifest(BLOCK))
    return tmp_path / "s"


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of reports are not worth keeping."""
    caplog.set_level(logging.ERROR, "cacheblend.store")


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def silent_wrong_reads(store: DiskStore, block: Block) -> int:
    """Reads all of the block as a loader would: records that came back, but with other bits."""
    wrong = 0
    entry = store.find([block.name])[0]
    if entry is None:
        return 0
    wrong += not np.array_equal(entry.token_ids, block.token_ids)
    for layer, record in enumerate(block.records):
        try:
            wrong += not same_bits(store.read(block.name, layer), record)
        except BlockLostError:
            break
    return wrong


def check_each(folder: Path, path: Path, damaged: Iterable[bytes], knowing: DiskStore | None = None) -> int:
    """Puts each content in the file's place: a miss, reported once, removed, to a store that never saw the block or to
    one that has just read it. How many were tried."""
    good, tried = path.read_bytes(), 0
    for content in damaged:
        if knowing is not None:
            path.write_bytes(good)
            assert holds(knowing, BLOCK)
        tried += 1
        path.write_bytes(content)
        with nullcontext(knowing) if knowing is not None else disk(folder) as store:
            before = store.stats().damaged
            assert silent_wrong_reads(store, BLOCK) == 0, f"variant {tried}"
            assert store.find([BLOCK.name]) == [None], f"variant {tried}"
            with pytest.raises(BlockLostError):
                store.read(BLOCK.name, 0)
            assert store.stats().damaged == before + 1, f"variant {tried}"
        assert not path.exists()
    path.write_bytes(good)
    with disk(folder) as store:
        assert holds(store, BLOCK)
    return tried


def flipped(good: bytes, positions: range, bit: int) -> Iterator[bytes]:
    for at in positions:
        yield good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("bit", [0, 5])  # 5 turns a digit a..f into A..F
def test_every_flipped_byte_is_found(folder: Path, bit: int, faults: Faults) -> None:
    path = only(folder, "blocks/*/*")
    good = path.read_bytes()
    assert len(good) > 4096 + sum(r.nbytes for r in BLOCK.records) - 1
    places = range(len(good))[OF_THIS_RUN]
    assert check_each(folder, path, flipped(good, places, bit)) == len(places)
    faults.count("flipped bytes of a block's file", len(places))
    if bit == 0:
        with disk(folder) as knowing:
            assert check_each(folder, path, flipped(good, places[::3], 2), knowing) == len(places[::3])


@pytest.mark.usefixtures("quiet")
def test_every_length_and_other_damage_is_found(folder: Path, faults: Faults) -> None:
    path = only(folder, "blocks/*/*")
    good = path.read_bytes()
    lengths = [*range(len(good))[OF_THIS_RUN], *range(len(good) + 1, len(good) + 20)]
    assert check_each(folder, path, ((good + bytes(20))[:length] for length in lengths)) == len(lengths)
    faults.count("block files cut short or too long", len(lengths))

    # what else may lie in a file
    other = make_block(2, tokens=5, shapes=SHAPES)
    foreign = b"".join(encode_block(other))
    rng = np.random.default_rng(0)
    contents = [
        foreign,  # a sound file under a wrong name
        good[:4096] + foreign[4096:],
        bytes(len(good)),
        b"\xff" * len(good),
        rng.bytes(len(good)),
        good[:4096] + bytes(len(good) - 4096),  # written, but its data never reached the disk
        good[4096:] + good[:4096],
        (1 << 63).to_bytes(8, "little") + good[8:],
    ]
    for start in rng.integers(0, len(good) - 64, 200)[OF_THIS_RUN]:
        contents.append(good[:start] + rng.bytes(64) + good[start + 64 :])
    assert check_each(folder, path, contents) == len(contents)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("knows", [False, True])
def test_a_flipped_byte_of_a_file_of_several_blocks_costs_those_that_it_is_in(
    knows: bool, tmp_path: Path, faults: Faults
) -> None:
    chain, tried = make_chain(3), 0
    with disk(tmp_path) as store:
        store.write_all(chain)
        first, *others = (Path(store.file_of(block.name)) for block in chain)
        good = first.read_bytes()
        places = {block.name: [record_at(first, block, layer) for layer in range(3)] for block in chain}
        data_at = min(begin for each in places.values() for begin, _ in each)
    with disk(tmp_path) as knowing:
        for at in [*range(0, data_at, 7), *range(data_at, len(good))][OF_THIS_RUN]:
            first.write_bytes(good)
            for other in others:
                other.unlink(missing_ok=True)
                other.hardlink_to(first)
            assert not knows or all(holds(knowing, block) for block in chain)
            first.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            with nullcontext(knowing) if knows else disk(tmp_path) as store:
                assert sum(silent_wrong_reads(store, block) for block in chain) == 0, at
                hit = [at < data_at or any(begin <= at < end for begin, end in places[block.name]) for block in chain]
                assert [entry is None for entry in store.find([block.name for block in chain])] == hit, at
            assert [path.exists() for path in (first, *others)] == [not each for each in hit], at
            tried += 1
            first.unlink(missing_ok=True)
    faults.count("flipped bytes of files of several blocks", tried)


def test_damage_is_reported_by_name_and_verify_removes_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocks = [make_block(seed) for seed in range(2, 12)]
    hurt, seen = blocks[::3], list[tuple[int, int]]()
    with disk(folder) as store, caplog.at_level(logging.WARNING, "cacheblend.store"):
        for block in blocks:
            store.write(block)
        for block in [*hurt, BLOCK]:  # the last head of the last layer
            path = only(folder, f"blocks/*/{block.name.hex()}*")
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 128]))
        assert same_bits(store.read(BLOCK.name, 1, slice(0, 1)), BLOCK.records[1][:1])  # other heads are not lost
        with pytest.raises(BlockLostError, match="layer 1, head 1 does not match"):
            store.read(BLOCK.name, 1, slice(1, 2))
        found = store.verify(lambda done, total: seen.append((done, total)))
        assert {(damage.kind, damage.name) for damage in found} == {("block", block.name) for block in hurt}
        assert all("layer 2, head 0 does not match its checksum" in damage.reason for damage in found)
        assert seen == [(i, 10) for i in range(1, 11)]
        assert all(block.name.hex() in caplog.text for block in hurt)
        assert store.verify() == []
        assert [holds(store, b) for b in blocks] == [b not in hurt for b in blocks]
        assert store.stats().damaged == len(hurt) + 1


def test_every_damage_to_a_manifest_is_found(folder: Path, caplog: pytest.LogCaptureFixture, faults: Faults) -> None:
    path = only(folder, "manifests/*")
    good = path.read_bytes()
    places = range(len(good))[OF_THIS_RUN]
    contents = [*flipped(good, places, 0), *flipped(good, places, 5), *(good[:length] for length in places)]
    contents += [good + b" ", good + b"\n", b"{}", b"", b"\xff" * 200]
    with disk(folder) as knowing:
        for number, content in enumerate(contents):
            path.write_bytes(good)
            assert len(knowing.manifests()) == 1
            path.write_bytes(content)
            with nullcontext(knowing) if number % 2 else disk(folder) as store:
                before = store.stats().damaged
                assert store.manifests() == [], f"variant {number}"
                assert store.stats().damaged == before + 1
            assert not path.exists()
            caplog.clear()
        path.write_bytes(good[:50])
        (damage,) = knowing.verify()
    assert (damage.kind, damage.name) == ("manifest", BLOCK.name)
    assert BLOCK.name.hex() in caplog.text
    faults.count("damaged manifests", len(contents))


DATA = Path(__file__).parents[1] / "data" / "store-0.1"
FACTS: dict[str, Any] = json.loads((DATA / "facts.json").read_text())
CHUNKS = FACTS["chunks"]
WAYS = {"plain": {}, "int8": {"codec": "int8"}, "tenant": {}, "system-anchor": {"anchor": "system"}}


@pytest.fixture
def earlier(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(DATA / "store", tmp_path / "store")
    yield tmp_path / "store"


@pytest.mark.parametrize("way", WAYS)
def test_every_block_is_found_and_gives_the_same_logits(way: str, earlier: Path) -> None:
    tenant = "tenant-a" if way == "tenant" else ""
    # the facts were written when one check was the default
    config = BlendConfig(block_size=32, check_layers=(1,), capture=False, **WAYS[way])  # type: ignore[arg-type]
    order = [chunk(CHUNKS[name]) for name in ("third", "first", "second")]
    prompt = Prompt.of([text(FACTS["system"]), *order, text(FACTS["question"])])
    with BlendEngine.from_pretrained(DATA / "model", store=str(earlier), config=config, with_tokenizer=False) as engine:
        assert len(list(engine.store.manifests())) == 3 * len(WAYS)
        with torch.no_grad(), engine.runtime.open_prefill(prompt, tenant=tenant) as prefill:
            while not prefill.advance():
                pass
            result = prefill.result()
            report = result.report
        assert report.missed_tokens == 0 and not report.fallbacks
        assert report.loaded_tokens >= sum(map(len, CHUNKS.values()))
        if way == "system-anchor":  # the prompt's system prompt, and the chunk that stands right behind it
            assert report.hit_tokens["prefix"] == len(FACTS["system"]) + len(CHUNKS["third"])
        wanted = torch.tensor(FACTS["logits"][way])
        torch.testing.assert_close(result.logits, wanted, rtol=1e-4, atol=1e-4)
        assert not engine.store.stats().damaged


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


KILLS = max(10, share(100))


def run_and_kill(folder: Path, first: int, after_s: float) -> list[int]:
    """Seeds of the blocks that a writer acknowledged before it was killed, `after_s` behind the first of them."""
    receive, acknowledge = context().Pipe(duplex=False)
    process = context().Process(target=write_until_killed, args=(acknowledge, folder, first))
    process.start()
    acknowledge.close()
    assert receive.recv_bytes() == b"ready"
    acknowledged = [int(receive.recv_bytes())]
    time.sleep(after_s)
    process.kill()
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
        acknowledged += run_and_kill(folder, 1000 * kill, rng.uniform(0.0, 0.1))
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


THREADS, WRITTEN, PINNED = 16, 60, 3
BOUND = 12 * sum(len(part) for part in encode_block(make_block(0, tokens=9)))
SECONDS = share(15)
WANTED = ("new", "read", "missed", "deleted")
"""A run goes on until each of these happened more than ten times: a busy machine needs longer for them."""
AT_MOST_S = 120.0
LOOKS = 3
"""A folder is listed while others remove and write: a busy machine may see files beside those that took their place."""


class Load:
    """What the threads do, and what they saw that must not be."""

    def __init__(self, store: KVStore, together: int) -> None:
        self.store = store
        self.chains = [make_chain(together, seed, tokens=9) for seed in range(0, WRITTEN, together)]
        self.blocks = [block for chain in self.chains for block in chain]
        self.pinned = self.blocks[:PINNED]
        one = self.blocks[0]
        self.file_bytes = sum(len(part) for part in encode_chain(self.chains[0]))
        self.record_bytes = one.layout.block_bytes(len(one.token_ids))
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self._stop = threading.Event()

    def run(self, seconds: float) -> None:
        self.store.pin([block.name for block in self.pinned])
        self.store.write_all(self.pinned)
        threads = [threading.Thread(target=self._guarded, args=(seed,)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        while not self.wrong and (elapsed := time.monotonic() - began) < seconds + AT_MOST_S:
            if elapsed >= seconds and self.is_varied():
                break
            over = [found for found in (self._over() for _ in range(LOOKS)) if found]
            if len(over) == LOOKS:
                self.wrong += over[0]
            self.done["looked"] += 1
            time.sleep(0.01)
        self._stop.set()
        for thread in threads:
            thread.join()

    def _over(self) -> list[str]:
        """The tiers that are over their bounds by more than one file."""
        held = self.store.stats()
        return [
            f"{tier.tier} has {tier.bytes} bytes, its bound is {tier.max_bytes}"
            for tier in held.tiers or (held,)
            if tier.bytes > (tier.max_bytes or 0) + (self.record_bytes if tier.tier == "memory" else self.file_bytes)
        ]

    def is_varied(self) -> bool:
        return min(self.done[what] for what in WANTED) > 10

    def _guarded(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self._stop.is_set() and not self.wrong:
                self._step(rng)
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _step(self, rng: random.Random) -> None:
        what, block = rng.random(), rng.choice(self.blocks)
        if what < 0.35:
            try:
                for new in self.store.write_all(rng.choice(self.chains)):
                    self.done["new" if new else "held"] += 1
            except StoreFullError:
                self.done["full"] += 1  # blocks that other threads write now take the capacity
        elif what < 0.9:
            self._read(rng.choice([block, *self.pinned]), rng)
        elif what < 0.97 and block not in self.pinned:
            self.done["deleted"] += self.store.delete(block.name)
        elif what > 0.995:
            self.store.prune(BOUND // 2)
            self.done["pruned"] += 1

    def _read(self, block: Block, rng: random.Random) -> None:
        (entry,) = self.store.find([block.name])
        if entry is None:
            if block in self.pinned:
                self.wrong.append("a pinned block is gone")
            self.done["missed"] += 1
            return
        layer = rng.randrange(len(block.records))
        (record,) = self.store.read_many([block.name], layer)
        if isinstance(record, Exception):
            if block in self.pinned:
                self.wrong.append(f"a pinned block cannot be read: {record}")
            self.done["lost meanwhile"] += 1
        elif not same_bits(record, block.records[layer]):
            self.wrong.append(f"wrong bytes of {block.name.hex()}")
        else:
            self.done["read"] += 1


@pytest.mark.parametrize(
    ("kind", "together"),
    [
        *rotating([("memory", 1), ("disk", 1), ("tiered", 3)], core=[("tiered", 3)]),
        pytest.param("redis", 1, marks=pytest.mark.slow),
    ],
)
def test_sixteen_threads(kind: str, together: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks in files of their own, or as many as `together` in one."""
    with ExitStack() as stack:
        store: KVStore = MemoryStore(BOUND // 4)  # it counts records without their headers
        if kind == "redis":
            store = open_store(f"{stack.enter_context(redis_server()).url}?max_bytes={BOUND}")
        elif kind != "memory":
            disk = DiskStore(tmp_path, max_bytes=BOUND, durable=False)
            store = disk if kind == "disk" else TieredStore(MemoryStore(BOUND // 8), disk)
        stack.enter_context(store)
        load = Load(store, together)
        load.run(SECONDS)
        with capsys.disabled():
            print(f"\n{THREADS} threads, {SECONDS:g} s: {dict(load.done)}")
        assert load.wrong == [] and load.is_varied()
        assert store.stats().damaged == 0
