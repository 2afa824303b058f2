"""Pages of eight bits: plain PyTorch by the definition, the kernels by plain PyTorch."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels import attention, kv_placement, operations
from cacheblend.core.kernels.attention import AttentionSpec, HeadShape
from cacheblend.core.kernels.float8 import FLOAT8, Float8, as_bytes
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.operations import PLAIN, Operation, Served
from cacheblend.core.kernels.rope import KeyRotation
from campaign import share
from kernel_cases import ATTENTION_TOLERANCE, compare, paged, records
from reference_attention import dense_attention

pytest.importorskip("triton", reason="Triton is not installed here")
from cacheblend.core.kernels import attention_triton, kv_placement_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = st.sampled_from(list(FLOAT8))
SETTINGS = settings(max_examples=share(25), suppress_health_check=[HealthCheck.too_slow], deadline=None)


def every_number() -> torch.Tensor:
    """All numbers of fp16 and of bf16, infinities and NaN among them, and some between them."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    between = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 20_000)
    return torch.cat([bits.view(torch.float16).float(), bits.view(torch.bfloat16).float(), between])


def as_pages(rows: torch.Tensor, page: int = 16) -> torch.Tensor:
    """Numbers [n] as pages of one head of 64 dimensions, with zeros behind them."""
    padded = torch.zeros(-(-len(rows) // (64 * page)) * 64 * page)
    padded[: len(rows)] = rows
    return padded.view(-1, page, 1, 64)


@pytest.mark.parametrize("scale", [1.0, 0.037, 3.3])
@pytest.mark.parametrize("kind", FLOAT8, ids=str)
def test_every_number_becomes_the_byte_that_pytorch_makes_of_it(kind: torch.dtype, scale: float) -> None:
    """Rounded to the nearest even, small ones too; beyond the largest number that one; NaN stays NaN."""
    numbers = as_pages(every_number())
    blocks = len(numbers)
    float8 = Float8(kind, torch.float32, scale, scale)
    record = numbers.view(1, -1, 64)
    record = torch.stack([record, record.flip(1)], dim=1).contiguous().to(DEVICE)
    tokens = record.shape[2]
    placement = Placement([Piece(0, tokens, 0, 0, tokens)])
    table = torch.arange(blocks, device=DEVICE)
    found = [torch.zeros(2, blocks, 16, 1, 64, device=DEVICE).to(kind) for _ in range(2)]
    for place, pages in zip((kv_placement_triton.place, kv_placement.place), found, strict=True):
        place([record], placement, *pages, None, table, float8)
    is_nan = as_bytes(found[1]).view(kind).float().isnan()
    compare(torch.equal(as_bytes(found[0])[~is_nan], as_bytes(found[1])[~is_nan]))
    compare(bool(found[0].float()[is_nan].isnan().all()) and int(is_nan.sum()) > 0)
    limit = torch.finfo(kind).max
    exact = (record[0, 0].float() / torch.tensor(scale, device=DEVICE)).clamp(-limit, limit)
    error = (found[1][0].float().view(-1, 64) - exact).abs()
    step = torch.finfo(kind).eps * exact.abs().clamp(min=torch.finfo(kind).smallest_normal)
    assert bool((error <= step / 2)[~exact.isnan()].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FLOAT8, ids=str)
def test_every_byte_is_read_exactly(kind: torch.dtype, dtype: torch.dtype) -> None:
    """A row that sees one key gives its value."""
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = bytes_.view(kind).float()
    bytes_ = bytes_[numbers.isfinite()]
    values = torch.cat([bytes_, torch.zeros(256 - len(bytes_), dtype=torch.uint8)]).view(kind).view(1, 4, 64).to(DEVICE)
    query, keys = torch.zeros(1, 4, 64, dtype=dtype, device=DEVICE), torch.zeros(1, 4, 64, device=DEVICE).to(kind)
    spec, at = AttentionSpec(1.0, window=1), torch.arange(4, device=DEVICE)
    for attend in (attention_triton.attend_rows, attention.attend_rows):
        compare(torch.equal(attend(query, keys, values, at, spec)[:, 0], values[0].to(dtype)), (kind, dtype))


@SETTINGS
@given(
    kind=KINDS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rows=st.integers(1, 60),
    length=st.integers(1, 400),
    shape=st.sampled_from([(4, 2, 64), (8, 1, 128), (3, 3, 96)]),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.just(15.0),
    has_sinks=st.booleans(),
    page=st.sampled_from([8, 16, 48]),
    seed=st.integers(0, 1 << 30),
)
def test_rows_attend_in_pages_as_the_dense_oracle_over_decoded_numbers(
    kind: Any, dtype: Any, rows: int, length: int, shape: Any, window: Any, softcap: Any, has_sinks: bool, page: int,
    seed: int,
) -> None:  # fmt: skip
    heads, kv_heads, head_dim = shape
    draw = torch.Generator().manual_seed(seed)
    rows = min(rows, length)
    query = torch.randn(heads, rows, head_dim, generator=draw).to(dtype)
    keys, values = (torch.randn(kv_heads, length, head_dim, generator=draw).to(kind).to(dtype) for _ in range(2))
    at = torch.randperm(length, generator=draw)[:rows].sort().values
    sinks = torch.randn(heads, generator=draw) if has_sinks else None
    spec = AttentionSpec(head_dim**-0.5, window, softcap, None if sinks is None else sinks.to(DEVICE))
    query, keys, values, at = (each.to(DEVICE) for each in (query, keys, values, at))
    expected = dense_attention(query, keys, values, at, spec)
    pages = paged(keys, values, page)
    kept = [each.to(kind) for each in pages[:2]]
    for attend in (attention_triton.attend_rows, attention.attend_rows):
        out = attend(query, kept[0], kept[1], at, spec, pages[2])
        error = float((out.float() - expected.float()).abs().max())
        compare(error <= ATTENTION_TOLERANCE[dtype], f"off by {error}")


@SETTINGS
@given(
    kind=KINDS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    codec=st.sampled_from(["raw", "int8", "fp8", "int4"]),
    head_dim=st.sampled_from([8, 64, 96]),
    pairing=st.sampled_from(["half", "interleaved"]),
    offset=st.sampled_from([0, 1, -7, 4711]),
    scales=st.tuples(st.sampled_from([1.0, 0.02, 2.7]), st.sampled_from([1.0, 0.3])),
    seed=st.integers(0, 1 << 30),
)
def test_records_are_placed_as_if_rounded_afterwards(
    kind: Any, dtype: Any, codec: str, head_dim: int, pairing: Any, offset: int, scales: Any, seed: int
) -> None:
    made = records(codec, [40, 13], 2, head_dim, dtype, seed, DEVICE)
    placement = Placement([Piece(0, 40, 3, 5, 30, offset), Piece(1, 13, 0, 40, 13)], codec)
    rotation = KeyRotation(1e4 ** (-torch.arange(head_dim // 4) / (head_dim // 4)), pairing)
    float8, table = Float8(kind, dtype, *scales), torch.tensor([4, 1, 3, 0], device=DEVICE)
    dense = torch.zeros(2, 2, 64, head_dim, dtype=dtype, device=DEVICE)
    kv_placement.place(made, placement, *dense, rotation)
    expected = [as_bytes(part) for part in float8.encode(dense.unbind())]
    for place in (kv_placement_triton.place, kv_placement.place):
        pages = torch.zeros(2, 5, 16, 2, head_dim, device=DEVICE).to(kind)
        place(made, placement, *pages, rotation, table, float8)
        for number, part in enumerate(as_bytes(pages)):
            found = part[table].flatten(0, 1).transpose(0, 1)
            apart = (found.int() - expected[number].int()).abs()
            is_tie = place is kv_placement_triton.place and bool(offset or codec != "raw")  # a sum in another order
            compare(int(apart.max()) <= is_tie and float((apart > 0).float().mean()) < 0.01, (number, apart.max()))
            assert not part[2].any()  # a block of nobody


def test_a_kernel_that_differs_in_eight_bits_serves_other_caches_only() -> None:
    device, dtype = torch.device(DEVICE), torch.bfloat16

    def without_bytes(query: Any, keys: Any, values: Any, *rest: Any) -> Any:
        if keys.dtype is torch.float8_e5m2:
            keys = as_bytes(keys).view(torch.float8_e4m3fn)
        return attention.attend_rows(query, keys, values, *rest)

    def without_scales(*given: Any) -> None:
        *others, float8 = given
        kv_placement.place(*others, float8 and Float8(float8.kind, float8.dtype))

    attends, places = operations.float8_attention_differs, operations.float8_placing_differs
    assert attends(attention_triton.attend_rows, attention.attend_rows, device, dtype, [HeadShape(2, 1, 64)]) == ""
    assert places(kv_placement_triton.place, kv_placement.place, device, dtype, (1, 16)) == ""
    assert "torch.float8_e5m2" in attends(without_bytes, attention.attend_rows, device, dtype)
    assert "torch.float8_e4m3fn" in places(without_scales, kv_placement.place, device, dtype)
    assert operations.attention_differs(without_bytes, attention.attend_rows, device, dtype) == ""

    given = "attention", attention.attend_rows, lambda: without_bytes
    assert Operation(*given, operations.attention_differs, lambda *_: True).on(device, dtype).is_kernel
    refused = Operation(*given, attends, lambda *_: True).on(device, dtype)
    assert not refused.is_kernel and "torch.float8_e5m2" in refused.reason


def test_eight_bits_are_checked_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers without such a cache compile nothing for it."""
    device = torch.device("cpu")
    asked: list[str] = []
    eight = operations.ATTEND_FLOAT8, operations.PLACE_FLOAT8
    for operation in (operations.ATTEND_ROWS, operations.PLACE, *eight):
        served: Served[Any] = Served(operation._plain, "ours")
        monkeypatch.setattr(operation, "_served", {(device, torch.bfloat16): served})
        monkeypatch.setattr(operation, "confirm", lambda *args, name=operation.name: asked.append(name))
    monkeypatch.setattr(operations, "_has_kernels", lambda *_: True)
    shape = HeadShape(4, 2, 64)
    operations.serve(device, torch.bfloat16, [shape])
    assert asked == ["attention of rows", "placing"]
    operations.serve(device, torch.bfloat16, [shape], float8=True)
    assert asked[2:] == ["attention of rows", "placing", "attention in eight bits", "placing in eight bits"]
    assert operations.is_served(device, torch.bfloat16, shape, float8=True)
    plain: Served[Any] = Served(kv_placement.place, PLAIN)
    monkeypatch.setattr(operations.PLACE_FLOAT8, "_served", {(device, torch.bfloat16): plain})
    assert operations.is_served(device, torch.bfloat16, shape)
    assert not operations.is_served(device, torch.bfloat16, shape, float8=True)


def test_pages_and_what_describes_them_must_agree() -> None:
    record, pages = torch.zeros(2, 2, 9, 16), torch.zeros(2, 3, 16, 2, 16).to(torch.float8_e4m3fn)
    placement, table = Placement([Piece(0, 9, 0, 0, 9)]), torch.tensor([2, 0])
    for wrong in (None, Float8(torch.float8_e5m2, torch.float32)):
        with pytest.raises(InvalidInputError, match=r"pages are in torch\.float8_e4m3fn"):
            operations.place([record], placement, *pages, None, table, wrong)
