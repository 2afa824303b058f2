"""Tool calls in answers: their formats, and streams that are cut anywhere."""

import json
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.tokens.builder import PromptBuilder
from cacheblend.serve.errors import ApiError
from cacheblend.serve.prompts import with_argument_objects
from cacheblend.serve.schemas import check_tools
from cacheblend.serve.tool_calls import CHOICES, FORMATS, Call, CallReader, format_of
from tokenizers_for_tests import byte_level

NAMES = ("f", "g", "get_weather", "a.b-c")
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Paris"},
    {"a": {"b": [1, 2.5, None, True, {"c": "}"}]}},
    {"text": 'she said "}" and \\ <tool_call> [TOOL_CALLS] </tool_call> [ARGS]'},
    {"q": "line\nbreak\ttab 你好 😀 é \u2028", "é": "'"},
    {"code": "print('[f(a=1)]')\n"},
]


def read(name: str, pieces: Iterable[str], names: Iterable[str] = NAMES, **more: Any) -> tuple[str, list[Call]]:
    """The text and the calls of an answer that comes in these pieces."""
    reader = CallReader(FORMATS[name], set(names), **more)
    found = [each for piece in pieces for each in reader.push(piece)] + reader.finish()
    calls = [each for each in found if isinstance(each, Call)]
    assert reader.calls == len(calls)
    return "".join(each for each in found if isinstance(each, str)), calls


def written(name: str, tool: str, arguments: dict[str, Any], variant: int = 0) -> str:
    """A call as a model writes it."""
    told = json.dumps(arguments, ensure_ascii=bool(variant % 2))
    if name == "hermes":
        return f'<tool_call>\n{{"name": "{tool}", "arguments": {told}}}\n</tool_call>'
    if name == "llama3":
        return ("<|python_tag|>" if variant else "") + f'{{"name": "{tool}", "parameters": {told}}}'
    if name == "mistral" and variant == 0:
        return f'[TOOL_CALLS] [{{"name": "{tool}", "arguments": {told}}}]'
    if name == "mistral":
        return f"[TOOL_CALLS]{tool}{'[CALL_ID]abcdefghi' if variant > 1 else ''}[ARGS]{told}"
    start, stop = ("<|python_start|>", "<|python_end|>") if variant else ("", "")
    return f"{start}[{tool}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]{stop}"


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:stop] for start, stop in pairwise(edges)]


@pytest.mark.parametrize("variant", [0, 1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read_wherever_a_stream_is_cut(name: str, variant: int) -> None:
    front = "" if FORMATS[name].bare and not variant else "Let me [look] <at> {it}.\n"
    for arguments in ARGUMENTS:
        tool = "get_weather"
        answer = front + written(name, tool, arguments, variant)
        expected = read(name, [answer])
        assert expected[0] == front and [call.name for call in expected[1]] == [tool], answer
        assert json.loads(expected[1][0].arguments) == arguments
        for place in range(len(answer) + 1):
            assert read(name, [answer[:place], answer[place:]]) == expected, place
        assert read(name, answer) == expected


PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_start|>"),
        *("<|python_end|>", "[", "]", "{", "}", "(", ")", '"', "'", "\\", ";", " ", "\n", "f", "g", "a=1", ",", ":"),
        *(written(name, tool, {"k": "v]}"}, variant) for name in FORMATS for tool in ("f", "x") for variant in (0, 1)),
        *('{"name": "f", "arguments": {}}', '"name"', "Hello, ", "<tool", "call>", "😀", "[f(), g(a=[1])]"),
    ]
)


@given(st.sampled_from(list(FORMATS)), st.lists(PARTS, max_size=8), st.lists(st.integers(0, 500), max_size=12))
@example("hermes", ["<tool_call>", "<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"], [3])
@example("hermes", ["<tool_call>", '{"name": "f", "arguments": {}}', "</tool"], [45])
def test_any_cut_of_any_text_gives_the_same_and_nothing_is_lost(name: str, parts: list[str], places: list[int]) -> None:
    answer = "".join(parts)
    text, calls = read(name, [answer])
    assert read(name, cut(answer, places)) == read(name, answer) == (text, calls)
    assert read(name, cut(answer, places), only_first=True)[1] == calls[:1]
    if not calls:
        assert text == answer
    letters = iter(answer)
    assert all(letter in letters for letter in text)  # what is left is in the answer, in this order


