"""Settings that a caller of PyTorch makes around a call, and that would change what the call computes.

    with torch.autocast("cpu", dtype=torch.bfloat16):      autocast, gradients, inference mode, a default device: the
        engine.warm(passages)                              calling thread's, off inside, and back afterwards

Threads do not inherit them, so what an engine does in its own threads is not affected. What a whole process sets is
left alone, since others compute meanwhile: the default dtype changes nothing here, and the precision of float32
multiplications is part of blocks' names (`engines.adapters`).
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_DEVICES = ("cpu", "cuda")
Guarded = TypeVar("Guarded", bound=Callable[..., Any])


def without_ambient(entry: Guarded) -> Guarded:
    """An entry point that computes the same whatever its caller has set: a function, or a class, of which all public
    methods and the initialiser are.

    A generator's body runs at its caller's `next`, so it is left as it is; what it calls has to be an entry point.
    """
    if not inspect.isclass(entry):
        guarded: Guarded = _guard(entry)
        return guarded
    for name, member in inspect.getmembers_static(entry):
        is_public = not name.startswith("_") or name in ("__init__", "__exit__")
        if not is_public or (name in vars(object) and name != "__init__"):
            continue
        if isinstance(member, staticmethod):
            setattr(entry, name, staticmethod(_guard(member.__func__)))
        elif inspect.isfunction(member) and not inspect.isgeneratorfunction(member):
            setattr(entry, name, _guard(member))
    return entry


def _guard(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
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
            return function(*args, **kwargs)

    return call
