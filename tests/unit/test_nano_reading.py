"""The reader derives from the words alone the facts that the generator knows."""

import random

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.nano import lexicon
from cacheblend.nano.language import UNASKED, Scene, Sentence, read_scene
from lab.nano.scenes import CATEGORIES, Style, draw_scene, questions_of

HARD = Style(passages=6, tokens=90, dense=0.5, hard=0.5, chains=0.9)


def sentences(*texts: str) -> list[Sentence]:
    return [Sentence(text.replace(".", " .").split()) for text in texts]


def owners(scene: Scene) -> dict[str, tuple[str, str]]:
    return {fact.thing: (fact.owner, fact.category) for fact in scene.facts}


@pytest.mark.parametrize("style", [HARD, Style(8, 200), Style(3, 30, direct_only=1.0), Style(1, 60, dense=1.0)])
def test_reading_finds_the_facts_that_were_drawn(style: Style) -> None:
    rng, categories = random.Random(style.tokens), set[str]()
    for _ in range(150):
        drawn = draw_scene(rng, style)
        read = read_scene([[Sentence(sentence.words) for sentence in passage] for passage in drawn.passages])
        assert read.facts == drawn.facts
        assert read.passages == drawn.passages  # `knows` too
        assert set(drawn.unmentioned) <= set(read.unmentioned)
        categories |= {fact.category for fact in drawn.facts}
    if style is HARD:
        assert categories == (set(CATEGORIES) - {"comparison", "list"}) | {"local-hard"}


def test_after_shuffling_a_pronoun_means_who_is_named_last_in_front() -> None:
    rng = random.Random(3)
    changed = unasked = 0
    for _ in range(60):
        drawn = draw_scene(rng, HARD)
        order = rng.sample(range(6), 6)
        read = read_scene([drawn.passages[index] for index in order])
        before, after = owners(drawn), owners(read)
        assert after.keys() == before.keys()
        stated = {(fact.passage, fact.thing) for fact in read.facts}
        assert stated == {(order.index(fact.passage), fact.thing) for fact in drawn.facts}
        for thing, (owner, category) in after.items():
            if before[thing][1] in ("direct", "local", "local-hard"):
                assert (owner, category) == before[thing]
            elif category in ("cross", "cross-hard"):
                assert owner == named_last(read, thing)
                changed += owner != before[thing][0]
            unasked += category == UNASKED
    assert changed > 100
    assert unasked > 20


def named_last(scene: Scene, thing: str) -> str:
    """Owner of a thing stated with a pronoun, by searching backwards."""
    sentences = [sentence.words for passage in scene.passages for sentence in passage]
    at = next(i for i, words in enumerate(sentences) if thing in words and PRONOUNS & set(words))
    kind = next(kind for kind in lexicon.KINDS if pronouns(kind) & set(sentences[at]))
    return next(word for words in reversed(sentences[:at]) for word in words if lexicon.KIND_OF.get(word) == kind)


def pronouns(kind: lexicon.Kind) -> set[str]:
    return {lexicon.SUBJECT_CASE[kind][-1], lexicon.OBJECT_CASE[kind][-1]}


PRONOUNS = {word for kind in lexicon.KINDS for word in pronouns(kind)}


def test_an_order_decides_who_is_meant() -> None:
    named = lexicon.NAMES["man"]
    one = sentences(f"Later {named[0]} sat down.")
    two = sentences(f"Then {named[1]} came in.", "The mill was cold.")
    three = sentences("The boot belongs to him.", "He took the harp again.", "The axe lies with the boot.")
    four = sentences("The bell stays with the boot.", "The cup goes with the flag.")
    assert owners(read_scene([one, two, three, four])) == {
        "boot": (named[1], "cross"),
        "harp": (named[1], "cross-hard"),
        "axe": (named[1], "chain2"),
        "bell": (named[1], "chain2"),
        "cup": ("unknown", "unanswerable"),
    }
    assert owners(read_scene([two, one, three]))["boot"] == (named[0], "cross")
    ahead = read_scene([four, three, one])
    assert owners(ahead)["boot"] == ("unknown", "unanswerable")
    assert owners(ahead)["bell"] == ("unknown", UNASKED)  # mentioned, but not asked for
    assert owners(ahead)["axe"] == ("unknown", UNASKED)
    asked = questions_of(ahead, random.Random(1))
    assert asked["chain"] == asked["chain2"] == []
    assert "bell" not in ahead.unmentioned
    assert "flag" in ahead.unmentioned


OTHERS = """
The boot.
The boot belongs to.
The boot belongs to Nobody.
The boot belongs to him anyway.
The boot lies with.
The boot lies with harp.
The boot was cold.
He took.
He took the sea.
Later sat down.
"""


@pytest.mark.parametrize("text", ["", *OTHERS.strip().splitlines()])
def test_a_sentence_that_is_never_drawn_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is no sentence"):
        read_scene([sentences(text)])
