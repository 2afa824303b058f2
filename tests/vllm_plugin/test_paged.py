"""The layout of a paged cache is learnt by writing to it, whatever it is."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.attention import attend_rows
from cacheblend.core.kernels.attention_spec import AttentionSpec
from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.engines import processor
from cacheblend.engines.vllm.internals import interface
from cacheblend.engines.vllm.worker import paged_attention
from cacheblend.engines.vllm.worker.paged_attention import longest_runs
from cacheblend.engines.vllm.worker.paged_cache import NO_SLOT, PagedLayer, RequestBlocks
from paged_scenes import KV_HEADS as HEADS
from paged_scenes import SIZE, WIDTH, flash, keys_transposed

BLOCKS = 7
Put = Callable[[torch.Tensor, int, int, torch.Tensor, torch.Tensor], None]
"""(cache, block, place, key [heads, width], value)"""


def blocks_first(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    cache[block, :, place, :WIDTH], cache[block, :, place, WIDTH:] = key, value


def padded(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    cache[block, : 2 * HEADS * WIDTH * SIZE].view(2, SIZE, HEADS, WIDTH)[:, place] = torch.stack([key, value])


def packed(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    for part, row in enumerate((key, value)):
        pairs = cache[block].view(HEADS, 2, SIZE // 2, WIDTH, 2)[:, part]
        pairs[:, place // 2, :, place % 2] = row


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
    put, shape = LAYOUTS[name]
    paged = PagedLayer(layer_of(put, shape, dtype), HEADS, WIDTH, SIZE)
    keys, values = (torch.randn(HEADS, 37, WIDTH).to(dtype) for _ in range(2))
    blocks = RequestBlocks.of([5, 1, 4], 0, 40, SIZE)
    paged.write(keys, values, blocks.slots[:37])
    record = paged.read(blocks.table, 37)
    assert torch.equal(record[:, 0], keys)
    assert torch.equal(record[:, 1], values)
    more = torch.randn(HEADS, 3, WIDTH).to(dtype)
    paged.write(more, more, blocks.slots[37:])
    assert torch.equal(paged.read(blocks.table, 40)[:, 1, 37:], more)
    assert torch.equal(paged.read(blocks.table[:2], 20), record[:, :, :20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_with_strides_is_seen_as_pages(name: str, dtype: torch.dtype) -> None:
    """Of views too: caches are often parts of a larger tensor, or permuted."""
    put, shape = LAYOUTS[name]
    layer = layer_of(put, shape, dtype)
    layer.kv_cache = torch.randn(3, *shape).to(dtype)[1]
    paged = PagedLayer(layer, HEADS, WIDTH, SIZE)
    pages = paged.pages()
    assert pages is not None
    keys, values = (torch.randn(HEADS, 37, WIDTH).to(dtype) for _ in range(2))
    blocks = RequestBlocks.of([5, 1, 4], 0, 37, SIZE)
    paged.write(keys, values, blocks.slots)
    for part, rows in zip(pages, (keys, values), strict=True):
        assert part.shape == (BLOCKS if name != "as many blocks as tokens" else SIZE, SIZE, HEADS, WIDTH)
        assert torch.equal(part[blocks.table].flatten(0, 1)[:37].transpose(0, 1), rows)
    pages.keys[5, 3] = 7
    assert bool((paged.read(blocks.table, 4)[:, 0, 3] == 7).all())


def test_a_packed_layout_has_no_pages_and_is_read_all_the_same() -> None:
    """As on CPUs with AMX, where pairs of tokens lie side by side."""
    paged = PagedLayer(layer_of(packed, (BLOCKS, HEADS, SIZE, 2 * WIDTH), torch.float32), HEADS, WIDTH, SIZE)
    assert paged.pages() is None
    blocks, rows = RequestBlocks.of([5, 1], 0, 20, SIZE), torch.randn(2, HEADS, 20, WIDTH)
    paged.write(*rows, blocks.slots)
    assert torch.equal(paged.read(blocks.table, 20).transpose(0, 1), rows)


@pytest.mark.parametrize(("size", "isa"), [(16, "vec16"), (32, "vec"), (64, "vec16")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vllms_own_cpu_cache_has_pages_and_leaves_rows_without_a_slot_alone(
    size: int, isa: str, dtype: torch.dtype
) -> None:
    def update(layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        parts = cache.view(BLOCKS, HEADS, 2 * size, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            keys, values, *parts, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    cache = torch.zeros(BLOCKS, HEADS, size, 64, dtype=dtype)
    layer = SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(do_kv_cache_update=update))
    paged = PagedLayer(layer, HEADS, 32, size)
    pages = paged.pages()
    assert pages is not None
    before, rows = cache.clone(), torch.randn(HEADS, 3, 32).to(dtype)
    paged.write(rows, -rows, torch.tensor([NO_SLOT, 2 * size + 3, NO_SLOT]))
    assert torch.equal(pages.keys[2, 3], rows[:, 1]) and torch.equal(pages.values[2, 3], -rows[:, 1])
    pages.keys[2, 3], pages.values[2, 3] = 0, 0
    assert torch.equal(cache, before)


def test_a_cache_that_changes_numbers_is_refused() -> None:
    paged = PagedLayer(layer_of(scaled, LAYOUTS["kv, blocks, tokens"][1], torch.float32), HEADS, WIDTH, SIZE)
    with pytest.raises(ModelNotBlendableError, match="no-enable-prefix-caching"):
        paged.read(torch.tensor([1]), 4)
    with pytest.raises(ModelNotBlendableError, match="changes keys and values"):
        paged.pages()


class Backend:
    """Stands in for the paged cache's layers: its kernel answers with zeros, and counts its calls."""

    is_fp8 = False

    def __init__(self) -> None:
        self.kernel_calls, self.written = 0, list[int]()

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self.written += [slot for slot in slots.tolist() if slot >= 0]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> torch.Tensor:
        self.kernel_calls += 1
        return torch.zeros_like(query).transpose(0, 1)


