"""What the scheduler's process and the workers send each other, once in each engine step. Pickled by vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cacheblend.core.load.capture import ChunkJob
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, eq=False)
class BlendJob:
    """A prompt whose KV the workers write to the paged cache.

    Attributes:
        request_id: vLLM's.
        plan: of the prompt without its last token.
        selector: which loaded rows of this request are recomputed.
        local_tokens: leading tokens that vLLM's own prefix cache holds already.
        block_ids: of the paged cache, in the order of the prompt.
    """

    request_id: str
    plan: BlendPlan
    selector: Selector
    local_tokens: int
    block_ids: list[int]


@dataclass(frozen=True, eq=False)
class CaptureJob:
    """A chunk that the workers compute alone and store.

    Attributes:
        chunk: its tokens and its anchor.
        planner: names its blocks; it has the root of the chunk's tenant.
    """

    chunk: ChunkJob
    planner: Planner


@dataclass(frozen=True)
class BlendOutcome:
    """How a `BlendJob` ended.

    Attributes:
        failure: why vLLM has to compute the prompt itself; empty: the prompt was provided.
        hit_tokens: of the prompt, by source: `vllm` (its own prefix cache), `prefix` (exact hits of the store), a tier.
        recomputed_tokens: loaded tokens that were recomputed after the last selection.
        row_layers: rows times layers that were computed, all passes included.
        prefill_share: of a full prefill's computing.
        seconds: from the job's first layer to its last, other work between them included.
        compute_s: seconds of computing; None: something else was computed meanwhile.
        read_s: seconds of reading, by tier.
    """

    failure: str = ""
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    recomputed_tokens: int = 0
    row_layers: int = 0
    prefill_share: float = 0.0
    seconds: float = 0.0
    compute_s: float | None = None
    read_s: Mapping[str, float] = field(default_factory=dict)


@dataclass
class StepJobs(KVConnectorMetadata):
    """New jobs in an engine step.

    Attributes:
        blend: prompts to be provided. No worker begins one in the step that delivers it: the front that it shares with
            a plain request may be computed in that very step, after `start_load_kv`.
        capture: chunks to be computed alone and stored.
        dropped: requests that ended while their prompt was being provided.
        is_idle: vLLM computes no token in this step, so that a worker may wait for reads.
        is_reset: the weights have changed: of what came before, prompts are given up and chunks are not stored.
    """

    blend: list[BlendJob] = field(default_factory=list)
    capture: list[CaptureJob] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    is_idle: bool = False
    is_reset: bool = False


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What the workers have finished.

    Attributes:
        captured: chunks of `StepJobs.capture` that need no more work since the start, stored or not.
        outcomes: of the prompts that ended since the last report, by request.
    """

    captured: int = 0
    outcomes: dict[str, BlendOutcome] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """The report of two ranks: the smaller count; ranks agree on outcomes, so those of the first one are kept."""
        assert isinstance(other, StepReport)
        return StepReport(min(self.captured, other.captured), other.outcomes | self.outcomes)
