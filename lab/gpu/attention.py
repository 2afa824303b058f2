"""Attention of scattered rows beside the other ways to it that are at hand, each checked before it is timed.

    scattered     rows anywhere in the prompt
    runs of 16    as many, in runs of neighbours, as whole sentences are

`setup_s` is what a way needs once for the rows of a pass (masks, tables, lists of runs), `s` is a layer's call.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from cacheblend.core.kernels import attention
from cacheblend.core.kernels.attention_spec import AttentionSpec
from lab.gpu.attention_ways import OURS, WAYS, Rows
from lab.gpu.context import Bench, Found, free
from lab.gpu.timing import seconds

RUN = 16
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Largest difference from PyTorch, of numbers around 1: as of kernels before they serve."""

_WAY_S = 10.0  # that a way takes about, with its compiling


@dataclass(frozen=True)
class AttentionSizes:
    """Of llama-3.1-8b, unless it is a dry run.

    Attributes:
        length: tokens of the prompt.
        rows: of them that are recomputed.
        heads, kv_heads, head_dim: of the model.
        dtype: of queries, keys and values.
        rounds: of each measurement.
    """

    length: int = 16384
    rows: int = 2458
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 20


def measure(bench: Bench, sizes: AttentionSizes) -> Found:
    """Every way by the rows' layout, and causal attention of a whole, shorter prompt with as many FLOPs."""
    found: Found = {}
    for layout, positions in _layouts(sizes).items():
        bench.progress(f"kernels: attention, {layout}")
        flops = 4.0 * sizes.heads * sizes.head_dim * float((positions + 1).sum())
        flash = _flash(bench, sizes, flops)
        rows = _rows(bench, sizes, positions)
        expected = attention.attend_rows(rows.query, rows.keys, rows.values, rows.positions, rows.spec)
        ways = {}
        for name, way in WAYS.items():
            if bench.has_time(f"kernels, attention by {name}, {layout}", _WAY_S if not bench.dry_run else 0.0):
                ways[name] = _measure(way, rows, expected, bench, sizes, flops)
        for each in ways.values():
            each |= {"of_flash": each["flops_per_s"] / flash["flops_per_s"]} if "flops_per_s" in each else {}
        if (why := ways.get(OURS, {}).get("skipped")) and "error" not in found:
            found["error"] = f"attention of {layout}: {why}"
        found[layout] = {"flops": flops, "flash": flash, "ways": ways}
        del rows, expected
        free(bench.device)
    return found


def _layouts(sizes: AttentionSizes) -> dict[str, torch.Tensor]:
    """Ascending positions [rows] of each layout."""
    draw = torch.Generator().manual_seed(0)
    scattered = torch.randperm(sizes.length, generator=draw)[: sizes.rows].sort().values
    starts = RUN * torch.randperm(sizes.length // RUN, generator=draw)[: -(-sizes.rows // RUN)].sort().values
    runs = (starts[:, None] + torch.arange(RUN)).flatten()[: sizes.rows]
    return {"scattered": scattered, f"runs of {RUN}": runs}


def _rows(bench: Bench, sizes: AttentionSizes, positions: torch.Tensor) -> Rows:
    draw = partial(torch.randn, dtype=sizes.dtype, device=bench.device)
    query = draw(sizes.heads, sizes.rows, sizes.head_dim)
    keys, values = draw(2, sizes.kv_heads, sizes.length, sizes.head_dim).unbind()
    spec = AttentionSpec(sizes.head_dim**-0.5)
    return Rows(query, keys, values, positions.to(bench.device), positions.tolist(), spec, bench.dry_run)


def _measure(
    way: Callable[[Rows], Callable[[], torch.Tensor]],
    rows: Rows,
    expected: torch.Tensor,
    bench: Bench,
    sizes: AttentionSizes,
    flops: float,
) -> dict[str, Any]:
    """Seconds of a way, or why it was skipped."""
    try:
        error = float((way(rows)().float() - expected.float()).abs().max())
        if not error <= TOLERANCE[sizes.dtype]:
            return {"skipped": f"differs from PyTorch by {error:.2g}, more than {TOLERANCE[sizes.dtype]}"}
        _synchronize(bench.device)
        begun = time.perf_counter()
        call = way(rows)
        _synchronize(bench.device)
        setup_s = time.perf_counter() - begun
        taken = seconds(call, bench.device, sizes.rounds)
    except Exception as error:  # of a compiler, or of a version that is called differently
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return {"skipped": f"{type(error).__name__}: {reason}"[:200]}
    finally:
        free(bench.device)
    return {"s": taken, "setup_s": setup_s, "error": error, "flops_per_s": flops / taken}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flash(bench: Bench, sizes: AttentionSizes, flops: float) -> dict[str, float]:
    """Causal attention of n tokens takes 2 n^2 heads head_dim FLOPs."""
    tokens = round(math.sqrt(flops / (2.0 * sizes.heads * sizes.head_dim)))
    shape = (3, 1, sizes.heads, tokens, sizes.head_dim)
    query, keys, values = torch.randn(shape, dtype=sizes.dtype, device=bench.device).unbind()
    dense = partial(scaled_dot_product_attention, query, keys, values, is_causal=True)
    taken = seconds(dense, bench.device, sizes.rounds)
    return {"tokens": tokens, "s": taken, "flops_per_s": flops / taken}
