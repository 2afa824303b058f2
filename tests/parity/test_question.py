"""The question's pass, and hops by the words of spans that it found, equal the dense reference; the exactness
invariants hold."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.core.names import BlockName
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import Selector
from families import tiny_model
from parity.scenes import (
    BOS,
    DIVERSE,
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
from parity.test_lost_blocks import Loss, LossyStore, names_at
from reference import Reference, blend, plain_kv

TOLERANCE = 3e-5
WITH_MORE = [
    *DIVERSE,
    *(f for f in ("gemma2", "phi", "mistral-window", "ministral3", "laguna", "granite") if f in FAMILIES),
]
"""In order: soft-caps; partial rotary; windows in all layers; queries scaled by position; heads per layer; scaling."""
ENDS = tuple(range(3, 512, 7))  # every seventh token ends a sentence
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
HOPS: dict[str, Selector] = {
    "one span": Query(0.2, words=1.0, hops=1, hop_spans=1),
    "two hops": Query(0.2, pool=8, words=1.0, hops=2, hop_spans=2),
    "many spans": Query(0.3, pool=4, lead=0, words=0.5, hops=2, hop_spans=8),
    "rows of spans": Query(0.2, pool=1, words=2.0, hops=1, hop_spans=3),
    "more hops than spans": Query(0.2, pool=100, words=1.0, hops=4, hop_spans=2),
    "few rows ask": Query(0.2, question_rows=3, words=1.0, hops=2),
    "early with a hop": Hybrid((2,), (0.1,), early=0.3, rank="deviation", words=0.5, hops=1),
    "gradual with hops": Hybrid((1, 2, 3), (0.4, 0.2, 0.1), early=0.6, pool=4, words=1.0, hops=2),
    "heads": Query(0.3, pool=4, lead=0, head_rows=6, words=1.0, hops=1),
    "early heads": Hybrid((1, 3), (0.2, 0.1), early=0.4, pool=4, head_rows=8, words=1.0, hops=1),
}
LONG = chunk(random_ids(150, 30))
WHOLE_SUFFIX = {
    "one sentence": Prompt.of([A, chunk(random_ids(3, 31)), chunk(random_ids(1, 32)), QUESTION]),
    "nothing but a chunk and a question": Prompt.of([SYSTEM, A, text(random_ids(4, 33))]),
}

ALL = PROMPTS | WHOLE_SUFFIX
STORED = tuple(dict.fromkeys(each for prompt in ALL.values() for each in prompt.chunks if each is not UNSEEN))


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
def test_attention_and_a_hop_equal_the_reference_for_every_family(family: str) -> None:
    """Windows, sinks, soft-caps, partial rotation, layers of several shapes."""
    selector = HOPS["two hops"]
    recorded = Recorded(selector)
    result = warm_engine(family).prefill(RAG, selector=recorded)
    reference = blend(tiny_model(family), RAG, selector)
    assert_same_attention(recorded, reference)
    assert recorded.kept == reference.recomputed
    assert_same(result, reference.logits, reference.kv, TOLERANCE)
    # the first selection knows what the reference followed, which computes nothing
    assert any(reference.hops) and recorded.asked[0].hop_words is not None
    assert result.report.question_row_layers == len(result.kv) * len(reference.question)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_attention_equals_the_reference_for_every_prompt(family: str, prompt: str) -> None:
    recorded, asked = Recorded(Query(0.1)), PROMPTS[prompt]
    result = warm_engine(family).prefill(asked, selector=recorded)
    report = result.report
    reference = blend(tiny_model(family), asked, Query(0.1), missing=missed(asked))
    assert_same_attention(recorded, reference)
    layers = len(result.kv)
    assert report.question_row_layers == layers * len(reference.question)
    computed = len(result.plan) - len(reference.candidates) + report.recomputed_tokens - result.plan.prefix_length
    assert report.row_layers == (layers - 1) * computed + 1 + report.question_row_layers


@pytest.mark.parametrize(
    ("family", "selector"),
    [
        *product(["llama", "gemma3_text", "gpt_oss", "cohere2", "flint"], SELECTORS),
        *product(["llama", "gemma3_text", "gpt_oss", "deepseek_v3"], HOPS),
    ],
)
def test_every_selector_equals_the_reference(family: str, selector: str) -> None:
    """Without known sentence ends, rows are pooled in spans of fixed length."""
    chosen = (SELECTORS | HOPS)[selector]
    outcome, reference = run(warm_engine(family), RAG, chosen), blend(tiny_model(family), RAG, chosen)
    assert_as_reference(outcome, reference, TOLERANCE)
    assert outcome.report.question_row_layers == len(outcome.result.kv) * len(reference.question)


POOLED: dict[str, Selector] = {
    "sentences": Query(0.2),
    "gradual": Hybrid((1, 2), (0.3, 0.1), early=0.5),
    "hops": Query(0.2, words=1.0, hops=2),
    "gradual with hops": Hybrid((1, 2), (0.3, 0.1), 0.5, words=1.0, hops=1),
    "words and heads": Hybrid((2,), (0.1,), 0.4, lead=0, head_rows=4, words=5.0, hops=2),
}


@pytest.mark.parametrize("prompt", ALL)
@pytest.mark.parametrize("selector", POOLED)
def test_every_prompt_pooled_by_sentences_equals_the_reference(selector: str, prompt: str) -> None:
    """With misses, repeated chunks, text between, without a question, and with sentences cut by a chunk's end."""
    model, asked, pooled = tiny_model("llama"), ALL[prompt], POOLED[selector]
    outcome = run(warm_engine("llama", STORED, sentence_end_ids=ENDS), asked, pooled)
    reference = blend(model, asked, pooled, missing=missed(asked), sentence_ends=ENDS)
    assert_as_reference(outcome, reference, TOLERANCE)


