"""What a request says of tools: its `tools`, which are checked, and the calls in its history, for the chat template.

A tool reaches the template as the client sent it, in its order of keys.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from cacheblend.serve.errors import ApiError

LONGEST_NAME = 256


def check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools.

    Raises:
        ApiError: one is no function, or asks for what is not done; with its place.
    """
    for number, tool in enumerate(tools):
        where = f"tools.{number}"
        if (kind := tool.get("type")) != "function":
            raise _wrong(f"{where}.type", kind, 'must be "function"; other tools are not called')
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _wrong(f"{where}.function", function, "must be an object with a name")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            raise _wrong(f"{where}.function.name", name, f"must be a text of 1 to {LONGEST_NAME} characters")
        for key, kinds, what in (
            ("description", str, "a text"),
            ("parameters", dict, "a JSON schema, which is an object"),
            ("strict", bool, "true or false"),
        ):
            if (value := function.get(key)) is not None and not isinstance(value, kinds):
                raise _wrong(f"{where}.function.{key}", value, f"must be {what}")
        if function.get("strict"):
            message = "is not supported: arguments are as the model writes them; leave it out and check them"
            raise _wrong(f"{where}.function.strict", True, message)
    return tools


Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True), AfterValidator(check_tools)]
ToolChoice = Literal["none", "auto"]


def names_of(tools: Sequence[dict[str, Any]]) -> frozenset[str]:
    """The names of checked tools."""
    return frozenset(tool["function"]["name"] for tool in tools)


def with_argument_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of their calls as objects, which transformers' templates expect; clients send
    them as JSON. Copies what it changes.

    Raises:
        ApiError: calls of another form, or arguments that are no JSON object; with their place.
    """
    return [
        {**message, "tool_calls": _calls(message["tool_calls"], f"messages.{number}.tool_calls")}
        if "tool_calls" in message
        else message
        for number, message in enumerate(messages)
    ]


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, calls, "must be a list of calls")
    changed = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _wrong(f"{where}.{number}", call, 'must be {"id", "type": "function", "function": {...}}')
        place = f"{where}.{number}.function"
        if not isinstance(function.get("name"), str):
            raise _wrong(f"{place}.name", function.get("name"), "must be a text")
        arguments = _object(function.get("arguments"), f"{place}.arguments")
        changed.append({**call, "function": {**function, "arguments": arguments}})
    return changed


def _object(arguments: Any, where: str) -> dict[str, Any]:
    found = arguments
    if arguments is None or arguments == "":  # of a function without parameters
        return {}
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _wrong(where, arguments, "must be a JSON object, as text") from None
    if not isinstance(found, dict):
        raise _wrong(where, arguments, "must be a JSON object, as text")
    return found


def _wrong(where: str, value: Any, what: str) -> ApiError:
    shown = value if isinstance(value, bool | int | float | str) or value is None else type(value).__name__
    return ApiError(400, f"{where} {what}; got {str(shown)[:80]!r}", param=where)
