"""The worker side of a model that cannot be blended, or is not the one that blocks are named by: gives back what the
scheduler's side sends all the same.

Inside a `MultiConnector` vLLM passes the scheduler's side the handshake of one connector only, so that it may not learn
of the refusal; a prompt that nobody provides would never be answered.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.engines.vllm.jobs import AdapterSeen, CaptureJob, StepJobs
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.reasons import OTHER_WEIGHTS
from cacheblend.engines.vllm.worker.outbox import Outbox


class Refusal(Outbox):
    """Stands where `Worker` does.

    Args:
        block_size: of the paged cache, in tokens.
        reason: why the model cannot be blended.
        label: the same, as it is counted.
    """

    is_follower = False

    def __init__(self, block_size: int, reason: str, label: str = ModelNotBlendableError.__name__) -> None:
        super().__init__(block_size)
        self._reason, self._label, self.captured, self.counts = reason, label, 0, Counts()
        self.has_other_weights = label == OTHER_WEIGHTS
        self.checks = self.adapters = _Nothing()

    def step(self, jobs: StepJobs) -> None:
        """Gives back prompts and chunks in the step that delivers them."""
        for job in jobs.blend:
            self._end_unfilled(job, self._label)
        self.captured += len(jobs.capture)

    def capture(self, jobs: Sequence[CaptureJob]) -> NoReturn:
        """Refuses.

        Raises:
            ModelNotBlendableError: always.
        """
        raise ModelNotBlendableError(self._reason)

    def close(self) -> None:
        """Does nothing."""


class _Nothing:
    """Of what was compared, and seen of adapters."""

    def take_read(self) -> set[str]:
        return set()

    def take_ended(self) -> tuple[dict[int, Any], float]:
        return {}, 0.0

    def take_seen(self) -> dict[int, AdapterSeen]:
        return {}
