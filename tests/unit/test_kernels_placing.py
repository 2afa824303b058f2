"""Placing: plain PyTorch against decoding and turning row by row, the kernel against plain PyTorch; compressed records;
pages of eight bits.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError, ModelOverflowError
from cacheblend.core.kernels import attention, kv_placement, operations
from cacheblend.core.kernels.attention import AttentionSpec, HeadShape
from cacheblend.core.kernels.float8 import FLOAT8, Float8, as_bytes
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.operations import PLAIN, Operation, Served
from cacheblend.core.kernels.rope import KeyRotation, reposition_keys, turn_by
from cacheblend.core.plan.codec import CODECS, GROUP, codec_of
from campaign import SHARE, share
from kernel_cases import (
    ATTENTION_TOLERANCE,
    STEP,
    compare,
    compare_placing,
    is_close,
    paged,
    placed,
    placed_in_pages,
    records,
)
from reference_attention import dense_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MANY = 2000 if SHARE == 1 else 200
TOKENS = st.one_of(*[st.integers(1, 60)] * 14, st.integers(1, 300), st.integers(1, MANY))  # mostly few: they take less
CODEC, DTYPE = st.sampled_from(list(CODECS)), st.sampled_from(list(STEP))
SETTINGS = settings(max_examples=share(110), suppress_health_check=[*HealthCheck], deadline=None)


@st.composite
def cases(draw):
    """(records, placement, rotation, shape of the buffers, dtype): pieces in any order, some of one record twice."""
    kv_heads, head_dim = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8, 64, 96, 128, 256]))
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=3))
    dtype, name = draw(DTYPE), draw(CODEC)
    made = records(name, tokens, kv_heads, head_dim, dtype, draw(st.integers(0, 2**32)), DEVICE)
    pieces, at = [], 0
    for index in draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=4)):
        first = draw(st.integers(0, tokens[index] - 1))
        rows, at = draw(st.integers(1, tokens[index] - first)), at + draw(st.integers(0, 3))
        offset = draw(st.sampled_from([0, 0, 1, -7]) | st.integers(-100_000, 100_000))
        pieces.append(Piece(index, tokens[index], first, at, rows, offset))
        at += rows
    rotated = draw(st.sampled_from([head_dim, head_dim, head_dim // 2]))
    frequencies = 1e4 ** (-torch.arange(rotated // 2) / max(1, rotated // 2))
    rotation = KeyRotation(frequencies, draw(st.sampled_from(["half", "interleaved"])))
    placement = Placement(draw(st.permutations(pieces)), name)
    return made, placement, draw(st.sampled_from([rotation, rotation, None])), (kv_heads, at + 2, head_dim), dtype


@SETTINGS
@given(cases())
def test_every_row_is_decoded_and_moved_and_no_other_is_touched(case) -> None:
    made, placement, rotation, shape, dtype = case
    keys, values = placed(kv_placement.place, *case)
    untouched = torch.ones(shape[1], dtype=torch.bool)
    for piece in placement.pieces:
        record = codec_of(placement.codec).decode(made[piece.record], piece.tokens, shape[2], dtype)
        key, value = record[:, :, piece.first : piece.first + piece.rows].unbind(1)
        if rotation is not None and piece.offset:
            key = reposition_keys(key, turn_by(rotation, torch.full((piece.rows,), piece.offset), DEVICE))
        assert is_close(keys[:, piece.start : piece.stop], key)
        assert torch.equal(values[:, piece.start : piece.stop], value)
        untouched[piece.start : piece.stop] = False
    assert bool((keys[:, untouched] == 9).all()) and bool((values[:, untouched] == 9).all())


@SETTINGS
@given(cases(), st.sampled_from([8, 16, 48]))
def test_pages_hold_what_buffers_would(case, page) -> None:
    found, is_untouched = placed_in_pages(kv_placement.place, *case, page)
    assert is_untouched and is_close(found, placed(kv_placement.place, *case))


def test_another_stream_has_tables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not wait for what is uploaded on the first one."""
    placement, rotation, cpu = (
        Placement([Piece(0, 8, 0, 3, 8, 5)]),
        KeyRotation(torch.rand(4), "half"),
        torch.device("cpu"),
    )
    found = []
    for stream in ("loading", "loading", "computing"):
        monkeypatch.setattr(kv_placement, "waits_on", lambda device, stream=stream: stream)
        found.append(
            [placement.tiles(32, cpu), placement.turns(rotation, cpu), placement.moves(rotation, cpu)[0][2].cos]
        )
    for first, again, other in zip(*found, strict=True):
        assert first is again and other is not first and torch.equal(other, first)


