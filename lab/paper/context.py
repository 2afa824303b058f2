"""What all parts of the evaluation share: methods compared, engine, rows, where results are kept, points of figures.

A family of methods has the same name and colour in all figures.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.core.select.selectors import Gradual, Hkvd, NoRows, Selector, check_ratio
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Evaluation, Settings, evaluate
from cacheblend.evaluation.bootstrap import bootstrap_means
from cacheblend.evaluation.methods import FullRecompute, Fused, Label, Method, PrefixCaching
from cacheblend.evaluation.records import Cell, folder_name
from cacheblend.evaluation.runner import Case, describe
from cacheblend.evaluation.scorers import Scorer, best
from lab.bench import AdvanceStage, silent
from lab.checkout import code_digest
from lab.measurements import Kept

FULL, PREFIX, REUSE, BLEND, GRADUAL, ONE_CHECK = "full", "prefix", "reuse", "blend", "gradual", "one check"
TITLES = {
    FULL: "full recompute",
    PREFIX: "prefix caching",
    REUSE: "full reuse",
    BLEND: "blend",
    GRADUAL: "HKVD, gradual (paper)",
    ONE_CHECK: "HKVD, one check (authors' code)",
}
"""Names of the families, in their order in legends and tables."""
RATIOS = {GRADUAL: 0.15, ONE_CHECK: 0.16}
"""The paper's recompute ratio, and that of the authors' code."""


def methods(engine: BlendEngine) -> list[Method]:
    """One method of each family; ``blend`` has the model's own settings."""
    return [
        FullRecompute(Label(TITLES[FULL], FULL, FULL)),
        PrefixCaching(Label(TITLES[PREFIX], PREFIX, PREFIX)),
        Fused(Label(TITLES[REUSE], REUSE, REUSE), NoRows()),
        *blends(engine),
    ]


def blends(engine: BlendEngine) -> list[Fused]:
    """The blends among `methods`."""
    own = engine.runtime.settings.config
    ratio = own.recompute_ratio if _has_ratio(own) else None
    return [
        Fused(Label(TITLES[BLEND], BLEND, BLEND, own.selector, ratio), engine.runtime.settings.selector()),
        *(_hkvd(family, RATIOS[family], TITLES[family]) for family in (GRADUAL, ONE_CHECK)),
    ]


def at_ratios(engine: BlendEngine, ratios: tuple[float, ...]) -> list[Method]:
    """Every blend at each ratio, except those among `methods`; the model's own settings only if they have a ratio."""
    own = engine.runtime.settings.config
    found: list[Method] = []
    for ratio in dict.fromkeys(ratios):
        if _has_ratio(own) and ratio != own.recompute_ratio:
            label = Label(f"{TITLES[BLEND]}, r = {ratio:g}", BLEND, BLEND, own.selector, ratio)
            found.append(Fused(label, own.make_selector(ratio)))
        for family, usual in RATIOS.items():
            if ratio != usual:
                found.append(_hkvd(family, ratio, f"{TITLES[family]}, r = {ratio:g}"))
    return found


def own_is(engine: BlendEngine) -> str:
    """The family that the model's own settings are the same as; empty if they are none of the others."""
    own = engine.runtime.settings.selector()
    return next((family for family, ratio in RATIOS.items() if _selector(family, ratio) == own), "")


def _hkvd(family: str, ratio: float, name: str) -> Fused:
    return Fused(Label(name, BLEND, family, "hkvd", ratio), _selector(family, ratio))


def _selector(family: str, ratio: float) -> Selector:
    return Gradual(ratio) if family == GRADUAL else Hkvd((1,), (ratio,), "v")


def _has_ratio(own: BlendConfig) -> bool:
    return own.make_selector(0.0) != own.make_selector(1.0)


CODE = (
    *(f"paper/{name}.py" for name in ("context", "side_by_side", "device")),
    "servers/clients.py",
)
"""The source files that affect measurements which are no rows of an evaluation."""


