"""`cacheblend bench`: parses options; what is measured, and how, is in `cacheblend.bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.output import check_outputs, console, progress

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.bench.ttft import TtftSettings

app = typer.Typer(help="Measure it on this machine.", no_args_is_help=True, rich_markup_mode="rich")

WHAT, HOW, RESULT = "What is measured", "How it is measured", "Result"
PICTURES = (".png", ".svg", ".pdf")
INSTALL = "pip install 'cacheblend[plot]'"

Folder = Annotated[
    Path | None, typer.Option("--model", "-m", help="Model folder.", rich_help_panel=WHAT, show_default=False)
]
Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help="Random weights: tiny, qwen2.5-0.5b, qwen2.5-1.5b, llama-3.2-1b or llama-3.1-8b.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", "-d", help="Real passages; default: random tokens.", rich_help_panel=WHAT),
]
Chunks = Annotated[int, typer.Option("--chunks", help="Chunks of the prompt.", rich_help_panel=WHAT)]
ChunkTokens = Annotated[int, typer.Option("--chunk-tokens", help="Tokens of a chunk.", rich_help_panel=WHAT)]
QuestionTokens = Annotated[
    int, typer.Option("--question-tokens", help="Tokens behind the chunks.", rich_help_panel=WHAT)
]
Ratios = Annotated[
    list[float] | None,
    typer.Option(
        "--ratio",
        "-r",
        help="One blend arm each; several times. Default: 0.15.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
Arms = Annotated[
    str,
    typer.Option("--arms", help="Of full, prefix, reuse, blend, miss; with commas.", rich_help_panel=HOW),
]
Stores = Annotated[str, typer.Option("--store", help="memory, disk, or both: memory,disk.", rich_help_panel=HOW)]
Runs = Annotated[int, typer.Option("--runs", help="Measured rounds, behind a warm-up.", rich_help_panel=HOW)]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Of torch; default: its own choice.", rich_help_panel=HOW)
]
Seed = Annotated[int, typer.Option("--seed", help="Of weights, tokens and orders.", rich_help_panel=HOW)]
Sweep = Annotated[
    str | None,
    typer.Option("--sweep", help="Measure and draw over chunks, chunk-tokens or ratio.", rich_help_panel=HOW),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result here; - for stdout.", rich_help_panel=RESULT)
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Draw the sweep here (.png, .svg, .pdf); default: bench-ttft-SWEEP.png. Needs matplotlib.",
        rich_help_panel=RESULT,
        show_default=False,
    ),
]


@app.command()
def ttft(
    model: Folder = None,
    shape: Shape = None,
    data: Data = None,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 32,
    ratio: Ratios = None,
    arms: Arms = "full,prefix,reuse,blend",
    store: Stores = "memory",
    runs: Runs = 5,
    threads: Threads = None,
    seed: Seed = 0,
    sweep: Sweep = None,
    json: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Time to first token: full prefill, prefix caching, full reuse and blend, in turns on the same prompts.

    A prompt is 32 tokens of plain text that no cache holds, the stored chunks in shuffled order, the question.
    """
    from cacheblend.bench import ttft as bench
    from cacheblend.bench import ttft_report as report

    settings = _prompt_settings(
        model,
        shape,
        data=None if data is None else str(data),
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratios=tuple(ratio or (0.15,)),
        arms=_names(arms),
        stores=_names(store),
        runs=runs,
        threads=threads,
        seed=seed,
        sweep=sweep,
    )
    curves = _curves_file(sweep, plot)
    check_outputs(json, curves)
    with progress("measuring", "rounds", quiet=str(json) == "-") as advance:
        result = bench.run(settings, lambda done, total, arm: advance(done, total))
        advance(1, 1)
    show(report.table(result), result, json)
    if curves is not None:
        report.plot(result, curves)
        console(stderr=True).print(f"the curves are in {curves}", soft_wrap=True)


@app.command()
def memory(
    model: Folder = None,
    shape: Shape = None,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    ratio: Ratios = None,
    threads: Threads = None,
    json: JsonFile = None,
) -> None:
    """Peak resident memory of a blend and of a full prefill, each in a process of its own, the store on disk."""
    check_outputs(json)

    from cacheblend.bench import memory as bench

    settings = _prompt_settings(
        model,
        shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        ratios=tuple(ratio or (0.15,)),
        threads=threads,
    )
    with progress("measuring", "processes", quiet=str(json) == "-") as advance:
        result = bench.run(settings, lambda done, total, arm: advance(done, total))
    show(bench.table(result), result, json)


