"""Prompts of unusual shapes, compared with the reference."""

from dataclasses import dataclass, field
from functools import cache

import pytest

from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.core.select.selectors import AllRows, Head, Hkvd, NoRows, Selector
from cacheblend.engines.hf import BlendEngine
from families import tiny_model
from parity.scenes import QUESTION, SYSTEM, UNSEEN, A, B, C, assert_as_reference, open_engine, random_ids, rows_of, run
from reference import blend

TOLERANCE = 3e-5
ONE = chunk([7])
WORD = text([9])


@dataclass(frozen=True, eq=False)
class Shape:
    """A prompt.

    Attributes:
        segments: segments of the prompt; all chunks but UNSEEN are stored.
        deleted: (segment, block index in it) of blocks deleted from the store.
        block_size: block size in tokens.
    """

    segments: list[Segment]
    deleted: list[tuple[int, int]] = field(default_factory=list)
    block_size: int = 16


SHAPES = {
    "chunk of one token": Shape([SYSTEM, A, ONE, B, QUESTION]),
    "chunks of one token only": Shape([ONE, ONE, ONE]),
    "question of one token": Shape([SYSTEM, A, B, WORD]),
    "no question": Shape([SYSTEM, A, B]),
    "no question, one token last": Shape([SYSTEM, A, ONE]),
    "all miss": Shape([SYSTEM, UNSEEN, UNSEEN, QUESTION]),
    "only a miss": Shape([UNSEEN]),
    "no chunk": Shape([SYSTEM, QUESTION]),
    "all hit": Shape([A, B, C]),
    "hit after miss": Shape([SYSTEM, UNSEEN, A, QUESTION]),
    "miss after hit": Shape([SYSTEM, A, UNSEEN, QUESTION]),
    "miss last": Shape([A, B, UNSEEN]),
    "repeated chunk": Shape([SYSTEM, A, B, A, QUESTION]),
    "repeated chunk in front": Shape([A, B, A, QUESTION]),
    "adjacent repeats": Shape([SYSTEM, A, A, A, QUESTION]),
    "only a chunk": Shape([A]),
    "one chunk twice": Shape([A, A]),
    "one token": Shape([WORD]),
    "one token as a chunk": Shape([ONE]),
    "text between chunks": Shape([A, SYSTEM, B, WORD, C, QUESTION]),
    "middle block missing": Shape([SYSTEM, B, A, QUESTION], deleted=[(2, 1)]),
    "middle block of the prefix missing": Shape([A, B, QUESTION], deleted=[(0, 1)]),
    "first block of the prefix missing": Shape([A, B, QUESTION], deleted=[(0, 0)]),
    "last block missing": Shape([SYSTEM, B, A], deleted=[(2, 2)]),
    "several blocks missing": Shape([SYSTEM, C, A, QUESTION], deleted=[(1, 0), (1, 3), (2, 1)]),
    "blocks of one token": Shape([SYSTEM, B, A, QUESTION], deleted=[(1, 5)], block_size=1),
    "blocks longer than the chunks": Shape([SYSTEM, B, A, QUESTION], block_size=256),
}
SELECTORS = {"hkvd": Hkvd((1, 2), (0.4, 0.2)), "head": Head(0.1), "none": NoRows(), "all": AllRows()}


def missing_rows(prompt: Prompt, shape: Shape) -> list[int]:
    missing = rows_of(prompt, *(i for i, segment in enumerate(prompt.segments) if segment is UNSEEN))
    for segment, block in shape.deleted:
        missing += rows_of(prompt, segment)[block * shape.block_size :][: shape.block_size]
    return missing


@cache
def engine_of(family: str, shape: Shape, tile_rows: int) -> BlendEngine:
    """Holds what the shape's prompt finds."""
    prompt = Prompt.of(shape.segments)
    stored = [segment for segment in prompt.chunks if segment is not UNSEEN]
    engine = open_engine(tiny_model(family), stored, block_size=shape.block_size, tile_rows=tile_rows)
    for span in engine.planner.plan(prompt, engine.store).spans:
        if span.start in missing_rows(prompt, shape) and prompt.segments[span.segment] is not UNSEEN:
            assert engine.store.delete(span.name)
    return engine


def check(family: str, shape: Shape, selector: Selector, tile_rows: int) -> None:
    model, prompt = tiny_model(family), Prompt.of(shape.segments)
    missing = missing_rows(prompt, shape)
    outcome = run(engine_of(family, shape, tile_rows), prompt, selector)
    assert outcome.report.missed_tokens == len(missing)
    assert_as_reference(outcome, blend(model, prompt, selector, missing=missing), TOLERANCE)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_the_reference(shape: str, selector: str) -> None:
    check("llama", SHAPES[shape], SELECTORS[selector], tile_rows=32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_shape_with_windows_and_tiny_tiles(family: str, shape: str) -> None:
    check(family, SHAPES[shape], SELECTORS["hkvd"], tile_rows=3)


@pytest.mark.parametrize("tile_rows", [1, 3, 1000])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "cohere2", "qwen3_moe", "deepseek_v3"])
def test_any_tile_size_equals_the_reference(family: str, tile_rows: int) -> None:
    check(family, SHAPES["several blocks missing"], SELECTORS["hkvd"], tile_rows)


def test_a_prompt_longer_than_all_buffers() -> None:
    """More rows than an attention group and than a loader batch, with default tile and block sizes."""
    parts = [chunk(random_ids(700, seed)) for seed in range(10, 12)]
    shape = Shape([SYSTEM, parts[0], UNSEEN, parts[1], QUESTION], deleted=[(1, 1)], block_size=256)
    check("llama", shape, Hkvd((1,), (0.15,)), tile_rows=1024)
