"""What serves an operation: kernels that are right, and plain PyTorch else."""

import logging
import re
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels import attention, operations
from cacheblend.core.kernels.attention import HeadShape
from cacheblend.core.kernels.deviation import Measure, kv_deviation
from cacheblend.core.kernels.operations import Operation, Served
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.engines.hf import prefiller
from cacheblend.engines.hf.survey import survey_model
from campaign import SHARE, share
from families import tiny_model
from kernel_cases import compare_deviation
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


def test_attention_of_rows_that_ask_is_checked_before_it_is_used() -> None:
    def without_window(query, keys, values, at, key_positions, spec):
        return attention.attend_asking(query, keys, values, at, key_positions, replace(spec, window=None))

    def without_generic(query, keys, values, at, key_positions, spec):
        mixed, _ = attention.attend_asking(query, keys, values, at, key_positions, spec)
        weights = attention.attention_weights(query, keys, at, key_positions, spec)
        return mixed, weights.amax((0, 1))

    check = partial(operations.asking_differs, plain=attention.attend_asking, device=CPU, dtype=HALF)
    assert check(attention.attend_asking) == ""
    assert re.match(r"differs from PyTorch by .* \(head_dim 128\), more than 0.06", check(without_window))
    assert re.match(r"differs from PyTorch by .* \(head_dim 64\), more than 0.001", check(without_generic))
    assert check(without_window, shapes=[HeadShape(4, 2, 80, 9000)]) == ""  # which hides nothing of so few keys


def test_an_engine_that_opens_has_its_kernels_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its first request."""
    served = operations.serve(torch.device("cpu"), torch.float32)
    assert len(served) == 4 and not any(each.is_kernel for each in served.values())
    asked: list[tuple[torch.device, torch.dtype, set[HeadShape]]] = []
    monkeypatch.setattr(prefiller, "serve", lambda *where, layers: asked.append((*where, {s for s, _ in layers})))
    model = tiny_model("gemma3_text")
    open_engine(model, []).close()
    config = model.config
    shape = HeadShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert asked == [(torch.device("cpu"), torch.float32, {shape, replace(shape, window=config.sliding_window)})]
    features = {
        (shape.is_capped, shape.has_sinks, shape.window is not None)
        for family in ("gemma2", "gpt_oss")
        for shape in survey_model(tiny_model(family)).head_shapes
    }
    assert features == {(is_capped, not is_capped, window) for is_capped in (False, True) for window in (False, True)}


def test_kernels_are_checked_in_a_models_own_shapes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was right where every kernel is checked; the model's heads are others."""
    adding = operation(lambda: right)
    assert adding.confirm(CPU, HALF, [lambda kernel, slow: ""] * 2).is_kernel
    assert adding.confirm(CPU, torch.float32, [lambda kernel, slow: "never asked of PyTorch"]).reason == ""
    with caplog.at_level(logging.WARNING, "cacheblend.kernels"):
        served = adding.confirm(CPU, HALF, [lambda kernel, slow: "", lambda kernel, slow: "is off by 3 (head_dim 80)"])
    assert (served.call, served.reason) == (plain, "Triton: is off by 3 (head_dim 80)")
    assert adding.on(CPU, HALF) is served
    assert "adding: Triton is not used" in caplog.text
    again = operation(lambda: right)
    assert again.confirm(CPU, HALF, [lambda kernel, slow: crashing()]).reason == "Triton: RuntimeError: ptxas died"


