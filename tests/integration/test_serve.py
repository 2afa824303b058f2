"""The server through OpenAI's own client, on the model that ships: forms, streams, chunks, keys, bounds."""

import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.decode import compute_logits
from cacheblend.engines.hf.tickets import Limits
from cacheblend.nano import model_path
from cacheblend.nano.questions import draw_questions
from cacheblend.serve.app import create_app
from cacheblend.serve.keys import KeyRing, add_key, read_keys
from cacheblend.serve.settings import ServeSettings
from cacheblend.store import open_store
from serving import free_port, running

ROW = draw_questions(777, 1)[0]
PASSAGES = [text.text for text in ROW.passages]
QUESTION = ROW.question


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ServeSettings(chunk_tokens=16, drain_s=5)) as address:
        yield address


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def messages() -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": text} for text in [*PASSAGES, QUESTION]]
    return [{"role": "user", "content": parts}]


def ask(url: str, **options: Any) -> Any:
    settings = {"model": "nano", "messages": messages(), "temperature": 0, "max_tokens": 8} | options
    return client(url).chat.completions.create(**settings)


def extras(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["cacheblend"]
    return found


# ---- answers ------------------------------------------------------------------------------------------------


def test_a_chat_gets_the_engines_own_answer(url: str) -> None:
    answer = ask(url)
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        prompt = engine.chat_prompt(
            [
                {
                    "role": "user",
                    "content": [*({"type": "chunk", "text": t} for t in PASSAGES), {"type": "text", "text": QUESTION}],
                }
            ]
        )
        expected = engine.generate(prompt, SamplingParams(max_new_tokens=8))
    full = ask(url, extra_body={"cacheblend": {"mode": "full"}})
    assert full.choices[0].message.content == expected.text  # nothing was stored: all of it was computed
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_missed_chunks_are_stored_after_the_answer_and_the_question_never_is(url: str) -> None:
    ask(url)
    for _ in range(200):
        again = ask(url)
        if extras(again)["missed_tokens"] == 0:
            break
        time.sleep(0.05)
    report = extras(again)
    assert report["missed_tokens"] == 0 and sum(report["hit_tokens"].values()) > 0
    assert (
        again.usage.prompt_tokens_details.cached_tokens
        == sum(report["hit_tokens"].values()) - report["recomputed_tokens"]
    )
    listed = httpx.get(f"{url}/v1/chunks").json()["data"]
    assert len(listed) >= len(set(PASSAGES))
    assert all(one["tokens"] >= 16 for one in listed)


def test_a_stream_is_the_whole_answer_in_pieces(url: str) -> None:
    answer = ask(url, extra_body={"cacheblend": {"mode": "full"}})
    events = list(
        ask(url, stream=True, stream_options={"include_usage": True}, extra_body={"cacheblend": {"mode": "full"}})
    )
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == answer.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == answer.choices[0].finish_reason
    assert events[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert events[-1].model_extra["cacheblend"]["generated_tokens"] == answer.usage.completion_tokens


def test_every_event_of_a_stream_has_a_choice_unless_usage_is_asked_for(url: str) -> None:
    events = list(ask(url, stream=True, n=2))
    assert all(len(event.choices) == 1 for event in events)
    reasons = [event.choices[0].finish_reason for event in events]
    assert sum(reason is not None for reason in reasons) == 2 and reasons[-1]
    assert [("cacheblend" in (event.model_extra or {})) for event in events] == [False] * (len(events) - 1) + [True]


def test_offsets_of_a_streams_tokens_are_those_of_the_whole(url: str) -> None:
    options: dict[str, Any] = {"model": "nano", "max_tokens": 6, "temperature": 0, "logprobs": 1, "prompt": QUESTION}
    answer = client(url).completions.create(**options)
    pieces = [e.choices[0].logprobs for e in client(url).completions.create(stream=True, **options)]
    assert [offset for piece in pieces if piece for offset in piece.text_offset] == (
        answer.choices[0].logprobs.text_offset
    )


def test_modes(url: str) -> None:
    def of(mode: str) -> dict[str, Any]:
        return extras(ask(url, extra_body={"cacheblend": {"mode": mode, "recompute_ratio": 0.3, "selector": "hkvd"}}))

    stored_in_time(lambda: of("blend")["missed_tokens"] == 0)
    blend, full, reuse, prefix = map(of, ("blend", "full", "reuse", "prefix"))
    loaded = {mode: sum(report["hit_tokens"].values()) for mode, report in (("blend", blend), ("reuse", reuse))}
    assert loaded["blend"] == loaded["reuse"] > 0
    assert 0 < blend["recomputed_tokens"] < loaded["blend"] and reuse["recomputed_tokens"] == 0
    assert sum(full["hit_tokens"].values()) == 0 == full["recomputed_tokens"]
    assert sum(prefix["hit_tokens"].values()) == prefix["hit_tokens"]["prefix"] < loaded["blend"]
    assert full["row_layers"] > blend["row_layers"] > reuse["row_layers"]


def stored_in_time(is_so: Any) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_openais_fields_ask_for_is_done(url: str) -> None:
    """Each changes the answer that is given without it, or the request is refused by the field's name."""
    plain = ask(url, logprobs=True, max_tokens=4)
    ids = client(url).completions.create(model="nano", prompt="x", max_tokens=1, logprobs=1).choices[0]
    assert ids.text is not None
    first = plain.choices[0].logprobs.content[0].token
    other = ask(url, max_tokens=4, extra_body={"bad_words": [first.strip() or first]}).choices[0].message.content
    assert not (other or "").startswith(first)
    biased = ask(url, max_tokens=3, logit_bias={"300": 100}, extra_body={"ignore_eos": True}).choices[0].message.content
    assert biased != plain.choices[0].message.content and len(set(biased.split())) <= 1
    longer = ask(url, max_tokens=12, extra_body={"min_tokens": 12})
    assert longer.usage.completion_tokens == 12
    for name, value in (("presence_penalty", 2.0), ("frequency_penalty", 2.0), ("reasoning_effort", "low")):
        assert ask(url, max_tokens=2, **{name: value}).usage.completion_tokens
    for name, value in (
        ("response_format", {"type": "structural_tag"}),
        ("tool_choice", "required"),
        ("logit_bias", {"99999": 1}),
    ):
        with pytest.raises(openai.BadRequestError, match=name):
            ask(url, **{name: value})


def test_a_tool_message_is_a_chunk_and_the_question_in_front_of_it_is_not_stored() -> None:
    """A tool's result recurs and is stored; the user's question in front of it must not be."""
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    question = "Who has the key to the house? " * 12
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": PASSAGES[0]},
    ]

    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        engine.name = "nano"
        with TestClient(create_app(engine, ServeSettings(chunk_tokens=16))) as web:
            body = {"model": "nano", "messages": messages, "max_tokens": 2}
            web.post("/v1/chat/completions", json=body).raise_for_status()
            assert engine.flush(timeout=60)
            again = web.post("/v1/chat/completions", json=body).json()["cacheblend"]
            assert engine.flush(timeout=60)
            (chunk,) = web.get("/v1/chunks").json()["data"]
        assert again["missed_tokens"] == 0 and sum(again["hit_tokens"].values()) >= chunk["tokens"]
        (manifest,) = engine.store.manifests()
        assert again["hit_tokens"]["prefix"] == len(manifest.anchor_ids)
        assert engine.store.stats().blocks == len(manifest.block_names) + len(manifest.anchor_ids)


def test_choices_seeds_stops_and_log_probabilities(url: str) -> None:
    options = {"n": 3, "temperature": 1.5, "seed": 4, "logprobs": True, "top_logprobs": 2, "max_tokens": 5}
    first, second = ask(url, **options), ask(url, **options)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in second.choices]
    for choice in first.choices:
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and len(token.top_logprobs) == 2
            assert math.isclose(max(t.logprob for t in token.top_logprobs), token.top_logprobs[0].logprob)
    whole = ask(url).choices[0].message.content
    stop = whole[len(whole) // 2 :][:2]
    cut = ask(url, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"


def test_documents_and_tool_messages_are_chunks(url: str) -> None:
    asked = [{"role": "user", "content": QUESTION}]
    documents = [{"title": f"note {n}", "text": text} for n, text in enumerate(PASSAGES)]
    report = extras(
        client(url).chat.completions.create(
            model="nano", messages=asked, max_tokens=2, extra_body={"documents": documents}
        )
    )  # type: ignore[arg-type]
    assert sum(report["hit_tokens"].values()) + report["missed_tokens"] > 0
    held, end = 0, time.monotonic() + 60
    while held < len(set(PASSAGES)) and time.monotonic() < end:  # they are stored after the answer
        held = len(httpx.get(f"{url}/v1/chunks").json()["data"])
        time.sleep(0.05)
    assert held >= len(set(PASSAGES))


def test_completions_of_texts_and_of_token_ids_with_spans(url: str) -> None:
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        assert engine.builder is not None
        ids, spans = engine.builder.encode("Read this. "), []
        for passage in PASSAGES[:2]:
            inside = engine.builder.encode(passage)
            spans.append([len(ids), len(ids) + len(inside)])
            ids += inside
        ids += engine.builder.encode(QUESTION)
    options: dict[str, Any] = {"model": "nano", "max_tokens": 4, "temperature": 0}
    body = {"cacheblend": {"chunks": spans}}
    answer = client(url).completions.create(prompt=ids, logprobs=2, extra_body=body, **options)
    assert answer.usage is not None and answer.usage.prompt_tokens >= len(ids)
    assert (
        answer.choices[0].logprobs is not None
        and len(answer.choices[0].logprobs.tokens or []) == answer.usage.completion_tokens
    )
    text = client(url).completions.create(prompt="Who has the boot?", stream=True, **options)
    assert "".join(event.choices[0].text for event in text if event.choices) is not None


def test_the_model_is_listed(url: str) -> None:
    assert [model.id for model in client(url).models.list()] == ["nano"]


# ---- what is refused ----------------------------------------------------------------------------------------


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
    with running(ServeSettings(max_body_bytes=1000)) as url:
        announced = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 2000})
        pieces = httpx.post(f"{url}/v1/completions", content=(b"x" * 100 for _ in range(30)))
        assert announced.status_code == pieces.status_code == 413
        assert httpx.get(f"{url}/health").status_code == 200


