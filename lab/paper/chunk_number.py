"""Figure 3: quality and time to first token by number of passages; the first so many of each row."""

from dataclasses import replace
from statistics import median_low
from typing import Any

from cacheblend.data import QuestionRow
from cacheblend.evaluation import evaluate
from cacheblend.evaluation.runner import make_cases
from lab.paper import drawing
from lab.paper.answered import of_evaluation, points
from lab.paper.compared import methods
from lab.paper.context import Context, LeftOutError, Part
from lab.paper.quality import machines


def measure(context: Context) -> dict[str, Any]:
    """See `Part`. All points ask the same rows: those with passages for the largest one."""
    rows, numbers, notes = choose_points(context)
    found = evaluate(
        context.engine,
        rows,
        methods(context.engine),
        settings=replace(context.settings, top_k=numbers),
        out=context.folder,
        name="chunk-number",
        progress=lambda stage, done, total: context.answering("chunk-number", stage, done, total),
    )
    answers = of_evaluation(found, context.scorers, lambda cell: cell.top_k)
    return {"points": points(answers), "notes": notes, "machines": machines(found), "resumed": found.resumed}


def choose_points(context: Context) -> tuple[list[QuestionRow], tuple[int, ...], list[str]]:
    """Rows, numbers of passages, and what was left out: a number that half of the rows do not have, or do not fit.

    Raises:
        LeftOutError: no number is left.
    """
    rows, wanted = context.some_rows, sorted(set(context.sweeps.chunk_numbers))
    usual = median_low(len(row.passages) for row in rows)
    numbers = [k for k in wanted if k <= usual]
    notes = []
    if numbers != wanted:
        notes.append(f"{_text(wanted[len(numbers) :])} passages: left out, most rows have {usual} or fewer")
    if not numbers:
        raise LeftOutError(f"most rows have {usual} passages, and the least number of the sweep is {wanted[0]}")
    having = [row for row in rows if len(row.passages) >= numbers[-1]]
    cases = make_cases(context.engine, replace(context.settings, top_k=tuple(numbers)), having)
    fitting = [k for k in numbers if 2 * sum(k in case.prompts for case in cases) >= len(cases)]
    if fitting != numbers:
        limit = context.engine.survey.max_length
        notes.append(f"{_text(numbers[len(fitting) :])} passages: left out, most prompts exceed the context of {limit}")
    if not fitting:
        raise LeftOutError(f"{numbers[0]} passages already exceed the model's context in most rows")
    used = [case.row for case in cases if fitting[-1] in case.prompts]
    if len(used) < len(rows):
        notes.append(f"{len(used)} of {len(rows)} rows have {fitting[-1]} passages that fit; only these are asked")
    return used, tuple(fitting), notes


def _text(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


PART = Part(
    "chunk-number",
    "Number of passages",
    measure,
    lambda result, title, path: drawing.sweep(result["points"], "passages", title, path),
    {"passages": lambda point: str(point["x"])},
)
