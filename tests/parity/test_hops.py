"""Spans that the question found ask in turn as in the dense reference, and the exactness invariants hold."""

import pytest
import torch

from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import Selector
from families import tiny_model
from parity.scenes import (
    BOS,
    EVERY,
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
    run,
    stepper,
    warm_engine,
)
from parity.test_lost_blocks import Loss, LossyStore, names_at
from parity.test_question import ENDS, ONE_ROW, PROMPTS, TOLERANCE, WITH_MORE, missed
from reference import Reference, blend, plain_kv

SELECTORS: dict[str, Selector] = {
    "one span": Query(0.2, hops=1, hop_spans=1),
    "two spans": Query(0.2, hops=1),
    "two hops": Query(0.2, pool=8, hops=2, hop_spans=2),
    "many spans": Query(0.3, pool=4, lead=0, hops=2, hop_spans=8),
    "rows": Query(0.2, pool=1, hops=1, hop_spans=3),
    "words": Query(0.2, words=1.0, hops=1, hop_spans=1),
    "more hops than spans": Query(0.2, pool=100, hops=4, hop_spans=2),
    "few rows ask": Query(0.2, question_rows=3, hops=2, hop_rows=3),
    "words alone": Query(0.2, pool=8, words=1.0, hops=2, hop_rows=0),
    "few rows of a span": Query(0.2, pool=16, words=1.0, hops=1, hop_rows=2),
    "early": Hybrid((2,), (0.1,), early=0.3, rank="deviation", words=0.5, hops=1),
    "gradual": Hybrid((1, 2, 3), (0.4, 0.2, 0.1), early=0.6, pool=4, hops=2),
    "heads": Query(0.3, pool=4, lead=0, head_rows=6, words=1.0, hops=1),
    "early heads": Hybrid((1, 3), (0.2, 0.1), early=0.4, pool=4, head_rows=8, words=1.0, hops=1, hop_rows=0),
    "early by words": Hybrid((2,), (0.1,), early=0.3, pool=4, words=0.5, hops=2, hop_rows=0),
}
LONG = chunk(random_ids(150, 30))
WHOLE_SUFFIX = {
    "a question of one row": PROMPTS["a question of one row"],
    "one sentence": Prompt.of([A, chunk(random_ids(3, 31)), chunk(random_ids(1, 32)), QUESTION]),
    "nothing but a chunk and a question": Prompt.of([SYSTEM, A, text(random_ids(4, 33))]),
}


def assert_same_hops(recorded: Recorded, reference: Reference, layers: int, cost: int) -> None:
    """The first selection knows what the reference found, and the cost is what asked."""
    assert reference.hops and any(reference.hops)
    asked = recorded.asked[0]
    assert asked.hops is not None and float(asked.hops.max()) > 0 and asked.hop_words is not None
    rows = [len({row for group in hop for row in group}) for hop in reference.hops]
    assert cost == layers * (len(reference.question) + sum(rows))


@pytest.mark.parametrize("family", WITH_MORE)
def test_a_hop_equals_the_reference_for_every_family(family: str) -> None:
    """Windows, sinks, soft-caps, partial rotation, layers of several shapes."""
    selector = SELECTORS["two hops"]
    recorded = Recorded(selector)
    result = warm_engine(family).prefill(RAG, selector=recorded)
    reference = blend(tiny_model(family), RAG, selector)
    assert recorded.kept == reference.recomputed
    assert_same(result, reference.logits, reference.kv, TOLERANCE)
    assert_same_hops(recorded, reference, len(result.kv), result.report.question_row_layers)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_every_selector_equals_the_reference(family: str, selector: str) -> None:
    outcome = run(warm_engine(family), RAG, SELECTORS[selector])
    reference = blend(tiny_model(family), RAG, SELECTORS[selector])
    assert_as_reference(outcome, reference, TOLERANCE)
    rows = sum(len({row for group in hop for row in group}) for hop in reference.hops)
    assert outcome.report.question_row_layers == len(outcome.result.kv) * (len(reference.question) + rows)


