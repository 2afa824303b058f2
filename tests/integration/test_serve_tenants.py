"""Keys, and what they keep apart: chunks, quotas, and what one tenant could learn of another by the time it takes."""

import math
import random
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from cacheblend.core.plan.prompt import Prompt, part_of, text
from cacheblend.engines.hf import BlendEngine
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.keys import KeyRing, add_key, read_keys, remove_key
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.tenants import Tenants
from cacheblend.store.base import SMALL_FILE_BYTES
from campaign import share
from openai_asking import PASSAGES, ask, extras, messages
from serving import connected, keys_of, running, shallow

TRIES = max(30, share(100))
WORDS = ["boot", "lamp", "rope", "coin", "drum", "flag", "glove", "helmet", "jar", "kite", "lock", "map"]


def passage(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(60))


def rank_sum_z(one: list[float], other: list[float]) -> float:
    """Mann and Whitney's statistic in standard deviations: 0 where both come from one distribution."""
    ranked = sorted((value, side) for side, values in enumerate((one, other)) for value in values)
    ranks = sum(rank for rank, (_, side) in enumerate(ranked, 1) if side == 0)
    n, m = len(one), len(other)
    mean, deviation = n * (n + m + 1) / 2, math.sqrt(n * m * (n + m + 1) / 12)
    return (ranks - mean) / deviation


def test_the_statistic_tells_distributions_apart() -> None:
    rng = random.Random(1)
    one, same, sooner = ([rng.gauss(mean, 1) for _ in range(100)] for mean in (0, 0, -1))
    assert abs(rank_sum_z(one, same)) < 3 < abs(rank_sum_z(one, sooner))


def test_no_hit_and_no_difference_in_time(tmp_path: Path) -> None:
    ring, keys = keys_of(tmp_path, "mine", "theirs")
    settings, rng = ServeSettings(keys=ring, chunk_tokens=16), random.Random(2)
    times: dict[str, list[float]] = {"stored by another": [], "never stored": [], "stored": []}
    with running(settings, model=shallow()) as url, httpx.Client(base_url=url, timeout=60) as http:

        def ask(text: str, key: dict[str, str]) -> dict[str, Any]:
            parts = [{"type": "text", "text": part} for part in (text, f"Who has the {rng.choice(WORDS)}?")]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0}
            report: dict[str, Any] = http.post("/v1/chat/completions", json=body, headers=key).json()["cacheblend"]
            return report

        def store(text: str) -> None:
            assert http.post("/v1/chunks", json={"chunks": [{"text": text}]}, headers=keys["mine"]).status_code == 200

        ask(passage(rng), keys["theirs"])
        for number in range(TRIES):
            known, unknown = passage(rng), passage(rng)
            store(known)
            tries = [("stored by another", known), ("never stored", unknown)]
            for what, text in tries if number % 2 else tries[::-1]:
                report = ask(text, keys["theirs"])
                assert report["missed_tokens"] > 0 and report["hit_tokens"]["memory"] == 0
                assert report["hit_tokens"]["prefix"] < 5  # the template's own text
                times[what].append(report["ttft_s"])
            if number < 5:
                times["stored"].append(ask(known, keys["mine"])["ttft_s"])
                assert ask(known, keys["mine"])["missed_tokens"] == 0
    assert abs(rank_sum_z(times["stored by another"], times["never stored"])) < 4


# ---- keys ----


def test_keys_keep_tenants_apart(tmp_path: Path) -> None:
    ring, headers = keys_of(tmp_path, "one", "other")
    mine, theirs = headers.values()
    file, secret = tmp_path / "keys.json", mine["Authorization"].removeprefix("Bearer ")
    assert secret not in file.read_text() and file.stat().st_mode & 0o77 == 0
    with running(ServeSettings(keys=ring, chunk_tokens=16), model=shallow()) as url:
        for wrong in ({}, {"Authorization": "Bearer cb-wrong"}, {"Authorization": secret}):
            refused = httpx.get(f"{url}/v1/models", headers=wrong)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        chunks = {"chunks": [{"text": text} for text in PASSAGES]}
        stored = httpx.post(f"{url}/v1/chunks", json=chunks, headers=mine, timeout=60).json()["data"]
        body = {"model": "nano", "messages": messages(), "max_tokens": 1}

        def missed(headers: dict[str, str], **more: Any) -> int:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body | more, headers=headers, timeout=60)
            return int(answer.json()["cacheblend"]["missed_tokens"])

        assert missed(mine) == 0
        assert missed(mine, cacheblend={"salt": "another project"}) > 0
        assert missed(theirs) > 0
        assert httpx.get(f"{url}/v1/chunks", headers=theirs).json()["data"] != stored
        assert httpx.delete(f"{url}/v1/chunks/{stored[0]['id']}", headers=theirs).status_code == 404


