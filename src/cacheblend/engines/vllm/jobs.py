"""Messages between the two sides: jobs from the scheduler to the workers, and reports back."""

from dataclasses import dataclass, field

from cacheblend.core.load.capture import ChunkJob
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.engines.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, eq=False)
class BlendJob:
    """A prompt whose KV the workers write to the paged cache.

    Attributes:
        request_id: vLLM's.
        plan: of the prompt without its last token.
        local_tokens: leading tokens that vLLM's own prefix cache holds already.
        block_ids: of the paged cache, in the order of the prompt.
    """

    request_id: str
    plan: BlendPlan
    local_tokens: int
    block_ids: list[int]


@dataclass
class StepJobs(KVConnectorMetadata):
    """New jobs in an engine step.

    Attributes:
        blend: prompts to be provided.
        capture: chunks to be computed alone and stored.
        dropped: requests that ended while their prompt was being provided.
    """

    blend: list[BlendJob] = field(default_factory=list)
    capture: list[ChunkJob] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What the workers have finished.

    Attributes:
        captured: chunks of `StepJobs.capture` that need no more work since the start, stored or not.
    """

    captured: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """The report of two ranks: the smaller count."""
        assert isinstance(other, StepReport)
        return StepReport(min(self.captured, other.captured))
