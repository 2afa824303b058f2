"""Every use of vLLM's internals, in one place; no other module but `compat_ranks` imports them.

`versions.TESTED` holds the versions that the connector starts on, docs/vllm.md what was run on each.
"""

import hashlib
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.forward_context import ForwardContext, override_forward_context

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.layers.attention import AttentionSpec
from cacheblend.core.load.rope import KeyRotation

__all__ = [
    "ARCHITECTURES",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "VllmConfig",
]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures that can be blended: decoders whose layers are called with (positions, hidden, residual)."""

# ---- the model ----------------------------------------------------------------------------------------------

_loaded: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def recording(architecture: str) -> type[nn.Module]:
    """vLLM's class of that name, which also remembers its instances: vLLM does not pass a connector the model."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    module, name = _TEXT_GENERATION_MODELS[architecture]
    base = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)

    def remember(self: nn.Module, *, vllm_config: VllmConfig, prefix: str = "", **options: Any) -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix, **options)
        _loaded.add(self)

    made: type[nn.Module] = type(architecture, (base,), {"__init__": remember, "__module__": base.__module__})
    return made


def attention_layers(config: VllmConfig) -> dict[str, Any]:
    """vLLM's attention modules by name, in the order of the layers."""
    context = config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "impl") and hasattr(layer, "kv_cache")}


def model_of(attention: nn.Module) -> nn.Module:
    """The loaded model that holds this attention module.

    Raises:
        ModelNotBlendableError: it was not loaded through this package's plug-in.
    """
    for model in list(_loaded):
        if any(module is attention for module in model.modules()):
            return model
    raise ModelNotBlendableError(
        f"this model is not among the blendable architectures ({', '.join(ARCHITECTURES)}), or vLLM did not load the "
        "plug-in 'cacheblend' (is VLLM_PLUGINS set, and does it leave it out?)"
    )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, in order."""
    inner: Any = model.model
    return list(inner.layers)[inner.start_layer : inner.end_layer]


def embed(model: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """[n, width] input of the first layer."""
    named: Any = getattr(model, "embed_input_ids", None) or model.get_input_embeddings
    hidden: torch.Tensor = named(token_ids)
    return hidden


def attention_spec(layer: Any) -> AttentionSpec:
    """Scaling, window, cap and sinks of an attention module.

    Raises:
        ModelNotBlendableError: its attention has features that blending does not support.
    """
    impl = layer.impl
    if getattr(impl, "alibi_slopes", None) is not None:
        raise ModelNotBlendableError(f"{layer.layer_name} attends with ALiBi slopes, which blending does not support")
    return AttentionSpec(
        scaling=float(impl.scale),
        window=getattr(layer, "sliding_window", None),
        softcap=getattr(impl, "logits_soft_cap", None) or None,
        sinks=getattr(impl, "sinks", None),
    )


def candidate_rotations(layers: Sequence[nn.Module]) -> list[KeyRotation]:
    """Rotations that may apply to the layers' keys, as their rotary modules compute them; the caller tests them."""
    found: list[KeyRotation] = []
    for rotary in {id(m): m for layer in layers for m in layer.modules() if hasattr(m, "cos_sin_cache")}.values():
        module: Any = rotary
        for argument, divisor in ((module.base, 1.0), *_scalings(module)):
            try:
                frequencies = module._compute_inv_freq(argument).detach().cpu().double() / divisor
            except (AttributeError, TypeError, ValueError):
                continue
            found.append(KeyRotation(frequencies, "half" if module.is_neox_style else "interleaved"))
    return found


def _scalings(rotary: Any) -> Iterator[tuple[float, float]]:
    """(argument of `_compute_inv_freq`, divisor) of scaled rotations: YaRN takes the factor, linear scaling divides."""
    factors = [getattr(rotary, "scaling_factor", None), *getattr(rotary, "scaling_factors", [])]
    for factor in factors:
        if isinstance(factor, int | float):
            yield float(factor), 1.0
            yield rotary.base, float(factor)


class AttentionShim:
    """Replaces an attention module in vLLM's look-up, and passes its queries, keys and values to `answer`."""

    def __init__(self, real: Any) -> None:
        self.kv_cache, self.layer_name = real.kv_cache, real.layer_name
        self.impl = self
        self.answer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def do_kv_cache_update(self, *_: Any) -> None:
        """Does nothing: the blended prefill writes fresh KV itself."""

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> torch.Tensor:
        """Attention of [n, heads, head_dim] each; writes to `output` as vLLM's implementations do."""
        if self.answer is None:
            raise RuntimeError(f"{self.layer_name} was called outside of a layer runner")
        output: torch.Tensor = options["output"]
        output.copy_(self.answer(query, key, value).view_as(output))
        return output


@contextmanager
def shimmed(config: VllmConfig, shims: Mapping[str, AttentionShim]) -> Iterator[None]:
    """Inside, vLLM's layers use these shims for their attention, and run without torch.compile."""
    layers = {**config.compilation_config.static_forward_context, **shims}
    context = ForwardContext(
        no_compile_layers=layers,
        attn_metadata=dict.fromkeys(layers),
        slot_mapping={},
        skip_compiled=True,
    )
    with override_forward_context(context):
        yield


