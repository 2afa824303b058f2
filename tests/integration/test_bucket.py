"""A store in an S3-compatible bucket (moto's server): prompts through it, and what goes wrong with buckets."""

import os
import socket
import time
from collections.abc import Iterator
from itertools import permutations

import pytest

from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError, StoreUnreachableError
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.engines.hf import SamplingParams
from cacheblend.store import check_store_url, open_store
from cacheblend.store.remote.bucket import AT_ONCE, BucketObjects
from cacheblend.store.remote.store import RemoteStore
from families import tiny_model
from moto_bucket import BUCKET, KEYS, bucket, needs_bucket
from parity.scenes import RAG, assert_same, greedy, open_engine
from store_blocks import holds, make_block

pytestmark = needs_bucket
FOUR = SamplingParams(max_new_tokens=4, ignore_eos=True)


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


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_a_blend_is_the_same_as_from_memory(keys: None, codec: str) -> None:
    model, url = tiny_model("gpt_oss"), f"s3://{BUCKET}/blend-{codec}?endpoint={bucket().endpoint}&region=us-east-1"
    with open_engine(model, codec=codec) as near:
        expected = near.prefill(RAG)
    with open_store(url) as store, open_engine(model, store=store, codec=codec) as engine:
        result = engine.prefill(RAG)
        report = result.report
        assert (report.hit_tokens["s3"] > 0, report.missed_tokens, report.fallbacks) == (True, 0, [])
    assert_same(result, expected.logits, expected.kv, 0.0)
    with open_store(url, ram_bytes="64MiB") as store, open_engine(model, [], store=store, codec=codec) as another:
        assert another.prefill(RAG).report.hit_tokens["s3"] > 0
        assert another.prefill(RAG).report.hit_tokens["memory"] > 0


@pytest.mark.parametrize("at", [0, 3, 45, 300, -1])
def test_a_wrong_byte_is_a_lost_block_that_is_removed(at: int) -> None:
    folder, block = f"damaged{at}", make_block(1)
    client = bucket().client()
    with opened(folder) as store:
        store.write(block)
    key = f"{folder}/blocks/{block.name.hex()}"
    data = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[at] ^= 1
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
    with opened(folder) as store:
        if store.find([block.name])[0] is not None:
            with pytest.raises(BlockLostError):
                for layer in range(3):
                    store.read(block.name, layer)
        assert store.find([block.name]) == [None]
        assert store.stats().damaged == 1


@pytest.mark.may_fail("block lost", "list of chunks", "store write")
def test_a_bucket_that_times_out_costs_a_recompute_and_no_answer(keys: None, silent: str) -> None:
    model = tiny_model("llama")
    url = f"s3://{BUCKET}/silent?endpoint={silent}&region=us-east-1&timeout=0.3"
    with open_store(url) as store, open_engine(model, [], store=store, capture=True) as engine:
        started = time.monotonic()
        for _ in range(3):
            assert engine.generate(RAG, FOUR).token_ids == greedy(model, RAG, 4)
        assert time.monotonic() - started < 5
        with pytest.raises(StoreUnreachableError, match="asked again in"):
            store.stats()


def test_a_missing_bucket_is_reported(keys: None) -> None:
    with open_store(f"s3://nowhere/x?endpoint={bucket().endpoint}&region=us-east-1") as store:
        with pytest.raises(StoreError, match="s3://nowhere/x"):
            store.write(make_block(1))
        assert store.find([make_block(1).name]) == [None]


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
