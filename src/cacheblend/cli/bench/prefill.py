"""`bench ttft`, `memory`, `controller` and `core`: what a prefill takes."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cacheblend.cli.bench.options import (
    DEFAULT_SHAPE,
    HOW,
    MOST_CHUNKS,
    WHAT,
    ChunkTokens,
    PromptSizeOptions,
    ResultOptions,
    RoundOptions,
    SizeOptions,
    ThreadOptions,
    in_rounds,
    prompt_settings,
    selection_of,
)
from cacheblend.cli.options import ModelOrShape, OneRatio, Plot
from cacheblend.cli.output import INSTALL_PLOT, check_outputs, console, picture_file, progress
from cacheblend.cli.selection_options import SelectionOptions
from cacheblend.cli.values import names

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
METHODS = ["full,prefix,reuse,blend"]


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
    from cacheblend.bench import ttft as bench
    from cacheblend.bench import ttft_report as report

    found = in_rounds(partial(bench.run, settings), result.json)
    result.show(report.table(found), found)
    if curves is not None:
        report.plot(found, curves)
        console(stderr=True).print(f"the curves are in {curves}", soft_wrap=True)


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
    from cacheblend.bench import memory as bench

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
    from cacheblend.bench import controlling as bench

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
    from cacheblend.bench import core as bench

    with progress("measuring", "parts", quiet=result.json) as advance:
        found = bench.run(settings, advance)
    result.show(bench.table(found), found)


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
