"""Runs an evaluation: all passages stored once, then row by row all arms next to each other, and each row kept.

engine = BlendEngine.from_pretrained("path/to/model")
found = evaluate(engine, read_questions(path), make_arms(ratios=[0.05, 0.15, 0.3]), out=Path("evaluations"))
print(summarise(found, make_scorers(["f1"])))
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError, PromptTooLongError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.data import QuestionRow
from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf.baselines import agreement, touch
from cacheblend.evaluation.choices import make_arms
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.methods import Arm, Asked, Label, Outcome
from cacheblend.evaluation.records import Cell, RowLog, RowResult, folder_name
from cacheblend.evaluation.run_config import describe
from cacheblend.evaluation.templates import Template

Progress = Callable[[str, int, int], None]
"""Called with (``warming`` or ``answering``, passages or rows done, in all)."""


@dataclass(frozen=True)
class Settings:
    """What all arms share.

    Attributes:
        template: of the prompts.
        top_k: only so many of a row's passages, the first ones; every arm runs at each. None: all of them.
        max_tokens: of an answer.
    """

    template: Template = field(default_factory=Template)
    top_k: tuple[int | None, ...] = (None,)
    max_tokens: int = 32

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidInputError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.top_k or any(k is not None and k < 1 for k in self.top_k):
            raise InvalidInputError(f"top_k must be at least 1, got {', '.join(map(str, self.top_k)) or 'none'}")


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        config: model, data, settings, code and libraries; its hash is in the folder's name.
        arms: what was compared, in order.
        top_k: at which numbers of passages.
        rows: all rows, in order.
        folder: where they lie; None if only in memory.
        resumed: rows that lay there already.
        torn: a row that was half written when an earlier run was killed has been evaluated again.
    """

    config: dict[str, Any]
    arms: tuple[Label, ...]
    top_k: tuple[int | None, ...]
    rows: list[RowResult]
    folder: Path | None = None
    resumed: int = 0
    torn: bool = False


def evaluate(
    engine: BlendEngine,
    rows: Sequence[QuestionRow],
    arms: Sequence[Arm] | None = None,
    *,
    settings: Settings | None = None,
    out: Path | None = None,
    name: str = "",
    progress: Progress | None = None,
) -> Evaluation:
    """Answers every row by every arm.

    Prompts over the model's context are skipped and counted, never cut. With `out`, rows are kept in a folder named
    after `name` and the hash of all that shapes the results; a second call with the same goes on where the first
    stopped, and computes nothing where all rows are there.

    Args:
        engine: model, and the store in which the passages are put; nothing else is stored but the text in front of
            the first passage.
        rows: contexts split already (`cacheblend.data.split`).
        arms: as `make_arms` makes them; None for its defaults. Agreement and differences need ``full`` among them.
        settings: what they share.
        out: where folders of results are; None keeps the results in memory.
        name: of the run, for people.
        progress: see `Progress`.

    Raises:
        InvalidInputError: no row, a row that no prompt can be made of, none that fits the model's context, a check
            layer that the model does not have, two arms of one name.
    """
    arms, settings = list(make_arms() if arms is None else arms), settings or Settings()
    progress = progress or (lambda stage, done, total: None)
    _check(engine, rows, arms)
    cases = [_case(engine, settings, number, row) for number, row in enumerate(rows)]
    if not any(case.prompts for case in cases):
        raise InvalidInputError(
            f"none of the {len(cases)} prompts fits {engine.survey.max_length_reason} {engine.survey.max_length}; "
            "use fewer passages (top_k) or shorter ones"
        )
    prompts = [prompt for case in cases for prompt in case.prompts.values()]
    config = describe(engine, rows, arms, settings, prompts)
    with RowLog(None if out is None else out / folder_name(name, config), config) as log:
        resumed, scale = len(log.rows), ComputeScale.of(engine)
        pending = [case for case in cases if case.number not in log.rows]
        progress("answering", len(log.rows), len(cases))
        for index, group in enumerate(_groups(engine, pending)):
            _warm(engine, group, progress, first=index == 0)
            for case in group:
                log.add(_run(engine, case, arms, settings, scale))
                progress("answering", len(log.rows), len(cases))
        labels = tuple(arm.label for arm in arms)
        done = [log.rows[case.number] for case in cases]
        return Evaluation(config, labels, settings.top_k, done, log.folder, resumed, log.torn)


# ---- before the first row -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A row with its prompts by `top_k`, and why others are left out."""

    number: int
    row: QuestionRow
    passages: list[Passage]
    prompts: dict[int | None, Prompt]
    too_long: dict[int | None, str]

    @property
    def longest(self) -> Prompt:
        return max(self.prompts.values(), key=len)


