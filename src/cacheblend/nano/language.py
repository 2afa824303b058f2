"""What a passage of the shipped model's language says: sentences, the facts that they state, and how they are read.

A pronoun refers to the last named person (or firm) of its kind, anywhere earlier in the prompt: its antecedent may be
in the same passage, in an earlier one, or nowhere. The generator (the lab's `nano.scenes`) knows the facts of what it
draws; in another order pronouns refer to other people, and `read_scene` derives the facts from words alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cacheblend.core.errors import InvalidInputError
from cacheblend.nano import lexicon
from cacheblend.nano.lexicon import Kind

CHAINED_TO = {"direct": "chain", "local": "chain", "local-hard": "chain", "cross": "chain2", "cross-hard": "chain2"}
CHAINED_TO |= {"chain2": "chain3"}
"""Category of a thing that lies with another one, by the other one's category; with others it cannot lie."""


@dataclass(frozen=True)
class Fact:
    """The owner of a thing, and where it is stated."""

    thing: str  # a word of `lexicon.OBJECTS`
    owner: str  # a name, or ``unknown``
    category: str  # of the question for the thing; ``local-hard`` is not asked in evaluations
    passage: int  # index of the passage that states it


@dataclass
class Sentence:
    """One sentence."""

    words: list[str]  # in order, the full stop included
    knows: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Index of a word -> (thing, owner), the fact known from that word on; either may be empty."""


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


UNASKED = "unasked"
"""Category of a thing whose sentence refers to another thing with an owner that is unknown or stated later.
The generator draws no such sentence. The thing counts as mentioned, but has no owner and is not asked for."""

_FILLERS = frozenset(map(tuple, lexicon.FILLERS))
Known = dict[int, tuple[str, str]]  # see `Sentence.knows`


def read_scene(passages: Sequence[Sequence[Sentence]]) -> Scene:
    """The scene formed by these passages in this order; only the words of their sentences are read. In the order of the
    generator the result equals the drawn scene, except that `unmentioned` holds all things without a sentence of their
    own instead of four. Raises `InvalidInputError`: a sentence that is not of this language."""
    return _Reader().read(passages)


class _Reader:
    """Reads the sentences in order; keeps the last named owner of each kind, and the facts so far."""

    def __init__(self) -> None:
        self.facts: dict[str, Fact] = {}  # by thing
        self.last: dict[Kind, tuple[str, int]] = {}  # the last named owner, and the passage
        self.unresolved: dict[str, str] = {}  # thing -> the other thing that it refers to, not mentioned so far
        self.passage = 0

    def read(self, passages: Sequence[Sequence[Sentence]]) -> Scene:
        read = []
        for number, passage in enumerate(passages):
            self.passage = number
            read.append([Sentence(list(sentence.words), self._sentence(sentence.words)) for sentence in passage])
        for thing, other in self.unresolved.items():
            if other in self.facts:
                self.facts[thing] = replace(self.facts[thing], category=UNASKED)
        unmentioned = tuple(thing for thing in lexicon.OBJECTS if thing not in self.facts)
        return Scene(read, list(self.facts.values()), unmentioned)

    def _sentence(self, words: Sequence[str]) -> Known:
        known: Known | None
        if tuple(words[:-1]) in _FILLERS:
            known = {}
        elif len(words) > 2 and words[0] in lexicon.ADVERBS:
            known = {} if words[1] in lexicon.KIND_OF else None  # "Later Vaden sat down."
            if known is not None:
                self._record_name(words[1])
        elif len(words) > 2 and words[0] == "The" and words[1] in lexicon.OBJECTS:
            known = self._given(words) or self._beside(words)
        else:
            known = self._taken(words)
        if known is None:
            raise InvalidInputError(f"{spell(words)!r} is no sentence of the model's language")
        return known

    def _given(self, words: Sequence[str]) -> Known | None:
        """ "The boot belongs to Vaden." or "The boot belongs to him again." """
        at = 2 + _phrase_length(lexicon.GIVEN, words[2:])
        thing, who = words[1], tuple(words[at:-1])
        if at > 2 and len(who) == 1 and who[0] in lexicon.KIND_OF:
            self._record_name(who[0])
            return {at: self._record_fact(thing, who[0], "direct")}
        for kind, case in lexicon.OBJECT_CASE.items():
            tail = who[len(case) :]
            if at > 2 and who[: len(case)] == case and (not tail or list(tail) in lexicon.TAILS):
                return {at + len(case) - 1: self._record_fact(thing, *self._resolve(kind, hard=bool(tail)))}
        return None

    def _taken(self, words: Sequence[str]) -> Known | None:
        """ "He took the boot." """
        for kind, case in lexicon.SUBJECT_CASE.items():
            at = len(case)  # of the verb
            verb, thing = tuple(words[at : at + 2]), "".join(words[at + 2 : at + 3])
            if tuple(words[:at]) == case and verb in _TAKING and thing in lexicon.OBJECTS:
                known = self._record_fact(thing, *self._resolve(kind, hard=True))
                return {at - 1: ("", known[1]), at + 2: known}
        return None

    def _beside(self, words: Sequence[str]) -> Known | None:
        """ "The boot lies with the harp." """
        at, thing, other = 2 + _phrase_length(lexicon.BESIDE, words[2:]), words[1], words[-2]
        if at == 2 or tuple(words[at:-1]) != ("the", other) or other not in lexicon.OBJECTS:
            return None
        fact = self.facts.get(other)
        if fact is None:
            self.unresolved[thing] = other
            known = self._record_fact(thing, lexicon.UNKNOWN, "unanswerable")
        elif fact.category not in CHAINED_TO:
            known = self._record_fact(thing, lexicon.UNKNOWN, UNASKED)
        else:
            known = self._record_fact(thing, fact.owner, CHAINED_TO[fact.category])
        return {len(words) - 2: known}

    def _record_name(self, name: str) -> None:
        self.last[lexicon.KIND_OF[name]] = (name, self.passage)

    def _resolve(self, kind: Kind, *, hard: bool) -> tuple[str, str]:
        """The owner that a pronoun of this kind refers to here, and the category of a question for the thing."""
        if kind not in self.last:
            return lexicon.UNKNOWN, "unanswerable"
        owner, passage = self.last[kind]
        return owner, ("local" if passage == self.passage else "cross") + ("-hard" if hard else "")

    def _record_fact(self, thing: str, owner: str, category: str) -> tuple[str, str]:
        self.facts[thing] = Fact(thing, owner, category, self.passage)
        return thing, owner


_TAKING = frozenset((verb, "the") for verb in lexicon.TAKING)


def _phrase_length(phrases: Sequence[Sequence[str]], words: Sequence[str]) -> int:
    """Length of the phrase that `words` begins with; 0 if it begins with none."""
    return next((len(phrase) for phrase in phrases if list(words[: len(phrase)]) == list(phrase)), 0)
