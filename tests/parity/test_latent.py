"""Models with latent attention beside other features: records, adapters, quantised weights, transformers' caches."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import AllRows, Hkvd
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.baselines import finish, full_recompute, fused, prefix_caching
from cacheblend.store import MemoryStore
from fake_adapters import add_adapter, set_adapter
from families import BLENDABLE, tiny_model
from parity.scenes import QUESTION, RAG, A, B, C, assert_as_reference, assert_close, greedy, open_engine, run
from reference import blend, plain_kv
from unit.test_fingerprint import quantised

FAMILIES = [
    family.name
    for family in BLENDABLE
    if family.name in ("deepseek_v2", "deepseek_v3-yarn", "glm4_moe_lite", "minicpm3", "kimi_linear-full")
]
PARAMS = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_records_are_the_latents_that_transformers_caches(family: str) -> None:
    model, cache = tiny_model(family), DynamicCache()
    with torch.no_grad():
        model(torch.tensor([A.token_ids.tolist()]), past_key_values=cache, use_cache=True)
    store = MemoryStore()
    with open_engine(model, [A], store=store) as engine:
        names = store.manifests()[0].block_names
        blocks = [store.read_layers([name], range(4))[0] for name in names]
        assert store.find(names)[0].layout.block_bytes(1) == 4 * 24 * 4
        assert engine.runtime.survey.layout.block_bytes(len(A)) == sum(r.nbytes for records in blocks for r in records)
    for layer, cached in enumerate(cache.layers):
        record = torch.cat([records[layer] for records in blocks], dim=2)
        kept = torch.cat([cached.values[0], cached.keys[0]], dim=-1)
        assert_close(torch.cat(record.unbind(1), dim=-1), kept, 1e-6, f"layer {layer}")


def adapted(family: str) -> Any:
    model = copy.deepcopy(tiny_model(family))
    for name, seed in (("b", 2), ("a", 1)):
        add_adapter(model, name, seed=seed)
    return model


def test_an_adapter_of_the_up_projection_takes_part() -> None:
    """Its matrices are those of weights and adapter together, and anew after a switch."""
    model = adapted("deepseek_v3")
    with open_engine(model) as engine:
        answers = {}
        for name in ("a", "b", "a"):
            set_adapter(model, name)
            engine.warm([A, B, C])
            outcome = run(engine, RAG, AllRows())
            assert outcome.report.missed_tokens == 0
            logits, _ = plain_kv(model, RAG.token_ids)
            assert_close(outcome.result.logits, logits, 1e-5, f"logits with {name}")
            answers.setdefault(name, engine.generate(RAG, PARAMS, ratio=1.0).token_ids)
            assert answers[name] == greedy(model, RAG, 6)
        set_adapter(model, "a")
        selector = Hkvd((1,), (0.2,))
        assert_as_reference(run(engine, RAG, selector), blend(model, RAG, selector), 3e-5)


def test_a_quantised_model_is_blended() -> None:
    model = quantised("deepseek_v3")
    with open_engine(model, recompute_ratio=1.0) as engine:
        result = engine.prefill(RAG)
        assert sum(result.report.hit_tokens.values()) == len(A) + len(B) + len(C)
        logits, _ = plain_kv(model, RAG.token_ids)
        assert_close(result.logits, logits, 1e-4, "logits")
        assert engine.generate(RAG, PARAMS, ratio=1.0).token_ids == greedy(model, RAG, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_goes_on_from_what_was_loaded_or_blended(family: str) -> None:
    """Its cache is filled with latents and rotated parts, each in its own place."""
    prompt = Prompt.of([A, QUESTION])
    with open_engine(tiny_model(family)) as engine:
        wanted = greedy(engine.model, prompt, 6)
        methods = (full_recompute, prefix_caching, lambda engine, prompt: fused(engine, prompt, AllRows()))
        for method in methods:
            first = method(engine, prompt)
            assert finish(engine, prompt, first, PARAMS)[1] == wanted


def test_a_model_that_is_not_blended_anew_keeps_its_own_cache() -> None:
    """The tap stands in the view's calls only: the user's model caches as before."""
    model, prompt = tiny_model("deepseek_v3"), torch.tensor([RAG.token_ids.tolist()])
    with open_engine(model) as engine:
        engine.prefill(RAG, ratio=0.2)
        cache = DynamicCache()
        with torch.no_grad():
            model(prompt, past_key_values=cache, use_cache=True)
    assert [(layer.keys.shape[-1], layer.values.shape[-1]) for layer in cache.layers] == [(16, 8)] * 4
