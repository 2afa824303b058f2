"""Engines on a tiny llama in a folder, the prompts that they are asked, and what their answers and blocks must be."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from cacheblend.core.names import BlockName, chain_names, split_blocks
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import Answer, BlendEngine, Passage, SamplingParams
from tiny_folder import TinyShape, save_llama
from tokenizers_for_tests import sentencepiece

CONTEXT, LAYERS, BLOCK = 256, 4, 8
PASSAGES = [
    Passage("The quick brown fox jumps over the lazy dog, and the dog sleeps on.", "fox"),
    Passage("A passage is stored once and reused at any position of a prompt.", "stored"),
    Passage("Who wrote it? The answer is in the second passage: nobody knows.", "who"),
]
QUESTION = " Who wrote the second passage?"
PARTS = ["Answer from the passages. ", *PASSAGES, QUESTION]
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
SOON = 60.0  # seconds: only a failing test waits that long
Open = Callable[..., BlendEngine]
"""`open_engine(store, **settings)` opens an engine that is closed after the test."""


def build_llama(path: Path) -> Path:
    """Writes a tiny random model and a tokenizer to a folder, and returns it."""
    shape = TinyShape(LAYERS, 64, 128, heads=4, kv_heads=2, vocab_size=512, gain=3.0, context_length=CONTEXT)
    save_llama(path, sentencepiece(), shape)
    return path


def plain(engine: BlendEngine, prompt: Prompt, tokens: int = GREEDY.max_new_tokens) -> list[int]:
    """transformers' own greedy answer."""
    ids = torch.from_numpy(prompt.token_ids.astype("i8"))[None]
    out = engine.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, ids.shape[1] :].tolist()


@torch.no_grad()
def check_chain(engine: BlendEngine, segments: list[Any]) -> int:
    """Checks that each stored block of the chain equals a plain prefill (third exactness invariant); counts them."""
    ids = torch.tensor([i for segment in segments for i in segment.tolist()])
    cache = DynamicCache()
    engine.model(input_ids=ids[None], past_key_values=cache, use_cache=True)
    parent, position, held = engine.runtime.planner.root, 0, 0
    for segment in segments:
        for tokens, name in zip(
            split_blocks(segment, BLOCK), chain_names(parent, split_blocks(segment, BLOCK)), strict=True
        ):
            rows = slice(position, position + len(tokens))
            if engine.store.find([name])[0] is not None:
                held += 1
                for layer, kv in enumerate(cache.layers):
                    expected = torch.stack([kv.keys[0, :, rows], kv.values[0, :, rows]], dim=1)
                    torch.testing.assert_close(engine.store.read(name, layer), expected, rtol=1e-3, atol=1e-4)
            parent, position = name, rows.stop
    return held


def names_of(engine: BlendEngine, passage: Passage) -> list[BlockName]:
    """Names of a passage's blocks after BOS."""
    assert engine.runtime.builder is not None
    segments = engine.prompt([passage]).segments
    anchor = engine.runtime.planner.chain_of([segments[0].token_ids])
    return chain_names(anchor, split_blocks(segments[1].token_ids, BLOCK))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_sums(answer: Answer) -> None:
    report = answer.report
    assert report.loaded_tokens + report.missed_tokens + report.text_tokens == report.prompt_tokens
    assert 0 <= report.recomputed_tokens <= report.loaded_tokens
    passes = 1 + len(report.fallbacks)
    assert passes * report.prompt_tokens * LAYERS >= report.row_layers > 0
    assert report.generated_tokens == len(answer.token_ids)
    assert 0 < report.ttft_s <= report.total_s
    assert report.ttft_s >= report.plan_s + report.compute_s
    assert min(asdict(report)[name] for name in ("plan_s", "load_s", "wait_s", "compute_s")) >= 0
