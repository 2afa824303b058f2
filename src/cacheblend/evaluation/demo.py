"""The demo: an evaluation of the shipped model, with passages stored once and asked about in many orders.

The order of the passages decides whom a pronoun refers to, and so the correct answers. Knows nothing of the terminal.
"""

import json
import time
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import Gradual, Hkvd, NoRows
from cacheblend.data import QuestionRow, Text
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.engines.hf.live_check import LiveCheck
from cacheblend.evaluation.methods import FullRecompute, Fused, Label, Method, PrefixCaching
from cacheblend.evaluation.run_config import Settings
from cacheblend.evaluation.runner import Progress, evaluate
from cacheblend.evaluation.scorers import ExactMatch
from cacheblend.evaluation.summary import summarise, with_cells
from cacheblend.nano import lexicon

CATEGORIES = {
    "direct": ("stated in one sentence", "stated"),
    "local": ("pronoun, same passage", "same\npassage"),
    "cross": ("pronoun, earlier passage", "earlier\npassage"),
    "cross-hard": ("the same, harder to read", "earlier,\nharder"),
    "chain": ("with an earlier thing", "chain"),
    "comparison": ("of two passages", "compare"),
    "unanswerable": ("stated nowhere", "stated\nnowhere"),
}
"""The categories of questions, and where the answer is found: in a table, and as a heading."""

DATA = Path(str(files("cacheblend.nano"))) / "demo.jsonl"
"""A line for each seed: its passages, and questions in rounds of all categories; drawn by the lab's `nano.data`."""
MAX_TOKENS = 8  # of an answer; the longest correct one has six
BUDGET_S = 90.0
"""After this no question is begun, but one of each category: 28 take some 25 s on two free cores, minutes beside other
programs."""


def demo_questions(seed: int, per_category: int = 4) -> list[QuestionRow]:
    """Questions over the same passages, each over an order of its own; the `CATEGORIES` take turns.

    Raises:
        InvalidInputError: no such seed, or `per_category` below 1 or above what there is.
    """
    drawn = {each["seed"]: each for each in map(json.loads, DATA.read_text(encoding="utf-8").splitlines())}
    if seed not in drawn:
        raise InvalidInputError(f"the demo has questions of the seeds {min(drawn)} to {max(drawn)}, not {seed}")
    texts = [Text(text, f"passage {number}") for number, text in enumerate(drawn[seed]["passages"], start=1)]
    asked = drawn[seed]["questions"]
    most = len(asked) // len(CATEGORIES)
    if not 1 <= per_category <= most:
        raise InvalidInputError(f"a demo asks 1 to {most} questions of each category, not {per_category}")
    return [
        QuestionRow(
            each["question"],
            tuple(texts[place - 1] for place in each["order"]),
            (each["answer"],),
            each["category"],
            str(number),
        )
        for number, each in enumerate(asked[: per_category * len(CATEGORIES)])
    ]


def find_example(rows: Sequence[QuestionRow]) -> dict[str, Any]:
    """The first question of category cross whose pronoun refers to someone else in another order, if there is one.

    Returns:
        ``row``: the question's; ``antecedent``, ``stated``: (title of the passage, sentence) of the antecedent and of
        the pronoun, these words in brackets; ``elsewhere``: the antecedent in another order, empty if it is the same.
    """
    examples = [_example(row, rows) for row in rows if row.category == "cross"]
    return next((example for example in examples if example["elsewhere"]), examples[0])


def _example(row: QuestionRow, rows: Sequence[QuestionRow]) -> dict[str, Any]:
    owner, start = row.answers[0], f"The {row.question.rstrip('?').split()[-1]} "
    kind = lexicon.KIND_OF[owner]
    sentences = [(each.title, f"{text}.") for each in row.passages for text in each.text.rstrip(".").split(". ")]
    stated = next(at for at, (_, text) in enumerate(sentences) if text.startswith(start))
    named = max(at for at in range(stated) if f" {owner}" in sentences[at][1])
    elsewhere = ""
    for other in reversed(rows):
        words = " ".join(each.text for each in other.passages).split(start)[0].replace(".", "").split()
        last = next((word for word in reversed(words) if lexicon.KIND_OF.get(word) == kind), owner)
        elsewhere = elsewhere if last == owner else last
    found: dict[str, Any] = {"row": row, "elsewhere": elsewhere}
    for key, at, word in (("antecedent", named, owner), ("stated", stated, " ".join(lexicon.OBJECT_CASE[kind]))):
        found[key] = (sentences[at][0], sentences[at][1].replace(f" {word}", f" [{word}]"))
    return found


