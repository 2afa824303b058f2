"""Tile shapes of the attention kernel, each compared with PyTorch's attention and timed; `own` is the one in use."""

import math
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from cacheblend.core.kernels import attention
from cacheblend.core.kernels.attention import AttentionSpec
from lab.gpu.context import Bench, Found, free, seconds

_CASE_S = 4.0  # that a case takes about, with its compiling


@dataclass(frozen=True)
class Case:
    """Rows of a prompt of `length` tokens; `page`: tokens of a block of the paged cache, 0: dense buffers."""

    heads: int
    kv_heads: int
    head_dim: int
    length: int
    rows: int
    window: int | None = None
    page: int = 0


CASES = {
    "16k, r = .15": Case(32, 8, 128, 16384, 2458),
    "16k, r = .03": Case(32, 8, 128, 16384, 524),
    "4k, r = .1": Case(32, 8, 128, 4096, 456),
    "in pages": Case(32, 8, 128, 16384, 2458, page=16),
    "window": Case(32, 8, 128, 16384, 2458, 1024),
    "heads of 64": Case(64, 8, 64, 16384, 2458),
    "heads of 64, window, in pages": Case(64, 8, 64, 16384, 2458, 128, 16),
    "heads of 256": Case(8, 4, 256, 16384, 2458),
}
SHAPES = [(128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (128, 32, 8)]
"""(slots, keys, warps). The last is the only one that heads of 256 are loaded ahead with and nothing is spilled."""
STAGES = (2, 3, 4, 5)
DRY = {"dense": Case(4, 2, 16, 96, 20), "window, in pages": Case(4, 2, 16, 96, 20, 40, 16)}


def misses() -> str:
    """What the part lacks here; "": nothing."""
    return "" if find_spec("triton") is not None else "Triton is not installed"


@torch.no_grad()
def measure(bench: Bench) -> Found:
    found: Found = {"cases": {}}
    for name, case in (DRY if bench.dry_run else CASES).items():
        if bench.has_time(f"tiles, {name}", 0.0 if bench.dry_run else _CASE_S):
            bench.progress(f"tiles: {name}")
            found["cases"][name] = _measure_case(bench, case)
            bench.keep(found)
            free(bench.device)
    return found


def _measure_case(bench: Bench, case: Case) -> list[dict[str, Any]]:
    from cacheblend.core.kernels import attention_triton

    draw, device = torch.Generator().manual_seed(0), bench.device
    sizes = (case.heads, case.rows), (case.kv_heads, case.length), (case.kv_heads, case.length)
    query, keys, values = (torch.randn(*size, case.head_dim, dtype=torch.bfloat16, device=device) for size in sizes)
    positions = torch.randperm(case.length, generator=draw)[: case.rows].sort().values.to(device)
    spec, table = AttentionSpec(case.head_dim**-0.5, case.window), None
    expected = attention.attend_rows(query, keys, values, positions, spec).float()
    if case.page:
        table = torch.arange(case.length // case.page, dtype=torch.int32, device=device)
        keys, values = (
            each.view(case.kv_heads, -1, case.page, case.head_dim).permute(1, 2, 0, 3).contiguous()
            for each in (keys, values)
        )
    flops = 4.0 * case.heads * case.head_dim * float((positions + 1).clamp(max=case.window or case.length).sum())
    given = case.heads // case.kv_heads, case.rows, case.head_dim, case.page, 2, attention_triton._shared_memory(device)
    own, found = attention_triton.tile_shape(*given), list[dict[str, Any]]()
    others = [(*shape, stages) for shape in SHAPES for stages in STAGES] if not bench.dry_run else [(16, 16, 4, 2)]
    call = partial(attention_triton.attend_rows, query, keys, values, positions, spec, table)
    for shape in dict.fromkeys([own, *others]):
        with patch.object(attention_triton, "tile_shape", lambda *_, shape=shape: shape):
            try:
                error = float((call().float() - expected).abs().max())
                taken = seconds(call, device, 1 if bench.dry_run else 15)
            except Exception as refused:  # it does not fit, or this machine has no compiler for it
                found.append({"shape": shape, "skipped": f"{type(refused).__name__}: {refused}"[:120]})
                continue
        rate = flops / taken if math.isfinite(error) else math.nan
        found.append({"shape": shape, "own": shape == own, "s": taken, "flops_per_s": rate, "error": error})
    return found
