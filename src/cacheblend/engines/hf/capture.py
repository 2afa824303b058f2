"""Computes chunks alone, each with its anchor in front, by a plain prefill: the KV that a block's name stands for."""

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend.core.load.capture import CapturedChunk, ChunkJob, blocks_of, manifest_of
from cacheblend.core.names import join_ids
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf.caches import kv_of_cache
from cacheblend.engines.hf.prefiller import Prefiller
from cacheblend.engines.hf.state_snapshots import snapshot_blocks


def batches(jobs: Sequence[ChunkJob], tokens: int) -> Iterator[list[ChunkJob]]:
    """Batches of jobs of similar length, each of at most `tokens` tokens with padding, but at least one job."""
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

    Attention is causal, so padding behind a job does not change its rows and needs no mask.
    """
    longest = max(len(job) for job in jobs)
    ids = torch.zeros(len(jobs), longest, dtype=torch.int64)
    for row, job in enumerate(jobs):
        ids[row, : len(job)] = torch.from_numpy(join_ids((*job.anchor, job.token_ids)).astype("i8"))
    cache = DynamicCache()  # without a config, so that sliding-window layers keep all tokens: all of them are stored
    model.base_model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
    for row, job in enumerate(jobs):
        layers = kv_of_cache(model, cache, row)
        yield CapturedChunk(blocks_of(job, planner, layers), manifest_of(job, planner, model_name))


@torch.no_grad()
def compute_with_states(prefiller: Prefiller, job: ChunkJob, planner: Planner, model_name: str) -> CapturedChunk:
    """A job's full prefill, layer by layer: a state behind padding would be another one, so jobs share no forward.

    The snapshots of its recurrent layers come behind its blocks. There are none where chunks are compressed, since then
    they are no exact prefix.
    """
    prompt = Prompt.of([*(text(part.tolist()) for part in job.anchor), chunk(job.token_ids.tolist())])
    with prefiller.open_alone(prompt, planner) as prefill:
        while not prefill.advance():
            pass
        result = prefill.result()
    blocks = [*blocks_of(job, planner, result.kv), *snapshot_blocks(prefiller.kinds, result.states)]
    return CapturedChunk(blocks, manifest_of(job, planner, model_name))


def has_snapshots(planner: Planner) -> bool:
    """Whether stored chunks can be exact prefixes, and so need the states behind them."""
    return codec_of(planner.codec).is_exact
