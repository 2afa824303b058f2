"""`generate_batch`: many prompts, each answered as if it were alone, whatever happens to the others."""

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cacheblend.core.errors import CacheBlendError, InvalidInputError, PromptTooLongError
from cacheblend.core.fuse.batching import PrefillBatcher
from cacheblend.engines.hf import BatchError, BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf import request as batch_module
from cacheblend.engines.hf.background import Background
from cacheblend.engines.hf.prefiller import HfPrefill
from cacheblend.engines.hf.prompts import PromptLike
from cacheblend.engines.hf.runtime import EngineRuntime
from cacheblend.engines.hf.sampling import Sampler
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.shadow_check import ShadowCheck
from cacheblend.engines.shadow import ShadowSettings
from cacheblend.engines.tokens.detokenizer import TextStream
from lab.nano.questions import Prompts, draw_questions
from serving import shallow

ROWS = draw_questions(7, 9, ["direct"], Prompts(passages=(2, 4), tokens=(24, 60)))
PROMPTS: list[PromptLike] = [[*row.passages, f"\n\n{row.question}"] for row in ROWS]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
TOO_LONG = "word " * 4000


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(shallow(), store="memory") as engine:
        for prompt in PROMPTS:
            engine.warm(part for part in prompt if isinstance(part, Passage))
        yield engine


@pytest.fixture(scope="module")
def alone(engine: BlendEngine) -> list[list[int]]:
    return [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_answers_are_those_of_single_requests_in_order(
    engine: BlendEngine, alone: list[list[int]], concurrency: int
) -> None:
    answers = engine.generate_batch(PROMPTS, PARAMS, concurrency=concurrency)
    assert [answer.token_ids for answer in answers] == alone
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        one = engine.generate(prompt, PARAMS)
        assert (answer.text, answer.finish_reason) == (one.text, one.finish_reason)
        assert answer.report.prompt_tokens == one.report.prompt_tokens
        assert answer.report.generated_tokens == 6 and 0 < answer.report.ttft_s <= answer.report.total_s
        assert not answer.report.fallbacks


def test_all_forms_of_a_prompt_or_none(engine: BlendEngine) -> None:
    chat = [{"role": "user", "content": "Who has the bell?"}]
    forms: list[Any] = ["Who has the bell?", chat, engine.prompt("Who?"), PROMPTS[0], Passage("The bell.")]
    answers = engine.generate_batch(forms, PARAMS)
    assert [each.token_ids for each in answers] == [engine.generate(form, PARAMS).token_ids for form in forms]
    assert engine.generate_batch([]) == engine.generate_batch(iter(()), PARAMS) == engine.generate_batch([], []) == []


def test_parameters_of_each_prompt_or_options_of_all(engine: BlendEngine) -> None:
    each = [SamplingParams(max_new_tokens=1 + n, temperature=0.8 * (n % 2), seed=n, ignore_eos=True) for n in range(9)]
    answers = engine.generate_batch(PROMPTS, each, concurrency=4)
    assert [len(answer.token_ids) for answer in answers] == list(range(1, 10))
    assert [a.token_ids for a in answers] == [
        engine.generate(p, one).token_ids for p, one in zip(PROMPTS, each, strict=True)
    ]
    with pytest.raises(InvalidInputError, match="8 sampling parameters for 9 prompts"):
        engine.generate_batch(iter(PROMPTS), each[1:])
    whole = engine.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True).text.strip()
    answers = engine.generate_batch(PROMPTS[:2], max_new_tokens=8, ignore_eos=True, stop=whole[2:5])
    assert answers[0].finish_reason == "stop" and whole[2:5] not in answers[0].text
    full = engine.generate_batch(PROMPTS, PARAMS, ratio=1.0)
    assert all(answer.report.recompute_ratio in (None, 1.0) for answer in full)