@dataclass(frozen=True)
class Sweeps:
    """The points of the sweeps. Those that the data or the model's context cannot have are left out, with a reason.

    Attributes:
        ratios: recompute ratios.
        chunk_numbers: numbers of passages.
        chunk_lengths: tokens of a passage.
        batch_sizes: requests side by side.
        load: request rates: so many of equal distance, from a third of full recompute's throughput at saturation to a
            tenth above the largest of all methods.
        load_requests: fewest requests at each rate; rows are asked again until there are as many.
        clients: most requests in prefill or decoding while requests arrive.
        slowness: emulated devices, by the time that loading a prompt takes over that of its full prefill.
        share: of the rows, for all sweeps but that of the ratio.
    """

    ratios: tuple[float, ...] = (0.05, 0.1, 0.15, 0.3, 0.5)
    chunk_numbers: tuple[int, ...] = (2, 4, 6, 8, 12, 16, 24, 32)
    chunk_lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    load: int = 5
    load_requests: int = 24
    clients: int = 8
    slowness: tuple[float, ...] = (0.3, 1.0, 3.0)
    share: float = 0.5

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            check_ratio(ratio)
        whole = (*self.chunk_numbers, *self.chunk_lengths, *self.batch_sizes, self.load, self.load_requests)
        if any(value < 1 for value in whole):
            raise InvalidInputError(f"the points of the sweeps must be at least 1, got {min(whole)}")


@dataclass(frozen=True)
class DataSet:
    name: str
    rows: Sequence[QuestionRow]
    bad: Sequence[str] = ()


@dataclass(frozen=True)
class Context:
    """What a part works with.

    Attributes:
        engine: holds the passages in its store; it captures nothing.
        data: at least one set.
        settings: layout of the prompts, most tokens of an answer.
        scorers: the first one is drawn.
        sweeps: the points.
        folder: for results; each part makes folders of its own in it.
        progress: called with (name of the part, done, in all).
    """

    engine: BlendEngine
    data: Sequence[DataSet]
    settings: Settings
    scorers: Sequence[Scorer]
    sweeps: Sweeps
    folder: Path
    progress: AdvanceStage = silent

    @property
    def rows(self) -> list[QuestionRow]:
        """All rows; the category of a row is its data set."""
        return [replace(row, category=of.name) for of in self.data for row in of.rows]

    @property
    def some_rows(self) -> list[QuestionRow]:
        """The first rows of each data set, by the share of the sweeps."""
        counts = {of.name: max(1, round(self.sweeps.share * len(of.rows))) for of in self.data}
        return [replace(row, category=of.name) for of in self.data for row in of.rows[: counts[of.name]]]

    def evaluated(
        self,
        part: str,
        rows: Sequence[QuestionRow],
        methods: list[Method],
        place: tuple[int, int] = (0, 1),
        **more: Any,
    ) -> Evaluation:
        """Rows by methods in the part's own folder, unless `more` says otherwise; see `evaluate`.

        `place`: number of this evaluation among those of the part, for progress.
        """

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "answering":  # storing passages is not shown
                self.progress(part, place[0] * total + done, place[1] * total)

        options: dict[str, Any] = {"settings": self.settings, "out": self.folder, "name": part, "progress": progress}
        return evaluate(more.pop("engine", self.engine), rows, methods, **options | more)

    def kept(self, name: str, facts: Mapping[str, Any], cases: Sequence[Case]) -> Kept:
        """The finished measurements of a part that are no rows of an evaluation; see `Kept`.

        `facts` is all that its measurements depend on, beside engine, prompts of the cases and settings.
        """
        prompts = [prompt for case in cases for prompt in case.prompts.values()]
        config = describe(self.engine, [case.row for case in cases], [], self.settings, prompts)
        config |= {"part": name, "paper": code_digest(CODE), **facts}
        return Kept(self.folder / folder_name(name, config), json.loads(json.dumps(config)))


class LeftOutError(CacheBlendError):
    """A part that this data or this model cannot have, or in which a blend failed; the message says why."""


@dataclass(frozen=True)
class Part:
    """A figure of the report.

    Attributes:
        name: of its picture and its part of the JSON.
        title: in a few words.
        measure: measures what is not there yet. Returns ``points``, ``notes`` (lines for people), ``machines``;
            raises `LeftOutError`.
        draw: draws what `measure` returned.
        columns: of its table beside those that all have: heading, and the cell of a point.
    """

    name: str
    title: str
    measure: Callable[[Context], dict[str, Any]]
    draw: Callable[[dict[str, Any], str, Path], None]
    columns: Mapping[str, Callable[[dict[str, Any]], str]]


