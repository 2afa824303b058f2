"""A store in a real Redis: prompts through it, and what goes wrong with servers."""

import dataclasses
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis as client
import torch

from cacheblend.core.errors import BlockLostError, StoreError, StoreFullError, StoreUnreachableError
from cacheblend.core.load import breaker
from cacheblend.core.names import BlockName
from cacheblend.engines import keeper
from cacheblend.engines.hf import SamplingParams
from cacheblend.store import KVStore, open_store
from cacheblend.store.format.block_file import encode_block
from cacheblend.store.remote import redis as redis_objects
from families import tiny_model
from parity.scenes import RAG, A, assert_same, greedy, open_engine
from redis_server import RedisServer, needs_redis, redis_server
from store_blocks import holds, make_block, make_manifest

pytestmark = needs_redis
FOUR = SamplingParams(max_new_tokens=4, ignore_eos=True)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE_S", 0.0)
    monkeypatch.setattr(keeper, "PAUSE_S", 0.0)


def keys_of(server: RedisServer, pattern: str) -> list[bytes]:
    return sorted(client.Redis(port=server.port).keys(pattern))


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_blend_is_the_same_as_from_memory(server: RedisServer, codec: str) -> None:
    model = tiny_model("gemma3_text")
    with open_engine(model, codec=codec) as near:
        expected = near.prefill(RAG)
    with open_store(server.url) as store, open_engine(model, store=store, codec=codec) as engine:
        result = engine.prefill(RAG)
        report = result.report
        assert (report.hit_tokens["redis"] > 0, report.missed_tokens, report.fallbacks) == (True, 0, [])
    assert_same(result, expected.logits, expected.kv, 0.0)
    with open_store(server.url) as store, open_engine(model, [], store=store, codec=codec) as another:
        assert another.prefill(RAG).report.missed_tokens == 0


def test_memory_in_front_takes_over(server: RedisServer) -> None:
    with open_store(f"{server.url}?ram_bytes=64MiB") as store, open_engine(tiny_model("llama"), store=store) as engine:
        store.front.prune(0)  # type: ignore[attr-defined]
        assert engine.prefill(RAG).report.hit_tokens["redis"] > 0
        hits = engine.prefill(RAG).report.hit_tokens
        assert hits.get("redis", 0) == 0 and hits["memory"] > 0


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


def test_a_writer_that_dies_leaves_nothing_for_long(server: RedisServer) -> None:
    with open_store(server.url) as store:
        objects = store._objects  # type: ignore[attr-defined]
        together, calls = objects._together, []

        def die_before_the_header(*arguments: object, **options: object) -> object:
            calls.append(arguments)
            if len(calls) == 3:  # is it held? its layers, its header
                raise KeyboardInterrupt
            return together(*arguments, **options)

        objects._together = die_before_the_header
        with pytest.raises(KeyboardInterrupt):
            store.write(make_block(1))
        objects._together = together
        assert store.find([make_block(1).name]) == [None]
        left = keys_of(server, "*}:*")
        assert left and all(client.Redis(port=server.port).ttl(key) > 0 for key in left)
        assert store.write(make_block(1))
        assert holds(store, make_block(1))
        assert all(client.Redis(port=server.port).ttl(key) == -1 for key in keys_of(server, "*}:*"))


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


@pytest.mark.may_fail("store write", "background work", "list of chunks")
def test_questions_are_answered_without_the_server_from_the_start(no_pause: None) -> None:
    server = RedisServer()  # never started
    model = tiny_model("llama")
    with open_store(f"{server.url}?timeout=0.3") as store, open_engine(model, [], store=store) as engine:
        assert engine.generate(RAG, FOUR).token_ids == greedy(model, RAG, 4)


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


# ---- what no store wrote -----------------------------------------------------------------------------------


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
def test_manifests_of_an_older_version_are_measured_and_count(server: RedisServer, mark: bytes) -> None:
    """Marks had no bytes in them; neither have those that something else wrote."""
    redis = client.Redis(port=server.port)
    blocks = [make_block(seed) for seed in range(6)]
    with open_store(server.url) as store:
        for block in blocks:
            store.write(block)
            store.put_manifest(make_manifest(block))
        right = store.stats().bytes
        for block in blocks[:4]:
            redis.hset("cacheblend:marks", block.name.hex(), mark)
        assert store.stats().bytes == right
        assert {manifest.chunk_id for manifest in store.manifests()} == {block.name for block in blocks}
    with open_store(f"{server.url}?max_bytes={right * 2 // 3}") as store:
        assert store.write(make_block(100))
        assert store.stats().bytes <= right * 2 // 3
        held = store.held([block.name for block in blocks])
        assert [store.has_manifest(block.name) for block in blocks] == held
        assert 0 < sum(held) < len(blocks)
        store.put_manifest(make_manifest(blocks[-1]))  # written again, it says its bytes
        assert len(redis.hget("cacheblend:marks", blocks[-1].name.hex()).split()) == 2
