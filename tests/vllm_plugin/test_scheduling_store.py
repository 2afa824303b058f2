"""The scheduler side alone: a store that is slow, hangs, fails or does not answer."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from cacheblend.core.errors import StoreError
from cacheblend.core.load.capture import ChunkJob
from cacheblend.core.load.threads import DaemonPool, results_of
from cacheblend.core.names import as_token_ids
from cacheblend.core.plan.chunk_matches import ChunkIndex
from cacheblend.engines import chunk_index
from cacheblend.engines.vllm.jobs import CaptureJob
from cacheblend.engines.vllm.scheduler import chunk_finder, scheduler, tracked_requests
from cacheblend.engines.vllm.scheduler.tracked_requests import LookUp
from cacheblend.store import MemoryStore
from store_blocks import before
from vllm_requests import (
    CHUNK,
    OTHER,
    PROMPT,
    Pool,
    Request,
    SlowStore,
    claim,
    give,
    manager_of,
    reported,
    scheduling,
    start,
    turn,
    why,
    with_options,
)


def asking(count: int, name: str = "r") -> list[Request]:
    """Requests of prompts of their own that share a passage."""
    return [Request([number, *PROMPT], name=f"{name}{number}") for number in range(count)]


@pytest.mark.may_fail("slow store")
def test_nothing_waits_for_a_store_that_does_not_answer() -> None:
    store = SlowStore()
    side = scheduling([CHUNK], store, lookup_timeout_s=0.2)
    side.on_new(Request([1, 2, 3], name="listed"))
    claim(side, Request(PROMPT, name="warm"), 0)
    assert start(side, Request(PROMPT, name="quick")) == 141
    store.let_go.clear()
    requests = asking(12)
    began = time.monotonic()
    for request in requests:
        side.on_new(request)
        assert side.claim(request, 0) in (None, 0)
    side.take_jobs(is_idle=True)
    assert time.monotonic() - began < 5  # the store never answers
    for request in requests:
        assert claim(side, request, 0) == 0
        assert why(side, request) == "slow store"
    late = Request([77, *PROMPT], name="late")  # every thread waits for the store
    side.on_new(late)
    assert side.claim(late, 0) == 0
    assert side.counts.take().data["fallbacks"] == {"slow store": 13}
    side.close()  # waits for nothing
    store.let_go.set()


def test_many_requests_at_once_are_no_slow_store() -> None:
    """Each look-up has its time from when a thread takes it up."""
    store = MemoryStore(1 << 20)
    side = scheduling([CHUNK], store, lookup_timeout_s=0.5)
    assert start(side, Request(PROMPT, name="quick")) == 141  # the list has been read
    before(store, "find", lambda _: time.sleep(0.05))
    requests = asking(120)  # 0.75 s and more in eight threads
    for request in requests:
        side.on_new(request)
    for request in requests:
        side.take_jobs()  # the next step
        assert claim(side, request, 0) == 142


@pytest.mark.may_fail("slow store")
def test_a_look_up_of_which_nobody_waits_takes_no_thread() -> None:
    """Requests that gave up, or went away, while others hang in the store."""
    store = SlowStore()
    side = scheduling([CHUNK], store, lookup_timeout_s=1.0)
    assert start(side, Request(PROMPT, name="quick")) == 141  # the list has been read
    store.let_go.clear()
    store.asked.clear()
    requests = asking(20)
    for request in requests[:12]:
        side.on_new(request)
    for request in requests[:6]:
        assert claim(side, request, 0) == 0
    for request in requests[6:12]:
        side.finished(request)
    store.let_go.set()
    side._finder._pool.close()
    side._finder._pool.join(30)
    assert len(store.asked) <= 8  # those that had begun


@pytest.mark.may_fail("slow store")
def test_a_store_that_does_not_answer_keeps_one_request_waiting_and_is_asked_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SlowStore()
    side = scheduling([CHUNK], store, lookup_timeout_s=0.5)
    assert start(side, Request(PROMPT, name="quick")) == 141  # the list has been read
    store.let_go.clear()
    first, second, third, fourth = asking(4)
    assert start(side, first) == 0
    side.on_new(second)
    assert side._requests[second.request_id].lookup is None
    assert why(side, second) == "slow store"
    with monkeypatch.context() as later:
        later.setattr(chunk_finder, "PAUSE_S", -1.0)
        side.on_new(third)
    assert side._requests[third.request_id].lookup is not None
    store.let_go.set()
    assert claim(side, third, 0) == 142
    assert start(side, fourth) == 142


@pytest.mark.may_fail("slow store")
def test_what_a_request_that_went_away_would_still_ask_is_not_asked() -> None:
    """As a bucket is asked: for each name, in a few threads."""

    class Bucket(MemoryStore):
        threads, asked, begins, let_go = DaemonPool(1, "bucket"), list[str](), threading.Event(), threading.Event()

        def find(self, names: Any) -> Any:
            asked = [self.threads.submit(self._find, [name]) for name in [*names, *[b"other"] * 20]]
            return [answer for (answer,) in results_of(asked)][: len(names)]

        def _find(self, names: Any) -> Any:
            self.asked.append("name")
            self.begins.set()
            assert self.let_go.wait(30)
            return MemoryStore.find(self, names)

    store = Bucket(1 << 20)
    store.let_go.set()
    side = scheduling([CHUNK], store, keeps_events=True)
    assert start(side, Request(PROMPT, name="quick")) == 141
    side.take_events()
    for leave in (side.finished, lambda request: side.claim(request, 0)):
        store.let_go.clear()
        store.asked.clear()
        store.begins.clear()
        (request,) = asking(1)
        side.on_new(request)
        lookup = side._requests[request.request_id].lookup
        assert store.begins.wait(30)
        lookup.timeout_s = -1e9
        leave(request)
        store.let_go.set()
        assert isinstance(lookup.future.exception(30), CancelledError)
        assert store.asked == ["name"] and not side.take_events()
    store.threads.close()


def test_chunks_that_are_being_listed_take_no_thread_from_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    store, let_go = MemoryStore(1 << 20), threading.Event()
    side = scheduling([CHUNK], store)
    monkeypatch.setattr(store, "has_manifest", lambda name: let_go.wait(120))
    job = CaptureJob(ChunkJob((), as_token_ids(OTHER)), side._finder._planners.of(""))
    for _ in range(chunk_finder.THREADS + 1):
        side._finder.list_captured([job])
    assert start(side, Request(PROMPT, name="r")) == 141 and not let_go.is_set()
    let_go.set()
    side.close()


def test_a_tenant_of_many_chunks_whose_index_is_made_takes_no_thread_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go, store = threading.Event(), MemoryStore(1 << 20)

    class SlowIndex(ChunkIndex):
        def add(self, chunks: Any) -> None:
            added = list(chunks)
            assert not any(chunk.token_ids.tolist() == OTHER for chunk in added) or let_go.wait(60)
            super().add(added)

    monkeypatch.setattr(chunk_index, "ChunkIndex", SlowIndex)
    scheduling([OTHER], store, "large").close()
    side = scheduling([CHUNK], store)
    requests = [Request([number, *range(40), *OTHER, 7], name=f"l{number}", cache_salt="large") for number in range(9)]
    for request in requests:
        side.on_new(request)
    assert start(side, Request(PROMPT, name="other")) == 141 and not let_go.is_set()
    let_go.set()
    assert [claim(side, request, 0) for request in requests] == [141] * 9


class SlowList(SlowStore):
    """Its list is there when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.listed, self.error = threading.Event(), False

    def manifests(self) -> Any:
        self.asked.append("manifests")
        assert self.listed.wait(60)
        if self.error:
            raise StoreError("gone")
        return super().manifests()


