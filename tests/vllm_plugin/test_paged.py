"""The layout of a paged cache is learnt by writing to it, whatever it is."""

import math
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
    from cacheblend.engines.vllm.worker.paged import PagedLayer

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
    from cacheblend.engines.vllm.worker.paged import PagedLayer

    paged = PagedLayer(layer_of(scaled, LAYOUTS["kv, blocks, tokens"][1], torch.float32), HEADS, WIDTH, SIZE)
    with pytest.raises(ModelNotBlendableError, match="no-enable-prefix-caching"):
        paged.read([1], 4)


class Backend:
    """Stands in for the paged cache's layers: its kernel answers with zeros, and counts its calls."""

    def __init__(self) -> None:
        self.kernel_calls, self.written = 0, list[int]()

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self.written += slots.tolist()

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> torch.Tensor:
        self.kernel_calls += 1
        return torch.zeros_like(query).transpose(0, 1)


@pytest.mark.parametrize("longest", [0.0, 16.0, math.inf], ids=["kernel", "short runs", "products"])
@pytest.mark.parametrize(("step", "rows", "run_rows"), [(2, 300, 1), (3, 200, 1), (1, 300, 300), (2, 100, math.inf)])
def test_rows_are_attended_to_by_products_where_they_are_faster(
    step: int, rows: int, run_rows: float, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend.core.kernels.attention import attend_rows
    from cacheblend.core.kernels.attention_spec import AttentionSpec
    from cacheblend.core.load.loader import LayerKV
    from cacheblend.engines.vllm import compat
    from cacheblend.engines.vllm.worker import paged_attention

    monkeypatch.setattr(paged_attention, "longest_runs", lambda dtype, device: longest)
    monkeypatch.setattr(compat, "sequences_metadata", lambda *_: object())
    backend, spec = Backend(), AttentionSpec(0.3)
    attention = paged_attention.PagedAttention([backend], None, [1, 2], 0, torch.arange(rows))  # type: ignore[list-item]
    positions = torch.arange(0, rows, step)
    query = torch.randn(4, len(positions), WIDTH)
    kv = LayerKV(torch.randn(HEADS, rows, WIDTH), torch.randn(HEADS, rows, WIDTH))
    out = attention(0, query, kv, positions, spec)
    assert sorted(backend.written) == list(range(rows))  # whoever attends
    by_products = run_rows < longest  # few rows are always the kernel's
    if by_products:
        assert backend.kernel_calls == 0
        assert torch.equal(out, attend_rows(query, kv.keys, kv.values, positions, spec))
    else:
        assert backend.kernel_calls == 1
    attention(0, query, kv, positions, spec)  # what the kernel needs is known now
    assert (backend.kernel_calls == 0) is by_products


@pytest.mark.parametrize(
    ("dtype", "extensions", "found"),
    [
        (torch.float32, set(), math.inf),
        (torch.float32, {"BF16", "AMX"}, math.inf),
        (torch.bfloat16, {"BF16"}, 16),
        (torch.bfloat16, {"BF16", "AMX"}, 0),
        (torch.bfloat16, set(), 0),
        (torch.float16, {"BF16"}, 0),
    ],
)
def test_the_processor_and_the_dtype_decide_where_products_are_faster(
    dtype: torch.dtype, extensions: set[str], found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend.engines import processor
    from cacheblend.engines.vllm.worker.paged_attention import longest_runs

    monkeypatch.setattr(processor, "extensions", lambda: extensions)
    assert longest_runs(dtype, torch.device("cpu")) == found
