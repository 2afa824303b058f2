"""What the scheduler's side tells the workers, and what they tell it."""

from dataclasses import dataclass, field

from cacheblend.core.load.capture import ChunkJob
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.engines.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, eq=False)
class BlendJob:
    """A prompt whose KV the workers provide.

    Attributes:
        request_id: vLLM's.
        plan: of all tokens that are provided, from the first on.
        local_tokens: of these, what vLLM's own prefix cache holds already.
        block_ids: of the paged cache, in the order of the prompt.
    """

    request_id: str
    plan: BlendPlan
    local_tokens: int
    block_ids: list[int]


@dataclass
class StepJobs(KVConnectorMetadata):
    """What is new in an engine step.

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
        captured: chunks of `StepJobs.capture` that are done with since the start, stored or not.
    """

    captured: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Of two ranks: the one that has done less counts."""
        assert isinstance(other, StepReport)
        return StepReport(min(self.captured, other.captured))
