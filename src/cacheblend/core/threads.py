"""Threads that compute beside a model's layers.

A thread that computes brings an OpenMP team of its own and keeps it for as long as it lives. libgomp's workers spin
between two parallel regions only while there are no more of them than processors; beside a second team, even an idle
one, they sleep, and each region waits for them to wake: prefills on two cores took a fifth longer, and twice as long
beside a team that works. So what computes beside the layers does it alone, or in a thread that ends.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Found = TypeVar("Found")

_changing = threading.Lock()


def run_apart(work: Callable[[], Found]) -> Found:
    """What `work` returns or raises, done in a thread that ends with it."""
    with ThreadPoolExecutor(1, thread_name_prefix="cacheblend-apart") as thread:
        return thread.submit(work).result()


def compute_alone() -> None:
    """From here on, this thread computes without helpers: for what is small, and begins beside the layers.

    torch sets the number for the thread that asks and, in the same breath, for all that have not computed yet. The
    second is taken back, by a thread that ends. vLLM puts a function that does nothing in the place of torch's on CPUs,
    so that nobody disturbs the threads that it has bound to processors: they are not meant here.
    """
    set_number = torch._C.set_num_threads
    with _changing:
        usual = torch.get_num_threads()
        if usual > 1:
            set_number(1)
            run_apart(lambda: set_number(usual))
