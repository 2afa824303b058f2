"""The scheduler side alone: what requests share with each other, with earlier turns, and with plain ones."""

import random
import time
from dataclasses import replace
from typing import Any

import pytest

from cacheblend.core.load.layer_kv import PlacedSpans
from cacheblend.core.plan.plan import Source
from cacheblend.engines.vllm.scheduler import scheduler
from cacheblend.store import MemoryStore
from vllm_requests import (
    CHUNK,
    OTHER,
    PROMPT,
    SIZE,
    Pool,
    Request,
    found_tokens,
    give,
    manager_of,
    reported,
    scheduling,
    start,
    turn,
    why,
    with_options,
)

TWO = [*range(40), *CHUNK, *OTHER, *range(40)], [[40, 140], [140, 240]]
"""A prompt with two chunks, and their spans."""


def bound(pool: Pool, held: list[list[int]], store: Any = None) -> Any:
    """A scheduler side over vLLM's cache."""
    side = scheduling(held, store)
    side.cache.bind(manager_of(pool))
    return side


@pytest.mark.parametrize("blocks", [10, 11, 12])
def test_a_prompt_that_an_empty_cache_has_no_room_for_beside_drafts_is_left_to_vllm(blocks: int) -> None:
    """Of a request that is loaded vLLM wants more room than of one that it computes, and would ask for ever."""
    pool = Pool()
    side, request = bound(pool, [CHUNK]), Request(PROMPT)  # 142 tokens, nine blocks
    pool.num_gpu_blocks, side._spare_blocks = blocks, 1  # one of them the null block
    has_room = blocks > 10
    assert start(side, request) == (141 if has_room else 0)
    side.allocated(request, [[1] * 9], 141 if has_room else 0)
    assert len(side.take_jobs().blend) == has_room
    if not has_room:
        assert why(side, request) == "no room in the cache"


def test_equal_prompts_wait_for_the_first_and_share_its_blocks() -> None:
    pool = Pool()
    side = bound(pool, [CHUNK])
    first, *others = [Request(PROMPT, name=str(number)) for number in range(8)]
    give(side, first)
    for request in others:
        assert start(side, request) is None
    side.provided([first.request_id])
    for request in others:  # its blocks are not in vLLM's cache yet
        assert side.claim(request, 0) is None
    pool.held |= set(first.block_hashes[:8])
    side.allocated(first, [[1] * 9], 0)
    for request in others:
        assert side.claim(request, pool.computed(request)) == 0
    others[0].num_preemptions = 1
    assert side.claim(others[0], len(PROMPT) + 18) == 0  # vLLM holds what it had answered, too
    for request, hits in zip(others, [len(PROMPT) - 1, *[128] * 6], strict=True):
        told = side.finished(request)["cacheblend"]
        assert (told["blended"], told["hit_tokens"]) == (True, {"vllm": hits})
    assert len(side.take_jobs().blend) == 1


@pytest.mark.parametrize("how", ["fails", "is aborted", "is not cached"])
def test_one_of_the_others_goes_on_if_the_first_brings_nothing(how: str) -> None:
    side = scheduling([CHUNK])
    first, second, third = [Request(PROMPT, name=str(number)) for number in range(3)]
    give(side, first)
    assert start(side, second) is None and start(side, third) is None
    if how == "fails":
        side.provided([first.request_id])
        side.reported(reported(first.request_id, "RuntimeError"))
    elif how == "is aborted":
        side.finished(first)
    else:  # no prefix caching, or evicted at once
        side.provided([first.request_id])
        side.allocated(first, [[1] * 9], 0)
    side.allocated(second, [[2] * 9], side.claim(second, 0))
    assert side.claim(third, 0) is None


def test_prompts_that_share_little_or_have_other_settings_do_not_wait_for_each_other() -> None:
    side = scheduling([CHUNK, OTHER])
    give(side, Request([*range(40), *CHUNK, *OTHER, *OTHER, 7], name="one"), 22)
    two = Request([*range(40), *CHUNK, 9, *OTHER, 10, *OTHER, 7], name="two")
    assert start(side, two) == len(two.prompt_token_ids) - 1
    side = scheduling([CHUNK])
    give(side, Request(PROMPT, name="first"))
    assert start(side, with_options(PROMPT, "same", recompute_ratio=0.15)) is None
    assert start(side, with_options(PROMPT, "other", recompute_ratio=0.5)) == 141
    assert [job.selector.share for job in side.take_jobs().blend] == [0.15]


@pytest.mark.parametrize("front", [[], list(range(500, 540))], ids=["begins with the miss", "text in front"])
def test_the_second_turn_finds_the_blocks_of_the_first_although_a_miss_was_captured_meanwhile(
    front: list[int],
) -> None:
    first_chunk, pool = list(range(900, 1000)), Pool()
    side = bound(pool, [CHUNK, OTHER])
    ids, spans = [*front], []
    for chunk in (first_chunk, CHUNK, OTHER):
        spans.append([len(ids), len(ids) + len(chunk)])
        ids += chunk
    ids += range(40)
    held, _ = turn(side, pool, ids, spans, "one")
    assert held == 0
    side = bound(pool, [first_chunk], side._finder._store)
    more = [*ids, *range(600, 670)]
    held, second = turn(side, pool, more, spans, "two")
    assert held >= len(ids) // SIZE * SIZE
    held, _ = turn(side, pool, [*more, *range(700, 740)], spans, "three")
    assert held >= len(second.prompt_token_ids) // SIZE * SIZE


