"""Options that several commands of the lab share; those of `cacheblend bench` are in `cacheblend.cli.bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.cli.bench import HOW, MOST_CHUNKS, WHAT, PromptSizeOptions

if TYPE_CHECKING:
    from lab.servers.prompts import PromptShape

DEFAULT_SHAPE = "qwen2.5-0.5b"

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
Trace = Annotated[
    Path | None, typer.Option("--trace", help="Folder of a RAGPulse trace: replay its requests.", show_default=False)
]


def prompt_shape(size: PromptSizeOptions) -> "PromptShape":
    """For the benchmarks of servers."""
    from lab.servers.prompts import PromptShape

    return PromptShape(size.chunks, size.chunk_tokens, size.question_tokens)
