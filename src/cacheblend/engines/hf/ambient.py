"""Settings that a caller of PyTorch makes around a call, and that would change what the call computes.

    with torch.autocast("cpu", dtype=torch.bfloat16):      autocast, gradients, inference mode, a default device: the
        engine.warm(passages)                              calling thread's, off inside, and back afterwards

Threads do not inherit them. What a whole process sets is left alone: the default dtype changes nothing here, and the
precision of float32 multiplications is part of blocks' names (`engines.adapters`).
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from types import GeneratorType
from typing import Any, TypeVar

import torch

_DEVICES = ("cpu", "cuda")
_NOTHING = contextlib.nullcontext()
Guarded = TypeVar("Guarded", bound=Callable[..., Any])


def without_ambient(entry: Guarded) -> Guarded:
    """An entry point that computes the same whatever its caller has set: a function, or a class, of which all public
    methods and properties and the initialiser are. What yields one thing after another is so at each of them."""
    if not inspect.isclass(entry):
        guarded: Guarded = _guard(entry)
        return guarded
    for name, member in inspect.getmembers_static(entry):
        is_public = not name.startswith("_") or name in ("__init__", "__exit__")
        if not is_public or (name in vars(object) and name != "__init__"):
            continue
        if isinstance(member, staticmethod):
            setattr(entry, name, staticmethod(_guard(member.__func__)))
        elif isinstance(member, property):
            gets, sets, deletes = (part and _guard(part) for part in (member.fget, member.fset, member.fdel))
            setattr(entry, name, property(gets, sets, deletes, member.__doc__))
        elif inspect.isfunction(member):
            setattr(entry, name, _guard(member))
    return entry


def _guard(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _outside() if _is_inside() else _NOTHING:
            found = function(*args, **kwargs)
        return _guarded(found) if isinstance(found, GeneratorType) else found

    return call


def _guarded(inner: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """The same generator, whose body otherwise runs inside of what the caller of each `next` has set."""
    sent = None
    try:
        while True:
            with _outside() if _is_inside() else _NOTHING:
                try:
                    found = inner.send(sent)
                except StopIteration as end:
                    return end.value
            sent = yield found
    finally:
        with _outside():
            inner.close()


def _is_inside() -> bool:
    """Whether anything is set. In calls from one entry point to another nothing is, and there are many of them."""
    return (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or any(map(torch.is_autocast_enabled, _DEVICES))
        or torch._C._len_torch_function_stack() > 0
    )


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    with contextlib.ExitStack() as inside:
        if torch.is_inference_mode_enabled():  # what was computed in it could not be written to outside of it
            inside.enter_context(torch.inference_mode(False))
        if torch.is_grad_enabled():
            inside.enter_context(torch.no_grad())
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                inside.enter_context(torch.autocast(device, enabled=False))
        # A default device is one of the modes on the stack; asking for it alone takes longer than all of this.
        if torch._C._len_torch_function_stack() and torch.get_default_device().type != "cpu":
            inside.enter_context(torch.device("cpu"))
        yield
