"""Which requests of a RAGPulse trace are replayed, what is stored before, and the most that blending can gain."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cacheblend.core.errors import InvalidInputError
from lab.servers.ragpulse import TraceRequest, TraceText, tokens_of

CHECK_LAYER = 1  # as the benchmarks set it


@dataclass(frozen=True)
class Sample:
    """The requests, and the passages that are stored before they arrive.

    Attributes:
        requests: sampled from the last third.
        before: requests of the first two thirds.
        stored: passages that occur in both.
    """

    requests: list[TraceRequest]
    before: list[TraceRequest]
    stored: frozenset[TraceText]

    @staticmethod
    def of(trace: Sequence[TraceRequest], count: int, seed: int) -> "Sample":
        """Samples requests with passages from the last third of a trace.

        Raises:
            InvalidInputError: there are fewer than `count`.
        """
        cut = len(trace) * 2 // 3
        before, last = ([r for r in part if r.passages] for part in (trace[:cut], trace[cut:]))
        if len(last) < count:
            raise InvalidInputError(f"the trace's last third has {len(last)} requests with passages, not {count}")
        requests = random.Random(seed).sample(last, count)
        named = {passage for request in before for passage in request.passages}
        return Sample(requests, before, frozenset(p for r in requests for p in r.passages if p in named))

    def held_tokens(self, request: TraceRequest) -> int:
        """Stored tokens of a request."""
        return tokens_of(p for p in request.passages if p in self.stored)


def row_layer_ceiling(requests: Iterable[tuple[int, int]], layers: int, ratio: float) -> float:
    """Full prefill's row-layers over blending's: the gain if compute were all, and nothing else were shared.

    Args:
        requests: (tokens, stored tokens) of each.
        layers: number of the model's layers.
        ratio: recompute ratio.
    """
    plain = blended = 0.0
    for tokens, held in requests:
        plain += tokens * layers
        blended += tokens * CHECK_LAYER + (tokens - held + ratio * held) * (layers - CHECK_LAYER)
    return plain / blended
