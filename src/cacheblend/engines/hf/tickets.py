"""Types of the scheduler's interface: requests, limits, events, and errors before a request starts."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cacheblend.core.errors import CacheBlendError, check_fields
from cacheblend.core.fuse.batching import LayerSteps
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillResult
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf.decode import Decoding
from cacheblend.engines.hf.grammar import CompiledGrammar
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.engines.hf.sampling import SamplingParams
from cacheblend.engines.hf.shadow_check import Origin, WatchedAnswer
from cacheblend.engines.tokens.detokenizer import TextStream


class QueueFullError(CacheBlendError):
    """The queue is full; a place in it is likely to be free after `retry_after_s` seconds."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests wait, and the queue is full; retry in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class TooLateError(CacheBlendError):
    """A request's deadline passed before its answer was finished."""


class ClosedError(CacheBlendError):
    """The scheduler takes no more requests."""


@dataclass(frozen=True)
class Limits:
    """How many requests run and wait at a time. Raises `InvalidInputError` for a value of the wrong type.

    Attributes:
        active: answers in prefill or decoding; a request for more answers than this runs alone.
        waiting: requests in the queue.
        row_layers: row-layers of prefill computed between two tokens of the running answers.
        catch_up_s: seconds that missed chunks wait for the engine to be idle; later, they are captured between rounds.
    """

    active: int = 8
    waiting: int = 64
    row_layers: int = 8192
    catch_up_s: float = 2.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        prompt: the engine checks it.
        params: of each answer.
        grammar: that of the parameters, compiled by the engine's `grammars`, which takes too long for the scheduler.
        choices: number of answers; with a seed, answer i uses the seed + i.
        mode, ratio, selector, tenant: see `BlendEngine.open_prefill`.
        deadline: by `time.monotonic`; None: no deadline.
        logprobs: number of most likely tokens reported with each token; None: no log-probabilities.
        tenant_label: what the figures of the shadow check call the tenant; other tenants may see it.
        keep_text: also store the plain text in front of the first chunk, for prompts that start with the same text.
        shown: special tokens that are part of the text; all others never are.
        may_keep: called after the first token with the number of missed chunk tokens, and later from another thread
            with those of text that recurs; returns whether to store them. Must not block.
    """

    prompt: Prompt
    params: SamplingParams
    choices: int = 1
    grammar: CompiledGrammar | None = None
    mode: Mode = "blend"
    ratio: float | None = None
    selector: Selector | None = None
    deadline: float | None = None
    logprobs: int | None = None
    tenant: str = ""
    tenant_label: str = ""
    keep_text: bool = True
    shown: frozenset[int] = frozenset()
    may_keep: Callable[[int], bool] = lambda tokens: True

    @property
    def is_own(self) -> bool:
        """It leaves everything that decides quality to the engine."""
        return self.mode == "blend" and self.ratio is None and self.selector is None


@dataclass(frozen=True)
class TokenEvent:
    """A token of one choice, whose last event has a `finish_reason`.

    Attributes:
        choice: index of the choice, from 0.
        text: new text that later tokens cannot change; may be empty.
        token_id: None for an event after the last token that carries held-back text.
        logprob: before any penalty or temperature; None if not requested.
        top: (token id, log-probability) of the most likely tokens.
    """

    choice: int
    text: str
    token_id: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class DoneEvent:
    """The last event of a request: its report, None if it failed before its first token, and why it failed."""

    report: BlendReport | None
    error: Exception | None = None


Event = TokenEvent | DoneEvent


@dataclass
class Choice:
    """One answer of a request; `finish_reason` is set once it has ended."""

    decoding: Decoding
    stream: TextStream
    finish_reason: str | None = None


@dataclass(eq=False)
class Ticket:
    """A request that was submitted.

    Attributes:
        on_event: called with each event of the request, in the scheduler's thread; must not block.
        submitted: by `time.perf_counter`.
        is_admitted: the engine knows of the request, which has not ended.
    """

    ask: Ask
    on_event: Callable[[Event], None]
    submitted: float
    cancelled: bool = False
    is_admitted: bool = False
    prefill: BlendedPrefill | None = None
    choices: list[Choice] = field(default_factory=list)
    report: BlendReport | None = None
    to_store: PrefillResult | None = None
    origin: Origin | None = None
    watched: WatchedAnswer | None = None

    def cancel(self) -> None:
        """Cancels the request; the scheduler ends it before its next round."""
        self.cancelled = True

    @property
    def layer(self) -> int:
        """See `BatchJob`."""
        return 0 if self.prefill is None else self.prefill.layer

    @property
    def active_rows(self) -> int:
        """See `BatchJob`."""
        return 0 if self.prefill is None else self.prefill.active_rows

    def next_layer(self) -> LayerSteps:
        """See `BatchJob`; requires an open prefill."""
        assert self.prefill is not None
        return self.prefill.next_layer()
