"""The contract of every store, tested on each kind."""

import atexit
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import (
    BlockLostError,
    InvalidInputError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnreachableError,
)
from cacheblend.core.names import BlockName, as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import Block, ChunkManifest, LayerShape
from cacheblend.core.plan.codec import CODECS
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend.store.combined import CascadeStore
from cacheblend.store.documents import DamagedRecord, DocumentRecord, document_name
from cacheblend.store.format.records import encode_document, encode_manifest
from cacheblend.store.remote.bucket import BucketObjects
from cacheblend.store.remote.redis import RedisObjects
from cacheblend.store.remote.store import RemoteStore
from campaign import rotating, share
from moto_bucket import BUCKET, bucket, needs_bucket
from redis_server import RedisServer, needs_redis
from store_blocks import ROOT, holds, make_block, make_manifest, random_bits, raw_block, same_bits

REDIS = pytest.param("redis", marks=needs_redis)
S3 = pytest.param("s3", marks=needs_bucket)
LOCAL = ("memory", "disk", "relative", "tiered", "tiered without memory", "cascade")
KINDS = (*LOCAL, REDIS, S3, pytest.param("tiered redis", marks=needs_redis))


@cache
def redis() -> str:
    """One server for all tests of this process."""
    server = RedisServer()
    server.start()
    atexit.register(server.kill)
    return server.url


def open_kind(kind: str, path: Path, max_bytes: int = 1 << 24, ttl: float | None = None) -> KVStore:
    if kind == "memory":
        return MemoryStore(max_bytes, ttl=ttl)
    if "redis" in kind:
        back = RemoteStore(RedisObjects(redis(), prefix=str(path)), max_bytes, ttl=ttl)
        return back if kind == "redis" else TieredStore(MemoryStore(1 << 20), back)
    if kind == "s3":
        url = f"s3://{BUCKET}{path}"
        objects = BucketObjects(url, timeout=60, options=bucket().options)  # the machine may be busy
        return RemoteStore(objects, max_bytes, ttl=ttl)
    if kind == "cascade":
        options = {"max_bytes": max_bytes, "durable": False, "ttl": ttl}
        return CascadeStore([DiskStore(path / each, **options) for each in ("near", "far")])  # type: ignore[arg-type]
    if kind == "relative":
        path = Path(os.path.relpath(path))
    disk = DiskStore(path, max_bytes=max_bytes, durable=False, ttl=ttl)
    if kind in ("disk", "relative"):
        return disk
    return TieredStore(MemoryStore(0 if "without" in kind else 1 << 20), disk)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    with open_kind(request.param, tmp_path / "store") as opened:
        yield opened


class Clock:
    """Every clock of this process, which goes on by leaps; files keep the system's time of their writing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0
        for name, unit in (("time", 1), ("monotonic", 1), ("time_ns", 10**9)):
            monkeypatch.setattr(time, name, partial(self._tell, getattr(time, name), unit))

    def _tell(self, real: Callable[[], float], unit: int) -> float:
        return real() + self._ahead_s * unit

    def pass_by(self, seconds: int) -> None:
        self._ahead_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_unused_for_its_time_to_live_is_removed(kind: str, tmp_path: Path, clock: Clock) -> None:
    ttl = 1000
    used, unused, pinned, new = (make_block(seed) for seed in range(4))
    with open_kind(kind, tmp_path / "store", ttl=ttl) as store:
        store.pin([pinned.name])
        for block in (used, unused, pinned):
            store.write(block)
        store.flush()
        clock.pass_by(600)
        assert holds(store, used) and store.held([unused.name]) == [True]  # which is no use
        clock.pass_by(600)
        assert store.held([unused.name, used.name, pinned.name]) == [False, True, True]
        assert store.find([unused.name, used.name])[0] is None
        assert holds(store, used) and holds(store, pinned)
        assert store.write(unused)  # it may come back
        store.flush()  # to farther stores, too, before time goes on
        clock.pass_by(1200)
        store.write(new)
        store.flush()
        assert [entry is not None for entry in store.find([used.name, unused.name, new.name])] == [False, False, True]
        assert store.stats().blocks == 2  # the one that is pinned as well


@pytest.mark.parametrize("kind", [REDIS, S3])
@pytest.mark.parametrize("error", [StoreError("a list that cannot be read"), StoreUnreachableError("gone meanwhile")])
def test_a_list_of_pins_that_cannot_be_read_hides_nothing_else(
    kind: str, error: StoreError, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for where some blocks have expired; the others were found before."""
    used, unused = make_block(1), make_block(2)
    with open_kind(kind, tmp_path / "store", ttl=1000) as store:
        store.write(unused)
        store.flush()
        clock.pass_by(1200)
        store.write(used)
        store.flush()

        def fails() -> set[BlockName]:
            raise error

        monkeypatch.setattr(store._objects, "pinned", fails)  # type: ignore[attr-defined]
        assert store.held([used.name, unused.name]) == [True, False]
        monkeypatch.setattr(store, "_resume_at", -math.inf)  # one that did not answer is asked again after a while
        assert [entry is not None for entry in store.find([used.name, unused.name])] == [True, False]


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    shapes = draw(
        st.lists(st.builds(LayerShape, st.integers(1, 5), st.sampled_from([1, 3, 8, 64])), min_size=1, max_size=6)
    )
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    codec = draw(st.sampled_from(sorted(CODECS)))
    return make_block(draw(st.integers(0, 10**6)), draw(st.integers(1, 37)), shapes, dtype, codec=codec)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=share(40))
