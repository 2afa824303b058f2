"""Examples for the server's page: six notes, and questions about them in chosen orders; and what is right in any order.

The questions and orders were chosen from many, so that full reuse of the notes' KV answers some of them wrong and
blending answers them right. They illustrate; `python -m lab suite nano` measures.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from cacheblend.core.errors import InvalidInputError
from cacheblend.nano import lexicon
from cacheblend.nano.language import UNASKED, Sentence, read_scene

NOTES = Path(str(files("cacheblend.nano"))) / "notes.json"  # the texts of the notes, drawn by the lab's `nano.data`


@dataclass(frozen=True)
class Example:
    """A question about notes in an order."""

    title: str  # a few words for people
    about: str  # what it shows, in a sentence
    question: str
    order: tuple[int, ...]  # indices of the `notes`


_DRAWN = (0, 1, 2, 3, 4, 5)
EXAMPLES = (
    Example("Two notes", "One note says “him”, an earlier one says who that is.", "Who has the bowl?", _DRAWN),
    Example("Two notes swapped", "In this order “him” is someone else.", "Who has the bowl?", (0, 1, 3, 2, 4, 5)),
    Example("Four notes", "Each of them says where the answer goes on.", "Who has the cart?", _DRAWN),
    Example("One note", "It says so by itself, so full reuse is right, too.", "Who has the saw?", _DRAWN),
)


class ExamplePlace(NamedTuple):
    """A sentence that an answer needs: the index of its passage, and its characters in it, `stop` excluded."""

    passage: int
    start: int
    stop: int


class ExampleAnswer(NamedTuple):
    """What is right, and the sentences that say so, in the order in which they are read."""

    text: str
    places: tuple[ExamplePlace, ...]


class _Line(NamedTuple):
    """A sentence, where it stands, and the thing whose owner it states and that owner, if it states one."""

    place: ExamplePlace
    words: list[str]
    thing: str
    owner: str


def notes() -> tuple[str, ...]:
    """The texts of the notes; each is a passage."""
    return tuple(json.loads(NOTES.read_text(encoding="utf-8")))


def answer_of(question: str, texts: Sequence[str]) -> ExampleAnswer | None:
    """What is right, by the rules of the language that the model knows; the texts are passages in the prompt's order.
    The question is "Who has the boot?", "Who has the boot and the bell?", or "Do the boot and the bell have the same
    owner?". None if a text or the question is not in that language, or if its rules leave the answer open."""
    asked = question.strip().removesuffix("?").split()
    things = [word for word in asked if word in lexicon.OBJECTS]
    named = " and ".join(f"the {thing}" for thing in things)
    known = [f"Who has {named}", f"Do {named} have the same owner"][: len(things)]
    if len(things) not in (1, 2) or " ".join(asked) not in known:
        return None
    try:
        scene = read_scene([[Sentence(words) for words, _, _ in _sentences(text)] for text in texts])
    except InvalidInputError:
        return None
    facts = {fact.thing: fact for fact in scene.facts}
    if any(thing in facts and facts[thing].category == UNASKED for thing in things):
        return None
    owners = [facts[thing].owner if thing in facts else lexicon.UNKNOWN for thing in things]
    if len(owners) > 1 and lexicon.UNKNOWN in owners:
        return None  # the model was never asked such a question
    lines = list[_Line]()
    for number, (passage, written) in enumerate(zip(scene.passages, texts, strict=True)):
        for sentence, (words, start, stop) in zip(passage, _sentences(written), strict=True):
            thing, owner = next((each for each in sentence.knows.values() if each[0]), ("", ""))
            lines.append(_Line(ExamplePlace(number, start, stop), words, thing, owner))
    text = " and ".join(owners)
    if question.startswith("Do "):
        text += ": yes" if owners[0] == owners[1] else ": no"
    return ExampleAnswer(text, tuple(sorted({place for thing in things for place in _needed(lines, thing)})))


def _sentences(text: str) -> Iterator[tuple[list[str], int, int]]:
    """Each sentence's words, the full stop included, and where it starts and stops in the text."""
    for found in re.finditer(r"[^.\s][^.]*(\.|$)", text):
        words = found.group().rstrip(".").split()
        yield [*words, "."], found.start(), found.end()


def _needed(lines: Sequence[_Line], thing: str) -> list[ExamplePlace]:
    """The sentence that states a thing's owner, behind those that say whom or what it means."""
    at = next((at for at in reversed(range(len(lines))) if lines[at].thing == thing), None)  # the last word counts
    if at is None:
        return []
    line = lines[at]
    if line.words[-4:-2] == ["with", "the"]:
        return [*_needed(lines[:at], line.words[-2]), line.place]
    named = [] if line.owner in line.words else [each.place for each in lines[:at] if line.owner in each.words]
    return [*named[-1:], line.place]
