"""What a worker has to tell vLLM and the scheduler's side of requests that it is done with, until it is taken."""

from collections.abc import Mapping

from cacheblend.engines.vllm.internals.prefix_cache import NULL_BLOCK
from cacheblend.engines.vllm.jobs import BlendJob, BlendOutcome


class Outbox:
    """Requests that are provided, or given up.

    Args:
        block_size: of the paged cache, in tokens.

    Attributes:
        has_other_weights: see `StepReport`.
    """

    has_other_weights = False

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._provided: set[str] = set()
        self._outcomes: dict[str, BlendOutcome] = {}
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    def take_provided(self) -> set[str]:
        """Requests whose prompts were completed in the paged cache since the last call."""
        provided, self._provided = self._provided, set()
        return provided

    def take_failed_blocks(self) -> set[int]:
        """Blocks of the paged cache that could not be filled since the last call: vLLM recomputes them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests of which vLLM recomputes everything, since the last call; they are among those provided."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_outcomes(self) -> dict[str, BlendOutcome]:
        """How the prompts ended that were provided or given up since the last call."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    def _end(self, request_id: str, outcome: BlendOutcome) -> None:
        self._provided.add(request_id)
        self._outcomes[request_id] = outcome

    def _end_unfilled(self, job: BlendJob, reason: str, read_s: Mapping[str, float] | None = None) -> None:
        """A request whose blocks hold nothing: vLLM computes it. `read_s`: see `BlendOutcome`."""
        tables = job.block_ids
        # Blocks do not tell what is missing where a window has passed some, nor in which group.
        if len(tables) > 1 or NULL_BLOCK in tables[0]:
            self._failed_requests.add(job.request_id)
        else:
            self._failed_blocks.update(tables[0][job.local_tokens // self._block_size :])
        self._end(job.request_id, BlendOutcome(failure=reason, read_s=read_s or {}))
