"""The fused prefill equals the reference: the same rows, logits and KV, for every selector and prompts of any shape."""

from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import get_args

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.load import layer_kv
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.core.select.selectors import (
    AllRows,
    Corrected,
    Gradual,
    Head,
    Hkvd,
    Measure,
    NoRows,
    RandomRows,
    Selector,
    Threshold,
)
from cacheblend.engines.hf import BlendEngine, SamplingParams
from campaign import rotating
from families import tiny_model
from parity.scenes import (
    BOS,
    DIVERSE,
    FAMILIES,
    LATENT,
    QUESTION,
    RAG,
    SYSTEM,
    UNSEEN,
    A,
    B,
    C,
    assert_as_reference,
    open_engine,
    random_ids,
    rows_of,
    run,
    warm_engine,
)
from reference import blend

TOLERANCE = 3e-5
BASE = [name for name in ("llama", "gemma3_text", "gpt_oss", "deepseek_v3") if name in DIVERSE]
SELECTORS = {
    "hkvd 0": Hkvd((1,), (0.0,)),
    "hkvd 0.1": Hkvd((1,), (0.1,)),
    "hkvd 0.3": Hkvd((1,), (0.3,)),
    "hkvd late": Hkvd((2,), (0.3,)),
    "hkvd last": Hkvd((3,), (0.1,)),
    "gradual": Hkvd((1, 2), (0.3, 0.1)),
    "gradual 3": Hkvd((1, 2, 3), (0.5, 0.3, 0.1)),
    "keys": Hkvd((1,), (0.3,), measure="k"),
    "values": Hkvd((1,), (0.1,), measure="v"),
    "head 0": Head(0.0),
    "head 0.1": Head(0.1),
    "head 0.3": Head(0.3),
    "random 0.1": RandomRows(0.1),
    "random 0.3": RandomRows(0.3, seed=7),
    "none": NoRows(),
    "all": AllRows(),
    "corrected head": Corrected(Head(0.3, recency=0.75), 0.5),
    "corrected gradual": Corrected(Hkvd((1, 2), (0.3, 0.1)), 1.0),
}
OTHERS = [name for name in DIVERSE if name not in BASE]
OF_ALL = ["hkvd last", "gradual 3", "values", "head 0.3", "none", "corrected head"]
SLOW = rotating(name for name in FAMILIES if name not in DIVERSE)


@pytest.mark.parametrize(
    ("family", "selector"),
    [
        *product(BASE, SELECTORS),
        *product(OTHERS, OF_ALL),
        *rotating(product(OTHERS, [name for name in SELECTORS if name not in OF_ALL])),
        *(pytest.param(*each.values, name, marks=each.marks) for each, name in product(SLOW, ("gradual", "none"))),
    ],
)
def test_every_selector_equals_the_reference(family: str, selector: str) -> None:
    """Which rows are chosen is hardly a matter of the family: a few selectors always run on each, others in turn."""
    if family in LATENT and (SELECTORS[selector].measure != "kv" or SELECTORS[selector].correction):
        with pytest.raises(InvalidInputError, match=r"keeps one latent for (both; use measure 'kv'|keys and values)"):
            run(warm_engine(family), RAG, SELECTORS[selector])
        return
    outcome = run(warm_engine(family), RAG, SELECTORS[selector])
    assert_as_reference(outcome, blend(tiny_model(family), RAG, SELECTORS[selector]), TOLERANCE)


@pytest.mark.parametrize(
    ("family", "share"),
    [*product(BASE, (0.1, 0.3)), *product(OTHERS, (0.3,)), *rotating(product(OTHERS, (0.1,)))],
)
def test_the_threshold_selector_equals_the_reference(family: str, share: float) -> None:
    """The bound is halfway between two deviations of the reference."""
    model, measures = tiny_model(family), ("kv",) if family in LATENT else get_args(Measure)
    for measure in measures:
        found = sorted(blend(model, RAG, Hkvd((1,), (1.0,), measure)).deviations[1].values())
        cut = round((1 - share) * len(found))
        selector = Threshold((found[cut - 1] + found[cut]) / 2, (1,), measure)
        reference = blend(model, RAG, selector)
        assert len(reference.recomputed) == len(found) - cut
        assert_as_reference(run(warm_engine(family), RAG, selector), reference, TOLERANCE)


