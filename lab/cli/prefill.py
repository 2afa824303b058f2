"""`lab ttft`, `memory`, `controller` and `core`: what a prefill takes."""

from functools import partial
from typing import Annotated

import typer

from cacheblend.cli.bench import (
    MOST_CHUNKS,
    WHAT,
    ChunkTokens,
    ResultOptions,
    RoundOptions,
    SizeOptions,
    ThreadOptions,
    in_rounds,
    prompt_settings,
)
from cacheblend.cli.options import ModelOrShape, OneRatio
from cacheblend.cli.output import progress
from lab.cli.options import DEFAULT_SHAPE

Lengths = Annotated[
    list[int] | None,
    typer.Option(
        "--chunks",
        min=2,
        max=MOST_CHUNKS,
        help="Chunks of a context; several times. Default: 4 8 16.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
THREE_ROUNDS, TWO_THREADS = RoundOptions(runs=3), ThreadOptions(2)


def memory(
    model: ModelOrShape,
    size: SizeOptions,
    threads: ThreadOptions,
    result: ResultOptions,
    ratio: OneRatio = 0.15,
) -> None:
    """Peak resident memory of a blend and of a full prefill, each in its own process, the store on disk."""
    result.check()
    settings = prompt_settings(
        model, chunks=size.chunks, chunk_tokens=size.chunk_tokens, ratios=(ratio,), threads=threads.threads
    )
    from lab.speed import memory as bench

    found = in_rounds(partial(bench.run, settings), result.json)
    result.show(bench.table(found), found)


def controller(
    model: ModelOrShape,
    threads: ThreadOptions,
    result: ResultOptions,
    rounds: RoundOptions = THREE_ROUNDS,
    chunk_tokens: ChunkTokens = 256,
    chunks: Lengths = None,
    ratio: OneRatio = 0.15,
) -> None:
    """The loading controller against every fixed choice, over throttled devices and context lengths.

    The ratio is the least that the controller may choose.
    """
    result.check()
    settings = prompt_settings(
        model,
        chunk_tokens=chunk_tokens,
        ratios=(ratio,),
        runs=rounds.runs,
        threads=threads.threads,
        seed=rounds.seed,
    )
    from lab.speed import controller as bench

    with progress("measuring", "cells", quiet=result.json) as advance:
        found = bench.run(settings, tuple(chunks or (4, 8, 16)), advance)
    result.show(bench.table(found), found)


def core(
    result: ResultOptions,
    rounds: RoundOptions,
    model: ModelOrShape,
    threads: ThreadOptions = TWO_THREADS,
) -> None:
    """The figures that blending is held to, each beside its bar. About half an hour on two cores."""
    result.check()
    settings = prompt_settings(
        model if model.model else ModelOrShape(shape=model.shape or DEFAULT_SHAPE),
        runs=rounds.runs,
        threads=threads.threads,
        seed=rounds.seed,
    )
    from lab.speed import core as bench

    with progress("measuring", "parts", quiet=result.json) as advance:
        found = bench.run(settings, advance)
    result.show(bench.table(found), found)
