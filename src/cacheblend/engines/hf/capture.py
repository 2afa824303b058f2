"""Computes chunks alone behind their anchor, and stores them: what a name promises is what a plain prefill gives."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend.core.blocks import Block, ChunkManifest
from cacheblend.core.loader import LayerKV
from cacheblend.core.naming import BlockName, TokenIds, block_name, chain_names, join_ids, split_blocks
from cacheblend.core.plan import BlendPlan, Planner


@dataclass(frozen=True, eq=False)
class ChunkJob:
    """A chunk to be computed.

    Attributes:
        anchor: tokens in front of it, segment by segment.
        token_ids: its own, [tokens].
        label: for people.
    """

    anchor: tuple[TokenIds, ...]
    token_ids: TokenIds
    label: str = ""

    def __len__(self) -> int:
        return len(self.token_ids) + sum(len(part) for part in self.anchor)


@dataclass(frozen=True, eq=False)
class CapturedChunk:
    """Blocks to be written (the anchor's first), and the manifest to be put behind them."""

    blocks: list[Block]
    manifest: ChunkManifest


def manifest_of(job: ChunkJob, planner: Planner, model_name: str) -> ChunkManifest:
    """How the store lists the chunk."""
    names = chain_names(planner.chain_of(job.anchor), split_blocks(job.token_ids, planner.block_size))
    return ChunkManifest(
        chunk_id=names[-1],
        root=planner.root,
        anchor_ids=join_ids(job.anchor),
        token_ids=job.token_ids,
        block_names=tuple(names),
        model=model_name,
        label=job.label,
    )


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
        yield CapturedChunk(_blocks_of(job, planner, layers), manifest_of(job, planner, model_name))


def publish(plan: BlendPlan, kv: Sequence[LayerKV]) -> list[Block]:
    """Blocks of this request whose KV is exact as it stands: text in front of the first chunk, and chunks right
    behind their anchor."""
    ids = plan.prompt.token_ids
    return [_block(span.name, span.parent, ids[span.start : span.stop], span.start, kv) for span in plan.publishable]


def _blocks_of(job: ChunkJob, planner: Planner, layers: Sequence[LayerKV]) -> list[Block]:
    blocks, parent, position = [], planner.root, 0
    for segment in (*job.anchor, job.token_ids):
        for tokens in split_blocks(segment, planner.block_size):
            name = block_name(parent, tokens)
            blocks.append(_block(name, parent, tokens, position, layers))
            parent, position = name, position + len(tokens)
    return blocks


def _block(name: BlockName, parent: BlockName, tokens: TokenIds, start: int, kv: Sequence[LayerKV]) -> Block:
    stop = start + len(tokens)
    records = [torch.stack([k[:, start:stop], v[:, start:stop]], dim=1).cpu() for k, v in kv]
    return Block(name, parent, tokens, records)
