"""Runs an evaluation: stores all passages once, then answers every row with all methods and records the row."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import cacheblend
from cacheblend.core.errors import InvalidInputError, ModelOverflowError, PromptTooLongError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.data import BadRowError, QuestionRow
from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.baselines import touch
from cacheblend.engines.shadow import agreement
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.methods import Asked, Label, Method, Outcome, OwnAnswer, make_methods
from cacheblend.evaluation.records import Cell, LineLog, RowResult, folder_name
from cacheblend.evaluation.templates import Template

Progress = Callable[[str, int, int], None]  # called with (``warming`` or ``answering``, passages or rows done, total)

CODE = (
    *("core", "store", "engines"),
    *(f"evaluation/{name}.py" for name in ("methods", "compute", "records", "runner", "templates")),
)
"""The source files that affect cells. Reports are not among them: later code may report the same rows again."""
ANSWERS = ("gold", "model")
LIBRARIES = ("python", "torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class Settings:
    """What all methods of a run share.

    Attributes:
        template: layout of the prompts.
        top_k: numbers of passages; every method runs with the first so many passages of each row. None: all of them.
        max_tokens: most tokens of an answer.
        answers: ``gold``: those of the rows alone; ``model``: methods are also compared over the model's own answer
            under full recompute, each token given those in front of it.

    Raises:
        InvalidInputError: `max_tokens` or a `top_k` below 1, no `top_k` at all, or no such `answers`.
    """

    template: Template = field(default_factory=Template)
    top_k: tuple[int | None, ...] = (None,)
    max_tokens: int = 32
    answers: str = "gold"

    def __post_init__(self) -> None:
        if self.answers not in ANSWERS:
            raise InvalidInputError(f"answers {self.answers!r}: choose from {', '.join(ANSWERS)}")
        if self.max_tokens < 1:
            raise InvalidInputError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.top_k or any(k is not None and k < 1 for k in self.top_k):
            raise InvalidInputError(f"top_k must be at least 1, got {', '.join(map(str, self.top_k)) or 'none'}")


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        config: model, data, settings, code and libraries; its hash is part of the folder's name.
        methods: the methods compared, in order.
        top_k: the numbers of passages.
        rows: all rows that were answered, in order.
        folder: where the rows are written; None if they are only in memory.
        resumed: number of rows that were in the folder already.
        torn: an earlier run was killed while it wrote a row, which has been evaluated again.
    """

    config: dict[str, Any]
    methods: tuple[Label, ...]
    top_k: tuple[int | None, ...]
    rows: list[RowResult]
    folder: Path | None = None
    resumed: int = 0
    torn: bool = False


def evaluate(
    engine: BlendEngine,
    rows: "Sequence[QuestionRow | Case]",
    methods: Sequence[Method] | None = None,
    *,
    settings: Settings | None = None,
    out: Path | None = None,
    name: str = "",
    progress: Progress | None = None,
    enough: Callable[[int], bool] = lambda answered: False,
) -> Evaluation:
    """Answers every row with every method.

    Prompts that exceed the model's context are skipped and counted, never truncated. With `out`, rows are written to a
    folder named after `name` and the hash of all that affects the results; a second call with the same arguments
    resumes where the first stopped, and computes nothing if all rows are present.

    Args:
        engine: model and store; the passages and the text preceding the first passage are stored, nothing else.
        rows: with contexts already split (`cacheblend.data.questions`); or what `make_cases` made of them with these
            settings.
        methods: see `make_methods`; None takes its defaults. Agreement and differences need ``full`` among them.
        settings: shared by all methods.
        out: parent of the folder of results; None keeps the results in memory.
        name: name of the run, for people.
        progress: see `Progress`.
        enough: called before each row with the number of rows answered; once it is true the others are left out.

    Raises:
        BadRowError: a row that makes no valid prompt; `make_cases` can leave such rows out.
        InvalidInputError: no rows, no prompt that fits the model's context, a check layer that the model does not have,
            or two methods with the same name.
    """
    methods = list(make_methods(profile=engine.runtime.settings.config) if methods is None else methods)
    settings = settings or Settings()
    progress = progress or (lambda stage, done, total: None)
    names = [method.label.name for method in methods]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidInputError(f"two methods have the same name: {', '.join(doubled)}")
    if not rows:
        raise InvalidInputError("there are no rows to evaluate")
    survey = engine.runtime.survey
    for method in methods:
        method.check(survey.num_layers)
    # numbered anew: those of rows that were left out would make a resumed run take one row for another
    cases = [replace(case, number=number) for number, case in enumerate(make_cases(engine, settings, rows))]
    if not any(case.prompts for case in cases):
        raise InvalidInputError(
            f"none of the {len(cases)} prompts fits {survey.max_length_reason} {survey.max_length}; "
            "use fewer passages (top_k) or shorter ones"
        )
    prompts = [prompt for case in cases for prompt in case.prompts.values()]
    config = describe(engine, [case.row for case in cases], methods, settings, prompts)
    with LineLog(None if out is None else out / folder_name(name, config), config, RowResult.of_dict) as log:
        finished = {row.number: row for row in log.items}
        resumed, scale = len(finished), ComputeScale.of(engine)
        pending = [case for case in cases if case.number not in finished]
        progress("answering", len(finished), len(cases))
        for index, group in enumerate(groups_that_fit(engine, pending)):
            if enough(len(finished)):
                break
            store_passages(engine, group, progress, first=index == 0)
            for case in group:
                if enough(len(finished)):
                    break
                row = finished[case.number] = _run(engine, case, methods, settings, scale)
                log.append(asdict(row))
                progress("answering", len(finished), len(cases))
        labels = tuple(method.label for method in methods)
        done = [finished[case.number] for case in cases if case.number in finished]
        return Evaluation(config, labels, settings.top_k, done, log.folder, resumed, log.torn)