@pytest.mark.parametrize(
    ("family", "selector"),
    [
        *product(DIVERSE, ["gradual"]),
        *product(BASE, ["head 0.1", "none"]),
        *rotating(product(OTHERS, ["head 0.1", "none"])),
    ],
)
def test_chunks_with_the_bos_anchor_equal_the_reference(family: str, selector: str) -> None:
    """Chunks were computed after BOS; in the prompts one follows BOS directly, others follow later or without BOS."""
    model, prompt = tiny_model(family), Prompt.of([text([BOS]), A, B, C, QUESTION])
    engine = warm_engine(family, anchor="bos")
    outcome = run(engine, prompt, SELECTORS[selector])
    without_bos = run(engine, Prompt.of([B, A, QUESTION]), SELECTORS[selector])
    assert outcome.report.hit_tokens["prefix"] == 1 + len(A)
    assert_as_reference(outcome, blend(model, prompt, SELECTORS[selector], anchor=[BOS]), TOLERANCE)
    assert without_bos.report.hit_tokens["prefix"] == 0  # B's keys move from position 1 to 0
    reference = blend(model, Prompt.of([B, A, QUESTION]), SELECTORS[selector], anchor=[BOS])
    assert_as_reference(without_bos, reference, TOLERANCE)


@pytest.mark.parametrize("family", DIVERSE)
def test_decoding_continues_from_the_blended_cache(family: str) -> None:
    """Each token equals the first token of a blended prefill of the prompt with the answer so far appended."""
    model = tiny_model(family)
    selector = Gradual(0.1).of_model(model.config.get_text_config().num_hidden_layers)
    answer = warm_engine(family).generate(RAG, SamplingParams(max_new_tokens=4, ignore_eos=True), ratio=0.1)
    tokens: list[int] = []
    for _ in range(4):
        longer = Prompt.of([*RAG.segments, text(tokens)])
        tokens.append(int(blend(model, longer, selector).logits.argmax()))
    assert answer.token_ids == tokens


# ---- prompts of unusual shapes ----------------------------------------------------------------------------


ONE = chunk([7])
WORD = text([9])


@dataclass(frozen=True, eq=False)
class Shape:
    """A prompt, whose chunks but UNSEEN are stored; `deleted`: but for these blocks, (segment, index in it)."""

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
OF_SHAPES = {
    "hkvd": Hkvd((1, 2), (0.4, 0.2)),
    "few by place, corrected": Corrected(Head(0.05, recency=1.0), 0.5),  # none of some chunks
    "none": NoRows(),
    "all": AllRows(),
    "corrected": Corrected(Hkvd((1, 2), (0.4, 0.2)), 0.7),
}


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
    for span in engine.runtime.planner.plan(prompt, engine.store).spans:
        if span.start in missing_rows(prompt, shape) and prompt.segments[span.segment] is not UNSEEN:
            assert engine.store.delete(span.name)
    return engine


def check(family: str, shape: Shape, selector: Selector, tile_rows: int) -> None:
    model, prompt = tiny_model(family), Prompt.of(shape.segments)
    missing = missing_rows(prompt, shape)
    outcome = run(engine_of(family, shape, tile_rows), prompt, selector)
    assert outcome.report.missed_tokens == len(missing)
    assert_as_reference(outcome, blend(model, prompt, selector, missing=missing), TOLERANCE)


@pytest.mark.parametrize("selector", OF_SHAPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_the_reference(shape: str, selector: str) -> None:
    check("llama", SHAPES[shape], OF_SHAPES[selector], tile_rows=32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_shape_with_windows_and_tiny_tiles(family: str, shape: str) -> None:
    check(family, SHAPES[shape], OF_SHAPES["hkvd"], tile_rows=3)


@pytest.mark.parametrize("tile_rows", [1, 3, 1000])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "cohere2", "qwen3_moe", "deepseek_v3"])
def test_any_tile_size_equals_the_reference(family: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_kv, "MOVED_AT_ONCE", tile_rows)
    for selector in ("hkvd",) if family in LATENT else ("hkvd", "corrected"):
        check(family, SHAPES["several blocks missing"], OF_SHAPES[selector], tile_rows)


def test_a_prompt_longer_than_all_buffers() -> None:
    """More rows than an attention group and than a loader batch, with default tile and block sizes."""
    parts = [chunk(random_ids(700, seed)) for seed in range(10, 12)]
    shape = Shape([SYSTEM, parts[0], UNSEEN, parts[1], QUESTION], deleted=[(1, 1)], block_size=256)
    check("llama", shape, Hkvd((1,), (0.15,)), tile_rows=1024)