def run_demo(engine: BlendEngine, rows: Sequence[QuestionRow], ratio: float, progress: Progress) -> dict[str, Any]:
    """Stores the passages, answers all questions by all methods, and checks the exactness invariants.

    Args:
        engine: engine with the shipped model; it must not capture missed chunks.
        rows: see `demo_questions`.
        ratio: recompute ratio of the blends by HKVD.
        progress: see `evaluate`.

    Returns:
        The results, in the form in which they are written to JSON; ``evaluation`` is that of `with_cells`. Of the rows
        those that were begun within `BUDGET_S`.
    """
    passages = [Passage(each.text, each.title) for each in sorted(rows[0].passages, key=lambda each: each.title)]
    warmed = engine.warm(passages, progress=partial(progress, "warming"))
    methods, settings = demo_methods(engine.settings.config, ratio), Settings(max_tokens=MAX_TOKENS)
    ends = time.monotonic() + BUDGET_S
    found = evaluate(
        engine,
        rows,
        methods,
        settings=settings,
        progress=progress,
        enough=lambda answered: answered >= len(CATEGORIES) and time.monotonic() > ends,
    )
    asked = rows[: len(found.rows)]
    evaluation = with_cells(summarise(found, [ExactMatch()]), found, [ExactMatch()])
    orders = [[int(passage.title.split()[1]) for passage in row.passages] for row in asked]
    checks = LiveCheck(engine.model, engine.survey).run()
    return {
        "warm": {"passages": warmed.stored, "tokens": warmed.tokens, "seconds": warmed.seconds},
        "passages": [{"title": each.title, "text": each.text} for each in passages],
        "questions": [
            {"order": order, "question": row.question, "category": row.category, "answer": row.answers[0]}
            for order, row in zip(orders, asked, strict=True)
        ],
        "methods": method_figures(evaluation),
        "evaluation": evaluation,
        "invariants": [{"invariant": title, "holds": ok, "detail": detail} for title, ok, detail in checks],
    }


def demo_methods(profile: BlendConfig, ratio: float) -> list[Method]:
    """Full recompute, prefix caching, full reuse, blends: with the model's settings (unless those are one of the
    others), by HKVD as the paper describes it, by HKVD as in the authors' code."""
    own, gradual, one_check = profile.make_selector(), Gradual(ratio), Hkvd((1,), (ratio,), "v")
    return [
        FullRecompute(Label("full recompute", "full", "full")),
        PrefixCaching(Label("prefix caching", "prefix", "prefix")),
        Fused(Label("full reuse", "reuse", "reuse"), NoRows()),
        *([Fused(Label("blend", "blend", "blend"), own)] if own not in (gradual, one_check) else []),
        Fused(Label(f"HKVD, gradual, r = {ratio:g}", "blend", "gradual", "hkvd", ratio, gradual.check_layers), gradual),
        Fused(Label(f"HKVD, one check, r = {ratio:g}", "blend", "one check", "hkvd", ratio, (1,)), one_check),
    ]


def method_figures(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """What is shown of each method of an evaluation by `with_cells`.

    Returns:
        ``kind``: the family; ``right``: by category, which answers are correct; ``score``: correct answers, questions;
        ``recomputed``: share of the loaded tokens, None if only a prefix is loaded; all others as of `summarise`.
    """
    figures = []
    for number, method in enumerate(evaluation["methods"]):
        answers = [(row["category"], row["cells"][number]["scores"]["em"] == 1) for row in evaluation["cells"]]
        share = method["recomputed_tokens"] / max(1, method["loaded_tokens"])
        figures.append(
            {
                "title": method["method"],
                "kind": method["family"],
                "right": {category: [right for at, right in answers if at == category] for category in CATEGORIES},
                "score": (sum(right for _, right in answers), len(answers)),
                "ttft_s": method["ttft_s"]["median"],
                "speedup": method["speedup"],
                "compute": method["total_compute"],
                "recomputed": share if method["kind"] in ("reuse", "blend") else None,
            }
        )
    return figures


def by_difference(evaluation: dict[str, Any]) -> list[int]:
    """The numbers of the rows: first where full recompute is right and full reuse wrong, and blends are right first."""
    families = [method["family"] for method in evaluation["methods"]]

    def rank(row: dict[str, Any]) -> tuple[bool, bool, int]:
        right = {family: cell["scores"]["em"] == 1 for family, cell in zip(families, row["cells"], strict=True)}
        return right["reuse"] or not right["full"], not (right["gradual"] and right.get("blend", True)), row["number"]

    return [row["number"] for row in sorted(evaluation["cells"], key=rank)]
