"""Which implementation of an operation serves a device and dtype.

Plain PyTorch serves everywhere. A kernel is used where it serves the device, loads, and agrees with plain PyTorch on a
small input; else a warning says why not. So a driver or compiler that misbehaves costs speed, never an answer.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

logger = logging.getLogger("cacheblend.kernels")
PLAIN = "PyTorch"
"""Name of what serves everywhere."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kernel(Generic[F]):
    """A faster implementation of an operation.

    Attributes:
        name: for people.
        serves: whether it is made for a device and dtype.
        load: imports and returns it; raises `ImportError` where what it is written in is not installed.
    """

    name: str
    serves: Callable[[torch.device, torch.dtype], bool]
    load: Callable[[], F]


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


class Operation(Generic[F]):
    """One operation, in plain PyTorch and as kernels; safe to use from several threads.

    Args:
        name: for people.
        plain: in PyTorch.
        kernels: best first.
        differs: (kernel, plain, device, dtype) to what differs between them on a small input; "" if they agree.
    """

    def __init__(
        self,
        name: str,
        plain: F,
        kernels: Sequence[Kernel[F]],
        differs: Callable[[F, F, torch.device, torch.dtype], str],
    ) -> None:
        self.name = name
        self._plain, self._kernels, self._differs = plain, kernels, differs
        self._served: dict[tuple[torch.device, torch.dtype], Served[F]] = {}
        self._lock = threading.Lock()

    def on(self, device: torch.device, dtype: torch.dtype) -> Served[F]:
        """What serves; the first call for a device and dtype loads and checks the kernels, later ones look it up."""
        served = self._served.get((device, dtype))
        if served is None:
            with self._lock:
                served = self._served.get((device, dtype)) or self._choose(device, dtype)
                self._served[device, dtype] = served
        return served

    def confirm(self, device: torch.device, dtype: torch.dtype, differs: Callable[[F, F], str]) -> Served[F]:
        """What serves, checked once more in a caller's own case: a kernel that differs there serves nobody from now on.

        Args:
            differs: (kernel, plain) to what differs between them; "" if they agree.
        """
        served = self.on(device, dtype)
        if not served.is_kernel:
            return served
        try:
            reason = differs(served.call, self._plain)
        except Exception as error:  # of a compiler or driver: anything
            reason = f"{type(error).__name__}: {error}"
        if reason:
            logger.warning("%s: %s is not used on %s in %s: %s", self.name, served.name, device, dtype, reason)
            served = Served(self._plain, PLAIN, f"{served.name}: {reason}")
            with self._lock:
                self._served[device, dtype] = served
        return served

    def _choose(self, device: torch.device, dtype: torch.dtype) -> Served[F]:
        reasons = []
        for kernel in self._kernels:
            if not kernel.serves(device, dtype):
                continue
            try:
                call = kernel.load()
                reason = self._differs(call, self._plain, device, dtype)
            except ImportError as error:
                reasons.append(f"{kernel.name}: {error}")
                continue
            except Exception as error:  # of a compiler or driver: anything
                reason = f"{type(error).__name__}: {error}"
            if not reason:
                return Served(call, kernel.name, "; ".join(reasons))
            reasons.append(f"{kernel.name}: {reason}")
            logger.warning("%s: %s is not used on %s in %s: %s", self.name, kernel.name, device, dtype, reason)
        return Served(self._plain, PLAIN, "; ".join(reasons))
