"""`lab plan`, `match`, `load`, `store` and `evict`: finding, loading and keeping stored KV."""

from pathlib import Path
from typing import Annotated

import typer

from cacheblend.cli.bench import (
    HOW,
    WHAT,
    ChunkTokens,
    ResultOptions,
    RoundOptions,
    SizeOptions,
    ThreadOptions,
    prompt_settings,
)
from cacheblend.cli.options import MODEL_OPTION, MOST_TOKENS, ModelOrShape, OneRatio, Plot, Seed, SyncedTokens
from cacheblend.cli.output import picture_file, progress, status
from lab.cli.options import Folder, PlannedChunks

MOST_BLOCKS = 100_000_000

PlannedRuns = Annotated[
    int, typer.Option("--runs", min=1, max=100_000, help="Measured rounds, after one warm-up.", rich_help_panel=HOW)
]


def plan(
    result: ResultOptions,
    chunks: PlannedChunks = 64,
    chunk_tokens: ChunkTokens = 511,
    store: Annotated[
        str, typer.Option("--store", help="memory, or a folder to fill.", rich_help_panel=WHAT)
    ] = "memory",
    runs: PlannedRuns = 20,
) -> None:
    """Time to name and plan a long prompt: what blending costs before the first layer."""
    from cacheblend.core.errors import InvalidInputError

    result.check()
    if chunks * chunk_tokens > MOST_TOKENS:
        raise InvalidInputError(
            f"--chunks {chunks} x --chunk-tokens {chunk_tokens} is more than {MOST_TOKENS} tokens; give fewer"
        )
    from lab.speed import plan as bench

    found = bench.run(chunks=chunks, chunk_tokens=chunk_tokens, store=store, runs=runs)
    line = (
        f"names and plan of {found['prompt_tokens']} tokens, {chunks} chunks: "
        f"{1e3 * found['plan_s']['median']:.1f} ms (median of {runs})"
    )
    result.show(line, found)


def match(
    result: ResultOptions,
    stored: Annotated[
        int, typer.Option("--stored", min=1, max=MOST_BLOCKS, help="Chunks in the store.", rich_help_panel=WHAT)
    ] = 100_000,
    chunk_tokens: ChunkTokens = 256,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens", min=1, max=MOST_TOKENS, help="Tokens of a prompt, at least.", rich_help_panel=WHAT
        ),
    ] = 32_768,
    runs: PlannedRuns = 20,
) -> None:
    """Time to find a prompt's stored chunks by their content."""
    from cacheblend.core.errors import InvalidInputError

    result.check()
    if stored * chunk_tokens > 1 << 31:
        raise InvalidInputError(
            f"--stored {stored} x --chunk-tokens {chunk_tokens} is more than {1 << 31} tokens; give fewer"
        )
    from lab.speed import match as bench

    found = bench.run(stored=stored, chunk_tokens=chunk_tokens, prompt_tokens=prompt_tokens, runs=runs)
    line = (
        f"{found['prompt_tokens']} tokens against {stored} chunks of {chunk_tokens}: "
        f"{found['figures']['match_ms']:.1f} ms (median of {runs}); the index was filled in {found['fill_s']:.1f} s"
    )
    result.show(line, found)


def load(
    model: ModelOrShape,
    size: SizeOptions,
    rounds: RoundOptions,
    threads: ThreadOptions,
    result: ResultOptions,
    ratio: OneRatio = 0.15,
    folder: Folder = None,
    redis: Annotated[
        str | None, typer.Option("--redis", help="URL of a Redis server to measure, too.", rich_help_panel=WHAT)
    ] = None,
    kv_shape: Annotated[
        str | None,
        typer.Option(
            "--kv-shape",
            help="Read KV of this shape from disk and Redis, instead of the model's own.",
            rich_help_panel=WHAT,
        ),
    ] = None,
) -> None:
    """What loading costs: hidden by computing or not, disk and Redis against plain reads, and bytes by codec."""
    from cacheblend.core.errors import InvalidInputError

    result.check()
    if folder is not None and not folder.is_dir():
        raise InvalidInputError(f"--folder {folder}: there is no such folder")
    prompt = prompt_settings(
        model,
        chunks=size.chunks,
        chunk_tokens=size.chunk_tokens,
        ratios=(ratio,),
        runs=rounds.runs,
        threads=threads.threads,
        seed=rounds.seed,
    )
    from lab.speed import load as bench

    with status("measuring ...", quiet=result.json):
        found = bench.run(bench.LoadSettings(prompt, folder, redis, kv_shape))
    result.show(bench.table(found), found)


def store(
    result: ResultOptions,
    blocks: Annotated[
        int,
        typer.Option(
            "--blocks", min=1, max=MOST_BLOCKS, help="Blocks of the store; 8 KiB of disk each.", rich_help_panel=WHAT
        ),
    ] = 1_000_000,
    folder: Folder = None,
) -> None:
    """A disk store of very many blocks: look-ups, opening, memory."""
    from cacheblend.core.errors import InvalidInputError

    result.check()
    if folder is not None and not folder.is_dir():
        raise InvalidInputError(f"--folder {folder}: there is no such folder")
    from lab.speed import lookup as bench

    with progress("filling", "blocks", quiet=result.json) as advance:
        found = bench.run(blocks, folder, min(2000, blocks), advance)
    result.show(bench.line(found), found)


def evict(
    trace: Annotated[
        Path, typer.Option("--trace", help="Folder of a RAGPulse trace.", rich_help_panel=WHAT, show_default=False)
    ],
    result: ResultOptions,
    size: Annotated[
        list[float] | None,
        typer.Option(
            "--size",
            help="Size of the cache as a share of all distinct blocks, 0..1; several times.",
            rich_help_panel=WHAT,
            show_default=False,
        ),
    ] = None,
    plot: Plot = None,
) -> None:
    """Hit rate by cache size on a trace of real requests: each eviction policy, and the best possible."""
    result.check()
    picture = picture_file(plot)
    from lab.speed import eviction as bench

    found = bench.run(trace, tuple(sorted(size)) if size else bench.SHARES)
    result.show(bench.table(found), found)
    if picture is not None:
        bench.plot(found, picture)


def sync(
    data: Annotated[
        Path, typer.Option("--data", "-d", help="Passages that documents are made of.", rich_help_panel=WHAT)
    ],
    result: ResultOptions,
    model: Annotated[Path, MODEL_OPTION] = Path("nano"),
    documents: Annotated[
        int, typer.Option("--documents", min=1, max=MOST_BLOCKS, help="Documents.", rich_help_panel=WHAT)
    ] = 200,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, max=MOST_TOKENS, help="Tokens of a document.", rich_help_panel=WHAT)
    ] = 2000,
    chunk_tokens: SyncedTokens = 512,
    seed: Seed = 0,
) -> None:
    """Tokens computed again after one sentence of each document was edited."""
    from tempfile import TemporaryDirectory

    from cacheblend.cli.models import open_engine

    result.check()
    with (
        TemporaryDirectory() as folder,
        open_engine(model, f"{folder}/store", {"discover": False}, quiet=result.json) as engine,
        status("synchronising ...", quiet=result.json),
    ):
        from cacheblend.engines.tokens.chunker import Cutting
        from lab.speed import sync as bench

        cutting = Cutting(chunk_tokens, min(64, chunk_tokens // 2))
        found = bench.run(engine, data, documents=documents, tokens=tokens, cutting=cutting, seed=seed)
    result.show(bench.line(found), found)
