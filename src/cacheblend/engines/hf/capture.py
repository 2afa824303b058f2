"""Computes chunks alone behind their anchor: what a name promises is what a plain prefill gives."""

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend.core.load.capture import CapturedChunk, ChunkJob, blocks_of, manifest_of
from cacheblend.core.load.loader import LayerKV
from cacheblend.core.naming import join_ids
from cacheblend.core.plan.planner import Planner


def batches(jobs: Sequence[ChunkJob], tokens: int) -> Iterator[list[ChunkJob]]:
    """Jobs of like length together, each batch at most `tokens` tokens, padding included (but at least one job)."""
    batch: list[ChunkJob] = []
    for job in sorted(jobs, key=len):
        if batch and len(job) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


@torch.no_grad()
def compute_chunks(
    model: PreTrainedModel, jobs: Sequence[ChunkJob], planner: Planner, model_name: str
) -> Iterator[CapturedChunk]:
    """One batched plain forward of the jobs, padded on the right.

    Causal rows never see what stands behind them, so padding there changes nothing and needs no mask.
    """
    longest = max(len(job) for job in jobs)
    ids = torch.zeros(len(jobs), longest, dtype=torch.int64)
    for row, job in enumerate(jobs):
        ids[row, : len(job)] = torch.from_numpy(join_ids((*job.anchor, job.token_ids)).astype("i8"))
    cache = DynamicCache()  # without a config: sliding-window layers keep all tokens, and all are stored
    model.base_model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
    for row, job in enumerate(jobs):
        layers = [LayerKV(layer.keys[row], layer.values[row]) for layer in cache.layers]
        yield CapturedChunk(blocks_of(job, planner, layers), manifest_of(job, planner, model_name))