@given(block=blocks(), data=st.data())
def test_any_block_reads_back_bit_for_bit(
    kind: str, block: Block, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with open_kind(kind, tmp_path_factory.mktemp("store")) as store:
        assert store.find([block.name]) == [None]
        assert store.write(block)
        assert not store.write(block)
        for _ in range(2):  # the second time from memory, where there is one
            assert holds(store, block)
        entry = store.find([block.name])[0]
        assert entry is not None
        assert entry.layout == block.layout
        layer = data.draw(st.integers(0, len(block.records) - 1))
        start = data.draw(st.integers(0, block.records[layer].shape[0] - 1))
        stop = data.draw(st.integers(start + 1, block.records[layer].shape[0]))
        part = store.read(block.name, layer, slice(start, stop))
        assert same_bits(part, block.records[layer][start:stop])


def test_what_is_not_held_is_lost_and_what_no_block_has_or_does_not_fit_together_is_refused(store: KVStore) -> None:
    block = make_block(1)
    with pytest.raises(BlockLostError) as caught:
        store.read(block.name, 0)
    assert caught.value.names == [block.name]
    store.write(block)
    for layer in (-1, 3):
        with pytest.raises(InvalidInputError, match=f"layer {layer} .*0..2"):
            store.read(block.name, layer)
    for heads in (slice(0, 3), slice(1, 1), slice(2, 3), slice(0, 2, 2)):
        with pytest.raises(InvalidInputError, match="2 KV heads"):
            store.read(block.name, 0, heads)
    store.pin([block.name])
    assert store.delete(block.name)
    assert not store.delete(block.name)
    assert store.find([block.name]) == [None]
    with pytest.raises(BlockLostError):
        store.read(block.name, 0)
    assert store.stats().pinned == 0
    good = make_block(1)  # what does not fit together
    first, second, third = good.records
    wrong = {
        "named after": replace(good, name=BlockName(bytes(32))),
        "at least 1 token": replace(good, token_ids=good.token_ids[:0]),
        "and 0": replace(good, records=[]),
        "3 layers has 2 records": replace(good, records=[first, second]),
        "layer 1: a record of 5 tokens must be": replace(good, records=[first, second[:, :, :4], third]),
        "got torch.float32": replace(good, records=[first, second.float(), third]),
        "on meta": replace(good, records=[first, second.to("meta"), third]),
        r"torch.uint8 \[2, 60\]": replace(good, layout=replace(good.layout, codec="int8")),
    }
    for message, block in wrong.items():
        with pytest.raises(InvalidInputError, match=message):
            store.write(block)
        assert store.find([block.name]) == [None]
    whole = random_bits((2, 2, 20, 8), torch.bfloat16, 1)  # records that are views of a larger tensor
    ids = as_token_ids(range(7))
    block = raw_block(block_name(ROOT, ids), ROOT, ids, [whole[:, :, 5:12], whole[:, :, 12:19]])
    store.write(block)
    before = [record.clone() for record in block.records]
    whole.zero_()
    assert all(same_bits(store.read(block.name, i), before[i]) for i in range(2))


@pytest.mark.parametrize("kind", ["memory", "disk", REDIS, S3])
def test_a_block_larger_than_the_bound_is_refused_and_pinned_blocks_fill_the_store(kind: str, tmp_path: Path) -> None:
    with open_kind(kind, tmp_path / "small", max_bytes=100) as store:
        with pytest.raises(StoreFullError, match=r"bounded to 100\b.*raise max_bytes"):
            store.write(make_block(1))
        assert store.stats().write_failures == 1
        assert store.stats().blocks == 0
    with open_kind(kind, tmp_path / "store", max_bytes=1_000 if kind == "memory" else 10_000) as store:
        held = []
        with pytest.raises(StoreFullError, match="pinned"):
            for seed in range(100):
                block = make_block(seed)
                store.pin([block.name])
                store.write(block)
                held.append(block)
        assert held
        assert all(holds(store, block) for block in held)
        store.unpin([held[0].name])
        assert store.write(block)
        assert not holds(store, held[0])
        assert all(holds(store, b) for b in [*held[1:], block])


def test_manifests_are_listed_replaced_and_taken_off_and_pins_are_known_by_name(store: KVStore) -> None:
    block, other = make_block(1), make_block(2)
    long = make_manifest(block, "old", token_count=32000)
    store.put_manifest(long)
    store.put_manifest(make_manifest(other, "ünï \u0000 \ud800".encode("utf-8", "replace").decode()))
    listed = {m.chunk_id: m for m in store.manifests()}
    assert set(listed) == {block.name, other.name}
    got = listed[block.name]
    assert np.array_equal(got.token_ids, long.token_ids)
    assert np.array_equal(got.anchor_ids, long.anchor_ids)
    assert (got.root, got.block_names, got.model, got.label) == (ROOT, long.block_names, "model", "old")
    store.put_manifest(make_manifest(block, "new"))
    assert {m.label for m in store.manifests() if m.chunk_id == block.name} == {"new"}
    assert store.stats().chunks == 2
    assert store.delete_manifest(block.name)
    assert not store.delete_manifest(block.name)
    assert [m.chunk_id for m in store.manifests()] == [other.name]
    with pytest.raises(InvalidInputError, match="last of its block names"):
        store.put_manifest(ChunkManifest(ROOT, ROOT, block.token_ids, block.token_ids, (block.name,)))
    held, other = make_block(1), make_block(3)  # pins and manifests are known by name
    store.write(held)
    assert store.pinned() == set()
    assert not store.has_manifest(held.name)
    store.pin([held.name, other.name])  # the other is only written later
    store.put_manifest(make_manifest(held))
    assert store.pinned() == {held.name, other.name}
    assert [store.has_manifest(block.name) for block in (held, other)] == [True, False]
    store.pinned().clear()  # a snapshot
    store.unpin([other.name])
    assert store.pinned() == {held.name}
    store.delete(held.name)
    assert store.pinned() == set()
    assert store.has_manifest(held.name)
    store.delete_manifest(held.name)
    assert not store.has_manifest(held.name)


def test_prune_keeps_what_is_pinned_and_drops_empty_manifests(store: KVStore) -> None:
    made = [make_block(seed) for seed in range(6)]
    for block in made:
        store.write(block)
        store.put_manifest(make_manifest(block))
    store.flush()
    store.pin([made[2].name])
    before = store.stats().bytes
    freed = store.prune(before // 2)
    stats = store.stats()
    assert stats.bytes == before - freed <= before // 2
    assert [store.find([b.name])[0] is not None for b in made] == [False, False, True, False, True, True]
    assert {m.chunk_id for m in store.manifests()} == {made[i].name for i in (2, 4, 5)}
    store.prune(0)
    assert store.stats().blocks == 1
    with pytest.raises(InvalidInputError, match="-1"):
        store.prune(-1)


def test_hits_and_misses_are_counted_and_documents_changed_by_one_thread_at_a_time(store: KVStore) -> None:
    block, other = make_block(1), make_block(2)
    store.write(block)
    store.flush()
    store.find([block.name, other.name, other.name])
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.blocks) == (1, 2, 1)
    missing = block_name(ROOT, as_token_ids([9, 9]))
    assert store.held([missing, block.name, missing]) == [False, True, False]
    assert store.held([]) == []
    assert (store.stats().hits, store.stats().misses) == (1, 2)
    inside = most = 0  # documents

    def change(_: int) -> None:
        nonlocal inside, most
        with store.documents.changing(ROOTS[0]):
            inside += 1
            most = max(most, inside)
            store.documents.put(record("a"))
            inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(change, range(40)))
    if not isinstance(getattr(store, "_objects", None), BucketObjects):  # a bucket has no locks
        assert most == 1
    assert store.documents.all(ROOTS[0]) == [record("a")]


