"""What discovery learns of a trace of requests, nothing of which is marked, from an empty store.

The requests go in order through an embedded engine of a very small model, which watches, finds and stores as any engine
does: what is learnt depends on token ids, not on weights. Runs are stored between requests, so that there is time.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.core.config import BlendConfig
from cacheblend.core.names import BlockName, block_name, root_name
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.chunk_matches import ChunkIndex
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.plan.recurrence import Recurrences
from cacheblend.engines.discovery import Discovery, DiscoveryFigures
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.warmup import Asker
from cacheblend.store import MemoryStore
from lab.bench import silent
from lab.servers.clients import LAST_ID

STORE_BYTES = 4 << 30
ROOT = root_name("watched", "float32")
WATCHED_REQUESTS, WATCHED_REQUEST_TOKENS = 200, 4096
POOL, PASSAGE_TOKENS = 24_000, 512
"""Texts of which watched requests are made: few recur among the ids that are kept, most do not."""


@dataclass(frozen=True)
class Learnt:
    """Of a trace: token ids of each run that is stored, without what stands in front of chunks; discovery's figures."""

    chunks: list[list[int]]
    figures: DiscoveryFigures

    @property
    def wasted(self) -> float:
        """Tokens that were stored and never loaded, by all that were stored."""
        return self.figures.wasted_tokens / max(1, self.figures.stored_tokens)

    def found_in(self, requests: Iterable[Sequence[int]]) -> list[list[int]]:
        """The chunks that stand in these requests (token ids), each once; others can make no difference to them."""
        index, names = ChunkIndex(BlendConfig().min_run_tokens), list[BlockName]()
        for ids in self.chunks:
            held = np.asarray(ids, "<u4")
            names.append(block_name(ROOT, held))
            index.add([ChunkManifest(names[-1], ROOT, held[:0], held, (names[-1],))])
        found = {match.chunk.chunk_id for ids in requests for match in index.match(np.asarray(ids, "<u4"))}
        return [ids for name, ids in zip(names, self.chunks, strict=True) if name in found]


class Learner:
    """Sees requests; see `learning`."""

    def __init__(self, engine: BlendEngine, discovery: Discovery[Asker]) -> None:
        self._engine, self._discovery = engine, discovery

    def see(self, requests: Iterable[Sequence[int]], done: Callable[[int], None] = silent) -> None:
        """Answers one after the other, and stores what recurs between them; `done` is told how many were answered."""
        one = SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True)
        for number, ids in enumerate(requests, 1):
            self._engine.generate(Prompt.of([text(ids)]), one)
            self._engine.flush()
            done(number)

    @property
    def learnt(self) -> Learnt:
        stored = [manifest.token_ids.tolist() for manifest in self._engine.store.manifests()]
        return Learnt(stored, self._discovery.figures)


@contextmanager
def learning(seed: int = 0) -> Iterator[Learner]:
    """An engine of random weights that has seen nothing yet; closed at the end."""
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=LAST_ID,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=1 << 17,
    )
    config = BlendConfig.of({"anchor": "none"})
    with BlendEngine(LlamaForCausalLM(shape).eval(), store=MemoryStore(STORE_BYTES), config=config) as engine:
        assert engine.runtime.discovery is not None
        yield Learner(engine, engine.runtime.discovery)


def learn_in_order(
    requests: Iterator[list[int]], before: int, seed: int = 0, done: Callable[[int], None] = silent
) -> tuple[Learnt, Learnt]:
    """What is known after the first `before` requests, and after all; `done` is told how many were seen."""
    with learning(seed) as learner:
        learner.see(islice(requests, before), done)
        learnt = learner.learnt
        learner.see(requests, lambda count: done(before + count))
        return learnt, learner.learnt


def watch_ms(seed: int = 0, watch_tokens: int = BlendConfig().watch_tokens) -> float:
    """Median milliseconds that one more request of 4,096 tokens takes a watcher that keeps `watch_tokens` ids.

    This is time of a thread beside the requests. Texts recur as passages do: a few often, most of them seldom.
    """
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 150_000, (POOL, PASSAGE_TOKENS)).astype("<u4")
    often = 1 / np.arange(1, POOL + 1) ** 0.8
    often /= often.sum()
    watcher, taken = Recurrences(BlendConfig().min_run_tokens, watch_tokens), list[float]()
    for _ in range(watch_tokens // WATCHED_REQUEST_TOKENS + WATCHED_REQUESTS):
        chosen = rng.choice(POOL, WATCHED_REQUEST_TOKENS // PASSAGE_TOKENS, p=often)
        ids = pool[chosen].reshape(-1)
        started = time.perf_counter()
        watcher.see(ROOT, ids)
        taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken[-WATCHED_REQUESTS:])
