"""`lab serve` and `lab vllm`: servers, measured as a client sees them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.bench import HOW, WHAT, PromptSizeOptions, ResultOptions, RoundOptions
from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, ModelOrShape, OneRatio, Plot, Shadow
from cacheblend.cli.output import picture_file, progress, stages
from lab.cli.options import DEFAULT_SHAPE, Clients, Requests, Trace, prompt_shape

if TYPE_CHECKING:
    from lab.servers.vllm_server import Pair


BatchedTokens = Annotated[
    int,
    typer.Option(
        "--batched-tokens", min=1, max=MOST_TOKENS, help="vLLM's max_num_batched_tokens.", rich_help_panel=HOW
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16. auto: bfloat16, or float32 on a CPU that only emulates it.",
        rich_help_panel=HOW,
    ),
]
Discover = Annotated[
    bool,
    typer.Option("--discover", help="Also replay a trace with nothing marked.", rich_help_panel=WHAT),
]
Rates = Annotated[
    list[float] | None,
    typer.Option(
        "--rate",
        min=0.001,
        max=100,
        help="Rates of requests, as shares of the plug-in's saturation; several times. Default: 0.2 0.4 0.6 0.8.",
        rich_help_panel=HOW,
        show_default=False,
    ),
]


def serve(
    model: ModelOrShape,
    size: PromptSizeOptions,
    rounds: RoundOptions,
    result: ResultOptions,
    trace: Trace = None,
    ratio: OneRatio = 0.15,
    requests: Requests = 100,
    clients: Clients = 8,
    shadow: Shadow = 0.0,
    discover: Discover = False,
    plot: Plot = None,
    hostile: Annotated[
        bool,
        typer.Option(
            "--hostile/--no-hostile",
            help="Only what clients that mean ill do to a stream and to memory; on nano unless --model is given.",
            rich_help_panel=WHAT,
        ),
    ] = False,
) -> None:
    """`cacheblend serve` over HTTP: first tokens, what the server adds, and a trace of real requests.

    With --shadow also what checking that share of the answers costs: `figures.shadow_overhead`, a share of throughput.

    With --discover the trace is also replayed with nothing marked, on what discovery learnt of the requests before the
    sample: `figures.discovered_of_marked`, `wasted` and `watch_ms`.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    from cacheblend.core.errors import InvalidInputError

    result.check()
    if plot is not None and trace is None:
        raise InvalidInputError("--plot draws a replay: also give --trace")
    if hostile:
        _hostile(model, rounds, result)
        return
    picture, chosen = picture_file(plot), model.chosen(DEFAULT_SHAPE)
    from cacheblend.cli.models import quiet_transformers
    from lab.servers import serve as bench

    quiet_transformers()
    what = bench.Serving(
        model=None if chosen.model is None else str(chosen.model),
        shape=chosen.shape,
        trace=trace,
        shadow=shadow,
        discover=discover,
        prompt=prompt_shape(size),
        ratio=ratio,
        runs=rounds.runs,
        requests=requests,
        clients=clients,
        seed=rounds.seed,
    )
    with stages({stage: stage for stage in bench.STAGES}, quiet=result.json) as advance:
        found = bench.run(what, advance)
    result.show(bench.table(found), found)
    if picture is not None:
        bench.plot(found, picture)


def _hostile(model: ModelOrShape, rounds: RoundOptions, result: ResultOptions) -> None:
    from lab.servers import hostile as bench

    what = bench.Hostile(model=str(model.model or "nano"), rounds=rounds.runs, seed=rounds.seed)
    with stages({stage: stage for stage in bench.STAGES}, quiet=result.json) as advance:
        found = bench.run(what, advance)
    result.show(bench.table(found), found)


def vllm_ttft(
    model: ModelOrShape,
    size: PromptSizeOptions,
    rounds: RoundOptions,
    result: ResultOptions,
    ratio: OneRatio = 0.15,
    batched_tokens: BatchedTokens = 2048,
    dtype: Dtype = "auto",
) -> None:
    """Time to first token, of stored chunks in shuffled order and of plain prompts; both servers alternate.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    from lab.servers import vllm_bench as bench

    _measure(bench.ttft, _pair(model, ratio, batched_tokens, dtype), size, rounds, result)


def vllm_latency(
    model: ModelOrShape,
    size: PromptSizeOptions,
    rounds: RoundOptions,
    result: ResultOptions,
    ratio: OneRatio = 0.15,
    batched_tokens: BatchedTokens = 2048,
    dtype: Dtype = "auto",
) -> None:
    """Gaps between a request's tokens while another request's prompt is prefilled: blended, and plain.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    from lab.servers import vllm_bench as bench

    _measure(bench.latency, _pair(model, ratio, batched_tokens, dtype), size, rounds, result)