def really_held(store: KVStore, made: dict[BlockName, Block]) -> int:
    """Bytes of records, manifests and documents' records that the store gives back, whatever it counts."""
    names = list(made)
    blocks = [made[name] for name, held in zip(names, store.held(names), strict=True) if held]
    listed = [len(encode_manifest(manifest)) for manifest in store.manifests()]
    records = [len(encode_document(each)) for each in store.documents.all(ROOT) if isinstance(each, DocumentRecord)]
    return sum(record.nbytes for block in blocks for record in block.records) + sum(listed) + sum(records)


@pytest.mark.parametrize("seed", rotating(range(3), core=[0]))
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_store_holds_stays_within_its_bound(kind: str, seed: int, tmp_path: Path) -> None:
    """Tiny chunks, of which manifests are the larger part; some pinned, written again, deleted, or without blocks."""
    rng, in_pages = random.Random(seed), kind not in ("memory", "redis", "tiered redis", "s3")
    max_bytes = (1 << 17) if in_pages else (1 << 13) if kind == "s3" else (1 << 14)
    bound = max_bytes * (2 if kind == "cascade" else 1)
    made: dict[BlockName, Block] = {}
    pinned: list[BlockName] = []
    with open_kind(kind, tmp_path / "store", max_bytes=max_bytes) as store:
        for step in range(24 if kind == "s3" else 90):  # a bucket takes its time
            chain = [make_block(rng.randrange(60), tokens=rng.randint(1, 4))]
            for _ in range(rng.choice([0, 0, 2])):
                chain.append(make_block(step, tokens=2, parent=chain[-1].name))
            made |= {block.name: block for block in chain}
            try:
                for block in chain if rng.random() < 0.9 else ():  # or its blocks were evicted meanwhile
                    store.write(block)
                names = tuple(block.name for block in chain)
                ids = as_token_ids(range(rng.choice([3, 300])))
                store.put_manifest(ChunkManifest(names[-1], ROOT, as_token_ids([1]), ids, names, "m", "x" * step))
                if rng.random() < 0.1:
                    store.documents.put(DocumentRecord(ROOT, "c", str(step % 4), "0f", 3, (names,)))
                if rng.random() < 0.05 and len(pinned) < 6:
                    store.pin(names)
                    pinned += [name for name, held in zip(names, store.held(names), strict=True) if held]
            except StoreFullError:
                store.unpin(pinned)
                pinned.clear()
            if rng.random() < 0.05:
                store.delete(gone := rng.choice(list(made)))
                pinned = [name for name in pinned if name != gone]
            if step % 10 == 9:
                store.flush()
                assert really_held(store, made) <= bound
                stats = store.stats()
                assert all(each.bytes <= (each.max_bytes or 0) for each in stats.tiers or (stats,))
        assert all(held or name not in pinned for name, held in zip(made, store.held(list(made)), strict=True))
        assert store.stats().evictions > 0  # the history was long enough to need it
        assert len(store.manifests()) < 90
        assert store.write(make_block(1000)) and holds(store, make_block(1000))
        store.unpin(store.pinned())  # also those that were not held when they were pinned
        store.prune(0)
        assert store.manifests() == [] and store.stats().blocks == 0


