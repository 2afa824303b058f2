"""How stored KV is compressed: a record to one run of bytes for each head, and back on any device.

    raw    not compressed, [kv_heads, 2, tokens, head_dim]
    int8   a scale per head and token, for keys and values each
    fp8    the same with the 8 bits of float8_e4m3fn
    int4   keys per channel in groups of 64 tokens, values per token, each with a lowest value and a step

Scales, lowest values and steps are fp16. A head's bytes are contiguous, so that a tensor-parallel rank reads only its
heads. Keys have a few channels that are large for every token (KIVI, arXiv 2402.02750). With 4 bits per token those
channels would leave no resolution to the others, so keys are quantised per channel.
"""

from typing import Protocol

import torch

from cacheblend.core.errors import InvalidInputError, ModelOverflowError

GROUP = 64  # tokens that share the step of a channel
_SMALLEST = torch.finfo(torch.float16).smallest_normal


class Codec(Protocol):
    """One way to compress a record's heads."""

    @property
    def is_exact(self) -> bool: ...  # decoding gives exactly what was encoded

    def head_bytes(self, tokens: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one head's keys and values of this many tokens."""

    def encode(self, record: torch.Tensor) -> torch.Tensor:
        """[kv_heads, 2, tokens, head_dim] to uint8 [kv_heads, head_bytes] (raw: unchanged). Raises
        `ModelOverflowError`: infinities or NaN, which each later prompt would get."""

    def decode(self, encoded: torch.Tensor, tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """The opposite of `encode`: [kv_heads, 2, tokens, head_dim] of `dtype` on the device of `encoded`."""


class _Raw:
    is_exact = True

    def head_bytes(self, tokens: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * tokens * head_dim * dtype.itemsize

    def encode(self, record: torch.Tensor) -> torch.Tensor:
        _finite(record)
        return record

    def decode(self, encoded: torch.Tensor, tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return encoded


class _EightBits:
    """One byte for each number, int8 or of a float8 type; one scale for each head and token."""

    is_exact = False

    def __init__(self, kind: torch.dtype) -> None:
        self._kind = kind
        self._highest = 127.0 if kind is torch.int8 else float(torch.finfo(kind).max)

    def head_bytes(self, tokens: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * tokens * (head_dim + 2)

    def encode(self, record: torch.Tensor) -> torch.Tensor:
        numbers = _finite(record)
        scale = _step(numbers.abs().amax(-1, keepdim=True), self._highest)
        scaled = (numbers / scale.float()).clamp_(-self._highest, self._highest)
        if self._kind is torch.int8:
            scaled = scaled.round_()
        return _joined(scaled.to(self._kind), scale)

    def decode(self, encoded: torch.Tensor, tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        size, shape = 2 * tokens * head_dim, (len(encoded), 2, tokens, head_dim)
        numbers = encoded[:, :size].contiguous().view(self._kind).view(shape)
        return (numbers.float() * _halves(encoded[:, size:]).view(*shape[:3], 1).float()).to(dtype)


class _FourBits:
    """A head's bytes (`_sizes`): keys, two tokens of a channel in a byte (an odd last token is paired with 0); values,
    two channels in a byte; then lowest values and steps of keys [groups, head_dim] and of values [tokens]."""

    is_exact = False

    def head_bytes(self, tokens: int, head_dim: int, dtype: torch.dtype) -> int:
        return sum(self._sizes(tokens, head_dim))

    def encode(self, record: torch.Tensor) -> torch.Tensor:
        heads, _, tokens, head_dim = record.shape
        keys, values = _finite(record).unbind(1)
        missing = -tokens % GROUP
        padded = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], dim=1)
        grouped = padded.view(heads, -1, GROUP, head_dim)
        lowest, step, numbers = _in_steps(grouped, dim=2)
        of_keys = numbers.view(heads, -1, head_dim)[:, :tokens]
        lowest_value, step_value, of_values = _in_steps(values, dim=2)
        return _joined(_packed(of_keys, 1), _packed(of_values, 2), lowest, step, lowest_value, step_value)

    def decode(self, encoded: torch.Tensor, tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        heads = len(encoded)
        keys, values, of_keys, of_values = torch.split(encoded, self._sizes(tokens, head_dim), dim=1)
        groups = -(-tokens // GROUP)
        lowest, step = _halves(of_keys).view(heads, 2, groups, head_dim).unbind(1)
        numbers = _unpacked(keys.reshape(heads, -1, head_dim), 1)[:, :tokens].float()
        group_of = torch.arange(tokens, device=encoded.device) // GROUP
        decoded_keys = numbers * step.float()[:, group_of] + lowest.float()[:, group_of]
        lowest, step = _halves(of_values).view(heads, 2, tokens, 1).unbind(1)
        numbers = _unpacked(values.reshape(heads, tokens, -1), 2)[:, :, :head_dim].float()
        decoded_values = numbers * step.float() + lowest.float()
        return torch.stack([decoded_keys, decoded_values], dim=1).to(dtype)

    @staticmethod
    def _sizes(tokens: int, head_dim: int) -> list[int]:
        pairs, groups = -(-tokens // 2), -(-tokens // GROUP)
        return [pairs * head_dim, tokens * -(-head_dim // 2), 4 * groups * head_dim, 4 * tokens]


CODECS: dict[str, Codec] = {
    "raw": _Raw(),
    "int8": _EightBits(torch.int8),
    "fp8": _EightBits(torch.float8_e4m3fn),
    "int4": _FourBits(),
}


def codec_of(name: str) -> Codec:
    """The codec of this name; raises `InvalidInputError` if there is none."""
    if name not in CODECS:
        raise InvalidInputError(f"unknown codec {name!r}; there are {', '.join(CODECS)}")
    return CODECS[name]


def _finite(record: torch.Tensor) -> torch.Tensor:
    """The record in fp32; raises `ModelOverflowError` for infinities and NaN."""
    numbers = record.float()
    if not bool(numbers.isfinite().all()):
        raise ModelOverflowError("KV with infinities or NaN is not stored", record.dtype)
    return numbers


def _step(extent: torch.Tensor, steps: float) -> torch.Tensor:
    """`extent` / `steps` in fp16; a normal number, so that one can divide by it."""
    return (extent / steps).clamp_(_SMALLEST, torch.finfo(torch.float16).max).to(torch.float16)


def _in_steps(numbers: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(lowest, step, n): fp16 without `dim`, and uint8 0..15 such that lowest + step * n approximates the numbers."""
    lowest = numbers.amin(dim, keepdim=True).clamp(-65504, 65504).to(torch.float16)
    step = _step(numbers.amax(dim, keepdim=True) - lowest.float(), 15)
    steps = ((numbers - lowest.float()) / step.float()).round_().clamp_(0, 15)
    return lowest.squeeze(dim), step.squeeze(dim), steps.to(torch.uint8)


def _packed(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Two neighbours along `dim` in a byte, the first in its lower half; an odd last one is paired with 0."""
    if numbers.shape[dim] % 2:
        numbers = torch.cat([numbers, torch.zeros_like(numbers.narrow(dim, 0, 1))], dim)
    pairs = torch.unflatten(numbers, dim, (-1, 2))
    return pairs.select(dim + 1, 0) | (pairs.select(dim + 1, 1) << 4)


def _unpacked(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The opposite of `_packed`; an odd last one is followed by its 0."""
    return torch.stack([packed & 15, packed >> 4], dim + 1).flatten(dim, dim + 1)


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    """Parts [kv_heads, ...] of any type as bytes, concatenated for each head."""
    return torch.cat([part.contiguous().flatten(1).view(torch.uint8) for part in parts], dim=1)


def _halves(part: torch.Tensor) -> torch.Tensor:
    """Bytes [kv_heads, n] as fp16; a copy, because they may not be aligned."""
    return part.clone(memory_format=torch.contiguous_format).view(torch.float16)
