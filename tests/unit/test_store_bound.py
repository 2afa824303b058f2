"""A folder's bound: several processes that write at once, files of several blocks, small files, full disks; and which
blocks go first: the policies by themselves, in stores, against one that knows the future, against a model.
"""

import contextlib
import errno
import os
import random
import resource
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cacheblend.core.errors import StoreFullError
from cacheblend.core.names import BlockName, as_token_ids
from cacheblend.core.plan.blocks import Block, ChunkManifest
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend.store.disk import folder as folder_module
from cacheblend.store.disk.folder import Folder
from cacheblend.store.documents import DocumentRecord
from cacheblend.store.eviction import POLICIES, Eviction, eviction_of
from cacheblend.store.format.block_file import encode_block
from campaign import share
from lab.speed.eviction import belady
from store_blocks import ROOT, holds, make_block, make_chain, make_manifest, same_bits
from store_folders import block_files, disk, everything, failing, file_bytes, occupied

MOST = 1 << 20
SHARE = MOST // 32


class Writer:
    """A process that writes files of given sizes, some at the same time; what it is writing is not there yet."""

    def __init__(self, folder: Path, number: int) -> None:
        self.store = disk(folder, max_bytes=MOST)
        self.number, self.written = number, 0
        self.under_way: list[Iterator[None]] = []

    def begin(self, nbytes: int) -> None:
        writing = self._write(nbytes)
        try:
            next(writing)
        except StoreFullError:  # too much is being written at the same time
            return
        self.under_way.append(writing)

    def end(self, draw: random.Random) -> None:
        if self.under_way:
            next(self.under_way.pop(draw.randrange(len(self.under_way))), None)

    def _write(self, nbytes: int) -> Iterator[None]:
        self.written += 1
        name = BlockName(self.number.to_bytes(16, "little") + self.written.to_bytes(16, "little"))
        path = Path(self.store.file_of(name))
        with self.store._capacity.reserved(nbytes):
            yield
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.truncate(nbytes)


@contextmanager
def writers(folder: Path, count: int) -> Iterator[list[Writer]]:
    opened = [Writer(folder, number) for number in range(count)]
    try:
        yield opened
    finally:
        for each in opened:
            each.under_way.clear()
            each.store.close()


