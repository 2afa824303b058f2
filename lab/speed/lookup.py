"""A disk store with very many blocks: time to open and to look up, memory per block.

filled     small blocks with as many layers as a real model; some of their names are remembered
opened     in a separate process, so that its memory is the store's alone: open, look up names for the first time, write
           one block, which counts the folder's contents
"""

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.core.names import BlockName, root_name
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.engines.provenance import stamp
from cacheblend.store import DiskStore
from lab.bench import Advance, forget_peak, peak_bytes, silent
from lab.checkout import measured_apart
from lab.speed.disk_reads import random_block

_LAYOUT = KVLayout((LayerShape(1, 8),) * 24, torch.bfloat16)
_ROOT = root_name("bench", "look-up")
_TOKENS = 2
_REPORT_EVERY = 1000


def run(blocks: int, folder: Path | None, look_ups: int, advance: Advance = silent) -> dict[str, Any]:
    """Fills a store in a temporary folder on the disk to measure, measures it, removes it."""
    if not 0 < look_ups <= blocks:
        raise InvalidInputError(f"{look_ups} look-ups need at least as many blocks, not {blocks}")
    if not Path("/proc/self/clear_refs").exists():
        raise InvalidInputError("memory is measured through Linux's /proc, which is missing here")
    with tempfile.TemporaryDirectory(prefix="cacheblend-bench-", dir=folder) as place:
        asked = set(random.Random(0).sample(range(blocks), look_ups))
        names: list[BlockName] = []
        with DiskStore(place, max_bytes=None, durable=False) as store:
            for number in range(blocks):
                block = random_block(_LAYOUT, number, _TOKENS, _ROOT)
                store.write(block)
                if number in asked:
                    names.append(block.name)
                if (number + 1) % _REPORT_EVERY == 0:
                    advance(number + 1, blocks)
        given = "\n".join(name.hex() for name in names)
        measured = measured_apart("lab.speed.lookup", place, str(blocks), given=given)
    figures = {
        "lookup_us": 1e6 * statistics.median(measured["first_s"]),
        "open_s": measured["open_s"],
        "bytes_per_block": measured["bytes"] / blocks,
    }
    return {"figures": figures, "blocks": blocks, **measured, **stamp()}


def _measure(folder: str, blocks: int) -> dict[str, Any]:
    """Runs in a separate process; the names come on stdin."""
    names = [BlockName(bytes.fromhex(digits)) for digits in sys.stdin.read().split()]
    forget_peak()
    before = peak_bytes()
    started = time.perf_counter()
    store = DiskStore(folder, durable=False)
    open_s = time.perf_counter() - started
    first, again = _look_up(store, names), _look_up(store, names)
    block = random_block(_LAYOUT, blocks, _TOKENS, _ROOT)
    started = time.perf_counter()
    store.write(block)
    write_s = time.perf_counter() - started
    taken = peak_bytes() - before
    store.close()
    return {"open_s": open_s, "write_s": write_s, "first_s": first, "again_s": again, "bytes": taken}


def _look_up(store: DiskStore, names: list[BlockName]) -> list[float]:
    taken = []
    for name in names:
        started = time.perf_counter()
        (entry,) = store.find([name])
        taken.append(time.perf_counter() - started)
        if entry is None:
            raise CacheBlendError(f"block {name.hex()} is not found")
    return taken


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