def test_a_strangers_body_is_not_waited_for(tmp_path: Path) -> None:
    with running(ServeSettings(keys=keys_of(tmp_path, "one")[0]), model=shallow()) as url:
        with connected(url) as stranger:
            stranger.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n")
            assert stranger.recv(4096).startswith(b"HTTP/1.1 401")
        assert httpx.post(f"{url}/v1/completions", content=b"{", timeout=60).status_code == 401


def test_a_key_that_is_removed_or_added_is_so_in_a_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend.serve.keys.LOOK_S", 0.0)
    file, figures = tmp_path / "keys.json", tmp_path / "metrics.json"
    old, reader = add_key(file, "old"), add_key(figures, "prometheus")
    settings = ServeSettings(keys=KeyRing(read_keys(file), file), metrics_keys=KeyRing(read_keys(figures), figures))
    with running(settings, model=shallow()) as url:

        def status(key: str, path: str = "/v1/models") -> int:
            return httpx.get(url + path, headers={"Authorization": f"Bearer {key}"}).status_code

        assert status(old) == 200 and status(reader) == 401
        assert status(old, "/metrics") == 401 and status(reader, "/metrics") == 200
        new = add_key(file, "new")
        assert status(new) == 200
        remove_key(file, "old")
        assert status(old) == 401 and status(new) == 200
        file.write_text("{")
        assert status(new) == 200  # what cannot be read changes nothing
        file.unlink()
        assert status(new) == 401  # and no key lets nobody in


# ---- quotas ----


def test_quotas_of_a_key() -> None:
    chunks = {"chunks": [{"text": text} for text in PASSAGES]}
    with running(ServeSettings(store_bytes=1000, chunk_tokens=16), model=shallow()) as url:
        refused = httpx.post(f"{url}/v1/chunks", json=chunks, timeout=60)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "quota"
        assert extras(ask(url))["missed_tokens"] > 0
        time.sleep(0.5)
        assert httpx.get(f"{url}/v1/chunks").json()["data"] == []  # nor is what a request missed
    with running(ServeSettings(pin_bytes=1000), model=shallow()) as url:
        assert httpx.post(f"{url}/v1/chunks", json=chunks, timeout=60).status_code == 200
        assert httpx.post(f"{url}/v1/chunks", json=chunks | {"pin": True}, timeout=60).status_code == 403


def test_a_part_of_a_passage_counts_as_the_whole_which_is_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page stores counts against its key's quota before it is stored, and only once."""
    whole, part, chunks = 200, 10, 3
    ids = np.arange(chunks * whole) % 199 + 20
    parts = [part_of(each, 1, part, f"{number}") for number, each in enumerate(np.split(ids, chunks))]
    prompt = Prompt.of([text([20, 21, 22]), *parts, text([23, 24])])
    body = {"documents": [{"text": "a"}], "question": "b"}

    def refuse_more(tenants: Tenants, key: object, tokens: int, files: int = 1) -> bool:
        assert (tokens, files) == (0, 0), "what is stored is reserved again"
        return True

    with BlendEngine.from_pretrained(model_path(), store="memory", config={"capture": False}) as engine:
        monkeypatch.setattr(engine, "chat_prompt", lambda *_: prompt)

        def explained(store_bytes: int) -> dict[str, Any]:
            with TestClient(create_app(engine, ServeSettings(store_bytes=store_bytes))) as web:
                found: dict[str, Any] = web.post("/playground/explain", json=body).json()
                return found

        need = chunks * (Tenants(engine, None, None).size_of(whole) + SMALL_FILE_BYTES)
        assert explained(need - 1)["stored"] == 0 and not engine.store.manifests()
        assert explained(need)["stored"] == chunks
        monkeypatch.setattr(Tenants, "reserve", refuse_more)
        assert explained(need)["hit_tokens"]["memory"] == chunks * part
