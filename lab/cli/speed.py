"""What measures prefills and stores on one machine, and what compression and random weights do to answers."""

from pathlib import Path
from typing import Annotated

from cacheblend.cli.bench import (
    HOW,
    MOST_CHUNKS,
    WHAT,
    ChunkTokens,
    ResultOptions,
    RoundOptions,
    SizeOptions,
    ThreadOptions,
    prompt_settings,
)
from cacheblend.cli.option_groups import option
from cacheblend.cli.options import MODEL_OPTION, MOST_TOKENS, Limit, ModelOrShape, OneRatio, Seed, SyncedTokens
from lab.cli.output import measure
from lab.settings import DEFAULT_SHAPE, Adapt, Edits, Peers, Plot, Real, ReplayedTrace

MOST_BLOCKS = 100_000_000
THREE_ROUNDS, TWO_THREADS = RoundOptions(runs=3), ThreadOptions(2)

Folder = Annotated[Path | None, option(..., "Folder on the disk to measure.", panel=WHAT)]


# ---- prefills -----------------------------------------------------------------------------------------------


def controller(
    model: ModelOrShape,
    threads: ThreadOptions,
    result: ResultOptions,
    rounds: RoundOptions = THREE_ROUNDS,
    chunk_tokens: ChunkTokens = 256,
    chunks: list[int] | None = option(
        None, "Chunks of a context; several times. Default: 4 8 16.", least=2, most=MOST_CHUNKS, panel=WHAT
    ),
    ratio: OneRatio = 0.15,
) -> None:
    """The loading controller against every fixed choice, over throttled devices and context lengths.

    The ratio is the least that the controller may choose.
    """
    settings = prompt_settings(model, chunk_tokens=chunk_tokens, ratios=(ratio,), **vars(rounds), **vars(threads))
    measure(result, "speed.controller", settings, tuple(chunks or (4, 8, 16)), unit="cells")


def core(
    result: ResultOptions, rounds: RoundOptions, model: ModelOrShape, threads: ThreadOptions = TWO_THREADS
) -> None:
    """The figures that blending is held to, each beside its bar. About half an hour on two cores."""
    chosen = model if model.model else ModelOrShape(shape=model.shape or DEFAULT_SHAPE)
    measure(result, "speed.core", prompt_settings(chosen, **vars(rounds), **vars(threads)), unit="parts")


def peers(what: Peers, result: ResultOptions) -> None:
    """Full prefill, transformers' prefix cache, kvboost, contextpilot and blending on the same shuffled requests.

    Tokens reused, time to first token, distance of the first token's logits from full prefill. What is not installed
    is skipped, and named. On random weights the distances say nothing about quality.
    """
    measure(result, "speed.peers", what, unit="requests", title="asking")


# ---- stores -------------------------------------------------------------------------------------------------


def match(
    result: ResultOptions,
    stored: int = option(100_000, "Chunks in the store.", least=1, most=MOST_BLOCKS, panel=WHAT),
    chunk_tokens: ChunkTokens = 256,
    prompt_tokens: int = option(32_768, "Tokens of a prompt, at least.", least=1, most=MOST_TOKENS, panel=WHAT),
    runs: int = option(20, "Measured prompts.", least=1, most=100_000, panel=HOW),
) -> None:
    """Time to find a prompt's stored chunks by their content."""
    from cacheblend.core.errors import InvalidInputError

    if stored * chunk_tokens > 1 << 31:
        raise InvalidInputError(f"--stored {stored} x --chunk-tokens {chunk_tokens} is too much memory; give fewer")
    measure(result, "speed.plan:match", stored, chunk_tokens, prompt_tokens, runs)


def load(
    model: ModelOrShape,
    size: SizeOptions,
    rounds: RoundOptions,
    threads: ThreadOptions,
    result: ResultOptions,
    ratio: OneRatio = 0.15,
    folder: Folder = None,
    redis: str | None = option(None, "URL of a Redis server to measure, too.", panel=WHAT),
    kv_shape: str | None = option(
        None, "Read KV of this shape from disk and Redis, instead of the model's own.", panel=WHAT
    ),
) -> None:
    """What loading costs: hidden by computing or not, disk and Redis against plain reads, and bytes by codec."""
    _check_there(folder)
    prompt = prompt_settings(model, ratios=(ratio,), **vars(size), **vars(rounds), **vars(threads))
    measure(result, "speed.load", prompt, folder, redis, kv_shape, unit="parts")


def store(
    result: ResultOptions,
    blocks: int = option(1_000_000, "Blocks of the store; 8 KiB of disk each.", least=1, most=MOST_BLOCKS, panel=WHAT),
    folder: Folder = None,
) -> None:
    """A disk store of very many blocks: look-ups, opening, memory."""
    _check_there(folder)
    measure(result, "speed.lookup", blocks, folder, min(2000, blocks), unit="blocks", title="filling")


def _check_there(folder: Path | None) -> None:
    from cacheblend.core.errors import InvalidInputError

    if folder is not None and not folder.is_dir():
        raise InvalidInputError(f"--folder {folder}: there is no such folder")


def evict(
    trace: ReplayedTrace,
    result: ResultOptions,
    size: list[float] | None = option(
        None, "Size of the cache as a share of all distinct blocks, 0..1; several times.", panel=WHAT
    ),
    plot: Plot = None,
) -> None:
    """Hit rate by cache size on a trace of real requests: each eviction policy, and the best possible."""
    measure(result, "speed.eviction", trace, tuple(sorted(size or ())), unit="policies", plot=plot)


def sync(
    result: ResultOptions,
    data: Path = option(..., "Passages that documents are made of.", "-d", panel=WHAT),
    model: Annotated[Path, MODEL_OPTION] = Path("nano"),
    documents: int = option(200, "Documents.", least=1, most=MOST_BLOCKS, panel=WHAT),
    tokens: int = option(2000, "Tokens of a document.", least=1, most=MOST_TOKENS, panel=WHAT),
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
    ):
        from cacheblend.engines.tokens.chunker import Cutting

        cutting = Cutting(chunk_tokens, min(64, chunk_tokens // 2))
        measure(result, "speed.sync", engine, data, documents, tokens, cutting, seed, unit="passes")


# ---- answers ------------------------------------------------------------------------------------------------


def codecs(
    result: ResultOptions,
    suite_seed: int = option(1, "Draw of the suite nano.", least=1, most=3, panel=WHAT),
    limit: Limit = None,
) -> None:
    """What compressing stored KV does to answers, on the model that ships: first tokens, answers, right answers."""
    measure(result, "speed.codecs", suite_seed, limit, unit="questions", title="asking")


def real(asked: Real, result: ResultOptions, plot: Plot = None) -> None:
    """Quality on pretrained weights: KL to full prefill on the model's own answers, by setting and compute."""
    measure(result, "real.quality", asked, unit="rows", plot=plot)


def orders(asked: Real, result: ResultOptions) -> None:
    """Answers of pretrained weights that change with what was asked before, or with the order of passages."""
    measure(result, "real.orders", asked, unit="rows")


def adapt(asked: Adapt, result: ResultOptions) -> None:
    """What a LoRA on the query projections, trained on the user's passages, takes back of what reuse loses."""
    measure(result, "real.adapt", asked, unit="steps and rows")


def edits(asked: Edits, result: ResultOptions, plot: Plot = None) -> None:
    """What moving an edited history's KV saves against prefix caching, and KL to full prefill, turn by turn.

    Scenes: thoughts that are stripped, tool results that are cleared, a summary of the older half, a clock in the first
    line.
    """
    measure(result, "speed.edits", asked, unit="conversations", plot=plot)
