"""Builds a prompt from passages and a question: the texts around them, chat or plain. Templates from a TOML file:
layout, instructions of the map methods, stop texts of answers."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf.engine import BlendEngine
from cacheblend.engines.tokens import Content, Passage

DEFAULT = "bare"
_ALLOWED = {
    "heading": {"number", "title"},
    "question": {"question"},
    "map_question": {"question"},
    "reduce_answer": {"number", "answer"},
    "reduce_question": {"question", "answers"},
}


@dataclass(frozen=True)
class PromptLayout:
    """The texts around the passages and the question. A prompt has this order:

    system | before | heading 1 | passage 1 | separator | heading 2 | passage 2 | separator | question

    Passages are chunks, everything else is plain text. In a chat, `system` is a message of its own and the rest is
    the user's message; in a plain prompt, a separator follows `system`.
    """

    system: str = ""  # system prompt; empty for none
    before: str = ""  # text in front of the passages
    heading: str = ""  # text in front of each passage; ``{number}`` counts from 1, ``{title}`` is the passage's title
    separator: str = "\n\n"  # text that follows each passage
    question: str = "{question}"  # the last text; ``{question}`` is replaced by the question
    chat: bool | None = None  # whether to use the chat template; None: if the tokenizer has one

    def is_chat(self, engine: BlendEngine) -> bool:
        return bool(getattr(engine.tokenizer, "chat_template", None)) if self.chat is None else self.chat

    def parts(self, engine: BlendEngine, passages: Sequence[Passage], question: str) -> list[Any]:
        """The input of `BlendEngine.prompt`: texts and passages, or chat messages."""
        content: list[Content] = [self.before] if self.before else []
        for number, passage in enumerate(passages, start=1):
            heading = fill(self.heading, {"number": str(number), "title": passage.title})
            content += [*([heading] if heading else []), passage, self.separator]
        content.append(fill(self.question, {"question": question}))
        if not self.is_chat(engine):
            return [self.system + self.separator, *content] if self.system else content
        messages: list[Any] = [{"role": "system", "content": self.system}] if self.system else []
        return [*messages, {"role": "user", "content": content}]

    def prompt(self, engine: BlendEngine, passages: Sequence[Passage], question: str) -> Prompt:
        """Builds the prompt and checks it against the model's limits; raises as `BlendEngine.prompt`."""
        return engine.prompt(self.parts(engine, passages, question))


def fill(template: str, values: Mapping[str, str]) -> str:
    """`template` with each ``{name}`` in `values` replaced; all other braces are kept."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda found: values[found[1]], template)


@dataclass(frozen=True)
class Template(PromptLayout):
    """Layout of the prompts of an evaluation with all passages; and those of the map methods."""

    map_question: str = ""  # last text of a prompt with a single passage; empty: the same as `question`
    reduce_answer: str = "{answer}\n"  # form of each joined answer, with ``{number}`` and ``{answer}``
    reduce_question: str = "{answers}\n{question}"  # last text of the prompt over the joined ``{answers}``
    stop: tuple[str, ...] = ()  # texts that end an answer

    @property
    def map_layout(self) -> PromptLayout:
        """Layout of a prompt with a single passage."""
        return replace(self, question=self.map_question or self.question)

    @property
    def reduce_layout(self) -> PromptLayout:
        """Layout of a prompt without passages, whose last text is made by `reduce_text`."""
        return PromptLayout(self.system, separator=self.separator, chat=self.chat)

    def reduce_text(self, answers: Sequence[str], question: str) -> str:
        """The joined answers of single passages, followed by the question."""
        joined = (
            fill(self.reduce_answer, {"number": str(number), "answer": answer.strip()})
            for number, answer in enumerate(answers, start=1)
        )
        return fill(self.reduce_question, {"answers": "".join(joined), "question": question})


def read_template(name: str = DEFAULT, path: Path | None = None) -> Template:
    """Reads a template from a TOML file with one table per template; None: from the shipped ones. Raises
    `InvalidInputError`: the file cannot be read, has no such template, or the template has an invalid field."""
    where = "the shipped templates" if path is None else str(path)
    try:
        text = (files("cacheblend.evaluation") / "templates.toml" if path is None else path).read_text("utf-8")
        found = tomllib.loads(text)
    except OSError as error:
        raise InvalidInputError(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise InvalidInputError(f"{where}: not TOML: {error}") from error
    if not isinstance(found.get(name), dict):
        names = ", ".join(key for key, value in found.items() if isinstance(value, dict))
        raise InvalidInputError(f"{where}: there is no template [{name}]; the file has {names or 'none'}")
    table, where = found[name], f"{where}, [{name}]"
    known = [field.name for field in fields(Template)]
    for key, value in table.items():
        if key not in known:
            raise InvalidInputError(f"{where}: there is no field {key!r}; fields are {', '.join(known)}")
        if key == "chat":
            good, wanted = isinstance(value, bool), "true or false"
        elif key == "stop":
            good = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
            wanted = "a list of texts, none of them empty"
        else:
            good, wanted = isinstance(value, str), "a text"
        if not good:
            raise InvalidInputError(f"{where}, field {key!r}: expected {wanted}, found {value!r}")
        unknown = set(re.findall(r"\{([a-z_]+)\}", value)) - _ALLOWED[key] if key in _ALLOWED else set()
        if unknown:
            allowed = ", ".join(f"{{{slot}}}" for slot in sorted(_ALLOWED[key]))
            raise InvalidInputError(f"{where}, field {key!r}: {{{unknown.pop()}}} is unknown there, only {allowed}")
    return Template(**{**table, "stop": tuple(table.get("stop", ()))})
