"""Daemon threads: order, bound, closing, and a process that ends while a call hangs."""

import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from cacheblend.core.load import threads as threads_module
from cacheblend.core.load.threads import CallsInOrder, DaemonPool


def test_calls_run_in_order_and_give_results_and_errors() -> None:
    pool, order = DaemonPool(1, "test"), list[int]()
    futures = [pool.submit(order.append, number) for number in range(50)]
    failing = pool.submit(int, "x")
    assert [future.result() for future in futures] == [None] * 50
    assert order == list(range(50))
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result()
    assert pool.submit(lambda: 7).result() == 7  # the thread goes on after an error


def test_as_many_calls_run_at_once_as_there_are_threads() -> None:
    pool, all_in = DaemonPool(3, "test"), threading.Barrier(4)
    for _ in range(2):
        futures = [pool.submit(all_in.wait) for _ in range(3)]
        all_in.wait()
        for future in futures:
            future.result()
    gate = threading.Event()
    running = [pool.submit(gate.wait) for _ in range(3)]
    waiting = pool.submit(gate.wait)
    while not all(future.running() for future in running):
        pass
    assert not waiting.running()
    gate.set()
    assert waiting.result()
    pool = DaemonPool(4, "test")
    assert [pool.submit(int, str(number)).result(30) for number in range(200)] == list(range(200))
    assert len(pool._shared.threads) == 1  # one call after the other takes one thread


def test_what_follows_another_call_takes_no_thread_until_then() -> None:
    first, pool, gate = DaemonPool(1, "first"), DaemonPool(1, "test"), threading.Event()
    for what in (gate.wait, lambda: int("x") if gate.wait() else 0):
        gate.clear()
        call, done = first.submit(what), list[int]()
        followers = [pool.submit_after(call, partial(done.append, number)) for number in range(9)]
        assert pool.submit(lambda: 7).result(30) == 7
        assert all(follower.cancel() for follower in followers[::2]) and not done
        gate.set()
        if what == gate.wait:
            assert [follower.result(30) for follower in followers[1::2]] == [None] * 4 and done == [1, 3, 5, 7]
            assert pool.submit_after(call, lambda: 8).result(30) == 8
            continue
        for follower in followers[1::2]:
            with pytest.raises(ValueError, match="invalid literal"):
                follower.result(30)
        assert not done
    gate.clear()
    waits = [pool.submit_after(first.submit(gate.wait), lambda: 9) for _ in range(2)]
    pool.close()
    first.close()  # cancels the second
    gate.set()
    for follower in waits:
        with pytest.raises(CancelledError):
            follower.result(30)
    # cancelled with the pool also while it waits for a thread
    pool, gate, ended = DaemonPool(1, "test"), threading.Event(), Future[None]()
    begun = pool.submit(gate.wait)
    while not begun.running():
        pass
    behind = pool.submit_after(ended, int)
    ended.set_result(None)  # `int` waits for a thread
    pool.close()
    with pytest.raises(CancelledError):
        behind.result(30)
    gate.set()
    assert begun.result(30)


def test_closing_cancels_what_waits_and_waits_for_nothing() -> None:
    pool, gate, begun = DaemonPool(1, "test"), threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return gate.wait()

    running, waiting = pool.submit(hang), pool.submit(int)
    begun.wait()
    pool.close()
    pool.close()
    assert not running.done()
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(int)
    gate.set()
    assert running.result()


