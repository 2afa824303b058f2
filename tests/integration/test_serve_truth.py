"""Nothing of a request is dropped silently: each field is honoured, or refused by its name with a way out; and what an
answer says of its tokens is so. Several prompts in one request; errors in OpenAI's form; what /metrics counts."""

import asyncio
import json
import logging
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi.testclient import TestClient

from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.decode import compute_logits
from cacheblend.engines.hf.scheduler import TooLateError
from cacheblend.engines.hf.tickets import DoneEvent, TokenEvent
from cacheblend.nano import model_path
from cacheblend.serve.admission import RunningRequest
from cacheblend.serve.app import create_app
from cacheblend.serve.keys import remove_key
from cacheblend.serve.routes.openai import DONE, CompletionFormat, streamed_response
from cacheblend.serve.schemas import StreamOptions
from cacheblend.serve.settings import ServeSettings
from openai_asking import client
from serving import connected, keys_of, running, shallow
from small_llama import wait_until

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED = {"role": "user", "content": "Who has the boot?"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [ASKED], "max_tokens": 2, "temperature": 0},
    COMPLETION: {"prompt": "Who has the boot?", "max_tokens": 2, "temperature": 0},
    RESPONSE: {"input": "Who has the boot?", "max_output_tokens": 2, "temperature": 0},
    "/tokenize": {"messages": [ASKED]},
}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def web() -> Iterator[TestClient]:
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        engine.name = "nano"
        with TestClient(create_app(engine, ServeSettings(chunk_tokens=16))) as client:
            yield client


def post(web: TestClient, path: str, **fields: Any) -> Any:
    answer = web.post(path, json=BASE[path] | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(web: TestClient, path: str, **fields: Any) -> tuple[str | None, str]:
    """Name and message of the error."""
    answer = web.post(path, json=BASE[path] | fields)
    assert answer.status_code == 400, (fields, answer.text)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


def user(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts) or "hello", **fields}]}


def text(words: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


@pytest.mark.parametrize(
    ("path", "fields", "param", "way_out"),
    [
        # what this model's chat template has no place for
        (CHAT, {"tools": [TOOL]}, "tools", "chat template"),
        ("/tokenize", {"tools": [TOOL]}, "tools", "chat template"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "chat template"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "enable_thinking"),
        (RESPONSE, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "enable_thinking"),
        ("/tokenize", {"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs", "thinking"),
        (CHAT, {"chat_template_kwargs": {"foo": 1}}, "chat_template_kwargs", "allowed are"),
        (CHAT, user(foo=1), "messages.0.foo", "chat template"),
        (CHAT, user(name="bob"), "messages.0.name", "chat template"),
        (CHAT, {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}]}, "messages.1.tool_calls", "template"),
        # parts of messages
        (CHAT, user(text(foo=1)), "messages.0.content.0.foo", "type and text"),
        (RESPONSE, {"input": [{"role": "user", "content": "a", "foo": 1}]}, "input.0.foo", "no such field"),
        (
            RESPONSE,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "foo": 1}]}]},
            "input.0.content.0.foo",
            "no such field",
        ),
        (CHAT, {"documents": [{"title": "one", "text": ""}]}, "documents.0.text", "at least 1 character"),
        (CHAT, {"cacheblend": {"chunks": [[0, 2]]}}, "cacheblend.chunks", "/v1/completions"),
        (RESPONSE, {"cacheblend": {"chunks": [[0, 2]]}}, "cacheblend.chunks", "/v1/completions"),
        # two fields that say one thing, or one that another one needs
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (COMPLETION, {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", "include_usage"),
        (CHAT, {"max_completion_tokens": 3}, "max_tokens", "differ"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        # more than there is
        (CHAT, {"max_tokens": 5000}, "max_tokens", "2,048"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 5000}, "max_completion_tokens", "2,048"),
        (COMPLETION, {"max_tokens": 2048}, "max_tokens", "2,04"),
        (COMPLETION, {"prompt": [300] * 3000}, None, "3000 tokens"),
        (RESPONSE, {"max_output_tokens": 5000}, "max_output_tokens", "2,048"),
        (CHAT, {"min_tokens": 400}, "min_tokens", "at most 2"),
        (CHAT, {"max_tokens": None, "min_tokens": 5000}, "min_tokens", "2,048"),
        (CHAT, {"max_tokens": None, "min_tokens": 600}, "min_tokens", "512"),
        (COMPLETION, {"echo": True}, "echo", "not answered back"),
        (COMPLETION, {"prompt": ["a"] * 33}, "prompt", "at most 32"),
        (COMPLETION, {"prompt": ["a", "b"], "cacheblend": {"chunks": [[0, 1]]}}, "cacheblend.chunks", "one prompt"),
        (COMPLETION, {"prompt": ["a", ""]}, "prompt", "prompt.1 is empty"),
        (COMPLETION, {"prompt": [[300], [-1]]}, "prompt", "prompt.1: token ids must be in"),
    ],
)
def test_what_nothing_would_come_of_is_refused_by_name(
    web: TestClient, path: str, fields: dict[str, Any], param: str | None, way_out: str
) -> None:
    found, message = refused(web, path, **fields)
    assert found == param and way_out in message, (found, message)