def test_a_list_that_is_long_in_coming_takes_no_thread_from_those_who_name_their_chunks() -> None:
    store = SlowList()
    side, waiting = scheduling([CHUNK], store), asking(20)
    for request in waiting:
        side.on_new(request)
        assert side.claim(request, 0) is None
    assert start(side, Request([9, *CHUNK, 4, 5], [[1, 101]], "named")) == 102
    for request in waiting[:10]:
        assert why(side, request) == "ended before its look-up"
    store.listed.set()
    claimed = [claim(side, request, 0) for request in waiting[10:]]
    assert set(claimed) == {142}
    assert store.asked == ["manifests", "find"] + ["find"] * 10  # nothing for those that went


@pytest.mark.may_fail("slow store")
def test_a_list_that_others_have_waited_for_in_vain_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SlowList()
    side = scheduling([CHUNK], store, lookup_timeout_s=30.0)
    first, second = asking(2)
    side.on_new(first)
    now = time.monotonic
    with monkeypatch.context() as later:
        later.setattr(chunk_index.time, "monotonic", lambda: now() + 40.0)
        side.on_new(second)
        assert side.claim(second, 0) == 0 and side.claim(first, 0) == 0
    for request in (first, second):
        assert why(side, request) == "slow store"
    store.listed.set()
    assert start(side, Request([5, *PROMPT], name="third")) == 142


