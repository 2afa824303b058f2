"""Deviations of an evaluation as a table and notes. Knows only the summary."""

from typing import Any

from rich.table import Table

from cacheblend.evaluation.report import Figure, empty_table, fill_table, number_text


def table(summary: dict[str, Any]) -> Table:
    """A line for each method of which deviation was measured."""
    counts = sorted({method["deviation"]["rows"] for method in summary["methods"] if method.get("deviation")})
    out = empty_table(f"Deviation from full recompute, {' or '.join(map(str, counts))} rows")
    out.add_column("method", no_wrap=True)
    for column in ("KV", "at most", "attention", "at most"):
        out.add_column(column, justify="right", no_wrap=True)

    def cells(method: Figure) -> list[str]:
        figures = [method["deviation"][measure] for measure in ("kv", "attention")]
        return [
            text for of in figures for text in (number_text(of["over_layers"]["mean"], ".3f"), _largest(of["mean"]))
        ]

    fill_table(out, summary | {"methods": [method for method in summary["methods"] if method.get("deviation")]}, cells)
    out.caption = (
        "KV of the loaded tokens; the question's attention to its context; both relative to full recompute: "
        "mean over layers, and the largest value with its layer; 0 is exact"
    )
    return out


def _largest(layers: list[float | None]) -> str:
    """The largest value of a list over layers, with its layer."""
    known = [(value, layer) for layer, value in enumerate(layers) if value is not None]
    if not known:
        return ""
    value, layer = max(known, key=lambda at: at[0])
    return f"{value:.3f}, {layer:>2}"


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
