"""The scheduler side alone, with stand-ins for vLLM's requests: what is claimed, named, captured, told to clients."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.load.capture import manifest_of
from cacheblend.engines.vllm import versions
from cacheblend.engines.vllm.connector import CacheBlendConnector
from cacheblend.engines.vllm.internals import interface, prefix_cache
from cacheblend.engines.vllm.jobs import BlendOutcome, StepReport
from cacheblend.engines.vllm.scheduler import capture_queue
from cacheblend.engines.vllm.scheduler.scheduler import MOST_OUTSTANDING, STALLED_S
from cacheblend.store import MemoryStore
from store_blocks import before
from vllm_requests import (
    CHUNK,
    OTHER,
    PROMPT,
    SIZE,
    Request,
    claim,
    give,
    manager_of,
    miss,
    reported,
    scheduling,
    scored,
    start,
    why,
    with_options,
)

# ---- what is claimed ------------------------------------------------------------------------------------------


def test_a_stored_passage_is_found_claimed_and_given_to_the_workers() -> None:
    side, request = scheduling([CHUNK]), Request(PROMPT)
    assert start(side, request) == 141
    assert claim(side, request, 32) == 109
    side.allocated(request, [[3, 4, 5]], 109)
    (job,) = side.take_jobs().blend
    assert (job.request_id, job.local_tokens, job.block_ids) == ("r", 32, [[3, 4, 5]])
    assert len(job.plan) == 141
    assert side.take_jobs().blend == []
    assert claim(side, request, 0) == 0, "what the workers could not provide is not given to them again"
    side.reported(reported("r", "RuntimeError"))
    request.num_preemptions = 1
    assert claim(side, request, 0) == 141
    side.finished(request)
    assert side.take_jobs().dropped == ["r"], "it ended before its prompt was provided"
    assert claim(side, request, 0) == 0
    last = Request([*range(40), *CHUNK], name="a passage at its end")
    assert start(side, last) == 139, "the last token is vLLM's"
    side.allocated(last, [[1]], 139)
    assert np.array_equal(side.take_jobs().blend[0].plan.prompt.token_ids, last.prompt_token_ids[:-1])
    side.provided([last.request_id])
    side.finished(last)
    assert side.take_jobs().dropped == []


def test_nothing_is_claimed_where_little_or_nothing_is_loaded() -> None:
    side = scheduling([CHUNK])
    assert start(side, Request(list(range(300, 400)), name="plain")) == 0
    covered = Request([*CHUNK, *range(40)], name="covered")
    assert start(side, covered, 112) == 0, "vLLM holds all of the passage"
    assert claim(side, covered, 96) == 0, "of what is left too little is held"
    assert claim(side, covered, 80) == 59
    assert claim(side, Request([1, 2], name="unknown"), 0) == 0
    little = Request([*range(1000, 1400), *CHUNK, 7], name="little")
    assert start(side, little) == 0
    assert little.block_hashes == Request(little.prompt_token_ids).block_hashes
    assert start(side, Request([*range(1000, 1200), *CHUNK, 7], name="much")) == 300


def test_few_prompts_are_outstanding_at_a_time() -> None:
    side = scheduling([CHUNK])
    requests = [Request([number + 1000, *PROMPT[1:]], name=str(number)) for number in range(MOST_OUTSTANDING + 1)]
    for request in requests[:-1]:
        give(side, request, 1)
    assert start(side, requests[-1]) is None
    side.provided(["0"])
    assert claim(side, requests[-1], 0) == 141


@pytest.mark.may_fail("slow store")
def test_while_all_of_them_wait_for_the_store_vllm_computes_one_of_the_others_in_each_step() -> None:
    side = scheduling([CHUNK])
    requests = [Request([number + 1000, *PROMPT[1:]], name=str(number)) for number in range(MOST_OUTSTANDING + 3)]
    for request in requests[:-3]:
        give(side, request, 1)
    first, second, third = requests[-3:]
    for stalled_s in (0.0, STALLED_S / 2):  # it is what they are computed for
        side.reported(StepReport(stalled_s=stalled_s))
        assert start(side, first) is None
    side.reported(StepReport(stalled_s=STALLED_S))
    assert claim(side, first, 0) == 0 and start(side, second) is None
    side.reported(StepReport(stalled_s=STALLED_S))
    assert claim(side, first, 0) == 0, "vLLM had no blocks for it, and asks again"
    assert side.counts.take().data["fallbacks"] == {"slow store": 1}
    side.allocated(first, [[1]], 0)
    assert side.finished(first)["cacheblend"]["reason"] == "slow store"
    assert start(side, third) is None
    side.reported(StepReport(stalled_s=STALLED_S))
    assert side.claim(third, 64) == 0
    side.allocated(third, [[1]], 0)
    assert side.finished(third)["cacheblend"]["blended"], "64 tokens are held under names of blended blocks"
    side.reported(StepReport())
    assert claim(side, second, 0) is None
    side.reported(StepReport(stalled_s=STALLED_S))
    side.provided(["0"])
    assert claim(side, second, 0) == 141, "its turn has come"
    assert StepReport(stalled_s=3.0).aggregate(StepReport(stalled_s=2.0)).stalled_s == 2.0  # type: ignore[attr-defined]


def test_what_vllm_holds_exactly_stays_plain_also_after_a_preemption() -> None:
    side, ids = scheduling([CHUNK]), [*range(40), *CHUNK, *range(400, 420)]
    plain = Request(ids)
    held = SimpleNamespace(get_cached_block=lambda name, groups: name in plain.block_hashes)
    side.cache.bind(manager_of(held))
    request = Request(ids)
    assert start(side, request, 144) == 0
    assert request.block_hashes == plain.block_hashes
    request.num_preemptions = 1
    assert claim(side, request, 0) == 0


def test_of_a_prompt_with_an_image_what_stands_before_it_is_claimed() -> None:
    """Chunks behind it, or around it, are left to vLLM; so are the names of blocks in front of what is loaded."""
    side, last = scheduling([CHUNK]), len(PROMPT)
    image = [SimpleNamespace(mm_position=SimpleNamespace(offset=last))]
    ids, spans = [*PROMPT, 9, 9, 9, *CHUNK, 5], [[40, 140], [last + 1, last + 3], [last + 3, last + 103]]
    request, plain = Request(ids, spans, mm_features=image), Request(ids)
    assert start(side, request) == last - 1
    named = zip(request.block_hashes, plain.block_hashes, strict=True)
    assert [mine == its for mine, its in named] == [True] * 2 + [False] * (len(ids) // SIZE - 2)
    side.allocated(request, [[1] * 40], last - 1)
    assert len(side.take_jobs().blend[0].plan) == last - 1
    behind = Request(ids, [spans[2]], "behind", mm_features=image)
    assert start(side, behind) == 0
    assert behind.block_hashes == plain.block_hashes


# ---- names ----------------------------------------------------------------------------------------------------


def test_blocks_from_the_first_passage_on_are_named_by_settings_and_tenant() -> None:
    side, plain = scheduling([CHUNK]), Request(PROMPT).block_hashes
    settings: list[Any] = [{}, {"recompute_ratio": 0.5}, {"selector": "random"}, {"recompute_ratio": 0.15}, {}]
    requests = [with_options(PROMPT, str(number), **options) for number, options in enumerate(settings)]
    for request in requests:
        assert start(side, request) == 141
        assert request.block_hashes[:2] == plain[:2]
        assert not set(request.block_hashes[2:]) & set(plain) and len(request.block_hashes) == len(plain)
    default, half, other, same, again = (set(request.block_hashes[2:]) for request in requests)
    assert default == same == again
    assert not default & half and not default & other and not half & other
    tenant = Request(PROMPT, name="tenant", cache_salt="acme")
    assert start(scheduling([CHUNK], side._finder._store, "acme"), tenant) == 141
    assert not default & set(tenant.block_hashes)
    exact = Request([*CHUNK, *range(40)], name="all hits are exact")
    assert start(side, exact) == 139
    assert exact.block_hashes == Request(exact.prompt_token_ids).block_hashes


def test_a_request_of_one_tenant_finds_nothing_of_another() -> None:
    side = scheduling([CHUNK], salt="acme")
    for number, salt in enumerate((None, "", "other", "acme ", "\ud800")):
        spans = [None, [[40, 140]]][number % 2]
        assert start(side, Request(PROMPT, spans, name=str(number), cache_salt=salt)) == 0
    assert start(side, Request(PROMPT, name="own", cache_salt="acme")) == 141


@pytest.mark.parametrize("spans", [[[40, 140]], None], ids=["spans", "content"])
def test_what_another_tenant_has_stored_changes_nothing_that_a_request_asks_of_the_store_or_leaves_behind(
    spans: Any,
) -> None:
    """So no time tells it: an answer's way is that of text that nobody has stored."""

    def way(held: list[list[int]]) -> Any:
        store, asked = MemoryStore(1 << 20), list[Any]()
        side = scheduling(held, store, salt="theirs")
        scheduling([OTHER], store, salt="mine")  # the asker has something in the list
        side._finder._listing.update()  # which is read in a thread
        for call in ("find", "has_manifest", "read_layers", "manifests"):
            before(store, call, lambda *given, call=call: asked.append((call, len(given[0]) if given else 0)))
        request = Request(PROMPT, spans, cache_salt="mine")
        claimed = start(side, request)
        side.allocated(request, [[1]], claimed)
        request.num_output_tokens = 1
        captured = [job.chunk.token_ids.tolist() for job in side.take_jobs().capture]
        return claimed, captured, asked, side.finished(request), side.counts.take().data

    assert way([CHUNK]) == way([])


