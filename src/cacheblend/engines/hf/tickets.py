"""Requests to a scheduler: what is asked, what is told of it, and what may go wrong before it begins."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cacheblend.core.errors import CacheBlendError
from cacheblend.core.fuse.batching import LayerSteps
from cacheblend.core.fuse.prefill import BlendedPrefill
from cacheblend.core.fuse.result import PrefillResult
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf.decode import Decoding
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.engines.hf.sampling import SamplingParams
from cacheblend.engines.hf.text_stream import TextStream


class QueueFullError(CacheBlendError):
    """As many requests wait as may.

    Attributes:
        retry_after_s: when there may be room.
    """

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests wait, which is all that may; ask again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class TooLateError(CacheBlendError):
    """A request's time was over before its answer was."""


class ClosedError(CacheBlendError):
    """The scheduler takes no more requests."""


@dataclass(frozen=True)
class Limits:
    """What is under way at once.

    Attributes:
        active: answers whose prompts are prefilled or that are drawn; a request that wants more of them goes alone.
        waiting: requests behind them.
        row_layers: of prefills between two tokens of the answers under way.
        catch_up_s: that missed chunks wait for a moment without requests; then they are captured between rounds.
    """

    active: int = 8
    waiting: int = 64
    row_layers: int = 8192
    catch_up_s: float = 2.0


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        prompt: checked by the engine.
        params: of each answer.
        choices: answers; the seed of each is the one behind that of the one before it.
        mode, ratio, selector: see `BlendEngine.open_prefill`.
        deadline: by `time.monotonic`; None: none.
        logprobs: so many of the likeliest tokens are told with each token; None: none.
        tenant: see `BlendEngine.planner_of`.
        keep_text: store plain text in front of the first chunk, too, for prompts that begin the same.
        may_keep: asked behind the first token, with how many tokens of chunks were missed, whether to store them. Must
            not block.
    """

    prompt: Prompt
    params: SamplingParams
    choices: int = 1
    mode: Mode = "blend"
    ratio: float | None = None
    selector: Selector | None = None
    deadline: float | None = None
    logprobs: int | None = None
    tenant: str = ""
    keep_text: bool = True
    may_keep: Callable[[int], bool] = lambda tokens: True


@dataclass(frozen=True)
class TokenEvent:
    """A token of one choice.

    Attributes:
        choice: from 0.
        text: new and certain; may be empty.
        token_id: of the token; None behind the last one, where held back text comes.
        logprob: of the token, before any penalty or temperature; None where none were asked for.
        top: (token id, log-probability) of the likeliest.
        finish_reason: of the choice, with its last text.
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
        report: of the request; None where it failed before its first token.
        error: why it failed; None where it did not.
    """

    report: BlendReport | None
    error: Exception | None = None


Event = TokenEvent | DoneEvent


@dataclass
class Choice:
    """One answer of a request.

    Attributes:
        decoding: its tokens.
        stream: its text.
        finish_reason: once it has ended.
    """

    decoding: Decoding
    stream: TextStream
    finish_reason: str | None = None


@dataclass(eq=False)
class Ticket:
    """A request that was submitted.

    Attributes:
        ask: the request.
        on_event: called with each of its events, from the scheduler's thread; must not block.
        submitted: by `time.perf_counter`.
    """

    ask: Ask
    on_event: Callable[[Event], None]
    submitted: float
    cancelled: bool = False
    prefill: BlendedPrefill | None = None
    choices: list[Choice] = field(default_factory=list)
    report: BlendReport | None = None
    to_store: PrefillResult | None = None

    def cancel(self) -> None:
        """Nobody waits for it any more. It is given up before the next round."""
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
        """See `BatchJob`; the prefill is open."""
        assert self.prefill is not None
        return self.prefill.next_layer()
