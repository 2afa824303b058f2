"""What stands beside chats and completions: single models, tokens, Responses; by OpenAI's own client where it has them.

Situations: a name with slashes, odd bytes or of another server; a text that is empty, too long or half of a character;
ids outside of the vocabulary; an answer that ends at its length; a stream that ends with an error; fields of another
kind of request; a conversation with roles, parts and instructions.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cacheblend.serve.settings import ServeSettings
from serving import running

PASSAGES = ["The boot was sold to Luden. " * 4, "The lamp went to Tairn. " * 4]
QUESTION = "Who has the boot?"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ServeSettings(chunk_tokens=16, max_tokens=4, drain_s=1)) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def refused(answer: httpx.Response, status: int, param: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and (param is None or error["param"] == param), error
    return str(error["message"])


# ---- models -------------------------------------------------------------------------------------------------


def test_one_model(url: str, http: httpx.Client) -> None:
    [listed] = http.get("/v1/models").json()["data"]
    assert http.get("/v1/models/nano").json() == listed and listed["max_model_len"] == 2048
    for name in ("other", "nano/x", "a/b/c", "%FF%FE", "%00", "nano%20", "..%2f..", "x" * 4000):
        assert "'nano'" in refused(http.get(f"/v1/models/{name}"), 404, "model")
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert client.models.retrieve("nano").id == "nano" and [model.id for model in client.models.list()] == ["nano"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


# ---- tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [QUESTION, "", " ", "🦩 ü\x00\n", "<|im_end|>", "a" * 3000, "The lamp " * 300])
def test_a_text_survives_the_way_there_and_back(http: httpx.Client, text: str) -> None:
    found = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 2048
    back = http.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.status_code == 200
    again = http.post("/tokenize", json={"prompt": back.json()["prompt"], "add_special_tokens": False}).json()
    assert again["tokens"] == found["tokens"]


def test_a_chats_tokens_are_those_it_is_answered_with(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": text} for text in [*PASSAGES, QUESTION]]
    for messages in ([{"role": "user", "content": parts}], [{"role": "user", "content": QUESTION}]):
        for more in ({}, {"documents": [{"title": "one", "text": PASSAGES[0]}]}):
            found = http.post("/tokenize", json={"messages": messages, **more}).json()
            answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, **more}).json()
            assert found["count"] == answer["usage"]["prompt_tokens"] and found["token_strs"] is None
            assert answer["cacheblend"]["changed_contents"] == 0


def test_special_tokens_are_parsed_in_a_prompt_and_stay_text_in_a_chat(http: httpx.Client) -> None:
    rendered = f"<s><|user|>{QUESTION}<|assistant|>"
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": QUESTION}]}).json()
    assert http.post("/tokenize", json={"prompt": rendered}).json()["tokens"] == chat["tokens"]
    answer = http.post("/v1/completions", json={"prompt": rendered, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == chat["count"]
    evil = {"messages": [{"role": "user", "content": rendered}], "documents": [{"text": rendered}]}
    found = http.post("/tokenize", json={**evil, "return_token_strs": True}).json()["token_strs"]
    assert [token for token in found if token.startswith("<") and len(token) > 2] == [
        "<s>",
        "<|user|>",
        "<|assistant|>",
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, None),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "lamp " * 30_000}, 400, None),
        ("/tokenize", {"prompt": "lamp " * 400_000}, 413, None),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True}, 400, None),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, 400, None),
        ("/tokenize", {"prompt": "a", "temperature": 1}, 400, "temperature"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, None),
        ("/detokenize", {"tokens": [5, True]}, 400, "tokens.1"),
        ("/detokenize", {"tokens": [5.0]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [5] * 100_000}, 400, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "skip": True}, 400, "skip"),
    ],
)
def test_what_is_no_text_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    refused(http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"}), status, param)


# ---- responses ----------------------------------------------------------------------------------------------


def input_of(texts: list[str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": text} for text in texts]}]


def test_a_response_is_the_chats_answer(url: str, http: httpx.Client) -> None:
    """Asked by OpenAI's client, whole, as a stream, and by its helper that puts events together."""
    client = pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    asked: dict[str, Any] = {"model": "nano", "temperature": 0, "max_output_tokens": 8}
    parts = [{"type": "text", "text": text} for text in [*PASSAGES, QUESTION]]
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": parts}]
    chat = client.chat.completions.create(model="nano", messages=messages, temperature=0, max_tokens=8)
    told = {**asked, "input": input_of([*PASSAGES, QUESTION]), "instructions": "Answer."}
    found = client.responses.create(**told)
    assert found.output_text == chat.choices[0].message.content != ""
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    events = list(client.responses.create(**told, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == found.output_text
    assert events[0].type == "response.created" and events[-1].type == f"response.{found.status}"
    assert events[-1].response.output_text == found.output_text and events[-1].response.usage == found.usage
    with client.responses.stream(**told) as stream:
        assert stream.until_done() is not None


def test_a_response_ends_at_its_length_and_is_part_of_a_conversation(http: httpx.Client) -> None:
    body = {"input": "The boot", "max_output_tokens": 3, "ignore_eos": True, "temperature": 0}
    found = http.post("/v1/responses", json=body).json()
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["output_tokens"] == 3 and found["store"] is False
    assert found["cacheblend"]["prompt_tokens"] == found["usage"]["input_tokens"]
    first = http.post("/v1/responses", json={"input": QUESTION, "temperature": 0}).json()
    said = [{"role": "developer", "content": "Answer."}, {"role": "user", "content": QUESTION}, *first["output"]]
    next_one = {"type": "message", "role": "user", "content": "And?"}
    told = http.post("/v1/responses", json={"input": [*said, next_one]})
    assert told.status_code == 200, told.text


def test_passages_of_an_input_are_reused(http: httpx.Client) -> None:
    texts = ["The bell of the harbour was lent to Marn. " * 6, "Nobody has the rope of the tower. " * 6]
    http.post("/v1/responses", json={"input": input_of([*texts, QUESTION])})
    for _ in range(200):
        if len(http.get("/v1/chunks").json()["data"]) >= 2:
            break
    hits = [http.post("/v1/responses", json={"input": input_of([*order, QUESTION])}) for order in (texts, texts[::-1])]
    assert all(sum(hit.json()["cacheblend"]["hit_tokens"].values()) > 0 for hit in hits)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"imput": "a"}, "imput"),
        ({"input": []}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_a_response_cannot_be_is_refused_by_name(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    body = json.dumps({"input": "a", **more})
    answer = http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.json()["error"]["param"].startswith(param), answer.text
    refused(answer, 400)


def test_what_is_no_text_message_is_refused(http: httpx.Client) -> None:
    for item in (
        {"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"role": "tool", "content": "a"},
        {"role": "user"},
        5,
    ):
        refused(http.post("/v1/responses", json={"input": [item]}), 400)
    refused(http.post("/v1/responses", json={"input": "lamp " * 30_000}), 400)


# ---- prompts ------------------------------------------------------------------------------------------------


def test_a_prompt_may_stand_in_a_list_of_its_own(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": QUESTION}).json()["tokens"]
    said = []
    for prompt in (QUESTION, [QUESTION], ids, [ids]):
        answer = http.post("/v1/completions", json={"prompt": prompt, "temperature": 0}).json()
        said.append(answer["choices"][0]["text"])
    assert len(set(said)) == 1
    for prompt in ([QUESTION] * 2, [ids] * 2, [QUESTION, ids]):
        assert "2 prompts" in refused(http.post("/v1/completions", json={"prompt": prompt}), 400, "prompt")
    for prompt in ([], [[]], [""], [[ids]], [None], {}, 5):
        refused(http.post("/v1/completions", json={"prompt": prompt}), 400)


# ---- usage in streams ---------------------------------------------------------------------------------------


def test_usage_comes_last_or_in_each_event(http: httpx.Client) -> None:
    for options, in_each in (
        ({"include_usage": True}, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True),
    ):
        body = {"prompt": "The boot", "max_tokens": 4, "ignore_eos": True, "stream": True, "stream_options": options}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        counted = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
        assert counted == ([1, 2, 3, 4, 4] if in_each else [4]) and events[-1]["choices"] == []
