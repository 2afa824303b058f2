"""`lab serve`, `routing`, `agent` and `lab vllm`: servers, measured as a client sees them."""

from typing import TYPE_CHECKING

from cacheblend.cli.bench import WHAT, PromptSizeOptions, ResultOptions, RoundOptions
from cacheblend.cli.option_groups import option
from lab.cli.output import measure
from lab.settings import Agent, Plot, PromptShape, Replay, Routing, Serving, Sizes, VllmOptions, seeded

if TYPE_CHECKING:
    from lab.servers.vllm_server import Pair


def serve(
    what: Serving,
    result: ResultOptions,
    plot: Plot = None,
    hostile: bool = option(
        False,
        "Only what clients that mean ill do to a stream and to memory; on nano unless --model is given.",
        "--hostile/--no-hostile",
        panel=WHAT,
    ),
) -> None:
    """`cacheblend serve` over HTTP: first tokens, what the server adds, and a trace of real requests.

    With --shadow also what checking that share of the answers costs: `figures.shadow_overhead`, a share of throughput.

    With --discover the trace is also replayed with nothing marked, on what discovery learnt of the requests before the
    sample: `figures.discovered_of_marked`, `wasted` and `watch_ms`.
    """
    from cacheblend.core.errors import InvalidInputError

    if plot is not None and what.trace is None:
        raise InvalidInputError("--plot draws a replay: also give --trace")
    if hostile:
        measure(result, "servers.hostile", str(what.model or "nano"), what.runs, what.seed)
    else:
        measure(result, "servers.serve", what, plot=plot)


def routing(what: Routing, result: ResultOptions) -> None:
    """What sending a request where its chunks are hot gains over round robin: memory's hits against Redis'.

    Starts a Redis and servers on it. `figures`: shares of loaded tokens from memory, gains in time and throughput.
    """
    measure(result, "servers.routing", what)


def agent(what: Agent, sizes: Sizes, result: ResultOptions, plot: Plot = None) -> None:
    """Time to first token by turn of an agent, by OpenAI's API without extras: what text that nobody marked gains.

    Three servers with cold stores get the same requests: prefix caching, tool results as content parts, and nothing
    marked. `figures.agent_gain`: median of turns 3 and later, prefix caching by nothing marked.
    """
    measure(result, "servers.agent", what, sizes, unit="requests", title="asking", plot=plot)


# ---- vLLM ---------------------------------------------------------------------------------------------------


def vllm_ttft(model: VllmOptions, size: PromptSizeOptions, rounds: RoundOptions, result: ResultOptions) -> None:
    """Time to first token, of stored chunks in shuffled order and of plain prompts; both servers alternate."""
    measure(result, "servers.vllm_bench:ttft", _pair(model), PromptShape(**vars(size)), rounds)


def vllm_latency(model: VllmOptions, size: PromptSizeOptions, rounds: RoundOptions, result: ResultOptions) -> None:
    """Gaps between a request's tokens while another request's prompt is prefilled: blended, and plain."""
    measure(result, "servers.vllm_bench:latency", _pair(model), PromptShape(**vars(size)), rounds)


def vllm_timeline(
    model: VllmOptions, size: PromptSizeOptions, rounds: RoundOptions, result: ResultOptions, plot: Plot = None
) -> None:
    """Where the time of one blended request goes, from its arrival to its first token: each wait and its share.

    One engine without HTTP, in one process. Without --model and --shape: random weights of the shape qwen2.5-0.5b.
    """
    measure(result, "faults.timeline", _pair(model), PromptShape(**vars(size)), rounds, plot=plot)


def vllm_replay(model: VllmOptions, what: Replay, result: ResultOptions, plot: Plot = None) -> None:
    """Requests per second at saturation, and time to first token by rate, on a trace of real requests.

    Requests are sampled from the last third of the trace.

    With --discover also what a server that learns by itself gains, of one whose passages are marked and stored before:
    `figures.discovered_of_marked`.
    """
    measure(result, "servers.vllm_replay", _pair(model), what, plot=plot)


def vllm_faults(
    result: ResultOptions,
    tried: int = option(
        520,
        "Faults at least; twice as many plain requests are compared with a vLLM without the plug-in.",
        least=1,
        most=1_000_000,
        panel=WHAT,
    ),
    only: list[str] | None = option(
        None, "Campaigns: held, lookups, equal, pollution, faults; several times. Default: all of them.", panel=WHAT
    ),
    seed: int = seeded(),
) -> None:
    """Faults on purpose: answers that are wrong, engines that end, requests that hang, plain requests polluted.

    Errors by place and rank, out of memory, slow, hanging and damaged stores, aborts, preemption; shared fronts that
    arrive in one engine step; what a slow store, look-ups and equal prompts cost. Tiny random models.
    """
    from lab.faults.run import STAGES, Settings

    measure(result, "faults.run", Settings(tried, seed, tuple(only) if only else STAGES))


def _pair(model: VllmOptions) -> "Pair":
    from cacheblend.cli.models import quiet_transformers
    from cacheblend.engines.hf.model_loader import checked_dtype
    from lab.servers.vllm_server import Pair, check_installed

    chosen = model.resolved()
    checked_dtype(model.dtype)
    check_installed()  # before the weights of a shape are made
    quiet_transformers()
    return Pair(**vars(chosen))
