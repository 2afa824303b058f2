"""What the server refuses: fields, spans, texts and bodies that are wrong, keys it does not know, spent quotas."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cacheblend.serve.keys import KeyRing, add_key, read_keys
from cacheblend.serve.settings import ServeSettings
from openai_asking import PASSAGES, ask, extras, messages
from serving import running, shallow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ServeSettings(chunk_tokens=16, drain_s=5), model=shallow()) as address:
        yield address


# ---- requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n:"),
        ({"n": 9}, "at most 8 choices"),
        ({"top_logprobs": 3}, "logprobs: true"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "only text"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"cacheblend": {"selector": "best"}}, "selector"),
        ({"cacheblend": {"mode": "fast"}}, "mode"),
        ({"cacheblend": {"ratio": 0.3}}, "ratio"),
        ({"cacheblend": {"recompute_ratio": 2}}, "recompute_ratio"),
        ({"chat_template_kwargs": {"chat_template": "/etc/passwd"}}, "chat_template"),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "tokens"),
    ],
)
def test_what_is_wrong_is_said_in_openais_form(url: str, change: dict[str, Any], message: str) -> None:
    body = {"model": "nano", "messages": messages(), "max_tokens": 2} | change
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and message in f"{error['param']} {error['message']}"


def test_another_model_another_route_and_no_json(url: str) -> None:
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["type"] == "not_found_error"
    with pytest.raises(openai.NotFoundError, match="no model"):
        ask(url, model="gpt-4")
    broken = httpx.post(f"{url}/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"})
    assert broken.status_code == 400 and broken.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "spans", "message"),
    [
        ([400, 401, 402], [[0, 9]], "lie in it"),
        ([400, 401, 402], [[1, 1]], "lie in it"),
        ([400, 401, 402], [[0, 2], [1, 3]], "do not overlap"),
        ("text", [[0, 2]], "token ids"),
        ([], None, "empty"),
        ([-1], None, "token ids must be in"),
        ([10**9], None, "token ids must be in"),
    ],
)
def test_spans_and_ids_that_cannot_be_meant(url: str, prompt: Any, spans: Any, message: str) -> None:
    body = {"model": "nano", "prompt": prompt, "max_tokens": 1, "cacheblend": {"chunks": spans}}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a\udfffb"}]}]},
            "messages.0.content.0.text",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "documents": [{"text": "\ud800"}]},
            "documents.0.text",
        ),
        ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
        ("/v1/completions", {"prompt": ["\ud800"]}, "prompt.0"),
        ("/v1/completions", {"prompt": "a", "model": "\ud800"}, "model"),
        ("/v1/completions", {"prompt": "a", "cacheblend": {"\ud800": 1}}, "cacheblend"),
        ("/v1/completions", {"prompt": "a", "stop": ["\ud800"]}, "stop.0"),
        ("/v1/chunks", {"chunks": [{"text": "\ud800"}]}, "chunks.0.text"),
        ("/v1/chunks", {"chunks": [{"text": "a", "title": "\ud800"}]}, "chunks.0.title"),
        ("/v1/chunks", {"chunks": [{"text": "a"}], "salt": "\ud800"}, "salt"),
        ("/playground/explain", {"documents": [{"text": "a"}], "question": "\ud800"}, "question"),
    ],
)
def test_text_that_is_not_valid_unicode(url: str, path: str, body: dict[str, Any], param: str) -> None:
    written = json.dumps(body)  # in ASCII, with the surrogate as an escape
    answer = httpx.post(f"{url}{path}", content=written, headers={"Content-Type": "application/json"}, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    assert error["param"] == param and "surrogate" in error["message"], answer.text


def test_bytes_of_a_surrogate_in_a_body(url: str) -> None:
    """Not UTF-8, yet Python's JSON parser reads them."""
    written = b'{"prompt": "bad \xed\xa0\x80 x", "max_tokens": 1}'
    answer = httpx.post(f"{url}/v1/completions", content=written, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "surrogate" in answer.json()["error"]["message"], answer.text


def test_a_surrogate_pair_is_a_character(url: str) -> None:
    written = '{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
    answer = httpx.post(f"{url}/v1/completions", content=written, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


def test_bodies_that_are_too_long() -> None:
    with running(ServeSettings(max_body_bytes=1000), model=shallow()) as url:
        announced = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 2000})
        pieces = httpx.post(f"{url}/v1/completions", content=(b"x" * 100 for _ in range(30)))
        assert announced.status_code == pieces.status_code == 413
        assert httpx.get(f"{url}/health").status_code == 200


# ---- keys ---------------------------------------------------------------------------------------------------


def test_keys_keep_tenants_apart(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    one, other = add_key(file, "one"), add_key(file, "other")
    assert one not in file.read_text() and file.stat().st_mode & 0o77 == 0
    with running(ServeSettings(keys=KeyRing(read_keys(file)), chunk_tokens=16), model=shallow()) as url:
        for wrong in ({}, {"Authorization": "Bearer cb-wrong"}, {"Authorization": one}):
            refused = httpx.get(f"{url}/v1/models", headers=wrong)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        mine, theirs = ({"Authorization": f"Bearer {key}"} for key in (one, other))
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
    file = tmp_path / "keys.json"
    add_key(file, "one")
    with running(ServeSettings(keys=KeyRing(read_keys(file))), model=shallow()) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 60) as stranger:
            stranger.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n")
            assert stranger.recv(4096).startswith(b"HTTP/1.1 401")
        assert httpx.post(f"{url}/v1/completions", content=b"{", timeout=60).status_code == 401


def test_quotas_of_a_key() -> None:
    chunks = {"chunks": [{"text": text} for text in PASSAGES]}
    with running(ServeSettings(store_bytes=1000, chunk_tokens=16), model=shallow()) as url:
        refused = httpx.post(f"{url}/v1/chunks", json=chunks, timeout=60)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "quota"
        answer = ask(
            url,
            messages=[{"role": "user", "content": [{"type": "text", "text": t} for t in [*PASSAGES, "Which ship?"]]}],
        )
        assert extras(answer)["missed_tokens"] > 0
        time.sleep(0.5)
        assert httpx.get(f"{url}/v1/chunks").json()["data"] == []  # nor is what a request missed
    with running(ServeSettings(pin_bytes=1000), model=shallow()) as url:
        assert httpx.post(f"{url}/v1/chunks", json=chunks, timeout=60).status_code == 200
        assert httpx.post(f"{url}/v1/chunks", json=chunks | {"pin": True}, timeout=60).status_code == 403
