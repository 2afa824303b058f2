"""Where a paged cache's numbers lie in a block, found out by writing.

The layout of a block depends on backend, version and machine, and backends offer a way to write rows but none to read
them. So known numbers are written through the backend to vLLM's null block, which belongs to no request, and searched
for in it. That gives the place of every (key or value, head, row, dimension) in a block, in any layout that keeps
numbers unchanged, or rounds them to eight bits: which of the two types is also found out, since some backends know one
only, whatever it is called.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.float8 import FLOAT8, Float8
from cacheblend.engines.vllm.internals.prefix_cache import NULL_BLOCK

_DIGIT = 128  # bf16 holds whole numbers up to 256
_FLOAT8_DIGIT = 8  # both types of eight bits hold them
_ABOVE = 65 / 64
"""Factor on whole numbers that are written to eight bits: whether a backend rounds to the nearest or cuts bits off (on
CPUs), they arrive as whole numbers, also after a scale that is rounded itself."""


@dataclass(frozen=True)
class CacheLayout:
    """How a layer's cache is laid out.

    Attributes:
        block_dim: the cache's dimension of blocks.
        places: [kv_heads * 2 * block size * head_dim] int64, place of each number of a record [kv_heads, 2, block size,
            head_dim] in a flattened block.
        kind: of a number in eight bits, one of `FLOAT8`; None: they are kept unchanged.
    """

    block_dim: int
    places: torch.Tensor
    kind: torch.dtype | None


class LayoutFinder:
    """Finds a layer's layout.

    Args:
        cache: of the layer; caches in eight bits as uint8.
        shape: [kv_heads, 2, block size, head_dim] of a block.
        write: writes such a record to the null block.
        float8: the numbers' type and scales, of any kind; None: the cache keeps numbers unchanged.
        name: of the backend, for people.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        shape: tuple[int, int, int, int],
        write: Callable[[torch.Tensor], None],
        float8: Float8 | None,
        name: str,
    ) -> None:
        self._cache, self._shape, self._write, self._float8, self._name = cache, shape, write, float8, name
        self._dtype = cache.dtype if float8 is None else float8.dtype

    def find(self) -> CacheLayout:
        """The layout.

        Raises:
            ModelNotBlendableError: the backend does not keep numbers unchanged, or not in a known type of eight bits.
        """
        count, device = math.prod(self._shape), self._cache.device
        block_dim, kept, kind = self._find_block_dim()
        wanted = torch.arange(count, device=device).view(self._shape)
        found = torch.zeros(len(kept), dtype=torch.int64, device=device)
        unit, digit = 1, _DIGIT if kind is None else _FLOAT8_DIGIT
        while unit < count:  # one digit of each place at a time
            digits = self._numbers(wanted // unit % digit, block_dim, kind)[kept]
            found += digits.round().long().clamp(0, digit - 1) * unit
            unit *= digit
        places = torch.zeros(count, dtype=torch.int64, device=device)
        inside = found < count
        places[found[inside]] = kept[inside]
        check = torch.randn(self._shape) if kind is None else torch.randint(-7, 8, self._shape).float()
        check = check.to(device, self._dtype)
        if not torch.equal(self._numbers(check, block_dim, kind)[places], check.flatten().float()):
            raise self._refusal("changes keys and values when it caches them")
        return CacheLayout(block_dim, places, kind)

    def _find_block_dim(self) -> tuple[int, torch.Tensor, torch.dtype | None]:
        """The cache's block dimension, the places in a flattened block that a write changes, and the numbers' kind."""
        zeros = torch.zeros(self._shape, device=self._cache.device)
        for dim in range(self._cache.dim()):
            for kind in self._kinds():
                before = self._numbers(zeros, dim, kind)
                changed = ((before == 0) & (self._numbers(zeros + 1, dim, kind) == 1)).nonzero().flatten()
                if len(changed) == zeros.numel():
                    return dim, changed, kind
        raise self._refusal(
            "has a KV cache without a block dimension" if self._float8 is None else "keeps eight bits of no known type"
        )

    def _kinds(self) -> Iterator[torch.dtype | None]:
        yield from (None,) if self._float8 is None else FLOAT8

    def _numbers(self, record: torch.Tensor, block_dim: int, kind: torch.dtype | None) -> torch.Tensor:
        """The null block, flattened, in fp32 and without scales, after whole numbers were written to it as a record."""
        written = record
        if self._float8 is not None:
            scales = torch.tensor(self._float8.scales, device=record.device)
            written = record * (_ABOVE * scales[:, None, None])
        self._write(written.to(self._dtype))
        block = self._cache.select(block_dim, NULL_BLOCK).flatten()
        return (block if kind is None else block.view(kind)).float()

    def _refusal(self, what: str) -> ModelNotBlendableError:
        way_out = (
            "so a prefix that vLLM cached cannot be read back; turn prefix caching off (--no-enable-prefix-caching) to "
            "blend with it"
            if self._float8 is None
            else "so blending cannot read it; start vLLM with --kv-cache-dtype bfloat16"
        )
        return ModelNotBlendableError(f"the attention backend {self._name} {what}, {way_out}")
