"""The scheduler side alone: what is claimed, named and captured, with stand-ins for vLLM's requests."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.vllm import versions
from cacheblend.engines.vllm.connector import CacheBlendConnector
from cacheblend.engines.vllm.internals import interface, prefix_cache
from cacheblend.engines.vllm.jobs import StepReport
from cacheblend.engines.vllm.scheduler.scheduler import MOST_OUTSTANDING
from vllm_requests import CHUNK, PROMPT, SIZE, Request, claim, give, reported, scheduling, start


def test_a_stored_passage_is_found_claimed_and_given_to_the_workers() -> None:
    side = scheduling([CHUNK])
    request = Request(PROMPT)
    assert start(side, request) == 141
    assert claim(side, request, 32) == 109
    side.allocated(request, [[3, 4, 5]], 109)
    (job,) = side.take_jobs().blend
    assert (job.request_id, job.local_tokens, job.block_ids) == ("r", 32, [[3, 4, 5]])
    assert len(job.plan) == 141
    assert side.take_jobs().blend == []


def test_nothing_is_claimed_where_nothing_is_loaded() -> None:
    side = scheduling([CHUNK])
    plain, covered = Request(list(range(300, 400))), Request([*CHUNK, *range(40)], name="covered")
    for request in (plain, covered):
        side.on_new(request)
    assert claim(side, plain, 0) == 0
    assert claim(side, covered, 112) == 0  # vLLM holds all of the passage
    assert claim(side, covered, 96) == 0  # of what is left too little is held
    assert claim(side, covered, 80) == 59
    assert claim(side, Request([1, 2], name="unknown"), 0) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_params": None},
        {"sampling_params": SimpleNamespace(prompt_logprobs=1)},
        {"mm_features": [SimpleNamespace(mm_position=SimpleNamespace(offset=1))]},
        {"prompt_embeds": torch.zeros(1)},
    ],
    ids=["pooling", "prompt log-probabilities", "images", "embeddings"],
)
def test_what_needs_more_than_ids_is_left_to_vllm(fields: dict[str, Any]) -> None:
    side = scheduling([CHUNK])
    request = Request(PROMPT, **fields)
    names = list(request.block_hashes)
    assert start(side, request) == 0
    assert request.block_hashes == names


def test_only_blocks_from_the_first_passage_on_get_other_names() -> None:
    side, ids = scheduling([CHUNK]), PROMPT
    plain = list(Request(ids).block_hashes)
    one, two = Request(ids), Request(ids, name="two")
    for request in (one, two):
        start(side, request)
    assert one.block_hashes[:2] == plain[:2]
    assert not set(one.block_hashes[2:]) & set(plain)
    assert one.block_hashes == two.block_hashes
    assert len(one.block_hashes) == len(plain)


def test_a_request_whose_hits_are_all_exact_keeps_its_names() -> None:
    side, ids = scheduling([CHUNK]), [*CHUNK, *range(40)]
    request = Request(ids)
    assert start(side, request) == 139
    assert request.block_hashes == Request(ids).block_hashes


def test_names_differ_by_settings_and_tenant() -> None:
    side, ids = scheduling([CHUNK]), PROMPT
    ratio = {"kv_transfer_params": {"cacheblend": {"recompute_ratio": 0.5}}}
    selector = {"kv_transfer_params": {"cacheblend": {"selector": "random"}}}
    same = {"kv_transfer_params": {"cacheblend": {"recompute_ratio": 0.15, "mode": "blend"}}}
    found = []
    for number, fields in enumerate(({}, ratio, selector, same)):
        request = Request(ids, name=str(number), **fields)
        start(side, request)
        found.append(set(request.block_hashes[2:]))
    plain, half, other, again = found
    assert plain == again
    assert not plain & half and not plain & other and not half & other
    tenant = scheduling([CHUNK], side._finder._store, "acme")
    request = Request(ids, name="tenant", cache_salt="acme")
    assert start(tenant, request) == 141
    assert not plain & set(request.block_hashes)


def test_a_request_of_one_tenant_finds_nothing_of_another() -> None:
    side = scheduling([CHUNK], salt="acme")
    for number, salt in enumerate((None, "", "other", "acme ", "\ud800")):
        spans = [None, [[40, 140]]][number % 2]
        request = Request(PROMPT, spans, name=str(number), cache_salt=salt)
        assert start(side, request) == 0
    assert start(side, Request(PROMPT, name="own", cache_salt="acme")) == 141


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


def test_a_missed_passage_is_captured_once_after_the_first_token() -> None:
    side = scheduling([])
    requests = [Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]], name) for name in ("a", "b")]
    for request in requests:
        assert start(side, request) == 0
        side.allocated(request, [[1]], 0)
    assert side.take_jobs().capture == []
    requests[0].num_output_tokens = 1
    jobs = side.take_jobs()
    assert [job.chunk.token_ids.tolist() for job in jobs.capture] == [CHUNK]
    assert side.is_busy
    side.finished(requests[1])
    assert side.take_jobs().capture == []
    side.reported(StepReport(1))
    assert not side.is_busy


def test_the_captures_that_wait_are_bounded_and_counted() -> None:
    side = scheduling([], blend_fields={"capture_queue": 1})
    request = Request([*CHUNK, 4, *range(300, 400), 5], [[0, 100], [101, 201]])
    start(side, request)
    side.allocated(request, [[1]], 0)
    side.finished(request)
    assert len(side.take_jobs().capture) == 1
    assert side.counts.take().data["fallbacks"] == {"capture queue full": 1}
    side.reported(StepReport(1))
    again = Request([*CHUNK, 4, *range(300, 400), 5], [[0, 100], [101, 201]], "again")
    start(side, again)
    side.allocated(again, [[1]], 0)
    side.finished(again)
    assert len(side.take_jobs().capture) == 1  # the queue has capacity again


def test_what_the_workers_could_not_provide_is_not_given_to_them_again() -> None:
    side = scheduling([CHUNK])
    request = Request(PROMPT)
    side.on_new(request)
    side.allocated(request, [[1]], claim(side, request, 0))
    assert claim(side, request, 0) == 0
    side.reported(reported(request.request_id, "RuntimeError"))
    request.num_preemptions = 1
    assert claim(side, request, 0) == 141


def test_what_vllm_holds_exactly_stays_plain_also_after_a_preemption() -> None:
    side, ids = scheduling([CHUNK]), [*range(40), *CHUNK, *range(400, 420)]
    plain = Request(ids)
    side.cache.bind(SimpleNamespace(get_cached_block=lambda name, groups: name in plain.block_hashes))
    request = Request(ids)
    assert start(side, request, 144) == 0
    assert request.block_hashes == plain.block_hashes
    request.num_preemptions = 1
    assert claim(side, request, 0) == 0


def test_a_prompt_of_which_little_is_stored_is_left_to_vllm() -> None:
    side = scheduling([CHUNK])
    little, much = Request([*range(1000, 1400), *CHUNK, 7]), Request([*range(1000, 1200), *CHUNK, 7], name="much")
    for request in (little, much):
        side.on_new(request)
    assert claim(side, little, 0) == 0
    assert little.block_hashes == Request([*range(1000, 1400), *CHUNK, 7]).block_hashes
    assert claim(side, much, 0) == 300


def test_few_prompts_are_outstanding_at_a_time() -> None:
    side = scheduling([CHUNK])
    requests = [Request(PROMPT, name=str(i)) for i in range(MOST_OUTSTANDING + 1)]
    for request in requests:
        request.prompt_token_ids = [int(request.request_id) + 1000, *request.prompt_token_ids[1:]]
        request.block_hashes.clear()
        request.update_block_hashes()
    for request in requests[:-1]:
        give(side, request, 1)
    assert start(side, requests[-1]) is None
    side.provided(["0"])
    assert claim(side, requests[-1], 0) == 141


@pytest.mark.parametrize("params", ["x", 3, ["cacheblend"]])
def test_parameters_of_another_kind_disable_blending_only(params: Any) -> None:
    side = scheduling([CHUNK])
    request = Request(PROMPT, kv_transfer_params=params)
    assert start(side, request) == 0


def test_wrong_spans_disable_blending_only() -> None:
    side = scheduling([CHUNK])
    request = Request(PROMPT, [[5, 4000]])
    assert start(side, request) == 0
    assert side.counts.take().data == {"fallbacks": {"bad spans": 1}}


def test_a_passage_that_ends_the_prompt_gives_its_last_token_to_vllm() -> None:
    side = scheduling([CHUNK])
    request = Request([*range(40), *CHUNK])
    assert start(side, request) == 139
    side.allocated(request, [[1]], 139)
    assert np.array_equal(side.take_jobs().blend[0].plan.prompt.token_ids, request.prompt_token_ids[:-1])


def test_a_request_that_ends_early_is_dropped() -> None:
    side = scheduling([CHUNK])
    request = Request(PROMPT)
    give(side, request, 1)
    side.finished(request)
    assert side.take_jobs().dropped == ["r"]
    assert claim(side, request, 0) == 0


def test_a_request_that_ends_after_its_prompt_is_not_dropped() -> None:
    side = scheduling([CHUNK])
    request = Request(PROMPT)
    give(side, request, 1)
    side.provided(["r"])
    side.finished(request)
    assert side.take_jobs().dropped == []


def test_an_untested_version_is_refused_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.99.0")
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    with pytest.raises(InvalidInputError, match=r"this is vLLM 0\.99\.0"):
        CacheBlendConnector(config, interface.KVConnectorRole.SCHEDULER, None)


def test_of_a_prompt_with_an_image_what_stands_before_it_is_claimed() -> None:
    """Chunks behind it, or around it, are left to vLLM; so are the names of blocks in front of what is loaded."""
    front = PROMPT
    image = [SimpleNamespace(mm_position=SimpleNamespace(offset=len(front)))]
    ids = [*front, 9, 9, 9, *CHUNK, 5]
    side = scheduling([CHUNK])
    spans = [[40, 140], [len(front) + 1, len(front) + 3], [len(front) + 3, len(front) + 103]]
    request, plain = Request(ids, spans, mm_features=image), Request(ids)
    assert start(side, request) == len(front) - 1
    named = zip(request.block_hashes, plain.block_hashes, strict=True)
    assert [mine == its for mine, its in named] == [True] * 2 + [False] * (len(ids) // SIZE - 2)
    side.allocated(request, [[1] * 40], len(front) - 1)
    assert len(side.take_jobs().blend[0].plan) == len(front) - 1
    behind = Request(ids, [spans[2]], "behind", mm_features=image)
    assert start(side, behind) == 0
    assert behind.block_hashes == plain.block_hashes
