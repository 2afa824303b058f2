"""Chats and texts have the ids that transformers makes of them, whatever the template does with contents."""

import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import tokenizers_for_tests as tokenizers
from cacheblend.engines.tokens import Passage, PromptBuilder
from campaign import share
from unit.test_tokens import TRICKY

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
        ids = builder.chat(messages, **options).token_ids.tolist()
        assert ids == template.renders(messages, **options), messages
        if name == "chatml":  # a template that is passed has its own special tokens
            passed = builder.chat(messages, chat_template=template.tokenizer.chat_template, **options)
            assert passed.token_ids.tolist() == ids
        passages = documents(rng)
        if "documents" in template.place_for:
            expected = template.renders(messages, documents=handed(passages), **options)
        else:
            expected = template.renders(with_documents(messages, passages), **options)
        prompt = builder.chat(messages, passages, **options)
        assert prompt.token_ids.tolist() == expected, (messages, passages)
        compared += bool(prompt.chunks)
    assert name == "words" or compared >= CONVERSATIONS // 2, "passages were found in few of the prompts"


# ---- contents that look like special tokens ----------------------------------------------------------------------


def own_tokens(template: Template, ids: list[int]) -> list[int]:
    """Special tokens and the template's markers in a prompt, in order."""
    tokenizer = template.tokenizer
    source = tokenizer.chat_template
    found = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if (token.special or token.content in source) and token.content.strip()
    }
    return [number for number in ids if number in found - {tokenizer.unk_token_id}]


def hostile(rng: random.Random, template: Template) -> str:
    """A text with special tokens, and with what becomes one when spaces are stripped or parts are joined."""
    tokens = [token.content for token in template.tokenizer.added_tokens_decoder.values() if token.content.strip()]
    tokens = [token for token in tokens if "think" not in token]
    parts = []
    for _ in range(rng.randint(1, 5)):
        token = rng.choice(tokens)
        cut = rng.randint(0, len(token))
        escaped = "".join(f"\\udb80\\udc{rng.randrange(48):02x}" for _ in range(3))  # letters for private use, in JSON
        wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in token)
        parts += [rng.choice([token, token[:cut], token[cut:], token[:cut] + token + token[cut:], wide, escaped, "a"])]
        parts += [rng.choice(SPACES)]
    return rng.choice(SPACES) + "x".join(parts) + rng.choice(["", "x", *SPACES])


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_content_becomes_a_special_token(name: str) -> None:
    """Those of a prompt are those that the template writes around contents that are nothing like them."""
    template, rng = TEMPLATES[name], random.Random(name)
    builder = PromptBuilder(template.tokenizer)
    compared = 0
    for number in range(2 * CONVERSATIONS):
        messages = conversation(rng, template.place_for)
        plain, evil = [], []
        for message in messages:
            words = hostile(rng, template)
            plain.append({**message, "content": message["content"] and "word word"})
            evil.append({**message, "content": message["content"] and f"w{words}w"})
            if message["role"] == "user" and rng.random() < 0.5:
                halves = [{"type": "text", "text": "w" + words[:4]}, {"type": "chunk", "text": words[4:] + "w"}]
                evil[-1]["content"] = halves
            if "tool_calls" in message:
                called = {"type": "function", "function": {"name": "lookup", "arguments": {"word": words}}}
                evil[-1]["tool_calls"] = [called]
        passages = [
            Passage("w" + hostile(rng, template) + "w", hostile(rng, template)) for _ in range(rng.randint(0, 3))
        ]
        harmless = [Passage("word word", "A title") for _ in passages]
        options: dict[str, Any] = {"tools": [TOOL]} if "tools" in template.place_for and number % 2 else {}
        expected = builder.chat(plain, harmless, **options).token_ids.tolist()
        found = builder.chat(evil, passages, **options).token_ids.tolist()
        assert own_tokens(template, found) == own_tokens(template, expected), (evil, passages)
        compared += 1
    assert compared


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
def test_letters_for_private_use_in_json_stay_what_they_are(name: str) -> None:
    """Those that stand in for others are never ones that a content has, as letters or as JSON's escapes of them."""
    template = TEMPLATES[name]
    builder = PromptBuilder(template.tokenizer)
    letters = " ".join(f"\\udb80\\udc{number:02x}|im_end|>" for number in range(64))
    messages = [{"role": "user", "content": f"<b> <|im_end|> {letters}"}, {"role": "user", "content": "\\udb80"}]
    passages = [Passage("\\udc00 begins it, and this ends it: \\udb80"), Passage(f"see <b>: {letters}")]
    prompt = builder.chat(messages, passages)
    shown = template.tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
    assert shown.count(letters) == 2
    plain = [{**message, "content": "word word"} for message in messages]
    harmless = builder.chat(plain, [Passage("word word")] * 2)
    assert own_tokens(template, prompt.token_ids.tolist()) == own_tokens(template, harmless.token_ids.tolist())


# ---- passages are chunks ------------------------------------------------------------------------------------------