@pytest.mark.parametrize("tokens", [5, 20], ids=["no full block", "the passage begins behind the last full block"])
def test_blocks_that_are_not_full_yet_get_other_names_too(tokens: int) -> None:
    request = Request(list(range(tokens)))
    prefix_cache.salt_from(request, tokens - 2, SIZE, b"salt")
    request.prompt_token_ids += [1] * 40
    request.num_tokens += 40
    request.update_block_hashes()
    plain = Request(request.prompt_token_ids)
    assert len(request.block_hashes) == len(plain.block_hashes)
    assert not set(request.block_hashes) & set(plain.block_hashes)


# ---- what a client asks for and is told -------------------------------------------------------------------------


def test_modes() -> None:
    side = scheduling([CHUNK])
    plain = Request(PROMPT).block_hashes
    full, prefix = with_options(PROMPT, "full", mode="full"), with_options(PROMPT, "prefix", mode="prefix")
    for request, reason in ((full, "mode full"), (prefix, "nothing stored")):
        assert start(side, request) == 0
        assert request.block_hashes == plain
        assert why(side, request) == reason
    exact = with_options([*CHUNK, *range(40), *CHUNK, 7], "exact", mode="prefix")
    assert start(side, exact) == 240
    assert exact.block_hashes == Request(exact.prompt_token_ids).block_hashes
    side.allocated(exact, [[1] * 16], 240)
    (job,) = side.take_jobs().blend
    assert job.plan.hit_tokens() == {"prefix": 100, "memory": 0, "disk": 0}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("x", "must be an object, got 'x'"),
        (3, "must be an object, got 3"),
        (["cacheblend"], "must be an object"),
        ({"mode": "fast"}, "mode must be one of blend, prefix, full"),
        ({"recompute_ratio": 2}, "recompute_ratio must be in 0..1"),
        ({"recompute_ratio": True}, "recompute_ratio must be in 0..1"),
        ({"recompute_ratio": float("nan")}, "recompute_ratio must be in 0..1"),
        ({"selector": "best"}, "no selector is called 'best'"),
        ({"selector": ["hkvd"]}, "a selector's name"),
        ({"selector": "threshold"}, "needs a bound"),
        ({"ratio": 0.5}, "unknown key 'ratio'; it has mode, recompute_ratio, selector, chunks"),
        ({"chunks": None}, "chunks must be a list"),
        ({"chunks": [[5, 4000]]}, "a span lies within the prompt's 0..142"),
        ({3: 4}, "unknown key '3'"),
    ],
)
def test_wrong_options_disable_blending_and_say_so(params: Any, words: str) -> None:
    side = scheduling([CHUNK])
    request = Request(PROMPT, kv_transfer_params={"cacheblend": params} if isinstance(params, dict) else params)
    assert start(side, request) == 0
    assert words in why(side, request)
    assert side.counts.take().data == {"fallbacks": {"bad spans": 1}, "not_blended": {"bad parameters": 1}}


