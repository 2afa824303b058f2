"""What measures prefills and stores on one machine, and what compression and random weights do to answers."""

from functools import partial
from pathlib import Path
from typing import Annotated

from cacheblend.cli.bench import (
    HOW,
    MOST_CHUNKS,
    ChunkTokens,
    ResultOptions,
    RoundOptions,
    SizeOptions,
    ThreadOptions,
    in_rounds,
    prompt_settings,
)
from cacheblend.cli.options import MODEL_OPTION, MOST_TOKENS, Limit, ModelOrShape, OneRatio, Plot, Seed, SyncedTokens
from cacheblend.cli.output import console, progress, status
from lab.cli.output import measure, prepare
from lab.settings import DEFAULT_SHAPE, Peers, RandomShapes, ReplayedTrace, count, named, needed, several

MOST_BLOCKS = 100_000_000
THREE_ROUNDS, TWO_THREADS = RoundOptions(runs=3), ThreadOptions(2)

Folder = Annotated[Path | None, named("--folder", "Folder on the disk to measure.")]
Runs = Annotated[int, count("--runs", "Measured rounds, after one warm-up.", most=100_000, panel=HOW)]


# ---- prefills -----------------------------------------------------------------------------------------------


def memory(
    model: ModelOrShape, size: SizeOptions, threads: ThreadOptions, result: ResultOptions, ratio: OneRatio = 0.15
) -> None:
    """Peak resident memory of a blend and of a full prefill, each in its own process, the store on disk."""
    result.check()
    settings = prompt_settings(model, ratios=(ratio,), **vars(size), **vars(threads))
    from lab.speed import memory as bench

    found = in_rounds(partial(bench.run, settings), result.json)
    result.show(bench.table(found), found)


def controller(
    model: ModelOrShape,
    threads: ThreadOptions,
    result: ResultOptions,
    rounds: RoundOptions = THREE_ROUNDS,
    chunk_tokens: ChunkTokens = 256,
    chunks: Annotated[
        list[int] | None, several("--chunks", "Chunks of a context; several times. Default: 4 8 16.", 2, MOST_CHUNKS)
    ] = None,
    ratio: OneRatio = 0.15,
) -> None:
    """The loading controller against every fixed choice, over throttled devices and context lengths.

    The ratio is the least that the controller may choose.
    """
    result.check()
    settings = prompt_settings(model, chunk_tokens=chunk_tokens, ratios=(ratio,), **vars(rounds), **vars(threads))
    from lab.speed import controller as bench

    measure(result, "cells", bench, settings, tuple(chunks or (4, 8, 16)))


def core(
    result: ResultOptions, rounds: RoundOptions, model: ModelOrShape, threads: ThreadOptions = TWO_THREADS
) -> None:
    """The figures that blending is held to, each beside its bar. About half an hour on two cores."""
    result.check()
    chosen = model if model.model else ModelOrShape(shape=model.shape or DEFAULT_SHAPE)
    settings = prompt_settings(chosen, **vars(rounds), **vars(threads))
    from lab.speed import core as bench

    measure(result, "parts", bench, settings)


def peers(what: Peers, result: ResultOptions) -> None:
    """Full prefill, transformers' prefix cache, kvboost, contextpilot and blending on the same shuffled requests.

    Tokens reused, time to first token, distance of the first token's logits from full prefill. What is not installed
    is skipped, and named. On random weights the distances say nothing about quality.

    Without --model and --shape it measures random weights of the shape qwen2.5-0.5b.
    """
    prepare(result)
    what = what.resolved()
    from lab.speed import peers as bench

    measure(result, "requests", bench, what, title="asking")


# ---- stores -------------------------------------------------------------------------------------------------


def plan(
    result: ResultOptions,
    chunks: Annotated[int, count("--chunks", "Chunks of the prompt, all stored.", most=MOST_CHUNKS)] = 64,
    chunk_tokens: ChunkTokens = 511,
    store: Annotated[str, named("--store", "memory, or a folder to fill.")] = "memory",
    runs: Runs = 20,
) -> None:
    """Time to name and plan a long prompt: what blending costs before the first layer."""
    result.check()
    _check_most(MOST_TOKENS, chunks=chunks, chunk_tokens=chunk_tokens)
    from lab.speed import plan as bench

    found = bench.run(chunks=chunks, chunk_tokens=chunk_tokens, store=store, runs=runs)
    line = (
        f"names and plan of {found['prompt_tokens']} tokens, {chunks} chunks: "
        f"{1e3 * found['plan_s']['median']:.1f} ms (median of {runs})"
    )
    result.show(line, found)


