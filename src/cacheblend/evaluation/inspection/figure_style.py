"""Colours, sizes and names shared by all figures. Needs matplotlib."""

from typing import Any

from cacheblend.evaluation.inspection.inspection import Inspection, MethodView

COLOURS = {
    "full recompute": "#444444",
    "full reuse": "#d55e00",
    "blend": "#0072b2",
}  # Okabe and Ito's palette
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "legend.frameon": False,
}
LONGEST_LABEL = 26
MANY_PARTS = 24  # with more parts, names are small and frames thin


def new_figure(width: float, height: float) -> Any:
    """A figure outside of pyplot's registry, which need not be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def methods_of(of: Inspection) -> dict[str, MethodView]:
    """The methods by their names in figures."""
    return {"full recompute": of.full, "full reuse": of.reuse, "blend": of.blend}


def label_of(text: str) -> str:
    """A shortened name, escaped so that matplotlib does not read it as mathematics."""
    short = text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"
    return short.replace("$", r"\$")


def whole_numbers(axis: Any) -> None:
    """Restricts ticks to integers, e.g. for layers."""
    axis.get_major_locator().set_params(integer=True)