def test_which_shapes_of_a_model_are_checked_and_started(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noting(name: str, *keys: str, found: str = "") -> None:
        def check(kernel: Any, plain: Any, device: torch.device, dtype: torch.dtype, **given: Any) -> str:
            seen.append((name, *(given[key] for key in keys)))
            return found

        monkeypatch.setattr(operations, name, check)

    for each in (operations.ATTEND_ROWS, operations.PLACE, operations.ATTEND_ASKING, operations.KV_DEVIATION):
        monkeypatch.setattr(each, "_served", {(CPU, HALF): Served(each._plain, "a kernel")})
    monkeypatch.setattr(operations, "_has_kernels", lambda device, dtype: True)
    noting("attention_differs", "shapes", "page")
    noting("attention_starts", "shapes", "page")
    noting("placing_differs", "heads", "rotations", "page", found="bad scales")
    noting("asking_differs", "shapes", found="bad sums")
    noting("asking_starts", "shapes")
    noting("deviation_differs", "heads")
    shapes = [HeadShape(8, 4, 80), HeadShape(8, 4, 80, 512), HeadShape(8, 4, 80), HeadShape(4, 4, 512)]
    turned = KeyRotation(torch.rand(10), "interleaved")
    served = operations.serve(CPU, HALF, zip(shapes, [turned, turned, None, None], strict=True), page=32)
    assert seen == [
        ("attention_differs", (HeadShape(8, 4, 80), HeadShape(8, 4, 80, 512)), 32),
        ("attention_starts", (HeadShape(8, 4, 80), HeadShape(8, 4, 80, 512)), 32),
        ("placing_differs", (4, 80), (turned, None), 32),
        ("asking_differs", (HeadShape(8, 4, 80), HeadShape(8, 4, 80, 512))),  # and it is not started any more
        ("deviation_differs", (4, 80)),
    ]
    assert served["attention of rows"].is_kernel and served["deviation"].is_kernel
    assert not served["placing"].is_kernel and not served["attention of rows that ask"].is_kernel


def test_too_little_memory_to_start_a_kernel_in_all_sizes_turns_none_off() -> None:
    """Its results need more than those of a request; they are left to it."""
    started: list[int] = []

    def short_of_memory(query: torch.Tensor, keys: torch.Tensor, *_: Any) -> None:
        started.append(query.shape[1])
        if query.shape[1] > 40:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    for starts in (operations.attention_starts, operations.asking_starts):
        assert starts(short_of_memory, attention.attend_rows, CPU, HALF, [HeadShape(2, 1, 16)]) == ""
        assert started[-1] > 40 and {1, 8, 40} < {*started}
        started.clear()


# ---- KV deviation, against a plain loop -----------------------------------------------------------------------


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Pair = tuple[torch.Tensor, torch.Tensor]


def by_loop(fresh: Pair, loaded: Pair, measure: str) -> list[float]:
    heads, rows, head_dim = fresh[0].shape
    sums = []
    for row in range(rows):
        total = 0.0
        for i, name in enumerate("kv"):
            if name not in measure:
                continue
            for head in range(heads):
                for d in range(head_dim):
                    total += (float(fresh[i][head, row, d]) - float(loaded[i][head, row, d])) ** 2
        sums.append(total)
    return sums


def pairs(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Pair, Pair]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
    return (tensors[0], tensors[1]), (tensors[2], tensors[3])


@pytest.mark.parametrize("measure", ["kv", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_a_plain_loop(measure: Literal["kv", "k", "v"], dtype: torch.dtype) -> None:
    fresh, loaded = pairs((3, 7, 5), dtype)
    got = kv_deviation(fresh, loaded, measure)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(by_loop(fresh, loaded, measure)), rtol=1e-5, atol=1e-6)


def test_where_deviation_ends_and_a_wrong_kernel_and_shapes_are_found() -> None:
    # 300 squared is beyond fp16, and 256 + 0.25 is 256 in bf16: both need fp32 sums.
    big = torch.full((1, 1, 2), 300.0, dtype=torch.float16)
    assert kv_deviation((big, big), (-big, big)).tolist() == [2 * 600.0**2]
    one = torch.tensor([[[16.0, *[0.5] * 64]]], dtype=torch.bfloat16)
    assert kv_deviation((one, one), (torch.zeros_like(one), one)).tolist() == [256 + 64 * 0.25]
    # Zero for equal kv and nothing for no rows
    fresh, _ = pairs((2, 4, 8), torch.bfloat16)
    assert kv_deviation(fresh, fresh).tolist() == [0.0] * 4
    none, _ = pairs((2, 0, 8), torch.float32)
    assert kv_deviation(none, none).shape == (0,)
    # Inputs are not written to
    fresh, loaded = pairs((2, 4, 8), torch.float32)
    before = [t.clone() for t in (*fresh, *loaded)]
    kv_deviation(fresh, loaded)
    assert all(torch.equal(a, b) for a, b in zip(before, (*fresh, *loaded), strict=True))

    # A wrong kernel, and shapes that do not fit
    def keys_only(fresh, loaded, measure="kv", positions=None):  # type: ignore[no-untyped-def]
        return kv_deviation(fresh, loaded, "k", positions)

    place = torch.device(DEVICE), torch.float16
    assert operations.deviation_differs(kv_deviation, kv_deviation, *place) == ""
    assert "differs from PyTorch" in operations.deviation_differs(keys_only, kv_deviation, *place)
    fresh, loaded = pairs((2, 4, 8), torch.float32)
    with pytest.raises(InvalidInputError, match=r"\[2, 4, 8\] fresh rows, \[2, 4, 8\] loaded, 3 compared"):
        operations.kv_deviation(fresh, loaded, "kv", torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(st.data())
@settings(max_examples=share(50), deadline=None)
def test_the_kernel_measures_as_pytorch_does(dtype: torch.dtype, data: st.DataObject) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    heads = data.draw(st.integers(1, 4))
    most = 300 if SHARE == 1 else 100
    rows = data.draw(st.one_of(*[st.integers(0, 40)] * 5, st.integers(0, most)))  # mostly few: they take less
    length = rows + data.draw(st.one_of(*[st.integers(0, 50)] * 5, st.integers(0, 1700)))
    head_dim = data.draw(st.sampled_from([5, 8, 64, 96, 128, 256]))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    fresh = torch.randn(2, heads, rows, head_dim, generator=draw).to(DEVICE, dtype).unbind()
    loaded = torch.randn(2, heads, length, head_dim, generator=draw).to(DEVICE, dtype).unbind()
    positions = torch.randperm(length, generator=draw)[:rows].sort().values.to(DEVICE)
    if data.draw(st.booleans()):  # views, as layers give them
        fresh = tuple(each.transpose(0, 1).contiguous().transpose(0, 1) for each in fresh)
    compare_deviation(fresh, loaded, data.draw(st.sampled_from(get_args(Measure))), positions)
    if rows:
        compare_deviation(fresh, tuple(each[:, :rows] for each in loaded), "kv")