def describe(
    engine: BlendEngine,
    rows: Sequence[QuestionRow],
    methods: Sequence[Method],
    settings: Settings,
    prompts: Iterable[Prompt],
) -> dict[str, Any]:
    """The config of a run, as plain JSON; its hash is part of the folder's name. The prompts' token ids cover
    tokenizer, chat template and template. The machine is not included: it affects times only, and is written with each
    row."""
    data, asked = hashlib.sha256(), hashlib.sha256()
    for row in rows:
        data.update(json.dumps(asdict(row), ensure_ascii=False).encode())
    for prompt in prompts:
        asked.update(b"".join(len(s).to_bytes(4) + s.token_ids.tobytes() for s in prompt.segments) + b"|")
    versions = provenance.versions()
    described = {
        "cacheblend": cacheblend.__version__,
        "code": provenance.code_digest(CODE),
        "libraries": {name: versions[name] for name in LIBRARIES},
        "model": engine.name,
        "fingerprint": engine.runtime.planner.root.hex(),
        "device": engine.model.device.type,
        "store": engine.store.stats().tier,
        "engine": asdict(engine.config),
        "rows": len(rows),
        "data": data.hexdigest(),
        "prompts": asked.hexdigest(),
        "chat": settings.template.is_chat(engine),
        "template": asdict(settings.template),
        "top_k": settings.top_k,
        "max_tokens": settings.max_tokens,
        "answers": settings.answers,
        "methods": [repr(method) for method in methods],
    }
    plain: dict[str, Any] = json.loads(json.dumps(described))
    return plain


@dataclass(frozen=True)
class Case:
    """A row with its prompts by `top_k`, and the reasons for those that are skipped."""

    number: int
    row: QuestionRow
    prompts: dict[int | None, Prompt]
    too_long: dict[int | None, str]

    @property
    def longest(self) -> Prompt:
        return max(self.prompts.values(), key=len)


def make_cases(
    engine: BlendEngine, settings: Settings, rows: Sequence[QuestionRow | Case], bad: list[str] | None = None
) -> list[Case]:
    """The rows' prompts; those that exceed the model's context are left out of a case, with the reason. A case is taken
    as it is. `bad` gets the reasons for rows that make no valid prompt, which are left out; None: the first is a
    `BadRowError`. Raises `InvalidInputError` if none is left."""
    cases, layout = list[Case](), settings.template
    for number, row in enumerate(rows):
        if isinstance(row, Case):
            cases.append(row)
            continue
        case = Case(number, row, {}, {})
        try:
            if not row.passages:
                raise InvalidInputError("it has no passages")
            if not (row.question + layout.question.replace("{question}", "")).strip():
                raise InvalidInputError(
                    "the question is empty and the template adds nothing to it; use another template"
                )
            for k in settings.top_k:
                try:
                    prompt = layout.prompt(engine, row.passages[:k], row.question)
                    check_chunks(engine, prompt)
                    case.prompts[k] = prompt
                except PromptTooLongError as error:
                    case.too_long[k] = str(error)
            cases.append(case)
        except InvalidInputError as error:
            where = f"row {number}" + (f" (id {row.id})" if row.id not in ("", str(number)) else "")
            if bad is None:
                raise BadRowError(f"{where}: {error}") from error
            bad.append(f"{where}: {error}")
    if bad and rows and not cases:
        raise InvalidInputError(f"none of the {len(rows)} rows can be used; the first: {bad[-len(rows)]}")
    return cases


