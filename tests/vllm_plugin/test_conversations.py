"""Edited histories in vLLM: what a conversation had computed is computed once more as it is, and loaded where a later
prompt has it at another place.

Situations: thoughts stripped, results replaced, a clock in the first line, several edits at once, none; answers as part
of the next prompt; named conversations and none; other tenants and conversations that ask the same; a history longer
than a section; a store that drops what it was given; weights that change in between; an engine that is never idle.
"""

import random
from typing import Any

import pytest
import torch

from cacheblend.core.names import as_token_ids
from cacheblend.core.plan.plan import Source
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines.vllm.scheduler import conversations
from paged_scenes import LAYERS, VOCAB, Scene
from vllm_prompts import FORGET, Asked, Texts, ask
from vllm_requests import Request, give, scheduling, start, why, with_options
from vllm_running import Served, tokens

EXTRA = {"edits": True, "anchor": "none", "refresh_s": 0, "block_size": 48}


def edited(rng: random.Random, texts: Texts, pieces: list[list[int]]) -> list[list[int]]:
    """The next turn's history: pieces gone, replaced or inserted, or nothing."""
    kept = [piece for piece in pieces if rng.random() > 0.15] if rng.random() < 0.7 else pieces
    if rng.random() < 0.3:
        kept = [texts.ids(9), *kept[1:]]
    if rng.random() < 0.3 and kept:
        at = rng.randrange(len(kept))
        kept = [*kept[:at], kept[at][: len(kept[at]) // 2], texts.ids(5), kept[at][len(kept[at]) // 2 :], *kept[at + 1 :]]
    return [*kept, texts.ids(rng.choice([30, 90, 140]))]


@pytest.mark.parametrize("block_size", [32, 64])
def test_at_ratio_one_answers_of_edited_histories_are_vllms(llama: Served, block_size: int) -> None:
    texts = Texts(block_size)
    steps, histories = list[dict[str, Any]](), dict[str, list[list[int]]]()
    for _ in range(24):
        name = texts.rng.choice(["", "a", "b"])
        pieces = histories[name] = edited(texts.rng, texts, histories.get(name) or [texts.ids(70), texts.ids(110)])
        prompt = Asked([token for piece in pieces for token in piece][:1800], [])
        steps.append(ask([], [prompt], options={"conversation": name} if name else {}))
        steps[-1].pop("chunks")
        if texts.rng.random() < 0.1:
            steps.append(FORGET)
    found = llama.run(steps, EXTRA | {"recompute_ratio": 1.0}, block_size=block_size)
    plain = llama.run([{**step, "options": {}} if "ask" in step else step for step in steps], None, block_size=block_size)
    for step, mine, right in zip(steps, found["answers"], plain["answers"], strict=True):
        assert step == FORGET or tokens(mine) == tokens(right)
    counted = found["metrics"]
    assert counted["vllm:cacheblend_hit_tokens moved"] > 300
    assert "vllm:cacheblend_fallbacks" not in " ".join(counted)
