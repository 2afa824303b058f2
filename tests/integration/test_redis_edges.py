"""What stands in a Redis server's lists of a store that no store wrote."""

from collections.abc import Iterator

import pytest

from cacheblend.store import open_store
from redis_server import RedisServer, needs_redis, redis_server
from store_blocks import holds, make_block, make_manifest

client = pytest.importorskip("redis")
pytestmark = needs_redis


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


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
