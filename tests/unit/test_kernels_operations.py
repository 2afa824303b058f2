"""What serves an operation: kernels that are right, and plain PyTorch else."""

import logging
import re
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from cacheblend.core.kernels import attention, kv_placement, operations
from cacheblend.core.kernels.attention import HeadShape
from cacheblend.core.kernels.operations import Operation, Served
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


def operation(kernel):
    return Operation("adding", plain, kernel, differs, lambda device, dtype: dtype == HALF)


def test_a_kernel_that_agrees_serves_what_it_is_made_for_and_is_checked_once() -> None:
    adding = operation(lambda: right)
    assert (adding.on(CPU, HALF).call, adding.on(CPU, HALF).name) == (right, "Triton")
    assert (adding.on(CPU, torch.float32).call, adding.on(CPU, torch.float32).reason) == (plain, "")
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
    for dtype in (torch.float32, torch.float16, torch.bfloat16):  # the processor is served by PyTorch
        assert operations.ATTEND_ROWS.on(CPU, dtype).call is attention.attend_rows


@pytest.mark.parametrize(
    ("load", "reason"),
    [(lambda: wrong, "gives 0.0"), (crashing, "RuntimeError: ptxas died"), (lambda: 3, "TypeError: .*not callable")],
)
def test_one_that_does_not_is_not_used_and_told_once(load, reason, caplog: pytest.LogCaptureFixture) -> None:
    adding = operation(load)
    with caplog.at_level(logging.WARNING, "cacheblend.kernels"):
        served = [adding.on(CPU, HALF) for _ in range(3)][-1]
        not_installed = operation(missing).on(CPU, HALF)
    (record,) = caplog.records
    assert "adding: Triton is not used on cpu in torch.bfloat16" in record.getMessage()
    assert (served.call, served.name) == (plain, "PyTorch")
    assert re.match(f"Triton: {reason}", served.reason)
    assert (not_installed.call, not_installed.reason) == (plain, "Triton: No module named 'triton'")


def test_attention_of_rows_is_checked_before_it_is_used() -> None:
    """The check that decides on a device: it takes a kernel that is right, and none that forgets the window."""

    def without_window(query, keys, values, positions, spec, table=None):
        return attention.attend_rows(query, keys, values, positions, replace(spec, window=None), table)

    def rounding(query, keys, values, positions, spec, table=None):
        return attention.attend_rows(query.float(), keys.float(), values.float(), positions, spec, table).to(HALF)

    def ordered_pages(query, keys, values, positions, spec, table=None):
        return rounding(query, keys, values, positions, spec, None if table is None else table.flip(0))

    check = partial(operations.attention_differs, plain=attention.attend_rows, device=CPU, dtype=HALF)
    assert check(rounding) == ""
    assert re.match(r"differs from PyTorch by .* \(head_dim 128\), more than 0.06", check(without_window))
    assert re.match(r"differs from PyTorch by .* \(head_dim 64, in pages\), more than 0.06", check(ordered_pages))
    assert re.search(r"head_dim 80\)", check(without_window, shapes=[HeadShape(4, 2, 80, 90)]))  # a model's own shape
    assert check(without_window, shapes=[HeadShape(4, 2, 80, 9000)]) == ""  # which hides nothing of so few keys


def test_an_engine_that_opens_has_its_kernels_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its first request."""
    served = operations.serve(torch.device("cpu"), torch.float32)
    assert len(served) == 3 and not any(each.is_kernel for each in served.values())
    asked: list[tuple[torch.device, torch.dtype, set[HeadShape]]] = []
    monkeypatch.setattr(prefiller, "serve", lambda device, dtype, shapes: asked.append((device, dtype, {*shapes})))
    model = tiny_model("gemma3_text")
    open_engine(model, []).close()
    config = model.config
    shape = HeadShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert asked == [(torch.device("cpu"), torch.float32, {shape, replace(shape, window=config.sliding_window)})]


def test_a_kernel_that_differs_in_a_models_own_shape_serves_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    """It was right where every kernel is checked; the model's heads are others."""
    adding = operation(lambda: right)
    assert adding.confirm(CPU, HALF, lambda kernel, slow: "").is_kernel
    assert adding.confirm(CPU, torch.float32, lambda kernel, slow: "never asked of PyTorch").reason == ""
    with caplog.at_level(logging.WARNING, "cacheblend.kernels"):
        served = adding.confirm(CPU, HALF, lambda kernel, slow: "is off by 3 (head_dim 80)")
    assert (served.call, served.reason) == (plain, "Triton: is off by 3 (head_dim 80)")
    assert adding.on(CPU, HALF) is served
    assert "adding: Triton is not used" in caplog.text
    again = operation(lambda: right)
    assert again.confirm(CPU, HALF, lambda kernel, slow: crashing()).reason == "Triton: RuntimeError: ptxas died"


def test_a_models_own_shapes_are_checked_of_attention_and_placing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list] = {"attention": [], "placing": []}
    kernel = Served(attention.attend_rows, "a kernel"), Served(kv_placement.place, "a kernel")
    monkeypatch.setattr(operations.ATTEND_ROWS, "_served", {(CPU, HALF): kernel[0]})
    monkeypatch.setattr(operations.PLACE, "_served", {(CPU, HALF): kernel[1]})
    monkeypatch.setattr(operations, "_has_kernels", lambda device, dtype: True)
    monkeypatch.setattr(operations, "attention_differs", lambda *args: seen["attention"].append(args[4]) or "")
    monkeypatch.setattr(operations, "placing_differs", lambda *args: seen["placing"].append(args[4]) or "bad scales")
    shapes = [HeadShape(8, 4, 80), HeadShape(8, 4, 80, 512), HeadShape(8, 4, 80), HeadShape(4, 4, 512)]
    served = operations.serve(CPU, HALF, shapes)
    assert seen == {"attention": [(HeadShape(8, 4, 80), HeadShape(8, 4, 80, 512))], "placing": [(4, 80)]}
    assert served["attention of rows"].is_kernel and not served["placing"].is_kernel
