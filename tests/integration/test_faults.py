"""Requests while a tier breaks: no wrong answer, no hang; what was lost is computed. The run's summary counts."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from cacheblend.core.names import BlockName
from cacheblend.core.select.selectors import Head
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.store import KVStore, open_store
from cacheblend.store.disk import folder
from cacheblend.store.format.block_file import BlockHeader, decode_headers, header_bytes
from cacheblend.store.remote import store as remote_store
from cacheblend.store.remote.bucket import BucketObjects
from cacheblend.store.remote.store import RemoteStore
from campaign import rotating
from families import tiny_model
from faults import Faults
from moto_bucket import BUCKET, bucket
from parity.scenes import RAG, assert_as_reference, assert_same, greedy, open_engine, run
from redis_server import redis_server
from reference import Reference, blend, plain_kv

SELECTOR = Head(0.3)  # reads all layers
LOST = range(48, 64)
"""The middle block of A in RAG, of 16 tokens."""

OTHER = 90
"""A position of another block of 16 tokens, of C."""

TOLERANCE = 3e-5
SOON_S = 20.0  # that a request may take: only one that hangs takes longer


@dataclass
class Tier:
    """A kind of store whose contents the tests damage from outside.

    Attributes:
        open: opens a store on it, with nothing cached.
        keys: the files, keys or objects that a block is kept in.
        get, put: read and write one of these.
        has_chains: one of these may be of several blocks.
    """

    open: Callable[[], KVStore]
    keys: Callable[[BlockName], list[str]]
    get: Callable[[str], bytes]
    put: Callable[[str, bytes], object]
    has_chains: bool = False

    def lost_with(self, name: BlockName, good: bytes, at: int) -> list[BlockName]:
        """The blocks that are lost with this byte of what a block is kept in."""
        if not self.has_chains:
            return [name]
        headers = decode_headers(good[: header_bytes(good, len(good))], len(good))
        inside = at - headers[0].data_at
        return [each.name for each in headers if inside < 0 or is_in_record(each, inside)]


def is_in_record(header: BlockHeader, at: int) -> bool:
    ends = header.geometry.offsets
    sizes = [end - begin for begin, end in pairwise(ends)]
    return any(begin <= at < begin + size for begin, size in zip(header.place.begins, sizes, strict=True))


def on_disk(path: Path, stack: ExitStack) -> Tier:
    def file_of(name: BlockName) -> list[str]:
        return [str(file) for file in path.glob(f"blocks/*/{name.hex()}*")]

    return Tier(
        lambda: open_store(path),
        file_of,
        lambda key: Path(key).read_bytes(),
        lambda key, value: Path(key).write_bytes(value),
        has_chains=True,
    )


def in_redis(path: Path, stack: ExitStack) -> Tier:
    from redis import Redis

    server = stack.enter_context(redis_server())
    raw = stack.enter_context(closing(Redis(port=server.port)))

    def keys_of(name: BlockName) -> list[str]:
        return sorted(key.decode() for key in raw.keys(f"*{name.hex()}*"))

    return Tier(lambda: open_store(server.url), keys_of, lambda key: bytes(raw.get(key)), raw.set)


def in_bucket(path: Path, stack: ExitStack) -> Tier:
    client = bucket().client()

    def keys_of(name: BlockName) -> list[str]:
        return [f"{path.name}/blocks/{name.hex()}"]

    return Tier(
        lambda: RemoteStore(BucketObjects(f"s3://{BUCKET}/{path.name}", options=bucket().options)),
        keys_of,
        lambda key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read(),
        lambda key, value: client.put_object(Bucket=BUCKET, Key=key, Body=value),
    )


@pytest.fixture(params=[on_disk, in_redis, in_bucket], ids=["disk", "redis", "s3"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    with ExitStack() as stack:
        yield request.param(tmp_path, stack)


@cache
def without(lost: range) -> Reference:
    return blend(tiny_model("llama"), RAG, SELECTOR, missing=lost)


def places_in(tier: Tier) -> dict[BlockName, range]:
    """Where the blocks are in the prompt."""
    with tier.open() as store, open_engine(tiny_model("llama"), store=store) as engine:
        spans = engine.runtime.planner.plan(RAG, store).spans
        return {span.name: range(span.start, span.stop) for span in spans}


def name_at(places: dict[BlockName, range], position: int) -> BlockName:
    return next(name for name, place in places.items() if position in place)


def check_served_without(tier: Tier, blocks: Sequence[range]) -> None:
    """A request that meets the damage is computed as if these were missing; the next one finds them stored again.

    They follow each other in the prompt.
    """
    lost = range(blocks[0].start, blocks[-1].stop)
    assert len(lost) == sum(map(len, blocks))
    started = time.monotonic()
    with tier.open() as store, open_engine(tiny_model("llama"), [], store=store) as engine:
        outcome = run(engine, RAG, SELECTOR)
    assert outcome.report.missed_tokens == len(lost)
    assert_as_reference(outcome, without(lost), TOLERANCE)
    assert time.monotonic() - started < SOON_S
    with tier.open() as store, open_engine(tiny_model("llama"), store=store) as engine:
        assert run(engine, RAG, SELECTOR).report.missed_tokens == 0


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize("share", rotating([0.0, 0.001, 0.02, 0.2, 0.5, 0.8, 1.0], core=[0.0, 0.5]))
def test_a_flipped_byte(tier: Tier, share: float, faults: Faults) -> None:
    """So far into each of what the block is kept as: its header's length and text, its records."""
    places = places_in(tier)
    name = name_at(places, LOST.start)
    for key in tier.keys(name):
        good = tier.get(key)
        at = round(share * (len(good) - 1))
        tier.put(key, good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        check_served_without(tier, [places[each] for each in tier.lost_with(name, good, at)])
        faults.count("flipped bytes")


@pytest.mark.may_fail("block lost")
def test_another_blocks_bytes(tier: Tier, faults: Faults) -> None:
    """A sound block, under a wrong name."""
    places = places_in(tier)
    name, other = name_at(places, LOST.start), name_at(places, OTHER)
    for key, foreign in zip(tier.keys(name), tier.keys(other), strict=True):
        good = tier.get(key)
        tier.put(key, tier.get(foreign))
        check_served_without(tier, [places[each] for each in tier.lost_with(name, good, 0)])
        faults.count("another block's bytes")


def fail_at(store: KVStore, number: int, event: Callable[[], object]) -> None:
    """Before that read of a layer something happens. No store is far: layers are read one by one."""
    reads, inner = 0, store.read_layers
    store.round_trip_s = lambda tier: 0.0  # type: ignore[method-assign]

    def read_layers(*arguments: object) -> object:
        nonlocal reads
        reads += 1
        if reads == number:
            event()
        return inner(*arguments)  # type: ignore[arg-type]

    store.read_layers = read_layers  # type: ignore[method-assign, assignment]


def check_all_recomputed(engine: BlendEngine) -> str:
    """Why it was."""
    started = time.monotonic()
    result = engine.prefill(RAG, selector=SELECTOR)
    report = result.report
    assert report.fallbacks and report.missed_tokens == 115
    assert_same(result, *plain_kv(engine.model, RAG.token_ids), TOLERANCE)
    assert time.monotonic() - started < SOON_S
    return report.fallbacks[0]


@pytest.mark.may_fail("block lost", "list of chunks", "store write")
@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("read_ahead", [0, 2])
@pytest.mark.parametrize("dies", rotating([1, 2, 3], core=[2]))
def test_a_server_killed_in_mid_request(
    dies: int, read_ahead: int, comes_back: bool, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come back, empty, while the request goes on."""
    monkeypatch.setattr(remote_store, "PAUSE_S", 0.0)
    model = tiny_model("llama")
    with (
        redis_server() as server,
        open_store(server.url) as store,
        open_engine(model, store=store, read_ahead=read_ahead) as engine,
    ):

        def die() -> None:
            server.kill()
            if comes_back:
                server.start()

        fail_at(store, dies, die)
        reason = check_all_recomputed(engine)
        assert comes_back or "does not answer" in reason
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        assert comes_back or engine.generate(RAG, params, ratio=0.0).token_ids == greedy(model, RAG, 4)
    faults.count("servers killed in mid-request")


class Between:
    """Forwards to a server until `fall_silent` is called."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._server, self._is_silent = (host, int(port)), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.fall_silent = self._is_silent.set
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._server)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._hand_on, args=(source, target), daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._is_silent.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize(("falls", "read_ahead"), rotating([(1, 0), (3, 0), (1, 2), (3, 2)], core=[(3, 2)]))
def test_a_bucket_that_times_out_in_mid_request(falls: int, read_ahead: int, tmp_path: Path, faults: Faults) -> None:
    model = tiny_model("llama")
    with closing(Between(bucket().endpoint)) as between:
        options = {**bucket().options, "endpoint": between.endpoint}
        objects = BucketObjects(f"s3://{BUCKET}/{tmp_path.name}", timeout=1.0, options=options)
        with RemoteStore(objects) as store, open_engine(model, store=store, read_ahead=read_ahead) as engine:
            fail_at(store, falls, between.fall_silent)
            check_all_recomputed(engine)
    faults.count("buckets that time out in mid-request")


@pytest.mark.may_fail("store write")
def test_a_disk_that_fills_up_after_requests(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    model, answers = tiny_model("llama"), 3

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_store(tmp_path / "store") as store, open_engine(model, [], store=store, capture=True) as engine:
        monkeypatch.setattr(folder, "_write_all", full)
        for _ in range(answers):
            params = SamplingParams(max_new_tokens=4, ignore_eos=True)
            assert engine.generate(RAG, params).token_ids == greedy(model, RAG, 4)
            assert engine.flush(timeout=60)
        assert store.stats().blocks == 0 and not list((tmp_path / "store" / "tmp").iterdir())
    faults.count("requests on a full disk", answers)
