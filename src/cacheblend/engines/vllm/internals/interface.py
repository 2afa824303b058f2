"""vLLM's connector interface, requests, events, and what of its configuration is refused."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from vllm.config import VllmConfig as VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank as get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata as KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole as KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata as KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA as SupportsHMA  # serves groups of KV cache
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics as KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats as KVConnectorStats
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.request import RequestStatus

from cacheblend.core.plan.blocks import ChunkManifest, KVLayout, LayerShape
from cacheblend.engines.vllm.internals.attention_shim import is_latent, write_latents
from cacheblend.engines.vllm.internals.kv_cache import is_fp8, refused_cache

EVENT_MEDIUM = "CACHEBLEND"  # the medium of the events about chunks in the store


def register_connector(name: str, module: str) -> None:
    """Has vLLM find a module's connector by its name alone."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


def connector_of_worker() -> Any:
    """That of this worker's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def calling_scheduler() -> SchedulerInterface | None:
    """The scheduler that makes a connector, of which vLLM tells it nothing: found among the callers."""
    return next((each for each in _callers() if isinstance(each, SchedulerInterface)), None)


def _callers() -> Iterator[Any]:
    """The objects whose methods are being carried out in this thread, and no object for each function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def pause_of(scheduler: SchedulerInterface | None) -> Callable[[], bool]:
    """Tells whether vLLM is paused, or about to be once nothing is left to do, or about to end; never, if there is no
    scheduler. Called where that is made, by the engine whose process ends."""
    if scheduler is None:
        return lambda: False
    known = weakref.ref(scheduler)  # it holds the connector
    process = next((each for each in _callers() if "EngineCoreProc" in (k.__name__ for k in type(each).__mro__)), None)
    ending = None if process is None else weakref.ref(process)

    def is_paused() -> bool:
        found, engine = known(), None if ending is None else ending()
        is_ending = getattr(engine, "shutdown_state", 0) != 0  # while requests are made, it waits for its last ones
        return is_ending or (found is not None and found.pause_state != PauseState.UNPAUSED)

    return is_paused


def names_computed(scheduler: SchedulerInterface | None, connector: type) -> bool:
    """Whether a block that has a name holds what vLLM computed, or this connector gave: it is not in a
    `MultiConnector`, and a request that is preempted in the step that schedules it, for one of a higher priority,
    leaves no names of what was not computed. Of a scheduler that is not vLLM's own nobody knows."""
    config: Any = getattr(scheduler, "vllm_config", None)
    if config is None or config.kv_transfer_config.kv_connector != connector.__name__:
        return False
    return str(config.scheduler_config.policy) == "fcfs" and type(scheduler).__module__.startswith("vllm.")


def is_one_process(config: VllmConfig) -> bool:
    """The scheduler's side and the only rank share a process."""
    parallel = config.parallel_config
    return parallel.world_size == 1 and parallel.distributed_executor_backend in (None, "uni")


