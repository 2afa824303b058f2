"""Names and colours of what the figures of an inspection show."""

from lab.inspection.inspection import Inspection, MethodView

COLOURS = {
    "full recompute": "#444444",
    "full reuse": "#d55e00",
    "blend": "#0072b2",
}  # Okabe and Ito's palette
LONGEST_LABEL = 26
MANY_PARTS = 24  # with more parts, names are small and frames thin


def methods_of(of: Inspection) -> dict[str, MethodView]:
    """The methods by their names in figures."""
    return {"full recompute": of.full, "full reuse": of.reuse, "blend": of.blend}


def label_of(text: str) -> str:
    """A shortened name, escaped so that matplotlib does not read it as mathematics."""
    short = text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"
    return short.replace("$", r"\$")
