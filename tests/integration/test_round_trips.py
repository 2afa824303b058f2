"""Round trips of a prompt's look-up: one a tier on servers, one request a name at the same time on buckets."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from cacheblend.core.names import BlockName, TokenIds, as_token_ids, chain_names, split_blocks
from cacheblend.core.plan.blocks import BlockEntry, ChunkManifest
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, run_of, text
from cacheblend.store import KVStore
from cacheblend.store.combined import CascadeStore, TieredStore
from cacheblend.store.disk import DiskStore
from cacheblend.store.memory import MemoryStore
from cacheblend.store.remote.bucket import AT_ONCE, BucketObjects
from cacheblend.store.remote.redis import RedisObjects
from cacheblend.store.remote.store import RemoteStore
from moto_bucket import BUCKET, bucket, needs_bucket
from redis_server import RedisServer, needs_redis, redis_server
from store_blocks import ROOT, SHAPES, make_block, raw_block

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


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as opened:
        yield opened


@needs_redis
def test_a_plan_is_one_round_trip_on_a_server(server: RedisServer, request: pytest.FixtureRequest) -> None:
    prefix = request.node.name
    with RemoteStore(RedisObjects(server.url, prefix=prefix)) as filling:
        prompt = fill(filling)
    objects = CountingRedis(server.url, prefix=prefix)
    with RemoteStore(objects) as store:
        for _ in range(2):  # the second one knows the headers
            objects.sent = 0
            assert planned(store, prompt) == CHUNKS * 18
            assert objects.sent == 1


@needs_redis
def test_another_block_size_takes_a_second_one(server: RedisServer, request: pytest.FixtureRequest) -> None:
    prefix = request.node.name
    with RemoteStore(RedisObjects(server.url, prefix=prefix)) as filling:
        prompt = fill(filling, size=9)  # as many blocks
    objects = CountingRedis(server.url, prefix=prefix)
    with RemoteStore(objects) as store:
        assert planned(store, prompt) == CHUNKS * 18
        assert objects.sent == 2


@needs_redis
def test_a_time_to_live_takes_a_second_one(server: RedisServer, request: pytest.FixtureRequest) -> None:
    objects = CountingRedis(server.url, prefix=request.node.name)
    with RemoteStore(objects, ttl=3600.0) as store:
        prompt = fill(store)
        names = [name for segment in prompt.segments if segment.found_in for name in segment.found_in.block_names]
        objects.sent = 0
        assert all(store.find(names))
        assert objects.sent == 2


@needs_redis
def test_combined_stores_ask_each_of_their_stores_once(
    server: RedisServer, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    far = [CountingRedis(server.url, prefix=f"{request.node.name}{number}") for number in range(2)]
    stores = [RemoteStore(each) for each in far]
    disk = DiskStore(tmp_path / "near", durable=False)
    with TieredStore(MemoryStore(1 << 24), CascadeStore([disk, *stores])) as store:
        prompt = fill(store)
        names = [name for segment in prompt.segments if segment.found_in for name in segment.found_in.block_names]
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


def test_a_nearer_store_that_has_all_is_the_only_one_asked() -> None:
    near, far = Counting(), Counting()
    with CascadeStore([near, far]) as store:
        prompt = fill(store)
        names = [name for segment in prompt.segments if segment.found_in for name in segment.found_in.block_names]
        near.finds, far.finds = [], []
        assert all(store.find(names))
        assert near.finds == [len(names)] and far.finds == []


@needs_bucket
def test_a_bucket_is_asked_once_for_each_name_at_the_same_time(request: pytest.FixtureRequest) -> None:
    url = f"s3://{BUCKET}/{request.node.name}"
    with RemoteStore(BucketObjects(url, options=bucket().options)) as filling:
        prompt = fill(filling)
    names = [name for segment in prompt.segments if segment.found_in for name in segment.found_in.block_names]
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


@needs_bucket
def test_look_ups_do_not_wait_behind_manifests_that_are_read(request: pytest.FixtureRequest) -> None:
    """Hundreds of them, each of which takes its time."""
    url, go_on, asked = f"s3://{BUCKET}/{request.node.name}", threading.Event(), threading.Semaphore(0)
    with RemoteStore(BucketObjects(url, options=bucket().options)) as filling:
        blocks = [make_block(seed) for seed in range(3)]
        for block in blocks:
            filling.write(block)

    class SlowManifests:
        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def get(self, where: Any, path: str, **options: Any) -> Any:
            if path.startswith("manifests/"):
                asked.release()
                go_on.wait()
            return self._real.get(where, path, **options)

    objects = BucketObjects(url, options=bucket().options)
    objects._obstore = SlowManifests(objects._obstore)
    reading = threading.Thread(target=objects.read_sealed, args=("manifests", [make_block(n).name for n in range(200)]))
    try:
        reading.start()
        assert asked.acquire(timeout=60)
        with RemoteStore(objects) as store:
            ends = threading.Timer(60, go_on.set)
            ends.start()
            assert all(store.find([block.name for block in blocks])) and not go_on.is_set()
            ends.cancel()
            go_on.set()
            reading.join()
    finally:
        go_on.set()


@needs_bucket
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
