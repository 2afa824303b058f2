"""Time to find the stored chunks of a long prompt by their content, among many stored chunks."""

import random
import statistics
import time
from typing import Any

import numpy as np

from cacheblend.bench.stamp import stamp
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.chunk_matches import ChunkIndex

VOCABULARY = 150_000


def run(
    *, stored: int = 100_000, chunk_tokens: int = 256, prompt_tokens: int = 32_768, runs: int = 20, seed: int = 0
) -> dict[str, Any]:
    """Fills an index, then matches prompts of stored chunks; a few new tokens precede each chunk.

    Args:
        stored: chunks in the index.
        chunk_tokens: tokens of each chunk.
        prompt_tokens: least tokens of a prompt.
        runs: number of prompts.
        seed: of ids and orders.

    Raises:
        InvalidInputError: fewer chunks are stored than a prompt takes.
    """
    of_prompt = -(-prompt_tokens // (chunk_tokens + 4))
    if not 0 < of_prompt <= stored:
        raise InvalidInputError(f"a prompt needs {of_prompt} chunks, only {stored} are stored")
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, (stored, chunk_tokens), dtype=np.uint32).astype("<u4")
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
        chosen = random.Random(f"{seed} {number}").sample(range(stored), of_prompt)
        parts = [part for at in chosen for part in (rng.integers(0, VOCABULARY, 4).astype("<u4"), ids[at])]
        prompt = np.concatenate(parts)
        started = time.perf_counter()
        matches = index.match(prompt)
        times.append(time.perf_counter() - started)
        if len(matches) != of_prompt:
            raise RuntimeError(f"{len(matches)} of {of_prompt} chunks were found")
    return {
        "figures": {"match_ms": 1e3 * statistics.median(times)},
        "match_s": times,
        "fill_s": fill_s,
        "stored": stored,
        "chunk_tokens": chunk_tokens,
        "prompt_tokens": of_prompt * (chunk_tokens + 4),
        **stamp(),
    }
