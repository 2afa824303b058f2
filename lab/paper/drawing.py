"""How the figures look: a family of methods has one colour and one marker in all of them. Needs matplotlib."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheblend.evaluation.demo import COLOURS
from cacheblend.evaluation.plots import STYLE, new_figure
from cacheblend.evaluation.report import TITLES as SCORES
from lab.paper.context import AGREEMENT, BLEND, FULL, GRADUAL, ONE_CHECK, PREFIX, REUSE, TITLES

MARKERS = {FULL: "o", PREFIX: "s", REUSE: "X", BLEND: "D", GRADUAL: "^", ONE_CHECK: "v"}
LAYERS = {family: number for number, family in enumerate(TITLES)}
"""Later families are drawn over earlier ones, and thinner, so that equal curves can both be seen."""
TTFT = "time to first token, s (median, quartiles)"
LOG_FROM = 8  # largest over smallest time
PANEL_WIDTH, PANEL_HEIGHT, PANELS_PER_LINE = 5.0, 4.0, 3

Point = dict[str, Any]
Value = Callable[[Point], tuple[float, float, float] | None]
"""A point's value with the ends of its interval; None if it has none."""


def quality(measure: str) -> Value:
    """Per cent of this measure."""

    def value(point: Point) -> tuple[float, float, float] | None:
        found = point["quality"].get(measure)
        return None if found is None else (100 * found["mean"], 100 * found["low"], 100 * found["high"])

    return value


def ttft(point: Point) -> tuple[float, float, float]:
    found = point["ttft_s"]
    return found["median"], found["low"], found["high"]


def throughput(point: Point) -> tuple[float, float, float]:
    """Requests answered per second; no interval."""
    return (point["requests_per_s"],) * 3


def computed(point: Point) -> tuple[float, float, float] | None:
    """Per cent of a full prefill; no interval."""
    return None if point["compute"] is None else (100 * point["compute"],) * 3


def measure_of(points: Sequence[Point]) -> str:
    """The measure to draw: the first scorer, or the agreement with full recompute if there are no gold answers."""
    return next((name for point in points for name in point["quality"]), AGREEMENT)


def quality_label(measure: str) -> str:
    known = "first token as full recompute's" if measure == AGREEMENT else SCORES.get(measure, measure)
    return f"{known}, % (95 % interval)"


@contextmanager
def sheet(title: str, panels: int, path: Path) -> Iterator[list[Any]]:
    """Axes for so many panels; written to `path` with one legend for all of them."""
    import matplotlib

    lines, width = -(-panels // PANELS_PER_LINE), min(panels, PANELS_PER_LINE)
    with matplotlib.rc_context(STYLE):
        figure = new_figure(max(PANEL_WIDTH * width, 8.0), PANEL_HEIGHT * lines + 1.0)
        axes = figure.subplots(lines, width, squeeze=False).flatten().tolist()
        yield axes[:panels]
        for unused in axes[panels:]:
            unused.remove()
        figure.suptitle(plain(title), x=0.01, ha="left", fontsize=13, fontweight="bold")
        handles: dict[str, Any] = {}
        for each in axes[:panels]:
            handles |= dict(zip(*reversed(each.get_legend_handles_labels()), strict=True))
            low, high = each.get_ylim()  # no marker is cut off; other linear axes than of per cent begin at 0
            if "%" in each.get_ylabel():
                each.set_ylim(max(low, -3.0), min(high, 103.0))
            elif each.get_yscale() != "log":
                each.set_ylim(0.0, 1.08 * each.dataLim.y1)
        order = sorted(handles, key=lambda name: [*TITLES.values(), name].index(name))
        figure.legend([handles[name] for name in order], order, loc="outside lower center", ncols=3, fontsize=9)
        figure.savefig(path)


def curves(axes: Any, points: Sequence[Point], value: Value, x: Callable[[Point], float]) -> None:
    """A curve for each family, with intervals."""
    for family in dict.fromkeys(point["family"] for point in points):
        found = [(x(point), value(point)) for point in points if point["family"] == family]
        placed = sorted((at, ends) for at, ends in found if ends is not None)
        if placed:
            width = 3.6 - 0.45 * LAYERS[family]
            _draw(axes, family, [at for at, _ in placed], [ends for _, ends in placed], linewidth=width)


def mark(axes: Any, point: Point, measure: str) -> None:
    """A point of quality over time to first token, with both intervals."""
    found = quality(measure)(point)
    if found is not None:
        middle, low, high = ttft(point)
        _draw(axes, point["family"], [middle], [found], xerr=[[middle - low], [high - middle]], linestyle="none")


def across(axes: Any, point: Point, value: Value) -> None:
    """A horizontal line, for a method that does not depend on x."""
    if found := value(point):
        family = point["family"]
        axes.axhline(found[0], color=COLOURS[family], linestyle="--", linewidth=1.4, label=TITLES[family])


def sweep_of(x_label: str, *, log: bool = False) -> Callable[[dict[str, Any], str, Path], None]:
    """Draws a result, under a title, into a file: quality on the left, time to first token on the right, both by x."""

    def sweep(result: dict[str, Any], title: str, path: Path) -> None:
        points = result["points"]
        measure, ticks = measure_of(points), sorted({point["x"] for point in points})
        with sheet(title, 2, path) as (left, right):
            for axes, value, label in ((left, quality(measure), quality_label(measure)), (right, ttft, TTFT)):
                curves(axes, points, value, lambda point: point["x"])
                axes.set(xlabel=x_label, ylabel=label)
                if log:
                    axes.set_xscale("log", base=2)
                axes.set_xticks(ticks, [str(tick) for tick in ticks])
                axes.minorticks_off()

    return sweep


def log_times(axes: Any, points: Sequence[Point]) -> None:
    """A logarithmic axis of times, where they differ by so much that it shows more."""
    from matplotlib.ticker import LogLocator, NullFormatter

    medians = [point["ttft_s"]["median"] for point in points]
    axes.set_ylabel(TTFT)
    if max(medians) > LOG_FROM * min(medians):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def plain(text: str) -> str:
    """A text that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")


def _draw(
    axes: Any, family: str, xs: Sequence[float], found: Sequence[tuple[float, float, float]], **style: Any
) -> None:
    axes.errorbar(
        xs,
        [middle for middle, _, _ in found],
        yerr=[[middle - low for middle, low, _ in found], [high - middle for middle, _, high in found]],
        color=COLOURS[family],
        marker=MARKERS[family],
        markersize=10 - LAYERS[family],
        elinewidth=1,
        capsize=2,
        label=TITLES[family],
        **style,
    )
