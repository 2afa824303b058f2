"""Kernels alone, by what the device can do: attention by flash attention's FLOPs, the others by copied bytes.

attention   scattered rows over a long prompt, see `attention`
place       records of every codec to their rows; beside it a copy of as many bytes
deviation   fresh and loaded rows compared; beside it a copy of as many bytes
"""

from dataclasses import dataclass
from functools import partial

import torch

from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.operations import kv_deviation, place, serve
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.plan.codec import CODECS
from lab.gpu import attention
from lab.gpu.attention import AttentionSizes
from lab.gpu.attention_ways import OURS
from lab.gpu.context import Bench, Found
from lab.gpu.timing import seconds


@dataclass(frozen=True)
class Sizes(AttentionSizes):
    """See `AttentionSizes`.

    Attributes:
        block: tokens of a stored block.
    """

    block: int = 256


DRY = Sizes(length=256, rows=40, heads=4, kv_heads=2, head_dim=32, block=64, dtype=torch.float32, rounds=2)


@torch.no_grad()
def measure(bench: Bench) -> Found:
    """See `parts.PARTS`."""
    sizes = DRY if bench.dry_run else Sizes()
    torch.manual_seed(0)
    served = serve(bench.device, sizes.dtype)
    found: Found = {
        "figures": {},
        "served": {name: " ".join([each.name, each.reason]).strip() for name, each in served.items()},
    }
    found["placing"] = _placing(bench, sizes)
    found["figures"]["place_of_bandwidth"] = found["placing"]["raw"]["of_copy"]
    found["deviation"] = _deviation(bench, sizes)
    bench.keep(found)
    found["attention"] = attention.measure(bench, sizes)
    if "error" in found["attention"]:
        found["error"] = found["attention"].pop("error")
    measured = found["attention"]["scattered"]["ways"].get(OURS, {})
    if "of_flash" in measured:
        found["figures"]["attention_of_peak"] = measured["of_flash"]
    return found


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
