"""Every use of vLLM's internals that concerns the loaded model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, override_forward_context

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.attention import AttentionSpec, HeadShape
from cacheblend.core.kernels.operations import is_served
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.engines.vllm import stores
from cacheblend.engines.vllm.calls import RecordedCall
from cacheblend.engines.vllm.config import read_config
from cacheblend.engines.vllm.internals.attention_shim import AttentionShim, is_latent
from cacheblend.engines.vllm.internals.kv_cache import is_fp8, plain_queries
from cacheblend.engines.vllm.workspace import ModelSizes


def connector_settings(config: VllmConfig) -> dict[str, Any] | None:
    """This connector's `kv_connector_extra_config`, also inside a MultiConnector; None: it is not configured."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return None
    extra = dict(transfer.kv_connector_extra_config or {})
    inner = extra.get("connectors", []) if transfer.kv_connector == "MultiConnector" else []
    named = [(transfer.kv_connector, extra), *((each.get("kv_connector"), each) for each in inner)]
    for name, found in named:
        if name == "CacheBlendConnector":
            return dict(found.get("kv_connector_extra_config") or {}) if found is not extra else extra
    return None


def model_sizes(config: VllmConfig, device: torch.device, extra: Mapping[str, Any]) -> ModelSizes:
    """What blending's memory depends on, of this rank."""
    model, text = config.model_config, config.model_config.hf_text_config
    ranks = max(1, int(config.parallel_config.tensor_parallel_size))
    wide = int(getattr(text, "intermediate_size", 0) or 0)
    experts = int(getattr(text, "num_experts_per_tok", 0) or 0)
    if experts:
        wide = experts * int(getattr(text, "moe_intermediate_size", 0) or wide)
    head_dim, is_cuda = int(model.get_head_size()), device.type == "cuda"
    heads = int(model.get_num_attention_heads(config.parallel_config))
    kv_heads, latent = int(model.get_num_kv_heads(config.parallel_config)), bool(model.use_mla)
    float8 = is_fp8(config.cache_config, model.hf_config)
    shape = HeadShape(heads, kv_heads, head_dim, is_latent=latent)
    has_kernels = is_cuda and is_served(device, model.dtype, shape, float8=float8)
    settings, longest = read_config(extra), int(model.max_model_len)
    in_pages = has_kernels if settings.in_pages is None else settings.in_pages
    passes_blocks = (getattr(text, "sliding_window", None) or longest) < longest  # whose layers have buffers then
    return ModelSizes(
        layers=int(model.get_num_layers(config.parallel_config)),
        width=int(model.get_hidden_size()),
        intermediate=-(-wide // ranks),
        query_width=heads * head_dim,
        kv_width=head_dim // 2 if latent else kv_heads * head_dim,
        head_dim=head_dim,
        item_bytes=int(model.dtype.itemsize),
        longest=longest,
        tile_rows=int(config.scheduler_config.max_num_batched_tokens),
        has_kernels=has_kernels,
        in_pages=in_pages and not passes_blocks and not latent,  # most layouts have pages; no cache can be asked yet
        checked_vocab=int(model.get_vocab_size()) if settings.shadow_settings else 0,
        tier_bytes=stores.device_bytes(settings.store),
        has_histories=settings.blend.edits,
    )


def attention_layers(config: VllmConfig) -> dict[str, Any]:
    """vLLM's attention modules by name, in the order of the layers."""
    context = config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "impl") and hasattr(layer, "kv_cache")}


def text_decoder(model: nn.Module, config: VllmConfig) -> nn.Module:
    """What computes prompts of text: of a multimodal model, the language model in it; else the model. Raises
    ModelNotBlendableError: vLLM does not say which module it is. The multimodal model itself keeps what it made of the
    images of the present engine step (Qwen3-VL's features for the first layers, ERNIE's mask of image tokens) until its
    next forward, which must not be one of ours."""
    if not config.model_config.is_multimodal_model:
        return model
    try:
        return cast(nn.Module, cast(Any, model).get_language_model())
    except (AttributeError, NotImplementedError) as error:
        raise ModelNotBlendableError(
            f"{type(model).__name__} does not tell which of its modules is the language model"
        ) from error


