"""Models in a state, or of a size, that cannot be blended: refused when an engine opens, and by `doctor`."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import chunk
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.doctor import diagnose
from parity.scenes import QUESTION, RAG, A, B, C, open_engine, random_ids

SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    attention_dropout=0.3,
)


def tiny(layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL.to_dict() | {"num_hidden_layers": layers})
    return LlamaForCausalLM(config).eval()


def test_a_model_in_training_mode_is_refused_and_not_switched() -> None:
    """A part of it is named, unless it drops nothing."""
    model = tiny().train()
    with pytest.raises(InvalidInputError, match=r"LlamaForCausalLM is in training mode.*call model\.eval\(\) first"):
        BlendEngine(model)
    assert model.training
    diagnosis = diagnose(model)
    assert not diagnosis.blendable and "training mode" in diagnosis.reason
    model.eval()
    model.model.layers[1].mlp.train()
    assert diagnose(model).blendable
    model.model.layers[1].self_attn.train()
    with pytest.raises(InvalidInputError, match=r"^model\.layers\.1\.self_attn of LlamaForCausalLM is in training"):
        BlendEngine(model)


@pytest.mark.may_fail("background work")
def test_nothing_is_stored_once_the_model_is_switched_to_training() -> None:
    model = tiny()
    unseen = chunk(random_ids(21, 4))
    with open_engine(model, capture=True) as engine:
        prompt = replace(RAG, segments=(*RAG.segments[:-1], unseen, QUESTION))
        before = engine.prefill(prompt)
        model.train()
        with pytest.raises(InvalidInputError, match="training mode"):
            engine.warm([unseen])
        again = engine.prefill(prompt)  # the engine's own view of the model keeps the mode in which it was opened
        engine.store_missed(again, text=False)
        engine.flush()
        assert torch.equal(again.logits, before.logits)
        assert {len(manifest.token_ids) for manifest in engine.store.manifests()} == {len(A), len(B), len(C)}
        assert engine.background.failed == 1
        model.eval()
        assert engine.warm([unseen]).stored == 1


def test_a_model_of_one_layer_is_refused_where_a_layer_is_checked() -> None:
    diagnosis = diagnose(tiny(layers=1))
    assert not diagnosis.blendable
    assert diagnosis.reason.startswith("layers: one decoder layer")
    assert diagnose(tiny(layers=2)).blendable
    for selector in ("hkvd", "hybrid"):
        with pytest.raises(InvalidInputError, match=r"the model has one layer only, .*use a selector without check"):
            open_engine(tiny(layers=1), selector=selector)


@pytest.mark.parametrize("selector", ["head", "query"])
def test_a_model_of_one_layer_works_without_check_layers(selector: str) -> None:
    engine = open_engine(tiny(layers=1), selector=selector, recompute_ratio=0.25)
    result = engine.prefill(RAG)
    assert result.report.loaded_tokens == len(A) + len(B) + len(C)
    assert 0 < result.report.recomputed_tokens < result.report.loaded_tokens
    full = engine.prefill(RAG, mode="full")
    everything = engine.prefill(RAG, selector=engine.settings.selector(1.0))
    torch.testing.assert_close(everything.logits, full.logits, atol=1e-5, rtol=1e-4)
