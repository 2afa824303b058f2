"""The question pass equals the dense reference; the exactness invariants hold for selectors that use the question."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cacheblend.core.names import BlockName
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import Selector
from families import tiny_model
from parity.scenes import (
    BOS,
    DIVERSE,
    EVERY,
    FAMILIES,
    QUESTION,
    RAG,
    SYSTEM,
    UNSEEN,
    A,
    B,
    C,
    Recorded,
    assert_as_reference,
    assert_same,
    finish,
    open_engine,
    random_ids,
    rows_of,
    run,
    stepper,
    warm_engine,
)
from reference import Reference, blend, plain_kv

TOLERANCE = 3e-5
WITH_MORE = [
    *DIVERSE,
    *(f for f in ("gemma2", "phi", "mistral-window", "ministral3", "laguna", "granite") if f in FAMILIES),
]
"""In order: soft-caps; partial rotary; windows in all layers; queries scaled by position; heads per layer; scaling."""
ENDS = list(range(3, 512, 7))  # every seventh token ends a sentence
LONG_QUESTION = text(random_ids(90, 7))
ONE_ROW = text(random_ids(1, 8))
PROMPTS = {
    "rag": RAG,
    "a miss": Prompt.of([SYSTEM, B, UNSEEN, A, QUESTION]),
    "a repeated chunk": Prompt.of([B, A, C, A, QUESTION]),
    "text between": Prompt.of([SYSTEM, B, ONE_ROW, A, SYSTEM, C, QUESTION]),
    "a question of one row": Prompt.of([SYSTEM, B, A, ONE_ROW]),
    "no question": Prompt.of([SYSTEM, B, A]),
    "a miss at the end": Prompt.of([SYSTEM, B, A, UNSEEN]),
    "a long question": Prompt.of([SYSTEM, B, A, LONG_QUESTION]),
    "question in front": Prompt.of([QUESTION, B, A, SYSTEM]),
}
SELECTORS: dict[str, Selector] = {
    "sentences": Query(0.2),
    "rows": Query(0.1, pool=1),
    "spans": Query(0.3, pool=8),
    "alone": Query(0.2, pool=4, lead=0),
    "three in front": Query(0.3, pool=4, lead=3),
    "few rows ask": Query(0.2, question_rows=3),
    "words": Query(0.2, words=0.5),
    "words of rows": Hybrid((2,), (0.1,), early=0.3, pool=1, words=2.0),
    "early": Hybrid((2,), (0.1,), early=0.3, rank="deviation"),
    "union": Hybrid((1,), (0.2,), early=1.0, rank="either"),
    "gradual": Hybrid((1, 2, 3), (0.4, 0.2, 0.1), early=0.6, rank="either", pool=4),
    "values": Hybrid((1, 2), (0.3, 0.1), early=0.5, rank="either", measure="v"),
}


def missed(prompt: Prompt) -> list[int]:
    return rows_of(prompt, *(i for i, segment in enumerate(prompt.segments) if segment is UNSEEN))


def assert_same_attention(recorded: Recorded, reference: Reference) -> None:
    asked = recorded.asked[0]
    assert asked.layer is None and asked.attention is not None and asked.attention.dtype == torch.float32
    assert asked.positions.tolist() == reference.candidates
    expected = torch.tensor([reference.attention[p] for p in reference.candidates])
    torch.testing.assert_close(asked.attention, expected, rtol=1e-4, atol=1e-5)
    assert float(expected.max()) > 0


@pytest.mark.parametrize("family", WITH_MORE)
def test_attention_equals_the_reference_for_every_family(family: str) -> None:
    recorded = Recorded(Query(0.1))
    warm_engine(family).prefill(RAG, selector=recorded)
    assert_same_attention(recorded, blend(tiny_model(family), RAG, Query(0.1)))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_attention_equals_the_reference_for_every_prompt(family: str, prompt: str) -> None:
    recorded, asked = Recorded(Query(0.1)), PROMPTS[prompt]
    result = warm_engine(family).prefill(asked, selector=recorded)
    report = result.report
    reference = blend(tiny_model(family), asked, Query(0.1), missing=missed(asked))
    assert_same_attention(recorded, reference)
    layers = len(result.kv)
    assert report.question_row_layers == result.report.question_row_layers == layers * len(reference.question)
    computed = len(result.plan) - len(reference.candidates) + report.recomputed_tokens - result.plan.prefix_length
    assert report.row_layers == (layers - 1) * computed + 1 + report.question_row_layers


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "cohere2", "flint"])
def test_every_selector_equals_the_reference(family: str, selector: str) -> None:
    """Without known sentence ends, rows are pooled in spans of fixed length."""
    outcome = run(warm_engine(family), RAG, SELECTORS[selector])
    assert_as_reference(outcome, blend(tiny_model(family), RAG, SELECTORS[selector]), TOLERANCE)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("selector", ["sentences", "gradual"])
def test_every_prompt_pooled_by_sentences_equals_the_reference(selector: str, prompt: str) -> None:
    model, asked = tiny_model("llama"), PROMPTS[prompt]
    pooled = {"sentences": Query(0.2), "gradual": Hybrid((1, 2), (0.3, 0.1), early=0.5)}[selector]
    with open_engine(model, sentence_end_ids=ENDS) as engine:
        outcome = run(engine, asked, pooled)
    reference = blend(model, asked, pooled, missing=missed(asked), sentence_ends=ENDS)
    assert_as_reference(outcome, reference, TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_exact_prefix_after_bos(family: str) -> None:
    """The question attends to an exact prefix, but its rows are not candidates."""
    model, prompt = tiny_model(family), Prompt.of([text([BOS]), A, B, QUESTION])
    recorded = Recorded(Query(0.2))
    with open_engine(model, anchor="bos") as engine:
        result = engine.prefill(prompt, selector=recorded)
        report = result.report
    assert report.hit_tokens["prefix"] == 1 + len(A)
    reference = blend(model, prompt, Query(0.2), anchor=[BOS])
    assert_same_attention(recorded, reference)
    assert_same(result, reference.logits, reference.kv, TOLERANCE)


@pytest.mark.parametrize("selector", [Query(1.0), Hybrid((1, 2), (1.0, 1.0), early=1.0)], ids=["query", "hybrid"])
@pytest.mark.parametrize("family", EVERY)
def test_full_recompute_equals_full_prefill(family: str, selector: Selector) -> None:
    """The question pass leaves nothing behind."""
    outcome = run(warm_engine(family), RAG, selector)
    assert len(outcome.recomputed) == 115
    assert_same(outcome.result, *plain_kv(tiny_model(family), RAG.token_ids), 1e-5)


@pytest.mark.parametrize("prompt", [Prompt.of([A, QUESTION]), Prompt.of([UNSEEN, QUESTION]), Prompt.of([QUESTION])])
@pytest.mark.parametrize("selector", [Query(0.0), Hybrid((1,), (0.0,), early=0.0)], ids=["query", "hybrid"])
def test_without_candidates_there_is_no_question_pass(selector: Selector, prompt: Prompt) -> None:
    """Prompts: a chunk directly after its anchor (exact at any ratio), a miss, plain text."""
    outcome = run(warm_engine("llama"), prompt, selector)
    assert outcome.report.question_row_layers == 0
    assert_same(outcome.result, *plain_kv(tiny_model("llama"), prompt.token_ids), 1e-5)


def test_a_long_question_uses_its_first_row_and_its_last_rows() -> None:
    plan = warm_engine("llama").planner.plan(PROMPTS["a long question"], warm_engine("llama").store)
    start, stop = len(plan) - len(LONG_QUESTION), len(plan)
    assert plan.question_rows(64).tolist() == [start, *range(stop - 63, stop)]
    assert plan.question_rows(2).tolist() == [start, stop - 1]
    assert plan.question_rows(90).tolist() == list(range(start, stop))


def test_suffix_rows_outside_the_question_rows_have_no_effect() -> None:
    """Text between the first row of a long suffix and its last rows does not change the attention."""
    middle = [text(random_ids(30, seed)) for seed in (20, 21)]
    asked = []
    for segment in middle:
        recorded = Recorded(Query(0.1, question_rows=5))
        warm_engine("llama").prefill(Prompt.of([B, A, ONE_ROW, segment, QUESTION]), selector=recorded)
        asked.append(recorded.asked[0].attention)
    assert asked[0] is not None and asked[1] is not None
    assert torch.equal(asked[0], asked[1])


def test_different_questions_select_different_rows() -> None:
    one, other = (run(warm_engine("llama"), Prompt.of([B, A, C, q]), Query(0.1)) for q in (QUESTION, LONG_QUESTION))
    assert one.recomputed != other.recomputed


@pytest.mark.parametrize("selector", ["sentences", "gradual"])
@torch.no_grad()
def test_interleaved_question_passes(selector: str) -> None:
    """The question pass keeps no state outside its own request."""
    engine, prompts = warm_engine("llama"), [RAG, Prompt.of([A, C, QUESTION])]
    one, other = (stepper(engine, prompt, SELECTORS[selector]) for prompt in prompts)
    assert one.layer == other.layer == 0
    other.advance()
    one.advance(2)
    for pass_, prompt in ((one, prompts[0]), (other, prompts[1])):
        reference = blend(tiny_model("llama"), prompt, SELECTORS[selector])
        assert_same(finish(pass_), reference.logits, reference.kv, TOLERANCE)


@pytest.mark.parametrize("selector", ["sentences", "early", "union"])
def test_each_layer_is_read_once(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tiny_model("llama")) as engine:
        reads = []
        read_layers = engine.store.read_layers

        def read(names: Sequence[BlockName], layers: range, *options: Any) -> list[Any]:
            reads.extend((name, layer) for name in names for layer in layers)
            return read_layers(names, layers, *options)

        monkeypatch.setattr(engine.store, "read_layers", read)
        engine.prefill(RAG, selector=SELECTORS[selector])
    assert len(reads) == len(set(reads)) == 4 * (2 + 3 + 4)  # blocks of 16 in chunks of 25, 40 and 50


def test_a_chunk_that_is_one_long_sentence_is_split() -> None:
    """A chunk without a sentence end that exceeds the maximum sentence length has several spans."""
    model, long = tiny_model("llama"), chunk(random_ids(150, 30))
    prompt = Prompt.of([B, long, QUESTION])
    with open_engine(model, [B, long], sentence_end_ids=[1]) as engine:
        outcome = run(engine, prompt, Query(0.5))
    assert_as_reference(outcome, blend(model, prompt, Query(0.5), sentence_ends=[1]), TOLERANCE)
