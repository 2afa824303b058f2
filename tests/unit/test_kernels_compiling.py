"""Every kernel compiles for GPUs of several generations; no GPU is needed for that, so it is found out here."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

CHILD = Path(__file__).parent.parent / "kernel_compiling.py"
SMALLEST_SHARED = 99 * 1024  # bytes of shared memory for a program on compute capability 8.6 and 8.9
ATTENTION = [
    {"capability": 80, "head_dim": 128, "group": 4, "rows": 2048},
    {"capability": 80, "head_dim": 256, "group": 4, "rows": 2048},
    {"capability": 80, "head_dim": 256, "group": 4, "rows": 2048, "page": 16},
    {"capability": 86, "head_dim": 256, "group": 2, "rows": 2048, "window": 512, "is_capped": True},
    {"capability": 86, "head_dim": 128, "group": 4, "rows": 2048, "page": 16},
    {"capability": 89, "head_dim": 64, "group": 8, "rows": 2048, "sinks": True, "window": 128},
    {"capability": 89, "head_dim": 128, "group": 128, "rows": 2048},
    {"capability": 90, "head_dim": 128, "group": 4, "rows": 2048},
    {"capability": 90, "head_dim": 256, "group": 4, "rows": 2048},
    {"capability": 90, "head_dim": 256, "group": 2, "rows": 3, "page": 16, "splits": 4},
    {"capability": 90, "head_dim": 128, "group": 4, "rows": 2048, "page": 16},
    {"capability": 90, "head_dim": 8, "group": 2, "rows": 40},
    {"capability": 90, "head_dim": 96, "group": 1, "rows": 1, "splits": 8},
    {"capability": 100, "head_dim": 128, "group": 5, "rows": 300, "page": 48},
    {"capability": 100, "head_dim": 128, "group": 4, "rows": 2048},
    {"capability": 100, "head_dim": 256, "group": 4, "rows": 2048},
    {"capability": 120, "head_dim": 128, "group": 4, "rows": 2048},
    {"capability": 80, "head_dim": 128, "group": 4, "rows": 2048, "page": 16, "float8": 2},
    {"capability": 90, "head_dim": 256, "group": 2, "rows": 2048, "page": 16, "float8": 1},
    {"capability": 90, "head_dim": 128, "group": 4, "rows": 2048, "page": 16, "float8": 1},
    {"capability": 100, "head_dim": 256, "group": 2, "rows": 2048, "page": 16, "float8": 1},
]
PLACING = [
    {"capability": 80, "head_dim": 128, "kind": "fp8", "half": 64},
    {"capability": 86, "head_dim": 96, "kind": "int4", "half": 24, "is_half": False},
    {"capability": 89, "head_dim": 256, "kind": "int8", "half": 128, "page": 16},
    {"capability": 90, "head_dim": 128, "kind": "raw", "half": 64},
    {"capability": 100, "head_dim": 64, "kind": "raw", "page": 48},
    {"capability": 80, "head_dim": 128, "kind": "raw", "half": 64, "page": 16, "float8": 1},
    {"capability": 90, "head_dim": 128, "kind": "int8", "half": 64, "page": 16, "float8": 2},
]
PRODUCTS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")


LAYERS: list[dict[str, Any]] = [{}, {"page": 16}, {"window": 1024}, {"window": 128, "page": 16, "sinks": True}]
PIPELINED = [
    {"capability": 90, "head_dim": head_dim, "group": 4, "rows": rows, "is_assembled": True, **layer}
    for head_dim, rows in ((64, 2048), (128, 2048), (128, 1))
    for layer in LAYERS
]
PIPELINED.append(PIPELINED[-1] | {"rows": 2048, "window": 1024, "edges": True, "page": 0, "sinks": False})
ASKING = [
    {"capability": 86, "head_dim": 256, "group": 2, "window": True, "is_capped": True},
    {"capability": 90, "head_dim": 128, "group": 4},
    {"capability": 90, "head_dim": 64, "group": 8, "window": True},
]
DEVIATION = [{"capability": 80, "head_dim": 128}, {"capability": 90, "head_dim": 64}]
CALLS = [(rows, length) for rows in (1, 8, 40, 333, 4096) for length in (1000, 16384, 30001)]
PLAIN = {"capability": 90, "heads": 32, "kv_heads": 8, "head_dim": 128, "calls": CALLS}
VARIANTS = [
    *(PLAIN | layer for layer in ({}, {"page": 16}, {"window": 1024}, {"head_dim": 64, "window": 128, "page": 32})),
    *(PLAIN | layer for layer in ({"heads": 6, "kv_heads": 1}, {"capability": 80}, {"capability": 86, "page": 16})),
]
GEMMA: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 256, "window": 1024, "is_capped": True}
GPT_OSS: dict[str, Any] = {"heads": 16, "kv_heads": 2, "head_dim": 64, "window": 128, "has_sinks": True}
WARMED: list[dict[str, Any]] = [
    {"capability": 90, "calls": CALLS, "shape": shape, "pairs": pairs, "page": page}
    for shape, pairs, page in (
        ({"heads": 16, "kv_heads": 4, "head_dim": 128}, 64, 0),
        ({"heads": 4, "kv_heads": 4, "head_dim": 128}, 64, 32),
        (GEMMA, 128, 0),
        (GPT_OSS, 20, 16),
    )
]


def key(kernel: str, case: dict[str, Any]) -> str:
    return json.dumps({**case, "kernel": kernel}, sort_keys=True)


@pytest.fixture(scope="module")
def compiled() -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """(kernel, case) to what it takes; all are compiled in one process, each once."""
    by_kernel = {"attention": [*ATTENTION, *PIPELINED], "asking": ASKING, "placing": PLACING, "deviation": DEVIATION}
    by_kernel |= {"variants": VARIANTS, "warmed": WARMED}  # at last: there, kernels are replaced
    cases = list(dict.fromkeys(key(kernel, case) for kernel, cases in by_kernel.items() for case in cases))
    child = subprocess.run(
        [sys.executable, str(CHILD), f"[{','.join(cases)}]"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found = dict(zip(cases, json.loads(child.stdout.splitlines()[-1]), strict=True))
    return lambda kernel, case: found[key(kernel, case)]


def test_kernels_compile_fit_and_load_several_numbers_at_once(compiled) -> None:
    for case in ATTENTION:
        taken = compiled("attention", case)
        assert taken["shared"] <= taken["expected"] <= taken["most"], case
        assert any(product in taken["ptx"] for product in PRODUCTS), case
    for case in ASKING:
        taken = compiled("asking", case)
        assert taken["shared"] <= SMALLEST_SHARED, case
        assert taken["spilled"] == 0 and any(product in taken["ptx"] for product in PRODUCTS), case
    for case in PLACING:
        taken = compiled("placing", case)
        assert taken["shared"] <= SMALLEST_SHARED, case
        assert "ld.global.v" in taken["ptx"] or case["kind"] != "raw", case
        assert "st.global.v" in taken["ptx"], case
    for case in DEVIATION:
        taken = compiled("deviation", case)
        assert taken["shared"] <= SMALLEST_SHARED
        assert "ld.global.v" in taken["ptx"]


def test_keys_are_on_their_way_early_and_numbers_of_rows_and_keys_compile_hardly_anything(compiled) -> None:
    """In every loop of the kernel, the masked one of windows too; and no number is kept in local memory."""
    for case in PIPELINED:
        taken = compiled("attention", case)
        waits = waits_in_loops(taken["ptx"])
        assert len(waits) == (1 if "window" in case else 2), case
        assert all(in_flight >= 1 for in_flight in waits), (case, waits)
        assert taken["spilled"] == 0, case
    for case in VARIANTS:
        found = compiled("variants", case)
        assert 2 <= found["_attend"] <= 6, (case, found)
        assert found["_join"] == 1, (case, found)


def test_requests_compile_nothing_where_a_model_was_opened(compiled) -> None:
    """Rows from 1 to 4,096 over three lengths, rows that ask, records and deviations, in the model's own shapes."""
    for case in WARMED:
        found = compiled("warmed", case)
        assert all(opened >= 1 and added == 0 for opened, added in found.values()), (case, found)
        assert found["_attend"][0] <= 20, (case, found)