def test_every_request_is_told_what_became_of_it() -> None:
    side, plain = scheduling([CHUNK]), Request(PROMPT).block_hashes
    image, later = ([SimpleNamespace(mm_position=SimpleNamespace(offset=at))] for at in (0, 1))
    left: list[tuple[str, Request]] = [
        ("nothing stored", Request(list(range(300, 400)))),
        ("below min_reused_share", Request([*range(1000, 1400), *CHUNK, 7])),
        ("prompt too short", Request([1])),
        ("image", Request(PROMPT, mm_features=image)),
        ("image", Request(PROMPT, mm_features=later)),
        ("pooling", Request(PROMPT, sampling_params=None)),
        ("prompt log-probabilities", Request(PROMPT, sampling_params=scored(prompt_logprobs=1))),
        ("prompt log-probabilities", Request(PROMPT, sampling_params=scored(prompt_logprob_token_ids=[1]))),
        ("prompt embeddings", Request(PROMPT, prompt_embeds=torch.zeros(1))),
        ("asked not to read caches", Request(PROMPT, skip_reading_prefix_cache=True)),
    ]
    for reason, request in left:
        assert start(side, request) == 0
        assert request.prompt_token_ids != PROMPT or request.block_hashes == plain
        told = side.finished(request)["cacheblend"]
        assert (told["blended"], told["reason"], told["hit_tokens"]) == (False, reason, {})
    done = give(side, Request(PROMPT, name="done"))
    outcome = BlendOutcome("", {"disk": 100}, 15, 300, 0.31, 1.0)
    side.reported(StepReport(0, {"done": outcome}))
    side.provided(["done"])
    assert side.finished(done)["cacheblend"] == {
        "blended": True,
        "reason": "",
        "hit_tokens": {"disk": 100},
        "selector": "hkvd",
        "recompute_ratio": 0.15,
        "missed_tokens": 0,
        "near_miss_tokens": 0,
        "recomputed_tokens": 15,
        "row_layers": 300,
        "prefill_share": 0.31,
    }
    counted = dict.fromkeys([reason for reason, _ in left], 1) | {"image": 2, "prompt log-probabilities": 2}
    assert side.counts.take().data["not_blended"] == counted


