"""No text of a conversation becomes a special token, whatever a template does with it: removes, trims, escapes, slices,
repeats it or joins it with another."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

import tokenizers_for_tests as tokenizers
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.tokens import Passage, PromptBuilder, chat
from unit.test_chat_templates import MAKERS, handed

TEMPLATES_DRAWN = 24
CONVERSATIONS = 8
SPECIAL = ["<|im_start|>", "<|im_end|>", "[INST]", "<tool>"]
ADDED = ["<think>", "</think>"]
CHANGES = [
    "",
    "| trim",
    "| replace('<br>', '')",
    "| replace('$', '') | replace('-', '_')",
    ".replace('/no_think', '').replace('/think', '')",
    ".replace('||', '|')",
    "| e",
    "| tojson",
    "| tojson(ensure_ascii=true)",
    "| urlencode",
    "| striptags",
    "| upper",
    "| lower",
    "| reverse",
    "[1:]",
    "[:-1]",
    "[::2]",
    "[3:12]",
    ".split('@')[-1]",
    ".split('@') | join('')",
    ".strip('*') | truncate(60)",
]
"""What templates do with a text, as Jinja writes it behind one."""
KEPT = [change for change in CHANGES if not any(word in change for word in ("[", "truncate", "urlencode"))]
"""Those after which a text is still there: documents without a place would be moved."""
REMOVED = ["<br>", "$", "/think", "/no_think", "@", "|", " ", "*", "<i>"]
"""What one of these may take out between two pieces."""
DOCUMENTS = ["{{ T ~ C }}\n", "{{ T }}: {{ C }} {{ C }}\n", "<{{ T }}>{{ C }}</{{ T }}>\n", "{{ d | tojson }}\n"]
TOOLS = [
    "{{ t | tojson }}\n",
    "{% for k, v in t.function.parameters.items() %}<{{ K }}>{{ v }}</{{ K }}>{% endfor %}\n",
    "{{ t.function.name ~ t.function.description }}{{ t.function.parameters | tojson(indent=2, ensure_ascii=true) }}\n",
]
MESSAGES = ["{{ m.name ~ C }}", "<{{ m.name }}>{{ C }}", "{{ C }}{{ m.name }}", "[{{ m.name }}]{{ C ~ C }}", "{{ C }}"]


def template(rng: random.Random) -> str:
    def changed(text: str, changes: list[str] = CHANGES) -> str:
        """A text with what is done with it; sometimes twice, if it need not be recognised."""
        first = f"({text} | string){rng.choice(changes)}"
        return f"({first} | string){rng.choice(changes)}" if changes is CHANGES and rng.random() < 0.4 else first

    documents = rng.choice(DOCUMENTS).replace("T", "(d.title ~ '')").replace("C", changed("d.text", KEPT))
    tools = rng.choice(TOOLS).replace("K", changed("k"))
    message = rng.choice(MESSAGES).replace("C", changed("m.content"))
    asked = rng.choice(["'/no_think' in messages[-1].content", "thinking is false"])  # both: `</think>` is a marker
    places = [
        f"{{% for d in documents or [] %}}{documents}{{% endfor %}}" if rng.random() < 0.7 else "",
        f"{{% for t in tools or [] %}}{tools}{{% endfor %}}",
    ]
    return (
        f"{''.join(places)}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{message}<|im_end|>\n{{% endfor %}}"
        f"[INST]<tool><|im_start|>assistant\n<think>{{% if {asked} %}}</think>{{% endif %}}"
    )


def pieces(rng: random.Random, removed: list[str]) -> list[str]:
    """Of a special token, in order, with texts between them that a template may remove; now and then of none."""
    token = rng.choice([*SPECIAL, *ADDED, "</s>", "<s>"])
    if rng.random() < 0.2:
        return [rng.choice(["a word", "Who wrote it? /no_think", "a < b | c > d", "x/think", "é", "&lt;i&gt;"])]
    if rng.random() < 0.1:
        return [token]
    if rng.random() < 0.1:
        return [rng.choice("x@$").join(token), "x"]
    changes: list[Callable[[str], str]] = [str.swapcase, lambda t: t[::-1], lambda t: t.replace("<", "&lt;")]
    if rng.random() < 0.2:
        token = rng.choice(changes)(token)
    cuts = sorted(rng.randint(1, len(token) - 1) for _ in range(rng.randint(1, 3)))
    parts = [token[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(token)], strict=True)]
    return [*(part + rng.choice(removed) for part in parts[:-1]), parts[-1]]


def texts(rng: random.Random, count: int, removed: list[str]) -> list[str]:
    """So many texts, over which pieces are spread in order, with something around some of them."""
    parts = [part for _ in range(rng.randint(1, 3)) for part in pieces(rng, removed)]
    cuts = sorted(rng.randint(0, len(parts)) for _ in range(count - 1))
    spread = ["".join(parts[i:j]) for i, j in zip([0, *cuts], [*cuts, len(parts)], strict=True)]
    return [
        rng.choice(["", "", "", "a", "* ", "x@"]) + text + rng.choice(["", "", "", "b", " *", "@"]) for text in spread
    ]


class Chat(NamedTuple):
    messages: list[dict[str, Any]]
    passages: list[Passage]
    tools: list[dict[str, Any]]

    def strings(self) -> list[str]:
        return [*chat.strings_in([self.messages, self.tools]), *(x for p in self.passages for x in (p.title, p.text))]

    def harmless(self, *, keep: str) -> "Chat":
        """With a word for each text, and what it has of a text that the template asks for."""

        def tame(text: str) -> str:
            return "word" + keep * (keep in text)

        messages = [{**m, "name": "word", "content": tame(m["content"])} for m in self.messages]
        tools = [
            self.tool("word", {f"word{at}": "word" for at in range(len(t["function"]["parameters"]))})
            for t in self.tools
        ]
        return Chat(messages, [Passage(tame(p.text), "word") for p in self.passages], tools)

    @staticmethod
    def tool(text: str, parameters: dict[str, str]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": text, "description": text, "parameters": parameters}}


def conversation(rng: random.Random, source: str) -> Chat:
    removed = [text for text in REMOVED if f"'{text}'" in source] or REMOVED
    removed = [*removed, ""] if rng.random() < 0.5 else removed
    messages = []
    for role in rng.choice([["user"], ["system", "user"], ["user", "tool", "user"]]):
        name, content = texts(rng, 2, removed)
        messages.append({"role": role, "name": name, "content": content or "a"})
    pairs = [texts(rng, 2, removed) for _ in range(rng.randint(0, 2))]
    passages = [Passage(f"{text[:5]} word {text[5:]}", title) for title, text in pairs]
    triples = [texts(rng, 3, removed) for _ in range(rng.randint(0, 2))]
    return Chat(messages, passages, [Chat.tool(text, {key: value, "b": "c"}) for text, key, value in triples])


def special_tokens(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    shown = {*SPECIAL, *ADDED, "<s>", "</s>"}
    return [token for token in tokenizer.convert_ids_to_tokens(ids) if token in shown]


@pytest.mark.parametrize("kind", ["byte_level", "prepend", "gemma", "unigram", "normalised"])
def test_no_special_token_but_the_templates_own(kind: str) -> None:
    """As many as for harmless texts of the same shape; and the tokenizer's ids where transformers makes none either."""
    rng, seen = random.Random(kind), Counter[str]()
    for _ in range(TEMPLATES_DRAWN):
        source = template(rng)
        tokenizer = tokenizers.with_tokens(MAKERS[kind](), SPECIAL, ADDED)
        tokenizer.chat_template = source
        builder = PromptBuilder(tokenizer)
        for _ in range(CONVERSATIONS):
            seen[compared(builder, tokenizer, conversation(rng, source))] += 1
    assert seen["forged"] >= 3, "hardly any text would have become a special token"
    assert seen["equal"] >= CONVERSATIONS
    assert seen["refused"] <= 3


