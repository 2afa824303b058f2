"""Every kernel compiles for GPUs of several generations; no GPU is needed for that, so it is found out here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

CHILD = Path(__file__).parent.parent / "kernel_compiling.py"
SMALLEST_SHARED = 99 * 1024  # bytes of shared memory for a program on compute capability 8.6 and 8.9
ATTENTION = [
    {"capability": 80, "head_dim": 128, "group": 4, "rows": 2048},
    {"capability": 86, "head_dim": 256, "group": 2, "rows": 2048, "window": 512, "is_capped": True},
    {"capability": 89, "head_dim": 64, "group": 8, "rows": 2048, "sinks": True, "window": 128},
    {"capability": 90, "head_dim": 128, "group": 4, "rows": 2048, "page": 16},
    {"capability": 90, "head_dim": 8, "group": 2, "rows": 40},
    {"capability": 90, "head_dim": 96, "group": 1, "rows": 1, "splits": 8},
    {"capability": 100, "head_dim": 128, "group": 5, "rows": 300, "page": 48},
    {"capability": 80, "head_dim": 128, "group": 4, "rows": 2048, "page": 16, "float8": 2},
    {"capability": 90, "head_dim": 256, "group": 2, "rows": 2048, "page": 16, "float8": 1},
    {"capability": 90, "head_dim": 128, "group": 4, "rows": 2048, "page": 16, "float8": 1},
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


def compiled(kernel: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, str(CHILD), json.dumps([{**case, "kernel": kernel} for case in cases])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return found


def test_attention_compiles_and_fits() -> None:
    for case, taken in zip(ATTENTION, compiled("attention", ATTENTION), strict=True):
        assert taken["shared"] <= SMALLEST_SHARED, case
        assert any(product in taken["ptx"] for product in PRODUCTS), case


def test_placing_compiles_and_loads_several_numbers_at_once() -> None:
    for case, taken in zip(PLACING, compiled("placing", PLACING), strict=True):
        assert taken["shared"] <= SMALLEST_SHARED, case
        assert "ld.global.v" in taken["ptx"] or case["kind"] != "raw", case
        assert "st.global.v" in taken["ptx"], case


def test_deviation_compiles_and_loads_several_numbers_at_once() -> None:
    for taken in compiled("deviation", [{"capability": 80, "head_dim": 128}, {"capability": 90, "head_dim": 64}]):
        assert taken["shared"] <= SMALLEST_SHARED
        assert "ld.global.v" in taken["ptx"]
