"""Computes `hybrid_prefix_exact`, and merges it into the figures of docs/results/vllm-reach.json.

PYTHONPATH=src:tests python tests/hybrid_figure.py
"""

import torch

from cacheblend.core.plan.prompt import Prompt, chunk
from cacheblend.core.select.selectors import NoRows
from families import HYBRID, tiny_model
from parity.scenes import QUESTION, open_engine, random_ids
from vllm_table import RESULTS, record

LEADING = chunk(random_ids(170, 40))
TOLERANCE = 3e-5
"""Largest error of a logit, by the largest logit."""


@torch.no_grad()
def prefix_error(family: str) -> float:
    """How far logits behind a stored chunk at a prompt's start are from full prefill's, by the largest of them.

    Raises:
        AssertionError: the chunk was not loaded as an exact prefix.
    """
    model, prompt = tiny_model(family), Prompt.of([LEADING, QUESTION])
    with open_engine(model, [LEADING]) as engine:
        result = engine.prefill(prompt, selector=NoRows())
    assert result.report.hit_tokens["prefix"] == len(LEADING), family
    full = model(torch.tensor([prompt.token_ids.tolist()])).logits[0, -1]
    return float((result.logits - full).abs().max() / full.abs().max())


def measure() -> bool:
    """Whether exact prefixes go on from their snapshots as full prefill does, in every family of hybrids."""
    return all(prefix_error(family.name) <= TOLERANCE for family in HYBRID)


if __name__ == "__main__":
    record(RESULTS, hybrid_prefix_exact=measure())
    print(RESULTS.read_text(encoding="utf-8"), end="")
