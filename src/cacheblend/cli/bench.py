"""`cacheblend bench ttft`: time to first token on this machine; what is measured, and how, is in `cacheblend.bench`.

The options that the lab's commands share with it stand here, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.help import App
from cacheblend.cli.option_groups import with_groups
from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, AsJson, JsonFile, ModelOrShape, Plot
from cacheblend.cli.output import (
    INSTALL_PLOT,
    check_outputs,
    console,
    picture_file,
    print_json,
    progress,
    write_json,
)
from cacheblend.cli.selection_options import SelectionOptions
from cacheblend.cli.values import names, numbers
from cacheblend.core.failures import failed_since, failures, in_words

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.bench.ttft import TtftSettings
    from cacheblend.core.select.selection import Selection

app = App(help="Measure it on this machine.")

_before: dict[str, int] = {}  # what had failed in this process before the benchmark began

WHAT, HOW = "What is measured", "How it is measured"
MOST_CHUNKS = 1 << 16

ChunkTokens = Annotated[
    int, typer.Option("--chunk-tokens", min=1, max=MOST_TOKENS, help="Tokens of a chunk.", rich_help_panel=WHAT)
]
Data = Annotated[
    Path | None,
    typer.Option("--data", "-d", help="Real passages. Default: random tokens.", rich_help_panel=WHAT),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "--arms",
        "-a",
        help="Methods to measure, with commas: full, prefix, reuse, blend, and miss (blend with nothing stored). "
        "Default: the first four.",
        rich_help_panel=HOW,
        show_default=False,
    ),
]
Stores = Annotated[str, typer.Option("--store", help="memory, disk, or both: memory,disk.", rich_help_panel=HOW)]
Sweep = Annotated[
    str | None,
    typer.Option("--sweep", help="Measure and draw over chunks, chunk-tokens or ratio.", rich_help_panel=HOW),
]
METHODS = ["full,prefix,reuse,blend"]


@dataclass(frozen=True)
class SizeOptions:
    """Chunks of a prompt."""

    chunks: Annotated[
        int, typer.Option("--chunks", min=1, max=MOST_CHUNKS, help="Chunks of the prompt.", rich_help_panel=WHAT)
    ] = 8
    chunk_tokens: ChunkTokens = 512


@dataclass(frozen=True)
class PromptSizeOptions(SizeOptions):
    """A prompt of chunks and a question."""

    question_tokens: Annotated[
        int,
        typer.Option(
            "--question-tokens", min=1, max=MOST_TOKENS, help="Tokens after the chunks.", rich_help_panel=WHAT
        ),
    ] = 32


@dataclass(frozen=True)
class RoundOptions:
    """How often, and from which seed."""

    runs: Annotated[
        int,
        typer.Option("--runs", min=1, max=100_000, help="Measured rounds, after one warm-up.", rich_help_panel=HOW),
    ] = 5
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of weights, tokens and orders.", rich_help_panel=HOW),
    ] = 0


@dataclass(frozen=True)
class ThreadOptions:
    """Threads of the process that measures."""

    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            max=4096,
            help="Threads of torch. Default: torch's own choice.",
            rich_help_panel=HOW,
        ),
    ] = None


@dataclass(frozen=True)
class ResultOptions:
    """Where the result goes: a table on stdout, or JSON there; and a file."""

    json: AsJson = False
    json_file: JsonFile = None

    def check(self) -> None:
        """Raises `InvalidInputError` where the file cannot be written: before minutes of measuring."""
        check_outputs(self.json_file)
        _before.clear()
        _before.update(failures())

    def show(self, shown: "Table | str", result: dict[str, Any]) -> None:
        """Prints and writes the result, with what failed since `check` as `failed_blends`.

        Raises:
            CacheBlendError: something failed, so that a speed says nothing of blending; the file has been written.
        """
        failed = failed_since(_before)
        result = {**result, "failed_blends": sum(failed.values())} | ({"failed": failed} if failed else {})
        if self.json_file is not None:
            write_json(self.json_file, result)
        if failed:
            from cacheblend.core.errors import CacheBlendError

            raise CacheBlendError(
                f"no figures are shown, for they are not those of blending: {in_words(failed)} failed while it was "
                "measured and was computed in full; the logs of this command and of its servers say why"
            )
        if self.json:
            print_json(result)
        else:
            console().print(shown)
            console().print("failed_blends: 0")


def prompt_settings(model: "ModelOrShape", **settings: Any) -> "TtftSettings":
    """Settings of a benchmark that prefills prompts.

    Raises:
        InvalidInputError: neither or both of model and shape, or a setting is out of range.
    """
    from cacheblend.cli.models import quiet_transformers

    chosen = model.chosen()
    quiet_transformers()
    from cacheblend.bench.ttft import TtftSettings

    return TtftSettings(
        model=None if chosen.model is None else str(chosen.model),
        shape=chosen.shape,
        **settings,
    )


def selection_of(options: SelectionOptions) -> tuple["Selection", tuple[float, ...], str | None]:
    """How rows are selected, the ratios to measure, and the name of the profile that says so, if one does.

    Raises:
        InvalidInputError: settings beside a profile, a profile that cannot be read, or as `SelectionOptions.settings`.
    """
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.core.select.selection import Selection
    from cacheblend.engines.settings import PROFILE_NAME, read_profile
    from cacheblend.nano import LEAN_PROFILE_NAME, model_path

    given, shipped = options.ratio or [], {"nano": PROFILE_NAME, "lean": LEAN_PROFILE_NAME}
    if len(given) > 1 and (falling := [text for text in given if "," in text]):
        raise InvalidInputError(f"--ratio {falling[0]}: falling ratios are measured alone; leave the others out")
    if options.profile is None:
        chosen = [Selection(**replace(options, ratio=[ratio]).settings()) for ratio in given or ["0.15"]]
        return chosen[0], tuple(each.final_ratio for each in chosen), None
    if set(replace(options, ratio=None).settings()):
        raise InvalidInputError(f"the profile {options.profile} would not be used beside your own settings; give one")
    name = str(options.profile)
    file = model_path() / shipped[name] if name in shipped and not options.profile.exists() else options.profile
    chosen_by = read_profile(file).selection
    ratios = tuple(one for text in given for one in numbers("--ratio", text, float))
    return chosen_by, ratios or (chosen_by.final_ratio,), "lean" if name == "lean" else "profile"


def in_rounds(measure: Callable[[Callable[[int, int, str], None]], dict[str, Any]], quiet: bool) -> dict[str, Any]:
    """Runs a benchmark that reports (rounds done, rounds in all, what is measured), with a bar."""
    with progress("measuring", "rounds", quiet=quiet) as advance:
        result = measure(lambda done, total, _: advance(done, total))
        advance(1, 1)
    return result


# ---- the command -------------------------------------------------------------------------------------------


def ttft(
    model: ModelOrShape,
    size: PromptSizeOptions,
    rounds: RoundOptions,
    threads: ThreadOptions,
    result: ResultOptions,
    selection: SelectionOptions,
    data: Data = None,
    methods: Methods = None,
    store: Stores = "memory",
    sweep: Sweep = None,
    plot: Plot = None,
) -> None:
    """Time to first token: full prefill, prefix caching, full reuse and blend, alternating on the same prompts.

    A prompt is 32 tokens of plain text that no cache holds, the stored chunks in shuffled order, the question. Several
    ratios are measured one by one. --profile takes a file, or nano or lean: the profiles of the model that ships.
    """
    curves = _curves_file(sweep, plot)
    check_outputs(curves)
    result.check()
    chosen, ratios, profile = selection_of(selection)
    settings = prompt_settings(
        model,
        data=None if data is None else str(data),
        chunks=size.chunks,
        chunk_tokens=size.chunk_tokens,
        question_tokens=size.question_tokens,
        selection=chosen,
        ratios=ratios,
        profile=profile,
        arms=names(methods or METHODS),
        stores=names([store]),
        runs=rounds.runs,
        threads=threads.threads,
        seed=rounds.seed,
        sweep=sweep,
    )
    from cacheblend.bench import report
    from cacheblend.bench import ttft as bench

    found = in_rounds(partial(bench.run, settings), result.json)
    result.show(report.table(found), found)
    if curves is not None:
        report.plot(found, curves)
        console(stderr=True).print(f"the curves are in {curves}", soft_wrap=True)


def _curves_file(sweep: str | None, plot: Path | None) -> Path | None:
    """Where a sweep's curves go; None where none are drawn."""
    from importlib.util import find_spec

    from cacheblend.core.errors import InvalidInputError

    if plot is not None and sweep is None:
        raise InvalidInputError("--plot draws a sweep: also give --sweep")
    if plot is not None or sweep is None:
        return picture_file(plot)
    if find_spec("matplotlib") is None:
        console(stderr=True).print(f"no curves are drawn, that needs matplotlib: {INSTALL_PLOT}", soft_wrap=True)
        return None
    return Path(f"bench-ttft-{sweep}.png")


app.command("ttft")(with_groups(ttft))
