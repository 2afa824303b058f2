"""Answers of a given form over HTTP: on the model that ships, by OpenAI's and vLLM's fields.

Situations: several answers, forms and free answers in one batch; streams; a stop text inside the form; an end in its
middle; log-probabilities beside it; fields that belong to no form, or to two; forms that nobody can hold.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf import BlendEngine, Grammar
from cacheblend.nano import model_path
from cacheblend.serve.settings import ServeSettings
from serving import running, shallow

pytest.importorskip("xgrammar", reason="xgrammar is not installed here")

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
    with running(ServeSettings(max_tokens=200, drain_s=1)) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


def test_the_engine_itself() -> None:
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        for seed in range(8):
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


def test_completions_and_responses(http: httpx.Client) -> None:
    assert is_by_schema(post(http, "completions", response_format=FORMAT)["choices"][0]["text"])
    shown = {"type": "json_schema", "name": "owner", "schema": SCHEMA}
    found = post(http, "responses", text={"format": shown})
    assert is_by_schema(found["output"][0]["content"][0]["text"]) and found["text"]["format"] == shown
    assert post(http, "responses", text={"format": {"type": "text"}}, max_output_tokens=1)["text"]["format"]
    assert post(http, response_format={"type": "text"}, max_tokens=1)


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


def test_a_stream_has_the_form(http: httpx.Client) -> None:
    fields = {"messages": MESSAGES, "stream": True, "response_format": FORMAT, "logprobs": True, "seed": 3}
    with http.stream("POST", "/v1/chat/completions", json=fields) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert is_by_schema("".join(choice["delta"].get("content") or "" for choice in choices))
    assert all(token["logprob"] <= 0 for c in choices if c["logprobs"] for token in c["logprobs"]["content"])


def test_an_end_inside_the_form(http: httpx.Client) -> None:
    [cut] = post(http, response_format=FORMAT, max_tokens=2)["choices"]
    assert cut["finish_reason"] == "length" and cut["message"]["content"].startswith("{")
    [stopped] = post(http, response_format=FORMAT, stop='"n')["choices"]
    assert stopped["finish_reason"] == "stop" and '"n' not in stopped["message"]["content"]


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
    "empty choice": ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    "regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    "repetitions": ({"structured_outputs": {"regex": "(a{1,1000}){1,1000}"}}, "structured_outputs"),
    "grammar": ({"structured_outputs": {"grammar": "foo"}}, "structured_outputs"),
    "long": ({"structured_outputs": {"json": {"enum": ["x" * 1_000_000]}}}, "structured_outputs"),
    "nothing": (
        {"structured_outputs": {"json": {"type": "integer", "minimum": 2, "maximum": 1}}},
        "structured_outputs",
    ),
    "itself": ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
    "keyword": ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
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
