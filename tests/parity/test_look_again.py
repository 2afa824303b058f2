"""The question's second look, at a check layer, equals the dense reference, and the exactness invariants hold."""

from dataclasses import replace

import pytest
import torch

from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.question_selectors import Hybrid
from cacheblend.core.select.selectors import Selector
from families import tiny_model
from parity.scenes import (
    BOS,
    DIVERSE,
    EVERY,
    QUESTION,
    RAG,
    UNSEEN,
    A,
    B,
    C,
    Outcome,
    Recorded,
    assert_as_reference,
    assert_same,
    finish,
    open_engine,
    run,
    stepper,
    text,
    warm_engine,
)
from parity.test_lost_blocks import Loss, LossyStore, names_at
from parity.test_question import ENDS, PROMPTS, TOLERANCE, missed
from reference import Reference, blend, plain_kv

SELECTORS: dict[str, Selector] = {
    "once": Hybrid((2,), (0.1,), early=0.4, pool=4, look_again=True),
    "by attention": Hybrid((2,), (0.15,), early=0.6, pool=1, lead=0, look_again=True),
    "all rows up to there": Hybrid((1,), (0.2,), early=1.0, pool=8, look_again=True),
    "at each check": Hybrid((1, 2, 3), (0.4, 0.2, 0.1), early=0.6, pool=4, look_again=True),
    "behind hops": Hybrid((2,), (0.1,), early=0.4, pool=4, words=0.5, hops=2, look_again=True),
    "behind words": Hybrid((3,), (0.1,), 0.3, lead=0, head_rows=6, words=5.0, hops=2, hop_rows=0, look_again=True),
    "few rows ask": Hybrid((2,), (0.1,), early=0.4, pool=4, question_rows=2, look_again=True),
    "at the last layer": Hybrid((3,), (0.1,), early=0.4, pool=4, look_again=True),
}
ONCE = SELECTORS["once"]
ASKING = len(RAG) // 20
"""Rows of the question, which is longer."""


def layers_behind(selector: Selector, layers: int) -> int:
    """Layers that the question's rows go through, the first look's among them."""
    return layers + sum(layers - check for check in selector.check_layers)


def assert_same_looks(recorded: Recorded, reference: Reference) -> None:
    """At each check the most that any look up to there has found."""
    most: dict[int, float] = {}
    for asked, found in zip(recorded.asked[1:], reference.looks.values(), strict=True):
        most = {p: max(attention, most.get(p, 0.0)) for p, attention in found.items()}
        assert asked.hops is not None
        assert asked.hops.tolist() == pytest.approx([most[p] for p in asked.positions.tolist()], abs=1e-5)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("family", DIVERSE)
def test_every_selector_equals_the_reference(family: str, selector: str) -> None:
    recorded = Recorded(SELECTORS[selector])
    result = warm_engine(family).prefill(RAG, selector=recorded)
    reference = blend(tiny_model(family), RAG, SELECTORS[selector])
    assert_as_reference(Outcome(result, result.report, recorded.kept), reference, TOLERANCE)
    assert list(reference.looks) == list(SELECTORS[selector].check_layers)
    if not SELECTORS[selector].hops:
        assert_same_looks(recorded, reference)
        looks = layers_behind(SELECTORS[selector], len(result.kv))
        assert result.report.question_row_layers == looks * len(reference.question)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("selector", ["once", "at each check", "behind words"])
