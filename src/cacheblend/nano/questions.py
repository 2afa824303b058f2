"""Questions of the small world as rows for evaluations: `python -m cacheblend.nano.questions --out FILE`.

Draws of other seeds than the training's; every scene is asked at most one question of each category.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cacheblend.data import QuestionRow, Text
from cacheblend.nano.scenes import CATEGORIES, Style, draw_scene, spell

SEED_OFFSET = 1_000_000  # the training draws from small seeds
RESERVED = frozenset([1, 2, 3, 4, 800, 900])
"""Seeds of the suite: what is tuned or gated on their rows is not shown by it."""
CONTROLS = ("direct", "local")
"""What needs no other passage: of these, only things that no other passage names are asked for."""


@dataclass(frozen=True)
class Prompts:
    """The kind of prompts that are drawn.

    Attributes:
        passages: fewest and most.
        tokens: fewest and most of a passage, short ones as often as long ones (log-uniform).
        longest: tokens of all passages together.
    """

    passages: tuple[int, int] = (4, 8)
    tokens: tuple[int, int] = (64, 256)
    longest: int = 1900

    def style(self, rng: random.Random) -> Style:
        """One draw."""
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
    """Rows, `per_category` of each category, those of one scene next to each other.

    Args:
        seed: of the draws; those of `RESERVED` are the suite's.
        per_category: rows.
        categories: to ask.
        prompts: their kind.
        per_scene: rows of one scene at most; 1: no two rows share a passage. None: one of each category.
    """
    rng, prompts = random.Random(SEED_OFFSET + seed), prompts or Prompts()
    left = dict.fromkeys(categories, per_category)
    rows: list[QuestionRow] = []
    while any(left.values()):
        scene = draw_scene(rng, prompts.style(rng))
        passages = tuple(Text(text, f"passage {number}") for number, text in enumerate(scene.texts(), start=1))
        beside, of_scene = scene.named_beside(), 0
        for category, found in sorted(scene.questions(rng, categories).items(), key=lambda each: -left[each[0]]):
            if per_scene is not None and of_scene == per_scene:
                break
            if category in CONTROLS:
                found = [question for question in found if beside.isdisjoint(question.owners)]
            if left[category] and found:
                left[category] -= 1
                of_scene += 1
                question = found[0]
                answers = (spell(question.answer),)
                rows.append(QuestionRow(spell(question.words), passages, answers, category, f"{seed}-{len(rows)}"))
    return rows


def lines(rows: Sequence[QuestionRow]) -> Iterator[str]:
    """Rows in this project's own format, one JSON object a line."""
    for row in rows:
        yield json.dumps(
            {
                "id": row.id,
                "category": row.category,
                "question": row.question,
                "answers": list(row.answers),
                "passages": [{"title": passage.title, "text": passage.text} for passage in row.passages],
            }
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m cacheblend.nano.questions", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--seed", type=int, default=50, help="default: 50; the suite's own are refused")
    parser.add_argument("--per-category", type=int, default=100)
    parser.add_argument("--category", choices=CATEGORIES, action="append", help="several; default: all")
    parser.add_argument("--per-scene", type=int, help="rows of one scene at most; 1 for the quality gate")
    options = parser.parse_args()
    if options.seed in RESERVED:
        parser.error(f"the seed {options.seed} is the suite's ({', '.join(map(str, sorted(RESERVED)))}); take another")
    categories = options.category or CATEGORIES
    rows = draw_questions(options.seed, options.per_category, categories, per_scene=options.per_scene)
    options.out.write_text("".join(f"{line}\n" for line in lines(rows)), encoding="utf-8")
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
