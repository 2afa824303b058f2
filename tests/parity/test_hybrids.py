"""Models with recurrent layers beside attention: exact prefixes go on from snapshots of their states, r = 1 equals full
prefill, and where attention layers follow the last recurrent one, blends equal the reference.

Who is there at the same time: other prompts in the same layer, answers that decode together. Who wants it to fail: a
prefix that is another one, a state that is ignored, rows dropped in front of a state. What is huge or empty: prompts
that end at a snapshot, one row, states larger than the KV between them.
"""

import copy
import random
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from cacheblend.core.config import AnchorKind
from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selectors import AllRows, Gradual, Head, Hkvd, Late, NoRows, RandomRows
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.baselines import finish, full_recompute, fused, prefix_caching
from cacheblend.engines.hf.recurrent import LayerKinds, StateTap, kv_of_cache, whole_cache
from cacheblend.engines.hf.survey import survey_model
from campaign import rotating
from families import HYBRID, tiny_model
from parity.scenes import (
    BOS,
    QUESTION,
    RAG,
    SYSTEM,
    A,
    B,
    C,
    Outcome,
    assert_as_reference,
    assert_close,
    greedy,
    open_engine,
    random_ids,
    run,
)
from reference import blend, plain_kv

TOLERANCE = 3e-5
FAMILIES = [family.name for family in HYBRID]
CORE = ["jamba", "qwen3_next", "kimi_linear", "lfm2-tail"]
STEPPED = [name for name in FAMILIES if name == "jamba"]
TAILS = [name for name in FAMILIES if name.endswith("-tail")]
ONE_PIECE = [name for name in FAMILIES if name not in STEPPED]
LONG = chunk(random_ids(170, 40))
ANSWER, SHORT = (SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (6, 2))


@cache
def warm(family: str) -> BlendEngine:
    return open_engine(tiny_model(family), [A, B, C, LONG])


@torch.no_grad()
def assert_full(outcome: Outcome, engine: BlendEngine, prompt: Prompt, tolerance: float = TOLERANCE) -> None:
    """Logits, KV of layers with attention, and states of recurrent layers are those of the model's own forward."""
    model: Any = engine.model
    cache = whole_cache(model, engine.runtime.survey.kinds)
    ids = torch.tensor([prompt.token_ids.tolist()])
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
    assert_close(outcome.result.logits, logits, tolerance, "logits")
    for layer, kv in zip(engine.runtime.survey.kinds.kv_layers, kv_of_cache(model, cache), strict=True):
        for mine, theirs in zip(outcome.result.kv[layer], kv, strict=True):
            assert_close(mine, theirs, tolerance, f"KV of layer {layer}")
    for layer, state in outcome.result.states.last.items():
        for (kind, number), mine in state.items():
            theirs = getattr(cache.layers[layer], f"{kind}_states")[number]
            assert_close(mine, theirs, tolerance, f"{kind} state of layer {layer}")


@pytest.mark.parametrize("family", rotating(FAMILIES, core=CORE))
def test_full_recompute_equals_full_prefill_and_decoding_generate(family: str) -> None:
    for selector in (Hkvd((1,), (1.0,)), AllRows(), Gradual(1.0)):
        assert_full(run(warm(family), RAG, selector), warm(family), RAG)
    for prompt in (RAG, Prompt.of([LONG, QUESTION])):
        answer = warm(family).generate(prompt, ANSWER, ratio=1.0)
        assert answer.token_ids == greedy(tiny_model(family), prompt, 6)


@pytest.mark.parametrize("family", ONE_PIECE)
def test_a_leading_chunk_goes_on_from_its_snapshot(family: str) -> None:
    """Behind the snapshot a loaded chunk would give another state: all rows are computed up to the last recurrent."""
    prompt = Prompt.of([A, QUESTION])
    outcome = run(warm(family), prompt, NoRows())
    assert outcome.report.hit_tokens == {"prefix": 40, "memory": 0, "disk": 0}
    assert outcome.report.row_layers <= len(QUESTION) * warm(family).runtime.survey.num_layers
    assert_full(outcome, warm(family), prompt)
    prompt = Prompt.of([A, C, SYSTEM, B, QUESTION])
    outcome = run(warm(family), prompt, AllRows())
    assert outcome.report.hit_tokens["prefix"] == 40
    assert outcome.report.saveable_share == warm(family).runtime.survey.kinds.saveable
    if family not in TAILS:
        assert outcome.report.left_out_tokens == len(B) + len(C) and outcome.report.missed_tokens == 0
    assert_full(outcome, warm(family), prompt)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in TAILS])