def test_what_vllm_holds_of_an_earlier_turn_is_used_although_nothing_is_stored_any_more() -> None:
    pool, (ids, spans) = Pool(), TWO
    turn(bound(pool, [CHUNK, OTHER]), pool, ids, spans, "one")
    held, request = turn(bound(pool, []), pool, [*ids, *range(700, 730)], spans, "two")
    assert held >= len(ids) // SIZE * SIZE
    assert len(request.block_hashes) > held // SIZE


def test_blended_rows_are_never_written_to_blocks_with_plain_names() -> None:
    """Salting begins after a block that vLLM held; once it is evicted, the request must not be blended over it."""
    pool, (ids, spans) = Pool(), TWO
    _, earlier = turn(
        bound(pool, [OTHER]), pool, ids, spans, "earlier"
    )  # the first chunk was a miss: exact, plain names
    side, request = bound(pool, [CHUNK, OTHER]), Request(ids, spans)
    assert start(side, request, pool.computed(earlier)) == 0, "all of it is there"
    assert request.block_hashes == earlier.block_hashes
    pool.held.clear()
    request.num_preemptions = 1
    assert side.claim(request, 0) == 0
    assert not side._jobs.blend


def test_exact_mode_takes_nothing_of_what_an_equal_prompt_was_blended_into() -> None:
    pool = Pool()
    side = bound(pool, [CHUNK])
    _, blended = turn(side, pool, PROMPT, [[40, 140]], "blended")
    exact, plain = with_options(PROMPT, "exact", mode="prefix", chunks=[[40, 140]]), Request(PROMPT).block_hashes
    assert start(side, exact) == 0
    assert exact.block_hashes == plain != blended.block_hashes
    side.allocated(exact, [[1] * 9], 0)
    assert not side.finished(exact)["cacheblend"]["blended"]


def test_what_vllm_held_exactly_is_not_called_blended() -> None:
    pool = Pool()
    side = bound(pool, [CHUNK])
    ids = [*range(40), *CHUNK, *range(300, 600), *CHUNK, 7]
    pool.held |= set(Request(ids).block_hashes[:26])
    assert start(side, Request(ids, name="asked"), 26 * SIZE) == 540 - 26 * SIZE
    little = Request([*range(40), *CHUNK, *range(300, 900), *CHUNK, 7], name="little")
    pool.held |= set(little.block_hashes[:20])
    side._config = replace(side._config, min_reused_share=0.2)
    assert start(side, little, 20 * SIZE) == 0
    told = side.finished(little)["cacheblend"]
    assert (told["blended"], told["reason"]) == (False, "below min_reused_share")


CHUNKS = [list(range(at * 200, at * 200 + 90 + 7 * at)) for at in range(1, 9)]


