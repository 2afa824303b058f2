"""Runs the parts one after the other and writes the report after each, so that an interrupted run shows what it has."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.failures import failed_since, failures, in_words
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Settings
from cacheblend.evaluation.records import folder_name
from cacheblend.evaluation.runner import describe
from cacheblend.evaluation.scorers import Scorer
from lab.paper import batch, chunk_length, chunk_number, device, quality, rate, ratio, report
from lab.paper.context import Context, DataSet, LeftOutError, Part, Progress, Sweeps

PARTS = (quality.PART, ratio.PART, chunk_number.PART, chunk_length.PART, batch.PART, rate.PART, device.PART)
Finished = Callable[[str, dict[str, Any]], None]
"""Called with (name of the part, its result)."""


def run_paper(
    engine: BlendEngine,
    data: Sequence[DataSet],
    scorers: Sequence[Scorer],
    *,
    settings: Settings | None = None,
    sweeps: Sweeps | None = None,
    out: Path,
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> dict[str, Any]:
    """Measures what is not there yet, draws all figures, writes the report.

    Args:
        engine: on a store in memory; it must not capture missed chunks. Nothing else may run on it.
        data: with contexts already split; names are unique.
        scorers: the first one is drawn; rows without gold answers are compared with full recompute's first token.
        settings: layout of the prompts, most tokens of an answer; all passages of a row are used.
        sweeps: see `Sweeps`.
        out: parent of the folder of results, whose name has the hash of model, data and settings. Parts are kept in
            folders of their own, so other sweeps measure only what they change.
        progress: see `Progress`.
        finished: see `Finished`.

    Returns:
        What ``report.json`` in the folder has: ``parts`` by name, each with ``points`` and ``notes``, or with
        ``left_out``, the reason; ``data``, ``model``, ``folder``, ``pictures`` by part, and where it was measured.

    Raises:
        InvalidInputError: no data, two sets of one name, or as `evaluate`.
    """
    names = [of.name for of in data]
    if not names or len(set(names)) < len(names):
        raise InvalidInputError(f"data sets with different names are needed, got {', '.join(names) or 'none'}")
    settings = settings or Settings()
    folder = out / folder_name(f"paper-{engine.name}", _identity(engine, data, settings))
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(engine, data, settings, scorers, sweeps or Sweeps(), folder, progress or (lambda *_: None))
    results: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        results[part.name] = _run(part, context)
        whole = report.write(context, PARTS, results)
        if finished is not None:
            finished(part.name, results[part.name])
    return whole


def _run(part: Part, context: Context) -> dict[str, Any]:
    before = failures()
    try:
        found = part.measure(context)
        if failed := failed_since(before):
            raise LeftOutError(f"{in_words(failed)} failed while it was measured, and was computed in full")
        return found
    except LeftOutError as reason:
        return {"points": [], "notes": [], "machines": [], "resumed": 0, "left_out": str(reason)}


def _identity(engine: BlendEngine, data: Sequence[DataSet], settings: Settings) -> dict[str, Any]:
    """What no part can share with another run."""
    rows = [row for of in data for row in of.rows]
    return describe(engine, rows, [], settings, []) | {"sets": [(of.name, len(of.rows)) for of in data]}