def test_prompts_are_read_as_places_become_free(
    engine: BlendEngine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, ended, inner = list[int](), list[int](), engine.runtime.background.end_request
    monkeypatch.setattr(engine.runtime.background, "end_request", lambda: (ended.append(1), inner()))

    def prompts() -> Iterator[PromptLike]:
        for number, prompt in enumerate(PROMPTS):
            read.append(number)
            assert len(read) - len(ended) <= 2 * 2 + 1  # running, and as many that wait
            yield prompt

    answers = engine.generate_batch(prompts(), PARAMS, concurrency=2)
    assert [answer.token_ids for answer in answers] == alone and len(ended) == len(PROMPTS)


def test_an_error_in_one_does_not_lose_the_others(engine: BlendEngine, alone: list[list[int]]) -> None:
    wrong: list[Any] = [PROMPTS[0], TOO_LONG, PROMPTS[1], ["two", "texts"], 5, PROMPTS[2], ""]
    with pytest.raises(BatchError, match=r"4 of 7 prompts .* the first is prompts\[1\]: ") as raised:
        engine.generate_batch(wrong, PARAMS, concurrency=2)
    error = raised.value
    assert isinstance(error, CacheBlendError) and sorted(error.errors) == [1, 3, 4, 6]
    assert isinstance(error.errors[1], PromptTooLongError)
    assert all(isinstance(each, InvalidInputError) for each in error.errors.values())
    found = [None if answer is None else answer.token_ids for answer in error.answers]
    assert found == [alone[0], None, alone[1], None, None, alone[2], None]


def test_an_error_inside_the_engine_is_that_prompts_own(
    engine: BlendEngine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, calls = engine.runtime.open_prefill, iter(range(9))

    def open_prefill(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 4:
            raise MemoryError("out of memory")
        return inner(*arguments, **options)

    monkeypatch.setattr(engine.runtime, "open_prefill", open_prefill)
    with pytest.raises(BatchError, match=r"1 of 9 .* prompts\[4\]: out of memory; the other answers") as raised:
        engine.generate_batch(PROMPTS, PARAMS, concurrency=3)
    assert [a and a.token_ids for a in raised.value.answers] == [*alone[:4], None, *alone[5:]]


@pytest.mark.parametrize("error", [KeyError("row"), KeyboardInterrupt()])
def test_what_the_prompts_raise_is_raised_and_nothing_stays(engine: BlendEngine, error: BaseException) -> None:
    def prompts() -> Iterator[PromptLike]:
        yield from PROMPTS[:3]
        raise error

    with pytest.raises(type(error)):
        engine.generate_batch(prompts(), PARAMS, concurrency=2)
    assert engine.runtime.background._requests == 0
    assert engine.flush(60)


def interrupted(*_: object) -> None:
    """What Python does at SIGINT, which a job in the background of a shell ignores."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(6))
def test_an_interrupt_at_any_time_leaves_the_engine_whole(
    engine: BlendEngine, alone: list[list[int]], seed: int
) -> None:
    """A KeyboardInterrupt, as of Ctrl-C, at another moment each time."""
    started = time.perf_counter()
    engine.generate_batch(PROMPTS, PARAMS, concurrency=3)
    took = time.perf_counter() - started
    before = signal.signal(signal.SIGALRM, interrupted)
    signal.setitimer(signal.ITIMER_REAL, took * (seed + 0.5) / 6)
    try:
        engine.generate_batch(PROMPTS * 20, PARAMS, concurrency=3)
    except KeyboardInterrupt:
        pass
    else:
        pytest.fail("it was not interrupted")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert engine.runtime.background._requests == 0
    assert [answer.token_ids for answer in engine.generate_batch(PROMPTS, PARAMS)] == alone


AT_THE_END: list[tuple[type, str]] = [(ShadowCheck, "submit"), (Background, "end_request"), (Scheduler, "_leave")]
ON_THE_WAY: list[tuple[type, str]] = [
    *AT_THE_END,
    (PrefillBatcher, "remove"),
    (HfPrefill, "close"),
    (ShadowCheck, "begin"),
    (EngineRuntime, "store_missed"),
    (TextStream, "push"),
    (Sampler, "sample"),
    (EngineRuntime, "open_prefill"),
    (EngineRuntime, "follow"),
]


@pytest.mark.may_fail("scheduler", "background work", "shadow check")
@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_no_answer_is_lost_and_none_is_waited_for(
    alone: list[list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random, a step of a request's end or way fails, after it was taken: what was computed is returned, the rest
    has its error, and nothing stays behind."""
    draw, places = random.Random(seed), AT_THE_END if seed % 2 else ON_THE_WAY
    with BlendEngine.from_pretrained(shallow(), store="memory") as engine:
        engine.runtime.watch(ShadowSettings(share=1.0), seed=seed)
        engine.warm(part for prompt in PROMPTS for part in prompt if isinstance(part, Passage))  # type: ignore[union-attr]
        with monkeypatch.context() as patched:
            for owner, name in draw.sample(places, draw.randint(1, 3)):
                patched.setattr(owner, name, failing(getattr(owner, name), draw))
            batch = list[Any]()
            thread = threading.Thread(target=lambda: batch.extend(answered(engine)), daemon=True)
            thread.start()
            thread.join(120)
            assert not thread.is_alive()
        answers, errors = batch
        for place, (answer, tokens) in enumerate(zip(answers, alone, strict=True)):
            assert place in errors if answer is None else answer.token_ids == tokens
        if places is AT_THE_END:
            assert not errors
        assert engine.runtime.background._requests == 0
        assert [answer.token_ids for answer in engine.generate_batch(PROMPTS, PARAMS)] == alone
        assert engine.flush(60)


def failing(real: Any, draw: random.Random) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        if draw.random() < 0.3:
            raise OSError("injected")
        return found

    return call


def answered(engine: BlendEngine) -> tuple[list[Any], dict[int, Exception]]:
    try:
        return [*engine.generate_batch(PROMPTS, PARAMS, concurrency=3)], {}
    except BatchError as error:
        return error.answers, error.errors


@pytest.mark.may_fail("scheduler")
def test_a_prompt_whose_end_is_never_told_is_an_error(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "DoneEvent", int)  # its collector takes the last event for a token's
    with pytest.raises(BatchError, match=r"9 of 9 .* ended without an answer; see the log"):
        engine.generate_batch(PROMPTS, PARAMS)


def test_a_single_request_that_fails_at_its_end_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("injected")

    with BlendEngine.from_pretrained(shallow(), store="memory") as engine:
        engine.runtime.watch(ShadowSettings(share=1.0), seed=1)
        engine.warm(part for part in PROMPTS[0] if isinstance(part, Passage))  # type: ignore[union-attr]
        for owner, place in (
            (engine.runtime, "store_missed"),
            (engine.runtime.shadow, "submit"),
            (engine.runtime.shadow, "begin"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(owner, place, fail)
                with pytest.raises(OSError, match="injected"):
                    engine.generate(PROMPTS[0], PARAMS)
            assert engine.runtime.background._requests == 0, place


def test_a_batch_stores_its_passages_and_closing_the_engine_meanwhile_keeps_what_was_answered() -> None:
    engine = BlendEngine.from_pretrained(shallow(), store="memory")
    engine.generate_batch(PROMPTS, PARAMS)
    assert engine.flush(60)
    assert not any(answer.report.missed_tokens for answer in engine.generate_batch(PROMPTS, PARAMS))

    def prompts() -> Iterator[PromptLike]:
        yield from PROMPTS[:6]
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(60)
        yield from PROMPTS[6:]

    with pytest.raises(BatchError, match="the engine is closed") as raised:
        engine.generate_batch(prompts(), PARAMS, concurrency=2)
    answers = raised.value.answers
    assert len(answers) == 9 and answers[0] is not None and answers[8] is None
    assert all(answer is None or len(answer.token_ids) == 6 for answer in answers)
    with pytest.raises(InvalidInputError, match="the engine is closed"):
        engine.generate_batch(PROMPTS)


def test_batches_and_single_requests_of_several_threads(engine: BlendEngine, alone: list[list[int]]) -> None:
    with ThreadPoolExecutor(2) as pool:
        batches = [pool.submit(engine.generate_batch, PROMPTS, PARAMS, concurrency=3) for _ in range(2)]
        assert [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS] == alone
        for batch in batches:
            assert [answer.token_ids for answer in batch.result(60)] == alone
    assert engine.runtime.background._requests == 0


def test_options_without_effect_are_named_once_for_a_line(engine: BlendEngine) -> None:
    with pytest.warns(UserWarning, match="top_k=40 and top_p=0.9 without effect: at temperature 0 ") as warned:
        engine.generate(PROMPTS[0], max_new_tokens=1, top_k=40, top_p=0.9)
        list(engine.stream(PROMPTS[0], SamplingParams(max_new_tokens=1, top_k=40, top_p=0.9)))
        engine.chat([{"role": "user", "content": "Who?"}], max_new_tokens=1, top_k=40, top_p=0.9)
        engine.generate_batch(PROMPTS[:1], max_new_tokens=1, top_k=40, top_p=0.9)
        engine.generate(PROMPTS[0], max_new_tokens=1, top_k=40, temperature=1.0)  # these have an effect
        engine.generate(PROMPTS[0], max_new_tokens=1, seed=3)
        SamplingParams(top_k=40).within(None, 3)
    assert [each.filename for each in warned if "without effect" in str(each.message)] == [__file__] * 4
