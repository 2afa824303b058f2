"""Passages and questions of the small world, drawn at random and never the same twice.

Each passage tells who has which thing. A pronoun means the person (or firm) of its kind who was named last, wherever
in the prompt that was: what it stands for may be known in its own passage, in an earlier one, or nowhere.

| category | the question's answer needs |
|---|---|
| direct | one sentence: "The boot belongs to Vaden." |
| local | a pronoun's antecedent in the same passage: "Later Vaden sat down. The boot belongs to him." |
| cross | the antecedent in an earlier passage; the pronoun ends its sentence |
| cross-hard | the same with the pronoun elsewhere: "He took the boot." |
| chain | "The boot lies with the harp.", the harp's owner stated in an earlier passage |
| chain2 | the same, the harp's owner being himself a pronoun's antecedent in a passage before that one |
| comparison | the owners of two things in two passages, and whether they are the same |
| unanswerable | what no passage tells: "unknown" |
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cacheblend.nano import lexicon
from cacheblend.nano.lexicon import Kind

CATEGORIES = ("direct", "local", "cross", "cross-hard", "chain", "chain2", "comparison", "unanswerable")
_TOLD = ("direct", "local", "local-hard", "cross", "cross-hard")  # what another thing's owner may be told by
_RESERVED = 4  # things that no passage mentions, to ask for in vain


@dataclass(frozen=True)
class Style:
    """How passages are drawn.

    Attributes:
        passages: how many.
        tokens: of each passage at most; fillers make it that long.
        dense: share of passages crowded with facts; the others hold few among much filler.
        hard: share of pronouns that do not end their sentence.
        chains: chance of a chain, twice in a crowded passage.
        direct_only: chance of a passage of nothing but stated facts.
    """

    passages: int = 6
    tokens: int = 64
    dense: float = 0.3
    hard: float = 0.25
    chains: float = 0.5
    direct_only: float = 0.0


@dataclass(frozen=True)
class Fact:
    """Who has a thing, and where one learns it.

    Attributes:
        thing: a word of `lexicon.OBJECTS`.
        owner: a name, or ``unknown``.
        category: of the question for it; ``local-hard`` is not asked in evaluations.
        passage: its index.
    """

    thing: str
    owner: str
    category: str
    passage: int


@dataclass
class Sentence:
    """Words with their full stop.

    Attributes:
        words: in order.
        knows: index of a word -> (thing, owner): what the text up to that word says; either may be empty.
    """

    words: list[str]
    knows: dict[int, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the category that it is scored under."""

    words: tuple[str, ...]
    answer: tuple[str, ...]
    category: str
    owners: dict[str, str]


@dataclass
class Scene:
    """Passages in order, and all that can be asked of them."""

    passages: list[list[Sentence]]
    facts: list[Fact]
    unmentioned: tuple[str, ...]

    def texts(self) -> list[str]:
        """The passages as a reader sees them."""
        return [spell(word for sentence in passage for word in sentence.words) for passage in self.passages]

    def questions(self, rng: random.Random, categories: Sequence[str] = CATEGORIES) -> dict[str, list[Question]]:
        """All questions by category, in random order."""
        found: dict[str, list[Question]] = {category: [] for category in categories}
        for fact in self.facts:
            if fact.category in found:
                found[fact.category].append(_who_has(fact.thing, fact.owner, fact.category))
        if "unanswerable" in found:
            found["unanswerable"] += [_who_has(thing, lexicon.UNKNOWN, "unanswerable") for thing in self.unmentioned]
        if "comparison" in found:
            found["comparison"] = self._comparisons(rng)
        for questions in found.values():
            rng.shuffle(questions)
        return found

    def named_beside(self) -> set[str]:
        """Things that another one is told to be with, so that more than their own sentence bears on them."""
        words = (sentence.words for passage in self.passages for sentence in passage)
        return {each[-2] for each in words if each[-4:-2] == ["with", "the"]}

    def _comparisons(self, rng: random.Random) -> list[Question]:
        """Of two facts of two passages, as often the same owner as not."""
        told = [fact for fact in self.facts if fact.category in ("direct", "local", "cross")]
        across = [fact for fact in told if fact.category == "cross"]
        found = []
        for one in rng.sample(across, min(len(across), 12)):
            same = rng.random() < 0.5
            others = [
                other
                for other in told
                if other.passage != one.passage
                and (other.owner == one.owner) == same
                and lexicon.KIND_OF[other.owner] == lexicon.KIND_OF[one.owner]
            ]
            if others:
                pair = [one, rng.choice(others)]
                rng.shuffle(pair)
                found.append(_same_owner(pair[0], pair[1]))
        return found


def spell(words: Iterable[str]) -> str:
    """Words to text: punctuation stands at the word before it."""
    text = ""
    for word in words:
        text += word if not text or word in ".?:" else f" {word}"
    return text


def draw_scene(rng: random.Random, style: Style) -> Scene:
    """One scene; the same for the same generator and style."""
    return _Teller(rng, style).tell()


