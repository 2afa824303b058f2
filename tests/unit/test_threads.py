"""Threads that compute beside a model's layers."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cacheblend.core.threads import compute_alone, run_apart


@pytest.fixture
def usual() -> Iterator[int]:
    """Several helpers a thread, whatever this machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_a_thread_that_computes_alone_changes_no_other(usual: int) -> None:
    with ThreadPoolExecutor(1) as early, ThreadPoolExecutor(1, initializer=compute_alone) as alone:
        assert early.submit(torch.get_num_threads).result() == usual
        assert alone.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == early.submit(torch.get_num_threads).result() == usual
        assert run_apart(torch.get_num_threads) == usual
        assert alone.submit(torch.get_num_threads).result() == 1


def test_many_begin_at_once(usual: int) -> None:
    together = threading.Barrier(8)

    def begin() -> int:
        together.wait()
        compute_alone()
        return torch.get_num_threads()

    with ThreadPoolExecutor(8) as threads:
        assert [each.result() for each in [threads.submit(begin) for _ in range(8)]] == [1] * 8
    assert run_apart(torch.get_num_threads) == torch.get_num_threads() == usual


def test_what_is_run_apart_comes_back_and_its_thread_ends() -> None:
    assert run_apart(lambda: threading.current_thread().name).startswith("cacheblend-apart")
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda: 1 / 0)
    assert not any(each.name.startswith("cacheblend-apart") for each in threading.enumerate())