@pytest.mark.may_fail("store")
def test_a_store_that_does_not_answer_is_told_and_counted_and_is_not_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore(1 << 20)
    side = scheduling([CHUNK], store)
    with monkeypatch.context() as away:
        away.setattr(MemoryStore, "is_reachable", property(lambda store: False))
        away.setattr(store, "find", lambda names: [None for _ in names])
        request = Request(PROMPT, [[40, 40 + len(CHUNK)]])
        assert start(side, request) == 0
        assert side.finished(request)["cacheblend"]["reason"] == "store"
    told = {"fallbacks": {"store": 1}, "not_blended": {"store": 1}, "failures": {"store": 1}}
    assert side.counts.take().data == told
    assert not side.take_jobs().capture, "what may be stored is not computed again"


def test_a_marked_chunk_that_is_stored_with_another_beginning_is_told() -> None:
    side = scheduling([CHUNK])
    start(side, Request(PROMPT, name="unmarked"))  # which has the list of chunks indexed
    titled = Request([1, 2, 3, *CHUNK, 7], [[0, 103]], name="titled")
    assert start(side, titled) == 0
    told = side.finished(titled)["cacheblend"]
    assert (told["reason"], told["missed_tokens"], told["near_miss_tokens"]) == ("nothing stored", 103, 100)
    other = Request([*range(300, 400), 7], [[0, 100]], name="other")
    start(side, other)
    told = side.finished(other)["cacheblend"]
    assert (told["missed_tokens"], told["near_miss_tokens"]) == (100, 0)
    counted = side.counts.take().data
    assert (counted["missed_tokens"], counted["near_miss_tokens"]) == ({"": 203}, {"": 100})