class Engine:
    """A small model of vLLM with a block pool and one scheduler side; `exact`: what a real engine would have in each
    block that it holds, exact KV or blended KV, by name."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = MemoryStore(1 << 24)
        self.side = scheduling(self.rng.sample(CHUNKS, 4), self.store, refresh_s=0.001, min_reused_share=0.1)
        self.side.cache.bind(manager_of(self))
        self.exact: dict[bytes, bool] = {}
        self.plain_names: set[bytes] = set()
        self.waiting: list[Request] = []
        self.loading: dict[str, tuple[Request, Any]] = {}
        self.loaded: list[tuple[Request, Any]] = []
        self.asked: list[tuple[list[int], list[list[int]]]] = []
        self.blended = self.shared = self.given = 0

    def get_cached_block(self, name: bytes, groups: list[int]) -> Any:
        return name in self.exact

    def computed(self, request: Request) -> int:
        return found_tokens(request, self.exact)

    def add(self, name: str) -> None:
        """A new prompt, or the next turn of one."""
        if self.asked and self.rng.random() < 0.6:
            ids, spans = self.rng.choice(self.asked[-4:])
            for chunk in self.rng.sample(CHUNKS, self.rng.randint(0, 2)):
                spans = [*spans, [len(ids), len(ids) + len(chunk)]]
                ids = [*ids, *chunk]
        else:
            ids, spans = [3] * self.rng.choice([0, 5, 16, 40]), []
            for chunk in self.rng.sample(CHUNKS, self.rng.randint(0, 4)):
                spans.append([len(ids), len(ids) + len(chunk)])
                ids = [*ids, *chunk, *[4] * self.rng.choice([0, 0, 3])]
        ids = [*ids, *[5] * self.rng.choice([2, 20, 70])]
        self.asked.append((ids, spans))
        options: dict[str, Any] = self.rng.choice([{}, {}, {}, {"recompute_ratio": 0.5}, {"mode": "prefix"}])
        if self.rng.random() < 0.5:
            options = {**options, "chunks": spans}
        request = Request(ids, name=name, kv_transfer_params={"cacheblend": options})
        self.plain_names |= set(request.block_hashes)
        self.side.on_new(request)
        self.waiting.append(request)

    def schedule(self) -> None:
        for request in list(self.waiting):
            held = self.computed(request)
            claimed = self.side.claim(request, held)
            if claimed is None:
                continue
            self.waiting.remove(request)
            self.side.allocated(request, [[1] * (request.num_tokens // SIZE + 2)], claimed)
            if not claimed:
                self.compute(request, held, True)
        for job in self.side.take_jobs().blend:
            self.given += 1
            if job.local_tokens:  # as a worker opens it: what is left of each span has a place in its record
                rest = job.plan.with_resident(job.local_tokens).spans[1:]
                PlacedSpans.of([span for span in rest if span.source in (Source.PREFIX, Source.LOADED)], "raw")
            self.loading[job.request_id][1].append(job)

    def step(self) -> None:
        for request in self.waiting:
            self.loading.setdefault(request.request_id, (request, []))
        self.schedule()
        for name in [name for name, (_, jobs) in self.loading.items() if not jobs]:
            del self.loading[name]
        for name in list(self.loading):
            if self.rng.random() < 0.5:
                self.finish(name)
        if self.rng.random() < 0.1 and self.exact:
            for name in self.rng.sample(sorted(self.exact), len(self.exact) // 3):
                del self.exact[name]
        if self.rng.random() < 0.3:
            scheduling(self.rng.sample(CHUNKS, 1), self.store)
        if len(self.store.manifests()) > 3:
            self.store.delete(self.rng.choice(self.store.manifests()).chunk_id)

    def finish(self, name: str) -> None:
        """The workers report a job: provided or given up; then vLLM goes on with the request, or it is preempted."""
        request, (job,) = self.loading.pop(name)
        self.side.provided([name])
        how = self.rng.choice(["provided", "provided", "provided", "given up", "aborted", "preempted"])
        if how == "aborted":
            self.side.finished(request)
            return
        if how == "given up":
            failure = self.rng.choice(["RuntimeError", "slow store"])  # after the second nothing is blended for a while
            self.side.reported(reported(name, failure))
            assert self.side.claim(request, self.computed(request)) == 0
            self.side.allocated(request, [[1] * 200], 0)
            self.compute(request, self.computed(request), True)
            return
        self.blended += 1
        self.side.reported(reported(name))
        loaded = [span.start for span in job.plan.spans if span.source.value == "loaded"]
        is_exact = self.front_is_exact(request, job.local_tokens)
        for at in range(job.local_tokens // SIZE, len(job.plan) // SIZE):
            is_exact = is_exact and not any(start < (at + 1) * SIZE for start in loaded)
            self.put(request, at, is_exact)
        self.side.allocated(request, [[1] * 200], 0)
        if how == "preempted":
            request.num_preemptions += 1
            self.waiting.append(request)
        else:
            self.compute(request, len(job.plan) // SIZE * SIZE, is_exact)

    def front_is_exact(self, request: Request, tokens: int) -> bool:
        return all(self.exact.get(name, True) for name in request.block_hashes[: tokens // SIZE])

    def compute(self, request: Request, held: int, is_exact: bool) -> None:
        """vLLM computes the rest itself, over what is there."""
        is_exact = is_exact and self.front_is_exact(request, held)
        for at in range(held // SIZE, len(request.block_hashes)):
            self.put(request, at, is_exact)
        if self.rng.random() < 0.3:
            request.num_preemptions += 1
            self.waiting.append(request)
            return
        told = self.side.finished(request)["cacheblend"]
        self.shared += told["reason"] == "prefix cache has it, blended"

    def put(self, request: Request, at: int, is_exact: bool) -> None:
        name = request.block_hashes[at]
        assert is_exact or name not in self.plain_names, "blended KV under a plain name"
        mode = request.kv_transfer_params["cacheblend"].get("mode")
        assert is_exact or mode != "prefix", "blended KV in a request that asked for exact KV"
        self.exact.setdefault(name, is_exact)


@pytest.mark.may_fail("slow store")
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_plain_name_holds_blended_kv_and_every_request_ends(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random requests, turns, evictions, preemptions, failures; nothing stays behind."""
    monkeypatch.setattr(scheduler, "PAUSE_S", 0.002)
    engine = Engine(seed)
    for number in range(150):
        if engine.rng.random() < 0.7:
            engine.add(str(number))
        engine.step()
    end = time.monotonic() + 60
    while engine.waiting or engine.loading:
        assert time.monotonic() < end, "a request waits for ever"
        engine.step()
        time.sleep(0.0005)
    side = engine.side
    assert (side._requests, side._outstanding, side._coming._coming, side._coming._names) == ({}, set(), {}, {})
    assert 0 < engine.blended <= engine.given  # how many, is a matter of how busy the machine is: stores are paused
    side.close()
