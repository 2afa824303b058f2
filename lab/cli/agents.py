"""`lab agent` and `lab peers`: an agent of many turns; other ways to reuse KV, side by side."""

from pathlib import Path
from typing import Annotated

import typer

from cacheblend.cli.bench import HOW, WHAT, PromptSizeOptions, ResultOptions, RoundOptions
from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, ModelOrShape, OneRatio, Plot
from cacheblend.cli.output import picture_file, progress
from lab.cli.options import DEFAULT_SHAPE


def _size(name: str, text: str, least: int = 1, most: int = 10_000) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(name, min=least, max=most, help=text, rich_help_panel=WHAT)
    return found


def agent(
    data: Annotated[
        Path, typer.Option("--data", help="Passages: the tools' results.", rich_help_panel=WHAT, show_default=False)
    ],
    model: ModelOrShape,
    result: ResultOptions,
    sessions: Annotated[int, _size("--sessions", "Sessions, one after the other.")] = 3,
    turns: Annotated[int, _size("--turns", "Requests of a session.", 3)] = 6,
    results: Annotated[int, _size("--results", "Different tool results, re-read across sessions.")] = 10,
    result_tokens: Annotated[int, _size("--result-tokens", "Tokens of a tool result.", most=MOST_TOKENS)] = 384,
    first_reads: Annotated[int, _size("--first-reads", "Tool results of the first turn's search.")] = 4,
    reads: Annotated[int, _size("--reads", "Tool results that each further turn adds.")] = 1,
    kept: Annotated[int, _size("--kept", "Tool results of a request at most; the oldest are dropped.")] = 6,
    reorder: Annotated[
        float,
        typer.Option(
            "--reorder", min=0, max=1, help="Share of the turns that order tool results anew.", rich_help_panel=WHAT
        ),
    ] = 0.5,
    pause: Annotated[
        float,
        typer.Option(
            "--pause", min=0, max=3600, help="Seconds between turns: the agent runs its tools.", rich_help_panel=WHAT
        ),
    ] = 4.0,
    ratio: OneRatio = 0.15,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of weights, reads, orders.", rich_help_panel=HOW)
    ] = 0,
    plot: Plot = None,
) -> None:
    """Time to first token by turn of an agent, by OpenAI's API without extras: what text that nobody marked gains.

    Three servers with cold stores get the same requests: prefix caching, tool results as content parts, and nothing
    marked. `figures.agent_gain`: median of turns 3 and later, prefix caching by nothing marked.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    result.check()
    picture, chosen = picture_file(plot), model.chosen(DEFAULT_SHAPE)
    from cacheblend.cli.models import quiet_transformers
    from lab.servers.agents import run as bench
    from lab.servers.agents.conversation import Sizes

    quiet_transformers()
    what = bench.AgentBench(
        data=data,
        model=None if chosen.model is None else str(chosen.model),
        shape=chosen.shape,
        sizes=Sizes(sessions, turns, results, result_tokens, first_reads, reads, kept, reorder),
        ratio=ratio,
        pause_s=pause,
        seed=seed,
    )
    with progress("asking", "requests", quiet=result.json) as advance:
        found = bench.run(what, advance)
    result.show(bench.table(found), found)
    if picture is not None:
        bench.plot(found, picture)


def peers(
    data: Annotated[
        Path, typer.Option("--data", help="Passages of the requests.", rich_help_panel=WHAT, show_default=False)
    ],
    model: ModelOrShape,
    size: PromptSizeOptions,
    rounds: RoundOptions,
    result: ResultOptions,
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio", "-r", min=0, max=1, help="Recompute ratios of blending. Default: 0.15 0.05.", rich_help_panel=HOW
        ),
    ] = None,
) -> None:
    """Full prefill, transformers' prefix cache, kvboost, contextpilot and blending on the same shuffled requests.

    Tokens reused, time to first token, distance of the first token's logits from full prefill. What is not installed
    is skipped, and named. On random weights the distances say nothing about quality.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    result.check()
    chosen = model.chosen(DEFAULT_SHAPE)
    from cacheblend.cli.models import quiet_transformers
    from lab.speed.peers import run as bench

    quiet_transformers()
    what = bench.PeersBench(
        data=data,
        model=None if chosen.model is None else str(chosen.model),
        shape=chosen.shape,
        chunks=size.chunks,
        chunk_tokens=size.chunk_tokens,
        question_tokens=size.question_tokens,
        requests=rounds.runs,
        ratios=tuple(ratio or (0.15, 0.05)),
        seed=rounds.seed,
    )
    with progress("asking", "requests", quiet=result.json) as advance:
        found = bench.run(what, advance)
    result.show(bench.table(found), found)