@pytest.mark.parametrize("largest", [SHARE // 4, SHARE, 2 * SHARE, 6 * SHARE])
@pytest.mark.parametrize("seed", range(5))
def test_each_further_process_exceeds_the_bound_by_a_32nd_at_most(seed: int, largest: int, tmp_path: Path) -> None:
    draw = random.Random(f"{seed} {largest}")
    count, at_once = draw.randint(1, 5), draw.randint(1, 4)
    most = 0
    with writers(tmp_path, count) as all_writers:
        for _ in range(8 * MOST // largest + 200):
            writer = draw.choice(all_writers)
            if len(writer.under_way) < at_once and draw.random() < 0.6:
                writer.begin(draw.randint(largest // 2, largest))
            else:  # only then there is more
                writer.end(draw)
                most = max(most, occupied(tmp_path))
                assert most <= MOST + (count - 1) * SHARE
    assert most > MOST // 2  # else this test does not test it
    print(f"{count} processes, files up to {largest / MOST:.1%}: {most / MOST:.1%} of the bound")


def test_what_the_dead_reserved_is_free_without_locks_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        died = os.fork()
        if not died:
            with disk(tmp_path, max_bytes=MOST) as other, other._capacity.reserved(MOST * 3 // 4):
                os._exit(0)
        os.waitpid(died, 0)
        assert len(list((tmp_path / "tmp").iterdir())) == 1

    with disk(tmp_path, max_bytes=MOST) as store:
        die()
        with store._capacity.reserved(MOST * 3 // 4):
            pass
        assert not list((tmp_path / "tmp").iterdir())
        die()
    with disk(tmp_path):
        assert not list((tmp_path / "tmp").iterdir())
    # without locks after the time that writing takes; a file that may be being written stays for an hour
    folder, now = Folder(tmp_path / "b", durable=False, locks=False), time.time()
    big, small = 600_000_000, 4096
    for number, nbytes in enumerate((big, small)):
        file = tmp_path / "b" / "tmp" / f"1-{number:016x}.reserved"
        file.touch()
        os.truncate(file, nbytes)
    written = tmp_path / "b" / "tmp" / f"1-{0:016}"
    written.touch()
    expected = {50: big + small, 300: big, 650: big, 700: 0}
    for after, nbytes in expected.items():
        monkeypatch.setattr(folder_module.time, "time", lambda after=after: now + after)
        assert folder.reserved_bytes() == nbytes
        Folder(tmp_path / "b", durable=False, locks=False)
        assert written.exists()
    monkeypatch.setattr(folder_module.time, "time", lambda: now + 3700)
    Folder(tmp_path / "b", durable=False, locks=False)
    assert not written.exists()


@pytest.mark.parametrize("locks", [True, False])
def test_no_process_counts_its_own_as_anothers(locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at, as another thread might, between any two steps of a reservation's end."""
    folder, seen = Folder(tmp_path, durable=False, locks=locks), list[int]()

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def unlink(self, path: str) -> None:
            seen.append(folder.reserved_bytes())
            Path(path).unlink()
            seen.append(folder.reserved_bytes())

    with folder.reservation(SHARE):
        assert folder.reserved_bytes() == 0
        monkeypatch.setattr(folder_module, "os", Watched())
    assert seen == [0, 0] and folder.reserved_bytes() == 0


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


def test_files_go_with_their_last_name_whoever_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, new = make_chain(4), make_block(50)
    with disk(tmp_path / "a") as store:
        store.write_all(chain)
        store.pin([chain[1].name])
        assert store.prune(0) == 0  # a pinned block keeps the file, and the others go
        assert [holds(store, block) for block in chain] == [False, True, False, False]
        assert store.stats().bytes == occupied(tmp_path / "a") == file_bytes(chain)
        store.unpin([chain[1].name])
        assert store.prune(0) == file_bytes(chain)
        store.write_all(chain)
    with disk(tmp_path / "a", max_bytes=file_bytes(chain)) as store:  # a share of the file is all that is needed
        assert store.write(new) and holds(store, new)
        assert store.stats().blocks == 1
    chains = [make_chain(4, seed) for seed in (0, 10, 20)]
    with disk(tmp_path / "b", max_bytes=sum(map(file_bytes, chains))) as store:
        for each in chains:
            store.write_all(each)
        store.pin([each[0].name for each in chains])
        with pytest.raises(StoreFullError, match="unpin blocks"):  # removing the others would be in vain
            store.write(new)
        assert store.stats().blocks == 12 and store.stats().evictions == 0
    chain = make_chain(6, tokens=500)  # as far as it fits
    one = file_bytes(chain[:1])
    with disk(tmp_path / "c", max_bytes=2 * one) as store:
        assert store.write_all(chain) == [True] * 6
        assert store.stats().blocks == 2 and occupied(tmp_path / "c") <= 2 * one
    with disk(tmp_path / "tiny", max_bytes=one - 1) as store, pytest.raises(StoreFullError, match="raise max_bytes"):
        store.write_all(chain)
    with disk(tmp_path / "d") as store:
        store.write_all(chain)
        old = time.time_ns() - 100 * 10**9
        for path in block_files(tmp_path / "d"):
            os.utime(path, ns=(old, old))
    with disk(tmp_path / "d", ttl=50) as store:
        assert store.find([block.name for block in chain]) == [None] * 6 and occupied(tmp_path / "d") == 0
    old, new = make_chain(2, tokens=400), make_block(50, tokens=400)  # removed by another process
    with disk(tmp_path / "o") as store, disk(tmp_path / "o", max_bytes=file_bytes(old) + 9000) as other:
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
        assert holds(other, new) and occupied(tmp_path / "o") <= file_bytes(old) + 9000
    with disk(tmp_path / "o" / "b", max_bytes=400_000) as store, disk(tmp_path / "o" / "b", max_bytes=400_000) as other:
        for seed in range(0, 400, 2):
            store.write(make_block(seed))
            other.write(make_block(seed + 1))
        assert store.stats().bytes <= 400_000 * 33 // 32
        assert store.stats().blocks > 80
        assert holds(store, make_block(398)) and holds(store, make_block(399))


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["writev", "fsync", "rename"])
def test_a_full_disk_evicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
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


def test_full_disks_and_limits_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    large = make_block(2, tokens=400)  # a limit on file sizes
    if not (child := os.fork()):
        with contextlib.suppress(BaseException), DiskStore(tmp_path / "limited") as store:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
            store.write(block)
            with pytest.raises(StoreFullError, match="ulimit"):
                store.write(large)
            os._exit(0 if store.find([large.name]) == [None] and holds(store, block) else 1)
        os._exit(2)
    assert os.waitpid(child, 0) == (child, 0)
    assert list((tmp_path / "limited" / "tmp").iterdir()) == []
    assert len(block_files(tmp_path / "limited")) == 1


def all_bytes(folder: Path) -> int:
    """Bytes of all files: blocks as they are, small files in whole pages."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.parent != folder]
    sizes = [(file.stat().st_size, file.suffix == ".safetensors") for file in files]
    return sum(size if is_block else -(-size // 4096) * 4096 for size, is_block in sizes)


@pytest.mark.parametrize("blocks", [1, 3])
def test_manifests_and_records_count_against_the_bound(tmp_path: Path, blocks: int) -> None:
    """Many chunks of a few tokens in a small store: nothing stays of those whose blocks were evicted."""
    bound, count = 1 << 19, 350
    with disk(tmp_path / "s", max_bytes=bound) as store:
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
                assert all_bytes(tmp_path / "s") <= bound
        assert all_bytes(tmp_path / "s") <= bound
        assert store.stats().bytes == all_bytes(tmp_path / "s")
        last = store.manifests()
        assert 10 < len(last) < count
        assert sum(all(store.held(each.block_names)) for each in last) > len(last) // 2
        assert len(store.documents.all(ROOT)) == count // 7  # nothing asked for is dropped without a word
        store.prune(0)
        assert store.manifests() == [] and store.stats().blocks == 0
    with disk(tmp_path / "small", max_bytes=10 * 4096) as store:
        with pytest.raises(StoreFullError, match="records of documents"):
            for number in range(20):
                store.documents.put(DocumentRecord(ROOT, "c", str(number), "", 0, ()))
        assert len(store.documents.all(ROOT)) == 10


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


def test_worth_keeps_what_is_used_often_or_dear_until_it_has_grown_old_also_beside_a_scan() -> None:
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
    rng = random.Random(0)  # a scan does not empty a cache of what is used often
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


def test_what_another_process_removed_is_worth_nothing_any_more(tmp_path: Path) -> None:
    blocks = [make_block(seed) for seed in range(8)]
    with DiskStore(tmp_path, durable=False, eviction="worth") as store, DiskStore(tmp_path, durable=False) as other:
        store.write_all(blocks)
        for block in blocks[:5]:
            assert other.delete(block.name)
        policy = store._capacity._eviction
        assert policy is not None and len(policy._counts) == 8
        store.prune(store.stats().bytes - 1)
        assert len(policy._counts) == len(policy._values) == store.stats().blocks == 2


def test_the_trace_of_real_requests() -> None:
    trace = Path(__file__).parents[3] / "shared" / "data" / "ragpulse"
    if not trace.is_dir():
        pytest.skip("needs the RAGPulse trace in ../shared/data/ragpulse")
    from lab.speed.eviction import run

    rates = run(trace, (0.05, 0.2, 1.0))["hit_rate"]
    assert all(worth > lru for lru, worth in zip(rates["lru"][:2], rates["worth"][:2], strict=True))
    assert all(best >= worth for best, worth in zip(rates["belady"], rates["worth"], strict=True))
    assert len({each[-1] for each in rates.values()}) == 1  # all of it fits


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
