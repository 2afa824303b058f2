"""Draws the texts that ship beside the model: the page's notes and the demo's questions: `python -m lab.nano.data`."""

import json
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from cacheblend.data import QuestionRow
from cacheblend.engines.tokens import Passage
from cacheblend.evaluation.demo import CATEGORIES, DATA
from cacheblend.nano.examples import NOTES
from cacheblend.nano.language import Scene, read_scene, spell
from lab.nano.scenes import Style, draw_scene, questions_of

NOTES_SEED, NOTES_STYLE = 3_000_003, Style(passages=6, tokens=250, dense=0.3, hard=0.0, chains=1.0)
STYLE = Style(passages=8, tokens=232, dense=0.3, hard=0.3, chains=0.6)
SEEDS = range(10)
ROUNDS, FURTHER = 4, 8  # of all categories: those that choose the scene, and those that --questions may add
SEED_OFFSET = 2_000_000  # neither the draws of training nor those of `questions`
ORDERS_TRIED, SCENES_TRIED = 40, 10


def draw_notes() -> list[str]:
    return draw_scene(random.Random(NOTES_SEED), NOTES_STYLE).texts()


def draw_demo(seed: int, rounds: int = ROUNDS, further: int = 0, style: Style = STYLE) -> list[QuestionRow]:
    """Draws questions over the same passages, each over an order of its own; the `CATEGORIES` take turns.

    Of each category there are as many as rounds, none twice if a scene has so many, and further ones, which may repeat.
    """
    rng = random.Random(SEED_OFFSET + seed)
    for tried in count():  # a few scenes have no chain or no comparison, or too few of them to ask no question twice
        scene, rows = draw_scene(rng, style), list[QuestionRow]()
        for category in list(CATEGORIES) * rounds:
            row = _draw_row(scene, rng, category, rows)
            if row is None:
                break
            rows.append(row)
        else:
            if tried >= SCENES_TRIED or len({row.question for row in rows}) == len(rows):
                break
    for category in list(CATEGORIES) * further:
        row = None
        while row is None:  # there was one of each category before
            row = _draw_row(scene, rng, category, rows)
        rows.append(row)
    return rows


def record(seed: int, rounds: int = ROUNDS, further: int = FURTHER, style: Style = STYLE) -> dict[str, Any]:
    """A seed's passages and questions, as `cacheblend.evaluation.demo` reads them."""
    rows = draw_demo(seed, rounds, further, style)
    passages = sorted(rows[0].passages, key=lambda text: text.title)
    questions = [
        {
            "category": row.category,
            "question": row.question,
            "answer": row.answers[0],
            "order": [1 + passages.index(passage) for passage in row.passages],
        }
        for row in rows
    ]
    return {"seed": seed, "passages": [text.text for text in passages], "questions": questions}


def write(file: Path, records: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")


def main() -> None:
    """Writes both files into the package of this checkout."""
    NOTES.write_text(json.dumps(draw_notes(), indent=1) + "\n", encoding="utf-8")
    write(DATA, [record(seed) for seed in SEEDS])
    print(f"wrote {NOTES} and {DATA}")


def _draw_row(scene: Scene, rng: random.Random, category: str, rows: Sequence[QuestionRow]) -> QuestionRow | None:
    """A question of a category over a random order, if possible one that is not in `rows` yet."""
    texts = [Passage(text, f"passage {number}") for number, text in enumerate(scene.texts(), start=1)]
    repeated = None
    for _ in range(ORDERS_TRIED):
        order = rng.sample(range(len(texts)), len(texts))
        read = read_scene([scene.passages[index] for index in order])
        for question in questions_of(read, rng, (category,))[category]:
            passages, number = tuple(texts[index] for index in order), str(len(rows))
            row = QuestionRow(spell(question.words), passages, (spell(question.answer),), category, number)
            if all(row.question != other.question for other in rows):
                return row
            repeated = repeated or row
    return repeated


if __name__ == "__main__":
    main()
