"""Draws questions with their passages as evaluation rows: `python -m lab.nano.questions --out FILE`.

Seeds differ from those of training. Of each scene, at most one question of each category is asked.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cacheblend.data import QuestionRow
from cacheblend.data.questions import question_lines
from cacheblend.engines.tokens import Passage
from cacheblend.nano.language import spell
from lab.nano.scenes import CATEGORIES, Style, chained_to, draw_scene, questions_of

SEED_OFFSET = 1_000_000  # training uses small seeds
RESERVED = frozenset([1, 2, 3, 4, 800, 900])
"""Seeds of the suite. Nothing may be tuned or gated on their rows, or the suite would not be a test of it."""
CONTROLS = ("direct", "local")
"""Categories whose answers need no other passage. Only things that no other sentence mentions are asked for."""


@dataclass(frozen=True)
class Prompts:
    """Fewest and most passages of a prompt; fewest and most tokens of a passage, drawn log-uniformly; most of all."""

    passages: tuple[int, int] = (4, 8)
    tokens: tuple[int, int] = (64, 256)
    longest: int = 1900

    def style(self, rng: random.Random) -> Style:
        count = rng.randint(*self.passages)
        shortest, longest = self.tokens
        tokens = min(round(shortest * (longest / shortest) ** rng.random()), self.longest // count)
        return Style(count, tokens, dense=0.3, hard=0.3, chains=0.6)


def draw_questions(
    seed: int,
    per_category: int,
    categories: Sequence[str] = CATEGORIES,
    prompts: Prompts | None = None,
    *,
    per_scene: int | None = None,
) -> list[QuestionRow]:
    """Draws `per_category` rows of each category; rows of the same scene follow each other.

    `per_scene`: most rows of one scene; 1: no two rows share a passage; None: one of each category.
    """
    rng, prompts = random.Random(SEED_OFFSET + seed), prompts or Prompts()
    left = dict.fromkeys(categories, per_category)
    rows: list[QuestionRow] = []
    while any(left.values()):
        scene = draw_scene(rng, prompts.style(rng))
        passages = tuple(Passage(text, f"passage {number}") for number, text in enumerate(scene.texts(), start=1))
        chained, of_scene = chained_to(scene), 0
        for category, found in sorted(questions_of(scene, rng, categories).items(), key=lambda each: -left[each[0]]):
            if per_scene is not None and of_scene == per_scene:
                break
            if category in CONTROLS:
                found = [question for question in found if chained.isdisjoint(question.owners)]
            if left[category] and found:
                left[category] -= 1
                of_scene += 1
                question = found[0]
                answers = (spell(question.answer),)
                rows.append(QuestionRow(spell(question.words), passages, answers, category, f"{seed}-{len(rows)}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.nano.questions", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--seed", type=int, default=50, help="default: 50; seeds of the suite are refused")
    parser.add_argument("--per-category", type=int, default=100)
    parser.add_argument("--category", choices=CATEGORIES, action="append", help="may be repeated; default: all")
    parser.add_argument("--per-scene", type=int, help="most rows of one scene; 1 for the quality gate")
    options = parser.parse_args()
    if options.seed in RESERVED:
        parser.error(
            f"the seed {options.seed} belongs to the suite ({', '.join(map(str, sorted(RESERVED)))}); choose another"
        )
    categories = options.category or CATEGORIES
    rows = draw_questions(options.seed, options.per_category, categories, per_scene=options.per_scene)
    options.out.write_text("".join(f"{line}\n" for line in question_lines(rows)), encoding="utf-8")
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
