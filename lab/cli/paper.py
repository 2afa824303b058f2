"""`python -m lab paper`: from files and options to data sets and sweeps; `lab.paper` measures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cacheblend.cli.evaluate import Destination
from cacheblend.cli.models import needed_model
from cacheblend.cli.option_groups import numbers
from cacheblend.cli.options import (
    Anchor,
    AsJson,
    DeviceOptions,
    JsonFile,
    MaxTokens,
    OptionalModel,
    Out,
    QuestionOptions,
    Ratios,
    Scorers,
    TopK,
)
from cacheblend.cli.output import check_folder, check_outputs, say, stages

if TYPE_CHECKING:
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Settings
    from lab.paper.context import DataSet, Sweeps

ROWS = 50
"""Of each file, unless ``--limit`` says otherwise."""
INTERRUPTED = 130


@dataclass(frozen=True)
class PaperOptions:
    """What a user set.

    Attributes:
        model: folder, or ``nano``.
        questions: at least one file.
        ratios: points of the ratio's sweep; empty: the usual ones.
        chunk_numbers: points of the sweep of passages; empty: the usual ones.
        max_tokens: of an answer.
        scorers: the first one is drawn.
        anchor: of the passages.
        device: of the model.
        to: where results go.
    """

    model: Path
    questions: QuestionOptions
    ratios: Sequence[str]
    chunk_numbers: Sequence[int]
    max_tokens: int
    scorers: Sequence[str]
    anchor: str
    device: DeviceOptions
    to: Destination

    def sweeps(self) -> "Sweeps":
        """The points of the sweeps.

        Raises:
            InvalidInputError: a ratio is no number, or there are several with commas.
        """
        from cacheblend.core.errors import InvalidInputError
        from lab.paper.context import Sweeps

        given = [numbers("--ratio", text, float) for text in self.ratios]
        if several := next((text for text, ratio in zip(self.ratios, given, strict=True) if len(ratio) > 1), None):
            raise InvalidInputError(f"--ratio {several}: here each is one ratio; give --ratio several times")
        usual = Sweeps()
        return replace(
            usual,
            ratios=tuple(ratio for (ratio,) in given) or usual.ratios,
            chunk_numbers=tuple(self.chunk_numbers) or usual.chunk_numbers,
        )


def paper(
    questions: QuestionOptions,
    device: DeviceOptions,
    model: OptionalModel = None,
    ratio: Ratios = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = 32,
    scorer: Scorers = None,
    anchor: Anchor = "auto",
    out: Out = Path("evaluations"),
    json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """The CacheBlend paper's evaluation on your weights and data, in one report of seven figures.

    Several --data; --ratio and --top-k are the points of two sweeps; 50 rows of each file unless --limit says
    otherwise. An interrupted run continues where it stopped when the same command is given again.
    """
    check_outputs(json_file)
    check_folder("--out", out)
    options = PaperOptions(
        model=needed_model(model),
        questions=questions,
        ratios=ratio or (),
        chunk_numbers=top_k or (),
        max_tokens=max_tokens,
        scorers=scorer or ("f1", "em"),
        anchor=anchor,
        device=device,
        to=Destination(out, json, json_file),
    )
    run_paper_command(options)


def run_paper_command(options: PaperOptions) -> None:
    """Runs or resumes the evaluation, and says where the report is.

    Raises:
        InvalidInputError: a file, an option or the model is wrong.
        typer.Exit: it was interrupted.
    """
    from cacheblend.cli.models import open_engine
    from cacheblend.evaluation.scorers import check_scorers, make_scorers

    check_scorers(options.scorers)
    sweeps, settings = options.sweeps(), options.questions.settings(None, options.max_tokens)
    files = read_files(options.questions)
    quiet, device = options.to.json, options.device
    config = {"anchor": options.anchor, "capture": False}
    with open_engine(options.model, "memory", config, device, quiet=quiet) as engine:
        data = _data_sets(engine, files, options.questions, settings)
        assert engine.builder is not None  # a model folder is opened with its tokenizer
        if settings.template.chat is None and not settings.template.layout.is_chat(engine):
            say(f"{engine.name} has no chat template: plain prompts")
        scorers = make_scorers(options.scorers, engine.builder.encode)
        try:
            found = _run(engine, data, scorers, settings, sweeps, options.to.folder, quiet=quiet)
        except KeyboardInterrupt as interrupt:
            say(f"interrupted; what is finished is in {options.to.folder}, and the same command goes on from there")
            raise typer.Exit(INTERRUPTED) from interrupt
    options.to.write(found)
    if not quiet:
        _show(found)


def read_files(questions: QuestionOptions) -> "dict[str, tuple[list[QuestionRow], list[str]]]":
    """Rows and the reasons for bad ones, by the names of data sets: the file's name, with its folder if two are equal.

    Raises:
        InvalidInputError: no file, the same file twice, or one that cannot be read.
    """
    from cacheblend.core.errors import InvalidInputError

    files = questions.data or []
    if not files:
        raise InvalidInputError("there are no questions: give --data FILE, several times for several data sets")
    resolved = [file.resolve() for file in files]
    if doubled := next((file for file, full in zip(files, resolved, strict=True) if resolved.count(full) > 1), None):
        raise InvalidInputError(f"--data {doubled} is given twice; leave one out")
    stems, limited = [file.stem for file in files], replace(questions, limit=questions.limit or ROWS)
    names = [
        file.stem if stems.count(file.stem) == 1 else str(full.with_suffix(""))
        for file, full in zip(files, resolved, strict=True)
    ]
    if len(set(names)) < len(names):  # they differ in their endings only
        names = [str(full) for full in resolved]
    return {name: limited.read(file) for name, file in zip(names, files, strict=True)}


def _data_sets(
    engine: "BlendEngine",
    files: "dict[str, tuple[list[QuestionRow], list[str]]]",
    questions: QuestionOptions,
    settings: "Settings",
) -> "list[DataSet]":
    from lab.paper.context import DataSet

    found = []
    for name, (rows, bad) in files.items():
        reasons = list(bad)
        usable = questions.split(engine, rows, settings, reasons)
        found.append(DataSet(name, usable, reasons))
    return found


def _run(
    engine: "BlendEngine",
    data: "list[DataSet]",
    scorers: Any,
    settings: "Settings",
    sweeps: "Sweeps",
    out: Path,
    *,
    quiet: bool,
) -> dict[str, Any]:
    from lab.paper.run import PARTS, run_paper

    titles = {part.name: f"{number}. {part.title}" for number, part in enumerate(PARTS, start=1)}
    with stages(titles, quiet=quiet) as advance:
        return run_paper(engine, data, scorers, settings=settings, sweeps=sweeps, out=out, progress=advance)


def _show(found: dict[str, Any]) -> None:
    for of in found["data"]:
        if of["bad_rows"]:
            say(f"note: {of['name']}: {len(of['bad_rows'])} rows cannot be used; the first: {of['bad_rows'][0]}")
    for part in found["parts"].values():
        for note in [part["left_out"]] if part.get("left_out") else part["notes"]:
            say(f"note: {part['title']}: {note}")
    if not found["pictures"]:
        from cacheblend.evaluation.plots import INSTALL

        say(f"no figures are drawn, that needs matplotlib: {INSTALL}; then give the same command again")
    typer.echo(f"{len(found['pictures'])} figures; the report is {Path(found['folder']) / 'report.md'}")