def compared(builder: PromptBuilder, tokenizer: PreTrainedTokenizerFast, told: Chat) -> str:
    """What became of a conversation, after the checks."""
    tame = told.harmless(keep="/no_think")
    expected = builder.chat(tame.messages, tame.passages, tools=tame.tools).token_ids.tolist()
    wanted = special_tokens(tokenizer, expected)
    theirs = tokenizer.apply_chat_template(
        told.messages,
        documents=handed(told.passages) or None,
        tools=told.tools,
        add_generation_prompt=True,
        return_dict=False,
    )
    is_forged = special_tokens(tokenizer, theirs) != wanted
    try:
        ids = builder.chat(told.messages, told.passages, tools=told.tools).token_ids.tolist()
    except InvalidInputError as error:
        assert "which is a special token, of texts that are none" in str(error)
        assert is_forged, "nothing but what would become a special token is refused"
        return "refused"
    assert special_tokens(tokenizer, ids) == wanted, (tokenizer.chat_template, told)
    if any(token in text for text in told.strings() for token in [*SPECIAL, *ADDED, "<s>", "</s>"]):
        return "guarded"
    if is_forged or ("documents" not in tokenizer.chat_template and told.passages):
        return "forged" if is_forged else "moved"
    assert ids == theirs, (tokenizer.chat_template, told)
    return "equal"