# ---- chunks -------------------------------------------------------------------------------------------------


def test_chunks_are_stored_listed_pinned_used_and_deleted() -> None:
    with running(ServeSettings(chunk_tokens=16)) as url:
        texts = [{"text": text, "title": f"note {n}"} for n, text in enumerate(PASSAGES)]
        stored = httpx.post(f"{url}/v1/chunks", json={"chunks": texts, "pin": True}, timeout=60).json()["data"]
        assert [one["title"] for one in stored] == [text["title"] for text in texts]
        assert all(one["held"] and one["pinned"] and one["bytes"] > 0 for one in stored)
        assert extras(ask(url))["missed_tokens"] == 0
        name = stored[0]["id"]
        assert httpx.delete(f"{url}/v1/chunks/{name}/pin").json()["pinned"] is False
        assert httpx.delete(f"{url}/v1/chunks/{name}").json()["deleted"] is True
        assert httpx.delete(f"{url}/v1/chunks/{name}").status_code == 404
        assert len(httpx.get(f"{url}/v1/chunks").json()["data"]) == len({t["text"] for t in texts}) - 1
        assert httpx.post(f"{url}/v1/chunks/zz/pin").status_code == 404


def test_chunks_of_token_ids_are_those_of_prompts_of_token_ids(url: str) -> None:
    ids = [300 + number % 700 for number in range(40)]
    stored = httpx.post(f"{url}/v1/chunks", json={"chunks": [{"token_ids": ids}]}, timeout=60).json()["data"]
    assert stored[0]["tokens"] == 40 and stored[0]["held"]
    body = {"prompt": [7, *ids, 8], "max_tokens": 1, "cacheblend": {"chunks": [[1, 41]]}}
    report = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["cacheblend"]
    assert report["missed_tokens"] == 0 and report["hit_tokens"]["memory"] == 40
    for wrong in ({"token_ids": [10**9]}, {"token_ids": [-1]}, {"token_ids": []}, {}, {"token_ids": ids, "text": "x"}):
        refused = httpx.post(f"{url}/v1/chunks", json={"chunks": [wrong]}, timeout=60)
        assert refused.status_code == 400, wrong


