"""Which hosts and methods a server answers, and what its figures and log lines say of its store and errors."""

import json
import time
from pathlib import Path

import httpx
import pytest

from cacheblend.serve.log_lines import JsonLines
from cacheblend.serve.metrics import Metrics
from cacheblend.serve.settings import ServeSettings
from cacheblend.store import MemoryStore
from random_words import words
from serving import connected, running, shallow


@pytest.fixture
def url(shallow_url: str) -> str:
    return shallow_url


# ---- names, headers and methods -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("server.example:8000", 200),
        ("SERVER.example.", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
def test_only_names_of_the_server_are_answered(url: str, host: str, status: int) -> None:
    for method, path in (("GET", "/v1/chunks"), ("GET", "/"), ("DELETE", "/v1/chunks/00"), ("GET", "/metrics")):
        answer = httpx.request(method, url + path, headers={"Host": host}, timeout=60)
        assert answer.status_code == (404 if method == "DELETE" and status == 200 else status)
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_a_probe_without_a_host_is_answered_and_an_empty_host_is_not(url: str) -> None:
    for head, status in ((b"HTTP/1.0", b"200"), (b"HTTP/1.0\r\nHost: ", b"403")):
        with connected(url) as client:
            client.sendall(b"GET /health " + head + b"\r\n\r\n")
            assert client.recv(64).split()[1] == status


def test_head_is_get_without_a_body(url: str) -> None:
    for path in ("/health", "/ready", "/v1/models", "/metrics", "/"):
        got, head = httpx.get(url + path), httpx.head(url + path)
        assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]


def test_a_wrong_method_is_told_the_right_ones_and_a_wrong_query_its_name(url: str) -> None:
    answer = httpx.options(f"{url}/v1/chunks")
    assert answer.status_code == 405 and answer.headers["allow"]
    assert httpx.get(f"{url}/v1/chunks?limit=0").json()["error"]["param"] == "limit"


# ---- figures ------------------------------------------------------------------------------------------------


def test_figures_and_readiness_say_whether_the_store_answers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ServeSettings(ready_needs_store=True), model=shallow()) as needing:
        assert httpx.get(f"{needing}/health").json() == {"status": "ok"}
        assert httpx.get(f"{needing}/ready").json() == {"status": "ready", "waiting": 0, "active": 0}
        httpx.post(f"{needing}/v1/completions", json={"prompt": "lamp", "max_tokens": 2}, timeout=60).raise_for_status()
        text = httpx.get(f"{needing}/metrics").text
        assert 'cacheblend_store_up{tier="memory"} 1.0' in text and 'cacheblend_requests_total{status="200"}' in text
        assert "process_resident_memory_bytes" in text and "cacheblend_build_info{" in text
        counted = ("hit_tokens_total", "recomputed_tokens_total", "store_bytes", "requests_waiting")
        for name in ("ttft_seconds_bucket", "inter_token_seconds_bucket", *counted):
            assert f"cacheblend_{name}" in text

        def fails(_: object) -> None:
            raise OSError("it is gone")

        monkeypatch.setattr(MemoryStore, "stats", fails)
        answer = httpx.get(f"{needing}/ready")
        assert answer.status_code == 503 and "memory" in answer.text
        assert httpx.get(f"{url}/ready").status_code == 200  # it does not need one
        text = httpx.get(f"{needing}/metrics").text
        assert 'cacheblend_store_up{tier="memory"} 0.0' in text
        assert float(text.partition('cacheblend_store_errors_total{tier="memory",what="answer"} ')[2].split()[0]) >= 1


def test_a_store_whose_folder_is_gone_is_down_until_it_is_back(tmp_path: Path) -> None:
    folder, aside = tmp_path / "store", tmp_path / "aside"
    with running(ServeSettings(ready_needs_store=True, drain_s=1), str(folder), model=shallow()) as url:

        def up() -> tuple[int, bool]:
            text = httpx.get(f"{url}/metrics", timeout=60).text
            return httpx.get(f"{url}/ready", timeout=60).status_code, 'cacheblend_store_up{tier="disk"} 1.0' in text

        ask = {"prompt": "lamp", "max_tokens": 2}
        assert up() == (200, True)
        folder.rename(aside)
        assert up() == (503, False)
        assert httpx.post(f"{url}/v1/completions", json=ask, timeout=60).status_code == 200  # answers without it
        stored = httpx.post(f"{url}/v1/chunks", json={"chunks": [{"text": words(60)}]}, timeout=60)
        assert stored.status_code == 503 and not folder.exists()  # nothing is made where a disk may come back
        aside.rename(folder)
        assert up() == (200, True)
        assert httpx.post(f"{url}/v1/chunks", json={"chunks": [{"text": words(60)}]}, timeout=60).status_code == 200


@pytest.mark.may_fail("request")
def test_log_lines_have_a_time_and_the_requests_id(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> bytes:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Metrics, "text", fails)
    with caplog.at_level("INFO", "cacheblend.serve"):
        body = {"prompt": "lamp", "max_tokens": 2}
        answers = [httpx.get(f"{url}/metrics"), httpx.post(f"{url}/v1/completions", json=body, timeout=60)]
        time.sleep(0.1)
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.status_code for answer in answers] == [503, 200] and len(set(ids)) == 2
    [error] = [line for line in lines if line["level"] == "error"]
    assert error["request_id"] == ids[0] and "on purpose" in error["error"] and error["time"].endswith("+00:00")
    [asked] = [line for line in lines if line.get("path") == "/v1/completions"]
    assert (asked["request_id"], asked["status"], asked["key"]) == (ids[1], 200, "anyone")
    assert asked["prompt_tokens"] > 0 and asked["ttft_s"] > 0
    [message] = [record.message for record in caplog.records if record.name == "cacheblend.serve.requests"]
    assert json.loads(message)["path"] == "/v1/completions"  # one line of JSON, whatever the log's format
