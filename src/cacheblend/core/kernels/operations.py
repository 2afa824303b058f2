"""The operations, each served by whatever is fastest and right on its tensors' device. Plain PyTorch serves everywhere.
A kernel is used where it serves the device, loads, and agrees with plain PyTorch on a small input; else a warning says
why not. So a driver or compiler that misbehaves costs speed, never an answer."""

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, TypeVar, get_args

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels import attention, deviation, kv_placement
from cacheblend.core.kernels.attention import AttentionSpec, HeadShape, check_shapes
from cacheblend.core.kernels.deviation import Measure
from cacheblend.core.kernels.float8 import FLOAT8, Float8
from cacheblend.core.kernels.kv_placement import Piece, Placement, check_records
from cacheblend.core.kernels.latent import attended
from cacheblend.core.kernels.rope import KeyRotation, Pairing
from cacheblend.core.plan.codec import CODECS

logger = logging.getLogger("cacheblend.kernels")
PLAIN, KERNEL = "PyTorch", "Triton"  # names of what serves everywhere, and of what is faster
_MAX_HEAD_DIM = 256  # of kernels: wider tiles do not fit
_PAGE = 16  # tokens of a block in checks
_CHECKED_KEYS = 1024  # of a window in checks; a wider one is compiled, and hides nothing
_CHECKED = (HeadShape(8, 2, 64), HeadShape(8, 2, 128, 40))
_SUM_TOLERANCE = 1e-4  # of fp32 sums in another order
_WEIGHT_TOLERANCE = 1e-3  # of attention weights, which no kernel rounds to the type
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of numbers around 1: a few steps of the type
_STEPS = {torch.float8_e4m3fn: 0.13, torch.float8_e5m2: 0.26}  # by the number: one, where it lies between two
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Served(Generic[F]):
    """What serves a device and dtype: its name, and why nothing faster does ("": nothing faster is made for it)."""

    call: F
    name: str
    reason: str = ""

    @property
    def is_kernel(self) -> bool:  # whether something faster than plain PyTorch serves
        return self.name != PLAIN


def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in TOLERANCE and torch.cuda.get_device_capability(device) >= (8, 0)


class Operation(Generic[F]):
    """One operation, in plain PyTorch and as a kernel; safe to use from several threads. `kernel` imports and returns
    the kernel, and raises `ImportError` where what it is written in is not installed. `differs`: (kernel, plain,
    device, dtype) to what differs between them on a small input; "" if they agree. `serves`: whether the kernel is made
    for a device and dtype."""

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
        """What serves, checked once more in a caller's own case, (kernel, plain) to what differs between them: a kernel
        that differs there serves nobody from now on."""
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


# ---- a kernel beside its slow counterpart, on small inputs: what differs, "" if they agree ---------------------


