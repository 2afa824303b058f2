"""What benchmarks share: arms in turn, the interval of a median, peak memory, what is kept, tables, pictures."""

import random
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cacheblend.cli.output import Advance as Advance
from cacheblend.cli.output import AdvanceStage as AdvanceStage

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

T = TypeVar("T")
V = TypeVar("V")


def silent(*_: object) -> None:
    """Progress that nobody sees."""


def alternating(
    arms: Mapping[str, Callable[[T], V]],
    draw: Callable[[], T],
    runs: int,
    advance: Advance = silent,
    *,
    swaps: bool = True,
) -> dict[str, list[V]]:
    """What each arm returns in turn, in rounds behind one that warms up: noise of the machine affects all of them.

    `draw` makes what a round asks of all arms. `swaps`: every other round begins with the last arm.
    """
    names = list(arms)
    found: dict[str, list[V]] = {name: [] for name in names}
    for number in range(runs + 1):
        asked = draw()
        for name in names[::-1] if swaps and not number % 2 else names:
            value = arms[name](asked)
            if number:
                found[name].append(value)
        advance(number + 1, runs + 1)
    return found


def median_interval(values: list[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float]:
    """The 95 % percentile-bootstrap interval of a median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]


def forget_peak() -> None:
    """Resets this process's peak memory. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Peak resident memory of this process since the reset."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def figure_lines(result: dict[str, Any]) -> str:
    """A line for each of `figures`, with its interval if there is one."""
    intervals = {name: f" (95 %: {low:.3f} to {high:.3f})" for name, (low, high) in result.get("intervals", {}).items()}
    values = {name: "not measured" if value is None else f"{value:.3f}" for name, value in result["figures"].items()}
    return "\n".join(f"{name}: {value}{intervals.get(name, '')}" for name, value in values.items())


def plain_table(
    title: "str | Text",
    texts: Mapping[str, str] | Sequence[str],
    numbers: Mapping[str, str] | Sequence[str],
    caption: str | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> "Table":
    """A table of columns of text, then of numbers: headings, for `rows` with the form of a cell, such as "{kl:.2g}"."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, **left)
    for column in texts:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    forms = [form for columns in (texts, numbers) if isinstance(columns, Mapping) for form in columns.values()]
    for row in rows:
        table.add_row(*(form.format_map(row) for form in forms))
    return table


def markdown_table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown of columns of text, then of numbers."""
    lines = [[str(cell).replace("|", r"\|").replace("\n", " ") for cell in row] for row in ((*texts, *numbers), *rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, f"|{'---|' * len(texts)}{'---:|' * len(numbers)}", *body])


@contextmanager
def picture(
    path: Path, lines: int = 1, columns: int = 1, width: float = 7.0, height: float = 4.5
) -> Iterator[list[Any]]:
    """Axes of as many panels of this size; written to `path` at the end. Needs matplotlib."""
    import matplotlib

    from cacheblend.evaluation.plots import STYLE, new_figure

    with matplotlib.rc_context(STYLE):
        figure = new_figure(width * columns, height * lines)
        yield figure.subplots(lines, columns, squeeze=False).flatten().tolist()
        figure.savefig(path)


def draw_curves(
    axes: Any,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    *,
    dashed: Collection[str] = (),
    marker: str = "o",
    **labels: Any,
) -> None:
    """A line for each label, colours in order; `labels` go to `Axes.set`."""
    for name, (xs, ys) in curves.items():
        axes.plot(xs, ys, "--" if name in dashed else "-", marker=marker, label=name)
    axes.set(**labels)
    axes.set_title(title, parse_math=False)
    axes.legend(fontsize="small")
