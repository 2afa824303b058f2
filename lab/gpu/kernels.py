"""Kernels alone, by what the device can do: attention by flash attention's FLOPs, the others by copied bytes.

ceilings    a product, a copy, a copy from page-locked memory; and which backend of PyTorch's attention is used
attention   scattered rows over a long prompt, beside the other ways to it that are at hand, each checked before it is
            timed: rows anywhere in the prompt; and as many in runs of 16 neighbours, as whole sentences are
place       records of every codec to their rows; beside it a copy of as many bytes
deviation   fresh and loaded rows compared; beside it a copy of as many bytes

`setup_s` is what a way of attention needs once for the rows of a pass (masks, tables, lists of runs), `s` is a layer's
call.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from cacheblend.core.kernels import attention
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.operations import kv_deviation, place, serve
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.plan.codec import CODECS
from lab.gpu.attention_ways import OURS, WAYS, Rows
from lab.gpu.context import Bench, Found, free, seconds, synchronize

RUN = 16
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Largest difference from PyTorch, of numbers around 1: as of kernels before they serve."""

_WAY_S = 10.0  # that a way takes about, with its compiling


@dataclass(frozen=True)
class Sizes:
    """Of llama-3.1-8b, unless it is a dry run.

    Attributes:
        length: tokens of the prompt.
        rows: of them that are recomputed.
        heads, kv_heads, head_dim: of the model.
        dtype: of queries, keys and values.
        rounds: of each measurement.
        block: tokens of a stored block.
    """

    length: int = 16384
    rows: int = 2458
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 20
    block: int = 256


DRY = Sizes(length=256, rows=40, heads=4, kv_heads=2, head_dim=32, block=64, dtype=torch.float32, rounds=2)


@torch.no_grad()
def measure(bench: Bench) -> Found:
    sizes = DRY if bench.dry_run else Sizes()
    torch.manual_seed(0)
    served = serve(bench.device, sizes.dtype)
    found: Found = {
        "figures": {},
        "served": {name: " ".join([each.name, each.reason]).strip() for name, each in served.items()},
    }
    found["ceilings"] = _ceilings(bench, sizes)
    found["placing"] = _placing(bench, sizes)
    found["figures"]["place_of_bandwidth"] = found["placing"]["raw"]["of_copy"]
    found["deviation"] = _deviation(bench, sizes)
    bench.keep(found)
    found["attention"] = measure_attention(bench, sizes)
    if "error" in found["attention"]:
        found["error"] = found["attention"].pop("error")
    measured = found["attention"]["scattered"]["ways"].get(OURS, {})
    if "of_flash" in measured:
        found["figures"]["attention_of_flash"] = measured["of_flash"]
    return found


