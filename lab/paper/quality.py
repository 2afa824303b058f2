"""Figures 1 to 4: quality and time to first token by method, recompute ratio, number and length of the passages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median_low
from typing import Any

from cacheblend.data import QuestionRow
from cacheblend.data.questions import SHORTEST, split_text
from cacheblend.engines.tokens import Passage
from cacheblend.evaluation import Evaluation
from cacheblend.evaluation.runner import make_cases
from lab.paper import drawing
from lab.paper.context import (
    PREFIX,
    TITLES,
    Answered,
    Context,
    LeftOutError,
    Part,
    at_ratios,
    methods,
    of_evaluation,
    own_is,
    points,
)


def answer_all(context: Context, part: str) -> Evaluation:
    """All rows by all methods at all ratios: what figures 1 and 2 show. Finished rows are only read."""
    compared = [*methods(context.engine), *at_ratios(context.engine, context.sweeps.ratios)]
    return context.evaluated(part, context.rows, compared, name="answers")


def facts(found: Sequence[Evaluation]) -> dict[str, Any]:
    """Where rows were measured, and how many of them before."""
    rows = [row for each in found for row in each.rows]
    machines = list(dict.fromkeys(row.machine for row in rows if row.machine))
    return {"machines": machines, "resumed": sum(each.resumed for each in found)}


def skipped_rows(found: Evaluation) -> list[str]:
    """A line on prompts that exceed the context, if there are any."""
    count = sum(bool(row.too_long) for row in found.rows)
    return [f"{count} of {len(found.rows)} prompts exceed the model's context and were left out"] if count else []


# ---- 1: quality against time --------------------------------------------------------------------------------


def measure_quality(context: Context) -> dict[str, Any]:
    """Every method on every data set."""
    found, usual = answer_all(context, "quality"), {method.label.name for method in methods(context.engine)}
    answers = [each for each in of_evaluation(found, context.scorers) if each.method[1] in usual]
    loaded = [cell.loaded_tokens for row in found.rows for cell in row.cells if cell.method == TITLES[PREFIX]]
    notes = skipped_rows(found)
    if not any(loaded):
        notes.append("prefix caching gains nothing here: no prompt begins with text or a passage that is stored")
    if same := own_is(context.engine):
        notes.append(f"blend, with the model's own settings, is the same as {TITLES[same]}; both were measured")
    return {"points": points(answers, by_data=True), "notes": notes, **facts([found])}


def draw_quality(result: dict[str, Any], title: str, path: Path) -> None:
    names = list(dict.fromkeys(point["data"] for point in result["points"]))
    with drawing.sheet(title, len(names), path) as panels:
        for axes, name in zip(panels, names, strict=True):
            shown = [point for point in result["points"] if point["data"] == name]
            measure = drawing.measure_of(shown)
            for point in shown:
                drawing.mark(axes, point, measure)
            axes.set(xlabel=drawing.TTFT, ylabel=drawing.quality_label(measure))
            axes.set_xlim(left=0)
            axes.set_title(drawing.plain(f"{name}, {max((p['rows'] for p in shown), default=0)} rows"))


# ---- 2: recompute ratio -------------------------------------------------------------------------------------


def measure_ratio(context: Context) -> dict[str, Any]:
    found = answer_all(context, "ratio")
    answers = of_evaluation(found, context.scorers)
    return {"points": points(answers), "notes": skipped_rows(found), **facts([found])}


def draw_ratio(result: dict[str, Any], title: str, path: Path) -> None:
    """Quality on the left, time on the right; methods without a ratio as lines."""
    points_, measure = result["points"], drawing.measure_of(result["points"])
    with drawing.sheet(title, 2, path) as (quality, ttft):
        for axes, value in ((quality, drawing.quality(measure)), (ttft, drawing.ttft)):
            drawing.curves(axes, [p for p in points_ if p["ratio"] is not None], value, lambda p: 100 * p["ratio"])
            for point in points_:
                if point["ratio"] is None and not (axes is quality and point["family"] == PREFIX):
                    drawing.across(axes, point, value)  # prefix caching answers as full recompute does
            axes.set_xlabel("recompute ratio, % of the loaded tokens")
        quality.set_ylabel(drawing.quality_label(measure))
        ttft.set_ylabel(drawing.TTFT)


# ---- 3: number of passages ----------------------------------------------------------------------------------


def measure_number(context: Context) -> dict[str, Any]:
    """The first so many of each row. All points ask the same rows: those with passages for the largest one."""
    rows, numbers, notes = choose_points(context)
    found = context.evaluated(
        "chunk-number", rows, methods(context.engine), settings=replace(context.settings, top_k=numbers)
    )
    answers = of_evaluation(found, context.scorers, lambda cell: cell.top_k)
    return {"points": points(answers), "notes": notes, **facts([found])}


def choose_points(context: Context) -> tuple[list[QuestionRow], tuple[int, ...], list[str]]:
    """Rows, numbers of passages, and what was left out: a number that half of the rows do not have, or do not fit."""
    rows, wanted = context.some_rows, sorted(set(context.sweeps.chunk_numbers))
    usual = median_low(len(row.passages) for row in rows)
    numbers = [k for k in wanted if k <= usual]
    notes = []
    if numbers != wanted:
        left = ", ".join(map(str, wanted[len(numbers) :]))
        notes.append(f"{left} passages: left out, most rows have {usual} or fewer")
    if not numbers:
        raise LeftOutError(f"most rows have {usual} passages, and the least number of the sweep is {wanted[0]}")
    having = [row for row in rows if len(row.passages) >= numbers[-1]]
    cases = make_cases(context.engine, replace(context.settings, top_k=tuple(numbers)), having)
    fitting = [k for k in numbers if 2 * sum(k in case.prompts for case in cases) >= len(cases)]
    if fitting != numbers:
        limit = context.engine.runtime.survey.max_length
        left = ", ".join(map(str, numbers[len(fitting) :]))
        notes.append(f"{left} passages: left out, most prompts exceed the context of {limit}")
    if not fitting:
        raise LeftOutError(f"{numbers[0]} passages already exceed the model's context in most rows")
    used = [case.row for case in cases if fitting[-1] in case.prompts]
    if len(used) < len(rows):
        notes.append(f"{len(used)} of {len(rows)} rows have {fitting[-1]} passages that fit; only these are asked")
    return used, tuple(fitting), notes


# ---- 4: length of passages ----------------------------------------------------------------------------------


def measure_length(context: Context) -> dict[str, Any]:
    """Each row's text, cut anew."""
    answers, evaluations, notes = list[Answered](), list[Evaluation](), list[str]()
    lengths = sorted({length for length in context.sweeps.chunk_lengths if length >= SHORTEST})
    for number, length in enumerate(lengths):
        rows, reason = cut_anew(context, length), ""
        if mean(len(row.passages) > 1 for row in rows) < 0.5:
            reason = "most rows are then one passage, and nothing is blended"
        elif mean(bool(case.prompts) for case in make_cases(context.engine, context.settings, rows)) < 0.5:
            reason = f"most prompts exceed the context of {context.engine.runtime.survey.max_length}"
        if reason:
            notes.append(f"passages of {length} tokens: left out, {reason}")
            continue
        place, name = (number, len(lengths)), f"chunk-length-{length}"
        found = context.evaluated("chunk-length", rows, methods(context.engine), place, name=name)
        answers += of_evaluation(found, context.scorers, lambda cell, length=length: length)  # type: ignore[misc]
        notes += [f"passages of {length} tokens: {line}" for line in skipped_rows(found)]
        evaluations.append(found)
    if not answers:
        raise LeftOutError("; ".join(notes) or f"a passage must have at least {SHORTEST} tokens")
    return {"points": points(answers), "notes": notes, **facts(evaluations)}