def test_what_says_nothing_about_the_answer_is_taken(web: TestClient) -> None:
    plain = post(web, CHAT)["choices"][0]["message"]
    again = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None, "tool_calls": []}
    result = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "it is warm"}
    for messages in ([again | plain, ASKED], [ASKED, again, ASKED], [ASKED, result, ASKED]):
        assert post(web, CHAT, messages=messages)["choices"][0]["message"]
    cached = {"cache_control": {"type": "ephemeral"}}
    assert post(web, CHAT, messages=[ASKED | {"content": [text(ASKED["content"], **cached)]}])["choices"][0][
        "message"
    ] == plain  # fmt: skip
    answered = post(web, RESPONSE)["output"]
    assert post(web, RESPONSE, input=[*answered, ASKED])["status"]
    for fields in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"max_completion_tokens": 2}):
        assert post(web, CHAT, **fields)["choices"][0]["message"] == plain
    assert post(web, CHAT, stream_options=None)["choices"][0]["message"] == plain


def test_no_field_of_a_message_or_part_is_silent(web: TestClient, record_property: Any) -> None:
    """Of OpenAI's messages and their parts, and of none: what is asked by them is done, refused, or says nothing."""
    types = pytest.importorskip("openai.types.chat")
    messages, parts = (
        {key for kind in typing.get_args(union) for key in typing.get_type_hints(kind)}
        for union in (types.ChatCompletionMessageParam, types.ChatCompletionContentPartParam)
    )
    silent = []
    for name in sorted(messages | {"foo"} - {"role", "content"}):
        answer = web.post(CHAT, json=BASE[CHAT] | user(**{name: ["something"]}))
        if answer.status_code != 400 and name not in ("annotations", "tool_call_id", "role", "content"):
            silent.append(name)
    for name in sorted(parts | {"foo"} - {"type", "text"}):
        answer = web.post(CHAT, json=BASE[CHAT] | user(text(**{name: {"some": "thing"}})))
        if answer.status_code != 400 and name not in ("prompt_cache_breakpoint",):
            silent.append(f"part {name}")
    record_property("silent_parameters", len(silent))
    assert len(messages) >= 8 and len(parts) >= 5 and not silent


