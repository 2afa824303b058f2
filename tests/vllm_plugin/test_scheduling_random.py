"""The scheduler side in a small model of vLLM's scheduler: random requests, turns, evictions, preemptions, failures.

The model knows of each block what a real engine would have in it: exact KV or blended KV. Whatever happens, no block
with a plain name holds blended KV, every request ends, and nothing stays behind.
"""

import random
import time
from typing import Any

import pytest

from cacheblend.core.load.layer_kv import PlacedSpans
from cacheblend.core.plan.plan import Source
from cacheblend.store import MemoryStore
from vllm_requests import SIZE, Request, found_tokens, reported, scheduling

CHUNKS = [list(range(at * 200, at * 200 + 90 + 7 * at)) for at in range(1, 9)]


class Engine:
    """A model of vLLM with a block pool and one scheduler side; `exact` of each block held, by name."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = MemoryStore(1 << 24)
        self.side = scheduling(self.rng.sample(CHUNKS, 4), self.store, refresh_s=0.001, min_reused_share=0.1)
        self.side.cache.bind(self)
        self.exact: dict[bytes, bool] = {}
        self.plain_names: set[bytes] = set()
        self.waiting: list[Request] = []
        self.loading: dict[str, tuple[Request, Any]] = {}
        self.loaded: list[tuple[Request, Any]] = []
        self.asked: list[tuple[list[int], list[list[int]]]] = []
        self.blended = self.shared = self.given = 0

    def get_cached_block(self, name: bytes, groups: list[int]) -> Any:
        return name in self.exact

    def computed(self, request: Request) -> int:
        return found_tokens(request, self.exact)

    def add(self, name: str) -> None:
        """A new prompt, or the next turn of one."""
        if self.asked and self.rng.random() < 0.6:
            ids, spans = self.rng.choice(self.asked[-4:])
            for chunk in self.rng.sample(CHUNKS, self.rng.randint(0, 2)):
                spans = [*spans, [len(ids), len(ids) + len(chunk)]]
                ids = [*ids, *chunk]
        else:
            ids, spans = [3] * self.rng.choice([0, 5, 16, 40]), []
            for chunk in self.rng.sample(CHUNKS, self.rng.randint(0, 4)):
                spans.append([len(ids), len(ids) + len(chunk)])
                ids = [*ids, *chunk, *[4] * self.rng.choice([0, 0, 3])]
        ids = [*ids, *[5] * self.rng.choice([2, 20, 70])]
        self.asked.append((ids, spans))
        options: dict[str, Any] = self.rng.choice([{}, {}, {}, {"recompute_ratio": 0.5}, {"mode": "prefix"}])
        if self.rng.random() < 0.5:
            options = {**options, "chunks": spans}
        request = Request(ids, name=name, kv_transfer_params={"cacheblend": options})
        self.plain_names |= set(request.block_hashes)
        self.side.on_new(request)
        self.waiting.append(request)

    def schedule(self) -> None:
        for request in list(self.waiting):
            held = self.computed(request)
            claimed = self.side.claim(request, held)
            if claimed is None:
                continue
            self.waiting.remove(request)
            self.side.allocated(request, [[1]], claimed)
            if not claimed:
                self.compute(request, held, True)
        for job in self.side.take_jobs().blend:
            self.given += 1
            if job.local_tokens:  # as a worker opens it: what is left of each span has a place in its record
                rest = job.plan.with_resident(job.local_tokens).spans[1:]
                PlacedSpans.of([span for span in rest if span.source in (Source.PREFIX, Source.LOADED)], "raw")
            self.loading[job.request_id][1].append(job)

    def step(self) -> None:
        for request in self.waiting:
            self.loading.setdefault(request.request_id, (request, []))
        self.schedule()
        for name in [name for name, (_, jobs) in self.loading.items() if not jobs]:
            del self.loading[name]
        for name in list(self.loading):
            if self.rng.random() < 0.5:
                self.finish(name)
        if self.rng.random() < 0.1 and self.exact:
            for name in self.rng.sample(sorted(self.exact), len(self.exact) // 3):
                del self.exact[name]
        if self.rng.random() < 0.3:
            scheduling(self.rng.sample(CHUNKS, 1), self.store)
        if len(self.store.manifests()) > 3:
            self.store.delete(self.rng.choice(self.store.manifests()).chunk_id)

    def finish(self, name: str) -> None:
        """The workers report a job: provided or given up; then vLLM goes on with the request, or it is preempted."""
        request, (job,) = self.loading.pop(name)
        self.side.provided([name])
        how = self.rng.choice(["provided", "provided", "provided", "given up", "aborted", "preempted"])
        if how == "aborted":
            self.side.finished(request)
            return
        if how == "given up":
            failure = self.rng.choice(["RuntimeError", "slow store"])  # after the second nothing is blended for a while
            self.side.reported(reported(name, failure))
            assert self.side.claim(request, self.computed(request)) == 0
            self.side.allocated(request, [[1]], 0)
            self.compute(request, self.computed(request), True)
            return
        self.blended += 1
        self.side.reported(reported(name))
        loaded = [span.start for span in job.plan.spans if span.source.value == "loaded"]
        is_exact = self.front_is_exact(request, job.local_tokens)
        for at in range(job.local_tokens // SIZE, len(job.plan) // SIZE):
            is_exact = is_exact and not any(start < (at + 1) * SIZE for start in loaded)
            self.put(request, at, is_exact)
        self.side.allocated(request, [[1]], 0)
        if how == "preempted":
            request.num_preemptions += 1
            self.waiting.append(request)
        else:
            self.compute(request, len(job.plan) // SIZE * SIZE, is_exact)

    def front_is_exact(self, request: Request, tokens: int) -> bool:
        return all(self.exact.get(name, True) for name in request.block_hashes[: tokens // SIZE])

    def compute(self, request: Request, held: int, is_exact: bool) -> None:
        """vLLM computes the rest itself, over what is there."""
        is_exact = is_exact and self.front_is_exact(request, held)
        for at in range(held // SIZE, len(request.block_hashes)):
            self.put(request, at, is_exact)
        if self.rng.random() < 0.3:
            request.num_preemptions += 1
            self.waiting.append(request)
            return
        told = self.side.finished(request)["cacheblend"]
        self.shared += told["reason"] == "prefix cache has it, blended"

    def put(self, request: Request, at: int, is_exact: bool) -> None:
        name = request.block_hashes[at]
        assert is_exact or name not in self.plain_names, "blended KV under a plain name"
        mode = request.kv_transfer_params["cacheblend"].get("mode")
        assert is_exact or mode != "prefix", "blended KV in a request that asked for exact KV"
        self.exact.setdefault(name, is_exact)


@pytest.mark.may_fail("slow store")
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_plain_name_holds_blended_kv_and_every_request_ends(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend.engines.vllm.scheduler import scheduler as module

    monkeypatch.setattr(module, "PAUSE_S", 0.002)
    engine = Engine(seed)
    for number in range(150):
        if engine.rng.random() < 0.7:
            engine.add(str(number))
        engine.step()
    end = time.monotonic() + 60
    while engine.waiting or engine.loading:
        assert time.monotonic() < end, "a request waits for ever"
        engine.step()
        time.sleep(0.0005)
    side = engine.side
    assert (side._requests, side._outstanding, side._coming._coming, side._coming._names) == ({}, set(), {}, {})
    assert 3 < engine.blended <= engine.given
    side.close()