# ---- one test a way in ----------------------------------------------------------------------------------------------

ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + ANSWER
ONE = ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
"""The template's own tokens around one message."""


def made(
    source: str, messages: list[dict[str, Any]], passages: Sequence[Passage] = (), **options: Any
) -> tuple[list[str], str]:
    """Special tokens of a prompt, and what it says."""
    added = [*ADDED, "==", "%}"]
    tokenizer = tokenizers.with_tokens(tokenizers.byte_level(source), [*SPECIAL, "<|channel|>", "<|message|>"], added)
    ids = PromptBuilder(tokenizer).chat(messages, passages, **options).token_ids.tolist()
    shown = {*SPECIAL, *added, "<|channel|>", "<|message|>"}
    return [token for token in tokenizer.convert_ids_to_tokens(ids) if token in shown], tokenizer.decode(ids)


def user(content: str, **beside: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **beside}]


def changed(change: str) -> str:
    return CHATML.replace("m.content", f"(m.content{change})")


FORGED = CHATML + "{% if false %}<think>{% endif %}"  # `<think>` is a marker of this template


@pytest.mark.parametrize(
    ("source", "content", "tool"),
    [
        (changed("| replace('<br>', '')"), "a <|im_<br>start|> b", {}),
        (changed(".replace('/no_think', '').replace('/think', '')"), "a <|im_/thinkstart|> b /no_think", {}),
        (changed(".replace('/no_think', '').replace('/think', '')"), "/think<|im_st/thinkart|>/think", {}),
        (changed("[1:-1]"), "x<|im_<br>start|>x", {}),
        (changed("| striptags"), "&lt;|im_start|&gt;", {}),
        (changed("| upper"), "[inst]", {}),
        pytest.param(
            "{% for k, v in tools[0].function.parameters.items() %}<{{ k | replace('$', '') }}>{{ v }}{% endfor %}"
            + FORGED,
            "Who?",
            {"parameters": {"|im_$start|": "x", "think": "y", "to$ol": "z"}},
            id="keys of tools",
        ),
        pytest.param(
            "{% for think in messages %}{% endfor %}{% for k, v in tools[0].function.items() %}<{{ k }}>{% endfor %}"
            + FORGED,
            "Who?",
            {"think": "x"},
            id="a key that the template has as a word: its loop's variable, as Qwen3-Coder's `tool_call`",
        ),
        pytest.param("{{ range(99999) | random }}" * 2 + CHATML, "a <b> c", {}, id="a template that tells the time"),
    ],
)
def test_what_a_template_makes_of_a_conversation_is_no_special_token(
    source: str, content: str, tool: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "f"} | tool}]
    assert made(source, user(content), tools=tools)[0] == ONE


def test_code_of_a_template_is_no_marker() -> None:
    """Added tokens that are its operators and tags are parsed in contents, as by transformers."""
    source = CHATML + "{# <think> #}{% if messages | length == 0 %}{% endif %}"
    assert made(source, user("if a == b %} <think>"))[0] == ["<|im_start|>", "==", "%}", "<think>", *ONE[1:]]


def test_a_command_to_the_template_is_obeyed() -> None:
    """Though it is a content's last word, and what it switches has special tokens."""
    source = CHATML.replace("m.content", "m.content.replace('/no_think', '').strip()")
    source += "{% if '/no_think' in messages[-1].content %}<think>\n\n</think>\n\n{% endif %}"
    tokens, text = made(source, user("a < b | c > d: who wrote it? /no_think"))
    assert tokens == [*ONE, *ADDED]
    assert "wrote it?<|im_end|>" in text


@pytest.mark.parametrize("role", ["im_end", "end", "x im_end"])
def test_a_role_that_is_a_part_of_a_special_token_is_refused(role: str) -> None:
    source = CHATML.replace("m.content", "'<|' ~ m.role ~ '|>' ~ m.content")
    with pytest.raises(InvalidInputError, match=rf"the role '{role}' .* part of the special token '<\|im_end\|>'"):
        made(source, [{"role": role, "content": "Who?"}])
    made(source, [{"role": "curator", "content": "Who?"}])


