"""The worker's part for latent attention, without vLLM running: pages, attention, names.

Situations: latents in front of rotated parts in a block, as vLLM keeps them, and any other order; prefixes that vLLM
holds (its CPU build caches none of such models); blocks that belong to others; weights that are renewed; expansions
that are no plain product; odd widths; backends that pack what is needed; kernels that need other shapes.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.latent import halves
from cacheblend.core.kernels.operations import attend_rows
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.vllm.internals import decoder
from cacheblend.engines.vllm.scheduler.options import RequestOptions
from cacheblend.engines.vllm.worker.model import attention_of
from cacheblend.engines.vllm.worker.paged_cache import PagedLayer, RequestBlocks

BLOCKS, SIZE, RANK, ROTARY, HEADS, KEY, VALUE = 7, 16, 40, 8, 3, 12, 20


class Expansion(torch.nn.Module):
    """vLLM's `kv_b_proj`, of all heads; returns a bias beside it."""

    def __init__(self, weight: torch.Tensor, bias: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return latent @ self.weight.T + self.bias, None


class MLAAttention(SimpleNamespace):
    """vLLM's module, as far as it is used; with a cache in which latents stand in front of rotated parts."""

    def update_kv_cache(self) -> None:
        """Since 0.32."""


def layer_of(dtype: torch.dtype = torch.float32, latent_first: bool = True, bias: float = 0.0, **fields: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(HEADS, KEY + VALUE, RANK, generator=generator).to(dtype) * RANK**-0.5
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
        "num_heads": HEADS,
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
    layer = layer_of(dtype, latent_first)
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
    layer = layer_of()
    attention = attention_of(layer, 1e-3)
    assert (attention.kept.kv_heads, attention.kept.head_dim) == (1, (RANK + ROTARY) // 2)
    assert attention.heads.is_latent and attention.heads.head_dim == RANK + ROTARY
    rows, seen = torch.arange(9), []

    def answer(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        seen.append((keys.shape, values.shape))
        q, k, v = (part.transpose(0, 1) for part in (query, keys, values))
        return attend_rows(q, k, v, rows, attention.spec)

    attention.shim.answer = answer
    for factor in (1.0, 0.5):
        layer.W_UV = layer.W_UV * factor
        layer.kv_b_proj.weight.view(HEADS, KEY + VALUE, RANK)[:, KEY:] *= factor
        query, latent, rotated = torch.randn(9, HEADS, KEY + ROTARY), torch.randn(9, RANK), torch.randn(9, 1, ROTARY)
        output = torch.empty(9, HEADS * VALUE)
        attention.shim.forward_impl(query, latent, rotated, None, None, output=output)
        keys, values = layer.kv_b_proj(latent)[0].view(9, HEADS, -1).split([KEY, VALUE], dim=-1)
        keys = torch.cat([keys, rotated.expand(-1, HEADS, -1)], dim=-1)
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
        attention_of(layer_of(**fields), 1e-3)


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
