"""`lab codecs` and `lab random-shapes`: what compression and random weights do to answers."""

from typing import Annotated

import typer

from cacheblend.cli.bench import HOW, MOST_CHUNKS, WHAT, ChunkTokens, ResultOptions
from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, SHAPE_OPTION, Limit
from cacheblend.cli.output import console, progress


def codecs(
    result: ResultOptions,
    suite_seed: Annotated[
        int, typer.Option("--suite-seed", min=1, max=3, help="Draw of the suite nano.", rich_help_panel=WHAT)
    ] = 1,
    limit: Limit = None,
) -> None:
    """What compressing stored KV does to answers, on the model that ships: first tokens, answers, right answers."""
    result.check()
    from cacheblend.cli.models import quiet_transformers
    from lab.speed import codecs as bench

    quiet_transformers()
    with progress("asking", "questions", quiet=result.json) as advance:
        found = bench.run(suite_seed, limit, advance)
    result.show(bench.table(found), found)


def random_shapes(
    result: ResultOptions,
    shape: Annotated[str, SHAPE_OPTION] = "tiny",
    prompts: Annotated[
        int, typer.Option("--prompts", min=1, max=100_000, help="Prompts, each of its own chunks.", rich_help_panel=HOW)
    ] = 4,
    chunks: Annotated[
        int, typer.Option("--chunks", min=1, max=MOST_CHUNKS, help="Chunks of a prompt.", rich_help_panel=WHAT)
    ] = 6,
    chunk_tokens: ChunkTokens = 128,
    plain_tokens: Annotated[
        int,
        typer.Option(
            "--plain-tokens", min=1, max=MOST_TOKENS, help="Plain tokens before the chunks.", rich_help_panel=WHAT
        ),
    ] = 32,
    question_tokens: Annotated[
        int,
        typer.Option(
            "--question-tokens", min=1, max=MOST_TOKENS, help="Tokens after the chunks.", rich_help_panel=WHAT
        ),
    ] = 32,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.", rich_help_panel=HOW)] = (
        "float32"
    ),
    gain: Annotated[
        float,
        typer.Option(
            "--gain",
            min=0.001,
            max=1000,
            help="Factor on all weight matrices; above 1 attention is sharper.",
            rich_help_panel=WHAT,
        ),
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of weights, ids and bootstrap.", rich_help_panel=HOW),
    ] = 0,
) -> None:
    """Selectors on random weights of a known shape: that its passes are right, and what they cost.

    Says nothing about which selector or ratio is good: random tokens refer to nothing.
    """
    result.check()
    from cacheblend.cli.models import quiet_transformers
    from lab.speed import random_shapes as bench

    quiet_transformers()
    settings = bench.Settings(shape, prompts, chunks, chunk_tokens, plain_tokens, question_tokens, dtype, gain, seed)
    with progress("measuring", "prompts", quiet=result.json) as advance:
        found = bench.run(settings, advance)
    result.show(bench.table(found), found)
    if not result.json:
        console().print(bench.CAVEAT)
