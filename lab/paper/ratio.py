"""Figure 2: quality and time to first token by recompute ratio; methods without a ratio as lines."""

from pathlib import Path
from typing import Any

from lab.paper import drawing
from lab.paper.answered import of_evaluation, points
from lab.paper.compared import PREFIX
from lab.paper.context import Context, Part
from lab.paper.quality import answer_all, machines, skipped_rows


def measure(context: Context) -> dict[str, Any]:
    """See `Part`."""
    found = answer_all(context, "ratio")
    return {
        "points": points(of_evaluation(found, context.scorers)),
        "notes": skipped_rows(found),
        "machines": machines(found),
        "resumed": found.resumed,
    }


def draw(result: dict[str, Any], title: str, path: Path) -> None:
    """Quality on the left, time on the right."""
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


PART = Part(
    "ratio",
    "Recompute ratio",
    measure,
    draw,
    {"ratio": lambda point: "" if point["ratio"] is None else f"{point['ratio']:g}"},
)
