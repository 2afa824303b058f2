"""Prompts whose first passage shares a token with the text in front of it: what is loaded of that text is exact."""

import pytest
import torch

from cacheblend.core.plan.prompt import Prompt, part_of, text
from cacheblend.core.select.selectors import AllRows
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.baselines import full_recompute
from families import tiny_model
from parity.scenes import QUESTION, A, B, open_engine, random_ids, run

FRONT, ONE = random_ids(40, 80), SamplingParams(max_new_tokens=1, ignore_eos=True)
"""Blocks of 16, 16 and 8 tokens."""


def asked(kept: int, other: int) -> Prompt:
    """A prompt that leaves its front behind so many tokens, for tokens that depend on the passage."""
    edge, first = random_ids(3, other), part_of(A.token_ids, 1, len(A) - 1)
    return Prompt.of([text([*FRONT[:kept], *edge]), first, B, QUESTION], front=[text(FRONT)])


@pytest.mark.parametrize("anchor", ["none", "system"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "lfm2-tail"])
def test_the_front_is_shared_as_far_as_it_is_equal(family: str, anchor: str) -> None:
    """From the block of another prompt that goes on there, and from then on from a block that ends there; a state is
    known at the end of a block only."""
    has_states = family != "llama"
    with open_engine(tiny_model(family), [], anchor=anchor, capture=True) as engine:  # type: ignore[arg-type]
        engine.generate(Prompt.of([text(FRONT), A, B, QUESTION]), ONE)
        assert engine.flush(60)
        for kept, other in ((37, 81), (37, 82), (37, 82), (34, 83)):
            prompt = asked(kept, other)
            outcome = run(engine, prompt, AllRows())
            assert outcome.report.hit_tokens["prefix"] == kept or (has_states and other != 82)
            torch.testing.assert_close(
                outcome.result.logits, full_recompute(engine, prompt).logits, rtol=1e-4, atol=3e-5
            )
            assert outcome.report.missed_tokens == 0
            engine.generate(prompt, ONE)
            assert engine.flush(60)