@pytest.mark.may_fail("store", "slow store", "list of chunks")
@pytest.mark.parametrize("seed", range(4))
def test_a_list_that_fails_is_read_by_nobody_twice_at_once(seed: int) -> None:
    """Requests that come before, while and after it fails; some go, and some are not waited for any longer."""
    rng, store = random.Random(seed), SlowList()
    store.error = True
    side = scheduling([CHUNK], store, lookup_timeout_s=rng.choice([0.001, 30.0]))
    failures = 0
    for round_ in range(5):
        requests = asking(rng.randint(1, 12), f"r{round_} ")
        for request in requests:
            side.on_new(request)
        assert store.asked.count("manifests") <= round_ + 1
        for request in rng.sample(requests, len(requests) // 3):
            side.finished(request)
        store.listed.set()
        for request in requests:
            assert claim(side, request, 0) == 0
            told = side.finished(request)
            failures += told is not None and told["cacheblend"]["reason"] in ("store", "slow store")
        refreshed = time.monotonic() + 30
        while side._finder._listing._reading is not None and not side._finder._listing._reading.done():
            assert time.monotonic() < refreshed
        store.listed.clear()
    assert failures
    store.listed.set()
    store.error = False
    if side._config.lookup_timeout_s > 1:
        assert start(side, Request(PROMPT, name="last")) == 141


@pytest.mark.may_fail("list of chunks")
def test_a_list_that_failed_is_read_again_for_the_next_request() -> None:
    store = SlowList()
    store.error = True
    store.listed.set()
    side = scheduling([CHUNK], store, refresh_s=1000.0)
    listing = side._finder._listing
    while listing._reading is not None and not listing._reading.done():
        time.sleep(0.01)
    store.error = False
    listing._read_at -= 100  # longer ago than anybody waits
    assert start(side, Request(PROMPT, name="next")) == 141


def test_what_loading_may_take_goes_to_the_workers_less_the_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for fields, expected in (({}, None), ({"load_timeout_s": 20.0}, 20.0)):
        side = scheduling([CHUNK], blend_fields=fields)
        give(side, Request(PROMPT, name="first"))
        (job,) = side.take_jobs().blend
        assert job.load_s is None if expected is None else 0 < job.load_s < expected

    class Clock:
        now = time.monotonic()

        def monotonic(self) -> float:
            self.now += 6.0  # between any two looks at it
            return self.now

    side = scheduling([CHUNK], blend_fields={"load_timeout_s": 5.0})
    monkeypatch.setattr(chunk_finder, "time", Clock())
    request = Request(PROMPT, name="first")
    assert start(side, request) == 0, "the look-up took all of it"
    assert why(side, request) == "slower to load than to compute"


@pytest.mark.may_fail("slow store")
def test_after_a_slow_read_nothing_is_blended_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    side = scheduling([CHUNK])
    first = give(side, Request(PROMPT, name="first"))
    side.reported(reported("first", "load timeout", read_s={"memory": 1.0}))
    second = Request([5, *PROMPT], name="second")
    assert start(side, second) == 142, "after a load timeout others are blended as before"
    assert why(side, first) == "load timeout"
    side.allocated(second, [[1] * 9], 142)
    side.reported(reported("second", "slow store"))
    assert start(side, Request([6, *PROMPT], name="third")) == 0
    now = time.monotonic()
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now + scheduler.PAUSE_S)
    assert start(side, Request([7, *PROMPT], name="fourth")) == 142


@pytest.mark.may_fail("slow store")
def test_who_was_looked_up_before_the_store_became_slow_does_not_wait_for_it_in_turn() -> None:
    """Equal prompts would lead one after the other, and each wait for the reads in vain."""
    side = scheduling([CHUNK])
    first, *others = [Request(PROMPT, name=str(number)) for number in range(4)]
    give(side, first)
    assert [start(side, other) for other in others] == [None] * 3
    side.provided([first.request_id])
    side.reported(reported(first.request_id, "slow store"))
    for other in others:
        assert side.claim(other, 0) == 0
        side.allocated(other, [[2] * 9], 0)
        assert why(side, other) == "slow store"