def check_chunks(engine: BlendEngine, prompt: Prompt) -> None:
    """Raises `PromptTooLongError`: a passage fits the model's context, but not with its anchor, so it is not stored."""
    anchor = engine.runtime.planner.anchor.segments(prompt)
    longest = max((len(each.stored_ids) for each in prompt.chunks), default=0)
    engine.runtime.survey.check_chunk(sum(map(len, anchor)) + longest, "a passage")


def groups_that_fit(engine: BlendEngine, cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Groups of cases whose passages fill at most half of the store, so that none is evicted before it is used."""
    stats = engine.store.stats()
    capacity = (
        math.inf if stats.max_bytes is None else stats.max_bytes / 2 / engine.runtime.survey.layout.block_bytes(1)
    )
    group: list[Case] = []
    tokens = 0
    for case in cases:
        size = len(case.longest) if case.prompts else 0
        if group and tokens + size > capacity:
            yield group
            group, tokens = [], 0
        group.append(case)
        tokens += size
    if group:
        yield group


def store_passages(engine: BlendEngine, group: Sequence[Case], progress: Progress, *, first: bool = True) -> None:
    """Stores the passages; before the first row also the text preceding them, as a running server would have it."""
    prompts = [case.longest for case in group if case.prompts]
    if not prompts:
        return
    system = prompts[0] if engine.runtime.planner.anchor.rule == "system" else None
    chunks = [segment for prompt in prompts for segment in prompt.chunks]
    engine.warm(chunks, system=system, progress=lambda done, total: progress("warming", done, total))
    if first:
        touch(engine, prompts[0])
        with engine.start(prompts[0], SamplingParams(max_new_tokens=1)) as request:
            request.step()
        engine.flush()


def _run(
    engine: BlendEngine, case: Case, methods: Sequence[Method], settings: Settings, scale: ComputeScale
) -> RowResult:
    """Runs all methods on a row; every other row in reverse order, so that drift of the machine favours none."""
    cells: list[Cell] = []
    for k, prompt in case.prompts.items():
        passages = case.row.passages[:k]
        asked = Asked(engine, settings.template, case.row.question, passages, prompt, settings.max_tokens)
        if settings.answers == "model":
            with suppress(ModelOverflowError):  # then there is no answer to compare with
                asked = replace(asked, own=OwnAnswer.of(asked))
        given: dict[str, Outcome | str] = {}
        for method in methods if case.number % 2 == 0 else reversed(methods):
            try:
                given[method.label.name] = method.answer(asked)
            except (PromptTooLongError, ModelOverflowError) as error:
                given[method.label.name] = str(error)
        full = next((given[method.label.name] for method in methods if method.label.kind == "full"), None)
        for method in methods:
            outcome, close = given[method.label.name], None
            if isinstance(outcome, str):
                cells.append(Cell(method.label.name, k, len(passages), skipped=outcome))
                continue
            if isinstance(full, Outcome) and full.logits is not None and outcome.logits is not None:
                close = agreement(outcome.logits, full.logits)
            measured = {name: vars(outcome)[name] for name in vars(outcome).keys() - {"text", "logits", "is_exact"}}
            cells.append(
                Cell(
                    method.label.name,
                    k,
                    len(passages),
                    **measured,
                    answer=outcome.text,
                    total_compute=scale.share(outcome.row_layers, outcome.projected_rows, len(prompt)),
                    top_1=None if close is None else close.first,
                    kl=None if close is None or not math.isfinite(close.kl) else close.kl,
                )
            )
    row = case.row
    return RowResult(
        number=case.number,
        id=row.id or str(case.number),
        category=row.category,
        answers=list(row.answers),
        cells=cells,
        too_long=list(case.too_long.items()),
        machine=provenance.machine_line(engine.model.device),
    )