def test_nothing_is_approximate_where_nothing_can_be_saved(family: str) -> None:
    """A ratio has no effect, and the report says that no row could be left out."""
    for ratio in (0.0, 0.15, 1.0):
        outcome = run(warm(family), RAG, Hkvd((1,), (ratio,)))
        assert outcome.report.saveable_share == 0 and outcome.report.recomputed_tokens == 0
        assert outcome.report.loaded_tokens == 0 and outcome.report.selector == ""
        assert_full(outcome, warm(family), RAG)


@pytest.mark.parametrize("family", STEPPED)
def test_a_layer_that_goes_on_row_by_row_does_so_behind_long_prefixes_only(family: str) -> None:
    assert warm(family).runtime.survey.kinds.stepped == {0, 2}
    for prompt, prefix in ((Prompt.of([LONG, QUESTION]), 170), (Prompt.of([A, QUESTION]), 0)):
        outcome = run(warm(family), prompt, NoRows())
        assert outcome.report.hit_tokens["prefix"] == prefix
        assert_full(outcome, warm(family), prompt)


@pytest.mark.parametrize("family", TAILS)
def test_rows_dropped_behind_the_last_recurrent_layer_equal_the_reference(family: str) -> None:
    prompts, selectors = (
        (RAG, Prompt.of([A, B, SYSTEM, C, QUESTION])),
        (NoRows(), Head(0.3), RandomRows(0.3), AllRows()),
    )
    for prompt, selector in product(prompts, selectors):
        outcome = run(warm(family), prompt, selector)
        reference = blend(tiny_model(family), prompt, selector)
        result = outcome.result
        result.kv = [result.kv[layer] for layer in warm(family).runtime.survey.kinds.kv_layers]
        assert_as_reference(outcome, reference, TOLERANCE)
    # layer 2 is the second with attention, which the reference counts as its layer 1
    checks, of_reference = Hkvd((2, 3), (0.5, 0.25)), Hkvd((1, 2), (0.5, 0.25))
    outcome = run(warm(family), RAG, checks)
    outcome.result.kv = outcome.result.kv[1:]
    assert_as_reference(outcome, blend(tiny_model(family), RAG, of_reference), TOLERANCE)
    assert outcome.report.saveable_share == 0.5


def test_checks_that_fall_together_keep_what_the_last_of_them_does() -> None:
    late = Late.of(Hkvd((1, 2, 3, 4), (0.5, 0.4, 0.3, 0.2)), [3, 6])
    assert late.check_layers == (3, 6)
    assert isinstance(late, Late) and late.moved == ((3, 3), (6, 4))
    assert (late.name, late.share, late.measure, late.at_start) == ("hkvd", 0.2, "kv", False)
    kept = Hkvd((1,), (0.5,))
    assert Late.of(kept, [1, 2]) is kept
    nowhere = Late.of(kept, [])
    assert nowhere.check_layers == () and not nowhere.at_start


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "falcon_h1", "nemotron_h", "lfm2"])
def test_the_baselines_decode_from_the_states_too(family: str) -> None:
    engine, prompt = warm(family), Prompt.of([LONG, QUESTION])
    expected = greedy(engine.model, prompt, 6)
    for first in (full_recompute(engine, prompt), prefix_caching(engine, prompt), fused(engine, prompt, AllRows())):
        assert finish(engine, prompt, first, ANSWER)[1] == expected
    report = prefix_caching(engine, prompt).report
    assert report is not None and report.hit_tokens["prefix"] == 170


@pytest.mark.parametrize("anchor", ["none", "bos", "system"])
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid"])
def test_a_chunk_behind_its_anchor_is_a_prefix(family: str, anchor: AnchorKind) -> None:
    in_front: list[Segment] = {"none": [], "bos": [text([BOS])], "system": [SYSTEM]}[anchor]
    prompt = Prompt.of([*in_front, A, B, QUESTION])
    with open_engine(tiny_model(family), [A, B], anchor=anchor) as engine:
        outcome = run(engine, prompt, NoRows())
        assert outcome.report.hit_tokens["prefix"] == len(A) + sum(map(len, in_front))
        assert_full(outcome, engine, prompt)
        other = Prompt.of([text(random_ids(9, 77)), A, QUESTION])  # another prefix: the same chunk, another state
        outcome = run(engine, other, NoRows())
        assert outcome.report.hit_tokens["prefix"] == 0
        assert_full(outcome, engine, other)


