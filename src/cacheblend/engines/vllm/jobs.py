"""What the scheduler's process and the workers send each other, once in each engine step. Pickled by vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cacheblend.core.load.capture import ChunkJob
from cacheblend.core.names import TokenIds
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.shadow import Compared
from cacheblend.engines.vllm.internals.interface import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True)
class AdapterSeen:
    """What the workers say of a LoRA adapter."""

    digest: str
    error: str = ""


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a request, as it was when its chunks were named. Equal ones compute the same.

    Attributes:
        generation: how often the weights of this number have been seen to change.
    """

    number: int
    digest: str
    request: Any = field(compare=False)
    generation: int = field(default=0, compare=False)


@dataclass(frozen=True, eq=False)
class BlendJob:
    """A prompt whose KV the workers write to the paged cache.

    Attributes:
        plan: of the prompt without its last token.
        local_tokens: leading tokens that vLLM's own prefix cache holds already.
        block_ids: of the paged cache, in the order of the prompt, for each group of KV cache; the null block where a
            window has passed.
        held_ids: as `block_ids`, of the local tokens: where they lie for the rows right behind them, which may see
            more than the prompt's last one. None: in `block_ids`.
        load_s: seconds that it may wait for the store, see `BlendConfig.load_timeout_s`; None: no bound.
    """

    request_id: str
    plan: BlendPlan
    selector: Selector
    local_tokens: int
    block_ids: list[list[int]]
    held_ids: list[list[int]] | None = None
    adapter: Adapter | None = None
    load_s: float | None = None


@dataclass(frozen=True, eq=False)
class CaptureJob:
    """A chunk that the workers compute alone and store."""

    chunk: ChunkJob
    planner: Planner
    adapter: Adapter | None = None


@dataclass(frozen=True, eq=False)
class CheckJob:
    """An answer that is compared with full prefill.

    Attributes:
        token_ids: the answer's first tokens, at least one.
        block_ids: of the prompt in the paged cache, in its order, for each group of KV cache; they are the request's in
            the step that delivers the job, and perhaps not after it.
        is_held: the request has ended, and vLLM keeps its blocks until it is told that they have been read.
    """

    number: int
    request_id: str
    prompt_ids: TokenIds
    token_ids: tuple[int, ...]
    block_ids: list[list[int]]
    is_held: bool = False
    adapter: Adapter | None = None


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
        read_s: seconds of reading, by tier; of a tier that was too slow, the seconds for which it was waited for.
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
        dropped: requests that ended while their prompt was being provided.
        check: an answer to be compared, whose blocks are read in this very step.
        released: requests that ended, and whose blocks need not be read any more.
        may_check: a tile of a layer of a full prefill may be computed behind everything else.
        is_check_free: nobody waits for what the check takes in this step.
        is_idle: vLLM computes no token in this step, so that a worker may wait for reads.
        is_reset: the weights have changed: of what came before, prompts are given up and chunks are not stored.
        adapters: vLLM's `LoRARequest`s whose weights' digests are wanted.
        weights: the fingerprint of the model's files that the scheduler's side names blocks by (`ModelIdentity`).
    """

    blend: list[BlendJob] = field(default_factory=list)
    capture: list[CaptureJob] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    check: CheckJob | None = None
    released: list[str] = field(default_factory=list)
    may_check: bool = False
    is_check_free: bool = False
    is_idle: bool = False
    is_reset: bool = False
    adapters: list[Any] = field(default_factory=list)
    weights: str = ""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What the workers have finished.

    Attributes:
        captured: chunks of `StepJobs.capture` that need no more work since the start, stored or not.
        outcomes: of the prompts that ended since the last report, by request.
        checked: of the check jobs that ended since the last report, by number: the result, or why there is none.
        check_s: seconds that the check took since the last report, where somebody may have waited.
        has_other_weights: some rank runs other weights than those that blocks are named by, and refuses every job.
    """

    captured: int = 0
    outcomes: dict[str, BlendOutcome] = field(default_factory=dict)
    checked: dict[int, Compared | str] = field(default_factory=dict)
    check_s: float = 0.0
    adapters: dict[int, AdapterSeen] = field(default_factory=dict)
    has_other_weights: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """The report of two ranks: the smaller count, the longer time; ranks agree on the rest, so the first one's is
        kept."""
        assert isinstance(other, StepReport)
        return StepReport(
            min(self.captured, other.captured),
            other.outcomes | self.outcomes,
            other.checked | self.checked,
            max(self.check_s, other.check_s),
            other.adapters | self.adapters,
            self.has_other_weights or other.has_other_weights,
        )


@dataclass(frozen=True)
class Unblendable(KVConnectorHandshakeMetadata):
    """What a worker that cannot blend tells the scheduler's side."""

    reason: str
