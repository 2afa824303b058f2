"""Fills a store through vLLM: for models that only vLLM runs, or that it runs faster."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.plan.prompt import chunk
from cacheblend.engines.fingerprint import ModelIdentity
from cacheblend.engines.keeper import ChunkKeeper, WarmReport
from cacheblend.engines.tokens import PromptBuilder
from cacheblend.store import open_store

if TYPE_CHECKING:
    from cacheblend.engines.vllm.jobs import CaptureJob

Encode = Callable[[PromptBuilder], Sequence[tuple[str, list[int]]]]
"""From the model's tokenizer to (title, token ids) of each passage."""

BATCH = 16  # passages between two calls of `progress`


def warm_with_vllm(
    model: Path,
    store: str,
    encode: Encode,
    *,
    settings: dict[str, Any],
    progress: Callable[[int, int], None] | None = None,
    **engine_options: Any,
) -> WarmReport:
    """Stores the KV of passages, each computed alone by vLLM's own layers, with its anchor in front of it. `store` is
    the URL of a folder; `settings` are fields of `BlendConfig` (anchor, block size, codec, salt); `progress` is called
    with (passages done, passages in all); the rest is for `vllm.LLM`. Raises InvalidInputError: vLLM is not installed,
    or a passage is empty or too long; StoreError: one could not be stored; those before it stay."""
    started = time.perf_counter()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its workers are called by functions
    try:
        from vllm import LLM
    except ImportError as error:
        raise InvalidInputError(f"vLLM cannot be imported ({error}); install it beside cacheblend") from error
    transfer = {
        "kv_connector": "CacheBlendConnector",
        "kv_connector_module_path": "cacheblend.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store, "match_content": False, **settings},
    }
    engine = LLM(model=str(model), kv_transfer_config=transfer, **engine_options)
    builder = PromptBuilder(engine.get_tokenizer())
    facts = set(engine.collective_rpc(_facts))
    if len(facts) > 1:
        raise InvalidInputError(
            f"the files in {model} were changed while vLLM loaded them: its workers run {len(facts)} different models; "
            "start again once the files are complete"
        )
    ((fingerprint, dtype, anchor),) = facts
    config = BlendConfig(**settings | {"anchor": anchor})  # what auto means for the workers
    planner = ModelIdentity(model, fingerprint, dtype, builder.bos_id, model.name, in_front=builder.in_front).planner(
        config
    )
    from cacheblend.engines.vllm.jobs import CaptureJob  # which needs vLLM

    jobs, longest = {}, int(engine.llm_engine.model_config.max_model_len)
    for number, (title, ids) in enumerate(encode(builder), 1):
        job = ChunkJob(tuple(planner.anchor.segments(None)), chunk(ids).token_ids, title)
        if len(job) > longest:
            what, limit = f"chunk {title or number}", f"vLLM's max_model_len is {longest}"
            raise InvalidInputError(f"{what} has {len(job)} tokens with its anchor, {limit}; split it")
        manifest = manifest_of(job, planner, "")
        jobs[manifest.chunk_id] = (job, manifest)
    with open_store(store) as opened:
        keeper = ChunkKeeper(opened)
        missing = [(job, manifest) for job, manifest in jobs.values() if not keeper.is_held(manifest)]
        for at in range(0, len(missing), BATCH):
            batch = missing[at : at + BATCH]
            engine.collective_rpc(_capture, args=([CaptureJob(job, planner) for job, _ in batch],))
            if lost := [job.label for job, manifest in batch if not keeper.is_held(manifest)]:
                raise StoreError(
                    f"{len(lost)} of {len(batch)} passages were not stored, {lost[0]!r} the first; vLLM's log says why"
                )
            if progress is not None:
                progress(len(jobs) - len(missing) + at + len(batch), len(jobs))
        evicted = keeper.missing([manifest for _, manifest in jobs.values()])
    tokens = sum(len(job.token_ids) for job, _ in missing)
    return WarmReport(len(missing), len(jobs) - len(missing), tokens, time.perf_counter() - started, evicted)


def _facts(worker: Any) -> tuple[str, str, str]:
    """In a worker: fingerprint and dtype of the model that it runs, and the anchor of its chunks."""
    from cacheblend.engines.vllm.internals import interface

    connector = interface.connector_of_worker()
    return connector.identity.fingerprint, connector.identity.dtype, connector.anchor


def _capture(worker: Any, jobs: "list[CaptureJob]") -> None:
    """In a worker: computes and stores chunks; returns when they are stored."""
    from cacheblend.engines.vllm.internals import interface

    interface.connector_of_worker().capture(jobs)
