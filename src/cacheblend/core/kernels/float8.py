"""Numbers that an engine's cache keeps in eight bits: number = byte x scale, one scale for a layer's keys, one for its
values. Plain PyTorch: serves everywhere, and is what kernels are compared with. Every byte is a whole number of bf16
and of fp16, so that reading rounds only where a scale is multiplied."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FLOAT8 = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""Types of a byte, and what kernels call them; 0 there: not eight bits."""


@dataclass(frozen=True)
class Float8:
    """How a layer's cache keeps keys and values."""

    kind: torch.dtype  # of a byte, one of `FLOAT8`
    dtype: torch.dtype  # of the numbers, as the model computes them
    # key_scale, value_scale: a byte's number times this is the number; above 0
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def scales(self) -> tuple[float, float]:  # of keys, of values
        return self.key_scale, self.value_scale

    def encode(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keys and values in `kind`, rounded to the nearest; those beyond its largest number become that one."""
        highest = torch.finfo(self.kind).max
        found = []
        for part, scale in zip(parts, self.scales, strict=True):
            # A tensor: CUDA divides by a number of the host by multiplying with its rounded reciprocal.
            divisor = torch.full((), scale, dtype=torch.float32, device=part.device)
            found.append((part.float() / divisor).clamp_(-highest, highest).to(self.kind))
        return found

    def decode(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keys and values in `dtype`, of bytes in `kind`; copies."""
        return [part.to(self.dtype).mul_(scale) for part, scale in zip(parts, self.scales, strict=True)]

    def rounded(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keys and values as they would be read after they had been placed."""
        return self.decode(self.encode(parts))


def as_bytes(pages: torch.Tensor) -> torch.Tensor:
    """A view of a tensor in eight bits as uint8, which every operation on indices takes; others as they are."""
    return pages.view(torch.uint8) if pages.dtype in FLOAT8 else pages
