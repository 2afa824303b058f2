"""The page's examples, and what is right in any order of their notes.

Situations: notes in any order; notes taken away, doubled, edited into nonsense; questions of two things; questions and
texts of other languages; a thing that no note mentions; a pronoun with nobody in front of it.
"""

import random

import pytest

from cacheblend.nano.examples import EXAMPLES, ExampleAnswer, answer_of, notes
from cacheblend.nano.language import Sentence, read_scene, spell
from lab.nano.scenes import questions_of

NOTES = notes()


def sentences(text: str) -> list[Sentence]:
    """The same text, cut in another way than `answer_of` cuts it."""
    return [Sentence([*part.split(), "."]) for part in text.removesuffix(".").split(". ")]


@pytest.mark.parametrize("seed", range(40))
def test_in_any_order_it_is_right_what_the_generators_own_reading_says(seed: int) -> None:
    rng = random.Random(seed)
    texts = [NOTES[number] for number in rng.sample(range(len(NOTES)), rng.randint(1, len(NOTES)))]
    scene = read_scene([sentences(text) for text in texts])
    asked = 0
    for category, found in questions_of(scene, rng).items():
        for question in found:
            answer = answer_of(spell(question.words), texts)
            assert answer is not None and answer.text == spell(question.answer), category
            asked += 1
            quoted = [texts[place.passage][place.start : place.stop] for place in answer.places]
            assert all(quote.endswith(".") and quote.count(".") == 1 for quote in quoted)
            for owner in question.answer:
                named = owner in (":", "and", "yes", "no", "unknown") or any(f" {owner}" in quote for quote in quoted)
                assert named, f"{spell(question.words)}: {quoted} do not name {owner}"
    assert asked > 5


@pytest.mark.parametrize(
    ("category", "hops"), [("direct", 1), ("local", 2), ("cross", 2), ("chain2", 3), ("chain3", 4)]
)
def test_the_sentences_that_an_answer_needs_are_as_many_as_its_hops(category: str, hops: int) -> None:
    scene = read_scene([sentences(text) for text in NOTES])
    for question in questions_of(scene, random.Random(0), (category,))[category]:
        answer = answer_of(spell(question.words), NOTES)
        assert answer is not None and len(answer.places) == hops
        assert list(answer.places) == sorted(answer.places)


def test_who_is_meant_depends_on_the_order() -> None:
    one, other = EXAMPLES[0], EXAMPLES[1]
    assert one.question == other.question and sorted(one.order) == sorted(other.order)
    found = [answer_of(each.question, [NOTES[number] for number in each.order]) for each in (one, other)]
    assert [answer and answer.text for answer in found] == ["Pagon", "Moaln"]


@pytest.mark.parametrize(
    ("question", "texts"),
    [
        ("Who has the bowl?", ["The bowl was on the table in front of him."]),
        ("Who has the bowl?", ["", "..", "\n"]),
        ("Who has the bowl", []),
        ("Who has the bowl?", ["Later Pagon sat down"]),
        ("Who has the bowl and the bell?", ["The bowl belongs to Pagon."]),  # the bell's owner is not stated
        ("Where is the bowl?", ["The bowl belongs to Pagon."]),
        ("the bowl", ["The bowl belongs to Pagon."]),
        ("Who has the bowl and the bell and the harp?", ["The bowl belongs to Pagon."]),
        ("", ["The bowl belongs to Pagon."]),
        ("Who has the bell?", ["The bell lies with the bowl.", "The bowl belongs to Pagon."]),  # never drawn
    ],
)
def test_what_the_rules_leave_open_has_no_answer(question: str, texts: list[str]) -> None:
    found = answer_of(question, texts)
    assert found is None or (found.text == "unknown" and not found.places)


def test_own_notes_in_the_models_language_are_read_too() -> None:
    texts = ["Later Pagon sat down", " The boot  belongs to him. \n"]
    found = answer_of("Who has the boot?", texts)
    assert found == ExampleAnswer("Pagon", ((0, 0, 20), (1, 1, 26)))


def test_a_long_text_takes_no_longer_than_it_is() -> None:
    assert answer_of("Who has the boot?", ["a" * 1_000_000, ". " * 500_000]) is None
