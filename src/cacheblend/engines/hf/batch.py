"""Answers to many prompts: a scheduler in the caller's thread, fed as places become free.

prompts, read one at a time ─> a few waiting ─> some running ─> answers, in the prompts' order
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

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


def answer_all(
    scheduler: Scheduler, prompts: Iterable[PromptLike], ask_of: Callable[[PromptLike, int], Ask], waiting: int
) -> list[Answer]:
    """The answers to prompts, in order; raises `BatchError` if some could not be answered, after all others were.

    Args:
        scheduler: without a thread; closed at the end.
        prompts: read one at a time.
        ask_of: makes a request of a prompt and its place.
        waiting: prompts that are read ahead.
    """
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