def match(
    result: ResultOptions,
    stored: Annotated[int, count("--stored", "Chunks in the store.", most=MOST_BLOCKS)] = 100_000,
    chunk_tokens: ChunkTokens = 256,
    prompt_tokens: Annotated[int, count("--prompt-tokens", "Tokens of a prompt, at least.", most=MOST_TOKENS)] = 32_768,
    runs: Runs = 20,
) -> None:
    """Time to find a prompt's stored chunks by their content."""
    result.check()
    _check_most(1 << 31, stored=stored, chunk_tokens=chunk_tokens)
    from lab.speed import plan as bench

    found = bench.match(stored=stored, chunk_tokens=chunk_tokens, prompt_tokens=prompt_tokens, runs=runs)
    line = (
        f"{found['prompt_tokens']} tokens against {stored} chunks of {chunk_tokens}: "
        f"{found['figures']['match_ms']:.1f} ms (median of {runs}); the index was filled in {found['fill_s']:.1f} s"
    )
    result.show(line, found)


def _check_most(most: int, **options: int) -> None:
    from cacheblend.core.errors import InvalidInputError

    (one, first), (other, second) = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    if first * second > most:
        raise InvalidInputError(f"{one} {first} x {other} {second} is more than {most} tokens; give fewer")


def load(
    model: ModelOrShape,
    size: SizeOptions,
    rounds: RoundOptions,
    threads: ThreadOptions,
    result: ResultOptions,
    ratio: OneRatio = 0.15,
    folder: Folder = None,
    redis: Annotated[str | None, named("--redis", "URL of a Redis server to measure, too.")] = None,
    kv_shape: Annotated[
        str | None, named("--kv-shape", "Read KV of this shape from disk and Redis, instead of the model's own.")
    ] = None,
) -> None:
    """What loading costs: hidden by computing or not, disk and Redis against plain reads, and bytes by codec."""
    result.check()
    _check_there(folder)
    prompt = prompt_settings(model, ratios=(ratio,), **vars(size), **vars(rounds), **vars(threads))
    from lab.speed import load as bench

    with status("measuring ...", quiet=result.json):
        found = bench.run(prompt, folder, redis, kv_shape)
    result.show(bench.table(found), found)


def store(
    result: ResultOptions,
    blocks: Annotated[int, count("--blocks", "Blocks of the store; 8 KiB of disk each.", most=MOST_BLOCKS)] = 1_000_000,
    folder: Folder = None,
) -> None:
    """A disk store of very many blocks: look-ups, opening, memory."""
    result.check()
    _check_there(folder)
    from lab.speed import lookup as bench

    with progress("filling", "blocks", quiet=result.json) as advance:
        found = bench.run(blocks, folder, min(2000, blocks), advance)
    result.show(bench.line(found), found)


def _check_there(folder: Path | None) -> None:
    from cacheblend.core.errors import InvalidInputError

    if folder is not None and not folder.is_dir():
        raise InvalidInputError(f"--folder {folder}: there is no such folder")


def evict(
    trace: ReplayedTrace,
    result: ResultOptions,
    size: Annotated[
        list[float] | None,
        several("--size", "Size of the cache as a share of all distinct blocks, 0..1; several times."),
    ] = None,
    plot: Plot = None,
) -> None:
    """Hit rate by cache size on a trace of real requests: each eviction policy, and the best possible."""
    picture = prepare(result, plot)
    from lab.speed import eviction as bench

    found = bench.run(trace, tuple(sorted(size)) if size else bench.SHARES)
    result.show(bench.table(found), found)
    if picture is not None:
        bench.plot(found, picture)


def sync(
    data: Annotated[Path, needed("--data", "-d", text="Passages that documents are made of.")],
    result: ResultOptions,
    model: Annotated[Path, MODEL_OPTION] = Path("nano"),
    documents: Annotated[int, count("--documents", "Documents.", most=MOST_BLOCKS)] = 200,
    tokens: Annotated[int, count("--tokens", "Tokens of a document.", most=MOST_TOKENS)] = 2000,
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


# ---- answers ------------------------------------------------------------------------------------------------


def codecs(
    result: ResultOptions,
    suite_seed: Annotated[int, count("--suite-seed", "Draw of the suite nano.", most=3)] = 1,
    limit: Limit = None,
) -> None:
    """What compressing stored KV does to answers, on the model that ships: first tokens, answers, right answers."""
    prepare(result)
    from lab.speed import codecs as bench

    measure(result, "questions", bench, suite_seed, limit, title="asking")


def random_shapes(result: ResultOptions, what: RandomShapes) -> None:
    """Selectors on random weights of a known shape: that its passes are right, and what they cost.

    Says nothing about which selector or ratio is good: random tokens refer to nothing.
    """
    prepare(result)
    from lab.speed import random_shapes as bench

    measure(result, "prompts", bench, what)
    if not result.json:
        console().print(bench.CAVEAT)
