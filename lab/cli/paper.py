"""`python -m lab paper`: from files and options to data sets and sweeps; `lab.paper` measures."""

from collections.abc import Sequence
from dataclasses import replace
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
    from lab.paper.context import Sweeps

ROWS = 50
"""Of each file, unless ``--limit`` says otherwise."""
INTERRUPTED = 130


def paper(
    questions: QuestionOptions,
    device: DeviceOptions,
    model: OptionalModel = None,
    ratio: Ratios = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = 32,
    scorer: Scorers = None,
    anchor: Anchor = "auto",  # else blend would not be what is in use; the authors have bos
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
    folder, names = needed_model(model), scorer or ("f1", "em")
    from cacheblend.cli.models import open_engine
    from cacheblend.evaluation.scorers import check_scorers, make_scorers
    from lab.paper.context import DataSet
    from lab.paper.run import PARTS, run_paper

    check_scorers(names)
    sweeps, settings = sweeps_of(ratio or (), top_k or ()), questions.settings(None, max_tokens)
    files = read_files(questions)
    config = {"anchor": anchor, "capture": False}
    with open_engine(folder, "memory", config, device, quiet=json) as engine:
        data = []
        for name, (rows, bad) in files.items():
            reasons = list(bad)
            data.append(DataSet(name, [case.row for case in questions.cases(engine, rows, settings, reasons)], reasons))
        assert engine.runtime.builder is not None  # a model folder is opened with its tokenizer
        if settings.template.chat is None and not settings.template.is_chat(engine):
            say(f"{engine.name} has no chat template: plain prompts")
        scorers = make_scorers(names, engine.runtime.builder.encode)
        titles = {part.name: f"{number}. {part.title}" for number, part in enumerate(PARTS, start=1)}
        try:
            with stages(titles, quiet=json) as advance:
                found = run_paper(engine, data, scorers, settings=settings, sweeps=sweeps, out=out, progress=advance)
        except KeyboardInterrupt as interrupt:
            say(f"interrupted; what is finished is in {out}, and the same command goes on from there")
            raise typer.Exit(INTERRUPTED) from interrupt
    Destination(out, json, json_file).write(found)
    if not json:
        _show(found)


def sweeps_of(ratios: Sequence[str], chunk_numbers: Sequence[int]) -> "Sweeps":
    """The points of the sweeps; of what a user leaves out the usual ones."""
    from cacheblend.core.errors import InvalidInputError
    from lab.paper.context import Sweeps

    given = [numbers("--ratio", text, float) for text in ratios]
    if several := next((text for text, ratio in zip(ratios, given, strict=True) if len(ratio) > 1), None):
        raise InvalidInputError(f"--ratio {several}: here each is one ratio; give --ratio several times")
    usual = Sweeps()
    return replace(
        usual,
        ratios=tuple(ratio for (ratio,) in given) or usual.ratios,
        chunk_numbers=tuple(chunk_numbers) or usual.chunk_numbers,
    )


def read_files(questions: QuestionOptions) -> "dict[str, tuple[list[QuestionRow], list[str]]]":
    """Rows and the reasons for bad ones, by the names of data sets: a file's name, with its folder if two are equal."""
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
    return {name: limited.read(file)[:2] for name, file in zip(names, files, strict=True)}


def _show(found: dict[str, Any]) -> None:
    for of in found["data"]:
        if of["bad_rows"]:
            say(f"note: {of['name']}: {len(of['bad_rows'])} rows cannot be used; the first: {of['bad_rows'][0]}")
    for part in found["parts"].values():
        for note in [part["left_out"]] if part.get("left_out") else part["notes"]:
            say(f"note: {part['title']}: {note}")
    if not found["pictures"]:
        from cacheblend.evaluation.scorers import INSTALL

        say(f"no figures are drawn, that needs matplotlib: {INSTALL}; then give the same command again")
    typer.echo(f"{len(found['pictures'])} figures; the report is {Path(found['folder']) / 'report.md'}")
