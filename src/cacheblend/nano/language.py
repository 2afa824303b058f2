"""What a passage of the shipped model's language says: sentences, and the facts that they state.

A pronoun refers to the last named person (or firm) of its kind, anywhere earlier in the prompt: its antecedent may be
in the same passage, in an earlier one, or nowhere. `scene_reader` derives facts from words.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

CHAINED_TO = {"direct": "chain", "local": "chain", "local-hard": "chain", "cross": "chain2", "cross-hard": "chain2"}
CHAINED_TO |= {"chain2": "chain3"}
"""Category of a thing that lies with another one, by the other one's category; with others it cannot lie."""


@dataclass(frozen=True)
class Fact:
    """The owner of a thing, and where it is stated.

    Attributes:
        thing: a word of `lexicon.OBJECTS`.
        owner: a name, or ``unknown``.
        category: of the question for the thing; ``local-hard`` is not asked in evaluations.
        passage: index of the passage that states it.
    """

    thing: str
    owner: str
    category: str
    passage: int


@dataclass
class Sentence:
    """One sentence.

    Attributes:
        words: in order, the full stop included.
        knows: index of a word -> (thing, owner), the fact known from that word on; either may be empty.
    """

    words: list[str]
    knows: dict[int, tuple[str, str]] = field(default_factory=dict)


@dataclass
class Scene:
    """Passages in order, their facts, and things that no passage mentions."""

    passages: list[list[Sentence]]
    facts: list[Fact]
    unmentioned: tuple[str, ...]

    def texts(self) -> list[str]:
        """The passages as texts."""
        return [spell(word for sentence in passage for word in sentence.words) for passage in self.passages]


def spell(words: Iterable[str]) -> str:
    """Joins words to a text, without spaces before punctuation."""
    text = ""
    for word in words:
        text += word if not text or word in ".?:" else f" {word}"
    return text
