"""Kernels beside their slow counterparts on small inputs: what differs, before one serves (`registry`).

differs(kernel, plain, device, dtype, ...) -> "" if they agree, else by how much and where
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, get_args

import torch

from cacheblend.core.kernels.attention_spec import AttentionSpec, HeadShape
from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.kernels.float8 import FLOAT8, Float8
from cacheblend.core.kernels.kv_placement import Piece, Placement
from cacheblend.core.kernels.rope import KeyRotation, Pairing
from cacheblend.core.plan.codec import CODECS

Kernel = Callable[..., Any]
"""As its slow counterpart."""

_PAGE = 16  # tokens of a block in checks
_CHECKED_KEYS = 1024  # of a window in checks; a wider one is compiled, and hides nothing
_CHECKED = (HeadShape(8, 2, 64), HeadShape(8, 2, 128, 40))
_SUM_TOLERANCE = 1e-4  # of fp32 sums in another order
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of numbers around 1: a few steps of the type
_STEPS = {torch.float8_e4m3fn: 0.13, torch.float8_e5m2: 0.26}  # by the number: one, where it lies between two


def attention_differs(
    kernel: Kernel,
    plain: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[HeadShape] = _CHECKED,
    kind: torch.dtype | None = None,
) -> str:
    """Compares scattered rows with windows, caps and sinks, over dense buffers and over pages; in fp32 on the host's
    generator, so that it is the same everywhere.

    Args:
        kind: of keys and values, one of `FLOAT8`; None: the query's.
    """
    draw = torch.Generator().manual_seed(0)
    for number, shape in enumerate(shapes):
        length = 300 + min(shape.window or 0, _CHECKED_KEYS)
        sizes = [(shape.heads, 37), (shape.kv_heads, length), (shape.kv_heads, length)]
        query, keys, values = (torch.randn(*size, shape.head_dim, generator=draw).to(device, dtype) for size in sizes)
        positions = torch.randperm(length, generator=draw)[:37].sort().values.to(device)
        sinks = torch.randn(shape.heads, generator=draw).to(device) if number % 2 else None
        spec = AttentionSpec(shape.head_dim**-0.5, shape.window, 20.0 if number % 2 else None, sinks)
        if kind is not None:
            keys, values = keys.to(kind).to(dtype), values.to(kind).to(dtype)
        expected = plain(query, keys, values, positions, spec).float()
        table = torch.arange(-(-length // _PAGE)).flip(0).to(device)
        pages = [_in_pages(each).to(kind or dtype) for each in (keys, values)]
        found = {
            "": kernel(query, keys.to(kind or dtype), values.to(kind or dtype), positions, spec),
            ", in pages": kernel(query, pages[0], pages[1], positions, spec, table),
        }
        for form, each in found.items():
            error = float((each.float() - expected).abs().max())
            if not error <= TOLERANCE[dtype]:
                where = f"head_dim {shape.head_dim}{form}{_in_kind(kind)}"
                return f"differs from PyTorch by {error:.2g} ({where}), more than {TOLERANCE[dtype]}"
    return ""


def _in_float8(differs: Callable[..., str]) -> Callable[..., str]:
    """The same comparison in each kind of eight bits."""

    def differs_in_some(*args: Any) -> str:
        found = (differs(*args, kind=kind) for kind in FLOAT8)
        return next((reason for reason in found if reason), "")

    return differs_in_some


def _in_kind(kind: torch.dtype | None) -> str:
    return "" if kind is None else f", {kind}"


def _in_pages(rows: torch.Tensor) -> torch.Tensor:
    """[kv_heads, length, head_dim] as a paged cache whose blocks are in the opposite order."""
    kv_heads, length, head_dim = rows.shape
    blocks = -(-length // _PAGE)
    padded = rows.new_zeros(kv_heads, blocks * _PAGE, head_dim)
    padded[:, :length] = rows
    return padded.view(kv_heads, blocks, _PAGE, head_dim).permute(1, 2, 0, 3).flip(0).contiguous()


def placing_differs(
    kernel: Kernel,
    plain: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int] = (2, 64),
    kind: torch.dtype | None = None,
) -> str:
    """Compares every codec and pairing, with keys that are moved and not, in dense buffers and in pages.

    Args:
        heads: how many, and their dimensions; three quarters of them are rotated.
        kind: of the pages, one of `FLOAT8`, with scales; None: dense buffers and pages in `dtype`.
    """
    float8 = None if kind is None else Float8(kind, dtype, 0.037, 0.3)
    forms, tolerance = ((False, True), TOLERANCE[dtype]) if kind is None else ((True,), _STEPS[kind])
    draw, (kv_heads, head_dim) = torch.Generator().manual_seed(0), heads
    drawn = [torch.randn(kv_heads, 2, tokens, head_dim, generator=draw).to(dtype) for tokens in (70, 33)]
    pieces = [Piece(0, 70, 5, 3, 60, -2), Piece(1, 33, 0, 80, 33, 4711), Piece(1, 33, 1, 70, 5)]
    pairs = max(1, head_dim * 3 // 8)
    frequencies = 1e4 ** (-torch.arange(pairs) / pairs)
    table = torch.randperm(10, generator=draw).to(device)
    for (name, codec), pairing, in_pages in product(CODECS.items(), get_args(Pairing), forms):
        records = [codec.encode(record).to(device) for record in drawn]
        rotation, placement = KeyRotation(frequencies, pairing), Placement(pieces, name)
        shape = (10, 16, kv_heads, head_dim) if in_pages else (kv_heads, 160, head_dim)
        placed = torch.zeros(2, 2, *shape, device=device, dtype=dtype).to(kind or dtype)
        for each, (keys, values) in zip((kernel, plain), placed, strict=True):
            each(records, placement, keys, values, rotation, table if in_pages else None, float8)
        found, expected = placed.float() if float8 is None else (torch.stack(float8.decode(p)).float() for p in placed)
        errors = (found - expected).abs()
        error = float((errors if float8 is None else errors / expected.abs().clamp(min=0.01)).max())
        if not error <= tolerance:
            where = f"{name}, {pairing}{_in_kind(kind)}"
            return f"differs from PyTorch by {error:.2g} ({where}), more than {tolerance}"
    return ""


def deviation_differs(kernel: Kernel, plain: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    """Compares scattered rows, by each measure."""
    draw = torch.Generator().manual_seed(0)
    fresh = torch.randn(2, 3, 37, 96, generator=draw).to(device, dtype).unbind()
    loaded = torch.randn(2, 3, 300, 96, generator=draw).to(device, dtype).unbind()
    positions = torch.randperm(300, generator=draw)[:37].to(device)
    for measure in get_args(Measure):
        found, expected = (each(fresh, loaded, measure, positions) for each in (kernel, plain))
        error = float(((found - expected).abs() / expected).max())
        if not error <= _SUM_TOLERANCE:
            return f"differs from PyTorch by {error:.2g} of the sum ({measure}), more than {_SUM_TOLERANCE}"
    return ""


float8_attention_differs, float8_placing_differs = _in_float8(attention_differs), _in_float8(placing_differs)
