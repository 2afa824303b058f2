"""The demo's demo: a scene of the small world, its passages stored once and asked in many orders; draws it.

Who a pronoun means depends on the order in which the passages stand, and so do the right answers.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import QuestionRow, Text
from cacheblend.nano import lexicon
from cacheblend.nano.reading import read_scene
from cacheblend.nano.scenes import Fact, Question, Scene, Sentence, Style, draw_scene, spell

CATEGORIES = {
    "direct": "stated in one sentence",
    "local": "pronoun, same passage",
    "cross": "pronoun, earlier passage",
    "cross-hard": "the same, harder to read",
    "chain": "beside a thing told earlier",
    "comparison": "of two passages",
    "unanswerable": "told nowhere",
}
"""What is asked, and what the answer needs."""

STYLE = Style(passages=8, tokens=232, dense=0.3, hard=0.3, chains=0.6)
SEED_OFFSET = 2_000_000  # neither the training's draws nor those of `nano.questions`
ORDERS_TRIED = 40


@dataclass(frozen=True)
class Asked:
    """A question over the passages in one order.

    Attributes:
        order: indices of the told passages, as they stand in the prompt.
        scene: the passages read in that order.
        question: of that scene.
    """

    order: tuple[int, ...]
    scene: Scene
    question: Question


@dataclass(frozen=True)
class Demo:
    """What the demo asks.

    Attributes:
        told: the passages in the order in which they were made up.
        asked: the questions, each over an order of its own, a round of all categories after the other.
    """

    told: Scene
    asked: tuple[Asked, ...]

    def passages(self) -> list[Text]:
        """What is stored."""
        return [Text(text, title_of(index)) for index, text in enumerate(self.told.texts())]

    def rows(self) -> list[QuestionRow]:
        """The questions with their passages in order and the right answers."""
        stored = self.passages()
        return [
            QuestionRow(
                question=spell(asked.question.words),
                passages=tuple(stored[index] for index in asked.order),
                answers=(spell(asked.question.answer),),
                category=asked.question.category,
                id=str(number),
            )
            for number, asked in enumerate(self.asked)
        ]


def title_of(index: int) -> str:
    """Of a told passage."""
    return f"passage {index + 1}"


def draw_story(seed: int, per_category: int = 4) -> Demo:
    """The demo of a seed, `per_category` questions of each of `CATEGORIES`.

    Raises:
        InvalidInputError: `per_category` below 1.
    """
    if per_category < 1:
        raise InvalidInputError(f"a demo needs at least 1 question of each category, got {per_category}")
    rng = random.Random(SEED_OFFSET + seed)
    while True:  # a scene may have no chain in it, or no comparison: seldom, and then another one is told
        told = draw_scene(rng, STYLE)
        asked = _ask(told, rng, per_category)
        if asked is not None:
            return Demo(told, asked)


def _ask(told: Scene, rng: random.Random, per_category: int) -> tuple[Asked, ...] | None:
    asked: list[Asked] = []
    for _ in range(per_category):
        for category in CATEGORIES:
            known = {each.question.words for each in asked}
            found = next(_candidates(told, rng, category, known), None)
            if found is None:
                return None
            asked.append(found)
    return tuple(asked)


def _candidates(told: Scene, rng: random.Random, category: str, known: set[tuple[str, ...]]) -> Iterator[Asked]:
    """Questions, an order each, none that was asked before; behind all of them those that were."""
    again = []
    for _ in range(ORDERS_TRIED):
        order = tuple(rng.sample(range(len(told.passages)), len(told.passages)))
        scene = read_scene([told.passages[index] for index in order])
        for question in scene.questions(rng, (category,))[category][:1]:
            if question.words in known:
                again.append(Asked(order, scene, question))
            else:
                yield Asked(order, scene, question)
    yield from again


# ---- what a pronoun means ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Excerpt:
    """A sentence of a passage with those around it.

    Attributes:
        title: of the passage.
        before, sentence, behind: texts; empty where the passage begins or ends.
        word: of the sentence, that matters.
    """

    title: str
    before: str
    sentence: str
    behind: str
    word: str


@dataclass(frozen=True)
class Example:
    """A pronoun, and who is meant, in another passage in front of it.

    Attributes:
        asked: with the question that it decides.
        thing, owner: what the pronoun's sentence tells.
        named, told: where the owner was named last, and the pronoun's sentence.
        elsewhere: whom the same pronoun means in another order that is asked; empty if it means him in all.
    """

    asked: Asked
    thing: str
    owner: str
    named: Excerpt
    told: Excerpt
    elsewhere: str


def find_example(demo: Demo) -> Example:
    """Of the questions of category cross the first whose pronoun means somebody else in another order."""
    crossing = [asked for asked in demo.asked if asked.question.category == "cross"]
    examples = [_example(demo, asked) for asked in crossing]
    return next((example for example in examples if example.elsewhere), examples[0])


def _example(demo: Demo, asked: Asked) -> Example:
    (thing, owner), *_ = asked.question.owners.items()
    fact = _fact(asked.scene, thing)
    told = asked.scene.passages[fact.passage]
    at = next(i for i, sentence in enumerate(told) if sentence.knows and sentence.words[1] == thing)
    pronoun = " ".join(lexicon.OBJECT_CASE[lexicon.KIND_OF[owner]])
    above, named = next(
        (passage, i)
        for passage in range(fact.passage - 1, -1, -1)
        for i in range(len(asked.scene.passages[passage]) - 1, -1, -1)
        if owner in asked.scene.passages[passage][i].words
    )
    others = (_fact(other.scene, thing).owner for other in demo.asked)
    return Example(
        asked=asked,
        thing=thing,
        owner=owner,
        named=_excerpt(title_of(asked.order[above]), asked.scene.passages[above], named, owner),
        told=_excerpt(title_of(asked.order[fact.passage]), told, at, pronoun),
        elsewhere=next((other for other in others if other not in (owner, lexicon.UNKNOWN)), ""),
    )


def _fact(scene: Scene, thing: str) -> Fact:
    return next(fact for fact in scene.facts if fact.thing == thing)


def _excerpt(title: str, passage: Sequence[Sentence], at: int, word: str) -> Excerpt:
    texts = [spell(sentence.words) for sentence in passage]
    return Excerpt(title, "".join(texts[at - 1 : at]), texts[at], "".join(texts[at + 1 : at + 2]), word)
