"""The exactness invariants, on every family.

r = 1 and exact prefixes equal full prefill; re-positioned keys equal the keys that the model computes there; decoding
equals the model's own; the user's model is not changed; models that cannot be blended are refused.
"""

import copy
import re
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cacheblend.core.config import AnchorKind
from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.core.kernels.rope import reposition_keys, turn_by
from cacheblend.core.plan.prompt import Prompt, part_of, text
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import AllRows, Candidates, Corrected, Head, Hkvd, NoRows, Selector
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.baselines import full_recompute
from families import REFUSED, SMALL, tiny_model
from parity.scenes import (
    BOS,
    DIVERSE,
    EVERY,
    QUESTION,
    RAG,
    SYSTEM,
    A,
    B,
    assert_close,
    assert_same,
    greedy,
    open_engine,
    random_ids,
    run,
    warm_engine,
)
from reference import plain_kv

TOLERANCE = 1e-5
NO_NEGATIVE_POSITIONS = {"ministral3"}  # scales queries by the logarithm of the position
IN_FRONT = {"none": [], "bos": [text([BOS])], "system": [SYSTEM]}


ALL: dict[str, Selector] = {
    "hkvd": Hkvd((1,), (1.0,)),
    "all": AllRows(),
    "query": Query(1.0),
    "hybrid": Hybrid((1, 2), (1.0, 1.0), early=1.0),
    "query with hops": Query(1.0, words=1.0, hops=2),
    "hybrid with hops": Hybrid((1, 2), (1.0, 1.0), early=1.0, words=1.0, hops=1),
    "corrected": Corrected(Head(1.0), 1.0),
}


@pytest.mark.parametrize("selector", ALL)
@pytest.mark.parametrize("family", EVERY)
def test_full_recompute_equals_full_prefill(family: str, selector: str) -> None:
    """The question's passes leave nothing behind."""
    engine = warm_engine(family)
    if ALL[selector].correction and any(each is not None for each in engine.runtime.view.latent):
        pytest.skip("one latent for keys and values")
    outcome = run(engine, RAG, ALL[selector])
    assert outcome.report.hit_tokens["memory"] == 115
    assert len(outcome.recomputed) == 115
    assert_same(outcome.result, *plain_kv(tiny_model(family), RAG.token_ids), TOLERANCE)


@pytest.mark.parametrize(
    ("family", "anchor"),
    [
        *product(DIVERSE, ["none"]),
        *(pytest.param(*each.values, "none", marks=each.marks) for each in EVERY if each not in DIVERSE),
        *product(["llama", "gemma3_text", "gpt_oss", "deepseek_v3"], ["bos", "system"]),
    ],
)
def test_a_chunk_directly_after_its_anchor_is_exact_at_any_ratio(family: str, anchor: AnchorKind) -> None:
    prompt = Prompt.of([*IN_FRONT[anchor], A, QUESTION])
    engine = warm_engine(family) if anchor == "none" else warm_engine(family, anchor=anchor)
    outcome = run(engine, prompt, NoRows())
    assert outcome.report.hit_tokens == {"prefix": len(prompt) - len(QUESTION), "memory": 0, "disk": 0}
    assert outcome.report.row_layers < len(prompt) * len(outcome.result.kv) / 3
    assert_same(outcome.result, *plain_kv(tiny_model(family), prompt.token_ids), TOLERANCE)


@pytest.mark.parametrize("family", EVERY)
def test_repositioned_keys_equal_the_keys_computed_at_the_target_position(family: str) -> None:
    engine, model = warm_engine(family), tiny_model(family)
    ids = B.token_ids
    far = min(engine.runtime.survey.length_limit or 4096, engine.runtime.survey.context_length or 4096) - len(ids)
    before = 0 if family in NO_NEGATIVE_POSITIONS else -5
    at = {position: plain_kv(model, ids, shift=position)[1] for position in (0, 13, far, before)}
    for old, new in [(0, 13), (13, 0), (0, far), (far, 0), (far, 13), (0, before), (before, far)]:
        # The model's own angles are fp32: at position p they are off by p / 2 ** 24 radians.
        tolerance = 1e-5 + 4 * max(abs(old), abs(new)) * 2**-24
        for layer, rotation in enumerate(engine.runtime.survey.rotations):
            moved, values = at[old][layer]
            if rotation is not None:
                moved = reposition_keys(moved, turn_by(rotation, torch.full((len(ids),), new - old)))
            assert_close(moved, at[new][layer][0], tolerance, f"keys of layer {layer} moved {old} -> {new}")
            assert_close(values, at[new][layer][1], tolerance, f"values of layer {layer} at {old} and {new}")


