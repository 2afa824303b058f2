"""What the engine returns: a request in progress, pieces of its answer as text, and the finished answer."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cacheblend.core.errors import CacheBlendError, InvalidInputError, ModelOverflowError, shown
from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.ambient import without_ambient
from cacheblend.engines.hf.decode import compute_logits
from cacheblend.engines.hf.prompts import PromptLike
from cacheblend.engines.hf.runtime import EngineRuntime
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.shadow_check import WatchedAnswer
from cacheblend.engines.hf.state import ModelState
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event
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
    """A prompt after its prefill; `step` generates its tokens. Always call `finish`, or use `with`. The engine is told
    of missed chunks after the first token, so as not to delay it, and of the request's end. `state` is the model that
    the prompt was prefilled on; `watched` takes the answer's tokens, to be compared later; `report` and `token_ids` are
    of the request so far; `to_store` is the prefill's result until it is passed on for storing."""

    def __init__(
        self,
        runtime: EngineRuntime,
        state: ModelState,
        ask: Ask,
        result: PrefillResult,
        started: float,
        watched: WatchedAnswer | None,
    ) -> None:
        self._runtime, self._view, self._started = runtime, state.survey.view, started
        self._decoding = runtime.decoding(ask.prompt, ask.params, ask.grammar, result)
        self.to_store: PrefillResult | None = result
        self._watched, self._finished = watched, False
        self.report, self.token_ids = result.report, list[int]()

    @property
    def done(self) -> bool:
        return self._decoding.sampler.finish_reason is not None

    def step(self) -> int:
        """Generates the next token. After the first one, passes the prefill on for storing."""
        if self.token_ids:
            self._take_stored()
        compute_logits(self._view, [self._decoding])
        sampler = self._decoding.sampler
        try:
            self.token_ids.append(sampler.sample())
        except ModelOverflowError:
            self.to_store = None
            raise
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
            ends.callback(self._runtime.background.end_request)
            if self._watched is not None and self._runtime.shadow is not None:
                ends.callback(self._runtime.shadow.submit, self._watched)
            self._take_stored()

    def __enter__(self) -> "Request":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _take_stored(self) -> None:
        result, self.to_store = self.to_store, None
        if result is not None:
            self._runtime.store_missed(result)


class BatchError(CacheBlendError):
    """Some prompts of a batch could not be answered; the others were.

    Attributes:
        answers: one for each prompt, in order; None for those that have none.
        errors: by the prompt's place, what `BlendEngine.generate` would have raised.
    """

    def __init__(self, answers: list[Answer | None], errors: Mapping[int, Exception]) -> None:
        first = min(errors)
        others = "" if len(errors) == len(answers) else "; the other answers are in `answers` of this error"
        super().__init__(
            f"{len(errors)} of {len(answers)} prompts could not be answered, the first is prompts[{first}]: "
            f"{errors[first]}{others}"
        )
        self.answers, self.errors = answers, dict(errors)


def answer_all(
    scheduler: Scheduler, prompts: Iterable[PromptLike], ask_of: Callable[[PromptLike, int], Ask], waiting: int
) -> list[Answer]:
    """The answers to prompts, in order; raises `BatchError` if some could not be answered, after all others were. The
    scheduler has no thread, and is closed at the end; `waiting` prompts are read ahead."""
    answers: list[Answer | None] = []
    errors: dict[int, Exception] = {}

    def collector(place: int) -> Callable[[Event], None]:
        texts, ids, reasons = list[str](), list[int](), list[str]()

        def on_event(event: Event) -> None:
            if isinstance(event, DoneEvent):
                if event.error is not None:
                    errors[place] = event.error
                else:
                    answers[place] = Answer("".join(texts), ids, reasons[-1], event.report or BlendReport())
                return
            texts.append(event.text)
            ids.extend(() if event.token_id is None else (event.token_id,))
            reasons.extend(() if event.finish_reason is None else (event.finish_reason,))

        return on_event

    rest = iter(prompts)

    def feed() -> bool:
        """Submits prompts until enough wait; False if there are no more."""
        while scheduler.waiting < waiting:
            try:
                prompt = next(rest)
            except StopIteration:
                return False
            place = len(answers)
            answers.append(None)
            try:
                ask = ask_of(prompt, place)
            except Exception as error:
                errors[place] = error
            else:
                scheduler.submit(ask, collector(place))
        return True

    try:
        while feed() or scheduler.waiting or scheduler.active:
            scheduler.run()
    finally:  # an interrupt, or an error of `prompts`: what is under way is given up
        scheduler.close()
    for place, answer in enumerate(answers):
        if answer is None and place not in errors:
            errors[place] = CacheBlendError("its request ended without an answer; see the log for the reason")
    if errors:
        raise BatchError(answers, errors)
    return [answer for answer in answers if answer is not None]


def check_prompts(prompts: object) -> None:
    """Refuses what is one prompt and not several; the message says what to call, or to pass."""
    wanted = "prompts must be a list or another iterable of prompts"
    if isinstance(prompts, str | bytes):
        raise InvalidInputError(f"{wanted}, got one text, {shown(prompts)}; pass [text], or call generate(text)")
    if isinstance(prompts, Prompt):
        raise InvalidInputError(f"{wanted}, got one Prompt; pass [prompt], or call generate(prompt)")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise InvalidInputError(f"{wanted}, got {shown(prompts)}")
    if isinstance(prompts, Sequence) and any(isinstance(each, Mapping) and "role" in each for each in prompts):
        raise InvalidInputError(f"{wanted}, got one conversation; pass [messages], or call chat(messages)")
