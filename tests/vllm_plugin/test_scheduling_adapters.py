"""The scheduler side with LoRA adapters: requests of one never see another's chunks, also while weights change."""

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.load.capture import manifest_of
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.engines.vllm.jobs import AdapterSeen, StepReport
from cacheblend.engines.vllm.scheduler import adapters
from vllm_requests import CHUNK, PROMPT, Request, claim, reported, scheduling, why


def lora(number: int, name: str = "", *, inplace: bool = False) -> Any:
    fields = {"lora_int_id": number, "lora_name": name or f"adapter {number}", "lora_path": "p"}
    return SimpleNamespace(**fields, load_inplace=inplace)


def come(side: Any, name: str, adapter: Any = None, **fields: Any) -> Request:
    request = Request(PROMPT, [[40, 140]], name, lora_request=adapter, **fields)
    side.on_new(request)
    return request


def seen(side: Any, **found: str) -> None:
    """The workers say: `n1="digest"`; what begins with "!" is an error."""
    said = {int(key[1:]): AdapterSeen("", it[1:]) if it[0] == "!" else AdapterSeen(it) for key, it in found.items()}
    side.reported(StepReport(adapters=said))


def store(side: Any, request: Request) -> Any:
    """The request misses its chunk, which the workers then store; returns the capture job."""
    assert claim(side, request, 0) == 0
    side.allocated(request, [[1]], 0)
    request.num_output_tokens = 1
    (job,) = side.take_jobs().capture
    manifest = manifest_of(job.chunk, job.planner, "")
    layout = KVLayout((LayerShape(1, 4),), torch.float32)
    kept = side._finder._store
    kept.write(Block(manifest.chunk_id, job.planner.root, job.chunk.token_ids, [torch.zeros(1, 2, 100, 4)], layout))
    kept.put_manifest(manifest)
    side.finished(request)
    return job


def blended(side: Any, request: Request) -> Any:
    """The job of a request that finds its chunk."""
    assert claim(side, request, 0) == 141
    side.allocated(request, [[1]], 141)
    (job,) = side.take_jobs().blend
    return job


def test_a_request_waits_until_the_workers_have_looked_at_its_adapter() -> None:
    side, adapter = scheduling([CHUNK]), lora(3)
    request = come(side, "r", adapter)
    come(side, "same", adapter)
    assert claim(side, request, 0) is None
    assert [one.lora_int_id for one in side.take_jobs().adapters] == [3]
    assert side.take_jobs().adapters == []
    seen(side, n3="digest")
    job = store(side, request)
    assert (job.adapter.number, job.adapter.digest, job.adapter.request.lora_name) == (3, "digest", "adapter 3")
    assert blended(side, come(side, "again", adapter)).adapter == job.adapter
    assert blended(side, come(side, "base")).adapter is None, "its own chunk of the same tokens"


@pytest.mark.parametrize("by_content", [False, True])
def test_chunks_of_one_adapter_are_not_found_by_another(by_content: bool) -> None:
    """By name, number or weights another one; tenants beside it; found by spans and by content."""
    side = scheduling([], refresh_s=0.0)
    others = {"first": (1, "a", "x"), "weights": (2, "a", "y"), "name": (3, "b", "x")}
    for what, (number, name, digest) in others.items():
        request = come(side, what, lora(number, name))
        side.take_jobs()
        seen(side, **{f"n{number}": digest})
        store(side, request)
    for number, (what, name, digest) in enumerate([("known", "a", "x"), ("new", "c", "x"), ("newer", "a", "z")], 11):
        request = come(side, what, lora(number, name), **({"kv_transfer_params": None} if by_content else {}))
        seen(side, **{f"n{number}": digest})
        assert claim(side, request, 0) == (141 if what == "known" else 0)  # numbers are this process's own
    assert claim(side, come(side, "tenant", lora(1, "a"), cache_salt="t"), 0) == 0


@pytest.mark.may_fail("LoRA not loaded", "LoRA not loaded in time")
def test_an_adapter_that_is_not_loaded_leaves_its_requests_to_vllm_and_is_asked_about_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = scheduling([CHUNK])
    request = come(side, "r", lora(1))
    side.take_jobs()
    seen(side, n1="!FileNotFoundError: gone")
    assert claim(side, request, 0) == 0
    assert why(side, request) == "LoRA not loaded: FileNotFoundError: gone"
    assert side.counts.take().data["fallbacks"] == {"LoRA not loaded": 1}
    later = come(side, "later", lora(1))
    assert len(side.take_jobs().adapters) == 1
    seen(side, n1="digest")
    store(side, later)
    now = 100.0
    monkeypatch.setattr(adapters.time, "monotonic", lambda: now)
    request = come(side, "workers do not say", lora(2))
    assert side.claim(request, 0) is None
    now += 29  # as long as a look-up
    assert side.claim(request, 0) is None
    now += 2
    assert side.claim(request, 0) == 0
    assert why(side, request).startswith("LoRA not loaded in time: ")


