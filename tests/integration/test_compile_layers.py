"""Compiled layers compute what the plain ones compute, or are not used."""

import logging

import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Hkvd
from cacheblend.engines.hf import BlendEngine, compilation
from campaign import rotating
from families import tiny_model
from parity.scenes import QUESTION, RAG, A, B, C, assert_same, greedy, open_engine, run
from reference import plain_kv

TOLERANCE = 3e-5
FAMILIES = ["llama", "gemma3_text", "gpt_oss", "glm", "mixtral", "qwen3", "youtu"]
counters = torch._dynamo.utils.counters


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing that another test has compiled is used again, or counts towards the compiler's limits."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", rotating(FAMILIES, core=["llama"]))
def test_blends_and_full_prefills_are_those_of_plain_layers(family: str) -> None:
    model = tiny_model(family)
    with open_engine(model) as engine:
        expected = [run(engine, RAG, Hkvd((1, 2), (ratio, ratio))) for ratio in (0.2, 0.4, 1.0)]
    with open_engine(model) as engine:
        assert compilation.compile_layers(engine.view, model.device, backend="eager") == ""
        counters.clear()
        found = [run(engine, RAG, Hkvd((1, 2), (ratio, ratio))) for ratio in (0.2, 0.4, 1.0)]
    assert counters["frames"]["ok"] == counters["frames"]["total"]
    for one, other in zip(found, expected, strict=True):
        assert one.recomputed == other.recomputed
        assert_same(one.result, other.result.logits, other.result.kv, TOLERANCE)
    assert_same(found[-1].result, *plain_kv(model, RAG.token_ids), TOLERANCE)


@pytest.mark.slow
def test_the_real_compiler_serves_any_number_of_rows_with_few_graphs() -> None:
    """Layers of one kind share graphs, and other prompts bring no more of them."""
    model = tiny_model("llama")
    config = BlendConfig(block_size=16, anchor="none", capture=False, compile_layers=True)
    with BlendEngine(model, config=config, fingerprint="tiny", store="memory") as engine:
        graphs = counters["stats"]["unique_graphs"]
        assert 0 < graphs <= 20
        answer = engine.generate(RAG, max_new_tokens=8, temperature=0.0)
        assert answer.token_ids == greedy(model, RAG, 8)
        for prompt in ([A, B, C, QUESTION], [C, A, QUESTION], [QUESTION]):
            engine.generate(Prompt.of(prompt), max_new_tokens=2, temperature=0.0)
        assert counters["stats"]["unique_graphs"] - graphs <= 6


@pytest.mark.parametrize(
    ("error", "message"),
    [(None, "layer 0 of 64 rows differs by"), ("no C++ compiler\nwas found", "RuntimeError: no C++ compiler")],
    ids=["computes something else", "fails"],
)
def test_a_compiler_that_is_wrong_is_not_used(error, message, caplog, monkeypatch) -> None:
    model = tiny_model("llama")

    def wrong(layer, **_):
        def call(*args, **kwargs):
            if error is not None:
                raise RuntimeError(error)
            return 1.001 * layer(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", wrong)
    with caplog.at_level(logging.WARNING, "cacheblend.compile"), open_engine(model, compile_layers=True) as engine:
        assert_same(run(engine, RAG, Hkvd((1,), (1.0,))).result, *plain_kv(model, RAG.token_ids), 1e-5)
    assert f"layers are not compiled: {message}" in caplog.text
