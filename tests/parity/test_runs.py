"""Runs of stored chunks, as found by content matching: reused from the middle of a block, exact at r = 1."""

from itertools import product

import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.prompt import Prompt, part_of, run_of
from cacheblend.core.select.selectors import AllRows, NoRows
from cacheblend.engines.hf import BlendEngine
from families import tiny_model
from parity.scenes import QUESTION, SYSTEM, A, B, Outcome, assert_same, open_engine, run, warm_engine
from reference import plain_kv

PARTS = [(0, len(A) - 1), (1, len(A) - 1), (1, len(A) - 2), (17, 3)]


def stored(engine: BlendEngine, ids: object) -> ChunkManifest:
    return next(each for each in engine.store.manifests() if each.token_ids.tolist() == list(ids))  # type: ignore[call-overload]


def assert_moved(outcome: Outcome, model: torch.nn.Module, start: int, first: int, tokens: int) -> None:
    """From position `start` on, the KV is that of A's tokens from `first` on, moved there."""
    moved = plain_kv(model, A.token_ids, shift=start - first)[1]
    for layer, theirs in zip(outcome.result.kv, moved, strict=True):
        for mine, other in zip(layer, theirs, strict=True):
            rows = mine[:, start : start + tokens]
            torch.testing.assert_close(rows, other[:, first : first + tokens], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "is_found", "first", "tokens"),
    [
        *product(("llama", "gemma3_text", "qwen3_moe", "deepseek_v3"), [True], [10], [25]),  # parts of three blocks
        *((family, False, *part) for family in ("llama", "gemma3_text") for part in PARTS),
    ],
)
def test_parts_of_a_chunk_are_loaded_from_its_blocks_and_recomputed_equal_full_prefill(
    family: str, is_found: bool, first: int, tokens: int
) -> None:
    """A run that was found, or a part, as where a chat's template shares a token with a passage."""
    engine, model = warm_engine(family), tiny_model(family)
    found_in = stored(engine, A.token_ids)
    part = run_of(found_in, first, tokens) if is_found else part_of(A.token_ids, first, tokens)
    prompt = Prompt.of([SYSTEM, B, part, A, QUESTION])
    outcome = run(engine, prompt, NoRows())
    assert outcome.report.hit_tokens["memory"] == len(B) + tokens + len(A)
    if family in ("llama", "gemma3_text"):
        assert_moved(outcome, model, len(SYSTEM) + len(B), first, tokens)
    outcome = run(engine, prompt, AllRows())
    assert_same(outcome.result, *plain_kv(model, prompt.token_ids), 1e-5)
    for offset, count in ((-1, 5), (0, 0), (38, 3), (0, 41)):
        with pytest.raises(InvalidInputError, match=r"of a chunk that has 0\.\.39"):
            run_of(found_in, offset, count)


def test_a_part_that_is_warmed_is_stored_as_the_whole_chunk() -> None:
    """As commands do that store what a prompt asks for."""
    with open_engine(tiny_model("llama"), []) as engine:
        prompt = Prompt.of([SYSTEM, part_of(A.token_ids, 1, len(A) - 2, "A"), QUESTION])
        engine.warm([segment for segment in prompt.segments if segment.is_chunk])
        assert stored(engine, A.token_ids).label == "A"
        assert engine.runtime.planner.plan(prompt, engine.store).hit_tokens()["memory"] == len(A) - 2


def test_a_missed_part_of_a_chunk_has_the_whole_chunk_stored() -> None:
    with open_engine(tiny_model("llama"), [], capture=True) as engine:
        prompt = Prompt.of([SYSTEM, part_of(A.token_ids, 1, len(A) - 2, "A"), QUESTION])
        plan = engine.runtime.planner.plan(prompt, engine.store)
        assert [(len(s), s.label) for s in plan.missed_chunks()] == [(len(A), "A")]
        assert not any(plan.held_chunks().values())
        engine.generate(prompt, max_new_tokens=1)
        assert engine.flush(60)
        assert stored(engine, A.token_ids).label == "A"
        again = engine.runtime.planner.plan(prompt, engine.store)
        assert again.hit_tokens()["memory"] == len(A) - 2
        assert all(again.held_chunks().values())
        behind = Prompt.of([QUESTION, A, part_of(A.token_ids, 0, 5), QUESTION])
        assert engine.runtime.planner.plan(behind, engine.store).hit_tokens()["memory"] == len(A) + 5
