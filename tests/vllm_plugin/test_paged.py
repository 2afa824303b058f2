"""The layout of a paged cache is learnt by writing to it, whatever it is."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_running import needs_vllm

pytestmark = needs_vllm

BLOCKS, HEADS, SIZE, WIDTH = 7, 2, 16, 8
Put = Callable[[torch.Tensor, int, int, torch.Tensor, torch.Tensor], None]
"""(cache, block, place, key [heads, width], value)"""


def flash(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    cache[0, block, place], cache[1, block, place] = key, value


def blocks_first(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    cache[block, :, place, :WIDTH], cache[block, :, place, WIDTH:] = key, value


def keys_transposed(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    part = cache[block].view(HEADS, 2, SIZE * WIDTH)
    part[:, 0].view(HEADS, WIDTH, SIZE)[:, :, place] = key
    part[:, 1].view(HEADS, SIZE, WIDTH)[:, place] = value


def padded(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    cache[block, : 2 * HEADS * WIDTH * SIZE].view(2, SIZE, HEADS, WIDTH)[:, place] = torch.stack([key, value])


def scaled(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    flash(cache, block, place, (2 * key).round() / 2, value)


LAYOUTS: dict[str, tuple[Put, tuple[int, ...]]] = {
    "kv, blocks, tokens": (flash, (2, BLOCKS, SIZE, HEADS, WIDTH)),
    "blocks, heads, tokens, kv": (blocks_first, (BLOCKS, HEADS, SIZE, 2 * WIDTH)),
    "keys transposed": (keys_transposed, (BLOCKS, HEADS, SIZE, 2 * WIDTH)),
    "padded pages": (padded, (BLOCKS, 2 * HEADS * WIDTH * SIZE + 24)),
    "as many blocks as tokens": (flash, (2, SIZE, SIZE, HEADS, WIDTH)),
}


def layer_of(put: Put, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    cache = torch.randn(shape).to(dtype)

    def update(layer: Any, keys: torch.Tensor, values: torch.Tensor, kv_cache: torch.Tensor, slots: Any) -> None:
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            put(kv_cache, slot // SIZE, slot % SIZE, key, value)

    return SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(do_kv_cache_update=update))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_written_is_read_back(name: str, dtype: torch.dtype) -> None:
    from cacheblend.engines.vllm.paged import PagedLayer

    put, shape = LAYOUTS[name]
    paged = PagedLayer(layer_of(put, shape, dtype), HEADS, WIDTH, SIZE)
    keys, values = (torch.randn(HEADS, 37, WIDTH).to(dtype) for _ in range(2))
    blocks = [5, 1, 4]
    paged.write(keys, values, paged.slots(blocks, 0, 37))
    record = paged.read(blocks, 37)
    assert torch.equal(record[:, 0], keys)
    assert torch.equal(record[:, 1], values)
    more = torch.randn(HEADS, 3, WIDTH).to(dtype)
    paged.write(more, more, paged.slots(blocks, 37, 40))
    assert torch.equal(paged.read(blocks, 40)[:, 1, 37:], more)
    assert torch.equal(paged.read(blocks[:2], 20), record[:, :, :20])


def test_a_cache_that_changes_numbers_is_refused() -> None:
    from cacheblend.core.errors import ModelNotBlendableError
    from cacheblend.engines.vllm.paged import PagedLayer

    paged = PagedLayer(layer_of(scaled, LAYOUTS["kv, blocks, tokens"][1], torch.float32), HEADS, WIDTH, SIZE)
    with pytest.raises(ModelNotBlendableError, match="no-enable-prefix-caching"):
        paged.read([1], 4)
