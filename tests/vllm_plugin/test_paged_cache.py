"""The layout of a paged cache is learnt by writing to it, whatever it is; which of its rows are attended to, and how.

Latents: in front of rotated parts in a block, as vLLM keeps them, and any other order; prefixes that vLLM holds (its
CPU build caches none of such models); blocks that belong to others; weights that are renewed; expansions that are no
plain product; odd widths; backends that pack what is needed; kernels that need other shapes.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels import operations
from cacheblend.core.kernels.attention import AttentionSpec, attend_rows
from cacheblend.core.kernels.latent import halves
from cacheblend.core.load.layer_kv import LayerKV
from cacheblend.engines import provenance
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.vllm.internals import decoder, interface
from cacheblend.engines.vllm.scheduler.options import RequestOptions
from cacheblend.engines.vllm.worker import paged_kv
from cacheblend.engines.vllm.worker.model import attention_of
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
    "packed": (packed, (BLOCKS, HEADS, SIZE, 2 * WIDTH)),  # as on CPUs with AMX: pairs of tokens lie side by side
}


def layer_of(put: Put, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    cache = torch.randn(shape).to(dtype)

    def update(layer: Any, keys: torch.Tensor, values: torch.Tensor, kv_cache: torch.Tensor, slots: Any) -> None:
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            put(kv_cache, slot // SIZE, slot % SIZE, key, value)

    return SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(do_kv_cache_update=update))


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_written_is_read_back_and_a_layout_with_strides_is_seen_as_pages(
    name: str, dtype: torch.dtype, is_part: bool
) -> None:
    """Of views too: caches are often parts of a larger tensor, or permuted."""
    put, shape = LAYOUTS[name]
    layer = layer_of(put, shape, dtype)
    if is_part:
        layer.kv_cache = torch.randn(3, *shape).to(dtype)[1]
    paged = PagedLayer(layer, HEADS, WIDTH, SIZE)
    keys, values = (torch.randn(HEADS, 37, WIDTH).to(dtype) for _ in range(2))
    blocks = RequestBlocks.of([5, 1, 4], 0, 40, SIZE)
    paged.write(keys, values, blocks.slots[:37])
    record = paged.read(blocks.table, 37)
    assert torch.equal(record[:, 0], keys) and torch.equal(record[:, 1], values)
    more = torch.randn(HEADS, 3, WIDTH).to(dtype)
    paged.write(more, more, blocks.slots[37:])
    assert torch.equal(paged.read(blocks.table, 40)[:, 1, 37:], more)
    assert torch.equal(paged.read(blocks.table[:2], 20), record[:, :, :20])
    pages = paged.pages()
    if name == "packed":
        assert pages is None
        return
    assert pages is not None
    for part, rows in zip(pages, (keys, values), strict=True):
        assert part.shape == (BLOCKS if name != "as many blocks as tokens" else SIZE, SIZE, HEADS, WIDTH)
        assert torch.equal(part[blocks.table].flatten(0, 1)[:37].transpose(0, 1), rows)
    pages.keys[5, 3] = 7
    assert bool((paged.read(blocks.table, 4)[:, 0, 3] == 7).all())


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
    monkeypatch.setattr(paged_kv, "longest_runs", lambda dtype: longest)
    monkeypatch.setattr(interface, "sequences_metadata", lambda *_: object())
    backend, spec = Backend(), AttentionSpec(0.3)
    blocks = RequestBlocks.of([1, 2], 0, rows, 300)
    attention = paged_kv.PagedAttention([backend], None, blocks)  # type: ignore[list-item]
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
    monkeypatch.setattr(provenance, "extensions", lambda: extensions)
    assert paged_kv.longest_runs(dtype) == found


def test_rows_of_a_held_prefix_are_attended_to_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that lost its prefix computes those rows again; their blocks may be other requests' too."""
    monkeypatch.setattr(paged_kv, "longest_runs", lambda dtype: math.inf)
    backend, rows, held = Backend(), 200, 50
    blocks = RequestBlocks.of([3, 4], held, rows, 100)
    attention = paged_kv.PagedAttention([backend], None, blocks)  # type: ignore[list-item]
    kv = LayerKV(torch.randn(HEADS, rows, WIDTH), torch.randn(HEADS, rows, WIDTH))
    for tile in (torch.arange(100), torch.arange(100, 200)):
        attention(0, torch.randn(4, 100, WIDTH), kv, tile, AttentionSpec(0.3))
    assert sorted(set(backend.written)) == list(range(350, 500))
    backend.written.clear()
    attention(0, torch.randn(4, 100, WIDTH), kv, torch.arange(100), AttentionSpec(0.3))
    assert backend.written == list(range(350, 400))


# ---- latents -------------------------------------------------------------------------------------------------------

RANK, ROTARY, QUERY_HEADS, KEY, VALUE = 40, 8, 3, 12, 20


