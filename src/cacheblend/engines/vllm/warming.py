"""Fills a store through vLLM: for models that only it runs, or that it runs faster."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import chunk
from cacheblend.engines.keeper import WarmReport
from cacheblend.engines.tokens import PromptBuilder
from cacheblend.store import open_store

Encode = Callable[[PromptBuilder], Sequence[tuple[str, list[int]]]]
"""From the model's tokenizer to (title, token ids) of each passage."""

BATCH = 16  # passages between two lines of progress


def warm_with_vllm(
    model: Path,
    store: str,
    encode: Encode,
    *,
    settings: dict[str, Any],
    progress: Callable[[int, int], None] | None = None,
    **engine_options: Any,
) -> WarmReport:
    """Stores the KV of passages, each computed alone behind its anchor by vLLM's own layers.

    Args:
        model: folder.
        store: URL of a folder.
        encode: see `Encode`.
        settings: fields of `BlendConfig`: anchor, block size, salt.
        progress: called with (passages done, passages in all).
        **engine_options: for `vllm.LLM`: dtype, tensor_parallel_size, ...

    Raises:
        InvalidInputError: vLLM is not installed, or a passage is empty.
    """
    started = time.perf_counter()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from vllm import LLM
    except ImportError as error:
        raise InvalidInputError(f"vLLM cannot be imported ({error}); install it beside cacheblend") from error
    engine = LLM(
        model=str(model),
        kv_transfer_config={
            "kv_connector": "CacheBlendConnector",
            "kv_connector_module_path": "cacheblend.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": store, "match_content": False, **settings},
        },
        disable_hybrid_kv_cache_manager=True,
        **engine_options,
    )
    builder = PromptBuilder(engine.get_tokenizer())
    (facts,) = set(engine.collective_rpc(_facts))
    fingerprint, dtype = facts
    rule = settings.get("anchor", "auto")
    bos = builder.bos_id
    anchor = Anchor(("none" if bos is None else "bos") if rule == "auto" else rule, bos)
    codec, salt = settings.get("codec", "raw"), settings.get("salt", "")
    planner = Planner.of_model(fingerprint, dtype, anchor, settings["block_size"], codec=codec, salt=salt)
    jobs = {}
    for title, ids in encode(builder):
        job = ChunkJob(tuple(anchor.segments(None)), chunk(ids).token_ids, title)
        jobs[manifest_of(job, planner, "").chunk_id] = job
    with open_store(store) as held_by:
        missing = [job for chunk_id, job in jobs.items() if not held_by.has_manifest(chunk_id)]
    for at in range(0, len(missing), BATCH):
        engine.collective_rpc(_capture, args=(missing[at : at + BATCH],))
        if progress is not None:
            progress(len(jobs) - len(missing) + min(at + BATCH, len(missing)), len(jobs))
    tokens = sum(len(job.token_ids) for job in missing)
    return WarmReport(len(missing), len(jobs) - len(missing), tokens, time.perf_counter() - started)


def _facts(worker: Any) -> tuple[str, str]:
    """In a worker: which model it runs."""
    from cacheblend.engines.vllm import compat

    identity = compat.connector_of_worker().identity
    return identity.fingerprint, identity.dtype


def _capture(worker: Any, jobs: list[ChunkJob]) -> None:
    """In a worker: computes and stores chunks; returns when they are stored."""
    from cacheblend.engines.vllm import compat

    compat.connector_of_worker().capture(jobs)