@pytest.mark.parametrize("seed", rotating(range(3), core=[0]))
@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "falcon_h1", "lfm2-tail", "jamba"])
def test_random_prompts(family: str, seed: int) -> None:
    """Blocks, tiles and prompts of random sizes; each prompt again once what it missed is stored."""
    rng = random.Random(f"{family} {seed}")
    settings = {"block_size": rng.choice([7, 16, 64]), "tile_rows": rng.choice([5, 32, 1000])}
    pieces = [random_ids(rng.choice([1, 2, 15, 16, 17, 40, 90]), 100 * seed + n) for n in range(4)]
    anchor: AnchorKind = rng.choice(["none", "bos", "system"])
    with open_engine(tiny_model(family), [], anchor=anchor, capture=True, **settings) as engine:
        for _ in range(3):
            made: list[Segment] = [text([BOS])] if anchor == "bos" else []
            made += [rng.choice([chunk, text])(rng.choice(pieces)) for _ in range(rng.randint(1, 4))]
            prompt = Prompt.of(made)
            for _ in range(2):
                outcome = run(engine, prompt, AllRows())
                assert_full(outcome, engine, prompt)
                assert engine.generate(prompt, SHORT, ratio=1.0).token_ids == greedy(engine.model, prompt, 2)
                assert engine.flush(60)


def test_a_prefix_grows_turn_by_turn() -> None:
    """The plain text in front of the first chunk is stored with its states, and found by the next turn."""
    system, turn = text(random_ids(50, 60)), text(random_ids(37, 61))
    with open_engine(tiny_model("qwen3_next"), [], capture=True) as engine:
        for prompt, prefix in (
            (Prompt.of([system, A, QUESTION]), 0),
            (Prompt.of([system, B, QUESTION]), 50),
            (Prompt.of([system, turn, B, QUESTION]), 50),
            (Prompt.of([system, turn, C, QUESTION]), 87),
            (Prompt.of([text(system.token_ids[:40].tolist()), C, QUESTION]), 0),  # 16 + 16 + 8: other block, no end
        ):
            outcome = run(engine, prompt, AllRows())
            assert outcome.report.hit_tokens["prefix"] == prefix
            assert_full(outcome, engine, prompt)
            engine.generate(prompt, ANSWER)
            assert engine.flush(60)


def test_a_state_that_is_ignored_is_noticed() -> None:
    """A layer that goes on from nothing must not pass for one that goes on from its state."""
    model = copy.deepcopy(tiny_model("lfm2"))
    whole = type(model.model.layers[0].conv).forward

    def forgetful(self: Any, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
        for tap in named.values():
            if isinstance(tap, StateTap):
                tap.state.clear()
        return whole(self, hidden_states, **named)

    class Forgetful(type(model.model.layers[0].conv)):  # type: ignore[misc]
        forward = forgetful

    model.model.layers[2].conv.__class__ = Forgetful
    with pytest.raises(ModelNotBlendableError, match=r"layer 2 .* do not go on from it"):
        survey_model(model)


def test_half_precision_finds_the_same_layers() -> None:
    """A state too small to be told from rounding in a few rows is one nevertheless."""
    for family in FAMILIES:
        kinds = warm(family).runtime.survey.kinds
        model = tiny_model(family, torch.bfloat16)
        half = survey_model(model).kinds
        assert (half.kv_layers, set(half.states), half.stepped) == (kinds.kv_layers, set(kinds.states), kinds.stepped)


def test_what_can_be_saved() -> None:
    """Of the layouts of well-known models, by their real numbers of layers."""
    qwen3_next = LayerKinds(48, tuple(range(3, 48, 4)), dict.fromkeys(set(range(48)) - set(range(3, 48, 4)), ()))
    jamba = LayerKinds(32, tuple(range(4, 32, 8)), dict.fromkeys(set(range(32)) - set(range(4, 32, 8)), ()))
    assert (qwen3_next.saveable, jamba.saveable) == (0, 0)
    late = LayerKinds(40, tuple(range(20, 40)), dict.fromkeys(range(20), ()))
    assert (late.first_to_drop, late.last_to_mix, late.saveable) == (20, 39, 19 / 40)
    assert len(plain_kv(tiny_model("lfm2-tail"), RAG.token_ids)[1]) == 3  # the reference reads layers with attention


def test_what_does_not_work_is_refused_by_name() -> None:
    engine = warm("lfm2")
    with pytest.raises(InvalidInputError, match=r"selector 'query' asks the question's rows .* layer 0 .* use hkvd"):
        engine.prefill(RAG, selector=Query(0.2))
    with pytest.raises(InvalidInputError, match=r"loading controller .* layer 0 of this model keeps a state"):
        open_engine(tiny_model("lfm2"), [], cost_model="costs.json")
    assert engine.generate(RAG, ANSWER).token_ids == greedy(engine.model, RAG, 6)
