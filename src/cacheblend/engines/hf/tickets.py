"""Types of the scheduler's interface: requests, limits, events, and errors before a request starts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import CacheBlendError, check_fields
from cacheblend.core.fuse.batching import LayerSteps
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillResult
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf.adapter_watch import AdapterFollower
from cacheblend.engines.hf.background import Background
from cacheblend.engines.hf.decode import Decoding
from cacheblend.engines.hf.grammars import CompiledGrammar
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.engines.hf.sampling import SamplingParams
from cacheblend.engines.hf.shadow_check import Origin, ShadowCheck, WatchedAnswer
from cacheblend.engines.hf.state import ModelState
from cacheblend.engines.hf.survey import Survey
from cacheblend.engines.hf.text_stream import TextStream
from cacheblend.engines.hf.view import ModelView
from cacheblend.engines.tokens import PromptBuilder


class QueueFullError(CacheBlendError):
    """The queue is full.

    Attributes:
        retry_after_s: seconds after which a place in the queue is likely to be free.
    """

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests wait, and the queue is full; retry in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class TooLateError(CacheBlendError):
    """A request's deadline passed before its answer was finished."""


class ClosedError(CacheBlendError):
    """The scheduler takes no more requests."""


@dataclass(frozen=True)
class Limits:
    """How many requests run and wait at a time.

    Attributes:
        active: answers in prefill or decoding; a request for more answers than this runs alone.
        waiting: requests in the queue.
        row_layers: row-layers of prefill computed between two tokens of the running answers.
        catch_up_s: seconds that missed chunks wait for the engine to be idle; later, they are captured between rounds.

    Raises:
        InvalidInputError: a value of the wrong type.
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
        prompt: the prompt; the engine checks it.
        params: sampling parameters of each answer.
        grammar: that of the parameters, compiled by the engine's `grammars`, which takes too long for the scheduler.
        choices: number of answers; with a seed, answer i uses the seed + i.
        mode, ratio, selector: see `BlendEngine.open_prefill`.
        deadline: by `time.monotonic`; None: no deadline.
        logprobs: number of most likely tokens reported with each token; None: no log-probabilities.
        tenant: see `BlendEngine.planner_of`.
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


class ServedEngine(Protocol):
    """What a scheduler asks of an engine; see `BlendEngine`, the one that is served."""

    config: BlendConfig
    background: Background
    builder: PromptBuilder | None
    adapters: AdapterFollower
    shadow: ShadowCheck | None

    @property
    def view(self) -> ModelView:
        """See `BlendEngine.view`."""
        ...

    @property
    def survey(self) -> Survey:
        """See `BlendEngine.survey`."""
        ...

    @property
    def eos_ids(self) -> list[int]:
        """See `BlendEngine.eos_ids`."""
        ...

    def follow(self) -> ModelState:
        """See `BlendEngine.follow`."""
        ...

    def ids_of(self, prompt: Prompt) -> torch.Tensor:
        """See `BlendEngine.ids_of`."""
        ...

    def known_in(self, prompt: Prompt, state: ModelState, tenant: str = "") -> Prompt:
        """See `BlendEngine.known_in`."""
        ...

    def open_prefill(
        self,
        prompt: Prompt,
        *,
        ratio: float | None,
        selector: Selector | None,
        mode: Mode,
        tenant: str,
        state: ModelState | None,
    ) -> BlendedPrefill:
        """See `BlendEngine.open_prefill`."""
        ...

    def origin(self, state: ModelState, *, own: bool, tenant: str = "") -> Origin:
        """See `BlendEngine.origin`."""
        ...

    def store_missed(
        self, result: PrefillResult, tenant: str = "", *, text: bool, may_keep: Callable[[int], bool]
    ) -> None:
        """See `BlendEngine.store_missed`."""
        ...


@dataclass(frozen=True)
class TokenEvent:
    """A token of one choice.

    Attributes:
        choice: index of the choice, from 0.
        text: new text that later tokens cannot change; may be empty.
        token_id: id of the token; None for an event after the last token that carries held-back text.
        logprob: log-probability before any penalty or temperature; None if not requested.
        top: (token id, log-probability) of the most likely tokens.
        finish_reason: set in the choice's last event.
    """

    choice: int
    text: str
    token_id: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class DoneEvent:
    """The last event of a request.

    Attributes:
        report: report of the request; None if it failed before its first token.
        error: why the request failed; None if it did not fail.
    """

    report: BlendReport | None
    error: Exception | None = None


Event = TokenEvent | DoneEvent


@dataclass
class Choice:
    """One answer of a request.

    Attributes:
        decoding: decoding state, with the tokens.
        stream: the text.
        finish_reason: set once the answer has ended.
    """

    decoding: Decoding
    stream: TextStream
    finish_reason: str | None = None


@dataclass(eq=False)
class Ticket:
    """A request that was submitted.

    Attributes:
        ask: the request.
        on_event: called with each event of the request, in the scheduler's thread; must not block.
        submitted: time of submission, by `time.perf_counter`.
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
