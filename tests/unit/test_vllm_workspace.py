"""The memory of blending: the arithmetic, for models of known sizes."""

from dataclasses import replace
from itertools import product

import pytest

from cacheblend.engines.vllm.workspace import ModelSizes, attention_bytes, workspace_of

GIB = 1 << 30
LLAMA_70B = ModelSizes(
    layers=80,
    width=8192,
    intermediate=28672 // 4,
    query_width=16 * 128,
    kv_width=2 * 128,
    head_dim=128,
    item_bytes=2,
    longest=32768,
    tile_rows=8192,
)
"""A rank of four; without kernels, so in buffers."""
LAYER = 2 * 32768 * 256 * 2


def test_a_rank_of_a_large_model() -> None:
    found = workspace_of(LLAMA_70B)
    assert found.hidden == 3 * 32768 * 8192 * 2  # of the prompt, of what stays of it, of those that wait
    assert found.layers == 2 * 5 * LAYER + (128 << 20)  # one, four read ahead, their records; those of others
    assert found.held == 4 * LAYER
    assert found.tile == 8192 * (4 * 8192 + 3 * 7168) * 2
    assert found.attention == 5 << 26
    assert found.question == 0  # less than a tile
    assert found.chunks == 8192 * 2 * 256 * 80 * 2
    assert found.total == sum((found.hidden, found.layers, found.held, found.tile, found.attention, found.chunks))
    assert 3 * GIB < found.total < 5 * GIB
    words = str(found)
    assert words.startswith("3.83 GiB (hidden 1.50")
    assert all(part in words for part in ("hidden 1.50 GiB", "layers", "held", "tile", "attention", "chunks"))


def test_kernels_need_no_masks_and_pages_no_buffers() -> None:
    plain = workspace_of(LLAMA_70B)
    kernels = workspace_of(replace(LLAMA_70B, has_kernels=True))
    assert kernels == replace(plain, attention=512 * 128 * 130 * 4)
    pages = workspace_of(replace(LLAMA_70B, has_kernels=True, in_pages=True))
    assert pages == replace(kernels, layers=5 * LAYER + (128 << 20), held=0)
    assert plain.total - pages.total > 9 * LAYER


def test_a_prompt_that_is_compared_with_full_prefill_takes_memory_of_its_own() -> None:
    """Its hidden states and a layer, parked while prompts go on; a layer as read from the cache, and the fused one."""
    plain, checked = workspace_of(LLAMA_70B), workspace_of(replace(LLAMA_70B, checked_vocab=128_000))
    assert plain.check == 0 and replace(checked, check=0) == plain
    assert checked.check == 32768 * 8192 * 2 + 2 * LAYER + (2 * 16 + 9) * 128_000 * 4
    pages = replace(LLAMA_70B, has_kernels=True, in_pages=True)
    assert workspace_of(replace(pages, checked_vocab=128_000)).check == checked.check + 4 * LAYER


def test_partial_sums_are_fewer_than_what_is_counted_whatever_is_asked() -> None:
    """By the kernel's own numbers; a GPU has fewer than 256 processors."""
    triton = pytest.importorskip("cacheblend.core.kernels.attention_triton", reason="Triton is not installed here")
    for heads, kv_heads, head_dim, page, processors in product(
        (8, 32, 64), (1, 2, 8), (64, 128, 256), (0, 16), (16, 132, 255)
    ):
        sizes = replace(LLAMA_70B, head_dim=head_dim, has_kernels=True)
        for rows, length in product((1, 7, 100, 2000), (100, 4000, 130000)):
            slots, tile_keys, _, _ = triton.tile_shape(heads // kv_heads, rows, head_dim, page)
            programs = kv_heads * -(-rows // (slots // (heads // kv_heads)))
            splits = triton.splits_of(programs, -(-length // tile_keys), processors)
            taken = splits * rows * heads * (head_dim + 2) * 4 if splits > 1 else 2 * rows * heads * 4
            assert taken <= max(attention_bytes(sizes), 2 * rows * heads * 4)


def test_wide_heads_long_questions_huge_layers_and_short_prompts() -> None:
    wide = replace(LLAMA_70B, intermediate=512, query_width=8192)
    assert workspace_of(wide).tile == 8192 * (4 * 8192 + 4 * 8192 + 6 * 256) * 2
    found = workspace_of(replace(LLAMA_70B, tile_rows=64, has_kernels=True))
    assert found.question == LAYER + 2 * LAYER + (12 << 24) - found.tile - found.attention > 0
    huge, layer = replace(LLAMA_70B, longest=1 << 21, kv_width=1024), 2 * (1 << 21) * 1024 * 2
    of_waiting = 2 * 2 * 32768 * 1024 * 2
    assert workspace_of(huge).layers == 4 * layer + of_waiting, "a layer is read ahead however large it is"
    short = workspace_of(replace(LLAMA_70B, longest=4096))
    assert short.layers == 32 * LAYER // 8 + (128 << 20), "eight layers ahead and those that are read with the last"


@pytest.mark.parametrize("name", ["width", "intermediate", "kv_width", "item_bytes", "longest", "tile_rows", "layers"])
def test_more_of_anything_takes_more(name: str) -> None:
    more = replace(LLAMA_70B, **{name: 2 * getattr(LLAMA_70B, name)})
    assert workspace_of(more).total > workspace_of(LLAMA_70B).total
