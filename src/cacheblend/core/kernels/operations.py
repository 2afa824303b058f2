"""The operations, each served by whatever is fastest and right on its tensors' device. Plain PyTorch serves everywhere.
A kernel is used where it serves the device, loads, and agrees with plain PyTorch on a small input; else a warning says
why not. So a driver or compiler that misbehaves costs speed, never an answer."""

import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
_CHECKED = (HeadShape(8, 2, 64), HeadShape(8, 2, 128, 40, is_capped=True, has_sinks=True))
_CALLS = tuple(product((1, 8, 40, 333, 4096), (300, 4096)))
"""(rows, keys) of calls that start all attention kernels of requests: each size of row tiles, and keys that several
programs share, or one has."""
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

    def confirm(self, device: torch.device, dtype: torch.dtype, checks: Iterable[Callable[[F, F], str]]) -> Served[F]:
        """What serves, checked once more in a caller's own cases, each (kernel, plain) to what differs between them: a
        kernel that differs there serves nobody from now on."""

        def differs(kernel: F, plain: F, *_: Any) -> str:
            return next((reason for check in checks if (reason := check(kernel, plain))), "")

        served = self.on(device, dtype)
        if served.is_kernel:
            served = self._checked(lambda: served.call, differs, device, dtype)
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
    page: int = _PAGE,
    kind: torch.dtype | None = None,
) -> str:
    """Over dense buffers and over pages of so many tokens (0: none), keys and values of a `kind` of `FLOAT8` or of the
    query's."""
    for shape, query, keys, values, positions, spec in _drawn(shapes, device, dtype):
        if kind is not None:
            keys, values = keys.to(kind).to(dtype), values.to(kind).to(dtype)
        expected = plain(query, keys, values, positions, spec).float()
        found = {"": kernel(query, keys.to(kind or dtype), values.to(kind or dtype), positions, spec)}
        if page:
            table = torch.arange(-(-keys.shape[1] // page)).flip(0).to(device)
            pages = [_in_pages(each, page).to(kind or dtype) for each in (keys, values)]
            found[", in pages"] = kernel(query, *pages, positions, spec, table)
        for form, each in found.items():
            error = float((each.float() - expected).abs().max())
            if not error <= TOLERANCE[dtype]:
                where = f"head_dim {shape.head_dim}{form}{_in_kind(kind)}"
                return f"differs from PyTorch by {error:.2g} ({where}), more than {TOLERANCE[dtype]}"
    return ""


def _in_float8(differs: Callable[..., str]) -> Callable[..., str]:
    """The same comparison in each kind of eight bits."""
    return lambda *args, **given: next((why for kind in FLOAT8 if (why := differs(*args, **given, kind=kind))), "")


def _in_kind(kind: torch.dtype | None) -> str:
    return "" if kind is None else f", {kind}"


def _in_pages(rows: torch.Tensor, page: int) -> torch.Tensor:
    """[kv_heads, length, head_dim] as a paged cache whose blocks are in the opposite order."""
    kv_heads, length, head_dim = rows.shape
    blocks = -(-length // page)
    padded = rows.new_zeros(kv_heads, blocks * page, head_dim)
    padded[:, :length] = rows
    return padded.view(kv_heads, blocks, page, head_dim).permute(1, 2, 0, 3).flip(0).contiguous()


def _drawn(shapes: Sequence[HeadShape], device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """(shape, query, keys, values, positions, spec): scattered rows, in fp32 on the host's generator, so that it is the
    same everywhere."""
    draw = torch.Generator().manual_seed(0)
    for shape in shapes:
        length = 300 + min(shape.window or 0, _CHECKED_KEYS)
        sizes = [(shape.heads, 37), (shape.kv_heads, length), (shape.kv_heads, length)]
        drawn = (torch.randn(*size, shape.head_dim, generator=draw).to(device, dtype) for size in sizes)
        positions = torch.randperm(length, generator=draw)[:37].sort().values.to(device)
        sinks = torch.randn(shape.heads, generator=draw).to(device, dtype) if shape.has_sinks else None
        spec = AttentionSpec(shape.head_dim**-0.5, shape.window, 20.0 if shape.is_capped else None, sinks)
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
    rotations: Sequence[KeyRotation | None] = (),
    page: int = _PAGE,
    kind: torch.dtype | None = None,
) -> str:
    """Every codec, keys that are moved and not, in dense buffers and in pages of so many tokens (0: none), or in pages
    of a `kind` of `FLOAT8` with scales. `heads`: how many, and their dimensions. `rotations`: of their keys; none: one
    of each pairing, of three quarters of the dimensions."""
    float8 = None if kind is None else Float8(kind, dtype, 0.037, 0.3)
    forms, tolerance = ({False, page > 0}, TOLERANCE[dtype]) if kind is None else ({True}, _STEPS[kind])
    draw, (kv_heads, head_dim) = torch.Generator().manual_seed(0), heads
    drawn = [torch.randn(kv_heads, 2, tokens, head_dim, generator=draw).to(dtype) for tokens in (70, 33)]
    pieces = [Piece(0, 70, 5, 3, 60, -2), Piece(1, 33, 0, 80, 33, 4711), Piece(1, 33, 1, 70, 5)]
    pairs, blocks = max(1, head_dim * 3 // 8), -(-160 // max(1, page))
    some = [KeyRotation(1e4 ** (-torch.arange(pairs) / pairs), pairing) for pairing in get_args(Pairing)]
    table = torch.randperm(blocks, generator=draw).to(device)
    for (name, codec), rotation, in_pages in product(CODECS.items(), rotations or some, sorted(forms)):
        records, placement = [codec.encode(record).to(device) for record in drawn], Placement(pieces, name)
        shape = (blocks, page, kv_heads, head_dim) if in_pages else (kv_heads, 160, head_dim)
        placed = torch.zeros(2, 2, *shape, device=device, dtype=dtype).to(kind or dtype)
        for each, (keys, values) in zip((kernel, plain), placed, strict=True):
            each(records, placement, keys, values, rotation, table if in_pages else None, float8)
        found, expected = placed.float() if float8 is None else (torch.stack(float8.decode(p)).float() for p in placed)
        errors = (found - expected).abs()
        error = float((errors if float8 is None else errors / expected.abs().clamp(min=0.01)).max())
        if not error <= tolerance:
            where = f"{name}, {'no position' if rotation is None else rotation.pairing}{_in_kind(kind)}"
            return f"differs from PyTorch by {error:.2g} ({where}), more than {tolerance}"
    return ""


def deviation_differs(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int] = (3, 96),
) -> str:
    """Compares scattered rows, where they lie and gathered, by each measure. `heads`: as in `placing_differs`."""
    draw, (kv_heads, head_dim) = torch.Generator().manual_seed(0), heads
    fresh = torch.randn(2, kv_heads, 37, head_dim, generator=draw).to(device, dtype).unbind()
    loaded = torch.randn(2, kv_heads, 300, head_dim, generator=draw).to(device, dtype).unbind()
    positions = torch.randperm(300, generator=draw)[:37].to(device)
    for measure, at in product(get_args(Measure), (positions, None)):
        rows = loaded if at is not None else [part[:, positions] for part in loaded]
        found, expected = (each(fresh, rows, measure, at) for each in (kernel, plain))
        error = float(((found - expected).abs() / expected).max())
        if not error <= _SUM_TOLERANCE:
            return f"differs from PyTorch by {error:.2g} of the sum ({measure}), more than {_SUM_TOLERANCE}"
    return ""


float8_attention_differs, float8_placing_differs = _in_float8(attention_differs), _in_float8(placing_differs)


def attention_starts(
    kernel: Callable[..., Any],
    _: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[HeadShape],
    page: int = 0,
    kind: torch.dtype | None = None,
) -> str:
    """Compares nothing, since results of long calls take gigabytes: starts a kernel in all `_CALLS`, so that it is
    compiled before a request needs it. "" always; what does not fit into memory is left to the first request."""
    with suppress(torch.OutOfMemoryError):
        for query, keys, positions, spec in _zeros(shapes, device, dtype):
            rows, (kv_heads, length, head_dim) = keys.to(kind or dtype), keys.shape
            kernel(query, rows, rows, positions, spec)
            if page:
                table = torch.arange(-(-length // page), device=device)
                pages = torch.zeros(len(table), page, kv_heads, head_dim, device=device, dtype=dtype).to(kind or dtype)
                kernel(query, pages, pages, positions, spec, table)
    return ""


def asking_starts(
    kernel: Callable[..., Any],
    _: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[HeadShape],
) -> str:
    """As `attention_starts`."""
    with suppress(torch.OutOfMemoryError):
        for query, keys, positions, spec in _zeros(shapes, device, dtype):
            kernel(query, keys, keys, positions, torch.arange(keys.shape[1], device=device), spec)
    return ""


def _zeros(shapes: Sequence[HeadShape], device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """(query, keys, positions, spec) of each of `_CALLS`, lying as those of requests do."""
    for (rows, length), shape in product(_CALLS, shapes):
        rows = min(rows, length)
        query = torch.zeros(rows, shape.heads, shape.head_dim, device=device, dtype=dtype).transpose(0, 1)
        keys = torch.zeros(shape.kv_heads, length, shape.head_dim, device=device, dtype=dtype)
        sinks = torch.zeros(shape.heads, device=device, dtype=dtype) if shape.has_sinks else None
        spec = AttentionSpec(1.0, shape.window, 20.0 if shape.is_capped else None, sinks)
        yield query, keys, torch.arange(length - rows, length, device=device), spec


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
    device: torch.device,
    dtype: torch.dtype,
    layers: Iterable[tuple[HeadShape, KeyRotation | None]] = (),
    *,
    page: int = 0,
    float8: bool = False,
) -> dict[str, Served[Any]]:
    """What serves each operation; loads, checks and compiles the kernels, so that no request waits for it. `layers`: of
    a model: heads, and how keys are rotated; kernels are checked for these as well. `page`: tokens of a block of the
    engine's paged cache, 0: none. `float8`: pages of eight bits are used too."""
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    attended = dict[HeadShape, None]()
    compared, placed = dict[tuple[int, int], None](), dict[tuple[int, int], dict[KeyRotation | None, None]]()
    for shape, rotation in layers:
        heads = shape.kv_heads, shape.placed_dim
        if shape.head_dim <= _MAX_HEAD_DIM:
            attended[shape] = None
        if shape.placed_dim <= _MAX_HEAD_DIM:
            compared[heads] = None
            if not shape.placed_dim % 4:
                placed.setdefault(heads, {})[rotation] = None
    asks = where | {"shapes": (*attended,)}
    rows = asks | {"page": page}
    checks: dict[Operation[Any], list[partial[str]]] = {
        ATTEND_ROWS: [partial(attention_differs, **rows), partial(attention_starts, **rows)],
        PLACE: [
            partial(placing_differs, **where, heads=heads, rotations=(*rotations,), page=page)
            for heads, rotations in placed.items()
        ],
        ATTEND_ASKING: [partial(asking_differs, **asks), partial(asking_starts, **asks)],
        KV_DEVIATION: [partial(deviation_differs, **where, heads=heads) for heads in compared],
    }
    if float8:
        for eight, usual in ((ATTEND_FLOAT8, ATTEND_ROWS), (PLACE_FLOAT8, PLACE)):
            checks[eight] = [partial(_in_float8(each.func), **each.keywords) for each in checks[usual]]
    for operation, each in checks.items() if _has_kernels(device, dtype) else ():
        operation.confirm(device, dtype, each)
    return {operation.name: operation.on(device, dtype) for operation in checks}


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