TWO = ["Who has the boot?", "Where is the lamp?"]


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "token ids"])
def test_several_prompts_are_answered_in_their_order(web: TestClient, as_ids: bool) -> None:
    prompts: list[Any] = TWO
    if as_ids:
        prompts = [web.post("/tokenize", json={"prompt": each}).json()["tokens"] for each in TWO]
    more = {"n": 2, "logprobs": 1, "max_tokens": 4}
    alone = [post(web, COMPLETION, prompt=each, **more) for each in prompts]
    found = post(web, COMPLETION, prompt=prompts, **more)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    for number, choice in enumerate(choice for one in alone for choice in one["choices"]):
        assert found["choices"][number]["text"] == choice["text"]
        assert found["choices"][number]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(one["usage"][name] for one in alone)
    assert [report["prompt_tokens"] for report in found["cacheblend"]] == [
        one["usage"]["prompt_tokens"] for one in alone
    ]

    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = web.post(COMPLETION, json=BASE[COMPLETION] | more | options | {"prompt": prompts}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for choice in found["choices"]:
        pieces = [piece for event in events for piece in event["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        offsets = [at for piece in pieces if piece["logprobs"] for at in piece["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
    assert events[-1]["usage"]["total_tokens"] == found["usage"]["total_tokens"]
    assert len(events[-1]["cacheblend"]) == 2
    one = post(web, COMPLETION, prompt=prompts[:1])
    assert isinstance(one["cacheblend"], dict) and one["choices"] == post(web, COMPLETION, prompt=prompts[0])["choices"]


def test_langchains_batch(nano_url: str) -> None:
    """As `langchain_openai.OpenAI.generate` asks: twenty prompts a request, whose answers it tells apart by order."""
    answer = client(nano_url).completions.create(model="nano", prompt=TWO * 10, max_tokens=2, temperature=0, n=1)
    texts = [choice.text for choice in answer.choices]
    assert len(texts) == 20 and texts == texts[:2] * 10


def test_one_prompt_that_fails_ends_its_request_and_leaves_nothing(web: TestClient) -> None:
    _, message = refused(web, COMPLETION, prompt=["a", "lamp " * 6000])
    assert "prompt.1" in message and "2,048" in message
    ready = web.get("/ready").json()
    assert ready["active"] == ready["waiting"] == 0


def test_what_is_answered_is_sent_at_once_and_in_front_of_an_error() -> None:
    async def main() -> None:
        scheduler = Mock(submit_prompts=Mock(return_value=[]))
        running = RunningRequest([Mock(choices=1), Mock(choices=1)], scheduler, Mock(), lambda: True)
        running.start()
        on_event = scheduler.submit_prompts.call_args.args[1]
        stream = streamed_response(running, CompletionFormat(Mock()), "nano", StreamOptions())
        on_event(0, TokenEvent(0, "yes", 5, finish_reason="stop"))
        assert '"yes"' in await asyncio.wait_for(anext(stream), 10)
        on_event(1, TokenEvent(0, "no", 5, finish_reason="stop"))
        on_event(1, DoneEvent(None, TooLateError("its time is over")))
        said, error, done = [each async for each in stream]
        assert '"no"' in said and "its time is over" in error and done == DONE

    asyncio.run(main())


def test_the_sampled_token_is_among_the_likeliest_and_its_end_has_a_text(web: TestClient) -> None:
    drawn = {"temperature": 5, "seed": 1, "max_tokens": 12, "ignore_eos": True}
    for choice in post(web, CHAT, logprobs=True, top_logprobs=2, n=2, **drawn)["choices"]:
        for token in choice["logprobs"]["content"]:
            chosen = {key: token[key] for key in ("token", "logprob", "bytes")}
            assert chosen in token["top_logprobs"] and len(token["top_logprobs"]) in (2, 3)
            assert token["top_logprobs"][0]["logprob"] >= token["logprob"]
    told = post(web, COMPLETION, logprobs=2, **drawn)["choices"][0]["logprobs"]
    for token, value, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[token] == value and len(top) in (2, 3)
    none = post(web, COMPLETION, logprobs=0, **drawn)["choices"][0]["logprobs"]
    assert none["tokens"] == told["tokens"] and none["token_logprobs"] == told["token_logprobs"]
    assert none["top_logprobs"] == [{token: told["top_logprobs"][at][token]} for at, token in enumerate(told["tokens"])]
    assert all(
        not token["top_logprobs"] for token in post(web, CHAT, logprobs=True)["choices"][0]["logprobs"]["content"]
    )

    ended = post(web, CHAT, logprobs=True, max_tokens=40)["choices"][0]
    last = ended["logprobs"]["content"][-1]
    assert ended["finish_reason"] == "stop" and last["token"] == "<|end|>" == bytes(last["bytes"]).decode()
    assert "<|end|>" not in ended["message"]["content"]


def test_tokens_that_are_parts_of_a_character_have_their_own_bytes(web: TestClient) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed here")
    form = {"structured_outputs": {"choice": ["a\U0001f9a9 ü."]}, "max_tokens": 40, "logprobs": True, "top_logprobs": 1}
    choice = post(web, CHAT, **form)["choices"][0]
    tokens = [token for token in choice["logprobs"]["content"] if token["token"] != "<|end|>"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == choice["message"]["content"]
    assert choice["message"]["content"] == "a\U0001f9a9 ü." and len(tokens) > 5
    assert all("\ufffd" not in token["token"] for token in tokens)
    told = post(web, COMPLETION, prompt="<s>", **form | {"logprobs": 1, "top_logprobs": None})["choices"][0]
    for at, found in enumerate(told["logprobs"]["text_offset"]):  # a character's tokens begin where it does
        assert found == len(bytes(b for token in tokens[:at] for b in token["bytes"]).decode(errors="ignore"))
    assert len({*told["logprobs"]["tokens"]}) == len(told["logprobs"]["tokens"])  # keys that are told apart


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {"temperature": "hot"}, "temperature", "must be a number; got 'hot'"),
        (CHAT, {"n": 1.5}, "n", "must be an integer; got 1.5"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "must be greater than or equal to 1; got 0"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "must be a text or a list; got 5"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", "is missing"),
        (CHAT, {"stop": 5}, "stop", "must be a text or a list; got 5"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias.a", "must be an integer"),
        (CHAT, {"cacheblend": {"foo": 1}}, "cacheblend.foo", "there is no such field"),
        (CHAT, {"structured_outputs": {"json": 5}}, "structured_outputs.json", "must be"),
        (CHAT, {"response_format": {"type": "x"}}, "response_format.type", "must be 'text', 'json_object' or"),
        (CHAT, {"model": "x" * 300}, "model", "at most 256 characters"),
        (COMPLETION, {"prompt": {"a": 1}}, "prompt", "must be a text or a list"),
        (COMPLETION, {"prompt": [1, "a"]}, "prompt.1", "must be an integer; got 'a'"),
        (RESPONSE, {"input": [{"role": "x", "content": "a"}]}, "input.0.role", "must be 'system', "),
        (CHAT, {"seed": "x" * 5000}, "seed", "must be an integer"),
        (CHAT, {"logit_bias": {"x" * 9000: 1}}, None, "must be an integer"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x" * 9000: 1}}}}, None, "x"),
    ],
)
def test_errors_are_openais_without_pydantics_names_and_short(
    web: TestClient, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    found, message = refused(web, path, **body)
    assert (param is None or found == param) and words in message, (found, message)
    assert len(message) < 1200 and len(found or "") < 300
    for name in ("constrained", "[key]", ".str", "dict[", "list[", "Input should", "valid dictionary"):
        assert name not in f"{found} {message}"


def test_the_types_of_errors_are_openais(web: TestClient) -> None:
    for answer, kind in (
        (web.get("/v1/models/x"), "invalid_request_error"),
        (web.get("/v1/nothing"), "invalid_request_error"),
        (web.get("/v1/chunks?limit=x"), "invalid_request_error"),
        (web.put("/v1/chunks"), "invalid_request_error"),
    ):
        assert answer.json()["error"]["type"] == kind
    assert "limit: must be an integer" in web.get("/v1/chunks?limit=x").json()["error"]["message"]


def test_a_completion_has_16_tokens_unless_it_says_another_number(web: TestClient) -> None:
    body = {"prompt": "The boot", "ignore_eos": True}
    assert web.post(COMPLETION, json=body).json()["usage"]["completion_tokens"] == 16
    assert web.post(COMPLETION, json=body | {"max_tokens": 20}).json()["usage"]["completion_tokens"] == 20


def test_a_removed_key_ends_its_streams_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.serve.keys.LOOK_S", 0.0)
    ring, keys = keys_of(tmp_path, "stays", "goes")
    body = {"prompt": "The boot", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        running(ServeSettings(keys=ring, drain_s=1), model=shallow()) as url,
        httpx.Client(base_url=url, timeout=120) as http,
        http.stream("POST", COMPLETION, json=body, headers=keys["goes"]) as gone,
        http.stream("POST", COMPLETION, json=body | {"max_tokens": 300}, headers=keys["stays"]) as kept,
    ):
        lines = gone.iter_lines()
        next(lines)
        remove_key(tmp_path / "keys.json", "goes")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "invalid_api_key" and "removed" in events[-1]["error"]["message"]
        assert len(events) < 1500
        assert [line for line in kept.iter_lines() if line][-1] == "data: [DONE]"


def counted(text: str, name: str) -> dict[str, float]:
    rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith(f"cacheblend_{name}")]
    return {labels.removeprefix(f"cacheblend_{name}"): float(value) for labels, _, value in rows}


def test_a_client_that_hangs_up_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*arguments: Any) -> None:
        time.sleep(0.02)
        compute_logits(*arguments)

    monkeypatch.setattr("cacheblend.engines.hf.scheduler.compute_logits", slowly)
    body = BASE[COMPLETION] | {"max_tokens": 1900, "ignore_eos": True, "stream": True}
    with running(ServeSettings(drain_s=1), model=shallow()) as url, httpx.Client(base_url=url, timeout=60) as http:
        with http.stream("POST", COMPLETION, json=body) as stream:
            next(stream.iter_lines())
        wait_until(lambda: counted(http.get("/metrics").text, "ttft_seconds_count") == {'{mode="blend"}': 1})
        metrics = http.get("/metrics").text
        assert counted(metrics, "prompt_tokens_total")[""] > 0
        assert 0 < counted(metrics, "generated_tokens_total")[""] < 1900


@pytest.mark.parametrize(("path", "limit"), [(COMPLETION, "max_tokens"), (RESPONSE, "max_output_tokens")])
def test_a_stream_that_ends_with_an_error_is_counted_and_logged_with_its_status(
    path: str, limit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any) -> None:
        raise TooLateError("its time is over")

    with (
        BlendEngine.from_pretrained(shallow(), store="memory") as engine,
        TestClient(create_app(engine, ServeSettings())) as web,
        caplog.at_level(logging.INFO),
    ):
        monkeypatch.setattr("cacheblend.engines.hf.scheduler.TextStream", fails)
        answer = web.post(path, json=BASE[path] | {limit: 4, "stream": True})
        assert answer.status_code == 200 and "its time is over" in answer.text
        assert counted(web.get("/metrics").text, "requests_total") == {f'{{route="{path}",status="503"}}': 1}
    (line,) = (record for record in caplog.records if record.name == "cacheblend.serve.requests")
    assert json.loads(line.message)["status"] == 503


def test_requests_are_counted_by_route_without_probes_scrapes_and_files(web: TestClient) -> None:
    before = counted(web.get("/metrics").text, "requests_total")
    for path in ("/health", "/ready", "/metrics", "/", "/static/style.css", "/openapi.json"):
        web.get(path)
    web.head("/health")
    assert counted(web.get("/metrics").text, "requests_total") == before
    post(web, CHAT)
    refused(web, COMPLETION, n=0)
    for path in ("/v1/models/x", "/v1/models/y", "/v1/nothing", "/wp-login.php"):
        web.get(path)
    after = counted(web.get("/metrics").text, "requests_total")
    found = {labels: value - before.get(labels, 0) for labels, value in after.items() if value != before.get(labels)}
    assert found == {
        f'{{route="{CHAT}",status="200"}}': 1,
        f'{{route="{COMPLETION}",status="400"}}': 1,
        '{route="/v1/models/{model_id:path}",status="404"}': 2,
        '{route="other",status="404"}': 1,  # a path that nothing of the API has
    }


def test_what_is_refused_before_its_route_is_counted_and_so_are_connections_and_the_loops_lag(tmp_path: Path) -> None:
    ring, keys = keys_of(tmp_path, "one")
    with running(ServeSettings(keys=ring, connections=2, drain_s=1), model=shallow()) as url:
        assert httpx.post(url + COMPLETION, json={"prompt": "a"}).status_code == 401
        with connected(url), connected(url), connected(url):
            httpx.get(f"{url}/health")
        for _ in range(600):  # the loop is looked at once a while, and a refused client may read its answer before
            text = httpx.get(f"{url}/metrics", headers=keys["one"]).text
            if counted(text, "loop_lag_seconds_count")[""] and counted(text, "requests_total"):
                break
            time.sleep(0.1)
        assert counted(text, "requests_total") == {f'{{route="{COMPLETION}",status="401"}}': 1}
        assert counted(text, "refused_connections_total")[""] >= 1
        assert counted(text, "loop_lag_seconds_count")[""] >= 1 and counted(text, "loop_lag_seconds_bucket")
    assert "_created" not in text
