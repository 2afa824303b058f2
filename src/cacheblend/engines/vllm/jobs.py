"""What the scheduler's process and the workers send each other, once in each engine step. Pickled by vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.shadow import Compared
from cacheblend.engines.vllm.internals import interface


@dataclass(frozen=True)
class AdapterSeen:
    """What the workers say of a LoRA adapter."""

    digest: str
    error: str = ""


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a request, as it was when its chunks were named. Equal ones compute the same."""

    number: int
    digest: str
    request: Any = field(compare=False)
    generation: int = field(default=0, compare=False)  # how often its number's weights have been seen to change


@dataclass(frozen=True, eq=False)
class BlendJob:
    """A prompt whose KV the workers write to the paged cache."""

    request_id: str
    plan: BlendPlan  # of the prompt without its last token
    selector: Selector
    local_tokens: int  # leading ones, that vLLM's own prefix cache holds already
    # of the paged cache, in the order of the prompt, for each group of KV cache; the null block where a window has
    # passed
    block_ids: list[list[int]]
    # as `block_ids`, of the local tokens: where they lie for the rows right behind them, which may see more than the
    # prompt's last one. None: in `block_ids`.
    held_ids: list[list[int]] | None = None
    adapter: Adapter | None = None
    load_s: float | None = None  # that it may wait for the store, see `BlendConfig.load_timeout_s`


@dataclass(frozen=True, eq=False)
class CaptureJob:
    """A chunk that the workers compute alone and store; or text that they compute behind what the store holds of it, or
    copy from vLLM's cache."""

    chunk: ChunkJob
    planner: Planner
    adapter: Adapter | None = None
    exact: BlendPlan | None = None  # of the text, of which the store holds a prefix; its other blocks are stored
    # Of each group, that hold these other blocks' rows, from the block of the first one on. None: they are computed.
    pages: list[list[int]] | None = None

    @property
    def name(self) -> BlockName:
        """What it is known by: of its last block."""
        if self.exact is not None:
            return self.exact.spans[-1].name
        return manifest_of(self.chunk, self.planner, "").chunk_id

    @property
    def tokens(self) -> int:
        """Tokens whose KV is held until it is stored."""
        return len(self.chunk) - (0 if self.exact is None else self.exact.prefix_length)


@dataclass(frozen=True, eq=False)
class CheckJob:
    """An answer that is compared with full prefill."""

    number: int
    request_id: str
    prompt_ids: TokenIds
    token_ids: tuple[int, ...]  # the answer's first ones, at least one
    block_ids: list[list[int]]  # see `BlendJob`; the request's in the step that delivers this, perhaps not after it
    is_held: bool = False  # the request has ended, and vLLM keeps its blocks until it is told that they have been read
    adapter: Adapter | None = None


@dataclass(frozen=True)
class BlendOutcome:
    """How a `BlendJob` ended."""

    failure: str = ""  # why vLLM has to compute the prompt itself
    # of the prompt, by source: `vllm` (its own prefix cache), `prefix` (exact hits of the store), a tier
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    recomputed_tokens: int = 0  # loaded ones, after the last selection
    row_layers: int = 0  # that were computed, all passes included
    prefill_share: float = 0.0  # of a full prefill's computing
    seconds: float = 0.0  # from the job's first layer to its last, other work between them included
    compute_s: float | None = None  # None: something else was computed meanwhile
    # seconds of reading, by tier; of a tier that was too slow, the seconds for which it was waited for
    read_s: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0  # without the last one


@dataclass
class StepJobs(interface.KVConnectorMetadata):
    """New jobs in an engine step. No worker begins a blend in the step that delivers it: the front that it shares with
    a plain request may be computed in that very step, behind `start_load_kv` where another connector loads for it."""

    blend: list[BlendJob] = field(default_factory=list)
    capture: list[CaptureJob] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # requests that ended while their prompt was being provided
    check: CheckJob | None = None  # its blocks are read in this very step
    released: list[str] = field(default_factory=list)  # requests that ended, whose blocks need not be read any more
    may_check: bool = False  # a tile of a layer of a full prefill may be computed behind everything else
    is_check_free: bool = False  # nobody waits for what the check takes in this step
    is_idle: bool = False  # vLLM computes no token in this step, so that a worker may wait for reads
    is_reset: bool = False  # new weights: of what came before, prompts are given up and chunks are not stored
    adapters: list[Any] = field(default_factory=list)  # vLLM's `LoRARequest`s whose weights' digests are wanted
    weights: str = ""  # fingerprint of the files that the scheduler's side names blocks by (`ModelIdentity`)

    @property
    def is_nothing(self) -> bool:
        """vLLM computes, and the workers have nothing new to do."""
        new = self.blend or self.capture or self.dropped or self.check or self.released or self.adapters
        return not (new or self.may_check or self.is_idle or self.is_reset)


@dataclass
class StepReport(interface.KVConnectorWorkerMetadata):
    """What the workers have finished since the last report."""

    captured: int = 0  # since the start: chunks of `StepJobs.capture` that need no more work, stored or not
    outcomes: dict[str, BlendOutcome] = field(default_factory=dict)  # by request
    checked: dict[int, Compared | str] = field(default_factory=dict)  # by number: the result, or why there is none
    check_s: float = 0.0  # that the check took where somebody may have waited
    adapters: dict[int, AdapterSeen] = field(default_factory=dict)  # by number
    stalled_s: float = 0.0  # for which every prompt has been waiting for the store
    has_other_weights: bool = False  # some rank runs others than those that blocks are named by, and refuses every job
    unblendable: str = ""  # why some rank cannot blend the model, and refuses every job
    capture_work: int = 0  # since the start, row-layers of such chunks, computed or copied, and tokens written

    def aggregate(self, other: interface.KVConnectorWorkerMetadata) -> "StepReport":
        """Of two ranks: the smaller count and wait, the longer check, the larger work, since one of them writes; and
        the first one's of all that they agree on."""
        assert isinstance(other, StepReport)
        return StepReport(
            min(self.captured, other.captured),
            other.outcomes | self.outcomes,
            other.checked | self.checked,
            max(self.check_s, other.check_s),
            other.adapters | self.adapters,
            min(self.stalled_s, other.stalled_s),
            self.has_other_weights or other.has_other_weights,
            self.unblendable or other.unblendable,
            max(self.capture_work, other.capture_work),
        )