@pytest.mark.may_fail("slow store")
def test_what_is_shared_in_such_a_pause_is_said_to_be_blended() -> None:
    side, pool = scheduling([CHUNK, OTHER]), Pool()
    side.cache.bind(manager_of(pool))
    ids, spans = [*range(40), *CHUNK, *range(40)], [[40, 140]]
    turn(side, pool, ids, spans, "first turn")
    more = Request([*ids, *OTHER, 7, 8], [*spans, [180, 280]], "second turn")
    side.on_new(more)
    side.reported(reported("another", "slow store"))
    assert claim(side, more, pool.computed(more)) in (0, None)
    assert side.claim(more, pool.computed(more)) == 0
    side.allocated(more, [[1] * 20], 0)
    told = side.finished(more)["cacheblend"]
    assert (told["blended"], told["reason"]) == (True, "prefix cache has it, blended")
    assert (told["selector"], told["recompute_ratio"]) == ("hkvd", 0.15)


@pytest.mark.parametrize("stored", [0, 1, 20])
@pytest.mark.parametrize("by", ["spans", "content"])
def test_a_request_asks_the_store_once(by: str, stored: int) -> None:
    store = SlowStore()
    chunks = [list(range(at * 100, at * 100 + 80)) for at in range(1, 21)]
    side = scheduling(chunks[:stored], store, refresh_s=1000)
    start(side, Request(PROMPT, name="warm"))
    store.asked.clear()
    ids, spans = [1, 2, 3], []
    for chunk in chunks:
        spans.append([len(ids), len(ids) + len(chunk)])
        ids += chunk
    request = Request([*ids, 4, 5], spans if by == "spans" else None)
    start(side, request)
    side.allocated(request, [[1]], 0)
    request.num_output_tokens = 1
    side.take_jobs()
    side.finished(request)
    assert store.asked == ["find"] * (by == "spans" or stored > 0)


@pytest.mark.may_fail("store", "list of chunks")
def test_a_store_that_fails_disables_blending_only() -> None:
    class Broken(MemoryStore):
        def manifests(self) -> Any:
            raise StoreError("gone")

    side = scheduling([], Broken(1 << 20))
    request = Request(PROMPT)
    assert start(side, request) == 0
    assert why(side, request) == "store"


def test_a_request_that_comes_to_an_idle_engine_is_looked_up_within_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = scheduling([CHUNK])
    request = Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]])
    monkeypatch.setattr(scheduler, "IDLE_WAIT_S", 30.0)  # the machine may be busy
    side.on_new(request)
    assert side.claim(request, 0) == 104


@pytest.fixture
def hanging() -> Iterator[Any]:
    """A scheduler side whose store answers no look-up."""
    store = SlowStore()
    side = scheduling([CHUNK], store)
    store.let_go.clear()
    yield side
    store.let_go.set()


def test_a_look_up_is_waited_for_only_while_nothing_is_computed(hanging: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(LookUp, "wait", lambda self, seconds: waits.append(seconds))
    slow = [Request([name, *CHUNK, 4, 5], [[1, 101]], str(name)) for name in range(3)]
    plain = with_options([1, 2, 3], "plain", mode="full")

    def step(*, is_idle: bool) -> int:
        waits.clear()
        assert [hanging.claim(request, 0) for request in slow] == [None] * 3
        hanging.take_jobs(is_idle=is_idle)
        return len(waits)

    for request in slow:
        hanging.on_new(request)
    assert step(is_idle=False) == 3
    assert step(is_idle=True) == 0, "tokens were computed in the step before"
    assert step(is_idle=True) == 3
    hanging.on_new(plain)
    assert step(is_idle=False) == 0, "it may be computed in this step"
    assert step(is_idle=True) == 0
    assert step(is_idle=True) == 0, "a step without tokens, and yet it goes on decoding: vLLM had no blocks"
    hanging.finished(plain)
    step(is_idle=True)
    assert step(is_idle=True) == 3
    hanging.allocated(Request([7, 8, 9], None, "unknown to the connector"), [[1]], 0)
    assert step(is_idle=True) == 0
    assert why(hanging, slow[0]) == "ended before its look-up"
    assert hanging.take_jobs().dropped == []


def test_a_look_up_is_waited_for_once_and_not_in_every_step(hanging: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(tracked_requests, "wait", lambda futures, seconds: waits.append(seconds))
    request = Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]])
    hanging.on_new(request)
    for _ in range(4):
        assert hanging.claim(request, 0) is None
        hanging.take_jobs(is_idle=True)
        time.sleep(0.006)
    assert waits[-2:] == [0.0, 0.0]