@dataclass(frozen=True)
class KeepAll(Selector):
    """Keeps every row and records the deviations; unlike `Hkvd`, it may check layer 0."""

    seen: dict[int, torch.Tensor]
    check_layers: tuple[int, ...] = (0, 1)

    def select(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.layer is not None and candidates.deviation is not None
        self.seen[candidates.layer] = candidates.deviation
        return torch.ones_like(candidates.deviation, dtype=torch.bool)


@pytest.mark.parametrize("family", EVERY)
def test_deviation_is_zero_in_layer_0_only_and_decoding_from_the_fused_cache_equals_generate(family: str) -> None:
    deviations: dict[int, torch.Tensor] = {}
    result = warm_engine(family).prefill(RAG, selector=KeepAll(deviations))
    size = [float(sum(part.pow(2).sum(dim=(0, 2)).max() for part in result.kv[layer])) for layer in (0, 1)]
    assert len(deviations[0]) == 115
    assert float(deviations[0].max()) <= 1e-9 * size[0]
    assert float(deviations[1].max()) > 1e-4 * size[1]
    answer = warm_engine(family).generate(RAG, SamplingParams(max_new_tokens=6, ignore_eos=True), ratio=1.0)
    assert answer.token_ids == greedy(tiny_model(family), RAG, 6)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe", "gemma4_text", "deepseek_v3"])
def test_the_users_model_is_not_changed(family: str) -> None:
    model = copy.deepcopy(tiny_model(family))
    state = copy.deepcopy(model.config.to_dict())
    implementation = model.config._attn_implementation
    modules = {name: (type(module), id(module)) for name, module in model.named_modules()}
    ids = torch.tensor([RAG.token_ids.tolist()])
    with torch.no_grad():
        before = model(ids).logits
        with open_engine(model) as engine:
            engine.prefill(RAG)
            during = model(ids).logits
        after = model(ids).logits
    assert torch.equal(before, during) and torch.equal(before, after)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == state
    assert {name: (type(module), id(module)) for name, module in model.named_modules()} == modules


@pytest.mark.parametrize("family", REFUSED, ids=str)
def test_unsupported_models_are_refused_with_the_reason(family) -> None:
    with pytest.raises(ModelNotBlendableError) as refusal:
        BlendEngine(tiny_model(family.name), store="memory")
    assert re.search(family.reason, str(refusal.value)), str(refusal.value)


def test_what_a_setting_makes_inexact_is_refused() -> None:
    """Attention that is not causal, a soft cap that the plain attention ignores, a prompt beyond LongRoPE's switch."""
    config = AutoConfig.for_model("gemma3_text", **SMALL, head_dim=16, use_bidirectional_attention=True)
    with pytest.raises(ModelNotBlendableError, match="not causal"):
        BlendEngine(AutoModelForCausalLM.from_config(config).eval(), store="memory")
    engine = open_engine(tiny_model("phi3-longrope"), [A])
    with pytest.raises(InvalidInputError, match=r"LongRoPE's switch, .* at 1024; use fewer"):
        engine.prompt(Prompt.of([A, text(random_ids(1000, 3))]))
    model = copy.copy(tiny_model("gemma2"))
    model.config = copy.deepcopy(model.config)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ModelNotBlendableError, match='attn_implementation="eager"'):
        BlendEngine(model, store="memory")


# ---- prompts whose first passage shares a token with the text in front of it -----------------------------------


FRONT, ONE = random_ids(40, 80), SamplingParams(max_new_tokens=1, ignore_eos=True)
"""Blocks of 16, 16 and 8 tokens."""


def asked(kept: int, other: int) -> Prompt:
    """A prompt that leaves its front behind so many tokens, for tokens that depend on the passage."""
    edge, first = random_ids(3, other), part_of(A.token_ids, 1, len(A) - 1)
    return Prompt.of([text([*FRONT[:kept], *edge]), first, B, QUESTION], front=[text(FRONT)])


@pytest.mark.parametrize("anchor", ["none", "system"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "lfm2-tail"])
def test_the_front_is_shared_as_far_as_it_is_equal(family: str, anchor: str) -> None:
    """From the block of another prompt that goes on there, and from then on from a block that ends there; a state is
    known at the end of a block only."""
    has_states = family != "llama"
    with open_engine(tiny_model(family), [], anchor=anchor, capture=True) as engine:  # type: ignore[arg-type]
        engine.generate(Prompt.of([text(FRONT), A, B, QUESTION]), ONE)
        assert engine.flush(60)
        for kept, other in ((37, 81), (37, 82), (37, 82), (34, 83)):
            prompt = asked(kept, other)
            outcome = run(engine, prompt, AllRows())
            assert outcome.report.hit_tokens["prefix"] == kept or (has_states and other != 82)
            torch.testing.assert_close(
                outcome.result.logits, full_recompute(engine, prompt).logits, rtol=1e-4, atol=3e-5
            )
            assert outcome.report.missed_tokens == 0
            engine.generate(prompt, ONE)
            assert engine.flush(60)
