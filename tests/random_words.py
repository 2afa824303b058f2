"""Texts of any length: `words` are those that the model that ships knows."""

import random

from lab.nano.questions import draw_questions

WORDS = [word for text in draw_questions(5, 1)[0].passages for word in text.text.split()]
RNG = random.Random(23)


def words(count: int) -> str:
    return " ".join(RNG.choices(WORDS, k=count))


def text_of(seed: float | str, count: int) -> str:
    rng = random.Random(seed)
    words = ["lamp", "ferry", "keeper", "tower", "salt", "rope", "winter", "bell", "harbour", "stone", "letter"]
    return " ".join(f"The {rng.choice(words)} of the {rng.choice(words)} is {rng.randrange(99)}." for _ in range(count))
