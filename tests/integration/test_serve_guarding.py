"""Which hosts, methods and keys a server answers, and what its figures and log lines say of its store and errors."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cacheblend.serve.keys import KeyRing, add_key, read_keys, remove_key
from cacheblend.serve.settings import ServeSettings
from random_words import words
from serving import running, shallow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ServeSettings(chunk_tokens=16, hosts=("server.example",), drain_s=5), model=shallow()) as address:
        yield address


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
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as client:
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


def test_half_of_a_surrogate_pair_is_the_clients_mistake(url: str) -> None:
    for body in ('{"prompt": "\\ud800"}', '{"chunks": [{"text": "a\\udfff"}]}', '{"messages": [{"role": "\\ud800"}]}'):
        for path in ("/v1/completions", "/v1/chunks", "/v1/chat/completions", "/playground/explain"):
            answer = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, (path, body, answer.text)


# ---- keys and figures ---------------------------------------------------------------------------------------


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


def test_figures_and_readiness_say_whether_the_store_answers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.store import MemoryStore

    with running(ServeSettings(ready_needs_store=True), model=shallow()) as needing:
        assert httpx.get(f"{needing}/ready").status_code == 200
        text = httpx.get(f"{needing}/metrics").text
        assert 'cacheblend_store_up{tier="memory"} 1.0' in text
        assert "process_resident_memory_bytes" in text and "cacheblend_build_info{" in text

        def fails(_: object) -> None:
            raise OSError("it is gone")

        monkeypatch.setattr(MemoryStore, "stats", fails)
        answer = httpx.get(f"{needing}/ready")
        assert answer.status_code == 503 and "memory" in answer.text
        assert httpx.get(f"{url}/ready").status_code == 200  # it does not need one
        text = httpx.get(f"{needing}/metrics").text
        assert 'cacheblend_store_up{tier="memory"} 0.0' in text
        [errors] = [
            line for line in text.splitlines() if line.startswith("cacheblend_store_errors_total{") and "answer" in line
        ]
        assert float(errors.split()[-1]) >= 1


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
    from cacheblend.serve.log_lines import JsonLines
    from cacheblend.serve.metrics import Metrics

    def fails(_: object) -> bytes:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Metrics, "text", fails)
    with caplog.at_level("INFO", "cacheblend.serve"):
        answers = [httpx.get(f"{url}/metrics"), httpx.get(f"{url}/v1/models")]
        time.sleep(0.1)
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.status_code for answer in answers] == [503, 200] and len(set(ids)) == 2
    [error] = [line for line in lines if line["level"] == "error"]
    assert error["request_id"] == ids[0] and "on purpose" in error["error"] and error["time"].endswith("+00:00")
    [asked] = [line for line in lines if line.get("path") == "/v1/models"]
    assert asked["request_id"] == ids[1] and asked["status"] == 200
