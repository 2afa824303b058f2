"""What all figures share: colours, sizes, names. Needs matplotlib."""

from typing import Any

from cacheblend.evaluation.inspection.inspection import ArmView, Inspection

COLOURS = {"full recompute": "#444444", "full reuse": "#d55e00", "blend": "#0072b2"}  # Okabe and Ito: for all eyes
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
MANY_PARTS = 24  # above it names are small and frames thin


def new_figure(width: float, height: float) -> Any:
    """A figure that no window manager knows of, so that nothing has to be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def arms_of(of: Inspection) -> dict[str, ArmView]:
    """By the names that figures give them."""
    return {"full recompute": of.full, "full reuse": of.reuse, "blend": of.blend}


def label_of(text: str) -> str:
    """A part's name as matplotlib may have it: short, and no mathematics."""
    short = text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"
    return short.replace("$", r"\$")


def whole_numbers(axis: Any) -> None:
    """Layers have no halves."""
    axis.get_major_locator().set_params(integer=True)