@app.command()
def plan(
    chunks: Annotated[int, typer.Option("--chunks", help="Chunks of the prompt, all stored.")] = 64,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of a chunk.")] = 511,
    store: Annotated[str, typer.Option("--store", help="memory, or a folder to be filled.")] = "memory",
    runs: Annotated[int, typer.Option("--runs", help="Prompts planned.")] = 20,
    json: JsonFile = None,
) -> None:
    """Time of names and plan of a long prompt: what blending costs before the first layer."""
    check_outputs(json)

    from cacheblend.bench import plan as bench

    result = bench.run(chunks=chunks, chunk_tokens=chunk_tokens, store=store, runs=runs)
    line = (
        f"names and plan of {result['prompt_tokens']} tokens, {chunks} chunks: "
        f"{1e3 * result['plan_s']['median']:.1f} ms (median of {runs})"
    )
    show(line, result, json)


@app.command()
def match(
    stored: Annotated[int, typer.Option("--stored", help="Chunks in the store.")] = 100_000,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of a chunk.")] = 256,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of a prompt, at least.")] = 32_768,
    runs: Annotated[int, typer.Option("--runs", help="Prompts matched.")] = 20,
    json: JsonFile = None,
) -> None:
    """Time in which a prompt's stored chunks are found by their content."""
    check_outputs(json)

    from cacheblend.bench import matching as bench

    result = bench.run(stored=stored, chunk_tokens=chunk_tokens, prompt_tokens=prompt_tokens, runs=runs)
    line = (
        f"{result['prompt_tokens']} tokens against {stored} chunks of {chunk_tokens}: "
        f"{result['figures']['match_ms']:.1f} ms (median of {runs}); the index was filled in {result['fill_s']:.1f} s"
    )
    show(line, result, json)


@app.command()
def load(
    model: Folder = None,
    shape: Shape = None,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    ratio: Annotated[float, typer.Option("--ratio", "-r", help="Recompute ratio.", rich_help_panel=WHAT)] = 0.15,
    folder: Annotated[Path | None, typer.Option("--folder", help="On the disk to measure.")] = None,
    redis: Annotated[str | None, typer.Option("--redis", help="A Redis server's URL, to measure it too.")] = None,
    direct: Annotated[bool, typer.Option("--direct", help="Read the disk past the page cache.")] = False,
    kv_shape: Annotated[
        str | None, typer.Option("--kv-shape", help="Read KV of this shape from disk and Redis, not the model's own.")
    ] = None,
    runs: Runs = 5,
    threads: Threads = None,
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """What loading costs: behind computing or not, from disk and Redis against plain reads, and by codec."""
    check_outputs(json)

    from cacheblend.bench import loading as bench
    from cacheblend.cli.output import status

    prompt = _prompt_settings(
        model,
        shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        ratios=(ratio,),
        runs=runs,
        threads=threads,
        seed=seed,
    )
    with status("measuring ...", quiet=str(json) == "-"):
        result = bench.run(bench.LoadSettings(prompt, folder, redis, direct, kv_shape))
    show(bench.table(result), result, json)


@app.command()
def store(
    blocks: Annotated[int, typer.Option("--blocks", help="Of the store; 8 KiB of disk each.")] = 1_000_000,
    folder: Annotated[Path | None, typer.Option("--folder", help="On the disk to measure.")] = None,
    json: JsonFile = None,
) -> None:
    """A disk store of very many blocks: look-ups, opening, memory."""
    check_outputs(json)

    from cacheblend.bench import lookup as bench

    with progress("filling", "blocks", quiet=str(json) == "-") as advance:
        result = bench.run(blocks, folder, min(2000, blocks), advance)
    show(bench.line(result), result, json)


@app.command()
def serve(
    model: Folder = None,
    shape: Shape = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Folder of a RAGPulse trace, to replay it.", rich_help_panel=WHAT)
    ] = None,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 32,
    ratio: Annotated[float, typer.Option("--ratio", "-r", help="Recompute ratio.", rich_help_panel=WHAT)] = 0.15,
    requests: Annotated[int, typer.Option("--requests", help="Replayed.", rich_help_panel=WHAT)] = 100,
    clients: Annotated[int, typer.Option("--clients", help="At once.", rich_help_panel=HOW)] = 8,
    runs: Runs = 5,
    seed: Seed = 0,
    json: JsonFile = None,
    plot: Plot = None,
) -> None:
    """`cacheblend serve` over HTTP: first tokens, what the server adds, and a trace of real requests."""
    check_outputs(json, plot)

    from cacheblend.bench import serving as bench
    from cacheblend.bench.prompts import PromptShape
    from cacheblend.cli.models import model_folder
    from cacheblend.cli.output import stages

    picture = None if plot is None or trace is None else picture_file(plot)
    what = bench.Serving(
        model=None if model is None else str(model_folder(model)),
        shape=shape,
        trace=trace,
        prompt=PromptShape(chunks, chunk_tokens, question_tokens),
        ratio=ratio,
        runs=runs,
        requests=requests,
        clients=clients,
        seed=seed,
    )
    titles = {stage: stage for stage in bench.STAGES}
    with stages(titles, quiet=str(json) == "-") as advance:
        result = bench.run(what, advance)
    show(bench.table(result), result, json)
    if picture is not None:
        bench.plot(result, picture)


