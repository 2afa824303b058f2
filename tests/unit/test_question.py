"""Attention weights of few rows against the dense oracle, and which rows of a prompt stand for its question."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.fuse import question
from cacheblend.core.fuse.question import rows_to_ask
from cacheblend.core.kernels.attention import attention_weights
from cacheblend.core.kernels.attention_spec import AttentionSpec
from cacheblend.core.names import BlockName, root_name
from cacheblend.core.plan.blocks import BlockEntry, EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.plan import Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from reference_attention import dense_attention

SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=9),
    "softcap": AttentionSpec(0.3, softcap=2.0),
    "sinks": AttentionSpec(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all of them": AttentionSpec(0.3, window=9, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_weights_mix_values_as_dense_attention_does(spec: str, kv_heads: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([12, 13, 29, 30])
    query, keys, values = (
        torch.randn(heads, n, 8, generator=generator).to(dtype) for heads, n in ((4, 4), (kv_heads, 31), (kv_heads, 31))
    )
    weights = attention_weights(query, keys, positions, torch.arange(31), SPECS[spec])
    assert weights.shape == (4, 4, 31) and weights.dtype == torch.float32
    mixed = torch.bmm(weights, values.float().repeat_interleave(4 // kv_heads, 0)).transpose(0, 1)
    expected = dense_attention(query, keys, values, positions, SPECS[spec])
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    assert (weights.sum(-1) < 1 - 1e-4).all() == (SPECS[spec].sinks is not None)


def test_keys_that_are_left_out_get_nothing_and_the_rest_gets_it_all() -> None:
    query, keys = torch.randn(2, 2, 8), torch.randn(2, 20, 8)
    at = torch.tensor([0, 1, 5, 6, 18, 19])
    positions = torch.tensor([18, 19])
    some = attention_weights(query, keys[:, at], positions, at, SPECS["plain"])
    hidden = torch.ones(20, dtype=torch.bool)
    hidden[at] = False
    every = attention_weights(query, keys, positions, torch.arange(20), SPECS["plain"])
    every[..., hidden] = 0
    torch.testing.assert_close(some, (every / every.sum(-1, keepdim=True))[..., at])
    assert some[:, 0, -1].eq(0).all()  # row 18 does not see key 19


@pytest.mark.parametrize("bound", [1, 100, 1 << 24])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 3), (5, 1)])
def test_groups_cover_all_heads_with_their_kv_heads(
    heads: int, kv_heads: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question, "_MAX_WEIGHTS", bound)
    groups = question._groups(torch.zeros(heads, 3, 4), 5, kv_heads)
    covered = [(head, head // (heads // kv_heads)) for head in range(heads)]
    assert [h for part, _ in groups for h in range(heads)[part]] == [head for head, _ in covered]
    for part, kv_part in groups:
        assert sorted({kv for head, kv in covered if head in range(heads)[part]}) == list(range(kv_heads)[kv_part])
        assert len(range(heads)[part]) * 3 * 5 <= max(bound, heads // kv_heads * 15)


LAYOUT = KVLayout((LayerShape(1, 2),), torch.float32)


class Holds(EmptySource):
    """A store that holds whatever block has one of these token counts."""

    def __init__(self, prompt: Prompt, planner: Planner, held: set[int]) -> None:
        self.entries: dict[BlockName, BlockEntry] = {}
        for i, span in enumerate(planner.plan(prompt, self).spans):
            if i in held:
                tokens = prompt.token_ids[span.start : span.stop]
                self.entries[span.name] = BlockEntry(tokens, LAYOUT, "memory")

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [self.entries.get(name) for name in names]


segment_lists = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=6)


@given(segment_lists, st.sets(st.integers(0, 12)), st.integers(2, 12))
def test_question_rows(segments: list[tuple[bool, int]], held: set[int], limit: int) -> None:
    """Behind the last chunk, within the limit, the last row among them; never a candidate, never an exact prefix."""
    parts = [(chunk if is_chunk else text)([10 * i + 1] * n) for i, (is_chunk, n) in enumerate(segments)]
    prompt, planner = Prompt.of(parts), Planner(root_name("m", "float32"), block_size=4)
    plan = planner.plan(prompt, Holds(prompt, planner, held))
    rows = plan.question_rows(limit)
    assert 1 <= len(rows) <= limit
    assert (np.diff(rows) > 0).all() and rows[-1] == len(plan) - 1
    assert not set(rows) & set(plan.candidate_rows)
    if len(plan.candidate_rows):
        assert rows[0] >= plan.prefix_length
    stored = [p for s in plan.spans if s.source in (Source.PREFIX, Source.LOADED) for p in range(s.start, s.stop)]
    assert plan.stored_rows.tolist() == stored
    assert plan.segment_indices.tolist() == [i for i, part in enumerate(prompt.segments) for _ in range(len(part))]
    ends = np.cumsum([len(part) for part in prompt.segments])
    behind = max((int(end) for end, part in zip(ends, prompt.segments, strict=True) if part.is_chunk), default=0)
    if behind < len(plan):
        assert rows[0] >= behind and len(rows) == min(limit, len(plan) - rows[0])


@pytest.mark.parametrize(("tokens", "rows"), [(10, 2), (59, 2), (60, 3), (2000, 100)])
def test_the_question_asks_with_a_twentieth_of_the_prompt(tokens: int, rows: int) -> None:
    assert rows_to_ask(tokens) == rows
