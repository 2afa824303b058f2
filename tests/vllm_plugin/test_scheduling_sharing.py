"""The scheduler side alone: what requests share with each other, with earlier turns, and with plain ones."""

from dataclasses import replace

import pytest

from vllm_requests import (
    CHUNK,
    OTHER,
    PROMPT,
    SIZE,
    Pool,
    Request,
    claim,
    give,
    reported,
    scheduling,
    start,
    turn,
    with_options,
)


def test_equal_prompts_wait_for_the_first_and_share_its_blocks() -> None:
    side, pool = scheduling([CHUNK]), Pool()
    side.cache.bind(pool)
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
        told = side.finished(request)["cacheblend"]
        assert (told["blended"], told["hit_tokens"]) == (True, {"vllm": 128})
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


def test_prompts_that_share_little_do_not_wait_for_each_other() -> None:
    side = scheduling([CHUNK, OTHER])
    one = Request([*range(40), *CHUNK, *OTHER, *OTHER, 7], name="one")
    two = Request([*range(40), *CHUNK, 9, *OTHER, 10, *OTHER, 7], name="two")
    give(side, one, 22)
    assert start(side, two) == len(two.prompt_token_ids) - 1


def test_the_settings_of_a_request_are_part_of_what_is_shared() -> None:
    side = scheduling([CHUNK])
    give(side, Request(PROMPT, name="first"))
    assert start(side, with_options(PROMPT, "same", recompute_ratio=0.15)) is None
    assert start(side, with_options(PROMPT, "other", recompute_ratio=0.5)) == 141
    jobs = side.take_jobs().blend
    assert [job.selector.share for job in jobs] == [0.15]


@pytest.mark.parametrize("front", [[], list(range(500, 540))], ids=["begins with the miss", "text in front"])
def test_the_second_turn_finds_the_blocks_of_the_first_although_a_miss_was_captured_meanwhile(
    front: list[int],
) -> None:
    first_chunk = list(range(900, 1000))
    side, pool = scheduling([CHUNK, OTHER]), Pool()
    side.cache.bind(pool)
    ids, spans = [*front], []
    for chunk in (first_chunk, CHUNK, OTHER):
        spans.append([len(ids), len(ids) + len(chunk)])
        ids += chunk
    ids += range(40)
    held, _ = turn(side, pool, ids, spans, "one")
    assert held == 0
    side = scheduling([first_chunk], side._finder._store)
    side.cache.bind(pool)
    more = [*ids, *range(600, 670)]
    held, second = turn(side, pool, more, spans, "two")
    assert held >= len(ids) // SIZE * SIZE
    held, _ = turn(side, pool, [*more, *range(700, 740)], spans, "three")
    assert held >= len(second.prompt_token_ids) // SIZE * SIZE


def test_blended_rows_are_never_written_to_blocks_with_plain_names() -> None:
    """Salting begins after a block that vLLM held; once it is evicted, the request must not be blended over it."""
    side, pool = scheduling([CHUNK, OTHER]), Pool()
    side.cache.bind(pool)
    ids, spans = [*range(40), *CHUNK, *OTHER, *range(40)], [[40, 140], [140, 240]]
    plain = scheduling([OTHER])
    plain.cache.bind(pool)
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


def test_exact_mode_takes_nothing_of_what_an_equal_prompt_was_blended_into() -> None:
    side, pool = scheduling([CHUNK]), Pool()
    side.cache.bind(pool)
    _, blended = turn(side, pool, PROMPT, [[40, 140]], "blended")
    plain = Request(PROMPT).block_hashes
    assert blended.block_hashes != plain
    exact = with_options(PROMPT, "exact", mode="prefix", chunks=[[40, 140]])
    assert start(side, exact) == 0
    assert exact.block_hashes == plain
    side.allocated(exact, [[1] * 9], 0)
    assert not side.finished(exact)["cacheblend"]["blended"]


def test_what_vllm_holds_of_an_earlier_turn_is_used_although_nothing_is_stored_any_more() -> None:
    side, pool = scheduling([CHUNK, OTHER]), Pool()
    side.cache.bind(pool)
    ids, spans = [*range(40), *CHUNK, *OTHER, *range(40)], [[40, 140], [140, 240]]
    turn(side, pool, ids, spans, "one")
    empty = scheduling([])
    empty.cache.bind(pool)
    held, request = turn(empty, pool, [*ids, *range(700, 730)], spans, "two")
    assert held >= len(ids) // SIZE * SIZE
    assert len(request.block_hashes) > held // SIZE


def test_what_vllm_held_exactly_is_not_called_blended() -> None:
    side, pool = scheduling([CHUNK]), Pool()
    side.cache.bind(pool)
    ids = [*range(40), *CHUNK, *range(300, 600), *CHUNK, 7]
    plain = Request(ids)
    pool.held |= set(plain.block_hashes[:26])
    request = Request(ids, name="asked")
    assert start(side, request, 26 * SIZE) == 540 - 26 * SIZE
    little = Request([*range(40), *CHUNK, *range(300, 900), *CHUNK, 7], name="little")
    pool.held |= set(little.block_hashes[:20])
    side._config = replace(side._config, min_reused_share=0.2)
    assert start(side, little, 20 * SIZE) == 0
    told = side.finished(little)["cacheblend"]
    assert (told["blended"], told["reason"]) == (False, "below min_reused_share")