ALL = ""
"""The data set's name in points over all sets."""
AGREEMENT = "top_1"
"""The measure without gold answers: the first token is the one that full recompute finds most likely."""


@dataclass(frozen=True)
class Answered:
    """An answer of one method, by family and name, to one row of a data set; None: there is none, or it is unknown.

    Attributes:
        x: the point of the sweep.
        scores: by scorer; empty without gold answers.
        agrees: first token as full recompute's.
        compute: share of a full prefill.
        recomputed: share of the loaded tokens.
    """

    data: str
    method: tuple[str, str]
    ratio: float | None
    x: float | None
    ttft_s: float
    scores: dict[str, float]
    agrees: float | None
    compute: float | None = None
    recomputed: float | None = None


def of_evaluation(
    found: Evaluation, scorers: Sequence[Scorer], x: Callable[[Cell], float | None] = lambda cell: None
) -> list[Answered]:
    """The answers of an evaluation whose categories are data sets; `x` gives a cell's point of the sweep."""
    labels = {label.name: label for label in found.methods}
    answers = []
    for row in found.rows:
        for cell in row.cells:
            if cell.skipped:
                continue
            label = labels[cell.method]
            answers.append(
                Answered(
                    row.category,
                    (label.family, label.name),
                    label.ratio,
                    x(cell),
                    cell.ttft_s,
                    score(scorers, cell.answer, row.answers),
                    None if cell.top_1 is None else float(cell.top_1),
                    cell.total_compute,
                    cell.recomputed_tokens / cell.loaded_tokens if cell.loaded_tokens else None,
                )
            )
    return answers


def score(scorers: Sequence[Scorer], answer: str, golds: Sequence[str]) -> dict[str, float]:
    """The best score over several gold answers, by scorer; empty without gold answers."""
    return {scorer.name: best(scorer, answer, golds) for scorer in scorers} if golds else {}


def points(answers: Iterable[Answered], *, by_data: bool = False) -> list[dict[str, Any]]:
    """Means over rows, ready for JSON, in the order of the answers: over all data sets, or for each.

    Returns:
        For each method and point ``{"data", "family", "method", "ratio", "x", "rows", "ttft_s", "compute",
        "recomputed", "quality"}``; ``ttft_s`` is ``{"median", "low", "high"}`` (quartiles), ``quality`` has for each
        scorer and for `AGREEMENT` ``{"mean", "low", "high", "n"}`` (95 % interval: exact for a share, else
        bootstrapped) if there is any.
    """
    groups: dict[tuple[str, tuple[str, str], float | None, float | None], list[Answered]] = {}
    for each in answers:
        groups.setdefault((each.data if by_data else ALL, each.method, each.ratio, each.x), []).append(each)
    found = []
    for (data, method, ratio, x), group in groups.items():
        low, median, high = np.percentile([each.ttft_s for each in group], [25, 50, 75])
        names = dict.fromkeys(name for each in group for name in each.scores)
        quality = {name: _mean([each.scores[name] for each in group if name in each.scores]) for name in names}
        agrees = [each.agrees for each in group if each.agrees is not None]
        point: dict[str, Any] = {"data": data, "family": method[0], "method": method[1], "ratio": ratio, "x": x}
        point |= {"rows": len(group), "ttft_s": {"median": float(median), "low": float(low), "high": float(high)}}
        point["compute"] = _plain_mean([each.compute for each in group])
        point["recomputed"] = _plain_mean([each.recomputed for each in group])
        found.append(point | {"quality": quality | ({AGREEMENT: _mean(agrees)} if agrees else {})})
    return found


def _mean(values: Sequence[float]) -> dict[str, Any]:
    known = np.array(values, dtype=float)
    found = bootstrap_means(known[:, None])
    found.make_exact(0, known)
    return {"mean": float(found.mean[0]), "low": float(found.low[0]), "high": float(found.high[0]), "n": len(values)}


def _plain_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
