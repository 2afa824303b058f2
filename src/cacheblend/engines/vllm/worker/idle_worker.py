"""What any worker has to hand over, and the worker of a model that cannot be blended, or is not the one that blocks are
named by.

Inside a `MultiConnector` vLLM passes the scheduler's side the handshake of one connector only, so that it may not learn
of the refusal; a prompt that nobody provides would never be answered.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.engines.vllm.internals.prefix_cache import NULL_BLOCK
from cacheblend.engines.vllm.jobs import BlendJob, BlendOutcome, CaptureJob, StepJobs, StepReport
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.reasons import OTHER_WEIGHTS


class Outbox:
    """Requests that a worker has provided or given up, until vLLM and the scheduler's side collect them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._provided: set[str] = set()
        self._outcomes: dict[str, BlendOutcome] = {}
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self.counts = Counts()

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


class IdleWorker(Outbox):
    """Stands where `Worker` does, and gives back what the scheduler's side sends all the same.

    Args:
        reason: why nothing is blended.
        label: the same, as it is counted.
    """

    is_follower = False

    def __init__(self, block_size: int, reason: str, label: str = ModelNotBlendableError.__name__) -> None:
        super().__init__(block_size)
        self._reason, self._label, self._captured = reason, label, 0

    def step(self, jobs: StepJobs) -> None:
        """Gives back prompts and chunks in the step that delivers them."""
        for job in jobs.blend:
            self._end_unfilled(job, self._label)
        self._captured += len(jobs.capture)

    def report(self) -> StepReport:
        """What has ended since the last report."""
        return StepReport(self._captured, self.take_outcomes(), has_other_weights=self._label == OTHER_WEIGHTS)

    def take_read(self) -> set[str]:
        """Nothing is compared."""
        return set()

    def capture(self, jobs: Sequence[CaptureJob]) -> NoReturn:
        """Raises ModelNotBlendableError."""
        raise ModelNotBlendableError(self._reason)

    def close(self) -> None:
        """Does nothing."""