@pytest.mark.parametrize("prompt", [*PROMPTS, *WHOLE_SUFFIX])
@pytest.mark.parametrize("selector", ["sentences", "gradual", "words and heads"])
def test_every_prompt_pooled_by_sentences_equals_the_reference(selector: str, prompt: str) -> None:
    """With misses, repeated chunks, text between, without a question, and with sentences cut by a chunk's end."""
    model, asked = tiny_model("llama"), (PROMPTS | WHOLE_SUFFIX)[prompt]
    pooled = {
        "sentences": Query(0.2, hops=2),
        "gradual": Hybrid((1, 2), (0.3, 0.1), 0.5, words=1.0, hops=1),
        "words and heads": Hybrid((2,), (0.1,), 0.4, lead=0, head_rows=4, words=5.0, hops=2, hop_rows=0),
    }[selector]
    stored = [segment for segment in asked.segments if segment.is_chunk and segment is not UNSEEN]
    with open_engine(model, stored, sentence_end_ids=ENDS) as engine:
        outcome = run(engine, asked, pooled)
    reference = blend(model, asked, pooled, missing=missed(asked), sentence_ends=ENDS)
    assert_as_reference(outcome, reference, TOLERANCE)


@pytest.mark.parametrize("ends", [[], [1]], ids=["no sentence ends", "none occurs"])
def test_a_chunk_without_sentence_ends_is_asked_in_spans(ends: list[int]) -> None:
    """A span longer than the rows that may ask is represented by its first row and its last ones."""
    model, prompt = tiny_model("llama"), Prompt.of([B, LONG, A, QUESTION])
    selector = Query(0.4, hops=1)
    with open_engine(model, [B, LONG, A], sentence_end_ids=ends) as engine:
        outcome = run(engine, prompt, selector)
    reference = blend(model, prompt, selector, sentence_ends=ends)
    assert_as_reference(outcome, reference, TOLERANCE)
    assert all(len(group) <= len(prompt) // 20 for hop in reference.hops for group in hop)
    assert any(max(group) - min(group) >= len(group) for hop in reference.hops for group in hop)


def test_a_prompt_shorter_than_a_sentence() -> None:
    """One span holds all candidates: nothing is in front of it, and two rows ask."""
    model, tiny = tiny_model("llama"), chunk(random_ids(5, 34))
    prompt, selector = Prompt.of([SYSTEM, tiny, ONE_ROW]), Query(0.4, hops=3)
    with open_engine(model, [tiny], sentence_end_ids=[1]) as engine:
        outcome = run(engine, prompt, selector)
    reference = blend(model, prompt, selector, sentence_ends=[1])
    assert reference.hops == [[[7, 11]], [], []]
    assert_as_reference(outcome, reference, TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_exact_prefix_after_bos(family: str) -> None:
    """Spans attend to an exact prefix, but its rows are not candidates."""
    model, prompt = tiny_model(family), Prompt.of([text([BOS]), A, B, C, QUESTION])
    selector = Query(0.2, pool=8, hops=1)
    with open_engine(model, anchor="bos") as engine:
        outcome = run(engine, prompt, selector)
    assert outcome.report.hit_tokens["prefix"] == 1 + len(A)
    assert_as_reference(outcome, blend(model, prompt, selector, anchor=[BOS]), TOLERANCE)


@pytest.mark.parametrize("prompt", [Prompt.of([SYSTEM, UNSEEN, QUESTION]), Prompt.of([QUESTION])])
def test_if_all_rows_are_misses_nothing_is_asked(prompt: Prompt) -> None:
    outcome = run(warm_engine("llama"), prompt, Query(0.0, hops=2))
    assert outcome.report.question_row_layers == 0
    assert_same(outcome.result, *plain_kv(tiny_model("llama"), prompt.token_ids), 1e-5)


@pytest.mark.parametrize("selector", [Query(1.0, hops=2), Hybrid((1, 2), (1.0, 1.0), early=1.0, hops=1)])
@pytest.mark.parametrize("family", EVERY)
def test_full_recompute_equals_full_prefill(family: str, selector: Selector) -> None:
    outcome = run(warm_engine(family), RAG, selector)
    assert_same(outcome.result, *plain_kv(tiny_model(family), RAG.token_ids), 1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_rows_that_asked_are_kept_as_they_were_stored(family: str) -> None:
    """A pass writes nothing: with nothing recomputed, all loaded rows are those of the store."""
    outcome = run(warm_engine(family), RAG, Query(0.0, hops=2))
    assert outcome.recomputed == []
    plain = run(warm_engine(family), RAG, Query(0.0))
    for with_hops, without in zip(outcome.result.kv, plain.result.kv, strict=True):
        assert torch.equal(with_hops.keys, without.keys) and torch.equal(with_hops.values, without.values)


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize("keeps", [True, False], ids=["layers kept", "layers read again"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@torch.no_grad()
def test_blocks_lost_while_spans_are_asked_are_misses(family: str, keeps: bool) -> None:
    """A loss in the hop's pass, where layers are read again for it, and one in the question's pass of the next try."""
    model, store, selector = tiny_model(family), LossyStore(), Query(0.2, pool=8, words=1.0, hops=2)
    with open_engine(model, store=store) as engine:
        first, second = names_at(engine, RAG, 50, 80)
        kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        options = {} if keeps else {"on_layer": lambda layer, found: kv.append((found.keys, found.values))}
        with stepper(engine, RAG, selector, **options) as pass_:
            pass_.advance(len(engine.survey.layout.layers))  # the question's pass
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
@pytest.mark.parametrize("selector", ["two hops", "words", "words alone", "heads", "gradual"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_block_lost_at_the_start_is_a_miss(layer: int, selector: str) -> None:
    model, store = tiny_model("llama"), LossyStore()
    with open_engine(model, store=store) as engine:
        store.losses = [Loss(names_at(engine, RAG, 50)[0], layer)]
        outcome = run(engine, RAG, SELECTORS[selector])
    assert len(outcome.report.fallbacks) == 1
    assert_as_reference(outcome, blend(model, RAG, SELECTORS[selector], missing=range(48, 64)), TOLERANCE)


@torch.no_grad()
def test_ranks_agree_on_what_each_pass_found() -> None:
    """Two ranks that see each other's attention ask the same spans, so each pass is combined before the next."""
    combined: list[tuple[str, int]] = []

    def over_ranks(value: torch.Tensor, how: str) -> torch.Tensor:
        combined.append((how, len(value)))
        return torch.maximum(value, torch.linspace(0, 1, len(value)))

    engine, selector = warm_engine("llama"), Query(0.2, pool=8, hops=2, hop_spans=1)
    recorded = Recorded(selector)
    finish(stepper(engine, RAG, recorded, over_ranks=over_ranks))
    assert combined == [("max", len(RAG))] * 3
    asked = recorded.asked[0]
    assert asked.attention is not None and asked.hops is not None
    assert bool((torch.minimum(asked.attention, asked.hops) >= (asked.positions / (len(RAG) - 1) - 1e-6)).all())


@torch.no_grad()
def test_interleaved_passes() -> None:
    """Hops keep no state outside their own request."""
    engine, prompts, selector = warm_engine("llama"), [RAG, Prompt.of([A, C, QUESTION])], SELECTORS["two hops"]
    one, other = (stepper(engine, prompt, selector) for prompt in prompts)
    for _ in range(3):
        other.advance()
        one.advance(2)
    for pass_, prompt in ((one, prompts[0]), (other, prompts[1])):
        reference = blend(tiny_model("llama"), prompt, selector)
        assert_same(finish(pass_), reference.logits, reference.kv, TOLERANCE)
