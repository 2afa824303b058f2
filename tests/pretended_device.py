"""A CUDA device that this processor pretends to be, which counts the calls in which a real one's host would wait.

Tensors of the class `Pretended` say that they are on ``cuda:0``; their memory is the host's, so that Triton's
interpreter reads it. Inside `PretendedDevice` whatever is made with that device or sent to it becomes such a tensor,
and what torch's sync debug mode would report is counted:

- reading a device's tensor (`item`, `tolist`, `bool`, ...), and results whose size depends on the numbers (`nonzero`);
- copies between host and device without `non_blocking` (ATen/native/cuda/Copy.cu: `memcpy_and_sync`), hidden ones among
  them: `torch.tensor(..., device=)`, an index or a value on the host.

It counts more than the debug mode does: copies with `non_blocking` of memory that is not pinned (the driver may wait),
and `torch.cuda.synchronize`. As on a device, tensors of both sides in one operation are an error. Nothing is ever in
progress here, so waits for an event, as of a reader that is faster than copies, are not seen.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")
_TO_PYTHON = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__", "numpy", "__array__")
_SIZED_BY_NUMBERS = ("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount")
_READS = frozenset((*_TO_PYTHON, *_SIZED_BY_NUMBERS, "equal", "allclose", "is_nonzero"))
_MAKE_FROM_HOST = frozenset({"tensor", "as_tensor", "asarray", "from_numpy"})
_COPIES = frozenset({"copy_", "_foreach_copy_", "set_data"})
_MAY_MIX = _COPIES | {"__getitem__", "__setitem__", "to", "type_as", "__set__", "index_put_"}


class Pretended(torch.Tensor):
    """A tensor on the pretended device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def get_device(self) -> int:
        return 0

    @classmethod
    def __torch_function__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(call, args, kwargs or {})


class PretendedDevice(TorchFunctionMode):
    """Inside, `calls` gets a line for each call that a host would wait in."""

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(call, args, kwargs or {})


class _Counted:
    """What is counted in this process, in any thread; and which memory is pinned."""

    def __init__(self) -> None:
        self.calls: list[str] | None = None
        self.pinned: dict[int, torch.Tensor] = {}
        self.lock = threading.Lock()

    def add(self, what: str) -> None:
        if self.calls is not None:
            with self.lock:
                self.calls.append(what)


COUNTED = _Counted()


@contextmanager
def counted() -> Iterator[list[str]]:
    """The calls that a host waits in while the block runs."""
    COUNTED.calls = calls = []
    try:
        yield calls
    finally:
        COUNTED.calls = None


def on_device(module: torch.nn.Module) -> torch.nn.Module:
    """Sends a module's parameters and buffers to the device, in place."""
    for each in module.modules():
        for name, value in each._parameters.items():
            if value is not None:
                each._parameters[name] = torch.nn.Parameter(_pretend(value.data), requires_grad=False)
        for name, value in each._buffers.items():
            each._buffers[name] = None if value is None else _pretend(value)
    return module


def _run(call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(call, "__name__", str(call))
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    is_on_device = any(isinstance(each, Pretended) for each in tensors)
    with torch._C.DisableTorchFunction():
        if name in ("to", "cpu", "cuda", "type_as") and tensors:
            return _sent(name, call, args, kwargs)
        if name == "pin_memory":
            return _pin(args[0].clone())
        if name == "is_pinned":
            return args[0].untyped_storage().data_ptr() in COUNTED.pinned
        named = kwargs.get("device")
        is_made_there = named is not None and torch.device(named).type == "cuda"
        kwargs = kwargs | ({"device": HOST} if is_made_there else {})
        if is_made_there and name in _MAKE_FROM_HOST and not is_on_device:
            COUNTED.add(name)
        is_pinned = kwargs.pop("pin_memory", False)
        if is_on_device:
            _check_reads(name, args, kwargs, tensors)
        result = _histc(args[0], kwargs) if name == "histc" else call(*args, **kwargs)
        stays = is_made_there or (is_on_device and (named is None or is_made_there))
        if stays:
            result = tree_map_only(torch.Tensor, _pretend, result)
        return _pin(result) if is_pinned else result


def _histc(tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """A CPU has none of integers."""
    return torch.histc(tensor.float(), **kwargs).to(tensor.dtype)


def _check_reads(name: str, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    """Counts what reads numbers of the device, and refuses what a device would refuse."""
    if name in _READS or (name == "where" and len(args) == 1 and len(kwargs) == 0):
        COUNTED.add(name)
    if name == "repeat_interleave" and "output_size" not in kwargs and len(tensors) > 1:
        COUNTED.add(name)
    if name in ("__getitem__", "__setitem__"):
        index = tree_leaves(args[1])
        if any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in index):
            COUNTED.add(f"{name} with a mask")
        if isinstance(args[0], Pretended) and (isinstance(args[1], list) or any(map(_is_array_on_host, index))):
            COUNTED.add(f"{name} with an index on the host")
    if name == "__setitem__" and _is_array_on_host(args[2]) and isinstance(args[0], Pretended):
        COUNTED.add("__setitem__ with a value on the host")
    if name in _COPIES:
        pairs = zip(*args[:2], strict=True) if name == "_foreach_copy_" else [args[:2]]
        is_async = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        for target, source in pairs:
            if _differ(target, source):
                _count_copy(name, source if isinstance(target, Pretended) else target, is_async)
    if name not in _MAY_MIX and any(_is_array_on_host(each) for each in tensors):
        shapes = [(type(each).__name__, list(each.shape)) for each in tensors]
        raise RuntimeError(f"{name}: tensors are on the device and on the host: {shapes}")


def _sent(name: str, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`to` and its like: between host and device it is a copy, which is counted unless it is of pinned memory."""
    source, rest = args[0], args[1:]
    target = source.device if isinstance(source, Pretended) else HOST
    if name == "cuda":
        target = DEVICE
    elif name == "cpu":
        target = HOST
    for each in (*rest, kwargs.get("device"), kwargs.get("other")):
        if isinstance(each, str | torch.device):
            target = torch.device(each)
        elif isinstance(each, torch.Tensor):
            target = DEVICE if isinstance(each, Pretended) else HOST
    is_there, goes_there = isinstance(source, Pretended), target.type == "cuda"
    if is_there != goes_there:
        _count_copy(name, source, kwargs.get("non_blocking", False) and not is_there)
    dtypes = [each for each in (*rest, kwargs.get("dtype")) if isinstance(each, torch.dtype)]
    dtypes += [each.dtype for each in (*rest, kwargs.get("other")) if isinstance(each, torch.Tensor)]
    copy = kwargs.get("copy", False) or is_there != goes_there
    result = source.to(dtype=dtypes[0] if dtypes else source.dtype, copy=copy)
    return _pretend(result) if goes_there else plain(result)


def _count_copy(name: str, on_host: torch.Tensor, is_async: bool) -> None:
    if not is_async:
        COUNTED.add(f"{name} that blocks")
    elif on_host.untyped_storage().data_ptr() not in COUNTED.pinned:
        COUNTED.add(f"{name} of memory that is not pinned")


def _pretend(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, Pretended) else tensor.as_subclass(Pretended)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one of the host, in the same memory; counts nothing."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, Pretended) else tensor


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    """Kept for the process's life, so that no other tensor has its address."""
    COUNTED.pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _is_array_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Pretended) and value.dim() > 0


def _differ(one: Any, other: Any) -> bool:
    return isinstance(one, Pretended) != isinstance(other, Pretended)
