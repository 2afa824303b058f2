"""The floor on the model that ships, and the server that shows it.

A profile far too lean for questions across passages is raised until agreement holds; an ample one stays; a change of
traffic from direct questions to chains of two moves it.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf.shadow_start import watch
from cacheblend.engines.settings import PROFILE_NAME, read_profile
from cacheblend.engines.shadow import ShadowSettings, ShadowWatch
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.keys import KeyRing, add_key, read_keys
from cacheblend.serve.settings import ServeSettings
from lab.nano.questions import Prompts, draw_questions
from lab.suite.suite import SETTINGS

FLOOR = 0.7
RATIO = read_profile(model_path() / PROFILE_NAME).selection.recompute_ratio
Served = tuple[TestClient, BlendEngine, dict[str, str], list[str]]
SMALL = Prompts(passages=(3, 4), tokens=(48, 80))
SHORT = SamplingParams(max_new_tokens=2)
LEAN = {"selector": "hkvd", "recompute_ratio": 0.06, "check_layers": (1,)}
AMPLE = {"selector": "hybrid", "recompute_ratio": 0.12, "check_layers": (4,), "early_ratio": 0.4, "question_words": 1.0}
"""For questions across passages; without hops it does not follow a chain of two."""


def prompts(engine: BlendEngine, category: str, count: int) -> list[Prompt]:
    """Questions of a category, their passages stored."""
    found = []
    for row in draw_questions(50, count, [category], SMALL):
        passages = [Passage(text.text, text.title) for text in row.passages]
        found.append(engine.prompt(SETTINGS.template.layout.parts(engine, passages, row.question)))
    engine.warm([segment for prompt in found for segment in prompt.chunks])
    return found


def ask(engine: BlendEngine, asked: Sequence[Prompt]) -> None:
    """One after the other, each compared before the next."""
    for prompt in asked:
        engine.generate(prompt, SHORT)
        while engine.shadow is not None and engine.shadow.waiting:
            if not engine.background.advance_idle():
                time.sleep(0.001)


def opened(config: dict[str, Any] | None = None) -> tuple[BlendEngine, ShadowWatch]:
    engine = BlendEngine.from_pretrained(model_path(), store="memory", config=config)
    return engine, watch(engine, ShadowSettings(1.0, FLOOR), seed=0)


@pytest.mark.slow
def test_a_lean_ratio_is_raised_until_agreement_holds() -> None:
    engine, made = opened(LEAN)
    with engine:
        asked = prompts(engine, "cross-hard", 24)
        for _ in range(12):
            ask(engine, asked)
            holds = [each for each in made.history() if each.bound >= FLOOR]
            if holds:
                break
        lean = [each for each in made.history() if each.ratio == LEAN["recompute_ratio"]]
        assert lean[-1].agreement < FLOOR and all(each.bound < FLOOR for each in lean)
        assert holds and holds[0].agreement > FLOOR and holds[0].ratio is not None
        assert made.figures().raised >= 2 and holds[0].ratio > 2 * LEAN["recompute_ratio"]


@pytest.mark.slow
def test_an_ample_one_stays_and_a_change_of_traffic_moves_it() -> None:
    engine, made = opened(AMPLE)
    with engine:
        ask(engine, prompts(engine, "cross-hard", 12) + prompts(engine, "direct", 12))
        assert made.step == 0 and made.history()[-1].agreement > 0.9
        chains = prompts(engine, "chain2", 20)
        ask(engine, chains)
        assert made.step >= 1 and made.ratio is not None and made.ratio >= 0.18
        engine.close()


# ---- the server -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = {name: add_key(file, name) for name in ("alice", "bob-secret-name")}
    settings = ServeSettings(keys=KeyRing(read_keys(file)), chunk_tokens=16, drain_s=5, shadow=1.0, shadow_floor=0.9)
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        engine.name = "nano"
        with TestClient(create_app(engine, settings)) as web:
            yield web, engine, keys, [key.tenant for key in read_keys(file)]


def chat(web: TestClient, key: str, **extras: Any) -> dict[str, Any]:
    row = draw_questions(777, 1)[0]
    parts = [{"type": "text", "text": text.text} for text in row.passages]
    parts.append({"type": "text", "text": row.question})
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0, "cacheblend": extras}
    answer = web.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    answer.raise_for_status()
    report: dict[str, Any] = answer.json()["cacheblend"]
    return report


def metrics(web: TestClient, key: str) -> str:
    return web.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text


def test_the_server_compares_shows_and_names_nobody(served: Served) -> None:
    web, engine, keys, tenants = served
    for salt in ("", "private salt"):
        for key in keys.values():
            for _ in range(2):
                report = chat(web, key, salt=salt)
                assert engine.flush(60)
    assert report["recompute_ratio"] == RATIO and report["selector"] == "hybrid"
    assert chat(web, keys["alice"], recompute_ratio=0.05)["recompute_ratio"] == 0.05
    assert chat(web, keys["alice"], mode="full")["recompute_ratio"] is None
    end = time.monotonic() + 300
    while engine.shadow.waiting and time.monotonic() < end:
        time.sleep(0.02)
    assert not engine.shadow.waiting
    text = metrics(web, keys["alice"])
    assert text.count("cacheblend_shadow_total{") == 3  # two tenants, and alice's own ratio
    for secret in ("alice", "bob", "private", *keys.values(), *tenants):
        assert secret not in text
    assert f'cacheblend_shadow_ratio{{model="nano"}} {RATIO}' in text
    headers = {"Authorization": f"Bearer {keys['alice']}"}
    found = web.get("/playground/shadow", headers=headers).json()
    assert found["on"] and found["floor"] == 0.9 and found["compared"] >= 4 and found["ratio"] == RATIO
    assert "tenant" not in str(found) and all(0 <= each["bound"] <= each["agreement"] <= 1 for each in found["moments"])
    assert web.get("/playground/shadow").status_code == 401
    assert web.get("/playground/passages").json()["settings"]["shadow"] is True


def test_the_floor_shows_in_answers_metrics_and_page(served: Served) -> None:
    web, engine, keys, _ = served
    made, key = engine.shadow.watch, keys["alice"]
    try:
        made._on_change(1.5)
        assert chat(web, key)["recompute_ratio"] == pytest.approx(1.5 * RATIO)
        assert web.get("/playground/passages").json()["settings"]["recompute_ratio"] == pytest.approx(1.5 * RATIO)
        made._on_change(float("inf"))
        report = chat(web, key)
        assert report["recompute_ratio"] is None and report["hit_tokens"]["memory"] == 0
        assert chat(web, key, recompute_ratio=0.3)["recompute_ratio"] == 0.3
    finally:
        made._on_change(1.0)


def test_without_a_check_nothing_is_shown() -> None:
    settings = ServeSettings(chunk_tokens=16)
    with (
        BlendEngine.from_pretrained(model_path(), store="memory") as engine,
        TestClient(create_app(engine, settings)) as web,
    ):
        assert web.get("/playground/shadow").json() == {"on": False}
        assert "shadow" not in web.get("/metrics").text
        assert web.get("/playground/passages").json()["settings"]["shadow"] is False


def test_a_floor_without_a_share_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="also give shadow"):
        ServeSettings(shadow_floor=0.9)
    with pytest.raises(InvalidInputError, match="at most 1"):
        ServeSettings(shadow=2.0)
