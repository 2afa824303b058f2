"""The shadow check on an engine, and on a server: what is compared, and that nothing in it harms a request."""

import copy
import queue
import random
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.baselines import full_recompute
from cacheblend.engines.hf.scheduler import Limits, Scheduler
from cacheblend.engines.hf.shadow_check import MOST_WAITING, ShadowCheck, WatchedAnswer
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event
from cacheblend.engines.settings import PROFILE_NAME, read_profile
from cacheblend.engines.shadow import ANSWER_TOKENS, Compared, Labels, ShadowSettings, ShadowWatch, agreement
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.keys import KeyRing, add_key, read_keys
from cacheblend.serve.settings import ServeSettings
from fake_adapters import add_adapter, set_adapter
from families import tiny_model
from lab.nano.questions import draw_questions
from parity.scenes import QUESTION, RAG, SYSTEM, A, B, C, open_engine

GREEDY = SamplingParams(max_new_tokens=5, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with open_engine(tiny_model("llama")) as opened:
        yield opened


def watched(engine: BlendEngine, floor: float | None = None, share: float = 1.0) -> tuple[ShadowWatch, ShadowCheck]:
    """A check that computes only when a test says so."""
    made = engine.runtime.watch(ShadowSettings(share, floor), seed=0)
    assert engine.runtime.shadow is not None
    engine.runtime.background.idle_work = None
    return made, engine.runtime.shadow


def drain(check: ShadowCheck) -> None:
    while check.has_work:
        check.advance()


def seen(made: ShadowWatch, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Labels, Compared, int | None]]:
    """What is told to the watch."""
    told: list[tuple[Labels, Compared, int | None]] = []
    add = made.add

    def noting(labels: Labels, compared: Compared, step: int | None) -> None:
        told.append((labels, compared, step))
        add(labels, compared, step)

    monkeypatch.setattr(made, "add", noting)
    return told


def counts(made: ShadowWatch) -> tuple[int, int]:
    """(compared, dropped)."""
    figures = made.figures()
    return sum(series.compared for series in figures.series), sum(figures.dropped.values())


