"""Stores in a real Redis and in an S3-compatible bucket (moto's server): prompts through them, and what goes wrong.

And round trips of a prompt's look-up: one a tier on servers, one request a name at the same time on buckets."""

import dataclasses
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis as client
import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError, StoreFullError, StoreUnreachableError
from cacheblend.core.names import BlockName, TokenIds, as_token_ids, chain_names, split_blocks
from cacheblend.core.plan.blocks import Block, BlockEntry, ChunkManifest, LayerShape
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, run_of, text
from cacheblend.engines import keeper
from cacheblend.engines.hf import SamplingParams
from cacheblend.store import KVStore, check_store_url, open_store
from cacheblend.store.combined import CascadeStore, TieredStore
from cacheblend.store.disk import DiskStore
from cacheblend.store.format.block_file import encode_block
from cacheblend.store.memory import MemoryStore
from cacheblend.store.remote import redis as redis_objects
from cacheblend.store.remote import store as remote_store
from cacheblend.store.remote.bucket import ASIDE_AT_ONCE, AT_ONCE, BucketObjects
from cacheblend.store.remote.redis import RedisObjects
from cacheblend.store.remote.store import RemoteStore
from families import tiny_model
from moto_bucket import BUCKET, KEYS, bucket, needs_bucket
from parity.scenes import RAG, A, assert_same, greedy, open_engine
from redis_server import RedisServer, needs_redis, redis_server
from store_blocks import ROOT, SHAPES, holds, make_block, make_manifest, raw_block

FOUR = SamplingParams(max_new_tokens=4, ignore_eos=True)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "PAUSE_S", 0.0)
    monkeypatch.setattr(keeper, "PAUSE_S", 0.0)


def keys_of(server: RedisServer, pattern: str) -> list[bytes]:
    return sorted(client.Redis(port=server.port).keys(pattern))


@pytest.mark.parametrize(
    ("tier", "family", "codec"),
    [(*kind, codec) for kind in (("redis", "gemma3_text"), ("s3", "gpt_oss")) for codec in ("raw", "int8", "int4")],
)
def test_a_blend_is_the_same_as_from_memory_which_takes_over_in_front(
    tier: str, family: str, codec: str, request: pytest.FixtureRequest, keys: None
) -> None:
    model = tiny_model(family)
    if tier == "redis":
        url = request.getfixturevalue("server").url
    else:
        url = f"s3://{BUCKET}/blend-{codec}?endpoint={bucket().endpoint}&region=us-east-1"
    with open_engine(model, codec=codec) as near:
        expected = near.prefill(RAG)
    with open_store(url) as store, open_engine(model, store=store, codec=codec) as engine:
        result = engine.prefill(RAG)
        report = result.report
        assert (report.hit_tokens[tier] > 0, report.missed_tokens, report.fallbacks) == (True, 0, [])
    assert_same(result, expected.logits, expected.kv, 0.0)
    with open_store(url, ram_bytes="64MiB") as store, open_engine(model, [], store=store, codec=codec) as another:
        report = another.prefill(RAG).report
        assert (report.hit_tokens[tier] > 0, report.missed_tokens) == (True, 0)
        hits = another.prefill(RAG).report.hit_tokens
        assert hits.get(tier, 0) == 0 and hits["memory"] > 0


def test_blocks_in_memory_outlive_their_server(server: RedisServer) -> None:
    with open_store(f"{server.url}?ram_bytes=64MiB") as store, open_engine(tiny_model("llama"), store=store) as engine:
        server.kill()
        for _ in range(2):  # the first notices, the second does not ask
            assert engine.prefill(RAG).report.hit_tokens["memory"] == 115
        store.front.prune(0)  # type: ignore[attr-defined]
        assert engine.prefill(RAG).report.missed_tokens == 115


