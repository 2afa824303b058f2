"""Runs of stored chunks, as found by content matching: reused from the middle of a block, exact at r = 1."""

import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.plan import Source
from cacheblend.core.plan.prompt import Prompt, part_of, run_of
from cacheblend.core.select.selectors import AllRows, NoRows
from cacheblend.engines.hf import BlendEngine
from families import tiny_model
from parity.scenes import BLOCK_SIZE, QUESTION, SYSTEM, A, B, Outcome, assert_same, open_engine, run, warm_engine
from reference import plain_kv

FIRST, LENGTH = 10, 25  # of A's 40 tokens in blocks of 16: parts of blocks 0 and 2, all of block 1


def stored(engine: BlendEngine, ids: object) -> ChunkManifest:
    return next(each for each in engine.store.manifests() if each.token_ids.tolist() == list(ids))  # type: ignore[call-overload]


def with_run(engine: BlendEngine) -> Prompt:
    return Prompt.of([SYSTEM, B, run_of(stored(engine, A.token_ids), FIRST, LENGTH), QUESTION])


def assert_moved(outcome: Outcome, model: torch.nn.Module, start: int, first: int, tokens: int) -> None:
    """From position `start` on, the KV is that of A's tokens from `first` on, moved there."""
    moved = plain_kv(model, A.token_ids, shift=start - first)[1]
    for layer, theirs in zip(outcome.result.kv, moved, strict=True):
        for mine, other in zip(layer, theirs, strict=True):
            rows = mine[:, start : start + tokens]
            torch.testing.assert_close(rows, other[:, first : first + tokens], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_a_run_reuses_the_chunks_kv_at_its_new_position_and_recomputed_equals_full_prefill(family: str) -> None:
    engine = warm_engine(family)
    prompt = with_run(engine)
    if family in ("llama", "gemma3_text"):
        outcome = run(engine, prompt, NoRows())
        assert outcome.report.hit_tokens["memory"] == len(B) + LENGTH
        assert_moved(outcome, tiny_model(family), len(SYSTEM) + len(B), FIRST, LENGTH)
    outcome = run(engine, prompt, AllRows())
    assert_same(outcome.result, *plain_kv(tiny_model(family), prompt.token_ids), 1e-5)
    for offset, tokens in ((-1, 5), (0, 0), (38, 3), (0, 41)):
        with pytest.raises(InvalidInputError, match=r"of a chunk that has 0\.\.39"):
            run_of(stored(engine, A.token_ids), offset, tokens)


def test_a_chunk_stored_with_another_block_size_is_reused() -> None:
    with open_engine(tiny_model("llama"), [A], block_size=BLOCK_SIZE) as one:
        found_in = stored(one, A.token_ids)
        with open_engine(tiny_model("llama"), [], block_size=7, store=one.store) as other:
            plan = other.planner.plan(Prompt.of([QUESTION, run_of(found_in, 0, 40), QUESTION]), other.store)
    assert [len(span) for span in plan.spans if span.source is Source.LOADED] == [16, 16, 8]


def test_missing_blocks_of_a_run_are_computed_and_never_captured() -> None:
    with open_engine(tiny_model("llama"), [A, B]) as engine:
        prompt = with_run(engine)
        engine.store.delete(stored(engine, A.token_ids).block_names[1])
        plan = engine.planner.plan(prompt, engine.store)
        sources = [(span.source, len(span)) for span in plan.spans if span.segment == 2]
        assert sources == [(Source.LOADED, 6), (Source.MISS, 16), (Source.LOADED, 3)]
        assert plan.missed_chunks() == []
        outcome = run(engine, prompt, AllRows())
        found_in = stored(engine, A.token_ids)
        for name in found_in.block_names:
            engine.store.delete(name)
        gone = engine.planner.plan(Prompt.of([QUESTION, run_of(found_in, 5, 30), QUESTION]), engine.store)
        assert gone.tokens_by_source()["miss"] == 30 and len(gone) == 2 * len(QUESTION) + 30
    assert_same(outcome.result, *plain_kv(tiny_model("llama"), prompt.token_ids), 1e-5)


# ---- parts of a chunk, as where a chat's template shares a token with a passage -----------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(("first", "tokens"), [(0, len(A) - 1), (1, len(A) - 1), (1, len(A) - 2), (17, 3)])
def test_a_part_of_a_chunk_is_loaded_from_the_whole_ones_blocks(family: str, first: int, tokens: int) -> None:
    engine, model = warm_engine(family), tiny_model(family)
    prompt = Prompt.of([SYSTEM, B, part_of(A.token_ids, first, tokens), A, QUESTION])
    outcome = run(engine, prompt, NoRows())
    assert outcome.report.hit_tokens["memory"] == len(B) + tokens + len(A)
    assert_moved(outcome, model, len(SYSTEM) + len(B), first, tokens)
    exact = run(engine, prompt, AllRows())
    assert_same(exact.result, *plain_kv(model, prompt.token_ids), 1e-5)


def test_a_part_that_is_warmed_is_stored_as_the_whole_chunk() -> None:
    """As commands do that store what a prompt asks for."""
    with open_engine(tiny_model("llama"), []) as engine:
        prompt = Prompt.of([SYSTEM, part_of(A.token_ids, 1, len(A) - 2, "A"), QUESTION])
        engine.warm([segment for segment in prompt.segments if segment.is_chunk])
        assert stored(engine, A.token_ids).label == "A"
        assert engine.planner.plan(prompt, engine.store).hit_tokens()["memory"] == len(A) - 2


def test_a_missed_part_of_a_chunk_has_the_whole_chunk_stored() -> None:
    with open_engine(tiny_model("llama"), [], capture=True) as engine:
        prompt = Prompt.of([SYSTEM, part_of(A.token_ids, 1, len(A) - 2, "A"), QUESTION])
        plan = engine.planner.plan(prompt, engine.store)
        assert [(len(s), s.label) for s in plan.missed_chunks()] == [(len(A), "A")]
        assert not any(plan.held_chunks().values())
        engine.generate(prompt, max_new_tokens=1)
        assert engine.flush(60)
        assert stored(engine, A.token_ids).label == "A"
        again = engine.planner.plan(prompt, engine.store)
        assert again.hit_tokens()["memory"] == len(A) - 2
        assert all(again.held_chunks().values())
        behind = Prompt.of([QUESTION, A, part_of(A.token_ids, 0, 5), QUESTION])
        assert engine.planner.plan(behind, engine.store).hit_tokens()["memory"] == len(A) + 5
