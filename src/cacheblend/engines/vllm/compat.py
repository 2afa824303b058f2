"""Every use of vLLM's internals; those of the loaded model are in `compat_model`, those of ranks in `compat_ranks`, of
quantised caches in `compat_cache`.

`versions.TESTED` holds the versions that the connector starts on, docs/vllm.md what was run on each.
"""

import hashlib
from typing import Any

import torch
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

from cacheblend.core.plan.blocks import ChunkManifest, KVLayout, LayerShape
from cacheblend.engines.vllm.architectures import ARCHITECTURES
from cacheblend.engines.vllm.compat_cache import refused_cache

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "VllmConfig",
]

FAILS_REQUESTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""A connector may say that a whole request failed (since 0.30), not only which blocks did."""

EVENT_MEDIUM = "CACHEBLEND"
"""The medium of the events about chunks in the store."""


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


def longest_prompt(config: VllmConfig) -> int | None:
    """Tokens up to which prompts can be blended; None: any.

    Blocks that a sliding window has passed are not there. Where a connector can only name blocks, it cannot say that
    such a request failed.
    """
    return None if FAILS_REQUESTS else sliding_window(config)


def sliding_window(config: VllmConfig) -> int | None:
    """Rows that a row attends to at most; None: any."""
    return getattr(config.model_config.hf_text_config, "sliding_window", None) or None


def unsuited(request: Any) -> str:
    """Why vLLM must compute a request: ids do not determine its KV, or it needs all rows' outputs; empty: suited."""
    sampling = request.sampling_params
    reasons = {
        "prompt embeddings": getattr(request, "prompt_embeds", None) is not None,
        "prompt too short": not request.prompt_token_ids or len(request.prompt_token_ids) < 2,
        "pooling": sampling is None,
        "prompt log-probabilities": sampling is not None and sampling.prompt_logprobs is not None,
        "image": bool(getattr(request, "mm_features", None)),
        "LoRA": request.lora_request is not None,
        "asked not to read caches": bool(getattr(request, "skip_reading_prefix_cache", False)),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def salt_from(request: Any, first_token: int, block_size: int, salt: bytes) -> int:
    """Renames a request's blocks from that of `first_token` on, so that no plain request finds them.

    Returns:
        Leading tokens whose blocks keep their names, and are shared with plain requests.
    """
    hashes = request.block_hashes
    kept = first_token // block_size
    if kept < len(hashes) == request.num_tokens // block_size:
        plain = hashes[kept]
        del hashes[kept:]
        hashes.append(_salted(plain, salt))
    else:  # that block is not full yet, or a hash covers another span than a block: salt all of them
        kept = 0
        request.cache_salt = f"{request.cache_salt or ''}{salt.hex()}"
        hashes.clear()
    request.update_block_hashes()
    return kept * block_size


def holds_salted(pool: Any, request: Any, first_token: int, block_size: int, salt: bytes) -> bool:
    """Whether vLLM's prefix cache holds the first block that `salt_from` would rename."""
    kept = first_token // block_size
    if pool is None or not kept < len(request.block_hashes) == request.num_tokens // block_size:
        return False
    return bool(pool.get_cached_block(_salted(request.block_hashes[kept], salt), [0]))


def _salted(name: bytes, salt: bytes) -> bytes:
    return type(name)(hashlib.sha256(salt + bytes(name)).digest()[: len(name)])


def cached_tokens(pool: Any, request: Any, block_size: int) -> int:
    """Leading tokens of a request's prompt that vLLM's own prefix cache holds.

    vLLM computes at least the last token, so that a block which holds it does not count.

    Args:
        pool: vLLM's block pool; None: not known, and counted as empty.
        request: vLLM's.
        block_size: of the paged cache.
    """
    most = (request.num_tokens - 1) // block_size
    blocks = 0
    for name in request.block_hashes[:most] if pool is not None else ():
        if not pool.get_cached_block(name, [0]):
            break
        blocks += 1
    return blocks * block_size


def stored_event(chunk: ChunkManifest, block_size: int) -> Any:
    """vLLM's event that a chunk's blocks are in the store; their names are the store's."""
    from vllm.distributed.kv_events import BlockStored

    return BlockStored(
        block_hashes=list(chunk.block_names),
        parent_block_hash=None,
        token_ids=chunk.token_ids.tolist(),
        block_size=block_size,
        lora_id=None,
        medium=EVENT_MEDIUM,
        lora_name=None,
    )


def removed_event(chunk: ChunkManifest) -> Any:
    """vLLM's event that a chunk was taken off the store's list."""
    from vllm.distributed.kv_events import BlockRemoved

    return BlockRemoved(block_hashes=list(chunk.block_names), medium=EVENT_MEDIUM)


def kv_layout(config: VllmConfig, codec: str = "raw") -> KVLayout:
    """The layout of the model's KV cache, of all heads."""
    model = config.model_config
    shape = LayerShape(int(model.get_total_num_kv_heads()), int(model.get_head_size()))
    return KVLayout((shape,) * int(model.get_num_layers(config.parallel_config)), model.dtype, codec)


def publishes_events(config: VllmConfig) -> bool:
    """Whether the engine publishes events of its KV cache."""
    events = config.kv_events_config
    return bool(events is not None and events.enable_kv_cache_events)


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
        (
            str(parallel.distributed_executor_backend) == "external_launcher" and parallel.world_size > 1,
            "several ranks of an external launcher, each with a scheduler of its own",
        ),
        (bool(refused := refused_cache(cache, model.hf_config)), refused),
        (
            not set(architectures) & set(ARCHITECTURES),
            f"{' '.join(architectures) or 'a model without architecture'} (blendable are {', '.join(ARCHITECTURES)})",
        ),
        ((getattr(text, "num_kv_shared_layers", 0) or 0) > 0, "layers that share their KV cache"),
    ]
    return [name for wrong, name in found if wrong]