class _Teller:
    """Draws a scene passage by passage, and keeps who was named last and which facts are out."""

    def __init__(self, rng: random.Random, style: Style) -> None:
        self.rng, self.style = rng, style
        things = list(lexicon.OBJECTS)
        rng.shuffle(things)
        self.unmentioned = tuple(things[:_RESERVED])
        self.things = things[_RESERVED:]
        self.facts: list[Fact] = []
        self.last: dict[Kind, tuple[str, int]] = {}  # who was named last, and in which passage
        self.passage = 0

    def tell(self) -> Scene:
        passages = []
        for number in range(self.style.passages):
            self.passage = number
            passages.append(self._tell_passage())
        return Scene(passages, self.facts, self.unmentioned)

    def _tell_passage(self) -> list[Sentence]:
        """Facts in the planned order, as many as fit; fillers between them, until the passage is full."""
        room, sentences = self.style.tokens, list[Sentence]()
        for what, kind in self._plan():
            state = (list(self.things), list(self.facts), dict(self.last))
            sentence = self._sentence(what, kind)
            if sentence is None:
                continue
            if len(sentence.words) > room:
                self.things, self.facts, self.last = state
                continue
            room -= len(sentence.words)
            sentences.append(sentence)
        while room >= 5:
            words = [*self.rng.choice(lexicon.FILLERS), "."]
            if len(words) <= room:
                room -= len(words)
                sentences.insert(self.rng.randint(0, len(sentences)), Sentence(words))
        return sentences

    def _plan(self) -> list[tuple[str, Kind]]:
        """Kinds of sentences: mostly pronouns that reach back first, then names, then pronouns of those."""
        rng, style = self.rng, self.style
        kinds = list(lexicon.KINDS)
        if rng.random() < style.direct_only:
            return [("direct", rng.choice(kinds)) for _ in range(style.tokens // 6)]
        dense = rng.random() < style.dense
        rng.shuffle(kinds)
        plan = [("pronoun", kind) for kind in kinds[: rng.choice((2, 3, 3) if dense else (1, 1, 2, 2))]]
        rng.shuffle(kinds)
        for kind in kinds[: 3 if dense else rng.choice((1, 2, 2))]:
            plan.append((rng.choice(("deed", "direct")), kind))
            if rng.random() < (0.5 if dense else 0.3):
                plan.append(("pronoun", kind))
        if dense:
            plan += [(rng.choice(("pronoun", "direct", "deed")), rng.choice(kinds)) for _ in range(style.tokens // 12)]
        for _ in range(2 if dense else 1):
            if rng.random() < style.chains:
                plan.insert(rng.randint(0, min(4, len(plan))), ("chain", "man"))
        return plan

    def _sentence(self, what: str, kind: Kind) -> Sentence | None:
        """None where there is nothing to say."""
        if what == "deed":
            name = self._name(kind)
            return Sentence([self.rng.choice(lexicon.ADVERBS), name, *self.rng.choice(lexicon.DEEDS[kind]), "."])
        if not self.things:
            return None
        if what == "direct":
            return self._direct(self._name(kind))
        return self._chain() if what == "chain" else self._pronoun(kind)

    def _name(self, kind: Kind) -> str:
        name = self.rng.choice(lexicon.NAMES[kind])
        self.last[kind] = (name, self.passage)
        return name

    def _tell(self, owner: str, category: str) -> str:
        thing = self.things.pop()
        self.facts.append(Fact(thing, owner, category, self.passage))
        return thing

    def _direct(self, name: str) -> Sentence:
        thing = self._tell(name, "direct")
        words = ["The", thing, *self.rng.choice(lexicon.GIVEN), name, "."]
        return Sentence(words, {len(words) - 2: (thing, name)})

    def _pronoun(self, kind: Kind) -> Sentence:
        owner, passage = self.last.get(kind, (lexicon.UNKNOWN, self.passage))
        category = "unanswerable" if owner == lexicon.UNKNOWN else "local" if passage == self.passage else "cross"
        if self.rng.random() >= self.style.hard:
            return self._given(self._tell(owner, category), owner, kind, ())
        category = {"local": "local-hard", "cross": "cross-hard"}.get(category, category)
        if self.rng.random() < 0.5:
            return self._given(self._tell(owner, category), owner, kind, self.rng.choice(lexicon.TAILS))
        subject = lexicon.SUBJECT_CASE[kind]
        thing = self._tell(owner, category)
        tail = self.rng.choice(lexicon.TAILS) if self.rng.random() < 0.5 else []
        words = [*subject, self.rng.choice(lexicon.TAKING), "the", thing, *tail, "."]
        return Sentence(words, {len(subject) - 1: ("", owner), len(subject) + 2: (thing, owner)})

    def _given(self, thing: str, owner: str, kind: Kind, tail: Sequence[str]) -> Sentence:
        words = ["The", thing, *self.rng.choice(lexicon.GIVEN), *lexicon.OBJECT_CASE[kind]]
        return Sentence([*words, *tail, "."], {len(words) - 1: (thing, owner)})

    def _chain(self) -> Sentence | None:
        """One thing beside another: of an earlier passage, or (seldom) of none."""
        rng = self.rng
        told = [
            f for f in self.facts if f.passage < self.passage and f.category not in ("unanswerable", "chain", "chain2")
        ]
        if not told or rng.random() < 0.05:
            other, owner, category = rng.choice(self.unmentioned), lexicon.UNKNOWN, "unanswerable"
        else:
            stated = [fact for fact in told if fact.category == "direct"]
            fact = rng.choice(stated if stated and rng.random() < 0.5 else told)
            across = fact.category in ("cross", "cross-hard")
            other, owner, category = fact.thing, fact.owner, "chain2" if across else "chain"
        thing = self._tell(owner, category)
        words = ["The", thing, *rng.choice(lexicon.BESIDE), "the", other, "."]
        return Sentence(words, {len(words) - 2: (thing, owner)})


def _who_has(thing: str, owner: str, category: str) -> Question:
    return Question(("Who", "has", "the", thing, "?"), (owner,), category, {thing: owner})


def _same_owner(one: Fact, other: Fact) -> Question:
    verdict = "yes" if one.owner == other.owner else "no"
    return Question(
        ("Do", "the", one.thing, "and", "the", other.thing, "have", "the", "same", "owner", "?"),
        (one.owner, "and", other.owner, ":", verdict),
        "comparison",
        {one.thing: one.owner, other.thing: other.owner},
    )
