"""Third exactness invariant: the KV stored under a name equals a plain prefill of the tokens of that name's chain."""

import pytest

from cacheblend.core.config import AnchorKind
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import SamplingParams
from families import tiny_model
from parity.scenes import BOS, QUESTION, RAG, SYSTEM, UNSEEN, A, B, C, open_engine, random_ids
from poison import WitnessMemory, compare, names_in
from reference import plain_kv

TOLERANCE = 1e-5
ANCHORS = ["none", "bos", "system"]
ONE_TOKEN = SamplingParams(max_new_tokens=1)


def requests(bos: bool) -> list[Prompt]:
    """Prompts with misses before, between and after hits; the same as hits; a new system prompt; no chunk."""
    first, other = [text([BOS])] if bos else [], text(random_ids(20, 30))
    late = chunk(random_ids(33, 31))
    return [
        Prompt.of([*first, *parts])
        for parts in (
            [SYSTEM, A, UNSEEN, B, QUESTION],
            [SYSTEM, late, A, C, QUESTION],
            [UNSEEN, B, late, SYSTEM, A],
            [other, B, A, QUESTION],
            [other, late, UNSEEN],
            [SYSTEM, QUESTION],
        )
    ]


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "cohere2", "qwen3_moe", "deepseek_v3"])
def test_stored_kv_equals_a_plain_prefill_of_its_chain(family: str, anchor: AnchorKind) -> None:
    model, store = tiny_model(family), WitnessMemory()
    with open_engine(model, [A], store=store, anchor=anchor, capture=True) as engine:
        for prompt in requests(bos=anchor == "bos"):
            for ratio in (0.15, 0.0):  # in the second round, its chunks are hits
                engine.generate(prompt, SamplingParams(max_new_tokens=2), ratio=ratio)
                assert engine.flush(timeout=60)
        listed = {name for manifest in store.manifests() for name in manifest.block_names}
        names = names_in(store)
        assert len(store.manifests()) >= 5 and listed <= names
        found = compare(
            store, names, store.written, [engine.runtime.planner.root], lambda root, ids: plain_kv(model, ids)[1]
        )
        assert found.poisoned == 0 and found.largest <= TOLERANCE, found.what


@pytest.mark.parametrize("anchor", ANCHORS)
def test_every_missed_chunk_is_stored_after_its_anchor(anchor: AnchorKind) -> None:
    """Afterwards the same chunks in another order are all hits, and nothing more is stored."""
    with open_engine(tiny_model("llama"), [], anchor=anchor, capture=True) as engine:
        engine.generate(Prompt.of([SYSTEM, A, UNSEEN, B, QUESTION]), ONE_TOKEN)
        assert engine.flush(timeout=60)
        blocks = engine.store.stats().blocks
        report = engine.generate(Prompt.of([SYSTEM, B, A, UNSEEN, QUESTION]), ONE_TOKEN).report
        assert engine.flush(timeout=60)
        assert report.missed_tokens == 0
        assert engine.store.stats().blocks == blocks
        assert len(engine.store.manifests()) == 3


def test_blended_kv_is_not_found_by_a_plain_request() -> None:
    """After a blended prompt, the same tokens as plain text hit nothing."""
    with open_engine(tiny_model("llama"), capture=True) as engine:
        engine.generate(RAG, ONE_TOKEN, ratio=0.15)
        assert engine.flush(timeout=60)
        report = engine.prefill(Prompt.of([text(RAG.token_ids)])).report
        assert report.loaded_tokens == 0
