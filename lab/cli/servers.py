"""`lab serve`, `routing`, `agent` and `lab vllm`: servers, measured as a client sees them."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

from cacheblend.cli.bench import PromptSizeOptions, ResultOptions, RoundOptions
from cacheblend.cli.options import Plot, Shadow
from cacheblend.cli.output import progress
from lab.cli.output import bars, prepare
from lab.settings import (
    Agent,
    Clients,
    PromptShape,
    Replay,
    Requests,
    Routing,
    Serving,
    Sizes,
    VllmOptions,
    count,
    named,
    seeded,
    several,
)

if TYPE_CHECKING:
    from lab.servers.vllm_server import Pair


def serve(
    what: Serving,
    result: ResultOptions,
    plot: Plot = None,
    hostile: Annotated[
        bool,
        named(
            "--hostile/--no-hostile",
            "Only what clients that mean ill do to a stream and to memory; on nano unless --model is given.",
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

    if plot is not None and what.trace is None:
        raise InvalidInputError("--plot draws a replay: also give --trace")
    picture = prepare(result, plot)
    if hostile:
        from lab.bench import figure_lines
        from lab.servers import hostile as attack

        with bars(attack.STAGES, result) as advance:
            found = attack.run(str(what.model or "nano"), what.runs, what.seed, advance)
        result.show(figure_lines(found), found)
        return
    what = what.resolved()
    from lab.bench import figure_lines
    from lab.servers import serve as bench

    with bars(bench.STAGES, result) as advance:
        found = bench.run(what, advance)
    result.show(figure_lines(found), found)
    if picture is not None:
        bench.plot(found, picture)


def routing(what: Routing, result: ResultOptions) -> None:
    """What sending a request where its chunks are hot gains over round robin: memory's hits against Redis'.

    Starts a Redis and servers on it. `figures`: shares of loaded tokens from memory, gains in time and throughput.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    prepare(result)
    what = what.resolved()
    from lab.servers import routing as bench

    with bars(bench.STAGES, result) as advance:
        found = bench.run(what, advance)
    result.show(bench.table(found), found)


def agent(what: Agent, sizes: Sizes, result: ResultOptions, plot: Plot = None) -> None:
    """Time to first token by turn of an agent, by OpenAI's API without extras: what text that nobody marked gains.

    Three servers with cold stores get the same requests: prefix caching, tool results as content parts, and nothing
    marked. `figures.agent_gain`: median of turns 3 and later, prefix caching by nothing marked.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    picture = prepare(result, plot)
    what = what.resolved()
    from lab.servers import agent as bench

    with progress("asking", "requests", quiet=result.json) as advance:
        found = bench.run(what, sizes, advance)
    result.show(bench.table(found), found)
    if picture is not None:
        bench.plot(found, picture)


# ---- vLLM ---------------------------------------------------------------------------------------------------


def vllm_ttft(model: VllmOptions, size: PromptSizeOptions, rounds: RoundOptions, result: ResultOptions) -> None:
    """Time to first token, of stored chunks in shuffled order and of plain prompts; both servers alternate.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    from lab.servers import vllm_bench as bench

    _measure(partial(bench.ttft, _pair(model)), size, rounds, result)


def vllm_latency(model: VllmOptions, size: PromptSizeOptions, rounds: RoundOptions, result: ResultOptions) -> None:
    """Gaps between a request's tokens while another request's prompt is prefilled: blended, and plain.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    from lab.servers import vllm_bench as bench

    _measure(partial(bench.latency, _pair(model)), size, rounds, result)


def vllm_shadow(
    model: VllmOptions,
    size: PromptSizeOptions,
    rounds: RoundOptions,
    result: ResultOptions,
    requests: Requests = 100,
    clients: Clients = 8,
    shadow: Shadow = 0.02,
) -> None:
    """What the shadow check costs: throughput of two servers with the plug-in, one with the check; both in turn.

    `figures.shadow_overhead`: a share of throughput. --shadow 0 shows by how much equal servers differ.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    from lab.servers import vllm_bench as bench

    pair = _pair(model, shadow)
    _measure(partial(bench.shadow, pair, requests=requests, clients=clients), size, rounds, result)


def vllm_replay(model: VllmOptions, what: Replay, result: ResultOptions, plot: Plot = None) -> None:
    """Requests per second at saturation, and time to first token by rate, on a trace of real requests.

    Requests are sampled from the last third of the trace.

    With --discover also what a server that learns by itself gains, of one whose passages are marked and stored before:
    `figures.discovered_of_marked`.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    picture = prepare(result, plot)
    from lab.bench import figure_lines
    from lab.servers import vllm_replay as bench

    pair = _pair(model)
    with bars(bench.STAGES, result) as advance:
        found = bench.replay(pair, what, advance)
    result.show(figure_lines(found), found)
    if picture is not None:
        bench.plot(found, picture)


def vllm_faults(
    result: ResultOptions,
    tried: Annotated[
        int,
        count(
            "--tried",
            "Faults at least; twice as many plain requests are compared with a vLLM without the plug-in.",
            most=1_000_000,
        ),
    ] = 520,
    only: Annotated[
        list[str] | None,
        several(
            "--only",
            "Campaigns: stall, lookups, equal, pollution, faults; several times. Default: all of them.",
        ),
    ] = None,
    seed: Annotated[int, seeded()] = 0,
) -> None:
    """Faults on purpose: answers that are wrong, engines that end, requests that hang, plain requests polluted.

    Errors by place and rank, out of memory, slow, hanging and damaged stores, aborts, preemption; shared fronts that
    arrive in one engine step; what a slow store, look-ups and equal prompts cost. Tiny random models.
    """
    prepare(result)
    from lab.bench import figure_lines
    from lab.faults import run as bench

    settings = bench.Settings(tried, seed, tuple(only) if only else bench.CAMPAIGNS)
    with bars(bench.CAMPAIGNS, result) as advance:
        found = bench.run(settings, advance)
    result.show(figure_lines(found), found)


def _pair(model: VllmOptions, shadow: float | None = None) -> "Pair":
    from cacheblend.cli.models import checked_dtype, quiet_transformers
    from lab.servers.vllm_server import Pair, check_installed

    chosen = model.resolved()
    checked_dtype(model.dtype)
    check_installed()  # before the weights of a shape are made
    quiet_transformers()
    return Pair(**vars(chosen), shadow=shadow)


def _measure(
    bench: "partial[dict[str, object]]", size: PromptSizeOptions, rounds: RoundOptions, result: ResultOptions
) -> None:
    """Rounds in which both servers are asked in turns, with a bar."""
    from lab.bench import figure_lines

    result.check()
    shape = PromptShape(**vars(size))
    with progress("measuring", "rounds", quiet=result.json) as advance:
        found = bench(shape, rounds.runs, seed=rounds.seed, advance=advance)
    result.show(figure_lines(found), found)
