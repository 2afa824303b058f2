"""Compressed chunks in the fused path: the exactness invariants hold; all other error is the codec's own."""

import pytest
import torch

from cacheblend.core.config import AnchorKind
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Hkvd, NoRows
from cacheblend.engines.hf import SamplingParams
from cacheblend.store import MemoryStore
from families import tiny_model
from parity.scenes import QUESTION, RAG, SYSTEM, A, B, C, assert_same, open_engine, run, warm_engine
from reference import plain_kv

LOSSY = ["int8", "fp8", "int4"]
AT_MOST = {"int8": 0.01, "fp8": 0.07, "int4": 0.2}
"""Maximum error relative to the largest key or value: half a quantisation step, or rounding to a 3-bit mantissa."""


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    ("family", "anchor"),
    [*((f, "none") for f in ("llama", "gemma3_text", "gpt_oss", "gemma4_text", "deepseek_v3")), ("llama", "system")],
)
def test_full_recompute_has_no_codec_error_and_full_reuse_no_other(family: str, anchor: AnchorKind, codec: str) -> None:
    """The loaded rows of layer 0 differ from uncompressed ones by at most the codec's quantisation error."""
    of_anchor = {} if anchor == "none" else {"anchor": anchor}
    engines = warm_engine(family, codec=codec, **of_anchor), warm_engine(family, **of_anchor)
    result = engines[0].prefill(RAG, ratio=1.0)
    assert result.report.missed_tokens == 0
    assert_same(result, *plain_kv(tiny_model(family), RAG.token_ids), 3e-5)
    lossy, exact = (run(each, RAG, NoRows()).result.kv[0] for each in engines)
    loaded = slice(len(SYSTEM), len(RAG) - len(QUESTION))
    for mine, theirs in zip(lossy, exact, strict=True):
        error = (mine[:, loaded] - theirs[:, loaded]).abs().max() / theirs.abs().max()
        assert 0 < error <= AT_MOST[codec]


def test_int8_blending_selects_nearly_the_same_rows() -> None:
    selector = Hkvd((1,), (0.3,))
    raw = run(warm_engine("llama"), RAG, selector)
    lossy = run(warm_engine("llama", codec="int8"), RAG, selector)
    assert len(lossy.recomputed) == len(raw.recomputed)
    assert len({*lossy.recomputed} & {*raw.recomputed}) >= 0.9 * len(raw.recomputed)


@pytest.mark.parametrize("codec", LOSSY)
def test_compressed_chunks_have_separate_names_and_are_never_an_exact_prefix(codec: str) -> None:
    model, store, lone = tiny_model("llama"), MemoryStore(), Prompt.of([A, QUESTION])
    with open_engine(model, store=store, codec=codec) as lossy, open_engine(model, [], store=store) as raw:
        assert raw.prefill(RAG).report.missed_tokens == len(A) + len(B) + len(C)
        assert lossy.prefill(lone).report.hit_tokens["prefix"] == 0
        assert lossy.prefill(lone).report.hit_tokens["memory"] == len(A)
        raw.warm([A])
        assert raw.prefill(lone).report.hit_tokens["prefix"] == len(A)


def test_a_system_prompt_is_stored_uncompressed_and_shared_with_other_codecs() -> None:
    """A system prompt stored by an engine with a codec is an exact prefix for an engine without one."""
    model, store = tiny_model("llama"), MemoryStore()
    prompt = Prompt.of([SYSTEM, B, A, QUESTION])
    with open_engine(model, store=store, codec="int4", capture=True) as lossy:
        lossy.generate(prompt, SamplingParams(max_new_tokens=1))
        assert lossy.flush(timeout=60)
        assert lossy.prefill(prompt).report.hit_tokens["prefix"] == len(SYSTEM)
    with open_engine(model, [], store=store) as raw:
        result = raw.prefill(Prompt.of([SYSTEM, QUESTION]))
        report = result.report
        assert report.hit_tokens["prefix"] == len(SYSTEM)
    logits, layers = plain_kv(model, [*SYSTEM.token_ids.tolist(), *QUESTION.token_ids.tolist()])
    assert_same(result, logits, layers, 3e-5)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_missed_chunk_is_stored_compressed_without_its_anchor(codec: str) -> None:
    with open_engine(tiny_model("llama"), [], anchor="system", codec=codec, capture=True) as engine:
        engine.generate(RAG, SamplingParams(max_new_tokens=1))
        assert engine.flush(timeout=60)
        (names,) = [m.block_names for m in engine.store.manifests() if len(m.token_ids) == len(A)]
        (entry, *_) = engine.store.find(names)
        assert entry is not None and entry.layout.codec == codec
        assert engine.store.read(names[0], 0).dtype == torch.uint8
        assert engine.prefill(RAG).report.missed_tokens == 0
        anchors = engine.runtime.planner.chain_of([SYSTEM.token_ids])
        assert engine.store.find([anchors]) == [None]
