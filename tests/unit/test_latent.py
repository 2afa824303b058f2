"""Kept vectors in keys and values of equal width: nothing is copied, mixed up or attended to in another way."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.core.kernels import attention as attention_kernels
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.kv_placement import Piece, Placement, place
from cacheblend.core.kernels.latent import attended, halves, joined, parts
from cacheblend.core.kernels.operations import attend_last, attend_rows
from cacheblend.core.kernels.rope import KeyRotation, reposition_keys, turn_by
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.latent import LatentTap, attend_absorbed, latent_shape
from cacheblend.engines.hf.model_loader import expected_layout
from families import BLENDABLE, LATENT, SMALL, tiny_model
from parity.scenes import RAG, open_engine

HAVE_LATENTS = [family.name for family in BLENDABLE if "kv_lora_rank" in family.overrides]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_halves_and_parts_are_opposites_and_joined_without_a_copy() -> None:
    for rotary, rank in ((8, 16), (0, 6), (2, 2), (64, 512), (10, 2)):
        rotated, latent = drawn(1, 5, rotary), drawn(1, 5, rank, seed=1)
        keys, values = halves(rotated, latent)
        assert keys.shape == values.shape == (1, 5, (rotary + rank) // 2)
        for found, given in zip(parts(keys.clone(), values.clone(), rotary), (rotated, latent), strict=True):
            assert torch.equal(found, given)
    whole = drawn(1, 9, 24)
    keys, values = (each[:, 2:7] for each in whole.chunk(2, dim=-1))
    kept = joined(keys, values)
    assert torch.equal(kept, whole[:, 2:7]) and kept.data_ptr() == keys.data_ptr()
    for one, other in ((values, keys), (keys, values.clone()), (keys, whole[:, 3:8, 12:])):  # order, storage, rows
        assert torch.equal(joined(one, other), torch.cat([one, other], -1))
    keys, values = drawn(2, 3, 4), drawn(2, 3, 4, seed=1)
    found = attended(keys, values, AttentionSpec(1.0))
    assert found[0] is keys and found[1] is values
    with pytest.raises(InvalidInputError, match="do not fit together"):
        spec = AttentionSpec(1.0, is_latent=True)
        attend_rows(drawn(4, 2, 12), drawn(1, 9, 12), drawn(1, 9, 12), torch.tensor([1, 2]), spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_latents_is_that_of_one_shared_head(window: int | None, dtype: torch.dtype) -> None:
    query, kept = drawn(4, 3, 24).to(dtype), drawn(1, 9, 24, seed=1).to(dtype)
    positions, spec = torch.tensor([1, 4, 8]), AttentionSpec(0.2, window)
    latent = AttentionSpec(0.2, window, is_latent=True)
    wanted = attend_rows(query, kept, kept, positions, spec)
    assert torch.equal(attend_rows(query, *kept.chunk(2, -1), positions, latent), wanted)
    last = attend_last(query[:, 2], *(each.clone() for each in kept.chunk(2, -1)), latent)
    torch.testing.assert_close(last, wanted[2], atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=0)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_placing_turns_the_rotated_part_only(pairing: str) -> None:
    rotation = KeyRotation(torch.tensor([1.0, 0.1, 0.01, 0.001]), pairing)
    rotated, latent = drawn(1, 6, 8), drawn(1, 6, 16, seed=1)
    record, (keys, values) = torch.stack(halves(rotated, latent), dim=1), torch.zeros(2, 1, 20, 12)
    place([record], Placement([Piece(0, 6, 0, 10, 6, offset=7)]), keys, values, rotation)
    turned, kept = parts(keys[:, 10:16], values[:, 10:16], 8)
    assert torch.equal(kept, latent)
    wanted = reposition_keys(rotated, turn_by(rotation, torch.full((6,), 7)))
    torch.testing.assert_close(turned, wanted)
    assert not torch.allclose(turned, rotated, atol=0.1)


def test_the_question_is_asked_by_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads share the latents, so that a group of one KV head would be all of them."""
    selector = open_engine(tiny_model("deepseek_v3"), selector="query", recompute_ratio=0.2)
    whole = selector.prefill(RAG).logits
    monkeypatch.setattr(attention_kernels, "_MAX_WEIGHTS", 1)
    groups = attention_kernels._parts(torch.zeros(4, 3, 24), 100, 1)
    assert groups == [(slice(head, head + 1), slice(0, 1)) for head in range(4)]
    torch.testing.assert_close(selector.prefill(RAG).logits, whole, atol=1e-5, rtol=1e-5)


