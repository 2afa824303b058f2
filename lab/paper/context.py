"""What all parts of the evaluation share: the engine, the rows, what is compared, where results are kept."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.core.select.selectors import check_ratio
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Evaluation, Settings, evaluate
from cacheblend.evaluation.methods import Method
from cacheblend.evaluation.records import folder_name
from cacheblend.evaluation.runner import Case, describe
from cacheblend.evaluation.scorers import Scorer
from lab import checkout
from lab.bench import AdvanceStage, silent

CODE = (
    *(f"paper/{name}.py" for name in ("compared", "side_by_side", "device")),
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
    """Questions of one file."""

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

    def kept(self, name: str, facts: Mapping[str, Any], cases: Sequence[Case]) -> checkout.Kept:
        """The finished measurements of a part that are no rows of an evaluation; see `Kept`.

        `facts` is all that its measurements depend on, beside engine, prompts of the cases and settings.
        """
        prompts = [prompt for case in cases for prompt in case.prompts.values()]
        config = describe(self.engine, [case.row for case in cases], [], self.settings, prompts)
        config |= {"part": name, "paper": checkout.code_digest(CODE), **facts}
        return checkout.Kept(self.folder / folder_name(name, config), json.loads(json.dumps(config)))


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
