"""A server that is busy, loses its store or is stopped, and what its page asks for."""

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend.engines.hf.decode import compute_logits
from cacheblend.engines.hf.tickets import Limits
from cacheblend.serve.settings import ServeSettings
from cacheblend.store import open_store
from campaign import rotating
from openai_asking import PASSAGES, ask
from serving import free_port, is_ready, running
from small_llama import wait_until

INTERRUPTED = signal.SIGINT, (0,)


@pytest.fixture
def url(nano_url: str) -> str:
    return nano_url


# ---- under load ---------------------------------------------------------------------------------------------


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes at least 20 ms, so that a long answer is still running when the test looks at it."""

    def compute(*arguments: Any) -> None:
        time.sleep(0.02)
        compute_logits(*arguments)

    monkeypatch.setattr("cacheblend.engines.hf.scheduler.compute_logits", compute)


def test_a_full_queue_is_429_with_retry_after(slowly: None) -> None:
    with running(ServeSettings(limits=Limits(active=1, waiting=1), drain_s=0.1)) as url:
        endless = {"model": "nano", "prompt": "Read", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as http, http.stream("POST", f"{url}/v1/completions", json=endless) as first:
            lines = first.iter_lines()  # kept: a generator that is dropped closes the stream
            next(lines)
            found: list[httpx.Response] = []
            short = endless | {"stream": False, "max_tokens": 1}

            def post() -> None:
                found.append(httpx.post(f"{url}/v1/completions", json=short, timeout=60))

            threads = [threading.Thread(target=post) for _ in range(4)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(found) >= 3)
            assert [answer.status_code for answer in found] == [429] * 3
            assert all(int(answer.headers["Retry-After"]) >= 1 for answer in found)
        for thread in threads:  # the one that streamed has gone: the one that waits is answered
            thread.join(60)
        assert sorted(answer.status_code for answer in found) == [200, 429, 429, 429]


def test_a_client_that_leaves_is_not_answered_any_more(url: str, slowly: None) -> None:
    endless = {"model": "nano", "prompt": "Read", "max_tokens": 100_000, "ignore_eos": True}
    with (
        httpx.Client(timeout=60) as http,
        http.stream("POST", f"{url}/v1/completions", json=endless | {"stream": True}) as one,
    ):
        next(one.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=endless, timeout=1)
    wait_until(lambda: httpx.get(f"{url}/ready").json()["active"] == 0)


def test_a_request_whose_time_is_over_ends(slowly: None) -> None:
    with running(ServeSettings(timeout_s=0.5, drain_s=0.1)) as url:
        body = {"model": "nano", "prompt": "Read", "max_tokens": 100_000, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60) as streamed:
            events = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "timeout"


def test_many_requests_that_store_delay_no_other() -> None:
    with running(ServeSettings(chunk_tokens=16, limits=Limits(waiting=50))) as url, ThreadPoolExecutor(64) as pool:
        chunks = [{"chunks": [{"token_ids": [300 + n + m for m in range(300)]}]} for n in range(60)]
        stored = [pool.submit(httpx.post, f"{url}/v1/chunks", json=each, timeout=120) for each in chunks]
        asked = ask(url, max_tokens=1)
        assert asked.usage is not None
        assert not all(each.done() for each in stored)
        assert {each.result().status_code for each in stored} <= {200, 429}


@pytest.mark.may_fail("store write", "block lost")
def test_a_store_that_is_gone_costs_no_answer(tmp_path: Path) -> None:
    import shutil

    with running(ServeSettings(chunk_tokens=16), f"file://{tmp_path}/store") as url:
        before = ask(url, extra_body={"cacheblend": {"mode": "full"}}).choices[0].message.content
        with suppress(OSError):  # it is being written to
            shutil.rmtree(tmp_path / "store")
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        after = ask(url)
        assert after.choices[0].message.content == before
        assert httpx.get(f"{url}/metrics").status_code == 200


@pytest.mark.parametrize(
    ("sign", "codes"), rotating([(signal.SIGTERM, (0, -signal.SIGTERM)), INTERRUPTED], core=[INTERRUPTED])
)
def test_a_server_that_is_stopped_answers_what_it_took_and_writes_what_it_missed(
    tmp_path: Path, sign: signal.Signals, codes: tuple[int, ...]
) -> None:
    """A signal in the middle of a stream: it goes on to its end, and its chunks are in the store's folder."""
    port, folder = free_port(), tmp_path / "store"
    arguments = ["serve", "-m", "nano", "--port", str(port), "--store", str(folder), "--chunk-tokens", "16"]
    command = [sys.executable, "-c", "from cacheblend.cli import main; main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: is_ready(f"http://127.0.0.1:{port}"))
            events = ask(f"http://127.0.0.1:{port}", stream=True, max_tokens=40, extra_body={"ignore_eos": True})
            first = next(iter(events))
            server.send_signal(sign)
            tokens = sum(bool(event.choices[0].delta.content) for event in [first, *events])
            assert tokens >= 30
            assert server.wait(60) in codes  # uvicorn ends itself by the SIGTERM it took
        finally:
            server.kill()
    with open_store(folder) as store:
        assert len(store.manifests()) == len(set(PASSAGES))
        assert store.verify() == []


# ---- the page -----------------------------------------------------------------------------------------------


def test_the_page_and_what_it_asks_for(url: str) -> None:
    assert "CacheBlend" in httpx.get(f"{url}/").text
    found = httpx.get(f"{url}/playground/passages").json()
    documents = [found["passages"][n] for n in found["questions"][0]["passages"]]
    body = {"documents": documents, "question": found["questions"][0]["text"], "recompute_ratio": 0.2}
    why = httpx.post(f"{url}/playground/explain", json=body, timeout=120).json()
    sources = {token["source"] for segment in why["segments"] for token in segment["tokens"]}
    assert {"loaded", "recomputed", "fresh"} <= sources
    assert why["kl"] >= 0 and why["recomputed_tokens"] == sum(
        token["source"] == "recomputed" for segment in why["segments"] for token in segment["tokens"]
    )