def forward_as_served(model: Any, config: VllmConfig, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A multimodal model's forward [n, width] of text, called as vLLM's runner does: with embeddings, and positions [3,
    n] where images have rows and columns."""
    given = config.model_config
    nothing = torch.zeros(len(token_ids), dtype=torch.bool, device=token_ids.device)
    embeddings = model.embed_input_ids(token_ids, multimodal_embeddings=[], is_multimodal=nothing)
    if given.uses_mrope:
        positions = positions.expand(getattr(given, "mrope_num_dims", 3), -1)
    raw = token_ids if getattr(model, "requires_raw_input_tokens", False) else None
    out: torch.Tensor = model(input_ids=raw, positions=positions, intermediate_tensors=None, inputs_embeds=embeddings)
    return out


def layers_with(model: nn.Module, attention: Sequence[nn.Module]) -> list[nn.Module]:
    """The decoder layers, in order: of a list of modules, each holds one of these attention modules. Raises
    ModelNotBlendableError: there is no such list."""
    wanted, name = {id(each) for each in attention}, type(model).__name__
    for modules in (each for each in model.modules() if isinstance(each, nn.ModuleList)):
        held = [sum(id(each) in wanted for each in layer.modules()) for layer in modules]
        if sum(held) < len(wanted):
            continue
        if set(held) == {1}:
            return list(modules)
        other = next(index for index, count in enumerate(held) if count != 1)
        raise ModelNotBlendableError(
            f"layer {other} of {name} has {held[other]} attention modules with a KV cache; blending needs one in each "
            "layer"
        )
    raise ModelNotBlendableError(f"the {len(wanted)} attention modules of {name} do not sit in one list of layers")


def attention_spec(layer: Any) -> AttentionSpec:
    """Scaling, window, cap and sinks of an attention module. Raises ModelNotBlendableError: its attention has features
    that blending does not support."""
    impl = layer.impl
    if type(layer).__name__ != "Attention":
        raise ModelNotBlendableError(
            f"{layer.layer_name} is a {type(layer).__name__}, which attends otherwise than vLLM's plain Attention"
        )
    if getattr(layer, "kv_sharing_target_layer_name", None):
        raise ModelNotBlendableError(f"{layer.layer_name} shares the KV cache of another layer")
    if getattr(impl, "alibi_slopes", None) is not None:
        raise ModelNotBlendableError(f"{layer.layer_name} attends with ALiBi slopes, which blending does not support")
    return AttentionSpec(
        scaling=float(impl.scale),
        window=getattr(layer, "sliding_window", None),
        softcap=getattr(impl, "logits_soft_cap", None) or None,
        sinks=getattr(impl, "sinks", None),
    )


def candidate_rotations(model: nn.Module) -> list[KeyRotation]:
    """Rotations that may apply to the layers' keys, as the rotary modules compute them; the caller tests them."""
    found: list[KeyRotation] = []
    for rotary in (each for each in model.modules() if hasattr(each, "cos_sin_cache")):
        module: Any = rotary
        tried = [(module.base, 1.0)]  # argument of `_compute_inv_freq`, divisor
        for factor in (getattr(module, "scaling_factor", None), *getattr(module, "scaling_factors", [])):
            if isinstance(factor, int | float):  # YaRN takes the factor, linear scaling divides
                tried += [(float(factor), 1.0), (module.base, float(factor))]
        for argument, divisor in tried:
            try:
                frequencies = module._compute_inv_freq(argument).detach().cpu().double() / divisor
            except (AttributeError, TypeError, ValueError):
                continue
            found.append(KeyRotation(frequencies, "half" if module.is_neox_style else "interleaved"))
    for name, buffer in model.named_buffers():  # transformers' own modules
        if name.endswith("inv_freq") and buffer.dim() == 1:
            frequencies = buffer.detach().cpu().double()
            found += [KeyRotation(frequencies, "half"), KeyRotation(frequencies, "interleaved")]
    return found


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
    with plain_queries([shim.real for shim in shims.values()]), override_forward_context(context):
        yield


@contextmanager
def recording_calls(layers: Sequence[nn.Module]) -> Iterator[list[RecordedCall]]:
    """The calls of decoder layers that are made inside, in order."""
    found: list[RecordedCall] = []
    given: list[tuple[list[Any], Any, list[Any]]] = []

    def copies(leaves: Sequence[Any]) -> list[Any]:
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def begin(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given.append((leaves, spec, copies(leaves)))

    def end(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs, spec = pytree.tree_flatten(output)
        found.append(RecordedCall(*given.pop(), outputs, spec, copies(outputs)))

    hooks = [layer.register_forward_pre_hook(begin, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(end, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def computed_by(
    modules: Sequence[Any], functions: Sequence[Callable[..., Any]], attribute: str = "forward"
) -> Iterator[None]:
    """Inside, these functions stand in for the modules' own. Afterwards they are what they were: where weights are kept
    on the host, vLLM has set a `forward` that brings them."""
    before = [module.__dict__.get(attribute) for module in modules]
    for module, function in zip(modules, functions, strict=True):
        module.__dict__[attribute] = function
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.__dict__.pop(attribute, None)
            if own is not None:
                module.__dict__[attribute] = own


def cpu_kernels(layer: nn.Module) -> list[tuple[Any, Callable[..., Any]]]:
    """A layer's norms and rotations, which are many small operations if uncompiled, with vLLM's own CPU kernels for
    their `_forward_method`."""
    found: list[tuple[Any, Callable[..., Any]]] = []
    slices = any(is_latent(module) for module in layer.modules())  # of queries are turned: the kernel needs them whole
    for module in layer.modules():
        named = type(module).__name__
        if named == "RMSNorm" and hasattr(torch.ops._C, "fused_add_rms_norm") and hasattr(module, "_forward_method"):
            found.append((module, _norm_of(module)))
        elif named == "RotaryEmbedding" and hasattr(module, "forward_cpu") and hasattr(module, "_forward_method"):
            found += [] if slices else [(module, cast(Any, module).forward_cpu)]
    return found


def _norm_of(module: Any) -> Callable[..., Any]:
    native, epsilon = module._forward_method, module.variance_epsilon

    def norm(hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        plain = getattr(module, "variance_size_override", None) is None and module.weight.dtype == hidden.dtype
        if not plain or not hidden.is_contiguous():  # as the kernels need it
            return native(hidden, residual)
        if residual is None:
            out = torch.empty_like(hidden)
            torch.ops._C.rms_norm(out, hidden, module.weight.data, epsilon)
            return out
        torch.ops._C.fused_add_rms_norm(hidden, residual, module.weight.data, epsilon)
        return hidden, residual

    return norm
