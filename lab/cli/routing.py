"""`lab routing`: several servers on one Redis, requests sent in turn or where their chunks are hot."""

from typing import Annotated

import typer

from cacheblend.cli.bench import HOW, WHAT, PromptSizeOptions, ResultOptions
from cacheblend.cli.options import MOST_SEED, ModelOrShape, OneRatio
from cacheblend.cli.output import stages
from lab.cli.options import DEFAULT_SHAPE, Clients, Requests, prompt_shape


def routing(
    model: ModelOrShape,
    size: PromptSizeOptions,
    result: ResultOptions,
    topics: Annotated[
        int,
        typer.Option("--topics", min=1, max=10_000, help="Topics, each with a prompt's chunks.", rich_help_panel=WHAT),
    ] = 12,
    memory_share: Annotated[
        float,
        typer.Option(
            "--memory-share",
            min=0.01,
            max=1,
            help="Share of all chunks that a server's memory holds.",
            rich_help_panel=WHAT,
        ),
    ] = 0.6,
    servers: Annotated[int, typer.Option("--servers", min=2, max=64, help="Servers.", rich_help_panel=HOW)] = 2,
    ratio: OneRatio = 0.15,
    requests: Requests = 100,
    clients: Clients = 2,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of weights, tokens, requests.", rich_help_panel=HOW),
    ] = 0,
) -> None:
    """What sending a request where its chunks are hot gains over round robin: memory's hits against Redis'.

    Starts a Redis and servers on it. `figures`: shares of loaded tokens from memory, gains in time and throughput.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    result.check()
    chosen = model.chosen(DEFAULT_SHAPE)
    from cacheblend.cli.models import quiet_transformers
    from lab.servers import routing as bench

    quiet_transformers()
    what = bench.Routing(
        model=None if chosen.model is None else str(chosen.model),
        shape=chosen.shape,
        topics=topics,
        prompt=prompt_shape(size),
        servers=servers,
        memory_share=memory_share,
        ratio=ratio,
        requests=requests,
        clients=clients,
        seed=seed,
    )
    with stages({stage: stage for stage in bench.STAGES}, quiet=result.json) as advance:
        found = bench.run(what, advance)
    result.show(bench.table(found), found)
