"""What the server refuses: fields, spans, texts and bodies that are wrong, too long, or of too many values."""

import contextlib
import json
import time
import tracemalloc
from typing import Any

import httpx
import openai
import pytest

from cacheblend.engines.tokens.builder import PromptBuilder
from cacheblend.serve.errors import ApiError
from cacheblend.serve.middleware import CONTAINERS, FREE, VALUES, BodyBudget, check_shape
from cacheblend.serve.settings import ServeSettings
from openai_asking import ask, messages
from serving import connected, running, shallow

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def url(shallow_url: str) -> str:
    return shallow_url


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
    broken = httpx.post(f"{url}/v1/chat/completions", content=b"{", headers=JSON)
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
        ("/v1/chat/completions", {"messages": [{"content": [{"text": "a\udfffb"}]}]}, "messages.0.content.0.text"),
        ("/v1/chat/completions", {"messages": [{"role": "\ud800"}]}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": [], "documents": [{"text": "\ud800"}]}, "documents.0.text"),
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
    answer = httpx.post(f"{url}{path}", content=written, headers=JSON, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    assert error["param"] == param and "surrogate" in error["message"], answer.text


def test_a_surrogate_pair_is_a_character_and_bytes_of_half_of_one_are_none(url: str) -> None:
    """These are not UTF-8, yet Python's JSON parser reads them."""
    for written, status in ((rb"\ud83d\ude00", 200), (b"bad \xed\xa0\x80 x", 400)):
        body = b'{"prompt": "' + written + b'", "max_tokens": 1}'
        answer = httpx.post(f"{url}/v1/completions", content=body, headers=JSON)
        assert answer.status_code == status and ("surrogate" in answer.text) == (status == 400), answer.text


def test_bodies_that_are_too_long() -> None:
    with running(ServeSettings(max_body_bytes=1000), model=shallow()) as url:
        announced = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 2000})
        pieces = httpx.post(f"{url}/v1/completions", content=(b"x" * 100 for _ in range(30)))
        assert announced.status_code == pieces.status_code == 413
        assert httpx.get(f"{url}/health").status_code == 200


# ---- long texts: early, within bounded memory and time ----


@pytest.mark.parametrize("size", [100_000, 2_000_000, 15_600_000])
def test_a_long_text_is_refused_by_its_length(url: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised: list[int] = []
    inner = PromptBuilder.encode
    monkeypatch.setattr(
        PromptBuilder, "encode", lambda self, text, *rest: (tokenised.append(len(text)), inner(self, text, *rest))[1]
    )
    text = "lamp " * (size // 5)
    chat = {"messages": [{"role": "user", "content": text}]}
    bodies = [("/v1/chat/completions", chat), ("/v1/completions", {"prompt": text})]
    bodies += [("/v1/chunks", {"chunks": [{"text": text}]})]
    bodies += [("/playground/explain", {"documents": [{"text": text}], "question": "Who?"})]
    for path, body in bodies:
        answer = httpx.post(url + path, json=body, timeout=60)
        assert answer.status_code in (400, 413), (path, answer.text)
        assert answer.json()["error"]["code"] == "too_long" and "at most" in answer.json()["error"]["message"]
    assert max(tokenised, default=0) < 100_000


def tool_with(value: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": value}}}]}


@pytest.mark.parametrize(
    "more",
    [
        tool_with(["lamp " * 40_000]),
        tool_with(["lamp"] * 40_000),
        tool_with([int("7" * 4000)] * 30),
        tool_with([10**40 + 7] * 40_000),
        tool_with([12345678] * 30_000),
        {"chat_template_kwargs": {"thinking": "lamp " * 40_000}},
        {},
    ],
    ids=lambda more: next(iter(more), "name"),
)
def test_a_long_text_beside_the_messages_is_refused_before_it_is_tokenised(
    url: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptBuilder, "chat", None)
    message = {"role": "user", "content": "lamp"} | ({} if more else {"name": {"lamp " * 40_000: 1}})
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = httpx.post(url + path, json={"messages": [message], **more}, timeout=60)
        assert answer.status_code in (400, 413) and answer.json()["error"]["code"] == "too_long", (path, answer.text)


def test_text_that_is_long_for_its_tokens_is_counted_until_it_is_too_much(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "lamp " * 4000}, timeout=60)
    assert answer.status_code == 400 and "2,048" in answer.json()["error"]["message"].replace("2048", "2,048")


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        (b"[" + b"1," * VALUES + b"1]", True),
        (b"[" + b"1," * (VALUES + 1) + b"1]", False),
        (b"[" + b"[]," * CONTAINERS + b"1]", False),
        (b'{"a":"' + b"[,{" * (VALUES + 1) + b'"}', True),  # punctuation in a text is none
        (b'{"a":"\\"' + b"[," * (VALUES + 1) + b'"}', True),
        (b'{"a":"' + b"," * VALUES + b'", "b":[' + b"1," * (VALUES + 1) + b"1]}", False),
    ],
)
def test_bodies_of_too_many_values(body: bytes, is_taken: bool) -> None:
    with contextlib.nullcontext() if is_taken else pytest.raises(ApiError, match="at most"):
        check_shape(body)


def test_half_sent_bodies_share_a_bound() -> None:
    settings = ServeSettings(max_body_bytes=1_000_000, body_s=20)
    head = b"POST /v1/chunks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n"
    with running(settings, model=shallow()) as url, contextlib.ExitStack() as closing:
        for _ in range(4):
            closing.enter_context(connected(url)).sendall(head + b" " * 990_000)
        time.sleep(0.5)
        answer = httpx.post(f"{url}/v1/chunks", content=b" " * 900_000, timeout=30)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        short = {"prompt": "The boot was sold to Luden.", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=short, timeout=30).status_code == 200
    with running(settings, model=shallow()) as url:
        assert httpx.post(f"{url}/v1/chunks", content=b" " * 900_000, timeout=30).status_code == 400


def test_a_tenant_with_long_bodies_leaves_half_of_the_rest_to_each_other_one() -> None:
    budget, given = BodyBudget(64 << 20), contextlib.ExitStack()
    for tenant in ("many", "few", "last"):
        taken = 0
        with pytest.raises(ApiError, match="being read") as refused:
            while True:
                given.enter_context(budget.open(tenant))(FREE + (1 << 20))
                taken += 1 << 20
        assert refused.value.status == 503
        assert taken == {"many": 32, "few": 16, "last": 8}[tenant] << 20
    given.close()
    with budget.open("many") as take:
        take(FREE + (32 << 20))


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_text_that_nothing_ends_is_looked_at_once(end: bytes) -> None:
    """Each quote in it began another, and went to the end: 16,000 took a second, 160,000 minutes, without the lock."""
    check_shape(b'"' + b"," * (VALUES + 1) + b'\\"' * 1_000_000 + end)
    check_shape(b'{"a": "' + b"," * (VALUES + 1) + b'\\\\", "b": "' + b'\\"' * 1_000_000 + end)


@pytest.mark.parametrize("piece", [b"of the sea, ", b"a\\n,", b'\\",'])
def test_a_long_text_with_commas_is_looked_at_in_a_moment(piece: bytes) -> None:
    """Nothing is kept of each character: that took 130 bytes of each, and seconds without the interpreter's lock."""
    body = b'{"text":"' + piece * (4_000_000 // len(piece)) + b'"}'
    assert body.count(b",") > VALUES
    tracemalloc.start()
    try:
        check_shape(body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
