"""Batched prefills of several prompts on real layers: each has the same result as without batching."""

import pytest
import torch

from cacheblend.core.fuse.batching import run_together
from cacheblend.core.fuse.prefill import BlendedPrefill
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Hkvd
from cacheblend.engines.hf.layers import JoinedRows
from campaign import rotating
from parity.scenes import (
    DIVERSE,
    FAMILIES,
    QUESTION,
    RAG,
    SYSTEM,
    UNSEEN,
    A,
    B,
    C,
    assert_same,
    finish,
    stepper,
    warm_engine,
)

PROMPTS = (RAG, Prompt.of([SYSTEM, C, UNSEEN, A, QUESTION]), Prompt.of([B, QUESTION, A, QUESTION]))


def advance_together(passes: list[BlendedPrefill], tile_rows: int) -> None:
    while not passes[0].done:
        assert run_together([each.next_layer() for each in passes], JoinedRows, tile_rows) == [None] * len(passes)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "tile_rows"),
    [*rotating(((f, 1000) for f in FAMILIES), core=[(f, 1000) for f in DIVERSE]), *((f, 40) for f in DIVERSE)],
)
def test_batched_prefills_equal_single_prefills(family: str, tile_rows: int) -> None:
    engine, selector = warm_engine(family), Hkvd(ratios=(0.3,))
    alone = [finish(stepper(engine, prompt, selector)) for prompt in PROMPTS]
    together = [stepper(engine, prompt, selector) for prompt in PROMPTS]
    advance_together(together, tile_rows)
    for one, other in zip(together, alone, strict=True):
        result = one.result()
        assert result.report.recomputed_tokens == other.report.recomputed_tokens
        assert result.report.row_layers == other.report.row_layers
        assert_same(result, other.logits, other.kv, 1e-5)
