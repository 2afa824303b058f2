"""An inspection as JSON, a summary by layer and all values by token; and as a page of coloured text."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment

from lab.inspection.inspection import CurvePoint, Inspection, MethodView

DIGITS = 5  # significant digits


def summary(of: Inspection, layers: Sequence[int] | None = None) -> dict[str, Any]:
    """The figures of these layers, as shown on the terminal. Undefined values are None."""
    methods, compared = _methods(of), {"reuse": of.reuse, "blend": of.blend}
    means = {name: of.mean_deviation(method) for name, method in compared.items()}
    cross = {name: of.cross_chunk(method) for name, method in methods.items()}
    top, following = of.top_share(), of.next_correlation()
    by_layer = [
        {
            "layer": layer,
            "mean_deviation": {name: mean[layer] for name, mean in means.items()},
            "top_share": top[layer],
            "correlation_with_next": following[layer],
            "attention_deviation": {name: method.attention_deviation[layer] for name, method in compared.items()},
            "cross_chunk_attention": {name: values[layer] for name, values in cross.items()},
        }
        for layer in (range(of.num_layers) if layers is None else layers)
    ]
    return {
        "model": of.model,
        "selector": of.selector,
        "prompt_tokens": len(of.tokens),
        "loaded_tokens": len(of.candidates),
        "recomputed_tokens": len(of.recomputed),
        "compute": _plain({name: method.compute for name, method in methods.items()}),
        "first_token": {name: _plain(vars(method.agreement)) for name, method in compared.items()},
        "layers": [_plain(each) for each in by_layer],
        "attention_deviation_by_ratio": {
            name: [_point(point) for point in points] for name, points in of.curves.items()
        },
    }


def numbers(of: Inspection) -> dict[str, Any]:
    """All values; arrays as nested lists with the shapes documented in `Inspection`.

    ``kv_deviation`` is squared; its root divided by the layer's ``kv_norm`` is the relative deviation in the figures.
    """
    return {
        **summary(of),
        "tokens": of.tokens,
        "sources": of.sources,
        "parts": [{"label": part.label, "is_chunk": part.is_chunk, "runs": list(part.runs)} for part in of.parts],
        "recomputed": of.recomputed.tolist(),
        "kv_norm": _plain(of.kv_norm),
        "kv_deviation": {"reuse": _plain(of.reuse.kv_deviation), "blend": _plain(of.blend.kv_deviation)},
        "rank_correlation": _plain(of.correlation),
        "attention": {name: _plain(method.attention) for name, method in _methods(of).items()},
    }


def _point(point: CurvePoint) -> dict[str, Any]:
    deviation = point.attention_deviation
    mean = float(np.nanmean(deviation)) if np.isfinite(deviation).any() else math.nan
    return {"ratio": point.ratio, **_plain({"compute": point.compute, "mean": mean, "by_layer": deviation})}


def _methods(of: Inspection) -> dict[str, MethodView]:
    return {"full": of.full, "reuse": of.reuse, "blend": of.blend}


def _plain(value: Any) -> Any:
    """Converts to JSON types: arrays to lists, rounded, with None for NaN and infinities."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(part) for part in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


TEMPLATE = Path(__file__).with_name("heat_map.html.j2")


def heat_map(of: Inspection, layers: Sequence[int] | None = None) -> str:
    """The text of the prompt coloured by deviation: a self-contained page, which offers these layers.

    The template escapes all texts; numbers are embedded as JSON.
    """
    shown = list(range(of.num_layers)) if layers is None else list(layers)
    reuse, blend = of.relative(of.reuse)[shown], of.relative(of.blend)[shown]
    data = {
        "layers": shown,
        "reuse": np.round(reuse, 3).tolist(),
        "blend": np.round(blend, 3).tolist(),
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


def _blocks(of: Inspection) -> list[dict[str, Any]]:
    """Runs of tokens on the page, each token with its position, text and CSS classes.

    Line breaks and empty tokens get a visible mark, so that their colour shows.
    """
    runs = sorted((start, stop, part) for part in of.parts for start, stop in part.runs)
    recomputed = set(of.recomputed.tolist())

    def classes(at: int) -> str:
        names = {"r": at in recomputed, "n": "\n" in of.tokens[at], "h": not of.tokens[at]}
        return " ".join(name for name, holds in names.items() if holds)

    return [
        {
            "label": "" if part.label == "between" else part.label,
            "is_chunk": part.is_chunk,
            "tokens": [(at, of.tokens[at], classes(at)) for at in range(start, stop)],
        }
        for start, stop, part in runs
    ]