def cut_anew(context: Context, tokens: int) -> list[QuestionRow]:
    """The rows, their passages joined and cut into passages of at most so many tokens."""
    builder = context.engine.runtime.builder
    assert builder is not None  # a model folder is opened with its tokenizer

    def cut(row: QuestionRow) -> QuestionRow:
        whole = "\n".join(passage.text for passage in row.passages)
        parts = split_text(whole, lambda text: len(builder.encode(text)), tokens)
        return replace(row, passages=tuple(Passage(part) for part in parts))

    return [cut(row) for row in context.some_rows]


def _x(point: dict[str, Any]) -> str:
    return str(point["x"])


QUALITY = Part(
    "quality", "Quality and time to first token", measure_quality, draw_quality, {"data": lambda point: point["data"]}
)
RATIO = Part(
    "ratio",
    "Recompute ratio",
    measure_ratio,
    draw_ratio,
    {"ratio": lambda point: "" if point["ratio"] is None else f"{point['ratio']:g}"},
)
NUMBER = Part("chunk-number", "Number of passages", measure_number, drawing.sweep_of("passages"), {"passages": _x})
LENGTH = Part(
    "chunk-length",
    "Length of passages",
    measure_length,
    drawing.sweep_of("tokens of a passage at most", log=True),
    {"tokens": _x},
)