def _check(engine: BlendEngine, rows: Sequence[QuestionRow], arms: Sequence[Arm]) -> None:
    names = [arm.label.name for arm in arms]
    if len(set(names)) < len(names):
        raise InvalidInputError(
            f"two arms have one name: {', '.join(sorted({n for n in names if names.count(n) > 1}))}"
        )
    if not rows:
        raise InvalidInputError("there is no row to evaluate")
    for arm in arms:
        arm.check(len(engine.survey.layout.layers))


def _case(engine: BlendEngine, settings: Settings, number: int, row: QuestionRow) -> _Case:
    where = f"row {number}" + (f" (id {row.id})" if row.id not in ("", str(number)) else "")
    if not row.passages:
        raise InvalidInputError(f"{where}: it has no passage")
    layout = settings.template.layout
    if not (row.question + layout.question.replace("{question}", "")).strip():
        raise InvalidInputError(f"{where}: its question is empty, and the template adds nothing; use another template")
    case = _Case(number, row, [Passage(text.text, text.title) for text in row.passages], {}, {})
    try:
        for k in settings.top_k:
            try:
                case.prompts[k] = layout.prompt(engine, case.passages[:k], row.question)
            except PromptTooLongError as error:
                case.too_long[k] = str(error)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from error
    return case


def _groups(engine: BlendEngine, cases: Sequence[_Case]) -> Iterator[list[_Case]]:
    """Cases whose passages go into half of the store together, so that none is evicted before it is used."""
    stats = engine.store.stats()
    room = math.inf if stats.max_bytes is None else stats.max_bytes / 2 / engine.survey.layout.block_bytes(1)
    group: list[_Case] = []
    tokens = 0
    for case in cases:
        size = len(case.longest) if case.prompts else 0
        if group and tokens + size > room:
            yield group
            group, tokens = [], 0
        group.append(case)
        tokens += size
    if group:
        yield group


def _warm(engine: BlendEngine, group: Sequence[_Case], progress: Progress, *, first: bool) -> None:
    """Stores the passages; before the first row also the text in front of them, as any server would have it."""
    prompts = [case.longest for case in group if case.prompts]
    if not prompts:
        return
    behind = prompts[0] if engine.planner.anchor.rule == "system" else None
    chunks = [segment for prompt in prompts for segment in prompt.chunks]
    engine.warm(chunks, system=behind, progress=lambda done, total: progress("warming", done, total))
    if first:
        touch(engine, prompts[0])
        request = engine.start(prompts[0], SamplingParams(max_new_tokens=1))
        engine.step(request)
        engine.finish(request)
        engine.flush()


# ---- a row --------------------------------------------------------------------------------------------------


def _run(engine: BlendEngine, case: _Case, arms: Sequence[Arm], settings: Settings, scale: ComputeScale) -> RowResult:
    """All arms next to each other; every other row in reverse, so that a drift of the machine favours none."""
    cells: list[Cell] = []
    for k, prompt in case.prompts.items():
        passages = case.passages[:k]
        asked = Asked(engine, settings.template, case.row.question, passages, prompt, settings.max_tokens)
        given: dict[str, Outcome | str] = {}
        for arm in arms if case.number % 2 == 0 else reversed(arms):
            try:
                given[arm.label.name] = arm.answer(asked)
            except PromptTooLongError as error:
                given[arm.label.name] = str(error)
        full = next((given[arm.label.name] for arm in arms if arm.label.kind == "full"), None)
        for arm in arms:
            blank = Cell(arm.label.name, k, len(passages))
            cells.append(_cell(blank, given[arm.label.name], full, scale, len(prompt)))
    row = case.row
    return RowResult(
        number=case.number,
        id=row.id or str(case.number),
        category=row.category,
        answers=list(row.answers),
        cells=cells,
        too_long=list(case.too_long.items()),
        machine=provenance.machine_line(),
    )


def _cell(
    blank: Cell, outcome: Outcome | str, full: Outcome | str | None, scale: ComputeScale, prompt_tokens: int
) -> Cell:
    if isinstance(outcome, str):
        return Cell(blank.arm, blank.top_k, blank.chunks, skipped=outcome)
    close = None
    if isinstance(full, Outcome) and full.logits is not None and outcome.logits is not None:
        close = agreement(outcome.logits, full.logits)
    return Cell(
        arm=blank.arm,
        top_k=blank.top_k,
        chunks=blank.chunks,
        answer=outcome.text,
        token_ids=outcome.token_ids,
        ttft_s=outcome.ttft_s,
        total_s=outcome.total_s,
        prompt_tokens=outcome.prompt_tokens,
        row_layers=outcome.row_layers,
        projected_rows=outcome.projected_rows,
        loaded_tokens=outcome.loaded_tokens,
        recomputed_tokens=outcome.recomputed_tokens,
        missed_tokens=outcome.missed_tokens,
        total_compute=scale.share(outcome.row_layers, outcome.projected_rows, prompt_tokens),
        top_1=None if close is None else close.top_1,
        kl=None if close is None or not math.isfinite(close.kl) else close.kl,
    )
