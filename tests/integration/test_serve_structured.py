"""Answers of a given form, on the model that ships, and tool calls, which a scripted model writes, over HTTP."""

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf import BlendEngine, Grammar
from cacheblend.engines.hf.sampling import Sampler
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.settings import ServeSettings
from serving import running, shallow

SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["Luden", "Tairn", "日本"]}, "n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["who", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "owner", "strict": True, "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "The boot was sold to Luden. Who has the boot?"}]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed here")
    with running(ServeSettings(max_tokens=200, drain_s=1)) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


def test_the_engine_itself(http: httpx.Client) -> None:
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        for seed in (0, 3, 7):
            options: Any = {"grammar": Grammar.of_schema(SCHEMA), "temperature": 0.5 * seed, "seed": seed}
            assert is_by_schema(engine.chat(MESSAGES, max_new_tokens=200, **options).text)
        assert engine.chat(MESSAGES, grammar=Grammar.of_choices(["ja", "nein"])).text in ("ja", "nein")
        assert "".join(d.text for d in engine.stream(["x"], grammar=Grammar("regex", "[0-9]{4}"))).isdigit()
        with pytest.raises(InvalidInputError, match="the regex cannot be used"):
            engine.generate(["x"], grammar=Grammar("regex", "(a"))


def post(http: httpx.Client, path: str = "chat/completions", status: int = 200, **fields: Any) -> dict[str, Any]:
    asked = {"chat/completions": {"messages": MESSAGES}, "completions": {"prompt": "x"}, "responses": {"input": "x"}}
    answer = http.post(f"/v1/{path}", json=asked[path] | fields)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def is_by_schema(text: str) -> bool:
    answer = json.loads(text)
    return answer.keys() == {"who", "n"} and answer["who"] in ("Luden", "Tairn", "日本") and 1 <= answer["n"] <= 99


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_every_answer_parses_by_the_schema(http: httpx.Client, temperature: float) -> None:
    found = post(http, response_format=FORMAT, n=2, seed=7, temperature=temperature, top_p=0.9)
    for choice in found["choices"]:
        assert is_by_schema(choice["message"]["content"]) and choice["finish_reason"] == "stop"


def test_completions_responses_streams_and_an_end_inside_the_form(http: httpx.Client) -> None:
    assert is_by_schema(post(http, "completions", response_format=FORMAT, max_tokens=200)["choices"][0]["text"])
    shown = {"type": "json_schema", "name": "owner", "schema": SCHEMA}
    found = post(http, "responses", text={"format": shown})
    assert is_by_schema(found["output"][0]["content"][0]["text"]) and found["text"]["format"] == shown
    assert post(http, "responses", text={"format": {"type": "text"}}, max_output_tokens=1)["text"]["format"]
    assert post(http, response_format={"type": "text"}, max_tokens=1)

    # a stream
    fields = {"messages": MESSAGES, "stream": True, "response_format": FORMAT, "logprobs": True, "seed": 3}
    with http.stream("POST", "/v1/chat/completions", json=fields) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert is_by_schema("".join(choice["delta"].get("content") or "" for choice in choices))
    assert all(token["logprob"] <= 0 for c in choices if c["logprobs"] for token in c["logprobs"]["content"])

    # an end inside the form
    [cut] = post(http, response_format=FORMAT, max_tokens=2)["choices"]
    assert cut["finish_reason"] == "length" and cut["message"]["content"].startswith("{")
    [stopped] = post(http, response_format=FORMAT, stop='"n')["choices"]
    assert stopped["finish_reason"] == "stop" and '"n' not in stopped["message"]["content"]


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3}(ü|你)"}, "[a-c]{3}(ü|你)"),
        ({"choice": ["yes", "no", "größer"]}, "yes|no|größer"),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"type": "null"}', "regex": None}, "null"),
    ],
)
def test_vllms_forms(http: httpx.Client, form: dict[str, Any], pattern: str) -> None:
    text = post(http, structured_outputs=form, temperature=1, seed=5)["choices"][0]["message"]["content"]
    assert re.fullmatch(pattern, text), text


