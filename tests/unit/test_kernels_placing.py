"""Placing: plain PyTorch against decoding and turning row by row, and the kernel against plain PyTorch."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels import kv_placement, operations
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.rope import KeyRotation, reposition_keys, turn_by
from cacheblend.core.plan.codec import CODECS, codec_of
from campaign import SHARE, share
from kernel_cases import STEP, compare, compare_placing, is_close, placed, placed_in_pages, records

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MANY = 2000 if SHARE == 1 else 500
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


# ---- the kernel ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place():
    pytest.importorskip("triton", reason="Triton is not installed here")
    from cacheblend.core.kernels import kv_placement_triton

    return kv_placement_triton.place


@pytest.mark.parametrize("pages", [False, True])
@SETTINGS
@given(case=cases(), page=st.sampled_from([8, 16, 48]))
def test_the_kernel_places_as_pytorch_does_in_pages_too(place, pages, case, page) -> None:
    compare_placing(case, page if pages else None)


def test_the_kernel_takes_views_and_no_pieces(place) -> None:
    buffers = torch.zeros(2, 3, 20, 8, device=DEVICE)
    place([], Placement([]), *buffers)
    assert not buffers.any()
    record = torch.randn(5, 2, 9, 8, device=DEVICE)
    heads = record[1:4]
    turned = torch.zeros(2, 20, 8, 3, device=DEVICE).permute(0, 3, 1, 2)  # a layout of another engine
    place([heads], Placement([Piece(0, 9, 2, 5, 7)]), *turned)
    compare(torch.equal(turned[0][:, 5:12], heads[:, 0, 2:]) and torch.equal(turned[1][:, 5:12], heads[:, 1, 2:]))


def test_every_number_of_eight_bits_is_decoded(place) -> None:
    for name, dtype in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):
        numbers = torch.arange(256, dtype=torch.uint8)
        scales = torch.full((2, 4), 0.5, dtype=torch.float16).view(torch.uint8).flatten()
        record = torch.cat([numbers, numbers, scales]).view(1, -1).to(DEVICE)
        found = torch.zeros(2, 1, 4, 64, device=DEVICE)
        place([record], Placement([Piece(0, 4, 0, 0, 4)], name), *found)
        expected = numbers.view(dtype).float().view(1, 4, 64) * 0.5
        for each in found:
            compare(torch.equal(each.cpu().nan_to_num(7777.0), expected.nan_to_num(7777.0)), (name, each))


def test_the_check_before_use_finds_a_wrong_kernel(place) -> None:
    device, dtype = torch.device(DEVICE), torch.bfloat16

    def unmoved(records, placement, keys, values, rotation=None, *pages):
        kv_placement.place(records, placement, keys, values, None, *pages)

    assert operations.placing_differs(kv_placement.place, kv_placement.place, device, dtype) == ""
    assert operations.placing_differs(place, kv_placement.place, device, dtype, (1, 16)) == ""
    assert "differs from PyTorch" in operations.placing_differs(unmoved, kv_placement.place, device, dtype)
    assert operations.PLACE.on(torch.device("cpu"), torch.float32).name == "PyTorch"
