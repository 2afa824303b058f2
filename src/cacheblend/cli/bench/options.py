"""Options that several benchmarks share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, AsJson, JsonFile
from cacheblend.cli.output import check_outputs, console, print_json, progress, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.bench.prompts import PromptShape
    from cacheblend.bench.ttft import TtftSettings
    from cacheblend.cli.options import ModelOrShape

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
            "--threads", min=1, max=4096, help="Threads of torch. Default: torch's own choice.", rich_help_panel=HOW
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

    def show(self, shown: "Table | str", result: dict[str, Any]) -> None:
        """Prints and writes the result."""
        if self.json_file is not None:
            write_json(self.json_file, result)
        if self.json:
            print_json(result)
        else:
            console().print(shown)


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


def in_rounds(measure: Callable[[Callable[[int, int, str], None]], dict[str, Any]], quiet: bool) -> dict[str, Any]:
    """Runs a benchmark that reports (rounds done, rounds in all, what is measured), with a bar."""
    with progress("measuring", "rounds", quiet=quiet) as advance:
        result = measure(lambda done, total, _: advance(done, total))
        advance(1, 1)
    return result
