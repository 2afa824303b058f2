"""Options that several benchmarks share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, AsJson, JsonFile
from cacheblend.cli.output import check_outputs, console, print_json, progress, write_json
from cacheblend.cli.selection_options import SelectionOptions
from cacheblend.cli.values import numbers
from cacheblend.core.failures import failed_since, failures, in_words

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.bench.prompts import PromptShape
    from cacheblend.bench.ttft import TtftSettings
    from cacheblend.cli.options import ModelOrShape
    from cacheblend.core.select.selection import Selection

_before: dict[str, int] = {}  # what had failed in this process before the benchmark began

WHAT, HOW = "What is measured", "How it is measured"
DEFAULT_SHAPE = "qwen2.5-0.5b"
MOST_CHUNKS = 1 << 16

Folder = Annotated[Path | None, typer.Option("--folder", help="Folder on the disk to measure.", rich_help_panel=WHAT)]
Requests = Annotated[
    int, typer.Option("--requests", min=1, max=1_000_000, help="Requests replayed.", rich_help_panel=WHAT)
]
Clients = Annotated[
    int, typer.Option("--clients", min=1, max=10_000, help="Requests under way at once.", rich_help_panel=HOW)
]
PlannedChunks = Annotated[
    int,
    typer.Option("--chunks", min=1, max=MOST_CHUNKS, help="Chunks of the prompt, all stored.", rich_help_panel=WHAT),
]
ChunkTokens = Annotated[
    int, typer.Option("--chunk-tokens", min=1, max=MOST_TOKENS, help="Tokens of a chunk.", rich_help_panel=WHAT)
]


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

    def shape(self) -> "PromptShape":
        """For the benchmarks of servers."""
        from cacheblend.bench.prompts import PromptShape

        return PromptShape(self.chunks, self.chunk_tokens, self.question_tokens)


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
            help="Threads of torch. Default: torch's own choice; of bench core 2.",
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
