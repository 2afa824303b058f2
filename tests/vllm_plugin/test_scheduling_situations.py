"""The scheduler side alone: who else is there, what is slow, what changed since the last turn."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend.core.errors import StoreError
from cacheblend.store import MemoryStore
from vllm_requests import CHUNK, SIZE, Request, captured, claim, failed, scheduling, start
from vllm_running import needs_vllm

pytestmark = needs_vllm

OTHER = list(range(200, 300))
PROMPT = [*range(40), *CHUNK, 7, 8]


class Pool:
    """vLLM's block pool: the names of the blocks that it holds."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def get_cached_block(self, name: bytes, groups: list[int]) -> Any:
        return name in self.held

    def computed(self, request: Request) -> int:
        """Leading tokens that vLLM would find."""
        count = 0
        for name in request.block_hashes[: (request.num_tokens - 1) // SIZE]:
            if name not in self.held:
                break
            count += SIZE
        return count


class SlowStore(MemoryStore):
    """Answers when it is let go; counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.let_go = threading.Event()
        self.let_go.set()
        self.asked: list[str] = []

    def find(self, names: Any) -> Any:
        self.asked.append("find")
        assert self.let_go.wait(30)
        return super().find(names)

    def has_manifest(self, chunk_id: Any) -> bool:
        self.asked.append("has_manifest")
        assert self.let_go.wait(30)
        return super().has_manifest(chunk_id)


def with_options(ids: list[int], name: str, **options: Any) -> Request:
    return Request(ids, name=name, kv_transfer_params={"cacheblend": options})


# ---- equal prompts --------------------------------------------------------------------------------------


def test_equal_prompts_wait_for_the_first_and_share_its_blocks() -> None:
    side, pool = scheduling([CHUNK]), Pool()
    side.pool = pool
    first, *others = [Request(PROMPT, name=str(number)) for number in range(8)]
    side.allocated(first, [1] * 9, start(side, first))
    for request in others:
        assert start(side, request) is None
    side.provided([first.request_id])
    for request in others:  # its blocks are not in vLLM's cache yet
        assert side.claim(request, 0) is None
    pool.held |= set(first.block_hashes[:8])
    side.allocated(first, [1] * 9, 0)
    for request in others:
        assert side.claim(request, pool.computed(request)) == 0
        told = side.finished(request)["cacheblend"]
        assert (told["blended"], told["hit_tokens"]) == (True, {"vllm": 128})
    assert len(side.take_jobs().blend) == 1


@pytest.mark.parametrize("how", ["fails", "is aborted", "is not cached"])
def test_one_of_the_others_goes_on_if_the_first_brings_nothing(how: str) -> None:
    side = scheduling([CHUNK])
    first, second, third = [Request(PROMPT, name=str(number)) for number in range(3)]
    side.allocated(first, [1] * 9, start(side, first))
    assert start(side, second) is None and start(side, third) is None
    if how == "fails":
        side.provided([first.request_id])
        side.reported(failed(first))
    elif how == "is aborted":
        side.finished(first)
    else:  # no prefix caching, or evicted at once
        side.provided([first.request_id])
        side.allocated(first, [1] * 9, 0)
    side.allocated(second, [2] * 9, side.claim(second, 0))
    assert side.claim(third, 0) is None


def test_prompts_that_share_little_do_not_wait_for_each_other() -> None:
    side = scheduling([CHUNK, OTHER])
    one = Request([*range(40), *CHUNK, *OTHER, *OTHER, 7], name="one")
    two = Request([*range(40), *CHUNK, 9, *OTHER, 10, *OTHER, 7], name="two")
    side.allocated(one, [1] * 22, start(side, one))
    assert start(side, two) == len(two.prompt_token_ids) - 1


def test_the_settings_of_a_request_are_part_of_what_is_shared() -> None:
    side = scheduling([CHUNK])
    first = Request(PROMPT, name="first")
    side.allocated(first, [1] * 9, start(side, first))
    assert start(side, with_options(PROMPT, "same", recompute_ratio=0.15)) is None
    assert start(side, with_options(PROMPT, "other", recompute_ratio=0.5)) == 141
    jobs = side.take_jobs().blend
    assert [job.selector.ratios for job in jobs] == [(0.15,)]


# ---- a slow store ---------------------------------------------------------------------------------------


def test_nothing_waits_for_a_store_that_does_not_answer() -> None:
    store = SlowStore()
    side = scheduling([CHUNK], store, lookup_timeout_s=0.2)
    side.on_new(Request([1, 2, 3], name="listed"))
    claim(side, Request(PROMPT, name="warm"), 0)
    assert start(side, Request(PROMPT, name="quick")) == 141
    store.let_go.clear()
    requests = [Request([number, *PROMPT], name=f"r{number}") for number in range(12)]
    began = time.monotonic()
    for request in requests:
        side.on_new(request)
        assert side.claim(request, 0) in (None, 0)
    side.take_jobs(is_idle=True)
    assert time.monotonic() - began < 5  # the store never answers
    for request in requests:
        assert claim(side, request, 0) == 0
        assert side.finished(request)["cacheblend"]["reason"] == "slow store"
    late = Request([77, *PROMPT], name="late")  # every thread waits for the store
    side.on_new(late)
    assert side.claim(late, 0) == 0
    assert side.counts.take().data["fallbacks"] == {"slow store": 13}
    side.close()  # waits for nothing
    store.let_go.set()


def test_after_a_slow_read_nothing_is_blended_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.engines.vllm.jobs import BlendOutcome, StepReport
    from cacheblend.engines.vllm.scheduler import scheduling as module

    side = scheduling([CHUNK])
    first = Request(PROMPT, name="first")
    side.allocated(first, [1] * 9, start(side, first))
    side.reported(StepReport(0, {"first": BlendOutcome("slow store")}))
    assert start(side, Request([5, *PROMPT], name="second")) == 0
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.PAUSE_S)
    assert start(side, Request([6, *PROMPT], name="third")) == 142


def test_a_request_that_ends_during_its_look_up() -> None:
    store = SlowStore()
    side = scheduling([CHUNK], store)
    start(side, Request(PROMPT, name="warm"))
    store.let_go.clear()
    request = Request([5, *PROMPT])
    side.on_new(request)
    assert side.claim(request, 0) is None
    assert side.finished(request)["cacheblend"]["reason"] == "ended before its look-up"
    store.let_go.set()
    assert side.take_jobs().dropped == []


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
    side.allocated(request, [1], 0)
    request.num_output_tokens = 1
    side.take_jobs()
    side.finished(request)
    assert store.asked == ["find"] * (by == "spans" or stored > 0)


def test_a_store_that_fails_disables_blending_only() -> None:
    class Broken(MemoryStore):
        def manifests(self) -> Any:
            raise StoreError("gone")

    side = scheduling([], Broken(1 << 20))
    request = Request(PROMPT)
    assert start(side, request) == 0
    assert side.finished(request)["cacheblend"]["reason"] == "store"


# ---- turns ----------------------------------------------------------------------------------------------


def turn(side: Any, pool: Pool, ids: list[int], spans: list[list[int]], name: str) -> tuple[int, Request]:
    """Asks; returns what vLLM's cache held of it, and leaves the request's blocks there."""
    request = Request(ids, spans, name)
    side.on_new(request)
    claimed = claim(side, request, pool.computed(request))
    held = pool.computed(request)
    if claimed is None:
        claimed = side.claim(request, held)
    if claimed:
        side.allocated(request, [1] * 40, claimed)
        side.provided([name])
    side.allocated(request, [1] * 40, 0)
    pool.held |= set(request.block_hashes)
    side.finished(request)
    return held, request


@pytest.mark.parametrize("front", [[], list(range(500, 540))], ids=["begins with the miss", "text in front"])
def test_the_second_turn_finds_the_blocks_of_the_first_although_a_miss_was_captured_meanwhile(
    front: list[int],
) -> None:
    first_chunk = list(range(900, 1000))
    side, pool = scheduling([CHUNK, OTHER]), Pool()
    side.pool = pool
    ids, spans = [*front], []
    for chunk in (first_chunk, CHUNK, OTHER):
        spans.append([len(ids), len(ids) + len(chunk)])
        ids += chunk
    ids += range(40)
    held, _ = turn(side, pool, ids, spans, "one")
    assert held == 0
    side = scheduling([first_chunk], side._finder._store)
    side.pool = pool
    more = [*ids, *range(600, 670)]
    held, second = turn(side, pool, more, spans, "two")
    assert held >= len(ids) // SIZE * SIZE
    held, _ = turn(side, pool, [*more, *range(700, 740)], spans, "three")
    assert held >= len(second.prompt_token_ids) // SIZE * SIZE


def test_blended_rows_are_never_written_to_blocks_with_plain_names() -> None:
    """Salting begins after a block that vLLM held; once it is evicted, the request must not be blended over it."""
    side, pool = scheduling([CHUNK, OTHER]), Pool()
    side.pool = pool
    ids, spans = [*range(40), *CHUNK, *OTHER, *range(40)], [[40, 140], [140, 240]]
    plain = scheduling([OTHER])
    plain.pool = pool
    _, earlier = turn(plain, pool, ids, spans, "earlier")  # the first chunk was a miss: exact, with plain names
    request = Request(ids, spans)
    side.on_new(request)
    held = pool.computed(earlier)
    assert claim(side, request, held) == 0  # all of it is there
    names = list(request.block_hashes)
    assert names == earlier.block_hashes
    pool.held.clear()
    request.num_preemptions = 1
    assert side.claim(request, 0) == 0
    assert not side._jobs.blend


# ---- what a client asks for -----------------------------------------------------------------------------


def test_modes() -> None:
    side = scheduling([CHUNK])
    plain = Request(PROMPT).block_hashes
    full, prefix = with_options(PROMPT, "full", mode="full"), with_options(PROMPT, "prefix", mode="prefix")
    for request, reason in ((full, "mode full"), (prefix, "nothing stored")):
        assert start(side, request) == 0
        assert request.block_hashes == plain
        assert side.finished(request)["cacheblend"]["reason"] == reason
    exact = with_options([*CHUNK, *range(40), *CHUNK, 7], "exact", mode="prefix")
    assert start(side, exact) == 240
    assert exact.block_hashes == Request(exact.prompt_token_ids).block_hashes
    side.allocated(exact, [1] * 16, 240)
    (job,) = side.take_jobs().blend
    assert job.plan.hit_tokens() == {"prefix": 100, "memory": 0, "disk": 0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, "mode must be one of blend, prefix, full"),
        ({"recompute_ratio": 2}, "recompute_ratio must be in 0..1"),
        ({"recompute_ratio": True}, "recompute_ratio must be in 0..1"),
        ({"recompute_ratio": float("nan")}, "recompute_ratio must be in 0..1"),
        ({"selector": "best"}, "no selector is called 'best'"),
        ({"selector": ["hkvd"]}, "a selector's name"),
        ({"selector": "threshold"}, "needs a bound"),
        ({"ratio": 0.5}, "unknown key 'ratio'; it has mode, recompute_ratio, selector, chunks"),
        ({"chunks": None}, "chunks must be a list"),
        ({3: 4}, "unknown key '3'"),
    ],
)
def test_wrong_options_disable_blending_and_say_so(options: Any, words: str) -> None:
    side = scheduling([CHUNK])
    request = Request(PROMPT, kv_transfer_params={"cacheblend": options})
    assert start(side, request) == 0
    assert words in side.finished(request)["cacheblend"]["reason"]
    counts = side.counts.take().data
    assert counts["fallbacks"] == {"bad spans": 1}
    assert counts["not_blended"] == {"bad parameters": 1}


def test_every_request_is_told_what_became_of_it() -> None:
    from cacheblend.engines.vllm.jobs import BlendOutcome, StepReport

    side = scheduling([CHUNK])
    sampling = SimpleNamespace(prompt_logprobs=None)
    requests = {
        "nothing stored": Request(list(range(300, 400)), name="a"),
        "below min_reused_share": Request([*range(1000, 1400), *CHUNK, 7], name="b"),
        "image": Request(PROMPT, name="c", mm_features=[1]),
        "LoRA": Request(PROMPT, name="d", lora_request=1),
        "pooling": Request(PROMPT, name="e", sampling_params=None),
        "prompt too short": Request([1], name="f"),
        "asked not to read caches": Request(PROMPT, name="g", sampling_params=sampling, skip_reading_prefix_cache=True),
    }
    for reason, request in requests.items():
        assert start(side, request) == 0
        told = side.finished(request)["cacheblend"]
        assert (told["blended"], told["reason"], told["hit_tokens"]) == (False, reason, {})
    done = Request(PROMPT, name="done")
    side.allocated(done, [1] * 9, start(side, done))
    outcome = BlendOutcome("", {"disk": 100}, 15, 300, 0.31, 1.0)
    side.reported(StepReport(0, {"done": outcome}))
    side.provided(["done"])
    assert side.finished(done)["cacheblend"] == {
        "blended": True,
        "reason": "",
        "hit_tokens": {"disk": 100},
        "recomputed_tokens": 15,
        "row_layers": 300,
        "prefill_share": 0.31,
    }
    assert side.counts.take().data["not_blended"] == dict.fromkeys(requests, 1)


# ---- the weights change ---------------------------------------------------------------------------------


def test_after_a_reset_nothing_old_is_found_and_nothing_old_is_captured() -> None:
    side = scheduling([CHUNK])
    missing = Request([1, 2, 3, *OTHER, 4, 5], [[3, 103]], "missing")
    start(side, missing)
    side.allocated(missing, [1], 0)
    waiting = Request(PROMPT, name="waiting")
    side.on_new(waiting)
    side.reset()
    assert claim(side, waiting, 0) == 0
    assert side.finished(waiting)["cacheblend"]["reason"] == "cache reset"
    side.finished(missing)
    jobs = side.take_jobs()
    assert (jobs.capture, jobs.is_reset) == ([], True)
    assert not side.take_jobs().is_reset
    assert start(side, Request(PROMPT, name="later")) == 0
    again = Request([1, 2, 3, *OTHER, 4, 5], [[3, 103]], "again")
    start(side, again)
    side.allocated(again, [1], 0)
    side.finished(again)
    (job,) = side.take_jobs().capture
    assert job.planner.root == side._finder._planners.of().root


def test_after_a_reset_a_request_that_was_blended_before_is_not_blended_again() -> None:
    side = scheduling([CHUNK])
    running, refused = Request(PROMPT, name="running"), Request([*range(1000, 1400), *CHUNK, 7], name="refused")
    side.allocated(running, [1] * 9, start(side, running))
    side.provided(["running"])
    side.allocated(running, [1] * 9, 0)
    assert start(side, refused) == 0
    ids, spans = [1, 2, 3, *CHUNK, *OTHER, 4, 5], [[3, 103], [103, 203]]
    follower = Request(ids, spans, "settled")  # it has missed a chunk, and waits for its blocks
    side._outstanding.update(str(number) for number in range(8))
    assert start(side, follower) is None
    side._outstanding.clear()
    side.reset()
    running.num_preemptions = 1
    for request in (running, follower):
        assert side.claim(request, 0) == 0
        side.allocated(request, [1] * 9, 0)
    reasons = [side.finished(request)["cacheblend"]["reason"] for request in (refused, follower)]
    assert reasons == ["below min_reused_share", "cache reset"]
    assert side.take_jobs().capture == []  # with the new weights it would be stored under the old ones' names


def test_an_idle_engine_does_not_wait_for_captures_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.engines.vllm.scheduler import capture_queue as module

    side = scheduling([])
    missing = Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]], "missing")
    start(side, missing)
    side.allocated(missing, [1], 0)
    side.finished(missing)
    side.take_jobs()
    assert side.is_capturing
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.STUCK_S + 1)
    assert not side.is_capturing


def test_what_vllm_holds_of_an_earlier_turn_is_used_although_nothing_is_stored_any_more() -> None:
    side, pool = scheduling([CHUNK, OTHER]), Pool()
    side.pool = pool
    ids, spans = [*range(40), *CHUNK, *OTHER, *range(40)], [[40, 140], [140, 240]]
    turn(side, pool, ids, spans, "one")
    empty = scheduling([])
    empty.pool = pool
    held, request = turn(empty, pool, [*ids, *range(700, 730)], spans, "two")
    assert held >= len(ids) // SIZE * SIZE
    assert len(request.block_hashes) > held // SIZE


def test_what_vllm_held_exactly_is_not_called_blended() -> None:
    side, pool = scheduling([CHUNK]), Pool()
    side.pool = pool
    ids = [*range(40), *CHUNK, *range(300, 600), *CHUNK, 7]
    plain = Request(ids)
    pool.held |= set(plain.block_hashes[:26])
    request = Request(ids, name="asked")
    side.on_new(request)
    assert claim(side, request, 26 * SIZE) == 540 - 26 * SIZE
    little = Request([*range(40), *CHUNK, *range(300, 900), *CHUNK, 7], name="little")
    pool.held |= set(little.block_hashes[:20])
    side._config = replace(side._config, min_reused_share=0.2)
    side.on_new(little)
    assert claim(side, little, 20 * SIZE) == 0
    told = side.finished(little)["cacheblend"]
    assert (told["blended"], told["reason"]) == (False, "below min_reused_share")


def test_what_is_captured_is_found_by_content_and_announced() -> None:
    from cacheblend.core.load.capture import manifest_of

    store = MemoryStore(1 << 20)
    side = scheduling([], store, refresh_s=1000)
    side._finder._listing._keeps_changes = True
    missing = Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]], "missing")
    start(side, missing)
    side.allocated(missing, [1], 0)
    side.finished(missing)
    (job,) = side.take_jobs().capture
    scheduling([CHUNK], store)  # the workers store it
    side.reported(captured(1))
    end = time.monotonic() + 30
    events: list[Any] = []
    while not events:
        assert time.monotonic() < end
        events = side.take_events()
    assert [event.token_ids for event in events] == [CHUNK]
    assert events[0].block_hashes == list(manifest_of(job.chunk, job.planner, "").block_names)
    assert start(side, Request(PROMPT, name="later")) == 141
    assert side.take_events() == []


def test_captures_are_bounded_in_bytes() -> None:
    from cacheblend.engines.vllm.metrics import Counts
    from cacheblend.engines.vllm.scheduler.capture_queue import CaptureQueue

    side = scheduling([], capture_bytes=250)
    side._captures = CaptureQueue(256, 250, side.counts)
    chunks = [list(range(at, at + 100)) for at in (100, 200, 300)]
    huge = list(range(1000, 1300))
    ids, spans = [1], []
    for chunk in (*chunks, huge):
        spans.append([len(ids), len(ids) + len(chunk)])
        ids += chunk
    request = Request([*ids, 5], spans)
    start(side, request)
    side.allocated(request, [1], 0)
    side.finished(request)
    assert len(side.take_jobs().capture) == 2
    assert side.take_jobs().capture == []
    side.reported(captured(1))
    assert len(side.take_jobs().capture) == 1
    side.reported(captured(3))
    assert not side.is_capturing
    assert side.counts.take().data["fallbacks"] == {"capture too large": 1}
    assert Counts().take() is None


def test_a_request_that_comes_to_an_idle_engine_is_looked_up_within_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = scheduling([CHUNK])
    request = Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]])
    monkeypatch.setattr("cacheblend.engines.vllm.scheduler.scheduling.IDLE_WAIT_S", 30.0)  # the machine may be busy
    side.on_new(request)
    assert side.claim(request, 0) == 104


@contextmanager
def hanging() -> Iterator[Any]:
    """A scheduler side whose store answers no look-up."""
    store = SlowStore()
    side = scheduling([CHUNK], store)
    store.let_go.clear()
    try:
        yield side
    finally:
        store.let_go.set()


def test_a_look_up_is_waited_for_only_while_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.engines.vllm.scheduler.lookups import LookUp

    waits: list[float] = []
    monkeypatch.setattr(LookUp, "wait", lambda self, seconds: waits.append(seconds))
    slow = [Request([name, *CHUNK, 4, 5], [[1, 101]], str(name)) for name in range(3)]
    plain = with_options([1, 2, 3], "plain", mode="full")
    with hanging() as side:

        def step(*, is_idle: bool) -> int:
            waits.clear()
            assert [side.claim(request, 0) for request in slow] == [None] * 3
            side.take_jobs(is_idle=is_idle)
            return len(waits)

        for request in slow:
            side.on_new(request)
        assert step(is_idle=False) == 3
        assert step(is_idle=True) == 0  # tokens were computed in the step before
        assert step(is_idle=True) == 3
        side.on_new(plain)
        assert step(is_idle=False) == 0  # it may be computed in this step
        assert step(is_idle=True) == 0
        assert step(is_idle=True) == 0  # a step without tokens, and yet it goes on decoding: vLLM had no blocks
        side.finished(plain)
        step(is_idle=True)
        assert step(is_idle=True) == 3
        side.allocated(Request([7, 8, 9], None, "unknown to the connector"), [1], 0)
        assert step(is_idle=True) == 0


def test_a_look_up_is_waited_for_once_and_not_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.engines.vllm.scheduler import lookups

    waits: list[float] = []
    monkeypatch.setattr(lookups, "wait", lambda futures, seconds: waits.append(seconds))
    request = Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]])
    with hanging() as side:
        side.on_new(request)
        for _ in range(4):
            assert side.claim(request, 0) is None
            side.take_jobs(is_idle=True)
            time.sleep(0.006)
    assert waits[-2:] == [0.0, 0.0]