# ---- keys ---------------------------------------------------------------------------------------------------


def test_keys_keep_tenants_apart(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    one, other = add_key(file, "one"), add_key(file, "other")
    assert one not in file.read_text() and file.stat().st_mode & 0o77 == 0
    with running(ServeSettings(keys=KeyRing(read_keys(file)), chunk_tokens=16)) as url:
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
    with running(ServeSettings(keys=KeyRing(read_keys(file)))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 60) as stranger:
            stranger.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n")
            assert stranger.recv(4096).startswith(b"HTTP/1.1 401")
        assert httpx.post(f"{url}/v1/completions", content=b"{", timeout=60).status_code == 401


def test_many_requests_that_store_delay_no_other() -> None:
    with running(ServeSettings(chunk_tokens=16, limits=Limits(waiting=50))) as url, ThreadPoolExecutor(64) as pool:
        chunks = [{"chunks": [{"token_ids": [300 + n + m for m in range(300)]}]} for n in range(60)]
        stored = [pool.submit(httpx.post, f"{url}/v1/chunks", json=each, timeout=120) for each in chunks]
        asked = ask(url, max_tokens=1)
        assert asked.usage is not None
        assert not all(each.done() for each in stored)
        assert {each.result().status_code for each in stored} <= {200, 429}


def test_unpinning_a_chunk_leaves_what_another_pinned_one_shares() -> None:
    with running(ServeSettings()) as url:
        same = [300 + n % 700 for n in range(256)]
        chunks = {"chunks": [{"token_ids": [*same, 7]}, {"token_ids": [*same, 8]}], "pin": True}
        one, other = httpx.post(f"{url}/v1/chunks", json=chunks, timeout=60).json()["data"]
        assert httpx.delete(f"{url}/v1/chunks/{one['id']}/pin").json()["pinned"] is False
        pinned = {each["id"]: each["pinned"] for each in httpx.get(f"{url}/v1/chunks").json()["data"]}
        assert pinned == {one["id"]: False, other["id"]: True}


def test_quotas_of_a_key() -> None:
    chunks = {"chunks": [{"text": text} for text in PASSAGES]}
    with running(ServeSettings(store_bytes=1000, chunk_tokens=16)) as url:
        refused = httpx.post(f"{url}/v1/chunks", json=chunks, timeout=60)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "quota"
        answer = ask(
            url,
            messages=[{"role": "user", "content": [{"type": "text", "text": t} for t in [*PASSAGES, "Which ship?"]]}],
        )
        assert extras(answer)["missed_tokens"] > 0
        time.sleep(0.5)
        assert httpx.get(f"{url}/v1/chunks").json()["data"] == []  # nor is what a request missed
    with running(ServeSettings(pin_bytes=1000)) as url:
        assert httpx.post(f"{url}/v1/chunks", json=chunks, timeout=60).status_code == 200
        assert httpx.post(f"{url}/v1/chunks", json=chunks | {"pin": True}, timeout=60).status_code == 403


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
            deadline = time.monotonic() + 30
            while len(found) < 3 and time.monotonic() < deadline:
                time.sleep(0.02)
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
    end = time.monotonic() + 30
    while httpx.get(f"{url}/ready").json()["active"] and time.monotonic() < end:
        time.sleep(0.05)
    assert httpx.get(f"{url}/ready").json()["active"] == 0


def test_a_request_whose_time_is_over_ends(slowly: None) -> None:
    with running(ServeSettings(timeout_s=0.5, drain_s=0.1)) as url:
        body = {"model": "nano", "prompt": "Read", "max_tokens": 100_000, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60) as streamed:
            events = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "timeout"


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


# ---- figures ------------------------------------------------------------------------------------------------


def test_figures_of_a_running_server(url: str) -> None:
    ask(url)
    text = httpx.get(f"{url}/metrics").text
    for name in (
        "cacheblend_ttft_seconds_bucket",
        "cacheblend_inter_token_seconds_bucket",
        "cacheblend_requests_total",
        "cacheblend_hit_tokens_total",
        "cacheblend_recomputed_tokens_total",
        "cacheblend_store_bytes",
        "cacheblend_requests_waiting",
    ):
        assert name in text
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/ready").json()["status"] == "ready"


def test_one_line_of_json_a_request(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "cacheblend.serve.requests"):
        ask(url)
        time.sleep(0.1)
    line = json.loads(caplog.records[-1].message)
    assert (line["path"], line["status"], line["key"]) == ("/v1/chat/completions", 200, "anyone")
    assert line["prompt_tokens"] > 0 and line["ttft_s"] > 0


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


@pytest.mark.parametrize(("sign", "codes"), [(signal.SIGTERM, (0, -signal.SIGTERM)), (signal.SIGINT, (0,))])
def test_a_server_that_is_stopped_answers_what_it_took_and_writes_what_it_missed(
    tmp_path: Path, sign: signal.Signals, codes: tuple[int, ...]
) -> None:
    """A signal in the middle of a stream: it goes on to its end, and its chunks are in the store's folder."""
    port, folder = free_port(), tmp_path / "store"
    arguments = ["serve", "-m", "nano", "--port", str(port), "--store", str(folder), "--chunk-tokens", "16"]
    command = [sys.executable, "-c", "from cacheblend.cli import main; main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            stored_in_time(lambda: is_ready(port))
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


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False
