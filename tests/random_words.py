"""Texts of any length, of words that the model that ships knows."""

import random

from cacheblend.nano.questions import draw_questions

WORDS = [word for text in draw_questions(5, 1)[0].passages for word in text.text.split()]
RNG = random.Random(23)


def words(count: int) -> str:
    return " ".join(RNG.choices(WORDS, k=count))
