"""Random passages about who has which thing, and questions about them.

A pronoun refers to the last named person (or firm) of its kind, anywhere earlier in the prompt: its antecedent may be
in the same passage, in an earlier one, or nowhere.

| category | what the answer needs |
|---|---|
| direct | one sentence: "The boot belongs to Vaden." |
| local | a pronoun's antecedent in the same passage: "Later Vaden sat down. The boot belongs to him." |
| cross | the antecedent in an earlier passage; the pronoun is the last word of its sentence |
| cross-hard | the same, with the pronoun elsewhere in its sentence: "He took the boot." |
| chain | "The boot lies with the harp.", with the owner of the harp stated in an earlier passage |
| chain2 | the same, with the owner of the harp given by a pronoun whose antecedent is in yet another passage |
| chain3 | one sentence more: "The bell lies with the boot.", where the boot is such a thing of chain2 |
| list | the owners of two things in two passages, each given by a pronoun whose antecedent is in an earlier passage |
| comparison | the owners of two things in two passages, and whether they are the same |
| unanswerable | nothing: no passage states the owner, and the answer is "unknown" |
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend.nano import lexicon
from cacheblend.nano.language import CHAINED_TO, Fact, Scene, Sentence
from cacheblend.nano.lexicon import Kind
from lab.nano.words import DEEDS, KINDS

CATEGORIES = (
    "direct",
    "local",
    "cross",
    "cross-hard",
    "chain",
    "chain2",
    "chain3",
    "list",
    "comparison",
    "unanswerable",
)
_RESERVED = 4  # things that no passage mentions, for unanswerable questions


@dataclass(frozen=True)
class Style:
    """How passages are drawn.

    Attributes:
        passages: number of passages.
        tokens: most tokens of each passage; filler sentences fill it up.
        dense: share of passages crowded with facts; the others hold few facts and much filler.
        hard: share of pronouns that are not the last word of their sentence.
        chains: probability of a chain; a crowded passage has two chances.
        direct_only: probability that a passage holds stated facts only.
    """

    passages: int = 6
    tokens: int = 64
    dense: float = 0.3
    hard: float = 0.25
    chains: float = 0.5
    direct_only: float = 0.0


@dataclass(frozen=True)
class Question:
    """A question, its answer, its category, and the owners that the answer depends on by thing."""

    words: tuple[str, ...]
    answer: tuple[str, ...]
    category: str
    owners: dict[str, str]


def draw_scene(rng: random.Random, style: Style) -> Scene:
    """Draws a scene; equal states of the generator give equal scenes."""
    return _Generator(rng, style).scene()


class _Generator:
    """Draws a scene passage by passage; keeps the last named owner of each kind, and the facts so far."""

    def __init__(self, rng: random.Random, style: Style) -> None:
        self.rng, self.style = rng, style
        things = list(lexicon.OBJECTS)
        rng.shuffle(things)
        self.unmentioned = tuple(things[:_RESERVED])
        self.things = things[_RESERVED:]
        self.facts: list[Fact] = []
        self.last: dict[Kind, tuple[str, int]] = {}  # the last named owner, and the passage
        self.passage = 0

    def scene(self) -> Scene:
        passages = []
        for number in range(self.style.passages):
            self.passage = number
            passages.append(self._draw_passage())
        return Scene(passages, self.facts, self.unmentioned)

    def _draw_passage(self) -> list[Sentence]:
        """Facts in the planned order, as many as fit, with filler sentences until the passage is full."""
        capacity, sentences = self.style.tokens, list[Sentence]()
        for what, kind in self._plan():
            state = (list(self.things), list(self.facts), dict(self.last))
            sentence = self._sentence(what, kind)
            if sentence is None:
                continue
            if len(sentence.words) > capacity:
                self.things, self.facts, self.last = state
                continue
            capacity -= len(sentence.words)
            sentences.append(sentence)
        while capacity >= 5:
            words = [*self.rng.choice(lexicon.FILLERS), "."]
            if len(words) <= capacity:
                capacity -= len(words)
                sentences.insert(self.rng.randint(0, len(sentences)), Sentence(words))
        return sentences

    def _plan(self) -> list[tuple[str, Kind]]:
        """Types of sentences: mostly pronouns with earlier antecedents, then names, then pronouns for these names."""
        rng, style = self.rng, self.style
        kinds = list(KINDS)
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
        """A sentence of the given type; None if none can be drawn."""
        if what == "deed":
            name = self._name(kind)
            return Sentence([self.rng.choice(lexicon.ADVERBS), name, *self.rng.choice(DEEDS[kind]), "."])
        if not self.things:
            return None
        if what == "direct":
            return self._direct(self._name(kind))
        return self._chain() if what == "chain" else self._pronoun(kind)

    def _name(self, kind: Kind) -> str:
        name = self.rng.choice(lexicon.NAMES[kind])
        self.last[kind] = (name, self.passage)
        return name

    def _add_fact(self, owner: str, category: str) -> str:
        thing = self.things.pop()
        self.facts.append(Fact(thing, owner, category, self.passage))
        return thing

    def _direct(self, name: str) -> Sentence:
        thing = self._add_fact(name, "direct")
        words = ["The", thing, *self.rng.choice(lexicon.GIVEN), name, "."]
        return Sentence(words, {len(words) - 2: (thing, name)})

    def _pronoun(self, kind: Kind) -> Sentence:
        owner, passage = self.last.get(kind, (lexicon.UNKNOWN, self.passage))
        category = "unanswerable" if owner == lexicon.UNKNOWN else "local" if passage == self.passage else "cross"
        if self.rng.random() >= self.style.hard:
            return self._given(self._add_fact(owner, category), owner, kind, ())
        category = {"local": "local-hard", "cross": "cross-hard"}.get(category, category)
        if self.rng.random() < 0.5:
            return self._given(self._add_fact(owner, category), owner, kind, self.rng.choice(lexicon.TAILS))
        subject = lexicon.SUBJECT_CASE[kind]
        thing = self._add_fact(owner, category)
        tail = self.rng.choice(lexicon.TAILS) if self.rng.random() < 0.5 else []
        words = [*subject, self.rng.choice(lexicon.TAKING), "the", thing, *tail, "."]
        return Sentence(words, {len(subject) - 1: ("", owner), len(subject) + 2: (thing, owner)})

    def _given(self, thing: str, owner: str, kind: Kind, tail: Sequence[str]) -> Sentence:
        words = ["The", thing, *self.rng.choice(lexicon.GIVEN), *lexicon.OBJECT_CASE[kind]]
        return Sentence([*words, *tail, "."], {len(words) - 1: (thing, owner)})

    def _chain(self) -> Sentence | None:
        """A thing that lies with another one of an earlier passage, or, rarely, with an unmentioned one."""
        rng = self.rng
        earlier = [fact for fact in self.facts if fact.passage < self.passage and fact.category in CHAINED_TO]
        if not earlier or rng.random() < 0.05:
            other, owner, category = rng.choice(self.unmentioned), lexicon.UNKNOWN, "unanswerable"
        else:
            wanted = rng.choice(("direct", "cross", "chain2", None))  # None: any
            fact = rng.choice([fact for fact in earlier if fact.category == wanted] or earlier)
            other, owner, category = fact.thing, fact.owner, CHAINED_TO[fact.category]
        thing = self._add_fact(owner, category)
        words = ["The", thing, *rng.choice(lexicon.BESIDE), "the", other, "."]
        return Sentence(words, {len(words) - 2: (thing, owner)})


def questions_of(scene: Scene, rng: random.Random, categories: Sequence[str] = CATEGORIES) -> dict[str, list[Question]]:
    """All questions by category, each list in random order."""
    found: dict[str, list[Question]] = {category: [] for category in categories}
    for fact in scene.facts:
        if fact.category in found:
            found[fact.category].append(_who_has(fact.thing, fact.owner, fact.category))
    if "unanswerable" in found:
        found["unanswerable"] += [_who_has(thing, lexicon.UNKNOWN, "unanswerable") for thing in scene.unmentioned]
    if "comparison" in found:
        found["comparison"] = _comparisons(scene, rng)
    if "list" in found:
        found["list"] = _lists(scene, rng)
    for questions in found.values():
        rng.shuffle(questions)
    return found


def chained_to(scene: Scene) -> set[str]:
    """Things that a chain refers to; another sentence than their own depends on them."""
    words = (sentence.words for passage in scene.passages for sentence in passage)
    return {each[-2] for each in words if each[-4:-2] == ["with", "the"]}


def _comparisons(scene: Scene, rng: random.Random) -> list[Question]:
    """Comparisons of two facts of different passages; the owners are equal with probability 0.5."""
    stated = [fact for fact in scene.facts if fact.category in ("direct", "local", "cross")]
    across = [fact for fact in stated if fact.category == "cross"]
    found = []
    for one in rng.sample(across, min(len(across), 12)):
        same = rng.random() < 0.5
        others = [
            other
            for other in stated
            if other.passage != one.passage
            and (other.owner == one.owner) == same
            and lexicon.KIND_OF[other.owner] == lexicon.KIND_OF[one.owner]
        ]
        if others:
            pair = [one, rng.choice(others)]
            rng.shuffle(pair)
            first, second = pair
            words = ("Do", "the", first.thing, "and", "the", second.thing, "have", "the", "same", "owner", "?")
            answer = (first.owner, "and", second.owner, ":", "yes" if same else "no")
            owners = {first.thing: first.owner, second.thing: second.owner}
            found.append(Question(words, answer, "comparison", owners))
    return found


def _lists(scene: Scene, rng: random.Random) -> list[Question]:
    """Pairs of things of different owners, stated in different passages by pronouns."""
    across = [fact for fact in scene.facts if fact.category == "cross"]
    found = []
    for one in rng.sample(across, min(len(across), 12)):
        others = [other for other in across if other.passage != one.passage and other.owner != one.owner]
        if others:
            other = rng.choice(others)
            words = ("Who", "has", "the", one.thing, "and", "the", other.thing, "?")
            owners = {one.thing: one.owner, other.thing: other.owner}
            found.append(Question(words, (one.owner, "and", other.owner), "list", owners))
    return found


def _who_has(thing: str, owner: str, category: str) -> Question:
    return Question(("Who", "has", "the", thing, "?"), (owner,), category, {thing: owner})
