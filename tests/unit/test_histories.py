"""What a conversation's histories leave to be computed, and what is found in them, without an engine."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheblend.core.names import BlockName
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines import histories
from cacheblend.engines.histories import next_section
from cacheblend.store import MemoryStore
from store_blocks import raw_block

BLOCK, BOS = 32, 1
PLANNER = Planner(BlockName(b"root"), Anchor("bos", BOS), block_size=BLOCK)


def write(store: Any, plan: BlendPlan | None) -> None:
    """What the store lacks of a plan."""
    assert plan is not None
    for span in plan.spans:
        ids = plan.prompt.token_ids[span.start : span.stop]
        store.write(raw_block(span.name, span.parent, ids, [torch.zeros(1, 2, len(ids), 4)]))


def prompt_of(*parts: Iterable[int]) -> Prompt:
    return Prompt.of([text([BOS, *(token for part in parts for token in part)])])


@pytest.mark.parametrize(
    ("most", "ends"),
    [(1000, [33, 97, 161, 225, 289, 353, 417, 513, 581]), (70, [33, 97, 161, 225, 289, 353, 417, 481, 545, 581])],
    ids=["a quarter of a long prefix, no more than so many", "no more than may be computed at once"],
)
def test_a_history_is_computed_in_sections_of_whole_blocks(
    monkeypatch: pytest.MonkeyPatch, most: int, ends: list[int]
) -> None:
    monkeypatch.setattr(histories, "SECTION", 64)
    monkeypatch.setattr(histories, "MOST_SECTION", 100)
    store, prompt, found, done = MemoryStore(1 << 22), prompt_of(range(10, 590)), list[int](), 0
    while True:
        held, section = next_section(PLANNER, prompt, store, most)
        assert (0 if held is None else len(held)) == done
        if section is None:
            break
        assert section.prefix_length == done
        assert {span.source for span in section.spans if span.start >= done} == {Source.TEXT}
        write(store, section)
        done = len(section)
        found.append(done)
    assert found == ends


def test_a_section_has_a_block_at_least_and_ends_where_a_chunk_begins_or_as_far_as_is_held_elsewhere() -> None:
    prompt = Prompt.of([text([BOS, *range(10, 60)]), chunk(range(100, 200)), text(range(5))])
    store = MemoryStore(1 << 22)
    held, section = next_section(PLANNER, prompt, store, 1)
    assert held is None and section is not None and len(section) == 1  # BOS is a block of its own
    for within, length in ((1, 1), (32, 1), (33, 33), (50, 33)):
        held, section = next_section(PLANNER, prompt, store, 1000, within)
        assert held is None and section is not None and len(section) == length
    assert next_section(PLANNER, prompt, store, 1000, 0) == (None, None)
    held, section = next_section(PLANNER, prompt, store, 1000)
    assert held is None and section is not None and len(section) == 51
    write(store, section)
    for within in (None, 33, 60):
        held, section = next_section(PLANNER, prompt, store, 1000, within)
        assert held is not None and len(held) == 51 and section is None
    starts_with_a_chunk = replace(prompt, segments=prompt.segments[1:])
    assert next_section(PLANNER, starts_with_a_chunk, store, 1000) == (None, None)
