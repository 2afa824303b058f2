"""What becomes of each field of a request: the tables of serve.md, written from the schemas and `serve.fields`.

python docs/_fields.py      writes them anew, between the two marks; a test fails where they differ
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cacheblend.serve.fields import ACCEPTED, REFUSED, REFUSED_RESPONSES, Refused
from cacheblend.serve.schemas import ChatRequest, CompletionRequest, ResponsesRequest, Sampling

PAGE = Path(__file__).resolve().parent / "serve.md"
START, STOP = "<!-- fields -->\n", "<!-- /fields -->"
SCHEMAS: Mapping[str, type[Sampling]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
}
NOTES = {
    "bad_words": "also behind a space",
    "cache_salt": "the same as `salt` below `cacheblend`",
    "cacheblend": "[its own fields](#cacheblends-own-fields)",
    "chat_template_kwargs": "`enable_thinking`, `thinking`, `reasoning_effort`, `tools`, if the template has them",
    "documents": "objects of `title` and `text`, given to the chat template",
    "input": "messages, of text parts",
    "instructions": "the first system message",
    "logprobs": "chat: true or false; completions: 0 to 20",
    "max_tokens": "integer, from 1 to what the context has left; default: of completions 16, of others `--max-tokens`",
    "max_completion_tokens": "as `max_tokens`",
    "max_output_tokens": "as `max_tokens`",
    "min_tokens": "before, no token ends the answer; a stop text does",
    "n": "integer, 1 to 8",
    "parallel_tool_calls": "false: [the first call alone](#tools)",
    "prompt": "a text or a list of token ids, or [a list of these](#several-prompts), at most 32",
    "reasoning_effort": "given to the chat template, if it reads it",
    "response_format": "`text`, or [structured output](#structured-output)",
    "stream_options": "with `stream`; `include_usage`, with it vLLM's `continuous_usage_stats`; events are not padded",
    "structured_outputs": "[structured output](#structured-output)",
    "text": "`format`, as `response_format` with the schema's fields in it; `verbosity` only `medium`",
    "tools": "functions; calls are [read from answers](#tools)",
    "top_logprobs": "0 to 20",
}


def tables() -> str:
    """The tables, as Markdown."""
    return "\n".join([*_taken(), "", *_refused(), "", *_accepted(), ""])


def _taken() -> Iterator[str]:
    yield "Taken, as OpenAI or vLLM have them:\n"
    yield "| field | routes | values |\n|---|---|---|"
    shown = {
        name: schema.model_json_schema()["properties"] | {"": schema.model_json_schema().get("$defs", {})}
        for name, schema in SCHEMAS.items()
    }
    taken = {
        kind: {field: what for field, what in fields.items() if field and field not in SCHEMAS[kind].refused}
        for kind, fields in shown.items()
    }
    for field in sorted({field for fields in taken.values() for field in fields}):
        kinds = [kind for kind, fields in taken.items() if field in fields]
        where = "all" if len(kinds) == len(taken) else ", ".join(kinds)
        kind = kinds[0]
        told = [NOTES[field]] if field in NOTES else [_values(taken[kind][field], shown[kind][""])]
        yield f"| `{field}` | {where} | {'; '.join(filter(None, told))} |"


def _values(schema: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """A field's values in words: ``number, 0 to 1``."""
    if "$ref" in schema:
        return _values(kinds[schema["$ref"].rpartition("/")[2]], kinds)
    if "anyOf" in schema:
        found = dict.fromkeys(_values(each, kinds) for each in schema["anyOf"] if each.get("type") != "null")
        return " or ".join(found)
    said = {"array": "list", "boolean": "true or false", "object": "object", "string": "text"}
    kind = said.get(schema.get("type", ""), schema.get("type", ""))
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None and high is not None and abs(high) < 1 << 62:
        above = "above " if "exclusiveMinimum" in schema else ""
        return f"{kind}, {above}{low:,} to {high:,}"
    most = schema.get("maxItems", schema.get("maxProperties"))
    return (
        f"{kind}, from {low:,}" if low is not None and high is None else f"{kind} of at most {most}" if most else kind
    )


def _refused() -> Iterator[str]:
    yield "Refused with 400 and the field's name, but for values that ask for the default behaviour, as `null` does:\n"
    yield "| field | values taken | why, or what to use |\n|---|---|---|"
    for name, refused in sorted(REFUSED.items()):
        yield _row(name, refused)
    yield "\nBy `/v1/responses` also:\n"
    yield "| field | values taken | why, or what to use |\n|---|---|---|"
    for name, refused in sorted(REFUSED_RESPONSES.items()):
        if REFUSED.get(name) != refused:
            yield _row(name, refused)


def _row(name: str, refused: Refused) -> str:
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in refused.neutral)
    return f"| `{name}` | {neutral} | {refused.what} |"


def _accepted() -> Iterator[str]:
    yield "Accepted and ignored, since they do not affect the answer:\n"
    yield "| field | why |\n|---|---|"
    for name, what in sorted(ACCEPTED.items()):
        yield f"| `{name}` | {what} |"


def written(page: str) -> str:
    """The page with the tables in their place."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{tables()}\n{STOP}{rest.partition(STOP)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
