"""What loading costs: hidden by computing or not; disk and Redis against plain reads; bytes by codec.

pipeline   TTFT with a throttled store that takes as long as computing: with layers prefetched, and one by one
disk       a request's blocks by layer, page cache dropped, against one plain read of as many bytes; KV of the model,
           or of another shape: the result depends on the size of a record only
redis      the same against one pipelined GET of the same values
codecs     bytes of a stored block, header included, relative to bf16
"""

import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cacheblend.bench.shapes import shape_config
from cacheblend.bench.stamp import stamp
from cacheblend.bench.ttft import TtftSettings, draw_prompt, open_chunks, open_model
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import BlockLostError, InvalidInputError
from cacheblend.core.naming import BlockName, as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.core.plan.codec import CODECS
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.survey import expected_layout
from cacheblend.store import DiskStore, KVStore, open_store
from cacheblend.store.combined.throttled import ThrottledStore
from cacheblend.store.format.block_file import encode_block

Progress = Callable[[str], None]
_BLOCK = 256  # tokens
_GROW_ROWS = 64 << 30


@dataclass(frozen=True)
class LoadSettings:
    """What is measured.

    Attributes:
        prompt: model or shape, chunks, ratio, runs, seed.
        folder: on the disk to measure; None: the temporary folder.
        redis: URL of a server; None leaves Redis out.
        direct: read the disk past the page cache.
        kv_shape: shape of the records that are read from disk and Redis; None: the model's.
    """

    prompt: TtftSettings
    folder: Path | None = None
    redis: str | None = None
    direct: bool = False
    kv_shape: str | None = None


