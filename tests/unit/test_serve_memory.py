"""Freed memory goes back to the system."""

import asyncio
import ctypes
import ctypes.util
import os
import sys

import pytest

from cacheblend.serve import memory


def test_the_heap_is_trimmed_now_and_then_until_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(memory, "heap_trimmer", lambda: lambda: trims.append(1))

    async def serve() -> None:
        task = asyncio.create_task(memory.give_back_now_and_then(every_s=0.01))
        while len(trims) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(serve(), 30))


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.heap_trimmer() is None
    asyncio.run(asyncio.wait_for(memory.give_back_now_and_then(), 30))


@pytest.mark.skipif(sys.platform != "linux" or not ctypes.util.find_library("c"), reason="needs glibc")
def test_it_can_be_called() -> None:
    trim = memory.heap_trimmer()
    if trim is None:
        pytest.skip("another C library")
    assert trim() in (0, 1)


def test_an_administrators_own_bound_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    memory.keep_few_kernels()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(memory.KERNELS)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    memory.keep_few_kernels()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
