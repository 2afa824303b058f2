"""Nothing that a client asks for is dropped silently: every field of OpenAI's own types and of vLLM's requests.

Situations: a client of another server, which sends what that one knows; a client library that sends defaults of its
own; a typing error in a field's name; a field whose value asks for what is done anyway.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cacheblend.serve.errors import ApiError
from cacheblend.serve.fields import ACCEPTED, REFUSED, REFUSED_RESPONSES, check_fields
from cacheblend.serve.schemas import ChatRequest, StreamOptions
from request_fields import CHAT, KINDS, VLLM, openai_fields

PAGE = Path(__file__).parents[2] / "docs/serve.md"


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_is_silent(kind: str, record_property: Any) -> None:
    schema, body, _ = KINDS[kind]
    silent = []
    for name in openai_fields(kind) | VLLM:
        if name not in schema.refused and (name in schema.model_fields or name in ACCEPTED):
            continue
        try:
            schema.model_validate({**body, name: "something that no server does by itself"})
        except ApiError as error:
            assert error.status == 400 and error.param == name and name in error.message
        else:
            silent.append(name)
    record_property("silent_parameters", len(silent))
    assert not silent


@pytest.mark.parametrize("name", sorted(REFUSED_RESPONSES))
def test_values_that_ask_for_what_is_done_anyway_are_taken(name: str) -> None:
    for table in (REFUSED, REFUSED_RESPONSES):
        for value in (*table[name].neutral, None) if name in table else ():
            check_fields({name: value}, (), table)
    with pytest.raises(ApiError, match=f"{name} is not supported: .+"):
        check_fields({name: {"another": "value"}}, ("n", "max_tokens"), REFUSED_RESPONSES)


@pytest.mark.parametrize("options", [{"include_usag": True}, {"include_obfuscation": True}, {"include_usage": "odd"}])
def test_options_of_a_stream_are_not_silent_either(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ChatRequest.model_validate({**CHAT, "stream_options": options})
    StreamOptions.model_validate({"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False})


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_not_said(kind: str) -> None:
    schema, body, _ = KINDS[kind]
    nulls = dict.fromkeys((openai_fields(kind) | VLLM) - set(body))
    assert schema.model_validate(body | nulls) == schema.model_validate(body)


def test_true_is_not_one() -> None:
    check_fields({"best_of": 1, "echo": False, "priority": 0}, ())
    for name, value in (("best_of", True), ("echo", 0), ("priority", False)):
        with pytest.raises(ApiError, match=name):
            check_fields({name: value}, ())


def test_a_typing_error_is_named_with_what_was_meant() -> None:
    with pytest.raises(ApiError, match="no field 'temprature'; did you mean temperature"):
        ChatRequest.model_validate({**CHAT, "temprature": 0.5})
    with pytest.raises(ApiError, match="there is no field"):
        ChatRequest.model_validate({**CHAT, "x" * 100_000: 1})
    with pytest.raises(ApiError) as error:
        ChatRequest.model_validate({**CHAT, "\ud800": 1})
    assert error.value.response().status_code == 400


def test_the_page_says_of_every_field_what_becomes_of_it() -> None:
    spec = importlib.util.spec_from_file_location("_fields", PAGE.parent / "_fields.py")
    assert spec is not None and spec.loader is not None
    fields = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fields)
    page = PAGE.read_text(encoding="utf-8")
    assert page == fields.written(page), "run python docs/_fields.py"
    for name in {*REFUSED_RESPONSES, *ACCEPTED, *(field for kind in KINDS.values() for field in kind[0].model_fields)}:
        assert f"| `{name}` |" in page, name


@pytest.mark.parametrize("where", ["cacheblend", "response_format", "stream_options"])
def test_many_unknown_fields_are_refused_by_the_first(where: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], where: {f"k{number}": 0 for number in range(1000)}}
    with pytest.raises(ValidationError, match="there is no field 'k0'") as told:
        ChatRequest.model_validate(body)
    assert told.value.error_count() == 1
    body = {"messages": body["messages"], "logit_bias": {f"k{number}": "x" for number in range(1025)}}
    with pytest.raises(ValidationError, match="at most 1024") as told:
        ChatRequest.model_validate(body)
    assert told.value.error_count() == 1