def test_text_comes_as_soon_as_it_is_certain_and_a_long_call_in_time() -> None:
    reader = CallReader(FORMATS["hermes"], {"f"})
    assert reader.push("Hello") == ["Hello"] and reader.push(" <") == [" "]
    assert reader.push("b> <tool_") == ["<b> "] and reader.push("cal") == []
    assert reader.push("ed") == ["<tool_caled"]
    call = written("hermes", "f", {"a": 1})
    assert reader.push(call[:-1]) == [] and reader.push(">") == [Call("f", '{"a": 1}')]
    assert reader.push("\n") == [] and reader.push("Done") == ["\nDone"]
    assert reader.finish() == []
    answer = written("hermes", "f", {"text": "a{]\"' " * 60_000, "more": [{"a": 1}] * 5_000})  # a long call
    began = time.process_time()
    text, calls = read("hermes", [answer[start : start + 4] for start in range(0, len(answer), 4)])
    assert text == "" and len(calls) == 1 and time.process_time() - began < 30


@pytest.mark.parametrize("name", FORMATS)
def test_two_calls_and_text_between_and_behind(name: str) -> None:
    first, second = (written(name, tool, {"a": 1}, 1) for tool in ("f", "g"))
    assert [call.name for call in read(name, [f"{first}\n{second}\n"])[1]] == ["f", "g"]
    text, calls = read(name, [f"One {first} two {second} three"])
    assert text == "One  two  three" and [call.name for call in calls] == ["f", "g"]
    text, calls = read(name, [f"One {first} two {second} three"], only_first=True)
    assert text == "One " and [call.name for call in calls] == ["f"]
    assert read(name, [first + "\n\n"]) == ("", [Call("f", '{"a": 1}')])


def test_calls_in_one_list_behind_what_was_none_cut_at_the_end_or_without_parameters() -> None:
    both = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert read("mistral", [both])[1] == [Call("f", '{"a": 1}'), Call("g", "{}")]
    assert read("mistral", [both], only_first=True)[1] == [Call("f", '{"a": 1}')]
    assert read("mistral", [both], ["f"]) == (both, [])
    assert read("pythonic", ['[f(a=-1, b=(1, 2)), a.b.c(x={"k": None})]'], ["f", "a.b.c"])[1] == [
        Call("f", '{"a": -1, "b": [1, 2]}'),
        Call("a.b.c", '{"x": {"k": null}}'),
    ]
    llama = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
    assert [call.name for call in read("llama3", [llama])[1]] == ["f", "g"]
    assert read("llama3", ['{"type": "function", "name": "f", "parameters": {"a": 1}}'])[1] == [Call("f", '{"a": 1}')]
    assert read("hermes", [written("hermes", "f", {}).replace("{}", '"{\\"a\\": 1}"')])[1] == [Call("f", '{"a": 1}')]
    assert read("hermes", ['<tool_call>{"name": "f"}</tool_call>']) == ("", [Call("f", "{}")])
    assert read("hermes", ['<tool_call>{"name": "f", "arguments": null}</tool_call>']) == ("", [Call("f", "{}")])
    assert read("pythonic", ["[f()]"]) == ("", [Call("f", "{}")])
    assert read("mistral", ["[TOOL_CALLS]f{}"]) == ("", [Call("f", "{}")])
    good = written("hermes", "f", {})  # behind what was none, whose end is cut, and with half of a surrogate pair
    for bad in ("<tool_call>", "<tool_call>{]", '<tool_call>{"name": "x"}</tool_call>'):
        assert read("hermes", [bad + good]) == (bad, [Call("f", "{}")])
    for rest in ("", "\n", "</tool", "\n</tool_call"):
        assert read("hermes", ['<tool_call>{"name": "f", "arguments": {}}' + rest]) == ("", [Call("f", "{}")])
    _, [call] = read("hermes", ['<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'])
    assert call.arguments == '{"a": "\\ud800"}' and call.arguments.encode()


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", '<tool_call>{"name": "x", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, 2'),
        ("hermes", '<tool_call>{"name": "f", "arguments": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "why": "it rains"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and more'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "5"}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("hermes", "<tool_call>\n\n"),
        ("hermes", " \n<tool_call>{]"),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("llama3", '{"name": "f"}'),
        ("llama3", '{"population": 5, "name": "f"}'),
        ("llama3", 'It is {"name": "f", "parameters": {}}'),
        ("llama3", "<|python_tag|>import os"),
        ("llama3", "{"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("mistral", "[TOOL_CALLS]f g[ARGS]{}"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(**{'a': 1})]"),
        ("pythonic", "[f(a=open('x'))]"),
        ("pythonic", "[f(a={1, 2})]"),
        ("pythonic", "[f(a=b'x')]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a=1, a=2)]"),
        ("pythonic", "[f(a=1) for f in g]"),
        ("pythonic", "[f()(a=1)]"),
        ("pythonic", "I would call [f(a=1)]"),
        ("pythonic", "   "),
    ],
)
def test_what_is_no_call_stays_text_whole(name: str, answer: str) -> None:
    assert read(name, [answer]) == read(name, answer) == (answer, [])


