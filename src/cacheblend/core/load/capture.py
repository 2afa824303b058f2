"""Makes the blocks that a store keeps from computed KV: of a chunk computed alone, and of a prompt's exact text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend.core.load.loader import LayerKV
from cacheblend.core.names import BlockName, TokenIds, block_name, chain_names, join_ids, split_blocks
from cacheblend.core.plan.blocks import Block, ChunkManifest, KVLayout, LayerShape
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.plan.plan import BlendPlan, Span
from cacheblend.core.plan.planner import Planner


@dataclass(frozen=True, eq=False)
class ChunkJob:
    """A chunk to be computed alone, behind the tokens of its anchor, segment by segment."""

    anchor: tuple[TokenIds, ...]
    token_ids: TokenIds
    label: str = ""

    def __len__(self) -> int:
        return len(self.token_ids) + sum(len(part) for part in self.anchor)


@dataclass(frozen=True, eq=False)
class CapturedChunk:
    """Blocks to be written (the anchor's first), and the manifest to be written after them."""

    blocks: list[Block]
    manifest: ChunkManifest


def manifest_of(job: ChunkJob, planner: Planner, model_name: str) -> ChunkManifest:
    """The manifest under which a store lists the chunk."""
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


def publish(
    plan: BlendPlan, kv: Sequence[LayerKV], spans: Sequence[Span] | None = None, *, first: int = 0
) -> list[Block]:
    """Blocks of a request whose KV, given by layer from row `first` on, is exact as computed: of these spans of the
    plan, which have nothing but text in front of them; None: of `BlendPlan.publishable`."""
    ids, spans = plan.prompt.token_ids, plan.publishable if spans is None else spans
    return [_block(s.name, s.parent, ids[s.start : s.stop], s.start - first, kv, "raw") for s in spans]


def blocks_of(job: ChunkJob, planner: Planner, layers: Sequence[LayerKV]) -> list[Block]:
    """The blocks of a chunk that was computed alone, the anchor's first (without them for lossy codecs: exact prefixes
    never read compressed blocks), from the KV of anchor and chunk, [kv_heads, tokens, head_dim] each."""
    blocks, parent, position = [], planner.root, 0
    needed_from = 0 if codec_of(planner.codec).is_exact else sum(len(part) for part in job.anchor)
    for segment in (*job.anchor, job.token_ids):
        for tokens in split_blocks(segment, planner.block_size):
            name = block_name(parent, tokens)
            if position >= needed_from:
                blocks.append(_block(name, parent, tokens, position, layers, planner.codec))
            parent, position = name, position + len(tokens)
    return blocks


def _block(
    name: BlockName, parent: BlockName, tokens: TokenIds, start: int, kv: Sequence[LayerKV], codec: str
) -> Block:
    stop = start + len(tokens)
    kv = [layer for layer in kv if layer.keys.shape[0]]  # the others have no attention
    layout = KVLayout(tuple(LayerShape(k.shape[0], k.shape[2]) for k, _ in kv), kv[0].keys.dtype, codec)
    records = [layout.encode(torch.stack([k[:, start:stop], v[:, start:stop]], dim=1)).cpu() for k, v in kv]
    return Block(name, parent, tokens, records, layout)