class Expansion(torch.nn.Module):
    """vLLM's `kv_b_proj`, of all heads; returns a bias beside it."""

    def __init__(self, weight: torch.Tensor, bias: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return latent @ self.weight.T + self.bias, None


class MLAAttention(SimpleNamespace):
    """vLLM's module, as far as it is used; with a cache in which latents stand in front of rotated parts."""


def latent_layer(
    dtype: torch.dtype = torch.float32, latent_first: bool = True, bias: float = 0.0, **fields: Any
) -> Any:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(QUERY_HEADS, KEY + VALUE, RANK, generator=generator).to(dtype) * RANK**-0.5
    cache = torch.randn(BLOCKS, SIZE, RANK + ROTARY, generator=generator).to(dtype)

    def update(latent: Any, rotated: Any, kv_cache: Any, slots: Any, cache_dtype: str, scale: Any) -> None:
        assert latent.shape == (len(slots), RANK) and rotated.shape == (len(slots), 1, ROTARY)
        rows = [latent, rotated[:, 0]] if latent_first else [rotated[:, 0], latent]
        own = slots >= 0
        kv_cache.view(-1, RANK + ROTARY)[slots[own]] = torch.cat(rows, dim=-1)[own]

    known: dict[str, Any] = {
        "layer_name": "layers.0",
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROTARY,
        "num_heads": QUERY_HEADS,
        "scale": 0.3,
        "kv_cache": cache,
        "kv_cache_dtype": "auto",
        "_k_scale": torch.tensor(1.0),
        "impl": SimpleNamespace(do_kv_cache_update=update),
        "attn_backend": SimpleNamespace(get_name=lambda: "AMX_MLA"),
        "kv_b_proj": Expansion(weight.reshape(-1, RANK), bias),
        "W_UK_T": weight[:, :KEY],
        "W_UV": weight[:, KEY:].transpose(1, 2),
    }
    return MLAAttention(**(known | fields))


def kept(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [1, rows, width] each."""
    return halves(torch.randn(1, rows, ROTARY).to(dtype), torch.randn(1, rows, RANK).to(dtype))


@pytest.mark.parametrize("latent_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_written_is_read_back_and_others_blocks_stay(dtype: torch.dtype, latent_first: bool) -> None:
    """Held rows are read through the same layout, which is learnt."""
    layer = latent_layer(dtype, latent_first)
    paged = PagedLayer(layer, 1, (RANK + ROTARY) // 2, SIZE, dtype)
    keys, values = kept(37, dtype)
    blocks = RequestBlocks.of([5, 1, 4], 16, 37, SIZE)
    shared = layer.kv_cache[5].clone()
    paged.write(keys, values, blocks.slots)
    assert torch.equal(layer.kv_cache[5], shared)  # the first 16 rows are another request's
    record = paged.read(blocks.table, 37)
    assert record.shape == (1, 2, 37, (RANK + ROTARY) // 2)
    assert torch.equal(record[:, 0, 16:], keys[:, 16:]) and torch.equal(record[:, 1, 16:], values[:, 16:])
    assert (paged.pages() is None) == latent_first  # rotated part and latent do not lie one behind the other then


def test_attention_in_the_absorbed_form_is_that_over_expanded_keys_and_values() -> None:
    """With matrices of the moment: vLLM may load other weights while it serves."""
    layer = latent_layer()
    attention = attention_of(layer, 1e-3)
    assert (attention.kept.kv_heads, attention.kept.head_dim) == (1, (RANK + ROTARY) // 2)
    assert attention.heads.is_latent and attention.heads.head_dim == RANK + ROTARY
    rows, seen = torch.arange(9), []

    def answer(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        seen.append((keys.shape, values.shape))
        q, k, v = (part.transpose(0, 1) for part in (query, keys, values))
        return operations.attend_rows(q, k, v, rows, attention.spec)

    attention.shim.answer = answer
    for factor in (1.0, 0.5):
        layer.W_UV = layer.W_UV * factor
        layer.kv_b_proj.weight.view(QUERY_HEADS, KEY + VALUE, RANK)[:, KEY:] *= factor
        query, latent, rotated = (
            torch.randn(9, QUERY_HEADS, KEY + ROTARY),
            torch.randn(9, RANK),
            torch.randn(9, 1, ROTARY),
        )
        output = torch.empty(9, QUERY_HEADS * VALUE)
        attention.shim.forward_impl(query, latent, rotated, None, None, output=output)
        keys, values = layer.kv_b_proj(latent)[0].view(9, QUERY_HEADS, -1).split([KEY, VALUE], dim=-1)
        keys = torch.cat([keys, rotated.expand(-1, QUERY_HEADS, -1)], dim=-1)
        logits = torch.einsum("nhd,mhd->hnm", query, keys) * layer.scale
        weights = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf")).softmax(-1)
        right = torch.einsum("hnm,mhd->nhd", weights, values).reshape(9, -1)
        assert torch.allclose(output, right, atol=1e-5)
    assert seen == [((9, 1, 24), (9, 1, 24))] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bias": 0.5}, "expands its latents in another way than by one matrix for each head"),
        ({"W_UK_T": None}, r"AMX_MLA packs the up-projection; choose another one \(--attention-backend"),
        ({"qk_rope_head_dim": 7}, r"keeps 40 \+ 7 numbers of a token; an even number"),
        ({"use_sparse": True}, "attends sparsely, to tokens that an indexer selects"),
        ({"indexer": object()}, "attends sparsely, to tokens that an indexer selects"),
    ],
    ids=["a bias", "packed", "odd", "sparse", "indexer"],
)
def test_modules_that_are_not_blended_are_refused_with_the_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotBlendableError, match=rf"layers\.0.*{message}"):
        attention_of(latent_layer(**fields), 1e-3)


def test_rotations_of_slices_are_left_to_the_models_own_operation() -> None:
    """vLLM's CPU kernel takes them for whole rows."""
    rotary = type("RotaryEmbedding", (torch.nn.Module,), {"forward_cpu": None, "_forward_method": None})
    latent = type("MLAAttention", (torch.nn.Module,), {})
    assert len(decoder.cpu_kernels(torch.nn.ModuleList([rotary()]))) == 1
    assert decoder.cpu_kernels(torch.nn.ModuleList([rotary(), latent()])) == []


def test_a_request_that_has_rows_compared_compares_keys_and_values_whatever_another_selector_was_set_to() -> None:
    """The start refuses to compare keys alone, but not where the configured selector compares nothing."""
    settings = BlendSettings(BlendConfig(selector="head", measure="k"))
    assert RequestOptions(selector="hkvd").selector_of(settings).measure == "kv"