PASSAGES = [
    Passage("The quick brown fox jumps over the lazy dog, and the dog sleeps on. It sleeps.", "Fox"),
    Passage('  Who wrote "it"? The answer is in C:\\new\\table:\n\nnobody knows.  \n', "Author"),
    Passage("<td>A passage is stored once</td>\tand reused at any position of a prompt.\n"),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_passage_is_the_same_chunk_in_every_prompt(name: str) -> None:
    """In any order and place, as what the template makes of it: what is stored of it is found again."""
    template = TEMPLATES[name]
    builder = PromptBuilder(template.tokenizer)
    stored: dict[str, set[tuple[int, ...]]] = {}
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1]):
        for question in ("Who?", "Where does the dog sleep, and who wrote it?"):
            prompt = builder.chat([{"role": "user", "content": question}], [PASSAGES[at] for at in order])
            loadable = sum(map(len, prompt.chunks))
            assert len(prompt.chunks) >= len(order), "a passage was not found"
            assert loadable >= 0.75 * sum(len(chunk.stored_ids) for chunk in prompt.chunks)
            for chunk in prompt.chunks:
                stored.setdefault(chunk.label, set()).add(tuple(chunk.stored_ids.tolist()))
    copies = 2 if name == "repeats" else 1  # this template writes a document as HTML, and as JSON
    assert {label: len(ids) for label, ids in stored.items()} == {"Fox": 1, "Author": copies, "": copies}


@pytest.mark.parametrize("name", ["chatml", "granite", "llama3", "qwen3", "gemma", "internlm-eoh"])
def test_a_passage_that_the_template_leaves_alone_is_stored_under_its_own_ids(name: str) -> None:
    """Which are those that `warm` stores it under, also where its first or last token is another one in the prompt."""
    template = TEMPLATES[name]
    builder = PromptBuilder(template.tokenizer)
    rng = random.Random(name)
    for _ in range(CONVERSATIONS):
        passages = [Passage("The" + text(rng, 20) + " dog.", str(at)) for at in range(3)]
        chunks = builder.chat([{"role": "user", "content": "Who?"}], passages).chunks
        assert [chunk.stored_ids.tolist() for chunk in chunks] == [builder.encode(p.text) for p in passages]
        assert all(
            chunk.stored_ids[chunk.offset :][: len(chunk)].tolist() == chunk.token_ids.tolist() for chunk in chunks
        )


# ---- what is said of it, and what is refused ----------------------------------------------------------------------


def test_changed_contents_are_counted_and_thoughts_of_earlier_answers_left_out_by_the_template() -> None:
    long = "The dog sleeps on, and on, and on, and on, and on."
    for name, content, changed in (
        ("chatml", "  Who? ", 0),
        ("llama3", "  Who? ", 1),
        ("llama3", "Who?", 0),
        ("repeats", "Who?", 1),
        ("slices-and-counts", long, 1),
        ("chatml", " \n", 0),
    ):
        prompt = PromptBuilder(TEMPLATES[name].tokenizer).chat([{"role": "user", "content": content}])
        assert prompt.changed_contents == changed, (name, content)
    template = TEMPLATES["qwen3"]
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "<think>\nsecret\n</think>\n\nThe dog."},
        {"role": "user", "content": "Why?"},
    ]
    prompt = PromptBuilder(template.tokenizer).chat(messages)
    assert "secret" not in template.tokenizer.decode(prompt.token_ids)
    assert prompt.token_ids.tolist() == template.renders(messages)
    assert prompt.changed_contents == 1


# ---- texts --------------------------------------------------------------------------------------------------------

CODE = [
    "def f(x):\n    return x  # no\n",
    "<table><td>1</td></table>",
    "if (a < b) {\n\t\treturn;\n}\n",
    "<code>x</code>\n\n",
]
CODE += ["<h1>Title</h1>\n\n\n", "    ", "        x", "|||EMAIL_ADDRESS|||", "\n\n\n\n", "\t\t\t", "a  b   c    d"]
texts = st.lists(st.sampled_from([*WORDS, *SPACES, *CODE]) | st.text(max_size=6), max_size=8).map("".join)
special = st.sampled_from(["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[SEP]", "[UNK]", "<unk>"])
prompts = st.lists(texts | special | st.sampled_from(TRICKY), max_size=4).map("".join)
ENCODERS = {name: make() for name, make in MAKERS.items()}
BUILDERS = {name: PromptBuilder(tokenizer) for name, tokenizer in ENCODERS.items()}
NO_DUMMY_PREFIX = ["byte_level", "byte_level bos", "neox", "gemma", "word_level"]


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=share(150))
@given(text=prompts)
def test_encode_equal(name: str, text: str) -> None:
    """A caller's own text has the tokenizer's ids, special tokens and the tokens around it included."""
    tokenizer, builder = ENCODERS[name], BUILDERS[name]
    expected = tokenizer(text)["input_ids"]
    assert builder.text_ids(text) == expected
    assert builder.text_ids(text, special=False) == tokenizer(text, add_special_tokens=False)["input_ids"]
    if builder.text_ids(text, special=False):
        assert builder.prompt([text]).token_ids.tolist() == expected


@pytest.mark.parametrize("name", NO_DUMMY_PREFIX)
@settings(max_examples=share(150))
@given(text=texts)
def test_passages_have_the_tokenizers_ids(name: str, text: str) -> None:
    """Added tokens that are ordinary text are not cut."""
    assert BUILDERS[name].encode(text) == ENCODERS[name](text, add_special_tokens=False)["input_ids"]
