"""Prompt templates from a TOML file: layouts, the instructions of the map arms, and where an answer ends."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf.layout import SEPARATOR, PromptLayout, fill

DEFAULT = "bare"
_ALLOWED = {
    "heading": {"number", "title"},
    "question": {"question"},
    "map_question": {"question"},
    "reduce_answer": {"number", "answer"},
    "reduce_question": {"question", "answers"},
}


@dataclass(frozen=True)
class Template:
    """How the prompts of an evaluation are laid out; the first fields are those of `PromptLayout`.

    Attributes:
        system, before, heading, separator, question, chat: see `PromptLayout`.
        map_question: the last text where a passage is asked alone; empty: as `question`.
        reduce_answer: one of the answers that are joined, ``{number}`` and ``{answer}``.
        reduce_question: the last text where the joined ``{answers}`` are asked once more.
        stop: texts that end an answer.
    """

    system: str = ""
    before: str = ""
    heading: str = ""
    separator: str = SEPARATOR
    question: str = "{question}"
    map_question: str = ""
    reduce_answer: str = "{answer}\n"
    reduce_question: str = "{answers}\n{question}"
    chat: bool | None = None
    stop: tuple[str, ...] = ()

    @property
    def layout(self) -> PromptLayout:
        """Of a prompt with its passages."""
        return PromptLayout(self.system, self.before, self.heading, self.separator, self.question, self.chat)

    @property
    def map_layout(self) -> PromptLayout:
        """Of one passage asked alone."""
        question = self.map_question or self.question
        return PromptLayout(self.system, self.before, self.heading, self.separator, question, self.chat)

    @property
    def reduce_layout(self) -> PromptLayout:
        """Of a prompt without passages, whose last text is `reduce_text`'s."""
        return PromptLayout(self.system, separator=self.separator, chat=self.chat)

    def reduce_text(self, answers: Sequence[str], question: str) -> str:
        """The answers of single passages, joined, and the question once more."""
        joined = (
            fill(self.reduce_answer, {"number": str(number), "answer": answer.strip()})
            for number, answer in enumerate(answers, start=1)
        )
        return fill(self.reduce_question, {"answers": "".join(joined), "question": question})


def read_template(name: str = DEFAULT, path: Path | None = None) -> Template:
    """A template of a file, or of those that ship.

    Args:
        name: of the template.
        path: a TOML file, a table each template; None: the shipped ones.

    Raises:
        InvalidInputError: the file cannot be read, has no such template, or the template a field it must not have.
    """
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
        raise InvalidInputError(f"{where}: there is no template [{name}]; there are: {names or 'none'}")
    return _template(found[name], f"{where}, [{name}]")


def _template(table: dict[str, Any], where: str) -> Template:
    known = {field.name: field for field in fields(Template)}
    for key, value in table.items():
        if key not in known:
            raise InvalidInputError(f"{where}: there is no field {key!r}; there are {', '.join(known)}")
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
            raise InvalidInputError(f"{where}, field {key!r}: {{{unknown.pop()}}} means nothing there, only {allowed}")
    return Template(**{**table, "stop": tuple(table.get("stop", ()))})