@torch.no_grad()
def run(settings: LoadSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Runs all parts; returns `figures` and the raw numbers.

    Raises:
        InvalidInputError: the model cannot be opened.
        StoreError: disk or server cannot be used.
    """
    advance = progress or (lambda what: None)
    stored = None if settings.kv_shape is None else expected_layout(shape_config(settings.kv_shape), torch.bfloat16)
    if settings.prompt.threads is not None:
        torch.set_num_threads(settings.prompt.threads)
    model, tokenizer, name = open_model(settings.prompt)
    advance("pipelined loading")
    pipeline, layout = _pipeline(settings.prompt, model, tokenizer)
    figures: dict[str, float | None] = {
        "pipelined_over_max": pipeline["pipelined_over_max"],
        "serial_over_max": pipeline["serial_over_max"],
    }
    tokens = settings.prompt.chunks * settings.prompt.chunk_tokens
    result: dict[str, Any] = {"model": name, "tokens": tokens, "pipeline": pipeline}
    layout = stored or layout
    result["kv"] = {
        "shape": settings.kv_shape or name,
        "record_bytes": layout.block_bytes(_BLOCK) // len(layout.layers),
    }
    advance("the disk")
    result["disk"] = _disk(layout, tokens, settings)
    figures["disk_read_share"] = result["disk"]["share"]
    if settings.redis is not None:
        advance("Redis")
        result["redis"] = _redis(layout, tokens, settings.redis, settings.prompt.runs)
        figures["redis_read_share"] = result["redis"]["share"]
    result["codec_bytes"] = {codec: _codec_bytes(codec) for codec in CODECS}
    figures |= {f"{codec}_bytes": share for codec, share in result["codec_bytes"].items() if codec != "raw"}
    return {
        "figures": figures,
        **result,
        **stamp(),
    }


# ---- the pipeline -------------------------------------------------------------------------------------------


def _pipeline(prompt: TtftSettings, model: Any, tokenizer: Any) -> tuple[dict[str, Any], KVLayout]:
    """TTFT where loading takes as long as computing: three ways, alternating, each with its own throughput."""
    draw = random.Random(prompt.seed)
    with ExitStack() as stack:
        slow = ThrottledStore(1e15, max_bytes=_GROW_ROWS)
        stack.enter_context(slow)
        ahead, serial = (stack.enter_context(_engine(model, tokenizer, slow, n)) for n in (2, 0))
        chunks = open_chunks(prompt, ahead, draw)
        ahead.warm(chunks)
        layout = ahead.survey.layout
        ratio = prompt.ratios[0]

        def seconds(engine: BlendEngine) -> float:
            asked = draw_prompt(prompt, chunks, engine.survey.vocab_size, draw)
            started = time.perf_counter()
            engine.prefill(asked, ratio=ratio)
            return time.perf_counter() - started

        seconds(serial)
        unthrottled = statistics.median(seconds(serial) for _ in range(prompt.runs))
        # Loading starts with the first layer whose loaded rows are used: its bytes are spread over the whole pass.
        nbytes = layout.block_bytes(_BLOCK) / _BLOCK * prompt.chunks * prompt.chunk_tokens
        nbytes *= (len(layout.layers) - 1) / len(layout.layers)
        throttled = nbytes / unthrottled
        times: dict[str, list[float]] = {"compute": [], "pipelined": [], "serial": []}
        for _ in range(prompt.runs):
            for name, engine in (("compute", serial), ("pipelined", ahead), ("serial", serial)):
                slow.bytes_per_s = 1e15 if name == "compute" else throttled
                times[name].append(seconds(engine))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    longest = max(unthrottled, medians["compute"])
    return {
        "bytes": nbytes,
        "bytes_per_s": throttled,
        "load_s": unthrottled,
        "seconds": times,
        "pipelined_over_max": medians["pipelined"] / longest,
        "serial_over_max": medians["serial"] / longest,
    }, layout


def _engine(model: Any, tokenizer: Any, store: KVStore, read_ahead: int) -> BlendEngine:
    config = BlendConfig(capture=False, read_ahead=read_ahead)
    return BlendEngine(model, tokenizer, store=store, config=config, fingerprint="bench", name="bench")


# ---- disk and Redis -----------------------------------------------------------------------------------------


def _disk(layout: KVLayout, tokens: int, settings: LoadSettings) -> dict[str, Any]:
    """A request's blocks by layer, and a plain file of as many bytes, both with nothing in the page cache."""
    by_layer, at_once = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-", dir=settings.folder)))
        store = DiskStore(folder / "store", max_bytes=None, direct=settings.direct)
        stack.enter_context(store)
        names, nbytes = _fill(store, layout, tokens)
        plain = folder / "plain"
        _write_plain(plain, nbytes)
        for _ in range(settings.prompt.runs):
            for name in names:
                _drop_pages(Path(store.file_of(name)))
            by_layer.append(_read_by_layer(store, names, layout))
            _drop_pages(plain)
            at_once.append(_read_plain(plain, direct=settings.direct))
    rates = {"by_layer": nbytes / statistics.median(by_layer), "plain": nbytes / statistics.median(at_once)}
    return {
        "bytes": nbytes,
        "seconds": {"by_layer": by_layer, "plain": at_once},
        "bytes_per_s": rates,
        "share": rates["by_layer"] / rates["plain"],
    }


def _redis(layout: KVLayout, tokens: int, url: str, runs: int) -> dict[str, Any]:
    """A request's blocks by layer, and the same values by pipelines of plain GETs."""
    import redis

    prefix = f"bench-{os.getpid()}"
    client = redis.Redis.from_url(url)
    with open_store(f"{url}?prefix={prefix}") as store:
        names, nbytes = _fill(store, layout, tokens)
        try:
            keys = [[f"{prefix}:{{{name.hex()}}}:{layer}" for name in names] for layer in range(len(layout.layers))]
            by_layer, plain = [], []
            for _ in range(runs):
                by_layer.append(_read_by_layer(store, names, layout))
                started = time.perf_counter()
                for of_layer in keys:
                    with client.pipeline(transaction=False) as pipe:
                        for key in of_layer:
                            pipe.get(key)
                        pipe.execute()
                plain.append(time.perf_counter() - started)
        finally:
            for name in names:
                store.delete(name)
    rates = {"by_layer": nbytes / statistics.median(by_layer), "plain": nbytes / statistics.median(plain)}
    return {
        "bytes": nbytes,
        "seconds": {"by_layer": by_layer, "plain": plain},
        "bytes_per_s": rates,
        "share": rates["by_layer"] / rates["plain"],
    }


def _fill(store: KVStore, layout: KVLayout, tokens: int) -> tuple[list[BlockName], int]:
    """Stores random blocks with `tokens` tokens in all; returns their names and the bytes of their records."""
    root, names = root_name("bench", "load"), []
    for number in range(-(-tokens // _BLOCK)):
        block = random_block(layout, number, _BLOCK, root)
        store.write(block)
        names.append(block.name)
    store.find(names)
    return names, len(names) * layout.block_bytes(_BLOCK)


def random_block(layout: KVLayout, number: int, tokens: int, root: BlockName) -> Block:
    """A block of random numbers; its name depends on `number`."""
    ids = as_token_ids([number, *range(tokens - 1)])
    records = [
        layout.encode(torch.randn(shape.kv_heads, 2, tokens, shape.head_dim).to(layout.dtype))
        for shape in layout.layers
    ]
    return Block(block_name(root, ids), root, ids, records, layout)


def _read_by_layer(store: KVStore, names: Sequence[BlockName], layout: KVLayout) -> float:
    started = time.perf_counter()
    for layer in range(len(layout.layers)):
        for record in store.read_many(names, layer):
            if isinstance(record, BlockLostError):
                raise InvalidInputError(f"a block was lost while it was measured: {record.reason}")
    return time.perf_counter() - started


def _write_plain(path: Path, nbytes: int) -> None:
    part = os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(-(-nbytes // len(part))):
            file.write(part)
        file.truncate(nbytes)
        os.fsync(file.fileno())


def _read_plain(path: Path, *, direct: bool) -> float:
    """Seconds of sequential reads of 1 MiB into the same memory."""
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
    memory = mmap.mmap(-1, 1 << 20)  # begins at a page, as direct reads must
    fd = os.open(path, flags)
    try:
        started = time.perf_counter()
        offset = 0
        while count := os.preadv(fd, [memory], offset):
            offset += count
            if count % 4096:
                break
        return time.perf_counter() - started
    finally:
        os.close(fd)
        memory.close()


def _drop_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


# ---- codecs -------------------------------------------------------------------------------------------------


def _codec_bytes(codec: str) -> float:
    """Bytes of a block's file relative to the same block in bf16, heads of 64."""
    raw = KVLayout((LayerShape(2, 64),) * 24, torch.bfloat16)
    sizes = []
    for layout in (replace(raw, codec=codec), raw):
        parts = encode_block(random_block(layout, 0, _BLOCK, root_name("bench", "codec")))
        sizes.append(sum(len(part) for part in parts))
    return sizes[0] / sizes[1]


def table(result: dict[str, Any]) -> str:
    """A line for each figure."""
    lines = []
    pipeline = result["pipeline"]
    lines.append(
        f"pipelined {pipeline['pipelined_over_max']:.2f} x, one by one {pipeline['serial_over_max']:.2f} x "
        "the longer of loading and computing"
    )
    for name in ("disk", "redis"):
        if name in result:
            rates = result[name]["bytes_per_s"]
            lines.append(
                f"{name}: {rates['by_layer'] / 1e9:.2f} GB/s by layer, {rates['plain'] / 1e9:.2f} GB/s plain "
                f"({100 * result[name]['share']:.0f} %)"
            )
    lines.append("bytes over bf16: " + ", ".join(f"{k} {v:.3f}" for k, v in result["codec_bytes"].items()))
    return "\n".join(lines)