@pytest.mark.may_fail("store write", "background work", "list of chunks")
def test_a_server_that_comes_back_empty_is_filled_again(server: RedisServer, no_pause: None) -> None:
    with open_store(server.url) as store, open_engine(tiny_model("llama"), [A], store=store, capture=True) as engine:
        server.kill()
        engine.generate(RAG, FOUR)
        assert engine.flush(timeout=60)  # its writes fail
        server.start()
        assert engine.generate(RAG, FOUR).report.missed_tokens > 0
        assert engine.flush(timeout=60)
        assert engine.generate(RAG, FOUR).report.missed_tokens == 0


def test_a_server_that_hangs_is_given_up_and_one_that_does_not_answer_is_asked_once_in_a_while(
    server: RedisServer,
) -> None:
    block = make_block(1)
    with open_store(f"{server.url}?timeout=0.3") as store:
        store.write(block)
        client.Redis(port=server.port).execute_command("CLIENT", "PAUSE", "1000", "ALL")
        started = time.monotonic()
        assert store.find([block.name]) == [None]
        assert time.monotonic() - started < 2
    with open_store(f"{server.url}?timeout=0.3") as store:
        server.kill()
        assert store.find([block.name]) == [None]
        started = time.monotonic()
        for _ in range(200):
            assert store.find([block.name]) == [None]
            with pytest.raises(BlockLostError, match="asked again in"):
                store.read(block.name, 0)
        assert time.monotonic() - started < 0.5
        for change in (lambda: store.write(block), lambda: store.pin([block.name]), store.stats, store.manifests):
            with pytest.raises(StoreUnreachableError, match=r"redis://127.0.0.1:\d+/0"):
                change()


def test_a_block_that_another_process_replaced_is_read_and_two_prefixes_do_not_meet(server: RedisServer) -> None:
    block = make_block(1)
    replaced = dataclasses.replace(block, records=[record.clone().fill_(3) for record in block.records])
    with (
        open_store(server.url) as store,
        open_store(server.url) as another,
        open_store(f"{server.url}?prefix=two") as two,
    ):
        store.write(block)
        assert holds(store, block)  # its header is remembered
        another.delete(block.name)
        another.write(replaced)
        assert torch.equal(store.read(block.name, 1), replaced.records[1])
        assert store.stats().damaged == 0
        assert holds(store, replaced)
        assert two.find([block.name]) == [None]


def test_writers_side_by_side_keep_the_bound(server: RedisServer) -> None:
    one = make_block(0, tokens=64)
    size = sum(len(part) for part in encode_block(one))
    with open_store(f"{server.url}?max_bytes={4 * size}") as store, ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda seed: store.write(make_block(seed, tokens=64)), range(40)))
        assert all(written)
        assert store.stats().bytes <= 4 * size