def test_forms_and_a_free_answer_side_by_side(http: httpx.Client) -> None:
    free = post(http, temperature=0, max_tokens=12)["choices"][0]["message"]["content"]
    asked = [{"response_format": FORMAT}, {"structured_outputs": {"choice": ["yes", "no"]}}, {"max_tokens": 12}]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda fields: post(http, temperature=0, **fields), asked * 2))
    texts = [each["choices"][0]["message"]["content"] for each in found]
    assert is_by_schema(texts[0]) and texts[1] in ("yes", "no") and texts[2] == free and texts[:3] == texts[3:]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two fields": ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    "two forms": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    "no form": ({"structured_outputs": {}}, "structured_outputs"),
    "unknown field": ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    "unknown type": ({"response_format": {"type": "structural_tag"}}, "response_format"),
    "unknown option": ({"response_format": {"type": "json_object", "x": 1}}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "ignore_eos": ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos"),
    "min_tokens": ({"response_format": FORMAT, "min_tokens": 3}, "min_tokens"),
    "regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(http: httpx.Client, name: str) -> None:
    fields, param = REFUSED[name]
    error = post(http, status=400, **fields)["error"]
    assert (error["param"] or "").startswith(param) and len(error["message"]) < 1000, error


def test_a_schema_a_thousand_deep_is_refused(http: httpx.Client) -> None:
    deep = '{"type":"array","items":' * 1000 + "{}" + "}" * 1000
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "structured_outputs": {{"json": {deep}}}}}'
    answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert post(http, max_tokens=1)