def test_an_untested_version_is_refused_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.99.0")
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    with pytest.raises(InvalidInputError, match=r"this is vLLM 0\.99\.0"):
        CacheBlendConnector(config, interface.KVConnectorRole.SCHEDULER, None)


# ---- new weights ------------------------------------------------------------------------------------------------

MISSING: tuple[list[int], list[list[int]]] = ([1, 2, 3, *OTHER, 4, 5], [[3, 103]])


def test_after_a_reset_nothing_old_is_found_and_nothing_old_is_captured() -> None:
    side = scheduling([CHUNK])
    missing = miss(side, *MISSING, "missing")
    waiting = Request(PROMPT, name="waiting")
    side.on_new(waiting)
    side.reset()
    assert claim(side, waiting, 0) == 0
    assert why(side, waiting) == "cache reset"
    side.finished(missing)
    jobs = side.take_jobs()
    assert (jobs.capture, jobs.is_reset) == ([], True)
    assert not side.take_jobs().is_reset
    assert start(side, Request(PROMPT, name="later")) == 0
    side.finished(miss(side, *MISSING, "again"))
    (job,) = side.take_jobs().capture
    assert job.planner.root == side._finder._planners.of().root


def test_after_a_reset_a_request_that_was_blended_before_is_not_blended_again() -> None:
    side = scheduling([CHUNK])
    running, refused = Request(PROMPT, name="running"), Request([*range(1000, 1400), *CHUNK, 7], name="refused")
    give(side, running)
    side.provided(["running"])
    side.allocated(running, [[1] * 9], 0)
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
        side.allocated(request, [[1] * 9], 0)
    reasons = [why(side, request) for request in (refused, follower)]
    assert reasons == ["below min_reused_share", "cache reset"]
    assert side.take_jobs().capture == [], "with the new weights it would be stored under the old ones' names"


# ---- chunks that are captured, evicted, announced -----------------------------------------------------------------


def test_a_missed_passage_is_captured_once_after_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    side = scheduling([])
    requests = [miss(side, *MISSING, name) for name in ("a", "b")]
    assert side.take_jobs().capture == []
    requests[0].num_output_tokens = 1
    jobs = side.take_jobs()
    assert [job.chunk.token_ids.tolist() for job in jobs.capture] == [OTHER]
    assert side.is_busy
    side.finished(requests[1])
    assert side.take_jobs().capture == []
    with monkeypatch.context() as later:
        now = time.monotonic()
        later.setattr(capture_queue.time, "monotonic", lambda: now + capture_queue.STUCK_S + 1)
        assert not side.is_busy, "an idle engine does not wait for captures that hang"
        side.reported(StepReport(0, capture_work=700))
        assert side.is_busy, "it is slow, and is computed: the section of a long history on a CPU"
        now += capture_queue.STUCK_S + 1
        side.reported(StepReport(0, capture_work=700))
        assert not side.is_busy
    meanwhile = miss(side, *MISSING, "meanwhile")
    side.reported(StepReport(1))
    assert not side.is_busy
    side.finished(meanwhile)  # it missed the chunk while it was computed
    assert side.take_jobs().capture == []
    side.finished(miss(side, *MISSING, "later"))
    assert len(side.take_jobs().capture) == 1, "the capture failed, since nothing is in the store: it is tried again"