def attention_differs(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[HeadShape] = _CHECKED,
    kind: torch.dtype | None = None,
) -> str:
    """Over dense buffers and over pages, keys and values of a `kind` of `FLOAT8` or of the query's."""
    for shape, query, keys, values, positions, spec in _drawn(shapes, device, dtype):
        if kind is not None:
            keys, values = keys.to(kind).to(dtype), values.to(kind).to(dtype)
        expected = plain(query, keys, values, positions, spec).float()
        table = torch.arange(-(-keys.shape[1] // _PAGE)).flip(0).to(device)
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
    return lambda *args: next((reason for kind in FLOAT8 if (reason := differs(*args, kind=kind))), "")


def _in_kind(kind: torch.dtype | None) -> str:
    return "" if kind is None else f", {kind}"


def _in_pages(rows: torch.Tensor) -> torch.Tensor:
    """[kv_heads, length, head_dim] as a paged cache whose blocks are in the opposite order."""
    kv_heads, length, head_dim = rows.shape
    blocks = -(-length // _PAGE)
    padded = rows.new_zeros(kv_heads, blocks * _PAGE, head_dim)
    padded[:, :length] = rows
    return padded.view(kv_heads, blocks, _PAGE, head_dim).permute(1, 2, 0, 3).flip(0).contiguous()


def _drawn(shapes: Sequence[HeadShape], device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """(shape, query, keys, values, positions, spec): scattered rows, those of every second shape with a cap and sinks;
    in fp32 on the host's generator, so that it is the same everywhere."""
    draw = torch.Generator().manual_seed(0)
    for number, shape in enumerate(shapes):
        length = 300 + min(shape.window or 0, _CHECKED_KEYS)
        sizes = [(shape.heads, 37), (shape.kv_heads, length), (shape.kv_heads, length)]
        drawn = (torch.randn(*size, shape.head_dim, generator=draw).to(device, dtype) for size in sizes)
        positions = torch.randperm(length, generator=draw)[:37].sort().values.to(device)
        sinks = torch.randn(shape.heads, generator=draw).to(device) if number % 2 else None
        spec = AttentionSpec(shape.head_dim**-0.5, shape.window, 20.0 if number % 2 else None, sinks)
        yield shape, *drawn, positions, spec


def asking_differs(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[HeadShape] = _CHECKED,
) -> str:
    """Over keys with gaps."""
    for shape, query, keys, values, positions, spec in _drawn(shapes, device, dtype):
        key_positions = 2 * torch.arange(keys.shape[1], device=device)
        found, expected = (each(query, keys, values, 2 * positions, key_positions, spec) for each in (kernel, plain))
        for one, other, most in zip(found, expected, (TOLERANCE[dtype], _WEIGHT_TOLERANCE), strict=True):
            error = float((one.float() - other.float()).abs().max())
            if not error <= most:
                return f"differs from PyTorch by {error:.2g} (head_dim {shape.head_dim}), more than {most}"
    return ""


def placing_differs(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int] = (2, 64),
    kind: torch.dtype | None = None,
) -> str:
    """Every codec and pairing, keys that are moved and not, in dense buffers and in pages, or in pages of a `kind` of
    `FLOAT8` with scales. `heads`: how many, and their dimensions; three quarters of them are rotated."""
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


def deviation_differs(
    kernel: Callable[..., Any], plain: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> str:
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


# ---- what callers use -----------------------------------------------------------------------------------------


def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    spec: AttentionSpec,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `attention.attend_rows`. A kernel does not wait for the device, so it cannot check that positions are below
    the keys' length, nor that blocks of `block_table` are in the cache: a row behind the keys sees all of them."""
    if block_table is None:
        keys, values = attended(keys, values, spec)
    check_shapes(query, keys, values, positions, is_paged=block_table is not None)
    if query.shape[2] > _MAX_HEAD_DIM:
        return attention.attend_rows(query, keys, values, positions, spec, block_table)
    operation = ATTEND_FLOAT8 if keys.dtype in FLOAT8 else ATTEND_ROWS
    return operation.on(query.device, query.dtype).call(query, keys, values, positions, spec, block_table)


def attend_asking(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention.attend_asking`."""
    serves = attention.attend_asking
    if query.shape[2] <= _MAX_HEAD_DIM:
        serves = ATTEND_ASKING.on(query.device, query.dtype).call
    return serves(query, *attended(keys, values, spec), positions, key_positions, spec)


def attend_last(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """See `attention.attend_last`; by our kernel where one serves: a library's may make a plan for each length, and so
    for each token that is decoded."""
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
    """See `kv_placement.place` and, for errors, `check_records`. Does not wait for the device, so it cannot check that
    blocks of `block_table` are in the cache."""
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
    """See `deviation.kv_deviation`; raises `InvalidInputError` if the shapes do not fit together."""
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
    """What serves each operation; loads and checks the kernels, so that no request waits for it. `shapes`: of a model's
    layers: kernels are checked, and compiled, for these as well. `float8`: pages of eight bits are used too."""
    fitting = tuple(dict.fromkeys(shape for shape in shapes if shape.head_dim <= _MAX_HEAD_DIM))
    placed = dict.fromkeys((shape.kv_heads, shape.placed_dim) for shape in shapes)
    heads = tuple(each for each in placed if each[1] <= _MAX_HEAD_DIM and not each[1] % 4)

    operations: dict[Operation[Any], Callable[..., str]] = {ATTEND_ROWS: attention_differs, PLACE: placing_differs}
    operations[ATTEND_ASKING] = asking_differs
    if float8:
        operations |= {ATTEND_FLOAT8: float8_attention_differs, PLACE_FLOAT8: float8_placing_differs}
    for operation, differs in operations.items() if _has_kernels(device, dtype) else ():
        cases: Sequence[Any] = heads if operation in (PLACE, PLACE_FLOAT8) else (fitting,)

        def differs_here(kernel: Any, plain: Any, differs: Any = differs, cases: Any = cases) -> str:
            found = (differs(kernel, plain, device, dtype, each) for each in cases)
            return next((reason for reason in found if reason), "")

        operation.confirm(device, dtype, differs_here)
    return {operation.name: operation.on(device, dtype) for operation in (*operations, KV_DEVIATION)}


def _triton(module: str, function: str) -> Callable[[], Any]:
    """Imports a kernel once it is asked for: Triton need not be installed."""
    return lambda: getattr(importlib.import_module(f"cacheblend.core.kernels.{module}"), function)


_attend, _place = _triton("attention_triton", "attend_rows"), _triton("kv_placement_triton", "place")
_measure = _triton("deviation_triton", "kv_deviation")
ATTEND_ROWS = Operation("attention of rows", attention.attend_rows, _attend, attention_differs)
PLACE = Operation("placing", kv_placement.place, _place, placing_differs)
KV_DEVIATION = Operation("deviation", deviation.kv_deviation, _measure, deviation_differs)
_ask = _triton("attention_triton", "attend_asking")
ATTEND_ASKING = Operation("attention of rows that ask", attention.attend_asking, _ask, asking_differs)
ATTEND_FLOAT8 = Operation("attention in eight bits", attention.attend_rows, _attend, float8_attention_differs)
"""Operations of their own: where a device cannot compile them, what serves other caches goes on."""
PLACE_FLOAT8 = Operation("placing in eight bits", kv_placement.place, _place, float8_placing_differs)