def waits_in_loops(ptx: str) -> list[int]:
    """Of each loop of a kernel's code, the least number of copies that are in flight behind a wait in it."""
    lines, found = ptx.splitlines(), []
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L")}
    for at, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        if target and (begin := labels[target[1]]) < at:
            inside = re.findall(r"cp\.async\.wait_group\s+(\w+);", "\n".join(lines[begin:at]))
            found.append(min((int(each, 0) for each in inside), default=0))
    return found


def test_tiles_fit_into_every_device() -> None:
    """As `shared_bytes` has it, which the test above holds against the compiler."""
    from cacheblend.core.kernels.attention_triton import shared_bytes, tile_shape

    sizes = product((99, 163, 227), (1, 4, 8, 71, 128), (1, 9, 4096), (8, 64, 96, 128, 256), (0, 16), (2, 4))
    for kib, group, rows, head_dim, page, itemsize in sizes:
        if itemsize > 2 and group > 8:  # kernels serve 16 bits; tests use them in 32
            continue
        slots, keys, warps, stages = tile_shape(group, rows, head_dim, page, itemsize, kib << 10)
        assert shared_bytes(slots, keys, stages, head_dim, page, itemsize) <= kib << 10
        assert slots >= group and slots % 16 == keys % 16 == 0 and warps == (8 if slots >= 128 else 4)