@pytest.mark.parametrize("selector", [Query(0.2), Query(0.2, pool=8, words=1.0, hops=1)], ids=["query", "hops"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_exact_prefix_after_bos(family: str, selector: Selector) -> None:
    """The question attends to an exact prefix, but its rows are not candidates."""
    model, prompt = tiny_model(family), Prompt.of([text([BOS]), A, B, C, QUESTION])
    recorded = Recorded(selector)
    result = warm_engine(family, anchor="bos").prefill(prompt, selector=recorded)
    assert result.report.hit_tokens["prefix"] == 1 + len(A)
    reference = blend(model, prompt, selector, anchor=[BOS])
    assert_same_attention(recorded, reference)
    assert recorded.kept == reference.recomputed
    assert_same(result, reference.logits, reference.kv, TOLERANCE)


@pytest.mark.parametrize("prompt", [Prompt.of([A, QUESTION]), Prompt.of([UNSEEN, QUESTION]), Prompt.of([QUESTION])])
@pytest.mark.parametrize(
    "selector",
    [Query(0.0), Hybrid((1,), (0.0,), early=0.0), Query(0.0, words=1.0, hops=2)],
    ids=["query", "hybrid", "hops"],
)
def test_without_candidates_there_is_no_question_pass(selector: Selector, prompt: Prompt) -> None:
    """Prompts: a chunk directly after its anchor (exact at any ratio), a miss, plain text."""
    outcome = run(warm_engine("llama"), prompt, selector)
    assert outcome.report.question_row_layers == 0
    assert_same(outcome.result, *plain_kv(tiny_model("llama"), prompt.token_ids), 1e-5)


def test_a_long_question_asks_with_its_first_row_and_its_last_rows_alone() -> None:
    plan = warm_engine("llama").runtime.planner.plan(PROMPTS["a long question"], warm_engine("llama").store)
    start, stop = len(plan) - len(LONG_QUESTION), len(plan)
    assert plan.question_rows(64).tolist() == [start, *range(stop - 63, stop)]
    assert plan.question_rows(2).tolist() == [start, stop - 1]
    assert plan.question_rows(90).tolist() == list(range(start, stop))
    # text between them does not change the attention
    middle = [text(random_ids(30, seed)) for seed in (20, 21)]
    asked = []
    for segment in middle:
        recorded = Recorded(Query(0.1, question_rows=5))
        warm_engine("llama").prefill(Prompt.of([B, A, ONE_ROW, segment, QUESTION]), selector=recorded)
        asked.append(recorded.asked[0].attention)
    assert asked[0] is not None and asked[1] is not None
    assert torch.equal(asked[0], asked[1])
    one, other = (run(warm_engine("llama"), Prompt.of([B, A, C, q]), Query(0.1)) for q in (QUESTION, LONG_QUESTION))
    assert one.recomputed != other.recomputed


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


# ---- hops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [[], [1]], ids=["no sentence ends", "none occurs"])
def test_a_chunk_without_sentence_ends_has_several_spans(ends: list[int]) -> None:
    model, prompt = tiny_model("llama"), Prompt.of([B, LONG, A, QUESTION])
    with open_engine(model, [B, LONG, A], sentence_end_ids=ends) as engine:
        for selector in (Query(0.5), Query(0.4, words=1.0, hops=1)):  # LONG exceeds the longest sentence
            outcome = run(engine, prompt, selector)
            reference = blend(model, prompt, selector, sentence_ends=ends)
            assert_as_reference(outcome, reference, TOLERANCE)


def test_a_prompt_shorter_than_a_sentence() -> None:
    """One span holds all candidates: nothing is in front of it, and later hops find none."""
    model, tiny = tiny_model("llama"), chunk(random_ids(5, 34))
    prompt, selector = Prompt.of([SYSTEM, tiny, ONE_ROW]), Query(0.4, words=1.0, hops=3)
    with open_engine(model, [tiny], sentence_end_ids=[1]) as engine:
        outcome = run(engine, prompt, selector)
    reference = blend(model, prompt, selector, sentence_ends=[1])
    assert [len(hop) for hop in reference.hops] == [1, 0, 0]
    assert_as_reference(outcome, reference, TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_rows_that_asked_are_kept_as_they_were_stored(family: str) -> None:
    """A pass writes nothing: with nothing recomputed, all loaded rows are those of the store."""
    outcome = run(warm_engine(family), RAG, Query(0.0, words=1.0, hops=2))
    assert outcome.recomputed == []
    plain = run(warm_engine(family), RAG, Query(0.0))
    for with_hops, without in zip(outcome.result.kv, plain.result.kv, strict=True):
        assert torch.equal(with_hops.keys, without.keys) and torch.equal(with_hops.values, without.values)


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize("keeps", [True, False], ids=["layers kept", "layers read again"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@torch.no_grad()
def test_blocks_lost_behind_the_question_are_misses(family: str, keeps: bool) -> None:
    """A loss where layers are read again for the prefill, and one in the question's pass of the next try."""
    model, store, selector = tiny_model(family), LossyStore(), Query(0.2, pool=8, words=1.0, hops=2)
    with open_engine(model, store=store) as engine:
        first, second = names_at(engine, RAG, 50, 80)
        kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        options = {} if keeps else {"on_layer": lambda layer, found: kv.append((found.keys, found.values))}
        with stepper(engine, RAG, selector, **options) as pass_:
            pass_.advance(len(engine.runtime.survey.layout.layers))  # the question's pass
            assert pass_.layer == 0 and pass_.active_rows > 2
            store.losses = [Loss(first, 0), Loss(second, 0, after=1)]
            result = finish(pass_)
    lost = {True: 0, False: 2}[keeps]
    missing = [*range(48, 64), *range(72, 88)] if lost else []
    assert len(result.report.fallbacks) == lost and result.report.missed_tokens == len(missing)
    reference = blend(model, RAG, selector, missing=missing)
    assert result.report.recomputed_tokens == len(reference.recomputed)
    result.kv = result.kv or [LayerKV(*found) for found in kv]
    assert_same(result, reference.logits, reference.kv, TOLERANCE)


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize("selector", ["two hops", "heads", "gradual with hops"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_block_lost_at_the_start_is_a_miss(layer: int, selector: str) -> None:
    model, store = tiny_model("llama"), LossyStore()
    with open_engine(model, store=store) as engine:
        store.losses = [Loss(names_at(engine, RAG, 50)[0], layer)]
        outcome = run(engine, RAG, HOPS[selector])
    assert len(outcome.report.fallbacks) == 1
    assert_as_reference(outcome, blend(model, RAG, HOPS[selector], missing=range(48, 64)), TOLERANCE)


@torch.no_grad()
def test_ranks_agree_on_what_the_pass_found() -> None:
    """Two ranks that see each other's attention follow the same spans."""
    combined: list[tuple[str, int]] = []

    def over_ranks(value: torch.Tensor, how: str) -> torch.Tensor:
        combined.append((how, len(value)))
        return torch.maximum(value, torch.linspace(0, 1, len(value)))

    engine, selector = warm_engine("llama"), Query(0.2, pool=8, words=1.0, hops=2, hop_spans=1)
    recorded = Recorded(selector)
    finish(stepper(engine, RAG, recorded, over_ranks=over_ranks))
    assert combined == [("max", len(RAG))]
    asked = recorded.asked[0]
    assert asked.attention is not None and asked.hop_words is not None
    assert bool((asked.attention >= (asked.positions / (len(RAG) - 1) - 1e-6)).all())
