"""Chats and texts have the ids that transformers makes of them, whatever the template does with contents."""

import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

import tokenizers_for_tests as tokenizers
from cacheblend.engines.tokens import Passage, PromptBuilder

FILE = Path(__file__).parents[1] / "chat_templates.txt"
CONVERSATIONS = 20
MAKERS = {
    "byte_level": tokenizers.byte_level,
    "byte_level bos": partial(tokenizers.byte_level, bos=True),
    "neox": tokenizers.neox,
    "prepend": tokenizers.sentencepiece,
    "metaspace": partial(tokenizers.sentencepiece, dummy_prefix="metaspace"),
    "gemma": tokenizers.gemma,
    "unigram": tokenizers.unigram,
    "word_level": tokenizers.word_level,
    "normalised": tokenizers.normalised,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": 'Looks a <word> up; "quoted", naïve.',
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
WORDS = [
    "The dog",
    "sleeps.",
    "42",
    "naïve",
    "你好世界",
    "Who wrote it?",
    "<td>cell</td>",
    "<h1>",
    "def f(x):",
    "    return x",
    "C:\\new\\table",
]
WORDS += [
    '"quoted"',
    "{'a': [1, 2]}",
    "it's",
    "&amp;",
    "😀",
    "s",
    "a" * 30,
    "[link](http://x.y/?a=1&b=2)",
    "|",
    "/think",
    "x\r\ny",
    "e\u0301",
]
SPACES = [" ", " ", " ", "\n", "\n\n", "", "  ", "    ", "\t", "\n\n\n", "\r\n", "\u00a0"]


class Template(NamedTuple):
    tokenizer: PreTrainedTokenizerFast
    place_for: list[str]

    def renders(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, **{"add_generation_prompt": True} | options, tokenize=True, return_dict=False
        )
        return ids


def read_templates() -> dict[str, Template]:
    found = {}
    for section in re.split(r"^==== ", FILE.read_text(), flags=re.MULTILINE)[1:]:
        head, *lines = section.splitlines()
        name, kind, special, added, place_for = (field.strip() for field in head.split(";"))
        tokenizer = MAKERS[kind]("".join(lines))
        found[name] = Template(tokenizers.with_tokens(tokenizer, special.split(), added.split()), place_for.split())
    return found


TEMPLATES = read_templates()


def text(rng: random.Random, most: int = 8) -> str:
    """Of words and spaces, with spaces in front and behind; not empty."""
    parts = [rng.choice(SPACES) + rng.choice(WORDS) for _ in range(rng.randint(1, most))]
    return "".join([*parts, rng.choice(SPACES)])


def conversation(rng: random.Random, place_for: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if "system" in place_for and rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng)})
    for _ in range(rng.randint(0, 3)):
        messages.append({"role": "user", "content": text(rng)})
        if "tools" in place_for and rng.random() < 0.4:
            call = {"name": "lookup", "arguments": {"word": text(rng, 2)}}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            )
            output = json.dumps({"found": text(rng), "n": 3}) if rng.random() < 0.7 else text(rng)
            messages.append({"role": "tool", "name": "lookup", "content": output})
        thought = f"<think>{text(rng)}</think>{rng.choice(SPACES)}" if rng.random() < 0.5 else ""
        messages.append({"role": "assistant", "content": thought + text(rng)})
    return [*messages, {"role": "user", "content": text(rng)}]


def documents(rng: random.Random) -> list[Passage]:
    return [Passage(text(rng, 20), rng.choice(["", "A title", 'The "other" one'])) for _ in range(rng.randint(1, 3))]


def handed(passages: list[Passage]) -> list[dict[str, str]]:
    return [{"title": p.title, "text": p.text} if p.title else {"text": p.text} for p in passages]


def with_documents(messages: list[dict[str, Any]], passages: list[Passage]) -> list[dict[str, Any]]:
    """Where a template without a place for them has them."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    moved = {**messages[last], "content": "".join(p.text for p in passages) + messages[last]["content"]}
    return [*messages[:last], moved, *messages[last + 1 :]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_equal(name: str) -> None:
    """With and without documents, tools and thoughts."""
    template, rng = TEMPLATES[name], random.Random(name)
    builder = PromptBuilder(template.tokenizer)
    compared = 0
    for number in range(CONVERSATIONS):
        messages = conversation(rng, template.place_for)
        options: dict[str, Any] = {"tools": [TOOL]} if "tools" in template.place_for and number % 2 else {}
        options |= {"enable_thinking": False} if number % 5 == 0 else {}
        options |= {"add_generation_prompt": False} if number % 7 == 0 else {}
        assert builder.chat(messages, **options).token_ids.tolist() == template.renders(messages, **options), messages
        passages = documents(rng)
        if "documents" in template.place_for:
            expected = template.renders(messages, documents=handed(passages), **options)
        else:
            expected = template.renders(with_documents(messages, passages), **options)
        prompt = builder.chat(messages, passages, **options)
        assert prompt.token_ids.tolist() == expected, (messages, passages)
        compared += bool(prompt.chunks)
    assert name == "words" or compared >= CONVERSATIONS // 2, "passages were found in few of the prompts"