def wanted(model: Any, prompt: Prompt, answer: list[int]) -> list[int]:
    """transformers' own likeliest token at the prompt's end and behind each answered token but the last."""
    ids = torch.tensor([[*prompt.token_ids.tolist(), *answer[:-1]]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 :]
    likeliest: list[int] = logits.argmax(-1).tolist()
    return likeliest


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=ANSWER_TOKENS + 9, ignore_eos=True),
        SamplingParams(max_new_tokens=7, temperature=2.0, seed=3, ignore_eos=True),
        SamplingParams(max_new_tokens=7, repetition_penalty=3.0, ignore_eos=True),
    ],
    ids=["greedy", "one token", "long", "sampled", "penalised"],
)
@pytest.mark.parametrize("tile_rows", [7, 1024])
def test_it_is_transformers_own_full_prefill_that_is_compared(
    params: SamplingParams, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    with open_engine(model, tile_rows=tile_rows) as engine:
        made, check = watched(engine)
        told = seen(made, monkeypatch)
        blended: list[list[int]] = []
        compare_at = WatchedAnswer.add

        def noting(self: WatchedAnswer, token: int, logits: torch.Tensor) -> None:
            blended[-1].append(int(logits.argmax()))
            compare_at(self, token, logits)

        monkeypatch.setattr(WatchedAnswer, "add", noting)
        blended.append([])
        answer = engine.generate(RAG, params).token_ids
        drain(check)
        ((labels, compared, step),) = told
        full = wanted(model, RAG, answer[:ANSWER_TOKENS])
        assert len(compared.agreed) == min(len(answer), ANSWER_TOKENS) == len(full)
        assert list(compared.agreed) == [a == b for a, b in zip(blended[0], full, strict=False)]
        plain = engine.prefill(RAG)
        close = agreement(plain.logits, full_recompute(engine, RAG).logits)
        assert compared.kl == pytest.approx(close.kl, rel=1e-3, abs=1e-6)
        assert labels == Labels("", "hkvd", "engine") and step == 0


def test_what_is_exact_is_not_checked_and_of_the_rest_the_share_is_drawn(engine: BlendEngine) -> None:
    made, check = watched(engine, share=0.25)
    for _ in range(9):
        engine.generate(Prompt.of([SYSTEM, QUESTION]), GREEDY)  # no chunk
        engine.generate(RAG, GREEDY, ratio=1.0)  # everything is recomputed
    assert check.waiting == 0 and counts(made) == (0, 0)
    for _ in range(40):
        report = engine.generate(RAG, SamplingParams(max_new_tokens=1)).report
        drain(check)
    assert 3 <= counts(made)[0] <= 20 and counts(made)[1] == 0
    assert (report.selector, report.recompute_ratio) == ("hkvd", engine.config.recompute_ratio)


def serve(scheduler: Scheduler, ask: Ask, cancel_after: int | None = None) -> DoneEvent:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    ticket = scheduler.submit(ask, events.put)
    tokens = 0
    while True:
        if cancel_after is not None and tokens >= cancel_after:
            ticket.cancel()
        event = events.get(timeout=60)
        if isinstance(event, DoneEvent):
            return event
        tokens += 1


def test_requests_with_a_ratio_or_selector_of_their_own_cancelled_ones_and_several_choices(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, check = watched(engine)
    told = seen(made, monkeypatch)
    engine.generate(RAG, GREEDY, ratio=0.4)
    scheduler = Scheduler(engine.runtime)
    try:
        for ask in ({"mode": "reuse"}, {"mode": "full"}, {"mode": "prefix"}, {"tenant_label": "t"}):
            serve(scheduler, Ask(RAG, GREEDY, **ask))  # type: ignore[arg-type]
        serve(scheduler, Ask(RAG, SamplingParams(max_new_tokens=400, ignore_eos=True)), cancel_after=2)
        serve(scheduler, Ask(RAG, SamplingParams(max_new_tokens=3, temperature=1.0, ignore_eos=True), choices=3))
        serve(scheduler, Ask(RAG, GREEDY), cancel_after=0)
    finally:
        scheduler.close()
    drain(check)
    assert [(*labels, step) for labels, _, step in told[:3]] == [
        ("", "hkvd", "request", None),
        ("", "none", "request", None),
        ("t", "hkvd", "engine", 0),
    ]
    # A cancelled answer counts as far as it came, and of several choices one.
    assert 2 <= len(told[3][1].agreed) <= ANSWER_TOKENS and len(told[4][1].agreed) == 3
    assert set(made.figures().dropped) <= {"no answer"}


def test_the_ratio_in_force_is_in_the_report_up_to_full_recompute_and_back(engine: BlendEngine) -> None:
    made, check = watched(engine, floor=0.5)
    ratio, ratios = engine.config.recompute_ratio, []
    bad = Compared(3.0, (False,))
    for _ in range(5):
        report = engine.generate(RAG, GREEDY).report
        ratios.append(report.recompute_ratio)
        if made.is_full:
            break
        step = made.step
        while made.step == step:
            made.add(Labels("", "hkvd"), bad, step)
    assert ratios[:4] == [pytest.approx(ratio * 1.5**step) for step in range(4)] and ratios[4] is None
    full = engine.generate(RAG, GREEDY)
    assert full.report.hit_tokens["memory"] == 0 and full.report.selector == "" and full.report.missed_tokens == 0
    assert engine.generate(RAG, GREEDY, ratio=0.2).report.recompute_ratio == 0.2  # it named one
    check.close()
    for _ in range(made.settings.rows + 1):  # nothing is compared, and yet it leads back
        if made.is_full:
            engine.generate(RAG, SamplingParams(max_new_tokens=1))
    assert made.step == 3 and made.figures().lowered == 1


class BrokenError(RuntimeError):
    pass


def failing_at(check: ShadowCheck, layer: int, error: Callable[[], Exception]) -> None:
    """Full prefills of this check fail in this layer; in none of a negative one, but when they are opened."""
    opened = check._open_full

    def open_failing(prompt: Prompt, rows: int) -> Any:
        if layer < 0:
            raise error()
        prefill = opened(prompt, rows)
        next_layer = prefill.next_layer

        def failing() -> Any:
            if prefill.layer == layer:
                raise error()
            return next_layer()

        prefill.next_layer = failing  # type: ignore[method-assign]
        return prefill

    check._open_full = open_failing  # type: ignore[method-assign]


@pytest.mark.may_fail("shadow check")
def test_a_check_that_fails_is_counted_and_the_next_one_is_made(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(RAG, GREEDY).token_ids
    made, check = watched(engine)
    works, failed = check._open_full, 0
    errors: list[Callable[[], Exception]] = [BrokenError, MemoryError, lambda: torch.OutOfMemoryError("no memory")]
    for layer, error in product([-1, 0, 1], errors):
        failing_at(check, layer, error)
        assert engine.generate(RAG, GREEDY).token_ids == expected
        drain(check)
        failed += 1
        assert counts(made) == (failed - 1, failed) and check.waiting == 0, (layer, error)
        check._open_full = works  # type: ignore[method-assign]
        assert engine.generate(RAG, GREEDY).token_ids == expected
        drain(check)
        assert counts(made) == (failed, failed), (layer, error)
    monkeypatch.setattr(made, "add", lambda *_: 1 / 0)
    assert engine.generate(RAG, GREEDY).token_ids == expected
    drain(check)
    assert made.figures().dropped == {"failed": failed + 1}


def test_answers_wait_until_they_are_compared_the_queue_is_full_or_the_engine_closes(engine: BlendEngine) -> None:
    made, check = watched(engine)
    engine.generate(RAG, GREEDY)
    opened, seen_while_opening = check._open_full, []

    def looking(prompt: Prompt, rows: int) -> Any:
        seen_while_opening.append((check.waiting, check.has_work))
        return opened(prompt, rows)

    check._open_full = looking  # type: ignore[method-assign]
    drain(check)
    assert seen_while_opening == [(1, True)] and check.waiting == 0 and counts(made) == (1, 0)
    for _ in range(MOST_WAITING + 3):
        engine.generate(RAG, SamplingParams(max_new_tokens=1))
    assert check.waiting == MOST_WAITING and made.figures().dropped == {"queue full": 3}  # the oldest
    for _ in range(2):
        check.advance()
    assert check.waiting == MOST_WAITING
    engine.close()  # in the middle of a layer
    assert check.waiting == 0 and not check.has_work and made.figures().dropped["closed"] == MOST_WAITING
    check.advance()
    check.close()
    assert counts(made) == (1, MOST_WAITING + 3)


@pytest.mark.parametrize("slices", [0, 1, 2, 99])
def test_what_was_answered_with_other_adapters_is_not_compared(slices: int) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    add_adapter(model, "b", seed=2)
    add_adapter(model, "a", seed=1)
    with open_engine(model) as engine:
        made, check = watched(engine)
        engine.generate(RAG, GREEDY)
        for _ in range(slices):
            check.advance()
        set_adapter(model, "b")
        drain(check)
        expected = (1, 0) if slices == 99 else (0, 1)
        assert counts(made) == expected
        engine.warm([A, B, C])
        engine.generate(RAG, GREEDY)
        drain(check)
        assert counts(made) == (expected[0] + 1, expected[1])
        (series,) = made.figures().series
        assert series.agreement["first_token"][2] == 1  # the window is that of the present model


def test_two_engines_in_one_process_know_nothing_of_each_other() -> None:
    with open_engine(tiny_model("llama")) as one, open_engine(tiny_model("qwen3")) as other:
        (first, first_check), (second, second_check) = watched(one, floor=0.5), watched(other, floor=0.5)
        one.generate(RAG, GREEDY)
        while first.step == 0:
            first.add(Labels("", "hkvd"), Compared(1.0, (False,)), 0)
        other.generate(RAG, GREEDY)
        drain(second_check)
        assert first_check.waiting == 1 and counts(second) == (1, 0)
        assert one.generate(RAG, GREEDY).report.recompute_ratio == pytest.approx(1.5 * one.config.recompute_ratio)
        assert other.generate(RAG, GREEDY).report.recompute_ratio == other.config.recompute_ratio
        with pytest.raises(InvalidInputError, match="already"):
            one.runtime.watch(ShadowSettings(0.5))


def test_an_idle_engine_compares_by_itself_and_flush_and_captures_do_not_wait_for_it(engine: BlendEngine) -> None:
    made = engine.runtime.watch(ShadowSettings(1.0), seed=0)
    check = engine.runtime.shadow
    assert check is not None
    with engine.start(RAG, GREEDY) as running:  # no idle time until it is finished
        engine.generate(RAG, GREEDY)
        assert check.waiting == 1
        assert engine.runtime.background.submit("job", lambda: None) and engine.flush(10)
        assert check.waiting == 1
        running.step()
    end = time.monotonic() + 30
    while counts(made) != (2, 0) and time.monotonic() < end:
        time.sleep(0.05)
    assert counts(made) == (2, 0) and engine.flush(10)


def test_a_server_that_is_never_idle_gives_it_a_share_and_drops_the_rest(engine: BlendEngine) -> None:
    made = engine.runtime.watch(ShadowSettings(0.5), seed=0)
    check, rng = engine.runtime.shadow, random.Random(1)
    assert check is not None
    engine.runtime.background._requests += 1  # as if there were always one more
    expected = {ratio: engine.generate(RAG, GREEDY, ratio=ratio).token_ids for ratio in (0.2, 0.5)}
    scheduler = Scheduler(engine.runtime, Limits(active=4, row_layers=64))
    events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
    answers: dict[float, list[int]] = {}
    try:
        for _ in range(60):
            ratio = rng.choice([0.2, 0.5])
            scheduler.submit(Ask(RAG, GREEDY, ratio=ratio), lambda event, ratio=ratio: events.put((ratio, event)))
        done = 0
        while done < 60:
            ratio, event = events.get(timeout=60)
            if isinstance(event, DoneEvent):
                assert event.error is None
                done += 1
            elif event.token_id is not None:
                answers.setdefault(ratio, []).append(event.token_id)
    finally:
        scheduler.close()
    engine.runtime.background._requests -= 1
    compared, dropped = counts(made)
    assert compared > 0 and check.waiting <= MOST_WAITING + 1  # one is under way
    assert 10 <= compared + dropped + check.waiting <= 55  # of 62 that might be drawn
    for ratio, tokens in answers.items():
        assert sorted(tokens) == sorted(expected[ratio] * (len(tokens) // 5))


@pytest.mark.may_fail("shadow check")
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_drawn_answer_is_compared_dropped_or_waits(seed: int) -> None:
    rng = random.Random(seed)
    with open_engine(tiny_model("llama")) as engine:
        made, check = watched(engine)
        works, drawn = check._open_full, 0
        for _ in range(30):
            event = rng.random()
            if event < 0.4:
                engine.generate(RAG, SamplingParams(max_new_tokens=rng.randint(1, 3), ignore_eos=True))
                drawn += 1
            elif event < 0.5:
                with engine.start(RAG, GREEDY):  # left before its first token
                    drawn += 1
            elif event < 0.6:
                check._open_full = works  # type: ignore[method-assign]
                failing_at(check, rng.randint(-1, 3), BrokenError)
            elif event < 0.7:
                check._open_full = works  # type: ignore[method-assign]
            elif event < 0.72:
                check.close()
            else:
                for _ in range(rng.randint(1, 5)):
                    check.advance()
            assert sum(counts(made)) + check.waiting == drawn


RATIO = read_profile(model_path() / PROFILE_NAME).selection.recompute_ratio


def chat(web: TestClient, key: str, **extras: Any) -> dict[str, Any]:
    row = draw_questions(777, 1)[0]
    parts = [{"type": "text", "text": text.text} for text in row.passages]
    parts.append({"type": "text", "text": row.question})
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0, "cacheblend": extras}
    answer = web.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    answer.raise_for_status()
    report: dict[str, Any] = answer.json()["cacheblend"]
    return report


def test_the_server_compares_shows_the_floor_and_names_nobody(tmp_path: Path) -> None:
    keys = {name: add_key(tmp_path / "keys.json", name) for name in ("alice", "bob-secret-name")}
    stored = read_keys(tmp_path / "keys.json")
    settings = ServeSettings(keys=KeyRing(stored), chunk_tokens=16, drain_s=5, shadow=1.0, shadow_floor=0.9)
    alice = keys["alice"]
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        engine.name = "nano"
        with TestClient(create_app(engine, settings)) as web:

            def shown() -> dict[str, Any]:
                found: dict[str, Any] = web.get("/playground/passages").json()["settings"]
                return found

            for salt in ("", "private salt"):
                for key in keys.values():
                    for _ in range(2):
                        report = chat(web, key, salt=salt)
                        assert engine.flush(60)
            assert report["recompute_ratio"] == RATIO and report["selector"] == "hybrid"
            assert chat(web, alice, recompute_ratio=0.05)["recompute_ratio"] == 0.05
            assert chat(web, alice, mode="full")["recompute_ratio"] is None
            end = time.monotonic() + 300
            assert engine.runtime.shadow is not None
            while engine.runtime.shadow.waiting and time.monotonic() < end:
                time.sleep(0.02)
            assert not engine.runtime.shadow.waiting
            text = web.get("/metrics", headers={"Authorization": f"Bearer {alice}"}).text
            assert text.count("cacheblend_shadow_total{") == 3  # two tenants, and alice's own ratio
            for secret in ("alice", "bob", "private", *keys.values(), *(key.tenant for key in stored)):
                assert secret not in text
            assert f'cacheblend_shadow_ratio{{model="nano"}} {RATIO}' in text
            found = web.get("/playground/shadow", headers={"Authorization": f"Bearer {alice}"}).json()
            assert found["on"] and found["floor"] == 0.9 and found["compared"] >= 4 and found["ratio"] == RATIO
            assert "tenant" not in str(found)
            assert all(0 <= each["bound"] <= each["agreement"] <= 1 for each in found["moments"])
            assert web.get("/playground/shadow").status_code == 401
            assert shown()["shadow"] is True

            # The floor shows in answers and on the page.
            engine.runtime.shadow.watch._on_change(1.5)
            assert chat(web, alice)["recompute_ratio"] == pytest.approx(1.5 * RATIO)
            assert shown()["recompute_ratio"] == pytest.approx(1.5 * RATIO)
            engine.runtime.shadow.watch._on_change(float("inf"))
            report = chat(web, alice)
            assert report["recompute_ratio"] is None and report["hit_tokens"]["memory"] == 0
            assert chat(web, alice, recompute_ratio=0.3)["recompute_ratio"] == 0.3


def test_without_a_check_nothing_is_shown() -> None:
    with (
        BlendEngine.from_pretrained(model_path(), store="memory") as engine,
        TestClient(create_app(engine, ServeSettings(chunk_tokens=16))) as web,
    ):
        assert web.get("/playground/shadow").json() == {"on": False}
        assert "cacheblend_shadow" not in web.get("/metrics").text
        assert web.get("/playground/passages").json()["settings"]["shadow"] is False
    for settings, why in (({"shadow_floor": 0.9}, "also give shadow"), ({"shadow": 2.0}, "at most 1")):
        with pytest.raises(InvalidInputError, match=why):
            ServeSettings(**settings)  # type: ignore[arg-type]
