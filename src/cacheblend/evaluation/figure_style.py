"""Sizes and lines shared by all figures. Needs matplotlib."""

from typing import Any

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


def new_figure(width: float, height: float) -> Any:
    """A figure outside of pyplot's registry, which need not be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def whole_numbers(axis: Any) -> None:
    """Restricts ticks to integers, e.g. for layers."""
    axis.get_major_locator().set_params(integer=True)
