"""Kernels alone, by what the device can do: attention by flash attention's FLOPs, the others by copied bytes.

attention   scattered rows over a long prompt; beside it causal attention of a whole, shorter prompt with as many FLOPs
place       records of every codec to their rows; beside it a copy of as many bytes
deviation   fresh and loaded rows compared; beside it a copy of as many bytes
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from cacheblend.bench.cuda.context import Bench
from cacheblend.bench.cuda.timing import seconds
from cacheblend.core.kernels.attention_spec import AttentionSpec
from cacheblend.core.kernels.operations import attend_rows, kv_deviation, place, serve
from cacheblend.core.kernels.placing import Piece, Placement
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.plan.codec import CODECS


@dataclass(frozen=True)
class Sizes:
    """Of llama-3.1-8b, unless it is a dry run.

    Attributes:
        length: tokens of the prompt.
        rows: of them that are recomputed.
        heads, kv_heads, head_dim: of the model.
        block: tokens of a stored block.
        dtype: of queries, keys and values.
        rounds: of each measurement.
    """

    length: int = 16384
    rows: int = 2458
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block: int = 256
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 20


DRY = Sizes(length=256, rows=40, heads=4, kv_heads=2, head_dim=32, block=64, dtype=torch.float32, rounds=2)


@torch.no_grad()
def measure(bench: Bench) -> dict[str, Any]:
    """See `run.PARTS`."""
    sizes = DRY if bench.dry_run else Sizes()
    torch.manual_seed(0)
    served = {name: each.name for name, each in serve(bench.device, sizes.dtype).items()}
    attention, placed, deviation = _attention(bench, sizes), _placing(bench, sizes), _deviation(bench, sizes)
    figures = {"attention_of_peak": attention["of_flash"], "place_of_bandwidth": placed["raw"]["of_copy"]}
    return {
        "figures": figures,
        "served": served,
        "attention": attention,
        "placing": placed,
        "deviation": deviation,
    }


def _attention(bench: Bench, sizes: Sizes) -> dict[str, float]:
    bench.progress("kernels: attention")
    query = _draw(bench, sizes, sizes.heads, sizes.rows, sizes.head_dim)
    keys, values = _draw(bench, sizes, 2, sizes.kv_heads, sizes.length, sizes.head_dim).unbind()
    chosen = torch.randperm(sizes.length)[: sizes.rows].sort().values
    flops = 4.0 * sizes.heads * sizes.head_dim * float((chosen + 1).sum())
    positions = chosen.to(bench.device)
    spec = AttentionSpec(sizes.head_dim**-0.5)
    rows_s = seconds(lambda: attend_rows(query, keys, values, positions, spec), bench.device, sizes.rounds)
    # Causal attention over n tokens takes 2 n^2 heads head_dim FLOPs.
    tokens = round(math.sqrt(flops / (2.0 * sizes.heads * sizes.head_dim)))
    query_d, keys_d, values_d = _draw(bench, sizes, 3, 1, sizes.heads, tokens, sizes.head_dim).unbind()
    dense = partial(scaled_dot_product_attention, query_d, keys_d, values_d, is_causal=True)
    flash_s = seconds(dense, bench.device, sizes.rounds)
    return {
        "flops": flops,
        "rows_s": rows_s,
        "flash_tokens": tokens,
        "flash_s": flash_s,
        "rows_flops_per_s": flops / rows_s,
        "flash_flops_per_s": flops / flash_s,
        "of_flash": flash_s / rows_s,
    }


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
    return {
        "bytes": nbytes,
        "s": taken_s,
        "copy_s": copy_s,
        "bytes_per_s": nbytes / taken_s,
        "of_copy": copy_s / taken_s,
    }
