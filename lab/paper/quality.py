"""Figure 1: quality against time to first token, every method on every data set."""

from pathlib import Path
from typing import Any

from cacheblend.evaluation import Evaluation, evaluate
from lab.paper import drawing
from lab.paper.answered import of_evaluation, points
from lab.paper.compared import PREFIX, TITLES, at_ratios, methods, own_is
from lab.paper.context import Context, Part


def answer_all(context: Context, part: str) -> Evaluation:
    """All rows by all methods at all ratios: what this figure and the next one show. Finished rows are only read."""
    compared = [*methods(context.engine), *at_ratios(context.engine, context.sweeps.ratios)]
    return evaluate(
        context.engine,
        context.rows,
        compared,
        settings=context.settings,
        out=context.folder,
        name="answers",
        progress=lambda stage, done, total: context.answering(part, stage, done, total),
    )


def measure(context: Context) -> dict[str, Any]:
    """See `Part`."""
    found, usual = answer_all(context, "quality"), {method.label.name for method in methods(context.engine)}
    answers = [each for each in of_evaluation(found, context.scorers) if each.method[1] in usual]
    loaded = [cell.loaded_tokens for row in found.rows for cell in row.cells if cell.method == TITLES[PREFIX]]
    notes = skipped_rows(found)
    if not any(loaded):
        notes.append("prefix caching gains nothing here: no prompt begins with text or a passage that is stored")
    if same := own_is(context.engine):
        notes.append(f"blend, with the model's own settings, is the same as {TITLES[same]}; both were measured")
    return {
        "points": points(answers, by_data=True),
        "notes": notes,
        "machines": machines(found),
        "resumed": found.resumed,
    }


def skipped_rows(found: Evaluation) -> list[str]:
    """A line on prompts that exceed the context, if there are any."""
    count = sum(bool(row.too_long) for row in found.rows)
    return [f"{count} of {len(found.rows)} prompts exceed the model's context and were left out"] if count else []


def machines(found: Evaluation) -> list[str]:
    """The machines that rows were measured on."""
    return list(dict.fromkeys(row.machine for row in found.rows if row.machine))


def draw(result: dict[str, Any], title: str, path: Path) -> None:
    """A panel for each data set."""
    names = list(dict.fromkeys(point["data"] for point in result["points"]))
    with drawing.sheet(title, len(names), path) as panels:
        for axes, name in zip(panels, names, strict=True):
            shown = [point for point in result["points"] if point["data"] == name]
            measure = drawing.measure_of(shown)
            for point in shown:
                drawing.mark(axes, point, measure)
            axes.set(xlabel="time to first token, s (median, quartiles)", ylabel=drawing.quality_label(measure))
            axes.set_xlim(left=0)
            axes.set_title(drawing.plain(f"{name}, {max((p['rows'] for p in shown), default=0)} rows"))


PART = Part("quality", "Quality and time to first token", measure, draw, {"data": lambda point: point["data"]})
