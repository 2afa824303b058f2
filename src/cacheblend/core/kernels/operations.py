"""The operations, each served by whatever is fastest and right on its tensors' device."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Protocol, get_args

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels import attention, deviation, placing
from cacheblend.core.kernels.attention_spec import AttentionSpec, HeadShape, check_shapes
from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.kernels.placing import Piece, Placement, check_records
from cacheblend.core.kernels.registry import Kernel, Operation, Served
from cacheblend.core.kernels.rope import KeyRotation, Pairing
from cacheblend.core.plan.codec import CODECS


class AttendRows(Protocol):
    """See `attention.attend_rows`."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        spec: AttentionSpec,
        block_table: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """[rows, heads, head_dim]."""
        ...


Place = Callable[
    [Sequence[torch.Tensor], Placement, torch.Tensor, torch.Tensor, KeyRotation | None, torch.Tensor | None], None
]
Deviation = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Measure, torch.Tensor | None], torch.Tensor]

_MAX_HEAD_DIM = 256  # of kernels: wider tiles do not fit
_PAGE = 16  # tokens of a block in checks
_CHECKED_KEYS = 1024  # of a window in checks; a wider one is compiled, and hides nothing
_CHECKED = (HeadShape(8, 2, 64), HeadShape(8, 2, 128, 40))
_SUM_TOLERANCE = 1e-4  # of fp32 sums in another order
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of numbers around 1: a few steps of the type


def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    spec: AttentionSpec,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of some rows of a prompt over its keys; see `attention.attend_rows`.

    A kernel does not wait for the device, so it cannot check that positions are below the keys' length, nor that blocks
    of `block_table` are in the cache: a row behind the keys sees all of them.

    Raises:
        InvalidInputError: the shapes do not fit together.
    """
    check_shapes(query, keys, values, positions, is_paged=block_table is not None)
    if query.shape[2] > _MAX_HEAD_DIM:
        return attention.attend_rows(query, keys, values, positions, spec, block_table)
    return ATTEND_ROWS.on(query.device, query.dtype).call(query, keys, values, positions, spec, block_table)


def attend_last(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Attention of a sequence's last row over all its keys, [heads, head_dim]; see `attention.attend_last`.

    By our kernel where one serves: a library's may make a plan for each length, and so for each token that is decoded.
    """
    served = ATTEND_ROWS.on(query.device, query.dtype)
    if not served.is_kernel or query.shape[-1] > _MAX_HEAD_DIM:
        return attention.attend_last(query, keys, values, spec)
    position = torch.full((1,), keys.shape[1] - 1, dtype=torch.int64, device=query.device)  # filled on the device
    return served.call(query[:, None], keys, values, position, spec)[0]


