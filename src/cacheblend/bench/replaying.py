"""What is replayed of a RAGPulse trace: which requests, what of them is stored, what blending can gain at most."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cacheblend.bench.ragpulse import TraceRequest, TraceText, tokens_of
from cacheblend.core.errors import InvalidInputError

CHECK_LAYER = 1  # as the benches set it


@dataclass(frozen=True)
class Sample:
    """The requests, and what of them is stored before they come.

    Attributes:
        requests: sampled.
        before: those in front of the cut.
        stored: passages that both name.
    """

    requests: list[TraceRequest]
    before: list[TraceRequest]
    stored: frozenset[TraceText]

    @staticmethod
    def of(trace: Sequence[TraceRequest], count: int, seed: int) -> "Sample":
        """Of the last third's requests with passages.

        Raises:
            InvalidInputError: there are not as many.
        """
        cut = len(trace) * 2 // 3
        before, behind = ([r for r in part if r.passages] for part in (trace[:cut], trace[cut:]))
        if len(behind) < count:
            raise InvalidInputError(f"the trace's last third has {len(behind)} requests with passages, not {count}")
        requests = random.Random(seed).sample(behind, count)
        named = {passage for request in before for passage in request.passages}
        return Sample(requests, before, frozenset(p for r in requests for p in r.passages if p in named))

    def held_tokens(self, request: TraceRequest) -> int:
        """Of a request's tokens, those that are stored."""
        return tokens_of(p for p in request.passages if p in self.stored)


def row_layer_ceiling(requests: Iterable[tuple[int, int]], layers: int, ratio: float) -> float:
    """How much less is computed if nothing but rows times layers counted, and nothing else were ever shared.

    Args:
        requests: (tokens, tokens that are stored) of each.
        layers: of the model.
        ratio: recompute ratio.
    """
    plain = blended = 0.0
    for tokens, held in requests:
        plain += tokens * layers
        blended += tokens * CHECK_LAYER + (tokens - held + ratio * held) * (layers - CHECK_LAYER)
    return plain / blended