@app.command()
def controller(
    model: Folder = None,
    shape: Shape = None,
    chunk_tokens: ChunkTokens = 256,
    chunks: Annotated[
        list[int] | None,
        typer.Option("--chunks", help="Of a context; several times. Default: 4 8 16.", rich_help_panel=WHAT),
    ] = None,
    ratio: Annotated[float, typer.Option("--ratio", "-r", help="The floor.", rich_help_panel=WHAT)] = 0.15,
    runs: Runs = 3,
    threads: Threads = None,
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """The loading controller against every fixed choice, over throttled devices and context lengths."""
    check_outputs(json)

    from cacheblend.bench import controlling as bench

    settings = _prompt_settings(
        model,
        shape,
        chunk_tokens=chunk_tokens,
        ratios=(ratio,),
        runs=runs,
        threads=threads,
        seed=seed,
    )
    with progress("measuring", "cells", quiet=str(json) == "-") as advance:
        result = bench.run(settings, tuple(chunks or (4, 8, 16)), advance)
    show(bench.table(result), result, json)


@app.command()
def evict(
    trace: Annotated[Path, typer.Option("--trace", help="Folder of a RAGPulse trace.")],
    size: Annotated[
        list[float] | None, typer.Option("--size", help="Of the cache, of all distinct blocks, 0..1; several times.")
    ] = None,
    json: JsonFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it here. Needs matplotlib.")] = None,
) -> None:
    """Hit rate by cache size on a trace of real requests: each eviction policy, and the best possible."""
    check_outputs(json, plot)

    from cacheblend.bench import eviction as bench

    picture = None if plot is None else picture_file(plot)
    result = bench.run(trace, tuple(sorted(size)) if size else bench.SHARES)
    show(bench.table(result), result, json)
    if picture is not None:
        bench.plot(result, picture)


def _prompt_settings(model: Path | None, shape: str | None, **settings: Any) -> "TtftSettings":
    """Of prompts on a model folder or a shape."""
    from cacheblend.cli.models import model_folder, quiet_transformers

    quiet_transformers()
    from cacheblend.bench.ttft import TtftSettings

    return TtftSettings(model=None if model is None else str(model_folder(model)), shape=shape, **settings)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _curves_file(sweep: str | None, plot: Path | None) -> Path | None:
    """Where a sweep's curves go; None where none are drawn."""
    from importlib.util import find_spec

    from cacheblend.core.errors import InvalidInputError

    if plot is not None:
        if sweep is None:
            raise InvalidInputError("--plot draws a sweep: give --sweep, too")
        return picture_file(plot)
    if sweep is None:
        return None
    if find_spec("matplotlib") is None:
        console(stderr=True).print(f"no curves are drawn, that needs matplotlib: {INSTALL}", soft_wrap=True)
        return None
    return Path(f"bench-ttft-{sweep}.png")


def picture_file(plot: Path) -> Path:
    """What `--plot` names.

    Raises:
        InvalidInputError: nothing can be drawn there.
    """
    from importlib.util import find_spec

    from cacheblend.core.errors import InvalidInputError

    if find_spec("matplotlib") is None:
        raise InvalidInputError(f"--plot needs matplotlib: {INSTALL}")
    if plot.suffix not in PICTURES:
        raise InvalidInputError(f"--plot draws {', '.join(PICTURES)}, not {plot.name!r}")
    return plot


def show(shown: "Table | str", result: dict[str, object], json: Path | None) -> None:
    """The table, then the JSON file; or JSON alone, where it goes to stdout."""
    from json import dumps

    text = dumps(result, ensure_ascii=False, indent=2)
    if str(json) == "-":
        typer.echo(text)
        return
    console().print(shown)
    if json is not None:
        json.write_text(text + "\n", encoding="utf-8")