def place(
    records: Sequence[torch.Tensor],
    placement: Placement,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotation: KeyRotation | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    """Writes stored records into a layer's buffers, keys at their new positions; see `placing.place`.

    Does not wait for the device, so it cannot check that blocks of `block_table` are in the cache.

    Raises:
        InvalidInputError: see `placing.check_records`.
    """
    if block_table is None:
        kv_heads, length, head_dim = keys.shape
    else:
        page, kv_heads, head_dim = keys.shape[1:]
        length = page * len(block_table)
    check_records(records, placement, keys, kv_heads, length)
    if head_dim > _MAX_HEAD_DIM or head_dim % 4:
        placing.place(records, placement, keys, values, rotation, block_table)
    else:
        PLACE.on(keys.device, keys.dtype).call(records, placement, keys, values, rotation, block_table)


def kv_deviation(
    fresh: Sequence[torch.Tensor],
    loaded: Sequence[torch.Tensor],
    measure: Measure = "kv",
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Squared distance of fresh and loaded rows, [rows] fp32; see `deviation.kv_deviation`.

    Raises:
        InvalidInputError: the shapes do not fit together.
    """
    kv_heads, rows, head_dim = fresh[0].shape
    asked = loaded[0].shape[1] if positions is None else len(positions)
    if loaded[0].shape[::2] != (kv_heads, head_dim) or asked != rows:
        raise InvalidInputError(f"{list(fresh[0].shape)} fresh rows, {list(loaded[0].shape)} loaded, {asked} compared")
    serves: Deviation = deviation.kv_deviation
    if head_dim <= _MAX_HEAD_DIM:
        serves = KV_DEVIATION.on(fresh[0].device, fresh[0].dtype).call
    return serves(fresh, loaded, measure, positions)


# ---- kernels ------------------------------------------------------------------------------------------------


def _load_triton_attention() -> AttendRows:
    from cacheblend.core.kernels import attention_triton

    return attention_triton.attend_rows


def _load_triton_placing() -> Place:
    from cacheblend.core.kernels import placing_triton

    return placing_triton.place


def _load_triton_deviation() -> Deviation:
    from cacheblend.core.kernels import deviation_triton

    return deviation_triton.kv_deviation


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in _TOLERANCE and torch.cuda.get_device_capability(device) >= (8, 0)


def attention_differs(
    kernel: AttendRows,
    plain: AttendRows,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[HeadShape] = _CHECKED,
) -> str:
    """Compares scattered rows with windows, caps and sinks, over dense buffers and over pages; in fp32 on the host's
    generator, so that it is the same everywhere."""
    draw = torch.Generator().manual_seed(0)
    for number, shape in enumerate(shapes):
        length = 300 + min(shape.window or 0, _CHECKED_KEYS)
        sizes = [(shape.heads, 37), (shape.kv_heads, length), (shape.kv_heads, length)]
        query, keys, values = (torch.randn(*size, shape.head_dim, generator=draw).to(device, dtype) for size in sizes)
        positions = torch.randperm(length, generator=draw)[:37].sort().values.to(device)
        sinks = torch.randn(shape.heads, generator=draw).to(device) if number % 2 else None
        spec = AttentionSpec(shape.head_dim**-0.5, shape.window, 20.0 if number % 2 else None, sinks)
        expected = plain(query, keys, values, positions, spec).float()
        table = torch.arange(-(-length // _PAGE)).flip(0).to(device)
        found = {
            "": kernel(query, keys, values, positions, spec),
            ", in pages": kernel(query, _in_pages(keys), _in_pages(values), positions, spec, table),
        }
        for form, each in found.items():
            error = float((each.float() - expected).abs().max())
            if not error <= _TOLERANCE[dtype]:
                where = f"head_dim {shape.head_dim}{form}"
                return f"differs from PyTorch by {error:.2g} ({where}), more than {_TOLERANCE[dtype]}"
    return ""


def _in_pages(rows: torch.Tensor) -> torch.Tensor:
    """[kv_heads, length, head_dim] as a paged cache whose blocks are in the opposite order."""
    kv_heads, length, head_dim = rows.shape
    blocks = -(-length // _PAGE)
    padded = rows.new_zeros(kv_heads, blocks * _PAGE, head_dim)
    padded[:, :length] = rows
    return padded.view(kv_heads, blocks, _PAGE, head_dim).permute(1, 2, 0, 3).flip(0).contiguous()


def placing_differs(
    kernel: Place, plain: Place, device: torch.device, dtype: torch.dtype, heads: tuple[int, int] = (2, 64)
) -> str:
    """Compares every codec and pairing, with keys that are moved and not, in dense buffers and in pages.

    Args:
        heads: how many, and their dimensions; three quarters of them are rotated.
    """
    draw, (kv_heads, head_dim) = torch.Generator().manual_seed(0), heads
    drawn = [torch.randn(kv_heads, 2, tokens, head_dim, generator=draw).to(dtype) for tokens in (70, 33)]
    pieces = [Piece(0, 70, 5, 3, 60, -2), Piece(1, 33, 0, 80, 33, 4711), Piece(1, 33, 1, 70, 5)]
    pairs = max(1, head_dim * 3 // 8)
    frequencies = 1e4 ** (-torch.arange(pairs) / pairs)
    table = torch.randperm(10, generator=draw).to(device)
    for (name, codec), pairing, in_pages in product(CODECS.items(), get_args(Pairing), (False, True)):
        records = [codec.encode(record).to(device) for record in drawn]
        rotation, placement = KeyRotation(frequencies, pairing), Placement(pieces, name)
        shape = (10, 16, kv_heads, head_dim) if in_pages else (kv_heads, 160, head_dim)
        placed = torch.zeros(2, 2, *shape, device=device, dtype=dtype)
        for each, (keys, values) in zip((kernel, plain), placed, strict=True):
            each(records, placement, keys, values, rotation, table if in_pages else None)
        error = float((placed[0].float() - placed[1].float()).abs().max())
        if not error <= _TOLERANCE[dtype]:
            return f"differs from PyTorch by {error:.2g} ({name}, {pairing}), more than {_TOLERANCE[dtype]}"
    return ""


def deviation_differs(kernel: Deviation, plain: Deviation, device: torch.device, dtype: torch.dtype) -> str:
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


def is_served(device: torch.device, dtype: torch.dtype, shape: HeadShape) -> bool:
    """Whether kernels serve attention and placing of such heads."""
    fits = shape.head_dim <= _MAX_HEAD_DIM and not shape.head_dim % 4
    return fits and ATTEND_ROWS.on(device, dtype).is_kernel and PLACE.on(device, dtype).is_kernel


def serve(device: torch.device, dtype: torch.dtype, shapes: Sequence[HeadShape] = ()) -> dict[str, Served[Any]]:
    """What serves each operation; loads and checks the kernels, so that no request waits for it.

    Args:
        shapes: of a model's layers: kernels are checked, and compiled, for these as well.
    """
    fitting = tuple(dict.fromkeys(shape for shape in shapes if shape.head_dim <= _MAX_HEAD_DIM))
    heads = tuple(dict.fromkeys((shape.kv_heads, shape.head_dim) for shape in fitting if not shape.head_dim % 4))

    def attention_here(kernel: AttendRows, plain: AttendRows) -> str:
        return attention_differs(kernel, plain, device, dtype, fitting)

    def placing_here(kernel: Place, plain: Place) -> str:
        found = (placing_differs(kernel, plain, device, dtype, each) for each in heads)
        return next((reason for reason in found if reason), "")

    if _serves(device, dtype):
        ATTEND_ROWS.confirm(device, dtype, attention_here)
        PLACE.confirm(device, dtype, placing_here)
    operations: tuple[Operation[Any], ...] = (ATTEND_ROWS, PLACE, KV_DEVIATION)
    return {operation.name: operation.on(device, dtype) for operation in operations}


ATTEND_ROWS: Operation[AttendRows] = Operation(
    "attention of rows",
    attention.attend_rows,
    [Kernel("Triton", _serves, _load_triton_attention)],
    attention_differs,
)

PLACE: Operation[Place] = Operation(
    "placing",
    placing.place,
    [Kernel("Triton", _serves, _load_triton_placing)],
    placing_differs,
)

KV_DEVIATION: Operation[Deviation] = Operation(
    "deviation",
    deviation.kv_deviation,
    [Kernel("Triton", _serves, _load_triton_deviation)],
    deviation_differs,
)