def write_paged(layer: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes rows [n, kv_heads, head_dim] to a layer's paged cache, in its backend's layout; `slots`: [n] int64, block
    * block size + place in the block."""
    if is_latent(layer):
        write_latents(layer, keys, values, slots)
    else:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)


def metadata_builders(config: VllmConfig, layers: Sequence[Any], kv_cache_config: Any) -> list[Any]:
    """A builder of attention metadata for each group of KV cache, by the backend of its first layer; None: the group
    has none of these layers, but a drafter's."""
    found: list[Any] = []
    named = {layer.layer_name: layer for layer in layers}
    for group in kv_cache_config.kv_cache_groups:
        layer = next((named[name] for name in group.layer_names if name in named), None)
        if layer is None:
            found.append(None)
            continue
        builder = layer.get_attn_backend().get_builder_cls()
        spec = group.kv_cache_spec  # of several where a drafter's layers have other heads
        spec = getattr(spec, "kv_cache_specs", {}).get(layer.layer_name, spec)
        found.append(builder(spec, group.layer_names, config, layer.kv_cache.device))
    return found


def sequences_metadata(
    builder: Any, first_rows: torch.Tensor, lengths: torch.Tensor, block_ids: torch.Tensor, slots: torch.Tensor
) -> Any:
    """Metadata of sequences that share their blocks; the query rows of each sequence are its last rows. On the CPU:
    `first_rows`, [sequences + 1] int32, the rows of sequence i are first_rows[i] .. first_rows[i + 1] - 1, and
    `lengths`, [sequences] int32, each including its last row. `block_ids` and `slots` are [blocks] int32 and [rows]
    int64 on the cache's device."""
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


def unsuited(request: Any) -> str:
    """Why vLLM must compute a request: ids do not determine its KV, or it needs all rows' outputs; empty: suited."""
    sampling = request.sampling_params
    reasons = {
        "prompt embeddings": getattr(request, "prompt_embeds", None) is not None,
        "prompt too short": not request.prompt_token_ids or len(request.prompt_token_ids) < 2,
        "pooling": sampling is None,
        "prompt log-probabilities": sampling is not None
        and (sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None),
        "image": text_tokens(request) < 2,
        "asked not to read caches": bool(getattr(request, "skip_reading_prefix_cache", False)),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def text_tokens(request: Any) -> int:
    """Leading tokens of a request's prompt that stand before its first image (or video, or sound), or all. Their KV
    follows from their ids, and their positions are their places, in models whose positions have several parts, too."""
    items = getattr(request, "mm_features", None) or []
    return min([len(request.prompt_token_ids or ()), *(int(item.mm_position.offset) for item in items)])


def is_open(request: Any) -> bool:
    """Whether a request is a session that waits for its client's next piece: vLLM has nothing to compute of it."""
    return bool(request.status == RequestStatus.WAITING_FOR_STREAMING_REQ)


def answer_of(request: Any) -> list[int]:
    """The tokens that a request has been answered with; none behind an image, whose KV is of more than ids."""
    return [] if has_images(request) else list(request.output_token_ids)


def has_images(request: Any) -> bool:
    """Whether ids alone do not say what a request's prompt is."""
    return bool(getattr(request, "mm_features", None))


def events_of(added: Sequence[ChunkManifest], removed: Sequence[ChunkManifest], block_size: int) -> list[Any]:
    """vLLM's events that chunks' blocks are in the store, or were taken off its list; their names are the store's."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    same: dict[str, Any] = {"parent_block_hash": None, "block_size": block_size, "lora_id": None, "lora_name": None}
    same["medium"] = EVENT_MEDIUM
    return [
        *(BlockStored(block_hashes=[*one.block_names], token_ids=one.token_ids.tolist(), **same) for one in added),
        *(BlockRemoved(block_hashes=[*one.block_names], medium=EVENT_MEDIUM) for one in removed),
    ]


def kv_layout(config: VllmConfig, codec: str = "raw") -> KVLayout:
    """The layout of the model's KV cache, of all heads."""
    model = config.model_config
    heads, head_dim = int(model.get_total_num_kv_heads()), int(model.get_head_size())
    shape = LayerShape(1, head_dim // 2) if model.use_mla else LayerShape(heads, head_dim)
    return KVLayout((shape,) * int(model.get_num_layers(config.parallel_config)), model.dtype, codec)


SPECULATION = ("ngram", "eagle", "draft_model")  # ways to speculate that blending was tested with


def refused_speculation(speculative: Any) -> str:
    """What is refused about a way to speculate; or ""."""
    method = "" if speculative is None else str(speculative.method)
    if not method or method in SPECULATION:
        return ""
    return f"speculative decoding by {method!r} (blending runs beside {', '.join(SPECULATION)}; or leave it out)"


def draft_blocks(config: VllmConfig, groups: int) -> int:
    """Blocks of all groups of KV cache that vLLM keeps free for a step's drafts beside a prompt that is loaded; at
    most, as versions count what they look ahead by."""
    if config.speculative_config is None:
        return 0
    drafts = 2 * (1 + int(config.speculative_config.num_speculative_tokens))
    return groups * -(-drafts // int(config.cache_config.block_size))


def refusals(config: VllmConfig) -> list[str]:
    """Features of a configuration that blending was not tested with, by name; empty if there are none."""
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    offload, text = config.offload_config, model.hf_text_config
    speculation, kv_cache = refused_speculation(config.speculative_config), refused_cache(cache, model.hf_config)
    beside_latents = {
        "LoRA (leave --enable-lora out)": config.lora_config is not None,
        "an FP8 cache (use --kv-cache-dtype bfloat16)": is_fp8(cache, model.hf_config),
        "speculative decoding (leave it out)": config.speculative_config is not None,
    }
    named = ", ".join(name for name, applies in beside_latents.items() if applies)
    selected = getattr(text, "index_topk", None)  # DeepSeek-V3.2
    found = {
        "pipeline parallelism (a stage has some of the layers: --tensor-parallel-size divides the model instead, "
        "--data-parallel-size the requests)": parallel.pipeline_parallel_size > 1,
        "data parallelism of a mixture of experts (start several servers instead)": parallel.data_parallel_size > 1,
        "--prefix-match-unit (leave it out: a hash is then of less than a block)": (
            cache.prefix_match_unit not in (None, cache.block_size)
        ),
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        speculation: bool(speculation),
        f"{getattr(text, 'model_type', 'a model')} with sparse attention to the {selected} tokens that an indexer "
        "selects (index_topk): the indexer's own keys are not in the store": bool(selected),
        f"MLA attention beside {named}": bool(model.use_mla and named),
        "pooling models": model.runner_type == "pooling",
        "several ranks of an external launcher, each with a scheduler of its own": parallel.world_size > 1
        and str(parallel.distributed_executor_backend) == "external_launcher",
        kv_cache: bool(kv_cache),
        "an encoder, to whose output layers attend beside the prompt": model.is_encoder_decoder,
        "sleep mode, which frees the memory that blending reads (leave --enable-sleep-mode out)": (
            model.enable_sleep_mode
        ),
        "--enable-return-routed-experts (leave it out: vLLM would miss those of all tokens that are provided)": (
            config.aux_output_config.enabled
        ),
        "layers with a recurrent state beside attention": model.is_hybrid,
        "weights that are fetched before each layer (leave --offload-group-size out): layers run in other orders": (
            offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0
        ),
        "layers that share their KV cache": (getattr(text, "num_kv_shared_layers", 0) or 0) > 0,
    }
    return [name for name, applies in found.items() if applies]