def test_every_prompt_equals_the_reference(selector: str, prompt: str) -> None:
    """With misses, repeated chunks, text between, without a question, with one of a single row and a long one."""
    model, asked = tiny_model("llama"), PROMPTS[prompt]
    stored = [segment for segment in asked.segments if segment.is_chunk and segment is not UNSEEN]
    with open_engine(model, stored, sentence_end_ids=ENDS) as engine:
        outcome = run(engine, asked, SELECTORS[selector])
    reference = blend(model, asked, SELECTORS[selector], missing=missed(asked), sentence_ends=ENDS)
    assert_as_reference(outcome, reference, TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_behind_an_exact_prefix(family: str) -> None:
    prompt = Prompt.of([text([BOS]), A, B, C, QUESTION])
    with open_engine(tiny_model(family), anchor="bos") as engine:
        outcome = run(engine, prompt, ONCE)
    assert outcome.report.hit_tokens["prefix"] == 1 + len(A)
    assert_as_reference(outcome, blend(tiny_model(family), prompt, ONCE, anchor=[BOS]), TOLERANCE)


def test_what_it_finds_raises_what_was_found_before_and_lowers_nothing() -> None:
    looks = SELECTORS["at each check"]
    first, again = Recorded(replace(looks, look_again=False)), Recorded(looks)
    for recorded in (first, again):
        warm_engine("llama").prefill(RAG, selector=recorded)
    before, behind = first.asked[1], again.asked[1]
    assert before.hops is None and behind.hops is not None and behind.attention is not None
    assert torch.equal(before.positions, behind.positions)
    assert bool((behind.hops > behind.attention).any()) and bool((behind.hops < behind.attention).any())
    assert first.kept != again.kept


@pytest.mark.parametrize("family", EVERY)
def test_full_recompute_equals_full_prefill(family: str) -> None:
    everything = Hybrid((1, 2), (1.0, 1.0), early=1.0, look_again=True)
    outcome = run(warm_engine(family), RAG, everything)
    assert_same(outcome.result, *plain_kv(tiny_model(family), RAG.token_ids), 1e-5)


def test_with_nothing_left_to_choose_from_it_does_not_look() -> None:
    """No candidate is left, or there never was one."""
    engine, none = warm_engine("llama"), Hybrid((2,), (0.0,), early=0.0, look_again=True)
    outcome = run(engine, RAG, none)
    assert outcome.report.question_row_layers == len(outcome.result.kv) * ASKING and not outcome.recomputed
    assert run(engine, Prompt.of([QUESTION]), ONCE).report.question_row_layers == 0


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize("keeps", [True, False], ids=["layers kept", "layers read again"])
@pytest.mark.parametrize("lost_in", ["first look", "second look"])
@torch.no_grad()
def test_a_block_lost_while_it_looks_is_a_miss(lost_in: str, keeps: bool) -> None:
    """Where layers are kept nothing is read for the second look, so nothing can be lost in it."""
    model, store = tiny_model("llama"), LossyStore()
    with open_engine(model, store=store) as engine:
        (name,) = names_at(engine, RAG, 50)
        kv: list[tuple[torch.Tensor, torch.Tensor]] = []

        def take(layer: int, found: LayerKV) -> None:
            del kv[layer:]  # of a try before
            kv.append((found.keys, found.values))

        with stepper(engine, RAG, ONCE, **({} if keeps else {"on_layer": take})) as pass_:
            layers = len(engine.survey.layout.layers)
            pass_.advance(0 if lost_in == "first look" else layers + 2)
            assert pass_.layer == (0 if lost_in == "first look" else 2) and pass_.active_rows == ASKING
            store.losses = [Loss(name, 3)]
            result = finish(pass_)
    is_lost = lost_in == "first look" or not keeps
    assert len(result.report.fallbacks) == is_lost
    reference = blend(model, RAG, ONCE, missing=range(48, 64) if is_lost else ())
    assert result.report.recomputed_tokens == len(reference.recomputed)
    result.kv = result.kv or [LayerKV(*found) for found in kv]
    assert_same(result, reference.logits, reference.kv, TOLERANCE)


@torch.no_grad()
def test_ranks_agree_on_what_each_look_found() -> None:
    combined: list[tuple[str, int]] = []

    def over_ranks(value: torch.Tensor, how: str) -> torch.Tensor:
        combined.append((how, len(value)))
        return value

    finish(stepper(warm_engine("llama"), RAG, ONCE, over_ranks=over_ranks))
    assert [how for how, _ in combined] == ["max", "max", "sum"]
    assert combined[0] == combined[1] == ("max", len(RAG))


@torch.no_grad()
def test_interleaved_passes() -> None:
    """A look keeps no state outside of its own request."""
    engine, prompts, selector = warm_engine("llama"), [RAG, Prompt.of([B, A, C, QUESTION])], SELECTORS["at each check"]
    one, other = (stepper(engine, prompt, selector) for prompt in prompts)
    for _ in range(5):
        other.advance()
        one.advance(2)
    for pass_, prompt in ((one, prompts[0]), (other, prompts[1])):
        reference = blend(tiny_model("llama"), prompt, selector)
        assert_same(finish(pass_), reference.logits, reference.kv, TOLERANCE)
