"""`cacheblend bench vllm`: parses options; what is measured, and how, is in `cacheblend.bench.vllm_bench` and
`cacheblend.bench.vllm_replay`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.bench import (
    HOW,
    RESULT,
    WHAT,
    Chunks,
    ChunkTokens,
    Folder,
    JsonFile,
    QuestionTokens,
    Runs,
    Seed,
    Shape,
    picture_file,
    show,
)
from cacheblend.cli.output import check_outputs, progress, stages

if TYPE_CHECKING:
    from cacheblend.bench.prompts import PromptShape
    from cacheblend.bench.vllm_server import Pair

app = typer.Typer(
    help="Two `vllm serve`, one with the plug-in; vLLM must be installed beside this package.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Ratio = Annotated[float, typer.Option("--ratio", "-r", help="Recompute ratio.", rich_help_panel=WHAT)]
BatchedTokens = Annotated[
    int, typer.Option("--batched-tokens", help="vLLM's max_num_batched_tokens.", rich_help_panel=HOW)
]


@app.command()
def ttft(
    model: Folder = None,
    shape: Shape = None,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 32,
    ratio: Ratio = 0.15,
    batched_tokens: BatchedTokens = 2048,
    runs: Runs = 5,
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """Time to first token, of stored chunks in shuffled order and of plain prompts; both servers in turns."""
    check_outputs(json)

    from cacheblend.bench import vllm_bench as bench
    from cacheblend.bench.prompts import PromptShape

    pair, asked = _pair(model, shape, ratio, batched_tokens), PromptShape(chunks, chunk_tokens, question_tokens)
    _measure(bench.ttft, pair, asked, runs, seed, json)


@app.command()
def latency(
    model: Folder = None,
    shape: Shape = None,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 32,
    ratio: Ratio = 0.15,
    batched_tokens: BatchedTokens = 2048,
    runs: Runs = 5,
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """Gaps between a request's tokens while another's prompt is prefilled: blended, and plain."""
    check_outputs(json)

    from cacheblend.bench import vllm_bench as bench
    from cacheblend.bench.prompts import PromptShape

    pair, asked = _pair(model, shape, ratio, batched_tokens), PromptShape(chunks, chunk_tokens, question_tokens)
    _measure(bench.latency, pair, asked, runs, seed, json)


@app.command()
def replay(
    trace: Annotated[Path, typer.Option("--trace", help="Folder of a RAGPulse trace.", rich_help_panel=WHAT)],
    model: Folder = None,
    shape: Shape = None,
    ratio: Ratio = 0.15,
    requests: Annotated[
        int, typer.Option("--requests", help="Sampled from the trace's last third.", rich_help_panel=WHAT)
    ] = 100,
    clients: Annotated[int, typer.Option("--clients", help="Under way at saturation.", rich_help_panel=HOW)] = 16,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            help="Of the plug-in's saturation; several times. Default: 0.2 0.4 0.6 0.8.",
            rich_help_panel=HOW,
            show_default=False,
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole/--no-whole", help="Also with whole system prompts, history, web search.", rich_help_panel=WHAT
        ),
    ] = True,
    batched_tokens: BatchedTokens = 2048,
    seed: Seed = 0,
    json: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw time to first token by rate (.png, .svg, .pdf).", rich_help_panel=RESULT),
    ] = None,
) -> None:
    """Requests per second at saturation, and time to first token by rate, on a trace of real requests."""
    curves = None if plot is None else picture_file(plot)
    check_outputs(json, curves)

    from cacheblend.bench import vllm_replay as bench

    what = bench.Replay(trace, requests, clients=clients, with_whole=whole, seed=seed)
    if rate:
        what = replace(what, rates=tuple(rate))
    pair = _pair(model, shape, ratio, batched_tokens)
    with stages({stage: stage for stage in bench.STAGES}, quiet=str(json) == "-") as advance:
        result = bench.replay(pair, what, advance)
    show(_lines(result), result, json)
    if curves is not None:
        bench.plot(result, curves)


def _measure(
    bench: Callable[..., dict[str, Any]], pair: "Pair", asked: "PromptShape", runs: int, seed: int, json: Path | None
) -> None:
    """Rounds in which both servers are asked in turns, with a bar."""
    with progress("measuring", "rounds", quiet=str(json) == "-") as advance:
        result = bench(pair, asked, runs, seed=seed, progress=advance)
    show(_lines(result), result, json)


def _pair(model: Path | None, shape: str | None, ratio: float, batched_tokens: int) -> "Pair":
    from cacheblend.bench.vllm_server import Pair
    from cacheblend.cli.models import model_folder

    return Pair(None if model is None else str(model_folder(model)), shape, ratio, batched_tokens)


def _lines(result: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value:.3f}" for name, value in result["figures"].items())