@pytest.mark.parametrize("longest", [0.0, 16.0, math.inf], ids=["kernel", "short runs", "products"])
@pytest.mark.parametrize(("step", "rows", "run_rows"), [(2, 300, 1), (3, 200, 1), (1, 300, 300), (2, 100, math.inf)])
def test_rows_are_attended_to_by_products_where_they_are_faster(
    step: int, rows: int, run_rows: float, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "longest_runs", lambda dtype: longest)
    monkeypatch.setattr(interface, "sequences_metadata", lambda *_: object())
    backend, spec = Backend(), AttentionSpec(0.3)
    blocks = RequestBlocks.of([1, 2], 0, rows, 300)
    attention = paged_attention.PagedAttention([backend], None, blocks)  # type: ignore[list-item]
    positions = torch.arange(0, rows, step)
    query = torch.randn(4, len(positions), WIDTH)
    kv = LayerKV(torch.randn(HEADS, rows, WIDTH), torch.randn(HEADS, rows, WIDTH))
    out = attention(0, query, kv, positions, spec)
    assert sorted(backend.written) == list(range(300, 300 + rows))  # whoever attends
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
    monkeypatch.setattr(processor, "extensions", lambda: extensions)
    assert longest_runs(dtype) == found


def test_rows_of_a_held_prefix_are_attended_to_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that lost its prefix computes those rows again; their blocks may be other requests' too."""
    monkeypatch.setattr(paged_attention, "longest_runs", lambda dtype: math.inf)
    backend, rows, held = Backend(), 200, 50
    blocks = RequestBlocks.of([3, 4], held, rows, 100)
    attention = paged_attention.PagedAttention([backend], None, blocks)  # type: ignore[list-item]
    kv = LayerKV(torch.randn(HEADS, rows, WIDTH), torch.randn(HEADS, rows, WIDTH))
    for tile in (torch.arange(100), torch.arange(100, 200)):
        attention(0, torch.randn(4, 100, WIDTH), kv, tile, AttentionSpec(0.3))
    assert sorted(set(backend.written)) == list(range(350, 500))
    backend.written.clear()
    attention(0, torch.randn(4, 100, WIDTH), kv, torch.arange(100), AttentionSpec(0.3))
    assert backend.written == list(range(350, 400))
