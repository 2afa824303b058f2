"""The operations, each served by whatever is fastest and right on its tensors' device.

Plain PyTorch serves everywhere. A kernel is used where it serves the device, loads, and agrees with plain PyTorch on a
small input (`comparison`); else a warning says why not. So a driver or compiler that misbehaves costs speed, never an
answer.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels import attention, deviation, kv_placement
from cacheblend.core.kernels.attention_spec import AttentionSpec, HeadShape, check_shapes
from cacheblend.core.kernels.comparison import (
    TOLERANCE,
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
from cacheblend.core.kernels.rope import KeyRotation

logger = logging.getLogger("cacheblend.kernels")
PLAIN, KERNEL = "PyTorch", "Triton"
"""Names of what serves everywhere, and of what is faster."""

_MAX_HEAD_DIM = 256  # of kernels: wider tiles do not fit
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Served(Generic[F]):
    """What serves a device and dtype: its name, and why nothing faster does ("": nothing faster is made for it)."""

    call: F
    name: str
    reason: str = ""

    @property
    def is_kernel(self) -> bool:
        """Whether something faster than plain PyTorch serves."""
        return self.name != PLAIN


def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in TOLERANCE and torch.cuda.get_device_capability(device) >= (8, 0)


class Operation(Generic[F]):
    """One operation, in plain PyTorch and as a kernel; safe to use from several threads.

    Args:
        name: for people.
        plain: in PyTorch.
        kernel: imports and returns the kernel; raises `ImportError` where what it is written in is not installed.
        differs: (kernel, plain, device, dtype) to what differs between them on a small input; "" if they agree.
        serves: whether the kernel is made for a device and dtype.
    """

    def __init__(
        self,
        name: str,
        plain: F,
        kernel: Callable[[], Any],
        differs: Callable[[Any, Any, torch.device, torch.dtype], str],
        serves: Callable[[torch.device, torch.dtype], bool] = _has_kernels,
    ) -> None:
        self.name = name
        self._plain, self._kernel, self._differs, self._serves = plain, kernel, differs, serves
        self._served: dict[tuple[torch.device, torch.dtype], Served[F]] = {}
        self._lock = threading.Lock()

    def on(self, device: torch.device, dtype: torch.dtype) -> Served[F]:
        """What serves; the first call for a device and dtype loads and checks the kernel, later ones look it up."""
        served = self._served.get((device, dtype))
        if served is None:
            with self._lock:
                served = self._served.get((device, dtype))
                if served is None:
                    served = self._plainly()
                    if self._serves(device, dtype):
                        served = self._checked(self._kernel, self._differs, device, dtype)
                self._served[device, dtype] = served
        return served

    def confirm(self, device: torch.device, dtype: torch.dtype, differs: Callable[[F, F], str]) -> Served[F]:
        """What serves, checked once more in a caller's own case: a kernel that differs there serves nobody from now on.

        Args:
            differs: (kernel, plain) to what differs between them; "" if they agree.
        """
        served = self.on(device, dtype)
        if served.is_kernel:
            served = self._checked(lambda: served.call, lambda kernel, plain, *_: differs(kernel, plain), device, dtype)
            with self._lock:
                self._served[device, dtype] = served
        return served

    def _checked(
        self, load: Callable[[], Any], differs: Callable[..., str], device: torch.device, dtype: torch.dtype
    ) -> Served[F]:
        try:
            kernel = load()
            reason = differs(kernel, self._plain, device, dtype)
        except ImportError as error:
            return self._plainly(str(error))
        except Exception as error:  # of a compiler or driver: anything
            reason = f"{type(error).__name__}: {error}"
        if not reason:
            return Served(kernel, KERNEL)
        logger.warning("%s: %s is not used on %s in %s: %s", self.name, KERNEL, device, dtype, reason)
        return self._plainly(reason)

    def _plainly(self, reason: str = "") -> Served[F]:
        return Served(self._plain, PLAIN, f"{KERNEL}: {reason}" if reason else "")


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
    serves = kv_placement.place
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
    serves = deviation.kv_deviation
    if head_dim <= _MAX_HEAD_DIM:
        serves = KV_DEVIATION.on(fresh[0].device, fresh[0].dtype).call
    return serves(fresh, loaded, measure, positions)


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
    for operation, differs in operations.items() if _has_kernels(device, dtype) else ():
        cases: Sequence[Any] = heads if operation in (PLACE, PLACE_FLOAT8) else (fitting,)

        def differs_here(kernel: Any, plain: Any, differs: Any = differs, cases: Any = cases) -> str:
            found = (differs(kernel, plain, device, dtype, each) for each in cases)
            return next((reason for reason in found if reason), "")

        operation.confirm(device, dtype, differs_here)
    return {operation.name: operation.on(device, dtype) for operation in (*operations, KV_DEVIATION)}


def _triton(name: str) -> Callable[[], Any]:
    """Imports a kernel, ``module.function``, once it is asked for: Triton need not be installed."""
    module, _, function = name.partition(".")
    return lambda: getattr(importlib.import_module(f"cacheblend.core.kernels.{module}"), function)


_attend, _place, _measure = (
    _triton("attention_triton.attend_rows"),
    _triton("kv_placement_triton.place"),
    _triton("deviation_triton.kv_deviation"),
)
ATTEND_ROWS = Operation("attention of rows", attention.attend_rows, _attend, attention_differs)
PLACE = Operation("placing", kv_placement.place, _place, placing_differs)
KV_DEVIATION = Operation(
    "deviation", deviation.kv_deviation, _triton("deviation_triton.kv_deviation"), deviation_differs
)
ATTEND_FLOAT8 = Operation("attention in eight bits", attention.attend_rows, _attend, float8_attention_differs)
"""Operations of their own: where a device cannot compile them, what serves other caches goes on."""
PLACE_FLOAT8 = Operation("placing in eight bits", kv_placement.place, _place, float8_placing_differs)
