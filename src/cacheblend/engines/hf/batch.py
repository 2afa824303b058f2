"""Answers to many prompts: a scheduler in the caller's thread, fed as places become free.

    prompts, read one at a time ─> a few waiting ─> some running ─> answers, in the prompts' order

Knows prompts and the scheduler; does not know how either works.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from cacheblend.core.errors import CacheBlendError, InvalidInputError, shown
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.prompts import PromptLike
from cacheblend.engines.hf.request import Answer
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event


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


class Batch:
    """Answers prompts, so many at a time.

    Args:
        scheduler: without a thread; closed at the end.
        ask_of: makes a request of a prompt and its place.
        waiting: prompts that are read ahead.
    """

    def __init__(self, scheduler: Scheduler, ask_of: Callable[[PromptLike, int], Ask], waiting: int) -> None:
        self._scheduler, self._ask_of, self._most_waiting = scheduler, ask_of, waiting
        self._answers: list[Answer | None] = []
        self._errors: dict[int, Exception] = {}

    def run(self, prompts: Iterable[PromptLike]) -> list[Answer]:
        """The answers, in order.

        Raises:
            BatchError: some prompts could not be answered, after all others were.
        """
        rest = iter(prompts)
        try:
            while self._feed(rest) or self._scheduler.waiting or self._scheduler.active:
                self._scheduler.run()
        finally:  # an interrupt, or an error of `prompts`: what is under way is given up
            self._scheduler.close()
        answers = [answer for answer in self._answers if answer is not None]
        for place, answer in enumerate(self._answers):
            if answer is None and place not in self._errors:
                self._errors[place] = CacheBlendError("its request ended without an answer; see the log for the reason")
        if self._errors:
            raise BatchError(self._answers, self._errors)
        return answers

    def _feed(self, rest: Iterator[PromptLike]) -> bool:
        """Submits prompts until enough wait; False if there are no more."""
        while self._scheduler.waiting < self._most_waiting:
            try:
                prompt = next(rest)
            except StopIteration:
                return False
            place = len(self._answers)
            self._answers.append(None)
            try:
                ask = self._ask_of(prompt, place)
            except Exception as error:
                self._errors[place] = error
            else:
                self._scheduler.submit(ask, self._collect(place))
        return True

    def _collect(self, place: int) -> Callable[[Event], None]:
        """Takes a request's events."""
        texts, ids, reasons = list[str](), list[int](), list[str]()

        def on_event(event: Event) -> None:
            if isinstance(event, DoneEvent):
                if event.error is not None:
                    self._errors[place] = event.error
                else:
                    report = event.report or BlendReport()
                    self._answers[place] = Answer("".join(texts), ids, reasons[-1], report)
                return
            texts.append(event.text)
            ids.extend(() if event.token_id is None else (event.token_id,))
            reasons.extend(() if event.finish_reason is None else (event.finish_reason,))

        return on_event


def check_prompts(prompts: object) -> None:
    """Refuses what is one prompt and not several.

    Raises:
        InvalidInputError: the message says what to call, or to pass.
    """
    wanted = "prompts must be a list or another iterable of prompts"
    if isinstance(prompts, str | bytes):
        raise InvalidInputError(f"{wanted}, got one text, {shown(prompts)}; pass [text], or call generate(text)")
    if isinstance(prompts, Prompt):
        raise InvalidInputError(f"{wanted}, got one Prompt; pass [prompt], or call generate(prompt)")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise InvalidInputError(f"{wanted}, got {shown(prompts)}")
    if isinstance(prompts, Sequence) and any(isinstance(each, Mapping) and "role" in each for each in prompts):
        raise InvalidInputError(f"{wanted}, got one conversation; pass [messages], or call chat(messages)")