def test_what_does_not_fit_is_refused() -> None:
    for wrong in (Piece(0, 9, 4, 0, 6), Piece(0, 9, -1, 0, 3), Piece(0, 9, 0, 0, 0), Piece(0, 9, 0, -1, 3)):
        with pytest.raises(InvalidInputError, match="no such rows of a record of 9 tokens"):
            Placement([wrong])
    with pytest.raises(InvalidInputError, match="unknown codec 'zip'"):
        Placement([], "zip")
    record, buffers = torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 20, 8)
    is_larger = "of 8 tokens is 1152 bytes of torch.float32 on cpu; 2 heads of 8 in torch.float32 and raw are 1024"
    for piece, message in (
        (Piece(0, 8, 0, 0, 8), is_larger),
        (Piece(1, 9, 0, 0, 9), "a piece is of record 1, but there are 1"),
        (Piece(0, 9, 0, 12, 9), "a piece ends at 21, but there are 20 rows"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            operations.place([record], Placement([piece]), *buffers)
    halves = record.to(torch.bfloat16), buffers.to(torch.float16)  # as many bytes
    with pytest.raises(InvalidInputError, match=r"of torch\.bfloat16 on cpu; .* of torch\.float16 on cpu"):
        operations.place([halves[0]], Placement([Piece(0, 9, 0, 0, 9)]), *halves[1])
    pages = torch.zeros(2, 3, 4, 2, 8)
    with pytest.raises(InvalidInputError, match="a piece ends at 9, but there are 8 rows"):
        operations.place([record], Placement([Piece(0, 9, 0, 0, 9)]), *pages, None, torch.tensor([2, 0]))
    record, pages = torch.zeros(2, 2, 9, 16), torch.zeros(2, 3, 16, 2, 16).to(torch.float8_e4m3fn)
    placement, table = Placement([Piece(0, 9, 0, 0, 9)]), torch.tensor([2, 0])
    for wrong in (None, Float8(torch.float8_e5m2, torch.float32)):
        with pytest.raises(InvalidInputError, match=r"pages are in torch\.float8_e4m3fn"):
            operations.place([record], placement, *pages, None, table, wrong)


# ---- the kernel ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def place_kernel():
    pytest.importorskip("triton", reason="Triton is not installed here")
    from cacheblend.core.kernels import kv_placement_triton

    return kv_placement_triton.place


@pytest.fixture(scope="module")
def attend_kernel():
    pytest.importorskip("triton", reason="Triton is not installed here")
    from cacheblend.core.kernels import attention_triton

    return attention_triton.attend_rows


@settings(SETTINGS, max_examples=share(150))
@given(case=cases(), page=st.sampled_from([None, None, 8, 16, 48]))
def test_the_kernel_places_as_pytorch_does_in_pages_too(place_kernel, case, page) -> None:
    compare_placing(case, page)


def test_the_kernel_takes_views_and_every_number_of_eight_bits_and_a_wrong_one_is_found(place_kernel) -> None:
    buffers = torch.zeros(2, 3, 20, 8, device=DEVICE)
    place_kernel([], Placement([]), *buffers)
    assert not buffers.any()
    record = torch.randn(5, 2, 9, 8, device=DEVICE)
    heads = record[1:4]
    turned = torch.zeros(2, 20, 8, 3, device=DEVICE).permute(0, 3, 1, 2)  # a layout of another engine
    place_kernel([heads], Placement([Piece(0, 9, 2, 5, 7)]), *turned)
    compare(torch.equal(turned[0][:, 5:12], heads[:, 0, 2:]) and torch.equal(turned[1][:, 5:12], heads[:, 1, 2:]))
    # numbers of eight bits
    for name, dtype in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):
        numbers = torch.arange(256, dtype=torch.uint8)
        scales = torch.full((2, 4), 0.5, dtype=torch.float16).view(torch.uint8).flatten()
        record = torch.cat([numbers, numbers, scales]).view(1, -1).to(DEVICE)
        found = torch.zeros(2, 1, 4, 64, device=DEVICE)
        place_kernel([record], Placement([Piece(0, 4, 0, 0, 4)], name), *found)
        expected = numbers.view(dtype).float().view(1, 4, 64) * 0.5
        for each in found:
            compare(torch.equal(each.cpu().nan_to_num(7777.0), expected.nan_to_num(7777.0)), (name, each))
    # the check before use
    device, dtype = torch.device(DEVICE), torch.bfloat16

    def unmoved(records, placement, keys, values, rotation=None, *pages):
        kv_placement.place(records, placement, keys, values, None, *pages)

    assert operations.placing_differs(kv_placement.place, kv_placement.place, device, dtype) == ""
    assert operations.placing_differs(place_kernel, kv_placement.place, device, dtype, (1, 16)) == ""
    assert "differs from PyTorch" in operations.placing_differs(unmoved, kv_placement.place, device, dtype)
    assert operations.PLACE.on(torch.device("cpu"), torch.float32).name == "PyTorch"


# ---- compressed records: sizes, what is lost at most, and that a head's bytes are its own ---------------------


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def record_of(
    heads: int, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Keys with a few large channels, as models have them."""
    record = torch.randn(heads, 2, tokens, head_dim, generator=torch.Generator().manual_seed(seed))
    record[:, 0, :, ::7] *= 20
    return record.to(dtype)


def decoded_again(name: str, record: torch.Tensor) -> torch.Tensor:
    codec = codec_of(name)
    _, _, tokens, head_dim = record.shape
    return codec.decode(codec.encode(record), tokens, head_dim, record.dtype)


def largest_errors(name: str, record: torch.Tensor) -> torch.Tensor:
    """What each number may be off by, from the definition: half a step of what shares a scale."""
    numbers = record.float()
    if name == "int8":
        return numbers.abs().amax(-1, keepdim=True) / 127 * 0.51 + 4e-5
    if name == "fp8":
        return numbers.abs() / 16 + numbers.abs().amax(-1, keepdim=True) / 448 * 0.01 + 4e-5
    keys, values = numbers.unbind(1)
    steps = torch.empty_like(keys)
    for start in range(0, keys.shape[1], GROUP):
        rows = keys[:, start : start + GROUP]
        steps[:, start : start + GROUP] = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / 15
    of_values = ((values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)) / 15).expand_as(values)
    return torch.stack([steps, of_values], dim=1) * 0.52 + numbers.abs().amax() * 2e-3 + 4e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200, 256])
def test_what_is_lost_is_bounded_by_the_scale(name: str, tokens: int, dtype: torch.dtype) -> None:
    record = record_of(3, tokens, 32, dtype)
    decoded = decoded_again(name, record)
    assert decoded.dtype == dtype and decoded.shape == record.shape
    slack = {torch.float32: 0.0, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype] * record.float().abs()
    assert bool(((decoded.float() - record.float()).abs() <= largest_errors(name, record) + slack).all())


@given(st.sampled_from(sorted(CODECS)), st.integers(1, 4), st.integers(1, 140), st.integers(1, 70))
@settings(deadline=None)
def test_sizes_are_as_said_and_heads_are_apart(name: str, heads: int, tokens: int, head_dim: int) -> None:
    codec, record = codec_of(name), record_of(heads, tokens, head_dim, torch.bfloat16)
    encoded = codec.encode(record)
    assert encoded.flatten(1).view(torch.uint8).shape == (heads, codec.head_bytes(tokens, head_dim, record.dtype))
    decoded = codec.decode(encoded, tokens, head_dim, record.dtype)
    one = codec.decode(encoded[-1:], tokens, head_dim, record.dtype)
    assert torch.equal(one, decoded[-1:])
    assert torch.equal(codec.encode(record[-1:]), encoded[-1:])
    assert torch.equal(decoded, record) or not codec.is_exact


@pytest.mark.parametrize(("name", "at_most"), [("int8", 0.516), ("fp8", 0.516), ("int4", 0.282)])
def test_numbers_at_the_limits(name: str, at_most: float) -> None:
    for fill in (0.0, 1.0, -3.5, 1e-9, 6e4):
        record = torch.full((2, 2, 70, 16), fill)
        assert decoded_again(name, record) == pytest.approx(record, rel=0.05, abs=1e-4)
    if name != "int4":  # a huge number does not overflow
        assert bool(decoded_again(name, torch.ones(1, 2, 3, 8) * 1e38).isfinite().all())
    for bad in (float("nan"), float("inf")):
        record = record_of(1, 4, 8)
        record[0, 1, 2, 3] = bad
        for each in (name, "raw"):
            with pytest.raises(ModelOverflowError, match=r"NaN is not stored.* range of float32.* bfloat16"):
                codec_of(each).encode(record)
    assert codec_of(name).head_bytes(256, 64, torch.bfloat16) <= at_most * 2 * 256 * 64 * 2  # bytes of bf16
    with pytest.raises(InvalidInputError, match="'zip'; there are raw, int8, fp8, int4"):
        codec_of("zip")


# ---- pages of eight bits: plain PyTorch by the definition, the kernels by plain PyTorch -----------------------


KINDS = st.sampled_from(list(FLOAT8))
FEWER = settings(max_examples=share(25), suppress_health_check=[HealthCheck.too_slow], deadline=None)


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
def test_every_number_becomes_the_byte_that_pytorch_makes_of_it(place_kernel, kind: torch.dtype, scale: float) -> None:
    """Rounded to the nearest even, small ones too; beyond the largest number that one; NaN stays NaN."""
    numbers = as_pages(every_number()[:: 1 if scale == 1.0 else 5])
    blocks = len(numbers)
    float8 = Float8(kind, torch.float32, scale, scale)
    record = numbers.view(1, -1, 64)
    record = torch.stack([record, record.flip(1)], dim=1).contiguous().to(DEVICE)
    tokens = record.shape[2]
    placement = Placement([Piece(0, tokens, 0, 0, tokens)])
    table = torch.arange(blocks, device=DEVICE)
    found = [torch.zeros(2, blocks, 16, 1, 64, device=DEVICE).to(kind) for _ in range(2)]
    for place, pages in zip((place_kernel, kv_placement.place), found, strict=True):
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
def test_every_byte_is_read_exactly(attend_kernel, kind: torch.dtype, dtype: torch.dtype) -> None:
    """A row that sees one key gives its value."""
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = bytes_.view(kind).float()
    bytes_ = bytes_[numbers.isfinite()]
    values = torch.cat([bytes_, torch.zeros(256 - len(bytes_), dtype=torch.uint8)]).view(kind).view(1, 4, 64).to(DEVICE)
    query, keys = torch.zeros(1, 4, 64, dtype=dtype, device=DEVICE), torch.zeros(1, 4, 64, device=DEVICE).to(kind)
    spec, at = AttentionSpec(1.0, window=1), torch.arange(4, device=DEVICE)
    for attend in (attend_kernel, attention.attend_rows):
        compare(torch.equal(attend(query, keys, values, at, spec)[:, 0], values[0].to(dtype)), (kind, dtype))


@FEWER
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
    attend_kernel, kind: Any, dtype: Any, rows: int, length: int, shape: Any, window: Any, softcap: Any, has_sinks: Any,
    page: int, seed: int,
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
    for attend in (attend_kernel, attention.attend_rows):
        out = attend(query, kept[0], kept[1], at, spec, pages[2])
        error = float((out.float() - expected.float()).abs().max())
        compare(error <= ATTENTION_TOLERANCE[dtype], f"off by {error}")


@FEWER
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
    place_kernel, kind: Any, dtype: Any, codec: str, head_dim: int, pairing: Any, offset: int, scales: Any, seed: int
) -> None:
    made = records(codec, [40, 13], 2, head_dim, dtype, seed, DEVICE)
    placement = Placement([Piece(0, 40, 3, 5, 30, offset), Piece(1, 13, 0, 40, 13)], codec)
    rotation = KeyRotation(1e4 ** (-torch.arange(head_dim // 4) / (head_dim // 4)), pairing)
    float8, table = Float8(kind, dtype, *scales), torch.tensor([4, 1, 3, 0], device=DEVICE)
    dense = torch.zeros(2, 2, 64, head_dim, dtype=dtype, device=DEVICE)
    kv_placement.place(made, placement, *dense, rotation)
    expected = [as_bytes(part) for part in float8.encode(dense.unbind())]
    for place in (place_kernel, kv_placement.place):
        pages = torch.zeros(2, 5, 16, 2, head_dim, device=DEVICE).to(kind)
        place(made, placement, *pages, rotation, table, float8)
        for number, part in enumerate(as_bytes(pages)):
            found = part[table].flatten(0, 1).transpose(0, 1)
            apart = (found.int() - expected[number].int()).abs()
            is_tie = place is place_kernel and bool(offset or codec != "raw")  # a sum in another order
            compare(int(apart.max()) <= is_tie and float((apart > 0).float().mean()) < 0.01, (number, apart.max()))
            assert not part[2].any()  # a block of nobody


def test_a_kernel_that_differs_in_eight_bits_serves_other_caches_only(attend_kernel, place_kernel) -> None:
    device, dtype = torch.device(DEVICE), torch.bfloat16

    def without_bytes(query: Any, keys: Any, values: Any, *rest: Any) -> Any:
        if keys.dtype is torch.float8_e5m2:
            keys = as_bytes(keys).view(torch.float8_e4m3fn)
        return attention.attend_rows(query, keys, values, *rest)

    def without_scales(*given: Any) -> None:
        *others, float8 = given
        kv_placement.place(*others, float8 and Float8(float8.kind, float8.dtype))

    attends, places = operations.float8_attention_differs, operations.float8_placing_differs
    assert attends(attend_kernel, attention.attend_rows, device, dtype, [HeadShape(2, 1, 64)]) == ""
    assert places(place_kernel, kv_placement.place, device, dtype, (1, 16)) == ""
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
    usual = operations.ATTEND_ROWS, operations.ATTEND_ASKING, operations.PLACE, operations.KV_DEVIATION
    for operation in (*usual, *eight):
        served: Served[Any] = Served(operation._plain, "ours")
        monkeypatch.setattr(operation, "_served", {(device, torch.bfloat16): served})
        monkeypatch.setattr(operation, "confirm", lambda *args, name=operation.name: asked.append(name))
    monkeypatch.setattr(operations, "_has_kernels", lambda *_: True)
    shape = HeadShape(4, 2, 64)
    operations.serve(device, torch.bfloat16, [(shape, None)])
    always = ["attention of rows", "placing", "attention of rows that ask", "deviation"]
    assert asked == always
    operations.serve(device, torch.bfloat16, [(shape, None)], float8=True)
    assert asked[4:] == [*always, "attention in eight bits", "placing in eight bits"]
    assert operations.is_served(device, torch.bfloat16, shape, float8=True)
    plain: Served[Any] = Served(kv_placement.place, PLAIN)
    monkeypatch.setattr(operations.PLACE_FLOAT8, "_served", {(device, torch.bfloat16): plain})
    assert operations.is_served(device, torch.bfloat16, shape)
    assert not operations.is_served(device, torch.bfloat16, shape, float8=True)
