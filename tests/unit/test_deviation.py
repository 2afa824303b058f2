"""KV deviation against a plain loop."""

from typing import Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels import operations
from cacheblend.core.kernels.deviation import Measure, kv_deviation
from campaign import SHARE, share
from kernel_cases import compare_deviation

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


def test_what_deviation_leaves_alone_and_where_it_ends() -> None:
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


def test_a_wrong_kernel_and_shapes_that_do_not_fit_are_found() -> None:
    def wrong(fresh, loaded, measure="kv", positions=None):  # type: ignore[no-untyped-def]
        return kv_deviation(fresh, loaded, "k", positions)

    place = torch.device(DEVICE), torch.float16
    assert operations.deviation_differs(kv_deviation, kv_deviation, *place) == ""
    assert "differs from PyTorch" in operations.deviation_differs(wrong, kv_deviation, *place)
    fresh, loaded = pairs((2, 4, 8), torch.float32)
    with pytest.raises(InvalidInputError, match=r"\[2, 4, 8\] fresh rows, \[2, 4, 8\] loaded, 3 compared"):
        operations.kv_deviation(fresh, loaded, "kv", torch.arange(3))
