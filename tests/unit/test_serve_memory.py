"""Freed memory goes back to the system."""

import asyncio
import ctypes
import ctypes.util
import os
import subprocess
import sys

import pytest

from cacheblend.serve import memory


def test_the_heap_is_trimmed_now_and_then_until_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(memory, "heap_trimmer", lambda: lambda: trims.append(1))

    async def serve() -> None:
        task = asyncio.create_task(memory.trim_heap_periodically(every_s=0.01))
        while len(trims) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(serve(), 30))


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.heap_trimmer() is None
    asyncio.run(asyncio.wait_for(memory.trim_heap_periodically(), 30))


@pytest.mark.skipif(sys.platform != "linux" or not ctypes.util.find_library("c"), reason="needs glibc")
def test_it_can_be_called() -> None:
    trim = memory.heap_trimmer()
    if trim is None:
        pytest.skip("another C library")
    assert trim() in (0, 1)


def test_an_administrators_own_bounds_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        monkeypatch.setenv(name, "7")
    memory.keep_few_kernels()
    assert [os.environ[name] for name in names] == ["7", "7"]
    monkeypatch.delenv(names[1])
    memory.keep_few_kernels()
    assert [os.environ[name] for name in names] == ["7", str(memory.KERNELS)]


SHAPES = """
import sys
from cacheblend.serve.memory import heap_trimmer, keep_few_kernels
trim = heap_trimmer() or (lambda: None)
if sys.argv[1] == "few":
    keep_few_kernels()
import torch
torch.set_num_threads(1)
held = lambda: int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) / 1024
weight = torch.randn(384, 128).bfloat16()
trim()
before = held()
for rows in range(1, 1200):
    torch.nn.functional.linear(torch.randn(rows, 128).bfloat16(), weight)
trim()  # as the server does: what is measured is what the kernels hold, not the holes of the heap
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_products_of_many_shapes_leave_little_memory_in_use() -> None:
    """Only where there are such caches: a processor without bf16 products keeps little more than its heap's holes."""
    grown = {}
    unbound = {name: value for name, value in os.environ.items() if name not in memory._CACHES}  # by a test before
    for how in ("few", "many"):
        done = subprocess.run(
            [sys.executable, "-c", SHAPES, how], env=unbound, capture_output=True, text=True, timeout=120
        )
        grown[how] = float(done.stdout)
    if grown["many"] < 100:
        pytest.skip(f"nothing is kept here: {grown['many']:.0f} MiB")
    assert grown["few"] < 0.6 * grown["many"]


def test_the_collector_leaves_out_what_there_was_when_the_server_began() -> None:
    """In a process of its own, since what is left out stays so."""
    program = """
import gc
from cacheblend.serve.memory import collect_no_libraries
collect_no_libraries()
assert gc.get_freeze_count() > 1000 and gc.isenabled()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