@pytest.mark.parametrize(
    "answer",
    [
        "[f(a=" + "[" * 50_000,
        "[f(a=" + "(" * 70 + ")" * 70 + ")]",
        "[f(a=" + "-" * 50_000 + "1)]",
        "[f(a=" + "1+" * 50_000 + "1)]",
        "[f" + ".a" * 50_000 + "()]",
        "[f(a=" + "not " * 50_000 + "1)]",
        '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 50_000,
        '<tool_call>{"a"' * 20_000,
        '<tool_call>{"":"' * 20_000,
        "[TOOL_CALLS]" + "[" * 100_000,
        "[TOOL_CALLS]" * 20_000,
        "<tool_call>" * 20_000,
    ],
    ids=lambda answer: answer[:24],
)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_nested_without_end_is_text_soon(name: str, answer: str) -> None:
    depth = sys.getrecursionlimit()
    began = time.process_time()
    pieces = [answer[start : start + 16] for start in range(0, len(answer), 16)]
    assert read(name, pieces) == (answer, [])
    assert time.process_time() - began < 20 and sys.getrecursionlimit() == depth


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{{- '<tool_call>\\n{\"name\": ' }}", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>", None),
        ("<tool_call>{name}<arg_key>", None),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|start_header_id|> {{- '\"parameters\": ' }}", "llama3"),
        ("{{- '<|python_tag|>' }}", "llama3"),
        ("[func_name1(params_name1=params_value1)] <|start_header_id|>", "pythonic"),
        ({"default": "{{ messages }}", "tool_use": "<tool_call>{"}, "hermes"),
    ],
)
def test_a_format_is_known_by_the_template(template: Any, name: str | None) -> None:
    found = format_of("auto", template)
    assert (found.name if found else None) == name
    assert format_of("none", template) is None and format_of("mistral", template) is FORMATS["mistral"]
    with pytest.raises(InvalidInputError, match=f"'gpt'; there are {', '.join(CHOICES)}"):
        format_of("gpt", template)


def test_ids_differ_and_are_as_templates_take_them_and_special_tokens_of_calls_alone_are_shown() -> None:
    for name, form in FORMATS.items():
        ids = {form.new_id() for _ in range(100)}
        assert len(ids) == 100
        assert all(len(each) == 9 and each.isalnum() if name == "mistral" else each.startswith("call_") for each in ids)
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>", "<|eom_id|>"]})
    builder = PromptBuilder(tokenizer)
    shown = builder.special_ids(["<|python_tag|>", "<think>", "nothing"])
    tag, end, think = tokenizer.convert_tokens_to_ids(["<|python_tag|>", "<|eom_id|>", "<think>"])
    assert shown == {tag}
    ids = [end, tag, *builder.encode('{"a": "é😀"}'), think, end]
    assert builder.decode(ids, shown) == '<|python_tag|>{"a": "é😀"}<think>'
    assert builder.decode(ids) == '{"a": "é😀"}<think>'


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({}, "tools.0.type"),
        ({"type": "custom", "custom": {"name": "f"}}, "tools.0.type"),
        ({"type": "function"}, "tools.0.function"),
        ({"type": "function", "function": "f"}, "tools.0.function"),
        ({"type": "function", "function": {}}, "tools.0.function.name"),
        ({"type": "function", "function": {"name": 5}}, "tools.0.function.name"),
        ({"type": "function", "function": {"name": ""}}, "tools.0.function.name"),
        ({"type": "function", "function": {"name": "f" * 257}}, "tools.0.function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools.0.function.parameters"),
        ({"type": "function", "function": {"name": "f", "description": 5}}, "tools.0.function.description"),
        ({"type": "function", "function": {"name": "f", "strict": "yes"}}, "tools.0.function.strict"),
        ({"type": "function", "function": {"name": "f", "strict": True}}, "tools.0.function.strict"),
    ],
)
def test_what_is_no_tool_is_refused_with_its_place(tool: dict[str, Any], param: str) -> None:
    fine = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(128)]
    assert check_tools(fine) == fine
    with pytest.raises(ApiError) as error:
        check_tools([tool, *fine])
    assert error.value.status == 400 and error.value.param == param and param in error.value.message


def call_of(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("f", "tool_calls"),
        ([5], "tool_calls.0"),
        ([{"function": "f"}], "tool_calls.0"),
        ([{"function": {"name": 5}}], "tool_calls.0.function.name"),
        ([call_of("{}"), call_of("{")], "tool_calls.1.function.arguments"),
        ([call_of("[1]")], "tool_calls.0.function.arguments"),
        ([call_of("[" * 100_000)], "tool_calls.0.function.arguments"),
        ([call_of(5)], "tool_calls.0.function.arguments"),
    ],
)
def test_broken_calls_of_the_history_are_refused_with_their_place(calls: Any, param: str) -> None:
    with pytest.raises(ApiError) as error:
        with_argument_objects([{"role": "assistant", "tool_calls": calls}])
    assert error.value.status == 400 and error.value.param == f"messages.0.{param}"