def connector_of_worker() -> Any:
    """The connector of the worker in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


# ---- vLLM's paged KV cache ----------------------------------------------------------------------------------


def write_paged(layer: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes rows to a layer's paged cache, in its backend's layout.

    Args:
        layer: vLLM's attention module.
        keys, values: [n, kv_heads, head_dim].
        slots: [n] int64, block * block size + place in the block.
    """
    layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)


def metadata_builder(config: VllmConfig, layer: Any, kv_cache_config: Any) -> Any:
    """A builder of attention metadata for a layer's backend."""
    (group,) = kv_cache_config.kv_cache_groups
    builder = layer.get_attn_backend().get_builder_cls()
    return builder(group.kv_cache_spec, group.layer_names, config, layer.kv_cache.device)


def sequences_metadata(
    builder: Any, first_rows: torch.Tensor, lengths: torch.Tensor, block_ids: torch.Tensor, slots: torch.Tensor
) -> Any:
    """Metadata of sequences that share their blocks; the query rows of each sequence are its last rows.

    Args:
        builder: see `metadata_builder`.
        first_rows: [sequences + 1] int32 on the CPU, the rows of sequence i are first_rows[i] .. first_rows[i + 1] - 1.
        lengths: [sequences] int32 on the CPU, each including its last row.
        block_ids: [blocks] int32 on the cache's device.
        slots: [rows] int64 on the cache's device.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device, count = block_ids.device, len(lengths)
    metadata = CommonAttentionMetadata(
        query_start_loc=first_rows.to(device),
        query_start_loc_cpu=first_rows,
        seq_lens=lengths.to(device),
        num_reqs=count,
        num_actual_tokens=len(slots),
        max_query_len=int(first_rows.diff().max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=block_ids.expand(count, -1).contiguous(),
        slot_mapping=slots,
    )
    return builder.build(0, metadata)


def attend_paged(
    layer: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Any
) -> torch.Tensor:
    """Attention by the backend's own kernel; all [rows, heads, head_dim], and the rows are in the cache already."""
    output = torch.empty_like(query)
    layer.impl.forward(layer, query, keys, values, layer.kv_cache, metadata, output)
    return output


# ---- requests -----------------------------------------------------------------------------------------------


def salt_from(request: Any, first_token: int, block_size: int, salt: bytes) -> None:
    """Renames a request's blocks from `first_token` on, so that no plain request finds them.

    Blocks that lie wholly in front of that token keep their names, and are shared with plain requests.
    """
    hashes = request.block_hashes
    kept = first_token // block_size
    if kept < len(hashes) == request.num_tokens // block_size:
        plain = hashes[kept]
        del hashes[kept:]
        hashes.append(type(plain)(hashlib.sha256(salt + bytes(plain)).digest()[: len(plain)]))
    else:  # that block is not full yet, or a hash covers another span than a block: salt all of them
        request.cache_salt = f"{request.cache_salt or ''}{salt.hex()}"
        hashes.clear()
    request.update_block_hashes()


def cached_tokens(pool: Any, request: Any, block_size: int) -> int:
    """Leading tokens of a request's prompt that vLLM's own prefix cache holds.

    Args:
        pool: vLLM's block pool; None: not known, and counted as empty.
        request: vLLM's.
        block_size: of the paged cache.
    """
    blocks = 0
    for name in request.block_hashes if pool is not None else ():
        if not pool.get_cached_block(name, [0]):
            break
        blocks += 1
    return blocks * block_size


# ---- tensor parallelism -------------------------------------------------------------------------------------


def tp_size() -> int:
    """The number of tensor-parallel ranks."""
    return int(get_tensor_model_parallel_world_size())


def tp_rank() -> int:
    """The tensor-parallel rank of this process."""
    return int(get_tensor_model_parallel_rank())


# ---- refused configurations ---------------------------------------------------------------------------------


def refusals(config: VllmConfig) -> list[str]:
    """Features of a configuration that blending was not tested with, by name; empty if there are none."""
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    text = model.hf_text_config
    architectures = list(getattr(model.hf_config, "architectures", None) or [])
    found = [
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (parallel.data_parallel_size > 1, "data parallelism inside one engine"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "decode context parallelism"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism"),
        (config.lora_config is not None, "LoRA"),
        (config.speculative_config is not None, "speculative decoding"),
        (model.use_mla, "MLA attention"),
        (bool(model.is_multimodal_model), "multimodal models"),
        (model.runner_type == "pooling", "pooling models"),
        (str(cache.cache_dtype) not in ("auto", "bfloat16", "float16"), f"a KV cache of type {cache.cache_dtype}"),
        (
            not set(architectures) & set(ARCHITECTURES),
            f"{' '.join(architectures) or 'a model without architecture'} (blendable are {', '.join(ARCHITECTURES)})",
        ),
        ((getattr(text, "num_kv_shared_layers", 0) or 0) > 0, "layers that share their KV cache"),
    ]
    return [name for wrong, name in found if wrong]