def test_a_pause_waits_for_the_chunks_that_are_computed_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    is_paused, now = False, time.monotonic()
    side = scheduling([], capture_bytes=250, is_paused=lambda: is_paused)
    for number in range(3):
        chunk = list(range(100 * (number + 1), 100 * (number + 2)))
        side.finished(miss(side, [1, *chunk, 5], [[1, 101]], str(number)))
    assert len(side.take_jobs().capture) == 2
    is_paused = True
    assert side.is_busy, "two are with the workers"
    side.reported(StepReport(2))
    assert not side.is_busy and not side.take_jobs(is_idle=True).capture
    monkeypatch.setattr(capture_queue.time, "monotonic", lambda: now + 10 * capture_queue.STUCK_S)
    assert not side.is_busy
    is_paused = False
    assert side.is_busy and len(side.take_jobs(is_idle=True).capture) == 1, "it goes on, however long it lasted"


def test_the_captures_that_wait_are_bounded_and_counted() -> None:
    side = scheduling([], blend_fields={"capture_queue": 1})
    for name in ("first", "once the queue has room again"):
        side.finished(miss(side, [*CHUNK, 4, *range(300, 400), 5], [[0, 100], [101, 201]], name))
        assert len(side.take_jobs().capture) == 1
        assert side.counts.take().data["fallbacks"] == {"capture queue full": 1}
        side.reported(StepReport(1))


def test_captures_are_bounded_in_bytes() -> None:
    side = scheduling([], capture_bytes=250)
    ids, spans = [1], []
    for chunk in (*(list(range(at, at + 100)) for at in (100, 200, 300)), list(range(1000, 1300))):
        spans.append([len(ids), len(ids) + len(chunk)])
        ids += chunk
    side.finished(miss(side, [*ids, 5], spans, "r"))
    assert [len(side.take_jobs().capture) for _ in range(2)] == [2, 0]
    side.reported(StepReport(1))
    assert len(side.take_jobs().capture) == 1
    side.reported(StepReport(3))
    assert not side.is_busy
    assert side.counts.take().data["fallbacks"] == {"capture too large": 1}
    assert side.counts.take() is None
    side = scheduling([], capture_bytes=319, bytes_per_token=320)  # less than a token is a bound
    side.finished(miss(side, [1, 2, 3, 5], [[1, 3]], "r"))
    assert not side.take_jobs().capture and side.counts.take().data["fallbacks"] == {"capture too large": 1}


@pytest.mark.may_fail("store")
def test_chunks_that_were_evicted_are_announced_when_they_are_next_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by content, with captures off: by default nobody marks anything."""
    side = scheduling([CHUNK], blend_fields={"capture": False}, keeps_events=True)
    listing, store = side._finder._listing, side._finder._store
    start(side, Request(PROMPT, name="listed"))
    (chunk,) = listing.take_changes(9).added
    entries, store.find = store.find, lambda names: [None for _ in names]
    with monkeypatch.context() as down:
        down.setattr(type(store), "is_reachable", False)
        assert start(side, Request(PROMPT, name="a server that does not answer")) == 0
        assert listing.take_changes(9).removed == []
    assert start(side, Request(PROMPT, name="evicted")) == 0
    assert [each.chunk_id for each in listing.take_changes(9).removed] == [chunk.chunk_id]
    assert start(side, Request(PROMPT, name="still")) == 0
    assert listing.take_changes(9).removed == []
    store.find = entries
    assert start(side, Request(PROMPT, name="back")) == 141
    assert [each.chunk_id for each in listing.take_changes(9).added] == [chunk.chunk_id]


def test_what_is_captured_is_found_by_content_and_announced() -> None:
    store = MemoryStore(1 << 20)
    side = scheduling([], store, refresh_s=1000)
    side._finder._listing._keeps_changes = True
    side.finished(miss(side, [1, 2, 3, *CHUNK, 4, 5], [[3, 103]], "missing"))
    (job,) = side.take_jobs().capture
    scheduling([CHUNK], store)  # the workers store it
    side.reported(StepReport(1))
    end, events = time.monotonic() + 30, list[Any]()
    while not events:
        assert time.monotonic() < end
        events = side.take_events()
    assert [event.token_ids for event in events] == [CHUNK]
    assert events[0].block_hashes == list(manifest_of(job.chunk, job.planner, "").block_names)
    assert start(side, Request(PROMPT, name="later")) == 141
    assert side.take_events() == []