def test_threads_end_with_their_pool_and_keep_no_result() -> None:
    class Large:
        pass

    pool = DaemonPool(1, "cacheblend-test-end")
    made = weakref.ref(pool.submit(Large).result())
    pool.submit(int).result()  # the thread has let go of the first result
    gc.collect()
    assert made() is None
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("cacheblend-test-end")]
    assert threads
    del pool
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_hanging_call_does_not_keep_the_process_from_ending() -> None:
    program = (
        "import threading; from cacheblend.core.load.threads import CallsInOrder, DaemonPool\n"
        "pool, begun = DaemonPool(1, 'test'), threading.Event()\n"
        "pool.submit(lambda: (begun.set(), threading.Event().wait())); begun.wait(); print('end')"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "end"


def test_calls_of_one_caller_take_one_thread_of_a_shared_pool() -> None:
    pool, gate, order = DaemonPool(2, "test"), threading.Event(), list[int]()
    slow, fast = CallsInOrder(pool), CallsInOrder(pool)
    hanging = [slow.submit(gate.wait) for _ in range(3)]
    done = [fast.submit(order.append, number) for number in range(20)]
    assert [future.result() for future in done] == [None] * 20
    assert order == list(range(20))
    slow.close()
    assert [future.cancelled() for future in hanging] == [False, True, True]
    gate.set()
    assert hanging[0].result()
    assert slow.submit(int).result() == 0  # a caller may go on
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        CallsInOrder(pool).submit(int)


def test_a_forked_process_has_threads_of_its_own_for_pools_whose_locks_another_thread_held() -> None:
    pool = DaemonPool(1, "test")
    calls, started, end = CallsInOrder(pool), threading.Event(), threading.Event()
    calls.submit(lambda: (started.set(), end.wait(60)))
    started.wait(60)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._shared.starting, calls._lock:
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        answer = calls.submit(lambda: 7).result(20)
        calls.close()
        pool.close()
        pool.join(20)
        os._exit(0 if answer == 7 else 1)
    release.set()
    end.set()
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    holder.join()
    assert done == (child, 0) and pool.submit(lambda: 2).result(30) == 2  # and the other process goes on
    pool.close()


@pytest.mark.parametrize("seed", range(5))
def test_calls_that_hang_hold_up_no_other_while_there_are_threads(seed: int) -> None:
    """Callers come at the same moment, as threads become idle; some calls never end."""
    rng, most = random.Random(seed), 6
    for _ in range(20):
        pool, gate, hanging = DaemonPool(most, "test"), threading.Event(), rng.randrange(most)
        at_once = threading.Barrier(3 + hanging)

        def hang(pool: DaemonPool = pool, gate: threading.Event = gate, at_once: threading.Barrier = at_once) -> None:
            at_once.wait(30)
            pool.submit(gate.wait)

        def ask(pool: DaemonPool = pool, at_once: threading.Barrier = at_once) -> list[int]:
            at_once.wait(30)
            return [pool.submit(int, str(number)).result(30) for number in range(15)]

        with ThreadPoolExecutor(3 + hanging) as callers:
            hung = [callers.submit(hang) for _ in range(hanging)]
            asked = [callers.submit(ask) for _ in range(3)]
            assert [each.result() for each in asked] == [list(range(15))] * 3
            assert [each.result() for each in hung] == [None] * hanging
        assert len(pool._shared.threads) <= most
        gate.set()
        pool.close()


def interrupt_at(line: int, call: Callable[[], object]) -> bool:
    """Calls it, with a KeyboardInterrupt in front of the so many-th line of the pool's; False: it has fewer."""
    left, module = line, threads_module.__file__

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != module:
            return None
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupt_anywhere_leaves_a_pool_that_answers(threads: int) -> None:
    """Of a caller, at each line; in a thread of its own: Python keeps an error that a trace interrupted."""
    with ThreadPoolExecutor(1) as caller:
        caller.submit(interrupt_everywhere, threads).result()


def interrupt_everywhere(threads: int) -> None:
    line, pool = 0, DaemonPool(threads, "test")
    while interrupt_at(line, lambda: pool.submit(time.sleep, 0.0001)):
        line += 1
        answers = [pool.submit(int, str(number)) for number in range(2 * threads)]
        assert [answer.result(30) for answer in answers] == list(range(2 * threads))
    assert line > 5
    fresh, pools = 0, [DaemonPool(threads, "test")]  # kept, else they are closed inside of what is traced
    while interrupt_at(fresh, lambda: pools[-1].submit(int)):
        fresh += 1
        pools.append(DaemonPool(threads, "test"))
    assert fresh > line  # a thread is started
