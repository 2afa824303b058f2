"""What serves an operation: kernels that are right, and plain PyTorch else."""

import logging
import re
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from cacheblend.core.kernels import attention, operations
from cacheblend.core.kernels.registry import Kernel, Operation
from cacheblend.engines.hf import prefiller
from families import tiny_model
from parity.scenes import open_engine

CPU, HALF = torch.device("cpu"), torch.bfloat16


def plain(x):
    return x + 1


def right(x):
    return 1 + x


def wrong(x):
    return x


def differs(kernel, slow, device, dtype):
    x = torch.zeros(1, device=device, dtype=dtype)
    return "" if torch.equal(kernel(x), slow(x)) else f"gives {kernel(x).item()}"


def missing():
    raise ImportError("No module named 'triton'")


def crashing():
    raise RuntimeError("ptxas died")


def operation(*kernels):
    return Operation(
        "adding",
        plain,
        [Kernel(f"kernel {n}", lambda d, t: t == HALF, load) for n, load in enumerate(kernels)],
        differs,
    )


def test_a_kernel_that_agrees_serves_what_it_is_made_for() -> None:
    adding = operation(lambda: right)
    assert (adding.on(CPU, HALF).call, adding.on(CPU, HALF).name) == (right, "kernel 0")
    assert (adding.on(CPU, torch.float32).call, adding.on(CPU, torch.float32).reason) == (plain, "")


@pytest.mark.parametrize(
    ("load", "reason"),
    [(lambda: wrong, "gives 0.0"), (crashing, "RuntimeError: ptxas died"), (lambda: 3, "TypeError: .*not callable")],
)
def test_one_that_does_not_is_not_used_and_told_once(load, reason, caplog: pytest.LogCaptureFixture) -> None:
    adding = operation(load, lambda: right)
    with caplog.at_level(logging.WARNING, "cacheblend.kernels"):
        for _ in range(3):
            assert adding.on(CPU, HALF).call is right
    (record,) = caplog.records
    assert "adding: kernel 0 is not used on cpu in torch.bfloat16" in record.getMessage()
    served = operation(load).on(CPU, HALF)
    assert (served.call, served.name) == (plain, "PyTorch")
    assert re.match(f"kernel 0: {reason}", served.reason)


def test_what_is_not_installed_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cacheblend.kernels"):
        served = operation(missing).on(CPU, HALF)
    assert (served.call, served.reason) == (plain, "kernel 0: No module named 'triton'")
    assert not caplog.records


def test_several_threads_check_once() -> None:
    loads = []

    def load():
        loads.append(1)
        time.sleep(0.02)
        return right

    adding = operation(load)
    threads = [threading.Thread(target=adding.on, args=(CPU, HALF)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [1]


def test_attention_of_rows_is_checked_before_it_is_used() -> None:
    """The check that decides on a device: it takes a kernel that is right, and none that forgets the window."""

    def without_window(query, keys, values, positions, spec):
        return attention.attend_rows(query, keys, values, positions, replace(spec, window=None))

    def rounding(query, keys, values, positions, spec):
        return attention.attend_rows(query.float(), keys.float(), values.float(), positions, spec).to(query.dtype)

    check = partial(operations.attention_differs, plain=attention.attend_rows, device=CPU, dtype=HALF)
    assert check(rounding) == ""
    assert re.match(r"differs from PyTorch by .* \(head_dim 128\), more than 0.06", check(without_window))


def test_the_processor_is_served_by_pytorch() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert operations.ATTEND_ROWS.on(CPU, dtype).call is attention.attend_rows


def test_an_engine_that_opens_has_its_kernels_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its first request."""
    served = operations.serve(torch.device("cpu"), torch.float32)
    assert len(served) == 3 and not any(each.is_kernel for each in served.values())
    asked: list[tuple[torch.device, torch.dtype]] = []
    monkeypatch.setattr(prefiller, "serve", lambda device, dtype: asked.append((device, dtype)))
    open_engine(tiny_model("llama"), []).close()
    assert asked == [(torch.device("cpu"), torch.float32)]
