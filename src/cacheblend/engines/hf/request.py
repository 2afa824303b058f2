"""What the engine returns: a request in progress, pieces of its answer as text, and the finished answer."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.ambient import without_ambient
from cacheblend.engines.hf.decode import compute_logits
from cacheblend.engines.hf.shadow_check import WatchedAnswer
from cacheblend.engines.hf.state import FollowedModel, ModelState
from cacheblend.engines.hf.tickets import Ask
from cacheblend.engines.tokens.detokenizer import TextStream


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        text: without stop texts and special tokens; empty if the engine has no tokenizer.
        token_ids: all generated tokens.
        finish_reason: ``stop`` or ``length``.
        report: what was reused, and the times measured.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    report: BlendReport


@dataclass(frozen=True)
class Delta:
    """A piece of an answer: text that will not change any more; the last piece has the finished `answer`."""

    text: str
    answer: Answer | None = None


@without_ambient
class Request:
    """A prompt after its prefill; `step` generates its tokens. Always call `finish` at the end, or use `with`.

    The engine is told of missed chunks after the first token, so as not to delay it, and of the request's end. `state`
    is the model that the prompt was prefilled on; `watched` takes the answer's tokens, to be compared later.

    Attributes:
        report: of the request so far.
        token_ids: of the answer so far.
        to_store: result of the prefill, until it has been passed on for storing; None afterwards.
    """

    def __init__(
        self,
        engine: FollowedModel,
        state: ModelState,
        ask: Ask,
        result: PrefillResult,
        started: float,
        watched: WatchedAnswer | None,
    ) -> None:
        self._engine, self._view, self._started = engine, state.survey.view, started
        self._decoding = engine.decoding(ask.prompt, ask.params, ask.grammar, result)
        self.to_store: PrefillResult | None = result
        self._watched, self._finished = watched, False
        self.report, self.token_ids = result.report, list[int]()

    @property
    def done(self) -> bool:
        """True once the last token has been generated."""
        return self._decoding.sampler.finish_reason is not None

    def step(self) -> int:
        """Generates the next token. After the first one, passes the prefill on for storing."""
        if self.token_ids:
            self._take_stored()
        compute_logits(self._view, [self._decoding])
        sampler = self._decoding.sampler
        self.token_ids.append(sampler.sample())
        if self._watched is not None:
            self._watched.add(self.token_ids[-1], sampler.logits)
        if len(self.token_ids) == 1:
            self.report.ttft_s = time.perf_counter() - self._started
        return self.token_ids[-1]

    def stream(self, text: TextStream) -> Iterator["Delta"]:
        """Yields the answer while it is generated; the last delta has the finished `answer`."""
        while not self.done and not text.stopped:
            new = text.push(self.step())
            if new:
                yield Delta(new)
        tail = text.finish()
        self.report.total_s = time.perf_counter() - self._started
        self.report.generated_tokens = len(self.token_ids)
        reason = "stop" if text.stopped else self._decoding.sampler.finish_reason or "stop"
        yield Delta(tail, Answer(text.text, list(self.token_ids), reason, self.report))

    def finish(self) -> None:
        """Ends the request, so that missed chunks can be captured. Idempotent."""
        if self._finished:
            return
        self._finished = True
        with contextlib.ExitStack() as ends:  # all of them, also where one fails
            ends.callback(self._engine.background.end_request)
            if self._watched is not None and self._engine.shadow is not None:
                ends.callback(self._engine.shadow.submit, self._watched)
            self._take_stored()

    def __enter__(self) -> "Request":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _take_stored(self) -> None:
        result, self.to_store = self.to_store, None
        if result is not None:
            self._engine.store_missed(result)
