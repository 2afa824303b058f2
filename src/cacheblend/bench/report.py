"""A TTFT benchmark's result for people: a table, and a sweep's curves."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def table(result: dict[str, Any]) -> Table:
    """The result for people, 80 columns wide; a sweep has one block a point."""
    out = Table(
        title=Text(f"Time to first token, {result['model']}", "table.title"),
        caption="gain: full / method; loaded: tokens from the store; again: recomputed",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for column in ("method", "store"):
        out.add_column(column, no_wrap=True)
    for column in ("TTFT, s", "min", "max", "gain", "load, s", "loaded", "again"):
        out.add_column(column, justify="right", no_wrap=True)
    points = result["sweep"]["points"] if "sweep" in result else [result]
    for point in points:
        prompt = point["prompt"]
        out.add_row(Text(f"{prompt['chunks']} x {prompt['chunk_tokens']}", "dim"))
        for arm in point["arms"]:
            out.add_row(*_cells(arm))
        out.add_section()
    return out


def _cells(arm: dict[str, Any]) -> tuple[str, ...]:
    ttft, gain = arm["ttft_s"], arm["speedup_vs_full"]
    return (
        arm["arm"] if arm["arm"] != "blend" else f"blend {arm['ratio']:g}",
        arm["store"] or "",
        _seconds(ttft["median"]),
        _seconds(ttft["min"]),
        _seconds(ttft["max"]),
        "" if gain is None else f"{gain:.2f}",
        _seconds(arm["load_s"]),
        str(arm["loaded_tokens"]),
        str(arm["recomputed_tokens"]),
    )


def _seconds(value: float) -> str:
    """Six characters at most, below three hours."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws a sweep's curves: TTFT of each method. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    over, points = result["sweep"]["over"], result["sweep"]["points"]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for arm in point["arms"]:
            moving = over == "ratio" and arm["ratio"] is not None
            label = arm["arm"] if moving or arm["ratio"] is None else f"{arm['arm']} r = {arm['ratio']:g}"
            x = arm["ratio"] if moving else point["prompt"].get(over.replace("-", "_"))
            if x is not None:
                curves.setdefault(label, []).append((x, arm["ttft_s"]["median"]))
    flat = [arm for arm in points[0]["arms"] if over == "ratio" and arm["ratio"] is None]
    for label, curve in curves.items():
        axes.plot(*zip(*sorted(curve), strict=True), marker="o", label=label)
    for index, arm in enumerate(flat):
        axes.axhline(arm["ttft_s"]["median"], linestyle="--", color=f"C{index + 5}", label=arm["arm"])
    axes.set(xlabel={"ratio": "recompute ratio"}.get(over, over), ylabel="time to first token, s", ylim=(0, None))
    axes.set_title(result["model"], parse_math=False)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