def test_what_cannot_fit_evicts_nothing_and_keeps_what_was_listed(tmp_path: Path) -> None:
    for kind in ("memory", "disk"):
        with open_kind(kind, tmp_path / kind, max_bytes=60_000) as store:
            blocks = [make_block(seed) for seed in range(3)]
            for block in blocks:
                store.write(block)
                store.put_manifest(make_manifest(block, "old"))
            huge = replace(make_manifest(blocks[0]), label="x" * 100_000)
            with pytest.raises(StoreFullError, match="raise max_bytes"):
                store.put_manifest(huge)
            assert all(holds(store, block) for block in blocks)
            assert {manifest.label for manifest in store.manifests()} == {"old"}


def test_many_threads(store: KVStore) -> None:
    made = [make_block(seed) for seed in range(12)]
    steps = 20 if isinstance(getattr(store, "_objects", None), BucketObjects) else 60  # a bucket takes its time

    def work(turn: int) -> None:
        for step in range(steps):
            block = made[(step * (turn + 1)) % len(made)]
            store.write(block)
            if step % 7 == turn:
                store.delete(block.name)
            with suppress(BlockLostError):
                assert same_bits(store.read(block.name, step % 3), block.records[step % 3])

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(work, range(5)))
    assert store.verify() == []


def test_of_blocks_found_together_the_first_stay_longest(store: KVStore) -> None:
    if isinstance(store, CascadeStore):
        pytest.skip("each of its stores evicts by itself")
    made = [make_block(seed) for seed in range(5)]
    for block in made:
        store.write(block)
    order = [3, 0, 4, 2, 1]
    store.find([made[i].name for i in order])
    store.prune(store.stats().bytes - 1)
    assert [i for i in order if store.delete(made[i].name)] == order[:-1]
    for block in made:
        store.write(block)
    store.find([made[i].name for i in order])
    store.prune(store.stats().bytes * 2 // 5)
    assert [i for i in order if store.delete(made[i].name)] == order[:2]


ROOTS = [root_name("a model", "bfloat16", salt=salt) for salt in ("", "other")]
IDS = ["a", "../../etc/passwd", "", "x" * 1024, "ünï \u0000 \n\u2028", "a/b", "a%2Fb", ".", "COM1", "🦩" * 300]


def record(document_id: str, root: BlockName = ROOTS[0], collection: str = "c", chunks: int = 2) -> DocumentRecord:
    names = [BlockName(bytes([number + 1]) * 32) for number in range(2 * chunks)]
    pairs = tuple(zip(names[::2], names[1::2], strict=True))
    return DocumentRecord(root, collection, document_id, "0f" * 32, 70 * chunks, pairs[1:], pairs[:1])


def test_records_of_any_id_come_back_by_root(store: KVStore) -> None:
    records = [record(each, root, collection) for root in ROOTS for collection in ("c", "d") for each in IDS]
    assert len({each.name for each in records}) == len(records)
    assert store.documents.roots() == []
    for each in records:
        store.documents.put(each)
    assert store.documents.roots() == sorted(ROOTS)
    for root in ROOTS:
        expected = sorted((each for each in records if each.root == root), key=lambda each: each.name)
        assert store.documents.all(root) == expected
        assert store.documents.names(root) == [each.name for each in expected]
    first = records[0]
    newer = replace(first, digest="ab" * 32, stale=())
    store.documents.put(newer)
    assert store.documents.get(first.root, first.name) == newer
    assert store.documents.delete(first.root, first.name)
    assert not store.documents.delete(first.root, first.name)
    assert store.documents.get(first.root, first.name) is None
    assert len(store.documents.all(first.root)) == len(records) // 2 - 1
    assert store.manifests() == []  # they are no chunks
    confused = [("a", "bc"), ("ab", "c"), ("", "abc")]
    assert len({document_name(ROOTS[0], collection, each) for collection, each in confused}) == 3


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_record_is_named_and_stays_until_it_is_verified(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    with DiskStore(tmp_path / "s", durable=False) as store:
        store.documents.put(record("intact"))
        damaged = record("damaged")
        store.documents.put(damaged)
        (file,) = (tmp_path / "s").rglob(f"{damaged.name.hex()}.json")
        data = bytearray(file.read_bytes())
        how = rng.choice(["flip", "cut", "empty", "other"])
        if how == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes({"cut": data[: rng.randrange(len(data))], "empty": b"", "other": b"{}"}.get(how, bytes(data)))
        for _ in range(2):
            found = store.documents.all(ROOTS[0])
            (bad,) = [each for each in found if isinstance(each, DamagedRecord)]
            assert bad.name == damaged.name and damaged.name.hex() in bad.reason
            assert record("intact") in found
            assert isinstance(store.documents.get(ROOTS[0], damaged.name), DamagedRecord)
        (damage,) = store.verify()
        assert (damage.kind, damage.name, damage.removed) == ("document", damaged.name, True)
        assert store.documents.all(ROOTS[0]) == [record("intact")]


def test_several_processes_share_records_and_one_that_only_reads_keeps_damage(tmp_path: Path) -> None:
    a, b = record("a"), record("b")
    with DiskStore(tmp_path / "s", durable=False) as one, DiskStore(tmp_path / "s", durable=False) as other:
        one.documents.put(a)
        assert other.documents.all(ROOTS[0]) == [a]
        one.documents.put(replace(a, tokens=1))
        assert other.documents.get(ROOTS[0], a.name) == replace(a, tokens=1)
        other.documents.delete(ROOTS[0], a.name)
        assert one.documents.all(ROOTS[0]) == []
        one.documents.put(a)
        (file,) = (tmp_path / "s").rglob("documents/*/*.json")
        file = file.rename(file.with_name(f"{b.name.hex()}.json"))
        (bad,) = other.documents.all(ROOTS[0])  # one under another name is damage
        assert isinstance(bad, DamagedRecord) and "'a'" in bad.reason
    with DiskStore(tmp_path / "s", read_only=True) as store:
        assert [damage.removed for damage in store.verify()] == [False]
        for change in (
            lambda: store.documents.put(b),
            lambda: store.documents.delete(ROOTS[0], b.name),
            lambda: store.documents.changing(ROOTS[0]).__enter__(),
        ):
            with pytest.raises(StoreReadOnlyError):
                change()
    assert file.exists()