# ---- what is known of a model ---------------------------------------------------------------------------------
@pytest.mark.parametrize("family", HAVE_LATENTS)
def test_a_config_alone_says_what_a_model_keeps(family: str) -> None:
    model = tiny_model(family)
    layout = expected_layout(model.config, torch.float32)
    with BlendEngine(model, store="memory") as engine:
        assert engine.runtime.survey.layout == layout
        assert all(latent is not None and latent.width == 24 for latent in engine.runtime.survey.latents)
        assert {(shape.head_dim, shape.placed_dim) for shape in engine.runtime.survey.head_shapes} == {(24, 12)}
    assert layout.block_bytes(7) == 7 * 4 * 24 * 4


def test_deepseek_v3_keeps_little_and_every_codec_takes_its_records() -> None:
    """The figure `mla_bytes`: stored bytes a token by those of the expanded cache."""
    config = AutoConfig.for_model("deepseek_v3")
    stored = expected_layout(config, torch.bfloat16).block_bytes(1)
    per_head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    expanded = config.num_hidden_layers * config.num_attention_heads * per_head * 2
    assert (stored, expanded) == (61 * 576 * 2, 61 * 128 * 320 * 2)
    assert stored / expanded < 0.15
    whole, record = expected_layout(config, torch.bfloat16), drawn(1, 2, 70, 288).to(torch.bfloat16)
    for codec, most in {"raw": 0.0, "int8": 0.01, "fp8": 0.07, "int4": 0.2}.items():
        layout = type(whole)(whole.layers[:1], whole.dtype, codec)
        stored_record = layout.encode(record)
        assert stored_record.nbytes == layout.block_bytes(70)
        assert tuple(stored_record.shape) == layout.record_shape(0, 70)
        error = (layout.decode(0, stored_record, 70).float() - record.float()).abs().max()
        assert float(error / record.float().abs().max()) <= most, codec


def attention(**changes: int) -> DeepseekV3Attention:
    config = AutoConfig.for_model("deepseek_v3", **{**SMALL, **LATENT, **changes})
    torch.manual_seed(0)
    return DeepseekV3Attention(config, 0)


def test_other_expansions_measures_and_caches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, odd, shifted = attention(), attention(kv_lora_rank=15), attention()
    assert latent_shape(plain, torch.zeros(1)).expanded == 4 * (16 + 16)
    with pytest.raises(ModelNotBlendableError, match=r"15 \+ 8 numbers of a token; an even number"):
        latent_shape(odd, torch.zeros(1))
    shifted.kv_b_proj.bias = torch.nn.Parameter(torch.ones(4 * 24))
    with pytest.raises(ModelNotBlendableError, match="in another way than by one matrix for each head"):
        latent_shape(shifted, torch.zeros(1))
    with pytest.raises(ModelNotBlendableError, match="without caching them"):
        attend_absorbed(plain, drawn(4, 3, 16), LatentTap(), lambda q, k, v, spec: q, AttentionSpec(1.0))
    # as code that comes with a model may: records of the expanded form would be ten times as large
    with pytest.raises(InvalidInputError, match=r"measure 'v' compares keys or values alone.*use measure 'kv'"):
        open_engine(tiny_model("deepseek_v3"), [], measure="v")
    open_engine(tiny_model("deepseek_v3"), [], measure="v", selector="query").close()  # compares nothing
    monkeypatch.delattr(DeepseekV3Attention, "expand_kv")
    with pytest.raises(ModelNotBlendableError, match=r"kv_lora_rank = 16.*caches expanded keys and values"):
        BlendEngine(tiny_model("deepseek_v3"), store="memory")
