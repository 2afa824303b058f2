"""Templates: those that ship, those of a file, and what a file must not have."""

from pathlib import Path

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf.layout import PromptLayout, fill
from cacheblend.evaluation import Template, read_template

FILE = """
[short]
system = "Be short."
heading = "Passage {number}, {title}:\\n"
question = "Q: {question}\\nA:"
reduce_answer = "{number}. {answer}\\n"
reduce_question = "{answers}So, {question}"
stop = ["\\n"]
chat = false
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "templates.toml"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("name", ["bare", "qa", "summary"])
def test_shipped_templates_can_be_read(name: str) -> None:
    template = read_template(name)
    assert "{question}" in template.question
    assert "{question}" in template.map_layout.question
    assert "Ann" in template.reduce_text(["Ann", "Bob"], "Who?") and "Who?" in template.reduce_text(["Ann"], "Who?")


def test_the_default_is_nothing_but_passages_and_question() -> None:
    assert read_template() == Template()
    assert Template().layout == PromptLayout()


def test_a_template_of_a_file(file: Path) -> None:
    template = read_template("short", file)
    assert template.layout.system == "Be short."
    assert template.layout.chat is False
    assert template.stop == ("\n",)
    assert template.map_layout.question == "Q: {question}\nA:"  # as `question`, where there is none of its own


def test_joined_answers_are_numbered_stripped_and_never_read_as_templates(file: Path) -> None:
    text = read_template("short", file).reduce_text([" Ann\n", "{question}"], "who {answers}?")
    assert text == "1. Ann\n2. {question}\nSo, who {answers}?"


def test_only_named_slots_are_filled() -> None:
    assert fill('{"a": {question}} {x}', {"question": "{x}?"}) == '{"a": {x}?} {x}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[short]\nsytem = 'x'", r"\[short\]: there is no field 'sytem'; fields are system"),
        ("[short]\nsystem = 3", r"\[short\], field 'system': expected a text, found 3"),
        ("[short]\nchat = 'yes'", r"field 'chat': expected true or false, found 'yes'"),
        ("[short]\nstop = 'x'", r"field 'stop': expected a list of texts"),
        ("[short]\nstop = ['']", r"field 'stop': expected a list of texts, none of them empty"),
        ("[short]\nquestion = '{context}'", r"field 'question': \{context\} is unknown there, only \{question\}"),
        ("[other]\nsystem = 'x'", r"there is no template \[short\]; the file has other"),
        ("short = 3", r"there is no template \[short\]; the file has none"),
        ("[short", r"templates.toml: not TOML"),
    ],
)
def test_a_wrong_file_is_named_with_template_and_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "templates.toml"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        read_template("short", file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"none.toml cannot be read"):
        read_template("short", tmp_path / "none.toml")
