"""What loading costs: hidden by computing or not; disk and Redis against plain reads; bytes by codec.

pipeline   TTFT with a throttled store that takes as long as computing: with layers prefetched, and one by one
disk       a request's blocks by layer against one plain read of as many bytes (`disk_reads`); KV of the model, or of
           another shape: the result depends on the size of a record only
redis      the same against pipelined GETs of the same values
codecs     bytes of a stored block, header included, relative to bf16
"""

import math
import os
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from cacheblend.bench.ttft import TtftSettings, draw_prompt, open_chunks, open_model
from cacheblend.core.config import BlendConfig
from cacheblend.core.names import root_name
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.core.plan.codec import CODECS
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.model_loader import expected_layout
from cacheblend.engines.hf.shapes import shape_config
from cacheblend.engines.provenance import stamp
from cacheblend.store import open_store
from cacheblend.store.format.block_file import encode_block
from lab.bench import Advance, silent
from lab.speed import disk_reads
from lab.speed.disk_reads import BLOCK, fill, random_block, read_by_layer
from lab.speed.throttle import ThrottledStore

DISK_FIGURES = ("disk_read_share", "cold_read_share")
"""Names of the figures of `disk_reads.WAYS`."""
MOST_BYTES = 64 << 30
READ_AHEAD = BlendConfig().read_ahead


@torch.no_grad()
def run(
    prompt: TtftSettings, folder: Path | None, redis: str | None, kv_shape: str | None, advance: Advance = silent
) -> dict[str, Any]:
    """Runs all parts on the folder's disk, and on a Redis if there is one; `kv_shape`: of the records that are read."""
    stored = None if kv_shape is None else expected_layout(shape_config(kv_shape), torch.bfloat16)
    if prompt.threads is not None:
        torch.set_num_threads(prompt.threads)
    model, tokenizer, name = open_model(prompt)
    pipeline, layout = _pipeline(prompt, model, tokenizer)
    advance(1, 3)
    layout = stored or layout
    figures = {figure: pipeline[figure] for figure in ("pipelined_over_max", "serial_over_max")}
    result: dict[str, Any] = {
        "model": name,
        "tokens": prompt.chunks * prompt.chunk_tokens,
        "pipeline": pipeline,
        "kv": {"shape": kv_shape or name, "record_bytes": layout.block_bytes(BLOCK) // len(layout.layers)},
        "disk": disk_reads.measure(layout, prompt.chunks, prompt.chunk_tokens, folder, prompt.runs),
        "codec_bytes": {codec: _block_bytes(codec) / _block_bytes("raw") for codec in CODECS},
    }
    advance(2, 3)
    for way, figure in zip(disk_reads.WAYS, DISK_FIGURES, strict=True):
        figures[figure] = result["disk"][way]["share"]
    if redis is not None:
        result["redis"] = _redis(layout, prompt, redis)
        figures["redis_read_share"] = result["redis"]["share"]
    advance(3, 3)
    figures |= {f"{codec}_bytes": share for codec, share in result["codec_bytes"].items() if codec != "raw"}
    return {"figures": figures, **result, **stamp()}


def _pipeline(prompt: TtftSettings, model: Any, tokenizer: Any) -> tuple[dict[str, Any], KVLayout]:
    """TTFT where loading takes as long as computing: three ways, alternating, each with its own throughput."""
    draw = random.Random(prompt.seed)
    with ExitStack() as stack:
        slow = ThrottledStore(1e15, max_bytes=MOST_BYTES)
        stack.enter_context(slow)
        configs = (BlendConfig(capture=False, read_ahead=n, load_timeout_s=math.inf) for n in (READ_AHEAD, 0))
        options: dict[str, Any] = {"store": slow, "fingerprint": "bench", "name": "bench"}
        engines = (BlendEngine(model, tokenizer, config=config, **options) for config in configs)
        ahead, serial = (stack.enter_context(engine) for engine in engines)
        chunks = open_chunks(prompt, ahead, draw)
        ahead.warm(chunks)
        layout = ahead.runtime.survey.layout
        ratio = prompt.ratios[0]

        def seconds(engine: BlendEngine) -> float:
            asked = draw_prompt(prompt, chunks, engine.runtime.survey.vocab_size, draw)
            started = time.perf_counter()
            engine.prefill(asked, ratio=ratio)
            return time.perf_counter() - started

        seconds(serial)
        unthrottled = statistics.median(seconds(serial) for _ in range(prompt.runs))
        # Loading starts with the first layer whose loaded rows are used: its bytes are spread over the whole pass.
        nbytes = layout.block_bytes(BLOCK) / BLOCK * prompt.chunks * prompt.chunk_tokens
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


def _redis(layout: KVLayout, prompt: TtftSettings, url: str) -> dict[str, Any]:
    """A request's blocks by layer, and the same values by pipelines of plain GETs."""
    import redis

    prefix = f"bench-{os.getpid()}"
    client = redis.Redis.from_url(url)
    with open_store(f"{url}?prefix={prefix}") as store:
        names, nbytes = fill(store, layout, prompt.chunks, prompt.chunk_tokens)
        try:
            keys = [[f"{prefix}:{{{name.hex()}}}:{layer}" for name in names] for layer in range(len(layout.layers))]
            by_layer, plain = [], []
            for _ in range(prompt.runs):
                by_layer.append(read_by_layer(store, names, layout))
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


def _block_bytes(codec: str) -> int:
    """Of a block's file, of bf16 with heads of 64."""
    layout = KVLayout((LayerShape(2, 64),) * 24, torch.bfloat16, codec=codec)
    return sum(map(len, encode_block(random_block(layout, 0, BLOCK, root_name("bench", "codec")))))
