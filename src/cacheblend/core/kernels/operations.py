"""The operations, each served by whatever is fastest and right on its tensors' device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels import attention, deviation, kv_placement
from cacheblend.core.kernels.attention_spec import AttentionSpec, HeadShape, check_shapes
from cacheblend.core.kernels.comparison import (
    TOLERANCE,
    AttendRows,
    Deviation,
    PlaceOperation,
    attention_differs,
    deviation_differs,
    float8_attention_differs,
    float8_placing_differs,
    placing_differs,
)
from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.kernels.float8 import FLOAT8, Float8
from cacheblend.core.kernels.kv_placement import Placement, check_records
from cacheblend.core.kernels.latent import attended
from cacheblend.core.kernels.registry import Kernel, Operation, Served
from cacheblend.core.kernels.rope import KeyRotation

_MAX_HEAD_DIM = 256  # of kernels: wider tiles do not fit


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
    if block_table is None:
        keys, values = attended(keys, values, spec)
    check_shapes(query, keys, values, positions, is_paged=block_table is not None)
    if query.shape[2] > _MAX_HEAD_DIM:
        return attention.attend_rows(query, keys, values, positions, spec, block_table)
    operation = ATTEND_FLOAT8 if keys.dtype in FLOAT8 else ATTEND_ROWS
    return operation.on(query.device, query.dtype).call(query, keys, values, positions, spec, block_table)


def attend_last(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Attention of a sequence's last row over all its keys, [heads, head_dim]; see `attention.attend_last`.

    By our kernel where one serves: a library's may make a plan for each length, and so for each token that is decoded.
    """
    keys, values = attended(keys, values, spec)
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
    float8: Float8 | None = None,
) -> None:
    """Writes stored records into a layer's buffers, keys at their new positions; see `kv_placement.place`.

    Does not wait for the device, so it cannot check that blocks of `block_table` are in the cache.

    Raises:
        InvalidInputError: see `placing.check_records`.
    """
    if block_table is None:
        kv_heads, length, head_dim = keys.shape
    else:
        page, kv_heads, head_dim = keys.shape[1:]
        length = page * len(block_table)
    check_records(records, placement, keys, kv_heads, length, float8)
    serves: PlaceOperation = kv_placement.place
    if head_dim <= _MAX_HEAD_DIM and not head_dim % 4:
        operation, dtype = (PLACE, keys.dtype) if float8 is None else (PLACE_FLOAT8, float8.dtype)
        serves = operation.on(keys.device, dtype).call
    serves(records, placement, keys, values, rotation, block_table, float8)


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


def _load_triton_placing() -> PlaceOperation:
    from cacheblend.core.kernels import kv_placement_triton

    return kv_placement_triton.place


def _load_triton_deviation() -> Deviation:
    from cacheblend.core.kernels import deviation_triton

    return deviation_triton.kv_deviation


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in TOLERANCE and torch.cuda.get_device_capability(device) >= (8, 0)


def is_served(device: torch.device, dtype: torch.dtype, shape: HeadShape, *, float8: bool = False) -> bool:
    """Whether kernels serve attention and placing of such heads; `float8`: in pages of eight bits."""
    fits = shape.head_dim <= _MAX_HEAD_DIM and not shape.head_dim % 4
    operations: tuple[Operation[Any], ...] = (ATTEND_FLOAT8, PLACE_FLOAT8) if float8 else (ATTEND_ROWS, PLACE)
    return fits and all(operation.on(device, dtype).is_kernel for operation in operations)


def serve(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[HeadShape] = (), *, float8: bool = False
) -> dict[str, Served[Any]]:
    """What serves each operation; loads and checks the kernels, so that no request waits for it.

    Args:
        shapes: of a model's layers: kernels are checked, and compiled, for these as well.
        float8: pages of eight bits are used too.
    """
    fitting = tuple(dict.fromkeys(shape for shape in shapes if shape.head_dim <= _MAX_HEAD_DIM))
    placed = dict.fromkeys((shape.kv_heads, shape.placed_dim) for shape in shapes)
    heads = tuple(each for each in placed if each[1] <= _MAX_HEAD_DIM and not each[1] % 4)

    operations: dict[Operation[Any], Callable[..., str]] = {ATTEND_ROWS: attention_differs, PLACE: placing_differs}
    if float8:
        operations |= {ATTEND_FLOAT8: float8_attention_differs, PLACE_FLOAT8: float8_placing_differs}
    for operation, differs in operations.items() if _serves(device, dtype) else ():
        cases: Sequence[Any] = heads if operation in (PLACE, PLACE_FLOAT8) else (fitting,)

        def differs_here(kernel: Any, plain: Any, differs: Any = differs, cases: Any = cases) -> str:
            found = (differs(kernel, plain, device, dtype, each) for each in cases)
            return next((reason for reason in found if reason), "")

        operation.confirm(device, dtype, differs_here)
    return {operation.name: operation.on(device, dtype) for operation in (*operations, KV_DEVIATION)}


ATTEND_ROWS: Operation[AttendRows] = Operation(
    "attention of rows",
    attention.attend_rows,
    [Kernel("Triton", _serves, _load_triton_attention)],
    attention_differs,
)

PLACE: Operation[PlaceOperation] = Operation(
    "placing",
    kv_placement.place,
    [Kernel("Triton", _serves, _load_triton_placing)],
    placing_differs,
)

KV_DEVIATION: Operation[Deviation] = Operation(
    "deviation",
    deviation.kv_deviation,
    [Kernel("Triton", _serves, _load_triton_deviation)],
    deviation_differs,
)

ATTEND_FLOAT8: Operation[AttendRows] = Operation(
    "attention in eight bits",
    attention.attend_rows,
    [Kernel("Triton", _serves, _load_triton_attention)],
    float8_attention_differs,
)
"""Operations of their own: where a device cannot compile them, what serves other caches goes on."""

PLACE_FLOAT8: Operation[PlaceOperation] = Operation(
    "placing in eight bits",
    kv_placement.place,
    [Kernel("Triton", _serves, _load_triton_placing)],
    float8_placing_differs,
)
