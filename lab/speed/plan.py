"""Time to name and plan a long prompt whose chunks are all stored: what blending costs before the first layer."""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cacheblend.bench.stamp import stamp
from cacheblend.core.names import BlockName, TokenIds, block_name, root_name, split_blocks
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.store import KVStore, open_store

VOCAB = 150_000
_LAYOUT = KVLayout((LayerShape(1, 1),), torch.float32)  # records are not read


def run(*, chunks: int = 64, chunk_tokens: int = 511, store: str = "memory", runs: int = 20) -> dict[str, Any]:
    """Plans prompts of `chunks` stored chunks in new orders; 32 plain tokens precede and follow them.

    The store is warm; `Planner.plan` is timed: all names, one look-up of all blocks, the plan. The ids of a prompt are
    arrays, as in engines.
    """
    draw = random.Random(0)
    generator = np.random.default_rng(0)
    planner = Planner(root_name("bench", "bfloat16"), Anchor("none"))
    segments = [chunk(generator.integers(VOCAB, size=chunk_tokens)) for _ in range(chunks)]
    seconds = []
    with open_store(store) as kept:
        for segment in segments:
            _put(kept, planner.root, split_blocks(segment.token_ids, planner.block_size))
        for _ in range(runs + 1):
            plain = [text(generator.integers(VOCAB, size=32)) for _ in range(2)]
            prompt = Prompt.of([plain[0], *draw.sample(segments, chunks), plain[1]])
            started = time.perf_counter()
            plan = planner.plan(prompt, kept)
            seconds.append(time.perf_counter() - started)
            assert plan.tokens_by_source()["miss"] == 0
    return {
        "prompt_tokens": len(prompt),
        "chunks": chunks,
        "store": store,
        "plan_s": {"median": statistics.median(seconds[1:]), "min": min(seconds[1:]), "max": max(seconds[1:])},
        **stamp(),
    }


def _put(store: KVStore, parent: BlockName, blocks: Sequence[TokenIds]) -> None:
    for tokens in blocks:
        name = block_name(parent, tokens)
        store.write(Block(name, parent, tokens, [torch.zeros(1, 2, len(tokens), 1)], _LAYOUT))
        parent = name