def _ceilings(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    """What the device does at most: a product, copies on it and from page-locked memory; and by which backend PyTorch
    attends in a full prefill, as a number counts that is set beside it."""
    bench.progress("kernels: ceilings")
    width, nbytes = (64, 1 << 16) if bench.dry_run else (8192, 1 << 30)
    left, right = _draw(bench, sizes, 2, width, width).unbind()
    source, target = torch.zeros(2, nbytes, dtype=torch.uint8, device=bench.device).unbind()
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    query = _draw(bench, sizes, 1, sizes.heads, 64, sizes.head_dim)
    keys = _draw(bench, sizes, 1, sizes.kv_heads, 64, sizes.head_dim)
    chosen = torch._fused_sdp_choice(query, keys, keys, is_causal=True, enable_gqa=True)
    timed = partial(seconds, device=bench.device, rounds=sizes.rounds)
    return {
        "product_flops_per_s": 2.0 * width**3 / timed(partial(torch.mm, left, right)),
        "copy_bytes_per_s": 2.0 * nbytes / timed(partial(target.copy_, source)),
        "pinned_bytes_per_s": nbytes / timed(partial(target.copy_, host, non_blocking=True)),
        "sdpa": SDPBackend(chosen).name,
    }


# ---- copies -------------------------------------------------------------------------------------------------


def _placing(bench: Bench, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Bytes read and bytes written, each counted once."""
    keys, values = _draw(bench, sizes, 2, sizes.kv_heads, sizes.length, sizes.head_dim).unbind()
    blocks = sizes.length // sizes.block
    pieces = [Piece(at, sizes.block, 0, at * sizes.block, sizes.block, 17 * at + 1) for at in range(blocks)]
    rotation = KeyRotation(5e5 ** (-torch.arange(sizes.head_dim // 2) / (sizes.head_dim // 2)), "half")
    drawn = _draw(bench, sizes, sizes.kv_heads, 2, sizes.block, sizes.head_dim).cpu()
    found = {}
    for name, codec in CODECS.items():
        bench.progress(f"kernels: placing of {name} records")
        one = codec.encode(drawn).to(bench.device)
        records = [one.clone() for _ in range(blocks)]
        placement = Placement(pieces, name)
        nbytes = blocks * one.nbytes + keys.nbytes + values.nbytes
        taken = seconds(partial(place, records, placement, keys, values, rotation), bench.device, sizes.rounds)
        found[name] = _by_copy(bench, sizes, nbytes, taken)
    return found


def _deviation(bench: Bench, sizes: Sizes) -> dict[str, float]:
    """All rows of a check layer, keys and values."""
    bench.progress("kernels: deviation")
    drawn = _draw(bench, sizes, 2, 2, sizes.kv_heads, sizes.length, sizes.head_dim)
    fresh, loaded = (part.unbind() for part in drawn)
    positions = torch.arange(sizes.length, device=bench.device)
    taken = seconds(lambda: kv_deviation(fresh, loaded, "kv", positions), bench.device, sizes.rounds)
    return _by_copy(bench, sizes, sum(part.nbytes for part in (*fresh, *loaded)), taken)


def _draw(bench: Bench, sizes: Sizes, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=sizes.dtype, device=bench.device)


def _by_copy(bench: Bench, sizes: Sizes, nbytes: int, taken_s: float) -> dict[str, float]:
    """Beside a copy that reads and writes as many bytes."""
    source, target = torch.zeros(2, nbytes // 2, dtype=torch.uint8, device=bench.device).unbind()
    copy_s = seconds(lambda: target.copy_(source), bench.device, sizes.rounds)
    rates = {"bytes_per_s": nbytes / taken_s, "of_copy": copy_s / taken_s}
    return {"bytes": nbytes, "s": taken_s, "copy_s": copy_s, **rates}


# ---- attention ----------------------------------------------------------------------------------------------


def measure_attention(bench: Bench, sizes: Sizes) -> Found:
    """Every way by the rows' layout, and causal attention of a whole, shorter prompt with as many FLOPs."""
    draw, found = torch.Generator().manual_seed(0), Found()
    scattered = torch.randperm(sizes.length, generator=draw)[: sizes.rows].sort().values
    starts = RUN * torch.randperm(sizes.length // RUN, generator=draw)[: -(-sizes.rows // RUN)].sort().values
    runs = (starts[:, None] + torch.arange(RUN)).flatten()[: sizes.rows]
    for layout, positions in {"scattered": scattered, f"runs of {RUN}": runs}.items():  # ascending
        bench.progress(f"kernels: attention, {layout}")
        flops = 4.0 * sizes.heads * sizes.head_dim * float((positions + 1).sum())
        flash = _flash(bench, sizes, flops)
        query = _draw(bench, sizes, sizes.heads, sizes.rows, sizes.head_dim)
        keys, values = _draw(bench, sizes, 2, sizes.kv_heads, sizes.length, sizes.head_dim).unbind()
        spec = AttentionSpec(sizes.head_dim**-0.5)
        rows = Rows(query, keys, values, positions.to(bench.device), positions.tolist(), spec, bench.dry_run)
        expected = attention.attend_rows(rows.query, rows.keys, rows.values, rows.positions, rows.spec)
        ways = {}
        for name, way in WAYS.items():
            if bench.has_time(f"kernels, attention by {name}, {layout}", _WAY_S if not bench.dry_run else 0.0):
                ways[name] = _measure_way(way, rows, expected, bench, sizes, flops)
        for each in ways.values():
            each |= {"of_flash": each["flops_per_s"] / flash["flops_per_s"]} if "flops_per_s" in each else {}
        if (why := ways.get(OURS, {}).get("skipped")) and "error" not in found:
            found["error"] = f"attention of {layout}: {why}"
        found[layout] = {"flops": flops, "flash": flash, "ways": ways}
        del rows, expected, query, keys, values
        free(bench.device)
    return found


def _measure_way(
    way: Callable[[Rows], Callable[[], torch.Tensor]],
    rows: Rows,
    expected: torch.Tensor,
    bench: Bench,
    sizes: Sizes,
    flops: float,
) -> dict[str, Any]:
    """Seconds of a way, or why it was skipped."""
    try:
        error = float((way(rows)().float() - expected.float()).abs().max())
        if not error <= TOLERANCE[sizes.dtype]:
            return {"skipped": f"differs from PyTorch by {error:.2g}, more than {TOLERANCE[sizes.dtype]}"}
        synchronize(bench.device)
        begun = time.perf_counter()
        call = way(rows)
        synchronize(bench.device)
        setup_s = time.perf_counter() - begun
        taken = seconds(call, bench.device, sizes.rounds)
    except Exception as error:  # of a compiler, or of a version that is called differently
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return {"skipped": f"{type(error).__name__}: {reason}"[:200]}
    finally:
        free(bench.device)
    return {"s": taken, "setup_s": setup_s, "error": error, "flops_per_s": flops / taken}


def _flash(bench: Bench, sizes: Sizes, flops: float) -> dict[str, float]:
    """Causal attention of n tokens takes 2 n^2 heads head_dim FLOPs."""
    tokens = round(math.sqrt(flops / (2.0 * sizes.heads * sizes.head_dim)))
    query, keys, values = _draw(bench, sizes, 3, 1, sizes.heads, tokens, sizes.head_dim).unbind()
    dense = partial(scaled_dot_product_attention, query, keys, values, is_causal=True)
    taken = seconds(dense, bench.device, sizes.rounds)
    return {"tokens": tokens, "s": taken, "flops_per_s": flops / taken}
