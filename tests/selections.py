"""What selectors select, as booleans."""

import torch

from cacheblend.core.select.selectors import Candidates, Selector, as_mask


def masked(selector: Selector, candidates: Candidates) -> torch.Tensor:
    """Boolean [n]: the candidates that stay active."""
    return as_mask(selector.select(candidates), len(candidates.positions))
