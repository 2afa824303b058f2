"""The scheduler side alone: what a client asks for and is told, and what a reset takes back."""

from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend.engines.vllm.jobs import BlendOutcome, StepReport
from vllm_requests import CHUNK, OTHER, PROMPT, Request, claim, give, scheduling, start, why, with_options


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
    assert words in why(side, request)
    counts = side.counts.take().data
    assert counts["fallbacks"] == {"bad spans": 1}
    assert counts["not_blended"] == {"bad parameters": 1}


def test_every_request_is_told_what_became_of_it() -> None:
    side = scheduling([CHUNK])
    sampling = SimpleNamespace(prompt_logprobs=None)
    requests = {
        "nothing stored": Request(list(range(300, 400)), name="a"),
        "below min_reused_share": Request([*range(1000, 1400), *CHUNK, 7], name="b"),
        "image": Request(PROMPT, name="c", mm_features=[SimpleNamespace(mm_position=SimpleNamespace(offset=0))]),
        "pooling": Request(PROMPT, name="e", sampling_params=None),
        "prompt too short": Request([1], name="f"),
        "asked not to read caches": Request(PROMPT, name="g", sampling_params=sampling, skip_reading_prefix_cache=True),
    }
    for reason, request in requests.items():
        assert start(side, request) == 0
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
        "recomputed_tokens": 15,
        "row_layers": 300,
        "prefill_share": 0.31,
    }
    assert side.counts.take().data["not_blended"] == dict.fromkeys(requests, 1)


def test_after_a_reset_nothing_old_is_found_and_nothing_old_is_captured() -> None:
    side = scheduling([CHUNK])
    missing = Request([1, 2, 3, *OTHER, 4, 5], [[3, 103]], "missing")
    start(side, missing)
    side.allocated(missing, [[1]], 0)
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
    again = Request([1, 2, 3, *OTHER, 4, 5], [[3, 103]], "again")
    start(side, again)
    side.allocated(again, [[1]], 0)
    side.finished(again)
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
    assert side.take_jobs().capture == []  # with the new weights it would be stored under the old ones' names