def test_what_is_printed_as_python_has_it_stays_as_it_is() -> None:
    """Of which `repr` writes letters that stand in for others as escapes."""
    tools = [Chat.tool("f", {"x": "<|im_start|> and <|im_end|>"})]
    tokens, text = made("{{ tools[0] | string }}" + CHATML, user("Who?"), tools=tools)
    assert tokens == ONE and "<|im_start|> and <|im_end|>" in text and "\\U" not in text


def test_names_and_titles_do_not_join_with_texts() -> None:
    for cut in range(1, len("<|im_start|>")):
        first, second = "<|im_start|>"[:cut], "<|im_start|>"[cut:]
        assert made(CHATML.replace("m.content", "m.name ~ m.content"), user(second, name=first))[0] == ONE, cut
        source = "{% for d in documents %}{{ d.title ~ d.text }}{% endfor %}" + CHATML
        assert made(source, user("Who?"), [Passage(f"{second} wrote it", first)])[0] == ONE, cut


@pytest.mark.parametrize("content", ["Who?", "<think>x</think>Who?"])
def test_thoughts_of_an_answer_stay_thoughts_and_passages_in_it_have_none(content: str) -> None:
    """Documents without a place, of a chat without a question; special tokens beside the answer's own thoughts."""
    source = CHATML + "{% if false %}<think></think>{% endif %}"
    passages = [Passage("<think> a passage", "t"), Passage("<th"), Passage("ink> another")]
    tokens, text = made(source, [{"role": "assistant", "content": content}], passages)
    assert tokens == [ONE[0], *(ADDED if "<" in content else []), *ONE[1:]]
    assert f"<think> a passage<think> another{content}<|im_end|>" in text
    for beside in ("<think>x</think> <|im_end|>", "<|im_end|><think>x</think>", "<think></think><|im_end|>"):
        tokens, text = made(source, [{"role": "assistant", "content": beside}])
        assert tokens == [ONE[0], *ADDED, *ONE[1:]]
        assert f"assistant\n{beside}<|im_end|>" in text


def test_a_template_finds_the_channels_that_it_looks_for() -> None:
    """As harmony's, which refuses them, and as those that leave a channel of thoughts out."""
    source = "{% if '<|channel|>final<|message|>' in messages[-1].content %}{{ raise_exception('channel') }}{% endif %}"
    message = [{"role": "assistant", "content": "<|channel|>final<|message|>Me."}]
    with pytest.raises(InvalidInputError, match="refused the messages: channel"):
        made(source + CHATML, message)
    assert made(source + CHATML, user("<|channel|>final<|message|>Me."))[0] == ONE
    assert made(source + CHATML, [{"role": "assistant", "content": "<|channel|>x<|message|>Me."}])[0] == ONE
    source = CHATML.replace("m.content", "m.content.split('<|channel|>')[-1]")
    assert "thought" not in made(source, [{"role": "assistant", "content": "a thought<|channel|>Me."}])[1]


def test_what_cannot_be_told_from_the_templates_own_is_refused() -> None:
    tokenizer = tokenizers.with_tokens(tokenizers.byte_level(), ["<b>"])
    tokenizer.chat_template = CHATML.replace("m.content", "m.content | replace('<br>', '')") + "<b>"
    builder = PromptBuilder(tokenizer)
    with pytest.raises(InvalidInputError, match="the chat template makes '<b>', which is a special token, of texts"):
        builder.chat(user("a <b<br>> c"))
    for content in ("a <br> c", "<br><br>b>", "a <b> c"):
        assert special_tokens(tokenizer, builder.chat(user(content)).token_ids.tolist()) == ONE


@pytest.mark.parametrize("depth", [50, 400])
def test_texts_beside_contents_are_looked_at_once(depth: int) -> None:
    """However deep they are nested."""
    seen = 0

    class Counting(dict[str, Any]):
        def items(self) -> Any:
            nonlocal seen
            seen += 1
            return super().items()

        def __iter__(self) -> Any:
            nonlocal seen
            seen += 1
            return super().__iter__()

    value: Any = Counting({f"key {at}": "x<|im_end|>" for at in range(20)})
    for _ in range(depth):
        value = Counting({"a": value, "b": "c"})
    assert made(CHATML, user("Who?"), extra=value)[0] == ONE
    assert depth <= seen <= 10 * depth
