"""What is done with a long prompt before the first layer: naming and planning it, and finding its chunks by content."""

import random
import statistics
import time
from typing import Any

import numpy as np
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName, TokenIds, block_name, root_name, split_blocks
from cacheblend.core.plan.blocks import Block, ChunkManifest, KVLayout, LayerShape
from cacheblend.core.plan.chunk_matches import ChunkIndex
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.provenance import stamp
from cacheblend.store import open_store
from lab.bench import Advance, silent

VOCAB = 150_000
CHUNKS, CHUNK_TOKENS, ROUNDS = 64, 511, 20
_LAYOUT = KVLayout((LayerShape(1, 1),), torch.float32)  # records are not read


def run(*, store: str = "memory") -> dict[str, Any]:
    """Plans prompts of stored chunks in new orders; 32 plain tokens precede and follow them.

    The store is warm; `Planner.plan` is timed: all names, one look-up of all blocks, the plan. The ids of a prompt are
    arrays, as in engines.
    """
    draw = random.Random(0)
    generator = np.random.default_rng(0)
    planner = Planner(root_name("bench", "bfloat16"), Anchor("none"))
    segments = [chunk(generator.integers(VOCAB, size=CHUNK_TOKENS)) for _ in range(CHUNKS)]
    seconds = []
    with open_store(store) as kept:
        for segment in segments:
            parent = planner.root
            for tokens in split_blocks(segment.token_ids, planner.block_size):
                name = block_name(parent, tokens)
                kept.write(Block(name, parent, tokens, [torch.zeros(1, 2, len(tokens), 1)], _LAYOUT))
                parent = name
        for _ in range(ROUNDS + 1):
            plain = [text(generator.integers(VOCAB, size=32)) for _ in range(2)]
            prompt = Prompt.of([plain[0], *draw.sample(segments, CHUNKS), plain[1]])
            started = time.perf_counter()
            plan = planner.plan(prompt, kept)
            seconds.append(time.perf_counter() - started)
            assert plan.tokens_by_source()["miss"] == 0
    return {
        "prompt_tokens": len(prompt),
        "chunks": CHUNKS,
        "store": store,
        "plan_s": {"median": statistics.median(seconds[1:]), "min": min(seconds[1:]), "max": max(seconds[1:])},
        **stamp(),
    }


def match(stored: int, chunk_tokens: int, prompt_tokens: int, runs: int, advance: Advance = silent) -> dict[str, Any]:
    """Fills an index, then matches prompts of stored chunks; a few new tokens precede each chunk."""
    of_prompt = -(-prompt_tokens // (chunk_tokens + 4))
    if not 0 < of_prompt <= stored:
        raise InvalidInputError(f"a prompt needs {of_prompt} chunks, only {stored} are stored")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (stored, chunk_tokens), dtype=np.uint32).astype("<u4")
    nothing: TokenIds = np.empty(0, "<u4")
    manifests = [
        ChunkManifest(BlockName(number.to_bytes(32, "big")), BlockName(b""), nothing, each, (), "", "")
        for number, each in enumerate(ids)
    ]
    index = ChunkIndex()
    started = time.perf_counter()
    index.add(manifests)
    fill_s = time.perf_counter() - started
    times = []
    for number in range(runs):
        chosen = random.Random(f"0 {number}").sample(range(stored), of_prompt)
        parts = [part for at in chosen for part in (rng.integers(0, VOCAB, 4).astype("<u4"), ids[at])]
        prompt = np.concatenate(parts)
        started = time.perf_counter()
        matches = index.match(prompt)
        times.append(time.perf_counter() - started)
        if len(matches) != of_prompt:
            raise RuntimeError(f"{len(matches)} of {of_prompt} chunks were found")
        advance(number + 1, runs)
    return {
        "figures": {"match_ms": 1e3 * statistics.median(times)},
        "match_s": times,
        "fill_s": fill_s,
        "stored": stored,
        "chunk_tokens": chunk_tokens,
        "prompt_tokens": of_prompt * (chunk_tokens + 4),
        **stamp(),
    }
