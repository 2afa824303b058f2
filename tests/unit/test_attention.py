"""Attention of rows against the dense oracle: plain PyTorch on both routes, weights for those who look at them, and the
kernel, under Triton's interpreter or on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels import attention
from cacheblend.core.kernels.attention import AttentionSpec, attend_rows, attention_weights
from campaign import SHARE, share
from kernel_cases import ATTENTION_TOLERANCE, compare, compare_asking, compare_attention, compare_deviation
from pretended_device import Pretended, PretendedDevice, plain
from reference_attention import dense_attention

pytestmark = pytest.mark.usefixtures("surroundings")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}
SPECS = {
    "plain": {},
    "window": {"window": 40},
    "window of one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all": {"window": 150, "softcap": 5.0, "sinks": True},
}


def _inputs(heads, kv_heads, head_dim, length, positions, dtype=torch.float32, device="cpu"):
    """Query, keys, values, positions; everything behind the last position is NaN."""
    generator = torch.Generator().manual_seed(length)
    shapes = (len(positions), heads, head_dim), (kv_heads, length, head_dim), (kv_heads, length, head_dim)
    query, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    keys[:, positions[-1] + 1 :] = torch.nan
    values[:, positions[-1] + 1 :] = torch.nan
    query, keys, values = (tensor.to(device, dtype) for tensor in (query, keys, values))
    return query.transpose(0, 1), keys, values, torch.tensor(positions, device=device)


def _spec(heads, scaling=0.3, sinks=False, device="cpu", **rest):
    logits = torch.linspace(-2, 3, heads, device=device) if sinks else None
    return AttentionSpec(scaling, sinks=logits, **rest)


def _check(inputs, spec, tolerance=None, attend=attend_rows):
    query = inputs[0]
    result = attend(*inputs, spec)
    assert result.dtype == query.dtype
    assert result.shape == (query.shape[1], query.shape[0], query.shape[2])
    error = (result.float() - dense_attention(*inputs, spec)).abs().max().item()
    assert error <= (tolerance or TOLERANCE[query.dtype])


def _scattered(rows, length):
    return torch.randperm(length, generator=torch.Generator().manual_seed(rows))[:rows].sort().values.tolist()


ROWS = {
    "scattered": _scattered(90, 600),
    "contiguous tail": list(range(500, 600)),
    "all": list(range(300)),
    "one row": [599],
    "first row": [0],
    "gap": [0, 1, 2, *range(560, 600)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [14, 7, 2])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", SPECS)
def test_equals_dense_attention(kind, rows, kv_heads, dtype, device):
    inputs = _inputs(14, kv_heads, 16, 640, ROWS[rows], dtype, device)
    _check(inputs, _spec(14, device=device, **SPECS[kind]))


def _by_tiles(query, keys, values, positions, spec):
    return attention.attend_tiles(query, keys, values, positions, positions.tolist(), spec)


@pytest.mark.parametrize("kind", SPECS)
def test_every_tile_boundary(kind, monkeypatch):
    """Small tiles, so that lengths, windows and groups fall on, before and after every boundary."""
    monkeypatch.setattr(attention, "_MIN_GROUP_ROWS", 4)
    monkeypatch.setattr(attention, "_MAX_GROUP_ROWS", 4)
    monkeypatch.setattr(attention, "_MIN_TILE_KEYS", 8)
    monkeypatch.setattr(attention, "_TILE_SCORES", 4 * 4 * 8)
    monkeypatch.setattr(attention, "_END_STEP", 4)
    for length, step in itertools.product(range(1, 27), (1, 2, 5)):
        positions = list(range((length - 1) % step, length, step))
        for window in {SPECS[kind].get("window"), *((3, 8, 9) if "window" in SPECS[kind] else ())}:
            spec = _spec(4, **{**SPECS[kind], "window": window})
            _check(_inputs(4, 2, 8, length + 3, positions), spec, attend=_by_tiles)


@pytest.mark.parametrize("length", [127, 128, 129, 4095, 4096, 4097, 4300])
def test_real_tile_boundaries(length):
    positions = [*range(0, length - 1, 211), length - 1]
    for dtype, spec in itertools.product((torch.float32, torch.bfloat16), (_spec(2), _spec(2, window=4000))):
        _check(_inputs(2, 1, 16, length + 2, positions, dtype), spec, attend=_by_tiles)


@pytest.mark.parametrize("way", ["_sdpa_side_by_side", "_sdpa_folded"])
@pytest.mark.parametrize("kind", ["plain", "window", "window of one"])
@pytest.mark.parametrize("kv_heads", [14, 7, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_sdpa_in_both_layouts_without_a_device(rows, kv_heads, kind, way, monkeypatch):
    """That of other devices runs on a CPU too: its masks and slices are tested everywhere."""
    monkeypatch.setattr(attention, "_SDPA_CPU_ROWS", 37)
    monkeypatch.setattr(attention, "_sdpa_side_by_side", getattr(attention, way))

    def attend(query, keys, values, positions, spec):
        return attention._attend_sdpa(query, keys, values, positions, positions.tolist(), spec)

    _check(_inputs(14, kv_heads, 16, 640, ROWS[rows]), _spec(14, **SPECS[kind]), attend=attend)


def test_a_device_without_the_kernel_is_asked_for_no_plan_of_cudnns(monkeypatch):
    """Which plans each shape anew; the backends that the process had chosen are those that it has afterwards."""
    real, used = F.scaled_dot_product_attention, []

    def noted(*args, **options):
        used.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
        return plain(real(*map(plain, args), **{n: plain(each) for n, each in options.items()})).as_subclass(Pretended)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for positions, window in ((range(64), None), ([3, 9, 63], None), ([3, 9, 63], 7)):
        query, keys, values, at = inputs = _inputs(6, 2, 16, 64, [*positions])
        with PretendedDevice():
            there = [each.to("cuda") for each in inputs]
            out = attention.attend_rows(*there, _spec(6, window=window))
            last = attention.attend_last(there[0][:, -1], *there[1:3], _spec(6, window=window))
        expected = dense_attention(query, keys, values, at, _spec(6, window=window))
        assert torch.allclose(plain(out), expected, atol=1e-5) and torch.allclose(plain(last), expected[-1], atol=1e-5)
    assert len(used) == 6 and set(used) == {(False, True)} and torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads", "by_gqa"),
    [
        (torch.bfloat16, 64, 2, True),
        (torch.bfloat16, 512, 2, False),
        (torch.float32, 64, 2, False),
        (torch.float32, 64, 6, False),
        (torch.bfloat16, 576, 1, False),
    ],
)
def test_a_device_is_asked_for_grouped_queries_only_where_flash_attention_takes_them(
    dtype, head_dim, kv_heads, by_gqa, monkeypatch
):
    """Of all rows of a prompt; elsewhere PyTorch would materialise every score."""
    real, grouped = F.scaled_dot_product_attention, []

    def noted(*args, **options):
        grouped.append(options.get("enable_gqa", False))
        return real(*map(plain, args), **{n: plain(each) for n, each in options.items()}).as_subclass(Pretended)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    query, keys, values, at = inputs = _inputs(6, kv_heads, head_dim, 64, [*range(64)], dtype)
    expected = dense_attention(query, keys, values, at, _spec(6))
    for has_flash in (True, False):  # from compute capability 8.0 on
        monkeypatch.setattr(attention, "_has_flash", lambda device, has_flash=has_flash: has_flash)
        with PretendedDevice():
            out = attention.attend_rows(*(each.to("cuda") for each in inputs), _spec(6))
        assert torch.allclose(plain(out).float(), expected.float(), atol=2e-2)
        assert {*grouped} == {by_gqa and has_flash}
        grouped.clear()


@pytest.mark.parametrize("order", itertools.permutations(range(4)), ids=str)
@pytest.mark.parametrize("kind", ["plain", "window"])
def test_the_strides_of_sdpas_output_are_a_backends_choice(kind, order, monkeypatch):
    sdpa, back = F.scaled_dot_product_attention, [order.index(dim) for dim in range(4)]

    def as_a_backend_may(*args, **options):
        return sdpa(*args, **options).permute(order).contiguous().permute(back)

    monkeypatch.setattr(F, "scaled_dot_product_attention", as_a_backend_may)
    spec = _spec(6, **SPECS[kind])
    for way, positions in itertools.product(("_sdpa_side_by_side", "_sdpa_folded"), ([*range(64)], [3, 9, 63])):
        monkeypatch.setattr(attention, "_sdpa_side_by_side", getattr(attention, way))
        query, keys, values, at = inputs = _inputs(6, 2, 16, 64, positions)
        _check(inputs, spec)
        last = attention.attend_last(query[:, -1], keys, values, spec)
        assert torch.allclose(last, dense_attention(query, keys, values, at, spec)[-1].to(last.dtype), atol=1e-5)


REACHING = [range(4200, 4821, 20), range(4070, 4160), range(4590, 4700)]
"""Groups that reach over the tile boundary at 4096: a window hides the first span from some of their rows."""


@pytest.mark.parametrize(
    "positions,window,query_scale,common_key",
    [
        *((range(1200), None, *each) for each in [(1, 0), (1.5, 0), (3, 0), (20, 0), (1, 10), (3, 10)]),
        *itertools.product(REACHING, [512, 40, None], [4, 11, 21], [0]),
        *itertools.product(REACHING, [512, 40, None], [4], [10]),
    ],
)
def test_bf16_is_as_good_as_sdpa(positions, window, query_scale, common_key):
    """Large logits (Qwen2's key bias makes such) must not lose what a rounded product loses."""
    query, keys, values, at = _inputs(4, 2, 64, positions[-1] + 1, list(positions))
    keys += common_key * torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(1))
    query, keys, values = ((query * query_scale).bfloat16(), keys.bfloat16(), values.bfloat16())
    spec = AttentionSpec(0.125, window=window)
    behind = at[:, None] - torch.arange(keys.shape[1])
    mask = (behind >= 0) & (behind < (window or keys.shape[1]))
    wide = (tensor.repeat_interleave(query.shape[0] // keys.shape[0], 0)[None] for tensor in (keys, values))
    sdpa = F.scaled_dot_product_attention(query[None], *wide, attn_mask=mask, scale=0.125)[0].transpose(0, 1)
    exact = dense_attention(query, keys, values, at, spec)
    ours = attend_rows(query, keys, values, at, spec)
    ours, sdpa = ((result - exact).square().mean(-1) for result in (ours, sdpa))  # [rows, heads]
    assert ours.max() <= 2.5**2 * sdpa.max()
    assert ours.mean() <= 2.0**2 * sdpa.mean()


@pytest.mark.parametrize("is_told", [True, False, None])
@pytest.mark.parametrize("rows", [127, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_many_rows_of_bf16_go_by_sdpa_where_the_processor_has_amx(is_told, rows, dtype, monkeypatch):
    """Both ways are right on any processor; only the faster differs. `None` is a PyTorch that does not tell."""
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    if is_told is not None:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: is_told, raising=False)
    tiled, attend_tiles = [], attention.attend_tiles
    monkeypatch.setattr(attention, "attend_tiles", lambda *inputs: tiled.append(1) or attend_tiles(*inputs))
    positions = _scattered(rows, 400)
    for spec in (_spec(4), _spec(4, window=40)):
        _check(_inputs(4, 2, 16, 410, positions, dtype), spec)
    is_fast = dtype == torch.float32 or (dtype == torch.bfloat16 and rows == 128 and bool(is_told))
    assert len(tiled) == (0 if is_fast else 2)


def test_extreme_scores_stay_finite_and_inputs_as_they_are():
    query, keys, values, at = _inputs(4, 2, 64, 700, list(range(700)), torch.bfloat16)
    keys[:, :] = -keys.abs() * 30
    for sign in (1, -1):
        result = attend_rows(query.abs() * 30 * sign, keys, values, at, AttentionSpec(1.0))
        assert result.isfinite().all()
    # one key, and no rows
    query, keys, values, at = _inputs(4, 2, 8, 1, [0])
    result = attend_rows(query, keys, values, at, AttentionSpec(1.0))
    torch.testing.assert_close(result[0], values[:, 0].repeat_interleave(2, 0))
    assert attend_rows(query[:, :0], keys, values, at[:0], AttentionSpec(1.0)).shape == (0, 4, 8)
    inputs = _inputs(4, 2, 8, 50, list(range(3, 50, 4)))
    before = [tensor.clone() for tensor in inputs]
    attend_rows(*inputs, _spec(4, **SPECS["all"]))
    for tensor, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "query,keys,values,positions,message",
    [
        ((4, 3, 8), (2, 9, 8), (2, 9, 8), [1, 2], "positions"),
        ((4, 2, 8), (2, 9, 8), (2, 8, 8), [1, 2], "values"),
        ((4, 2, 8), (2, 9, 16), (2, 9, 16), [1, 2], "keys"),
        ((5, 2, 8), (2, 9, 8), (2, 9, 8), [1, 2], "5 query heads are not a multiple of 2"),
        ((4, 2, 8), (2, 9, 8), (2, 9, 8), [1, 9], "position 9, but there are 9 keys"),
    ],
)
def test_refuses_what_does_not_fit(query, keys, values, positions, message):
    with pytest.raises(InvalidInputError, match=message):
        attend_rows(
            torch.zeros(query), torch.zeros(keys), torch.zeros(values), torch.tensor(positions), AttentionSpec(1.0)
        )


# ---- weights of few rows ----------------------------------------------------------------------------------


WEIGHED = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=9),
    "softcap": AttentionSpec(0.3, softcap=2.0),
    "sinks": AttentionSpec(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all of them": AttentionSpec(0.3, window=9, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("spec", WEIGHED)
def test_weights_mix_values_as_dense_attention_does(spec: str, kv_heads: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([12, 13, 29, 30])
    query, keys, values = (
        torch.randn(heads, n, 8, generator=generator).to(dtype) for heads, n in ((4, 4), (kv_heads, 31), (kv_heads, 31))
    )
    weights = attention_weights(query, keys, positions, torch.arange(31), WEIGHED[spec])
    assert weights.shape == (4, 4, 31) and weights.dtype == torch.float32
    mixed = torch.bmm(weights, values.float().repeat_interleave(4 // kv_heads, 0)).transpose(0, 1)
    expected = dense_attention(query, keys, values, positions, WEIGHED[spec])
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    assert (weights.sum(-1) < 1 - 1e-4).all() == (WEIGHED[spec].sinks is not None)


def test_keys_that_are_left_out_get_nothing_and_the_rest_gets_it_all() -> None:
    query, keys = torch.randn(2, 2, 8), torch.randn(2, 20, 8)
    at = torch.tensor([0, 1, 5, 6, 18, 19])
    positions = torch.tensor([18, 19])
    some = attention_weights(query, keys[:, at], positions, at, WEIGHED["plain"])
    hidden = torch.ones(20, dtype=torch.bool)
    hidden[at] = False
    every = attention_weights(query, keys, positions, torch.arange(20), WEIGHED["plain"])
    every[..., hidden] = 0
    torch.testing.assert_close(some, (every / every.sum(-1, keepdim=True))[..., at])
    assert some[:, 0, -1].eq(0).all()  # row 18 does not see key 19


@pytest.mark.parametrize("bound", [1, 100, 1 << 24])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 3), (5, 1)])
def test_groups_cover_all_heads(heads: int, kv_heads: int, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MAX_WEIGHTS", bound)
    groups = attention._parts(torch.zeros(heads, 3, 4), 5, kv_heads)
    covered = [(head, head // (heads // kv_heads)) for head in range(heads)]
    assert [h for part, _ in groups for h in range(heads)[part]] == [head for head, _ in covered]
    for part, kv_part in groups:
        assert sorted({kv for head, kv in covered if head in range(heads)[part]}) == list(range(kv_heads)[kv_part])
        assert len(range(heads)[part]) * 3 * 5 <= max(bound, heads // kv_heads * 15)


# ---- the kernel -------------------------------------------------------------------------------------------


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_SCORES = 1_000_000 if SHARE == 1 else 100_000  # the interpreter takes about a second for the former


@pytest.fixture(scope="module")
def kernel():
    pytest.importorskip("triton", reason="Triton is not installed here")
    from cacheblend.core.kernels import attention_triton

    return attention_triton.attend_rows


@st.composite
def cases(draw):
    """(query, keys, values, positions, spec) of any shape that models have, and splits of the keys."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    head_dim = draw(st.sampled_from([8, 16, 64, 96, 128, 256]))
    length = draw(st.integers(1, 200) | st.integers(1, 200) | st.integers(1, 200) | st.integers(1, 2000))
    most = max(1, MAX_SCORES // (kv_heads * group * length))
    rows = min(length, most, draw(st.integers(1, 20) | st.integers(1, 300)))
    dtype = draw(st.sampled_from(list(ATTENTION_TOLERANCE)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        positions = torch.randperm(length, generator=random)[:rows].sort().values
    else:  # the end of the prompt
        positions = torch.arange(length - rows, length)
    shapes = (kv_heads * group, rows, head_dim), (kv_heads, length, head_dim), (kv_heads, length, head_dim)
    query, keys, values = (torch.randn(shape, generator=random).to(DEVICE, dtype) for shape in shapes)
    sinks = torch.randn(kv_heads * group, generator=random).to(DEVICE) if draw(st.booleans()) else None
    spec = AttentionSpec(
        draw(st.sampled_from([0.05, head_dim**-0.5, 0.5])),
        draw(st.sampled_from([None, None, 1, 40, 500])),
        draw(st.sampled_from([None, None, 5.0, 30.0])),
        sinks,
    )
    return query, keys, values, positions.to(DEVICE), spec, draw(st.sampled_from([None, None, 1, 2, 7]))


@settings(max_examples=share(60), suppress_health_check=[*HealthCheck])
@given(cases(), st.sampled_from([None, None, 16, 32, 48]))
def test_the_kernel_over_dense_buffers_and_a_paged_cache(kernel, case, page) -> None:
    compare_attention(*case, page=page)


@settings(max_examples=share(40), suppress_health_check=[*HealthCheck])
@given(cases(), st.data())
def test_the_kernel_of_rows_that_ask_and_what_keys_receive(kernel, case, data) -> None:
    """Over keys with gaps between their positions; one row, or several."""
    query, keys, values, at, spec, _ = case
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    gaps = torch.randint(1, data.draw(st.sampled_from([1, 3, 50])) + 1, (keys.shape[1],), generator=random)
    key_positions = gaps.cumsum(0).to(DEVICE)
    if data.draw(st.sampled_from([True, False, False, False])):
        query, at = query[:, -1:], at[-1:]
    if data.draw(st.booleans()):  # as a layer's projection leaves it, and with keys as a cache's rows may be
        query, keys = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (query, keys))
    compare_asking(query, keys, values, key_positions[at], key_positions, spec)


@pytest.mark.parametrize(("heads", "length"), [(1, 80), (80, 3)])
def test_the_kernels_count_rows_and_heads_that_lie_beyond_32_bits(kernel, heads: int, length: int) -> None:
    """Of memory that is given when it is written, so that little is."""
    apart = 1 << 25
    lazy = torch.empty(apart * 80, dtype=torch.bfloat16, device=DEVICE)
    strides = (64, apart, 1) if heads == 1 else (apart, 64, 1)
    keys, values = (lazy[begin:].as_strided((heads, length, 16), strides) for begin in (0, 32))
    for each in (keys, values):
        each.copy_(torch.randn(heads, length, 16))
    positions = torch.tensor([1, length - 1], device=DEVICE)
    query, *fresh = (torch.randn(heads, 2, 16).to(DEVICE, torch.bfloat16) for _ in range(3))
    compare_attention(query, keys, values, positions, AttentionSpec(0.25))
    compare_deviation(fresh, [keys, values], "kv", positions)


def test_the_kernel_reads_nothing_behind_the_last_row_and_takes_views_and_no_rows(kernel) -> None:
    query, keys, values = torch.randn(4, 3, 64), torch.randn(2, 200, 64), torch.randn(2, 200, 64)
    positions = torch.tensor([5, 70, 130])
    expected = dense_attention(query, keys, values, positions, AttentionSpec(0.125))
    keys[:, 131:] = values[:, 131:] = torch.nan
    moved = (each.to(DEVICE) for each in (query, keys, values, positions))
    compare(torch.allclose(kernel(*moved, AttentionSpec(0.125)).cpu(), expected, atol=2e-5))
    query = torch.randn(3, 4, 64, device=DEVICE).transpose(0, 1)  # as a layer's projection leaves it
    keys, values = (torch.randn(50, 2, 64, device=DEVICE).transpose(0, 1) for _ in range(2))
    compare_attention(query, keys, values, torch.tensor([1, 2, 49], device=DEVICE), AttentionSpec(0.1))
    empty = kernel(query[:, :0], keys, values, torch.empty(0, dtype=torch.int64), AttentionSpec(1))
    assert empty.shape == (0, 4, 64)
