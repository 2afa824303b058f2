"""Figure 4: quality and time to first token by length of the passages: each row's text, cut anew."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from cacheblend.data import QuestionRow, Text
from cacheblend.data.split import SHORTEST, split_text
from cacheblend.evaluation import evaluate
from cacheblend.evaluation.runner import make_cases
from lab.paper import drawing
from lab.paper.answered import Answered, of_evaluation, points
from lab.paper.compared import methods
from lab.paper.context import Context, LeftOutError, Part
from lab.paper.quality import machines, skipped_rows


def measure(context: Context) -> dict[str, Any]:
    """See `Part`."""
    answers: list[Answered] = []
    notes, by_machine, resumed = list[str](), list[str](), 0
    lengths = sorted({length for length in context.sweeps.chunk_lengths if length >= SHORTEST})
    for number, length in enumerate(lengths):
        rows = cut_anew(context, length)
        if reason := _why_not(context, rows):
            notes.append(f"passages of {length} tokens: left out, {reason}")
            continue
        found = evaluate(
            context.engine,
            rows,
            methods(context.engine),
            settings=context.settings,
            out=context.folder,
            name=f"chunk-length-{length}",
            progress=lambda stage, done, total, at=number: context.answering(  # type: ignore[misc]
                "chunk-length", stage, at * total + done, len(lengths) * total
            ),
        )
        answers += of_evaluation(found, context.scorers, lambda cell, length=length: length)  # type: ignore[misc]
        notes += [f"passages of {length} tokens: {line}" for line in skipped_rows(found)]
        by_machine, resumed = by_machine + machines(found), resumed + found.resumed
    if not answers:
        raise LeftOutError("; ".join(notes) or f"a passage must have at least {SHORTEST} tokens")
    return {
        "points": points(answers),
        "notes": notes,
        "machines": list(dict.fromkeys(by_machine)),
        "resumed": resumed,
    }


def cut_anew(context: Context, tokens: int) -> list[QuestionRow]:
    """The rows, their passages joined and cut into passages of at most so many tokens."""
    builder = context.engine.builder
    assert builder is not None  # a model folder is opened with its tokenizer

    def cut(row: QuestionRow) -> QuestionRow:
        whole = "\n".join(passage.text for passage in row.passages)
        parts = split_text(whole, lambda text: len(builder.encode(text)), tokens)
        return replace(row, passages=tuple(Text(part, "") for part in parts))

    return [cut(row) for row in context.some_rows]


def _why_not(context: Context, rows: Sequence[QuestionRow]) -> str:
    """Why a point is left out; empty if it is not."""
    if mean(len(row.passages) > 1 for row in rows) < 0.5:
        return "most rows are then one passage, and nothing is blended"
    cases = make_cases(context.engine, context.settings, rows)
    if mean(bool(case.prompts) for case in cases) < 0.5:
        return f"most prompts exceed the context of {context.engine.survey.max_length}"
    return ""


PART = Part(
    "chunk-length",
    "Length of passages",
    measure,
    lambda result, title, path: drawing.sweep(result["points"], "tokens of a passage at most", title, path, log=True),
    {"tokens": lambda point: str(point["x"])},
)
