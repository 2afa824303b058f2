"""Deviations of an evaluation as a table, notes and a plot by layer. Knows only the summary."""

from collections.abc import Callable, Sequence
from math import inf, nan
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.table import Table

from cacheblend.evaluation.plots import whole_numbers
from cacheblend.evaluation.report import Figure, method_table, number_text
from lab.bench import picture


def table(summary: dict[str, Any]) -> Table:
    """A line for each method of which deviation was measured."""
    measured = [method for method in summary["methods"] if method.get("deviation")]
    counts = sorted({method["deviation"]["rows"] for method in measured})

    def mean(measure: str) -> Callable[[Figure], str]:
        return lambda method: number_text(method["deviation"][measure]["over_layers"]["mean"], ".3f")

    def largest(measure: str) -> Callable[[Figure], str]:
        return lambda method: _largest(method["deviation"][measure]["mean"])

    return method_table(
        f"Deviation from full recompute, {' or '.join(map(str, counts))} rows",
        summary | {"methods": measured},
        {
            "KV": mean("kv"),
            "KV at most": largest("kv"),
            "attention": mean("attention"),
            "at most": largest("attention"),
        },
        "KV of the loaded tokens; the question's attention to its context; both relative to full recompute: "
        "mean over layers, and the largest value with its layer; 0 is exact",
    )


def _largest(layers: list[float | None]) -> str:
    """The largest value of a list over layers, with its layer."""
    known = [(value, layer) for layer, value in enumerate(layers) if value is not None]
    value, layer = max(known, default=(None, 0))
    return "" if value is None else f"{value:.3f}, {layer:>2}"


def notes(summary: dict[str, Any]) -> list[str]:
    """Rows that were asked for and not measured, and why."""
    lines = []
    for at in summary.get("deviation", {"prompts": []})["prompts"]:
        of = "" if at["top_k"] is None else f" with {at['top_k']} passages"
        taken = at["rows"] + at["nothing_loaded"]
        if taken < summary["deviation"]["asked"]:
            lines.append(f"deviation: {summary['deviation']['asked']} rows were requested, {taken}{of} are available")
        if at["nothing_loaded"]:
            lines.append(
                f"deviation: in {at['nothing_loaded']} of {taken} rows{of} nothing is loaded at a new position, so "
                "there is nothing to measure"
            )
    return lines


FILE = "deviation.png"
MOST_METHODS = 8
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "navy", "goldenrod")
REUSE = "tab:red"
PANELS = {
    "kv": ("KV of the loaded tokens", "KV deviation / norm in full recompute"),
    "attention": ("The question's attention to its context", "attention deviation / norm in full recompute"),
}


def draw_deviation(summary: dict[str, Any], folder: Path, *, data: str = "") -> list[Path]:
    """Draws `FILE` for the largest `top_k` and the first `MOST_METHODS` methods; no file without deviations.

    KV is on the left, the question's attention on the right. `data`: its name, for the title.
    """
    measured = [method for method in summary["methods"] if method.get("deviation")]
    if not measured:
        return []
    widest = max((method["top_k"] for method in measured), key=lambda k: inf if k is None else k)
    methods, file = [method for method in measured if method["top_k"] == widest], folder / FILE
    with picture(file, columns=len(PANELS), width=5.5, height=5.4) as panels:
        for axes, measure in zip(panels, PANELS, strict=True):
            _panel(axes, measure, methods[:MOST_METHODS])
        figure = panels[0].figure
        figure.suptitle(_title(summary, methods, data), x=0.01, ha="left", fontsize=12, parse_math=False)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=9)
    return [file]


def _panel(axes: Any, measure: str, methods: Sequence[dict[str, Any]]) -> None:
    colours = iter(COLOURS)
    for method in methods:
        colour = REUSE if method["kind"] == "reuse" else next(colours)
        of = {
            key: [nan if v is None else v for v in method["deviation"][measure][key]] for key in ("mean", "low", "high")
        }
        layers = range(len(of["mean"]))
        order = 3 if method["kind"] == "reuse" else 2  # above the lines of random rows, which may coincide with it
        style = {"markersize": 3, "linewidth": 1.6, "color": colour, "zorder": order}
        axes.plot(layers, of["mean"], "o-", **style, label=method["method"])
        axes.fill_between(layers, of["low"], of["high"], color=colour, alpha=0.12, linewidth=0)
    title, label = PANELS[measure]
    axes.set(xlabel="layer", ylabel=label, ylim=(0, None))
    axes.set_title(title)
    whole_numbers(axes.xaxis)


def _title(summary: dict[str, Any], methods: Sequence[dict[str, Any]], data: str) -> str:
    k = methods[0]["top_k"]
    parts = [
        f"Deviation of {summary['model']} from full recompute through loaded KV",
        data,
        f"{methods[0]['deviation']['rows']} rows",
        "" if k is None else f"{k} passages",
        f"{summary['bootstrap']['level']:.0%} intervals (bootstrap)",
        "" if len(methods) <= MOST_METHODS else f"{MOST_METHODS} of {len(methods)} methods",
    ]
    return fill(", ".join(filter(None, parts)), 110)