def test_without_the_library(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    own = ServeSettings(max_tokens=4, drain_s=1)
    with running(own, model=shallow()) as url, httpx.Client(base_url=url, timeout=120) as other:
        error = post(other, status=400, response_format=FORMAT)["error"]
    assert error["param"] == "response_format" and "pip install 'cacheblend[structured]'" in error["message"]


TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }} <tool_call>{% endif %}"
    "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' ~ (call.function.arguments | tojson) ~ call.function.name }}"
    "{% for key in call.function.arguments %}{{ key }}{% endfor %}{% endfor %}{% endfor %}<|assistant|>"
)
TEXTS = (
    "{% for m in messages %}<|user|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments + '' }}{% endfor %}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAMPLE = Sampler.sample
ASKED: dict[str, Any] = {"model": "nano", "messages": [{"role": "user", "content": "Is it warm?"}], "tools": [WEATHER]}


@contextmanager
def engine(template: str = TEMPLATE, folder: Path | None = None) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(folder or shallow(), store="memory") as opened:
        opened.name, opened.tokenizer.chat_template = "nano", template
        yield opened


@contextmanager
def server(opened: BlendEngine, **settings: Any) -> Iterator[TestClient]:
    with TestClient(create_app(opened, ServeSettings(chunk_tokens=16, max_tokens=400, **settings))) as web:
        yield web


@pytest.fixture(scope="module")
def web() -> Iterator[TestClient]:
    with engine() as opened, server(opened) as client:
        yield client


@pytest.fixture
def says(web: TestClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the model answer with these texts, choice by choice, whatever it is asked."""
    builder = web.app.state.server.engine.runtime.builder  # type: ignore[attr-defined]
    return lambda *texts: script(monkeypatch, [builder.encode(text) for text in texts])


def script(monkeypatch: pytest.MonkeyPatch, answers: list[list[int]]) -> None:
    """Has each choice of a request (which has the seed 0) answer with these tokens, and then end."""

    def sample(self: Sampler) -> int:
        ids, at = answers[(self._params.seed or 0) % len(answers)], self.count
        end = min(self._stops)
        self.logits = self.logits.clone()
        self.logits[ids[at] if at < len(ids) else end] = 1e4
        return SAMPLE(self)

    monkeypatch.setattr(Sampler, "sample", sample)


def ask(web: TestClient, **more: Any) -> dict[str, Any]:
    answer = web.post("/v1/chat/completions", json={**ASKED, "temperature": 0, "seed": 0, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(web: TestClient, **more: Any) -> list[dict[str, Any]]:
    body = {**ASKED, "temperature": 0, "seed": 0, "stream": True, **more}
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def put_together(events: list[dict[str, Any]], number: int = 0) -> tuple[str, list[dict[str, Any]], str]:
    """Text, calls and finish reason of a streamed choice."""
    text, calls, reason = "", [], ""
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == number:
                text += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    assert call.pop("index") == len(calls)
                    calls.append(call)
                reason = choice["finish_reason"] or reason
    return text, calls, reason


def both(web: TestClient, number: int = 0, **more: Any) -> tuple[str | None, list[Any], str]:
    """Content, names and arguments of calls, and finish reason of a choice, which is the same when it is streamed."""
    choice = ask(web, **more)["choices"][number]
    message, (text, calls, reason) = choice["message"], put_together(streamed(web, **more), number)
    whole, pieces = ([each["function"] for each in found] for found in (message.get("tool_calls", []), calls))
    assert (text, pieces, reason) == (message["content"] or "", whole, choice["finish_reason"])
    assert "tool_calls" not in message or message["tool_calls"]
    return message["content"], [(call["name"], json.loads(call["arguments"])["city"]) for call in whole], reason


PARIS = "get_weather", "Paris"


def test_a_call_in_openais_form(web: TestClient, says: Any) -> None:
    says(CALL)
    assert both(web) == (None, [PARIS], "tool_calls")  # a call alone has no content
    says("Mild.")
    assert both(web) == ("Mild.", [], "stop")
    says("Let me look.\n" + CALL)
    assert both(web) == ("Let me look.\n", [PARIS], "tool_calls")
    found, events = ask(web), streamed(web)
    [call] = found["choices"][0]["message"]["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    texts = [event["choices"][0]["delta"].get("content") for event in events]
    assert sum(bool(text) for text in texts) > 2  # as it came
    assert found["usage"]["completion_tokens"] == events[-1]["cacheblend"]["generated_tokens"]


def test_openais_client_calls_a_tool_and_answers_with_its_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(shallow(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = ServeSettings(chunk_tokens=16, max_tokens=400, drain_s=1, tool_call_parser="hermes")
    with running(settings, model=folder) as url, engine() as other:
        assert other.runtime.builder is not None
        both = CALL + "\n" + '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
        script(monkeypatch, [other.runtime.builder.encode(both)])
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        messages: list[Any] = [{"role": "user", "content": "Is it warm?"}]
        asked: dict[str, Any] = {"model": "nano", "tools": [WEATHER, NOW], "temperature": 0, "seed": 0}
        answer = client.chat.completions.create(messages=messages, **asked)
        message = answer.choices[0].message
        assert [call.function.name for call in message.tool_calls or ()] == ["get_weather", "now"]
        with client.chat.completions.stream(messages=messages, **asked) as stream:
            final = stream.get_final_completion().choices[0]
        assert [call.function.arguments for call in final.message.tool_calls or ()] == ['{"city": "Paris"}', "{}"]
        assert final.finish_reason == answer.choices[0].finish_reason == "tool_calls"
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"} for call in message.tool_calls or ()
        ]
        script(monkeypatch, [other.runtime.builder.encode("It is mild.")])
        told = client.chat.completions.create(messages=[*messages, message.model_dump(), *results], **asked)
        assert told.choices[0].message.content == "It is mild." and told.choices[0].finish_reason == "stop"


def test_two_answers_have_calls_of_their_own(web: TestClient, says: Any) -> None:
    says("Warm." + CALL, CALL.replace("Paris", "Oslo") + CALL)
    assert both(web, n=2) == ("Warm.", [PARIS], "tool_calls")
    assert both(web, 1, n=2) == (None, [("get_weather", "Oslo"), PARIS], "tool_calls")
    found = ask(web, n=2)["choices"]
    assert len({call["id"] for choice in found for call in choice["message"]["tool_calls"]}) == 3


def test_only_the_first_call_where_parallel_calls_are_not_wanted(web: TestClient, says: Any) -> None:
    says("Look: " + CALL + " and " + CALL + " behind")
    assert both(web, parallel_tool_calls=False) == ("Look: ", [PARIS], "tool_calls")
    for told in (True, None):
        assert both(web, parallel_tool_calls=told) == ("Look:  and  behind", [PARIS] * 2, "tool_calls")


def test_none_reads_no_calls_and_shows_no_tools(web: TestClient, says: Any) -> None:
    says(CALL)
    assert both(web, tool_choice="none") == both(web, tools=[]) == (CALL, [], "stop")
    counts = {choice: ask(web, tool_choice=choice)["usage"]["prompt_tokens"] for choice in ("none", "auto")}
    assert counts["none"] == ask(web, tools=[])["usage"]["prompt_tokens"] < counts["auto"]
    for choice, count in counts.items():
        body = {"messages": ASKED["messages"], "tools": [WEATHER], "tool_choice": choice}
        assert web.post("/tokenize", json=body).json()["count"] == count


def test_a_call_that_is_to_be_forced_and_tools_beside_a_form_are_refused_by_name(web: TestClient) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}, "odd"):
        answer = web.post("/v1/chat/completions", json={**ASKED, "tool_choice": choice})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"
    form = {"response_format": {"type": "json_object"}}
    answer = web.post("/v1/chat/completions", json={**ASKED, **form})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text
    pytest.importorskip("xgrammar", reason="xgrammar is not installed here")
    told = ask(web, **form, tool_choice="none", max_tokens=40)["choices"][0]
    assert told["message"]["content"].startswith("{") and "tool_calls" not in told["message"]


@pytest.mark.parametrize("told", ["Look: " + CALL[:-40], CALL.replace("get_weather", "get_time"), "Look: <tool_call>"])
def test_what_is_no_call_is_text_in_the_answer(web: TestClient, says: Any, told: str) -> None:
    says(told)
    assert both(web) == (told, [], "stop")


def test_an_answer_that_is_cut_says_so_and_a_stop_text_inside(web: TestClient, says: Any) -> None:
    says(CALL + "Look: " + CALL)
    whole = ask(web)["usage"]["completion_tokens"]
    for most in range(1, whole, 29):
        assert both(web, max_tokens=most)[2] == "length"
    assert both(web, max_tokens=whole - 3, parallel_tool_calls=False)[1:] == ([PARIS], "tool_calls")
    says("Look. " + CALL + " behind")
    assert both(web, stop=["</tool_call>"]) == ("Look. ", [PARIS], "tool_calls")
    assert both(web, stop=["Paris"]) == ("Look. " + CALL[: CALL.index("Paris")], [], "stop")


def test_log_probabilities_are_of_every_token(web: TestClient, says: Any) -> None:
    says("Look. " + CALL)
    found, events = ask(web, logprobs=True), streamed(web, logprobs=True)
    whole = [token["token"] for token in found["choices"][0]["logprobs"]["content"]]
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert [token["token"] for piece in pieces if piece for token in piece["content"]] == whole
    assert len(whole) == found["usage"]["completion_tokens"] and "".join(whole) == f"Look. {CALL}<|end|>"


def test_markers_that_are_special_tokens_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    shutil.copytree(shallow(), folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    taken = {each["id"] for each in spec["added_tokens"]}
    old, token = max(
        (item for item in spec["model"]["vocab"].items() if item[1] not in taken), key=lambda item: item[1]
    )
    del spec["model"]["vocab"][old]
    spec["model"]["vocab"]["[TOOL_CALLS]"] = token
    spec["model"]["merges"] = [merge for merge in spec["model"]["merges"] if "".join(merge) != old]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"].append({"id": token, "content": "[TOOL_CALLS]", "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with engine(TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"), folder) as opened, server(opened) as web:
        builder = opened.runtime.builder
        assert builder is not None and builder.special_ids(["[TOOL_CALLS]", "[ARGS]"]) == {token}
        call = [token, *builder.encode('get_weather[ARGS]{"city": "Paris"}')]
        end = builder.special_ids(["<|user|>"])
        script(monkeypatch, [[*builder.encode("Look. "), *end, *call, *call]])
        assert both(web) == ("Look. ", [PARIS] * 2, "tool_calls")
        plain = ask(web, tools=None)["choices"][0]["message"]["content"]
        assert plain == "Look. " + 'get_weather[ARGS]{"city": "Paris"}' * 2


def test_without_a_known_template_answers_stay_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for template, settings in (("{{ tools or messages[0].content }}", {}), (TEMPLATE, {"tool_call_parser": "none"})):
        with engine(template) as opened, server(opened, **settings) as web:
            assert opened.runtime.builder is not None
            script(monkeypatch, [opened.runtime.builder.encode(CALL)])
            assert both(web) == (CALL, [], "stop")


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
    ]


def test_calls_of_the_history_reach_the_template_as_objects(web: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    count = web.post("/tokenize", json={"messages": history('{"city": "Paris"}'), "return_token_strs": True}).json()
    text = web.post("/detokenize", json={"tokens": count["tokens"]}).json()["prompt"]
    assert '<tool_call>{"city": "Paris"}get_weathercity' in text and "tool:18 degrees" in text
    for calls in (None, []):
        messages = [*ASKED["messages"], {"role": "assistant", "content": "a", "tool_calls": calls}]
        assert web.post("/tokenize", json={"messages": messages}).status_code == 200


@pytest.mark.parametrize("template", [TEMPLATE, TEXTS])
def test_results_reach_the_template_in_the_order_of_their_calls(template: str) -> None:
    asked, said, result = history("{}")
    (call,) = said["tool_calls"]
    calls = said | {"tool_calls": [call | {"id": name} for name in ("a", "b", "c")]}
    with engine(template) as opened, server(opened) as web:

        def shown(*results: tuple[str | None, str]) -> list[str]:
            tools = [result | {"tool_call_id": name, "content": text} for name, text in results]
            count = web.post("/tokenize", json={"messages": [asked, calls, *tools, asked]}).json()
            text = web.post("/detokenize", json={"tokens": count["tokens"]}).json()["prompt"]
            return re.findall("(one|two|three|again) degrees", text)

        sent = [("c", "three degrees"), ("a", "one degrees"), ("b", "two degrees"), ("a", "again degrees")]
        assert shown(*sent) == ["one", "again", "two", "three"]
        assert shown(*sent[:2], (None, "two degrees")) == ["three", "one", "two"]  # the order sent says which is whose
        wrong = [asked, calls, result | {"tool_call_id": "b"}, result | {"tool_call_id": "d"}]
        answer = web.post("/v1/chat/completions", json={"messages": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages.3.tool_call_id"
        assert "messages.1" in answer.json()["error"]["message"]
        assert web.post("/tokenize", json={"messages": [asked, result]}).status_code == 200  # its calls were cut off


def test_a_template_that_takes_texts_gets_texts() -> None:
    with engine(TEXTS) as opened, server(opened) as web:
        found = web.post("/tokenize", json={"messages": history('{"city":"Paris"}')}).json()
        text = web.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
        assert '{"city":"Paris"}' in text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_broken_history_and_wrong_tools_are_refused_by_name(web: TestClient, path: str) -> None:
    for arguments in ("{", "[]", "[" * 10_000, 5, "NaN", "1" * 5000, "\x00"):
        answer = web.post(path, json={"messages": history(arguments)})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"
    wrong: tuple[tuple[Any, str], ...] = (("f", "tools"), ({}, "tools"), ([5], "tools.0"))
    for tools, param in (*wrong, ([WEATHER, {"type": "web_search"}], "tools.1.type")):
        answer = web.post(path, json={"messages": ASKED["messages"], "tools": tools})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_half_of_a_surrogate_pair_in_a_history_is_no_error_of_the_server() -> None:
    for template in (TEMPLATE, TEXTS, TEMPLATE.replace("call.function.name }}", "call.function.arguments.a }}")):
        with engine(template) as opened, server(opened) as web:
            answer = web.post("/v1/chat/completions", json={"messages": history('{"a": "\\ud800"}'), "max_tokens": 1})
            assert answer.status_code in (200, 400), answer.text