@pytest.mark.parametrize("what", ["flipped", "cut", "another block's", "header flipped"])
def test_wrong_bytes_are_a_lost_block_that_is_removed_and_reported(
    server: RedisServer, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    block, other = make_block(1), make_block(2)
    raw = client.Redis(port=server.port)
    with open_store(server.url) as filled:
        filled.write(block)
        filled.write(other)
    key = f"cacheblend:{{{block.name.hex()}}}:{'h' if 'header' in what else 1}"
    value = raw.get(key)
    assert isinstance(value, bytes)
    flipped = bytes([*value[:60], value[60] ^ 1, *value[61:]])
    wrong = {"cut": value[:-1], "another block's": raw.get(f"cacheblend:{{{other.name.hex()}}}:1")}.get(what, flipped)
    raw.set(key, wrong)  # type: ignore[arg-type]
    with open_store(server.url) as store:
        if "header" not in what:
            assert store.find([block.name])[0] is not None
            with pytest.raises(BlockLostError):
                store.read(block.name, 1)
        assert store.find([block.name, other.name])[0] is None
        assert holds(store, other)
        assert store.stats().damaged == 1
        assert "damaged block" in caplog.text and "removed" in caplog.text
    assert keys_of(server, f"*{block.name.hex()}*") == []


def test_verify_finds_what_is_damaged_and_what_the_server_evicted_is_lost_and_no_damage(server: RedisServer) -> None:
    blocks = [make_block(seed) for seed in range(4)]
    raw = client.Redis(port=server.port)
    with open_store(server.url) as store:
        for block in blocks:
            store.write(block)
            store.put_manifest(make_manifest(block))
        raw.set(f"cacheblend:{{{blocks[1].name.hex()}}}:2", b"x")
        raw.hset("cacheblend:manifests", blocks[2].name.hex(), b"x")
        raw.hset("cacheblend:marks", blocks[2].name.hex(), b"x")
        found = store.verify()
        assert {(each.kind, each.name, each.removed) for each in found} == {
            ("block", blocks[1].name, True),
            ("manifest", blocks[2].name, True),
        }
        assert store.verify() == [] and store.stats().damaged == 2
        raw.delete(f"cacheblend:{{{block.name.hex()}}}:1")
        with pytest.raises(BlockLostError, match="evicted"):
            store.read(block.name, 1)
        assert store.stats().damaged == 2
        assert store.find([block.name]) == [None]  # it is of no use any more
        assert store.write(block)
        assert holds(store, block)


def test_blocks_that_the_server_evicted_are_not_counted_and_taken_off_its_lists(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_objects, "_PUBLISHED_S", 0.0)
    raw = client.Redis(port=server.port)
    with open_store(server.url) as store:
        for seed in range(5):
            store.write(make_block(seed))
        gone = [make_block(seed).name.hex() for seed in (1, 3)]
        for digits in gone:
            raw.delete(*raw.keys(f"cacheblend:{{{digits}}}:*"))  # type: ignore[misc]
        assert store.stats().blocks == 3
        store.prune(1 << 30)
        listed = [raw.hkeys("cacheblend:sizes"), raw.zrange("cacheblend:used", 0, -1)]
        assert all(len(names) == 3 and not set(gone) & {n.decode() for n in names} for names in listed)  # type: ignore[arg-type, union-attr]


def test_a_server_without_memory_refuses_the_block_and_keeps_the_others() -> None:
    limits = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with redis_server(*limits) as server, open_store(server.url) as store:
        held = []
        with pytest.raises(StoreFullError, match="no memory left"):
            for seed in range(200):
                block = make_block(seed, tokens=900)
                store.write(block)
                held.append(block)
        assert held and all(holds(store, block) for block in held)


@pytest.mark.parametrize("sent", range(3))
def test_a_writer_that_dies_leaves_nothing(server: RedisServer, sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of its commands the server has got: its size, its use, its values."""
    with open_store(server.url) as store:
        objects, block = store._objects, make_block(1)  # type: ignore[attr-defined]
        asked = objects._asked

        def die(ask: Any) -> Any:
            def part(pipe: Any) -> None:
                ask(pipe)
                if any(arguments[0] == "MSETNX" for arguments, _ in pipe.command_stack):
                    del pipe.command_stack[sent:]
                    pipe.execute()
                    raise KeyboardInterrupt

            return asked(part)

        objects._asked = die
        with pytest.raises(KeyboardInterrupt):
            store.write(block)
        objects._asked = asked
        assert store.find([block.name]) == [None] and keys_of(server, "*}:*") == []
        monkeypatch.setattr(redis_objects, "_PUBLISHED_S", -1.0)
        store.prune(1 << 40)
        assert keys_of(server, "cacheblend:sizes") == keys_of(server, "cacheblend:used") == []
        assert store.write(block) and holds(store, block)


def test_writers_of_one_block_at_once_mix_nothing(server: RedisServer) -> None:
    """Its KV was computed twice, and may differ in its last bits: who has read a header reads what belongs to it."""
    stores = [open_store(server.url) for _ in range(3)]
    raw = client.Redis(port=server.port)
    with ThreadPoolExecutor(3) as pool:
        for seed in range(40):
            blocks = [make_block(seed), dataclasses.replace(make_block(seed), records=make_block(seed + 100).records)]
            if seed % 4 == 0:  # the server has evicted the header of an older one
                raw.set(f"cacheblend:{{{blocks[0].name.hex()}}}:1", b"x")
            started = threading.Barrier(3)

            def write(store: KVStore, block: Block, started: threading.Barrier = started) -> bool:
                started.wait()
                return store.write(block)

            def read(store: KVStore, name: BlockName, started: threading.Barrier = started) -> list[torch.Tensor]:
                started.wait()
                while store.find([name]) == [None]:
                    pass
                return [store.read(name, layer) for layer in range(len(SHAPES))]

            reading = pool.submit(read, stores[2], blocks[0].name)
            for done in [pool.submit(write, *pair) for pair in zip(stores, blocks, strict=False)]:
                done.result()
            reading.result()
            assert sum(holds(stores[2], block) for block in blocks) == 1
    for store in stores:
        assert store.stats().damaged == 0
        store.close()


def test_a_server_that_fails_over_is_written_by_its_name(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was asked is a replica now, and its name leads to the other one; its connections are still open."""
    resolve, current = socket.getaddrinfo, [server.port]

    def lookup(host: Any, port: Any, *more: Any, **options: Any) -> Any:
        named = host == "redis.test"
        return resolve("127.0.0.1" if named else host, current[0] if named else port, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with redis_server() as other, open_store("redis://redis.test:6379/0") as store:
        assert store.write(make_block(1))
        client.Redis(port=server.port).replicaof("127.0.0.1", other.port)
        with pytest.raises(StoreError, match=r"refused.*read only"):
            store.write(make_block(2))
        current[0] = other.port
        assert store.write(make_block(2))
        assert keys_of(other, "*}:h") == [f"cacheblend:{{{make_block(2).name.hex()}}}:h".encode()]


def test_a_cluster(tmp_path: object) -> None:
    with redis_server("--cluster-enabled", "yes", "--cluster-config-file", f"{tmp_path}/nodes.conf") as server:
        command = ["redis-cli", "-p", str(server.port), "cluster", "addslotsrange", "0", "16383"]
        subprocess.run(command, check=True, capture_output=True)
        end = time.monotonic() + 20
        while "ok" not in str(client.Redis(port=server.port).execute_command("CLUSTER INFO")).split("slots")[0]:
            assert time.monotonic() < end
            time.sleep(0.1)
        with open_store(f"{server.url}?cluster=true") as store:
            check_whole(store)


def check_whole(store: KVStore) -> None:
    """What every store does, once through."""
    blocks = [make_block(seed) for seed in range(5)]
    for block in blocks:
        assert store.write(block)
        store.put_manifest(make_manifest(block))
    assert all(holds(store, block) for block in blocks)
    records = store.read_many([block.name for block in blocks], 1, slice(0, 1))
    assert all(torch.is_tensor(record) for record in records)
    store.pin([blocks[0].name])
    store.prune(0)
    assert [entry is not None for entry in store.find([b.name for b in blocks])] == [True, *[False] * 4]
    assert [manifest.chunk_id for manifest in store.manifests()] == [blocks[0].name]
    assert store.delete(blocks[0].name)
    assert store.stats().blocks == 0


def test_a_password_is_not_shown_and_a_wrong_one_is_reported() -> None:
    with redis_server("--requirepass", "secret") as server:
        wrong = server.url.replace("127", ":wrong@127", 1)
        with open_store(wrong) as store, pytest.raises(StoreError) as caught:
            store.stats()
        assert "wrong" not in str(caught.value).replace("WRONGPASS", "") and "127.0.0.1" in str(caught.value)
        with open_store(server.url.replace("127", ":secret@127", 1)) as store:
            check_whole(store)


def test_threads_that_come_first_share_a_client(server: RedisServer) -> None:
    objects, opened = redis_objects.RedisObjects(server.url, prefix="first"), list[object]()
    together = threading.Barrier(8)
    real = objects._open

    def slowly() -> object:
        time.sleep(0.05)
        opened.append(real())
        return opened[-1]

    objects._open = slowly  # type: ignore[assignment]

    def ask() -> bool:
        together.wait(30)
        return objects.has_sealed("manifests", BlockName(b"\x00" * 32))

    with ThreadPoolExecutor(8) as pool:
        assert [each.result() for each in [pool.submit(ask) for _ in range(8)]] == [False] * 8
    assert len(opened) == 1
    objects.close()


@pytest.mark.parametrize("size", [b"x", b"", b"1", b"-5 2", b"1 2 3", b"1.5 2", b"\xff 1"])
def test_a_damaged_size_is_measured_and_mended(server: RedisServer, size: bytes) -> None:
    block = make_block(1)
    redis = client.Redis(port=server.port)
    with open_store(server.url) as store:
        store.write(block)
        expected, bytes_before = redis.hget("cacheblend:sizes", block.name.hex()), store.stats().bytes
        redis.hset("cacheblend:sizes", block.name.hex(), size)
        redis.hset("cacheblend:sizes", b"no name", b"7 7")
        assert store.stats().bytes == bytes_before
        assert store.verify() == [] and holds(store, block)
        assert redis.hget("cacheblend:sizes", block.name.hex()) == expected
        redis.hset("cacheblend:sizes", block.name.hex(), size)
        assert store.prune(0) == bytes_before and store.stats().blocks == 0
        assert not redis.keys(f"*{block.name.hex()}*:*")


@pytest.mark.parametrize("mark", [b"1764000000000000000", b"x", b"", b"1 x", b"1 2 3"])
def test_marks_that_something_else_wrote_count_no_bytes_and_hide_no_manifest(server: RedisServer, mark: bytes) -> None:
    redis = client.Redis(port=server.port)
    blocks = [make_block(seed) for seed in range(2)]
    with open_store(server.url) as store:
        for block in blocks:
            store.write(block)
            store.put_manifest(make_manifest(block))
        right = store.stats().bytes
        redis.hset("cacheblend:marks", blocks[0].name.hex(), mark)
        assert 0 < store.stats().bytes < right
        assert {manifest.chunk_id for manifest in store.manifests()} == {block.name for block in blocks}
        store.put_manifest(make_manifest(blocks[0]))  # written again, it says its bytes
        assert store.stats().bytes == right


def opened(folder: str) -> RemoteStore:
    return RemoteStore(BucketObjects(f"s3://{BUCKET}/{folder}", options=bucket().options))


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As AWS's own tools take them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_access_key"])


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.may_fail("block lost", "list of chunks", "store write", "background work")
@pytest.mark.parametrize("tier", [pytest.param("redis", marks=needs_redis), pytest.param("s3", marks=needs_bucket)])
def test_a_server_that_never_answers_costs_a_recompute_and_no_answer_and_is_told_once(
    tier: str, keys: None, silent: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    never_started, bucket_url = RedisServer().url, f"s3://{BUCKET}/silent?endpoint={silent}&region=us-east-1"
    url = f"{never_started}?timeout=0.3" if tier == "redis" else f"{bucket_url}&timeout=0.3"
    with open_store(url) as store, open_engine(model, [], store=store, capture=True) as engine:
        started = time.monotonic()
        for _ in range(3):
            assert engine.generate(RAG, FOUR).token_ids == greedy(model, RAG, 4)
        assert time.monotonic() - started < 5
        with pytest.raises(StoreUnreachableError, match="asked again in"):
            store.stats()
    assert "requests are computed without it" in caplog.text
    for again in ("list of chunks cannot be read", "block was not stored"):
        assert again not in caplog.text


def test_a_missing_bucket_is_reported(keys: None) -> None:
    with open_store(f"s3://nowhere/x?endpoint={bucket().endpoint}&region=us-east-1") as store:
        with pytest.raises(StoreError, match="s3://nowhere/x"):
            store.write(make_block(1))
        assert store.find([make_block(1).name]) == [None]


@needs_bucket
def test_missing_keys_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for given, missing in permutations(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")):
        with monkeypatch.context() as only:
            only.setenv(given, "key")
            for reports in (open_store, check_store_url):
                with pytest.raises(InvalidInputError, match=f"no complete credentials: set {missing}, too"):
                    reports("s3://bucket/x")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://169.254.0.1:1")  # no service answers there
    with open_store("s3://bucket/x?timeout=0.2") as store, pytest.raises(StoreError) as caught:
        store.stats()
    assert "s3://bucket/x has no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or" in str(caught.value)
    assert "169.254" not in str(caught.value)


def test_what_one_process_writes_another_reads() -> None:
    """A long header takes a second request."""
    blocks = [make_block(seed) for seed in range(40)]
    long = make_block(1, tokens=3, shapes=[LayerShape(9, 2)] * 500)
    with opened("shared") as store, opened("shared") as other:
        for block in [*blocks, long]:
            assert store.write(block)
            assert not other.write(block)
        assert all(entry is not None for entry in other.find([block.name for block in blocks]))
        assert all(holds(other, block) for block in [*blocks, long])


def test_a_request_that_failed_takes_those_behind_it_along() -> None:
    """A thousand of them, of two seconds each in 32 threads, would be in the way of everybody else for a minute."""
    objects, asked = BucketObjects(f"s3://{BUCKET}/behind", options=bucket().options), []

    def ask(number: int) -> None:
        asked.append(number)
        time.sleep(0.2)
        raise StoreUnreachableError("no answer")

    with pytest.raises(StoreUnreachableError):
        objects._each(range(10 * AT_ONCE), ask)
    objects._each(range(2), lambda number: asked.append(-1))  # comes behind all that wait
    assert 1 <= len([number for number in asked if number >= 0]) <= 3 * AT_ONCE
    objects.close()


CHUNKS, BLOCK_SIZE = 20, 8


class CountingRedis(RedisObjects):
    """Counts the pipelines sent."""

    sent = 0

    def _together(self, ask: Any, all_of: int | None = None) -> list[Any]:
        self.sent += 1
        return super()._together(ask, all_of)


class CountingS3:
    """obstore, counting requests; remembers how many were under way at the same time."""

    def __init__(self, real: Any) -> None:
        self._real, self._lock = real, threading.Lock()
        self.calls: list[str] = []
        self.now = self.most = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                self.calls.append(name)
                self.now += 1
                self.most = max(self.most, self.now)
            try:
                time.sleep(0.02)  # as a bucket's answer takes
                return getattr(self._real, name)(*args, **options)
            finally:
                with self._lock:
                    self.now -= 1

        return call


class Counting(MemoryStore):
    """Memory that counts its look-ups and the names asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.finds: list[int] = []

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        self.finds.append(len(names))
        return super().find(names)


def fill(store: KVStore, *, size: int = BLOCK_SIZE) -> Prompt:
    """Stores chunks, and returns a prompt with a run of each."""
    chunks = []
    for number in range(CHUNKS):
        ids = as_token_ids(np.arange(20) + 100 * number)
        above, names = ROOT, []
        for tokens in split_blocks(ids, size):
            store.write(block_of(above, tokens))
            (above,) = chain_names(above, [tokens])
            names.append(above)
        chunks.append(ChunkManifest(above, ROOT, as_token_ids([]), ids, tuple(names)))
    store.flush()
    return Prompt.of([text([1, 2, 3]), *(run_of(each, 1, 18) for each in chunks), text([4, 5])])


def block_of(above: BlockName, tokens: TokenIds) -> Any:
    (name,) = chain_names(above, [tokens])
    return raw_block(name, above, tokens, make_block(1, len(tokens), SHAPES).records)


def planned(store: KVStore, prompt: Prompt) -> int:
    """Tokens found by a plan, of `CHUNKS` * 18."""
    return sum(Planner(ROOT, block_size=BLOCK_SIZE).plan(prompt, store).hit_tokens().values())


def names_in(prompt: Prompt) -> list[BlockName]:
    return [name for segment in prompt.segments if segment.found_in for name in segment.found_in.block_names]


def test_a_plan_is_one_round_trip_on_a_server_and_two_with_another_block_size_or_a_time_to_live(
    server: RedisServer,
) -> None:
    for size, trips in ((BLOCK_SIZE, (1, 1)), (9, (2,))):  # of 9 tokens as many blocks
        with RemoteStore(RedisObjects(server.url, prefix=f"size{size}")) as filling:
            prompt = fill(filling, size=size)
        objects = CountingRedis(server.url, prefix=f"size{size}")
        with RemoteStore(objects) as store:
            for expected in trips:  # the second plan knows the headers
                objects.sent = 0
                assert planned(store, prompt) == CHUNKS * 18
                assert objects.sent == expected
    objects = CountingRedis(server.url, prefix="ttl")
    with RemoteStore(objects, ttl=3600.0) as store:
        prompt = fill(store)
        objects.sent = 0
        assert all(store.find(names_in(prompt)))
        assert objects.sent == 2


def test_combined_stores_ask_each_of_their_stores_once_and_none_behind_one_that_has_all(
    server: RedisServer, tmp_path: Path
) -> None:
    far = [CountingRedis(server.url, prefix=f"far{number}") for number in range(2)]
    stores = [RemoteStore(each) for each in far]
    disk = DiskStore(tmp_path / "near", durable=False)
    with TieredStore(MemoryStore(1 << 24), CascadeStore([disk, *stores])) as store:
        prompt = fill(store)
        names = names_in(prompt)
        for each in far:
            each.sent = 0
        assert planned(store, prompt) == CHUNKS * 18
        assert [each.sent for each in far] == [1, 1]  # names of the prompt's own chain, which nothing holds
        assert all(store.find(names))
        assert [each.sent for each in far] == [1, 1]  # the disk has all of them
        for name in names:
            disk.delete(name)
        assert planned(store, prompt) == CHUNKS * 18
        assert [each.sent for each in far] == [2, 2]
    nearest, farther = Counting(), Counting()
    with CascadeStore([nearest, farther]) as cascade:
        names = names_in(fill(cascade))
        nearest.finds, farther.finds = [], []
        assert all(cascade.find(names))
        assert nearest.finds == [len(names)] and farther.finds == []


def test_a_bucket_is_asked_once_for_each_name_at_the_same_time(request: pytest.FixtureRequest) -> None:
    url = f"s3://{BUCKET}/{request.node.name}"
    with RemoteStore(BucketObjects(url, options=bucket().options)) as filling:
        prompt = fill(filling)
    names = names_in(prompt)
    objects = BucketObjects(url, options=bucket().options)
    objects._obstore = counting = CountingS3(objects._obstore)
    with RemoteStore(objects) as store:
        assert all(store.find(names))
        assert counting.calls == ["get"] * len(names)
        assert 1 < counting.most <= AT_ONCE
        counting.calls = []
        assert all(store.find(names))  # headers are known: is it there, and nothing else
        assert counting.calls == ["head"] * len(names)
        counting.calls = []
        assert planned(store, prompt) == CHUNKS * 18
        assert set(counting.calls) == {"head", "get"}
        assert len(counting.calls) == counting.calls.count("head") + counting.calls.count("get") <= 2 * len(names) + 4


ASIDE = {
    "manifests that are read": lambda objects, names: objects.read_sealed("manifests", names),
    "blocks that eviction asks for": lambda objects, names: objects.exist(names),
    "pins": lambda objects, names: objects.pin(names),
}
"""What may take hundreds of requests, none of which is waited for."""


@pytest.mark.parametrize("what", ASIDE)
def test_look_ups_do_not_wait_behind_what_is_done_aside(what: str, request: pytest.FixtureRequest) -> None:
    url, go_on, asked = f"s3://{BUCKET}/{request.node.name}", threading.Event(), threading.Semaphore(0)
    with RemoteStore(BucketObjects(url, options=bucket().options)) as filling:
        blocks = [make_block(seed) for seed in range(3)]
        for block in blocks:
            filling.write(block)
    slow = [make_block(number).name for number in range(100, 300)]

    class SlowBucket:
        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            def call(where: Any, path: str, *args: Any, **options: Any) -> Any:
                if bytes.fromhex(path.rpartition("/")[2]) in slow:
                    asked.release()
                    go_on.wait()
                return getattr(self._real, name)(where, path, *args, **options)

            return call

    objects = BucketObjects(url, options=bucket().options)
    objects._obstore = SlowBucket(objects._obstore)
    aside = threading.Thread(target=ASIDE[what], args=(objects, slow))
    try:
        aside.start()
        assert all(asked.acquire(timeout=60) for _ in range(ASIDE_AT_ONCE))
        with RemoteStore(objects) as store:
            ends = threading.Timer(60, go_on.set)
            ends.start()
            assert all(store.find([block.name for block in blocks])) and not go_on.is_set()
            assert not asked.acquire(timeout=1.0), "a thread of look-ups has taken one"
            ends.cancel()
            go_on.set()
            aside.join()
    finally:
        go_on.set()


@pytest.mark.parametrize("ttl", ["", "?ttl=1h"])
def test_who_only_reads_a_server_marks_nothing_as_used(server: RedisServer, ttl: str) -> None:
    raw, blocks = client.Redis(port=server.port), [make_block(seed) for seed in range(3)]
    with open_store(server.url + ttl) as store:
        store.write_all(blocks)
        before = raw.zrange("cacheblend:used", 0, -1, withscores=True)
        with open_store(server.url + ttl, read_only=True) as reader:
            assert all(reader.find([block.name for block in blocks])) and all(holds(reader, block) for block in blocks)
        assert store.held([blocks[0].name, make_block(9).name]) == [True, False]  # nor does who counts what is there
        assert raw.zrange("cacheblend:used", 0, -1, withscores=True) == before
        store.find([blocks[0].name])
        assert raw.zrange("cacheblend:used", 0, -1, withscores=True) != before


def test_what_others_keep_in_a_bucket_is_none_of_the_stores(request: pytest.FixtureRequest) -> None:
    url, block, name = f"s3://{BUCKET}/{request.node.name}", make_block(3), make_block(4).name.hex()
    objects = BucketObjects(url, options=bucket().options)
    others = ["blocks/cafe", f"blocks/backup/{name}", f"blocks/{name.upper()}", "pins/cafe", "manifests/cafe"]
    with RemoteStore(objects) as store:
        for path in others:
            objects._put(path, b"x")
        store.write(block)
        assert store.stats().blocks == 1 and store.pinned() == set() and store.manifests() == []
        store.prune(0)
        assert store.stats().blocks == 0 and all(objects._head(path) for path in others)


@needs_bucket
def test_an_endpoint_of_the_environment_may_be_plain_http(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket().endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with open_store(f"s3://{BUCKET}/by-environment") as store:
        assert store.write(make_block(3)) and holds(store, make_block(3))


def test_a_block_of_a_bucket_counts_as_used_when_it_is_found(request: pytest.FixtureRequest) -> None:
    objects = BucketObjects(f"s3://{BUCKET}/{request.node.name}", options=bucket().options)
    with RemoteStore(objects) as store:
        block = make_block(3)
        store.write(block)
        later = time.time() + 60
        assert objects.look_up([block.name], {block.name}, since=later) == [None]
        assert objects.look_up([block.name], since=later) == [None]
        (header,) = objects.look_up([block.name], {block.name})
        assert header and objects.look_up([block.name]) == [b""]
        assert objects.look_up([make_block(4).name], {make_block(4).name}) == [None]