def vllm_shadow(
    model: ModelOrShape,
    size: PromptSizeOptions,
    rounds: RoundOptions,
    result: ResultOptions,
    ratio: OneRatio = 0.15,
    requests: Requests = 100,
    clients: Clients = 8,
    shadow: Shadow = 0.02,
    batched_tokens: BatchedTokens = 2048,
    dtype: Dtype = "auto",
) -> None:
    """What the shadow check costs: throughput of two servers with the plug-in, one with the check; both in turn.

    `figures.shadow_overhead`: a share of throughput. --shadow 0 shows by how much equal servers differ.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    from lab.servers import vllm_bench as bench

    pair = replace(_pair(model, ratio, batched_tokens, dtype), shadow=shadow)
    _measure(partial(bench.shadow, requests=requests, clients=clients), pair, size, rounds, result)


def vllm_replay(
    trace: Annotated[
        Path, typer.Option("--trace", help="Folder of a RAGPulse trace.", rich_help_panel=WHAT, show_default=False)
    ],
    model: ModelOrShape,
    result: ResultOptions,
    ratio: OneRatio = 0.15,
    requests: Requests = 100,
    clients: Clients = 16,
    rate: Rates = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole/--no-whole", help="Also with whole system prompts, history, web search.", rich_help_panel=WHAT
        ),
    ] = True,
    batched_tokens: BatchedTokens = 2048,
    dtype: Dtype = "auto",
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of sample and times.", rich_help_panel=HOW)
    ] = 0,
    discover: Discover = False,
    plot: Plot = None,
) -> None:
    """Requests per second at saturation, and time to first token by rate, on a trace of real requests.

    Requests are sampled from the last third of the trace.

    With --discover also what a server that learns by itself gains, of one whose passages are marked and stored before:
    `figures.discovered_of_marked`.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    result.check()
    curves = picture_file(plot)
    from lab.servers import vllm_replay as bench

    what = bench.Replay(trace, requests, clients=clients, with_whole=whole, discover=discover, seed=seed)
    if rate:
        what = replace(what, rates=tuple(rate))
    pair = _pair(model, ratio, batched_tokens, dtype)
    with stages({stage: stage for stage in bench.STAGES}, quiet=result.json) as advance:
        found = bench.replay(pair, what, advance)
    result.show(_lines(found), found)
    if curves is not None:
        bench.plot(found, curves)


def vllm_faults(
    result: ResultOptions,
    tried: Annotated[
        int,
        typer.Option(
            "--tried",
            min=1,
            max=1_000_000,
            help="Faults at least; twice as many plain requests are compared with a vLLM without the plug-in.",
            rich_help_panel=WHAT,
        ),
    ] = 520,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            help="Campaigns: stall, lookups, equal, pollution, faults; several times. Default: all of them.",
            rich_help_panel=WHAT,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of all that is drawn.", rich_help_panel=HOW)
    ] = 0,
) -> None:
    """Faults on purpose: answers that are wrong, engines that end, requests that hang, plain requests polluted.

    Errors by place and rank, out of memory, slow, hanging and damaged stores, aborts, preemption; shared fronts that
    arrive in one engine step; what a slow store, look-ups and equal prompts cost. Tiny random models.
    """
    result.check()
    from cacheblend.cli.models import quiet_transformers
    from lab.faults import run as bench

    quiet_transformers()
    settings = bench.Settings(tried, seed, tuple(only) if only else bench.CAMPAIGNS)
    with stages(bench.STAGES, quiet=result.json) as advance:
        found = bench.run(settings, advance)
    result.show(_lines(found), found)


def _measure(
    bench: Callable[..., dict[str, Any]],
    pair: "Pair",
    size: PromptSizeOptions,
    rounds: RoundOptions,
    result: ResultOptions,
) -> None:
    """Rounds in which both servers are asked in turns, with a bar."""
    result.check()
    with progress("measuring", "rounds", quiet=result.json) as advance:
        found = bench(pair, prompt_shape(size), rounds.runs, seed=rounds.seed, progress=advance)
    result.show(_lines(found), found)


def _pair(model: ModelOrShape, ratio: float, batched_tokens: int, dtype: str) -> "Pair":
    from cacheblend.cli.models import checked_dtype, quiet_transformers
    from lab.servers.vllm_server import Pair, check_installed

    chosen = model.chosen(DEFAULT_SHAPE)
    checked_dtype(dtype)
    check_installed()  # before the weights of a shape are made
    quiet_transformers()
    folder = None if chosen.model is None else str(chosen.model)
    return Pair(folder, chosen.shape, ratio, batched_tokens, dtype=dtype)


def _lines(result: dict[str, Any]) -> str:
    intervals = {name: f" (95 %: {low:.3f} to {high:.3f})" for name, (low, high) in result.get("intervals", {}).items()}
    return "\n".join(f"{name}: {value:.3f}{intervals.get(name, '')}" for name, value in result["figures"].items())
