"""What an answer and full prefill have in common, token by token. Knows tensors; does not know who computed them.

    prompt ............ | a0 a1 a2 ... a14      the rows of full prefill over the prompt and what was answered
                      ^   ^  ^  ^               the rows whose logits are compared
    blend's likeliest a0  a1 .. a15             at each of them; what was answered, if the answer was greedy
    full's likeliest  ?   ?  ?                  same or not

A token counts as chosen by full prefill too if both find the same one likeliest, whatever was drawn: a sampled answer,
or one with a repetition penalty, says nothing by its tokens alone. After a difference the following tokens are compared
on what was answered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ANSWER_TOKENS = 16
"""The most tokens of an answer that are compared."""

MOST_KL = 100.0
"""Nats; a distribution that is not finite counts as this far away."""


@dataclass(frozen=True)
class Compared:
    """One answer, compared with full prefill.

    Attributes:
        kl: KL(full || blended) of the first token, in nats.
        agreed: for each compared token of the answer, whether both find the same one likeliest; at least one.
    """

    kl: float
    agreed: tuple[bool, ...]

    @property
    def first(self) -> bool:
        """The first token's."""
        return self.agreed[0]


def compare(first: torch.Tensor, likeliest: Sequence[int], full: torch.Tensor) -> Compared:
    """Compares an answer with full prefill over the same tokens.

    Args:
        first: [vocab] logits that the answer's first token was drawn from.
        likeliest: token ids, the likeliest at each of the answer's first n tokens.
        full: [n, vocab] logits of full prefill at the prompt's last row and behind each answered token but the last.
    """
    wanted = full.argmax(-1).tolist()
    return Compared(kl_divergence(full[0], first), tuple(a == b for a, b in zip(likeliest, wanted, strict=True)))


def kl_divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full || other) of the distributions of two logits, [vocab] each, in nats; at most `MOST_KL`."""
    log_full, log_other = full.double().cpu().log_softmax(-1), other.double().cpu().log_softmax(-1)
    share = log_full.exp()
    kl = float(torch.where(share == 0, 0.0, share * (log_full - log_other)).sum())
    return MOST_KL if math.isnan(kl) else min(max(kl, 0.0), MOST_KL)