def test_weights_that_come_back_find_their_chunks_and_no_block_that_vllm_computed_meanwhile() -> None:
    side, names = scheduling([]), []
    for round_, digest in enumerate(["x", "y", "x"]):
        adapter = lora(1, inplace=round_ == 2)
        if round_ == 1:  # replaced, and nobody has said so
            stale = come(side, "stale", adapter)
            blended(side, stale)
            side.reported(reported("stale", "LoRA changed"))
            side.provided(["stale"])
            assert why(side, stale) == "LoRA changed"
            seen(side, n1="y")
        request = come(side, f"first {round_}", adapter)
        if round_ != 1:
            seen(side, n1=digest)
        if round_ < 2:
            store(side, request)
            request = come(side, f"second {round_}", adapter)
        assert claim(side, request, 0) == 141
        names.append(request.block_hashes[-1])
    assert len({*names, stale.block_hashes[-1]}) == 3  # the stale one is the first round's, computed otherwise
    assert stale.block_hashes[-1] == names[0]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_in_which_order_a_job_has_the_adapter_of_its_request(seed: int) -> None:
    """At random: requests of three adapters and of none, reports late and early, replaced weights, aborts, resets."""
    rng = random.Random(seed)
    side, digests = scheduling([]), {1: "x1", 2: "x2", 3: "x3"}
    live: dict[str, Request] = {}
    for number in range(150):
        which = rng.choice([None, 1, 2, 3])
        adapter = None if which is None else lora(which, inplace=rng.random() < 0.2)
        live[f"r{number}"] = come(side, f"r{number}", adapter)
        if rng.random() < 0.1:
            digests[rng.choice([1, 2, 3])] += "'"
        if rng.random() < 0.05:
            side.reset()
        jobs = side.take_jobs(is_idle=rng.random() < 0.5)
        if rng.random() < 0.8:
            seen(side, **{f"n{one.lora_int_id}": digests[one.lora_int_id] for one in jobs.adapters})
        for request in [*live.values()]:
            claimed = side.claim(request, 0) if rng.random() < 0.5 else claim(side, request, 0)
            if claimed is not None:
                side.allocated(request, [[1]], claimed)
                request.num_output_tokens = 1
                del live[request.request_id]
                job = next((one for one in side._jobs.blend if one.request_id == request.request_id), None)
                assert (job is not None) == bool(claimed)
                mine = None if request.lora_request is None else request.lora_request.lora_int_id
                if job is not None:
                    assert (None if job.adapter is None else job.adapter.number) == mine
                for capture in (side._captures._waiting.get(request.request_id) or (0, [], 0))[1]:
                    assert (None if capture.adapter is None else capture.adapter.number) == mine
                    assert (capture.adapter is None) == (capture.planner.root == side._finder._planners.of().root)
                side.provided([request.request_id])
                side.finished(request)
    assert not side._adapters._came.keys() - live.keys()


def test_text_that_recurs_is_learnt_within_an_adapter_and_computed_with_it() -> None:
    side, chunks = scheduling([], discover=True, refresh_s=0.0), []
    for number, which in enumerate([1, 2, None, 1]):  # only the first and the last are of one adapter
        ids = [*range(1000 + 40 * number, 1040 + 40 * number), *CHUNK, 7, 8]
        request = Request(ids, None, f"r{number}", lora_request=None if which is None else lora(which))
        side.on_new(request)
        side.take_jobs()
        if which is not None:
            seen(side, **{f"n{which}": f"x{which}"})
        assert claim(side, request, 0) == 0
        side.allocated(request, [[1]], 0)
        side.finished(request)
        end = time.monotonic() + 30
        while side._finder._discovery._behind:
            assert time.monotonic() < end
            time.sleep(0.001)
        chunks.append(side.take_jobs().capture)
    assert [len(each) for each in chunks] == [0, 0, 0, 1]
    (job,) = chunks[3]
    assert job.adapter is not None and (job.adapter.number, job.adapter.digest) == (1, "x1")
    assert job.planner.root not in (side._finder._planners.of().root, side._finder._planners.of(None, "other").root)
