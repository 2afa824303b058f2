"""The text of a prompt coloured by KV deviation: a self-contained HTML file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment

from lab.inspection.inspection import Inspection

TEMPLATE = Path(__file__).with_name("heat_map.html.j2")


@dataclass(frozen=True)
class Block:
    """A run of tokens on the page.

    Attributes:
        label: label of its part; empty for text between chunks.
        is_chunk: drawn with a frame.
        tokens: (position, text, CSS classes) of each token.
    """

    label: str
    is_chunk: bool
    tokens: list[tuple[int, str, str]]


def heat_map(of: Inspection, layers: Sequence[int] | None = None) -> str:
    """Renders the page. The template escapes all texts; numbers are embedded as JSON.

    Args:
        of: the inspection.
        layers: layers offered on the page; None takes all.
    """
    shown = list(range(of.num_layers)) if layers is None else list(layers)
    reuse, blend = of.relative(of.reuse)[shown], of.relative(of.blend)[shown]
    data = {
        "layers": shown,
        "reuse": _lists(reuse),
        "blend": _lists(blend),
        "top": of.scale(shown),
        "sources": of.sources,
        "parts": of.part.tolist(),
        "labels": [part.label for part in of.parts],
        "recomputed": of.recomputed.tolist(),
    }
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return str(page.render(of=of, blocks=_blocks(of), data=data))


def _blocks(of: Inspection) -> list[Block]:
    runs = sorted((start, stop, part) for part in of.parts for start, stop in part.runs)
    recomputed = set(of.recomputed.tolist())
    return [
        Block(
            label="" if part.label == "between" else part.label,
            is_chunk=part.is_chunk,
            tokens=[(at, of.tokens[at], _classes(of.tokens[at], at in recomputed)) for at in range(start, stop)],
        )
        for start, stop, part in runs
    ]


def _classes(text: str, recomputed: bool) -> str:
    """CSS classes of a token; line breaks and empty tokens get a visible mark, so that their colour shows."""
    names = {"r": recomputed, "n": "\n" in text, "h": not text}
    return " ".join(name for name, holds in names.items() if holds)


def _lists(values: Any) -> list[list[float]]:
    rows: list[list[float]] = np.round(values, 3).tolist()
    return rows
