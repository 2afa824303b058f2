"""Every use of vLLM's internals that concerns the loaded model; the rest of them is in `compat`."""

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, override_forward_context

from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.core.kernels.attention_spec import AttentionSpec, HeadShape
from cacheblend.core.kernels.operations import is_served
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.engines.vllm.architectures import ARCHITECTURES
from cacheblend.engines.vllm.compat_cache import is_fp8, plain_queries
from cacheblend.engines.vllm.config import read_config
from cacheblend.engines.vllm.workspace import ModelSizes, gib, workspace_of

_loaded: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def known_architectures() -> list[str]:
    """Those of `ARCHITECTURES` that this vLLM has.

    Raises:
        ImportError: it keeps its models elsewhere.
    """
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    return [name for name in ARCHITECTURES if name in _TEXT_GENERATION_MODELS]


def recording(architecture: str) -> type[nn.Module]:
    """vLLM's class of that name, which also remembers its instances: vLLM does not pass a connector the model."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    module, name = _TEXT_GENERATION_MODELS[architecture]
    base = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)

    def remember(self: nn.Module, *, vllm_config: VllmConfig, prefix: str = "", **options: Any) -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix, **options)
        _loaded.add(self)
        _reserve(self, vllm_config)

    made: type[nn.Module] = type(architecture, (base,), {"__init__": remember, "__module__": base.__module__})
    return made


_reserved: "weakref.WeakKeyDictionary[nn.Module, torch.Tensor]" = weakref.WeakKeyDictionary()


def _reserve(model: nn.Module, config: VllmConfig) -> None:
    """Takes the memory that blending will need: vLLM counts it as weights, and makes its KV cache smaller by it.

    Raises:
        InvalidInputError: the GPU has less.
    """
    extra, device = connector_settings(config), next(model.parameters()).device
    if extra is None or device.type == "cpu":
        return
    wanted = read_config(extra).workspace_bytes
    wanted = workspace_of(model_sizes(config, device, extra)).total if wanted is None else wanted
    try:
        _reserved[model] = torch.empty(wanted, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise InvalidInputError(
            f"the GPU has no {gib(wanted)} for blending beside the weights; set workspace_bytes, max_model_len or "
            "max_num_batched_tokens lower"
        ) from error


def release_reserved() -> int:
    """Frees what was taken when models were loaded; bytes. PyTorch keeps them for this process."""
    freed = sum(taken.numel() for taken in _reserved.values())
    _reserved.clear()
    return freed


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
    """What blending's memory depends on, of this rank.

    Args:
        config: vLLM's.
        device: of the model.
        extra: see `connector_settings`.
    """
    model, text = config.model_config, config.model_config.hf_text_config
    ranks = max(1, int(config.parallel_config.tensor_parallel_size))
    wide = int(getattr(text, "intermediate_size", 0) or 0)
    experts = int(getattr(text, "num_experts_per_tok", 0) or 0)
    if experts:
        wide = experts * int(getattr(text, "moe_intermediate_size", 0) or wide)
    head_dim, is_cuda = int(model.get_head_size()), device.type == "cuda"
    heads = int(model.get_num_attention_heads(config.parallel_config))
    kv_heads = int(model.get_num_kv_heads(config.parallel_config))
    float8 = is_fp8(config.cache_config, model.hf_config)
    has_kernels = is_cuda and is_served(device, model.dtype, HeadShape(heads, kv_heads, head_dim), float8=float8)
    settings = read_config(extra)
    in_pages = settings.in_pages
    return ModelSizes(
        layers=int(model.get_num_layers(config.parallel_config)),
        width=int(model.get_hidden_size()),
        intermediate=-(-wide // ranks),
        query_width=heads * head_dim,
        kv_width=kv_heads * head_dim,
        head_dim=head_dim,
        item_bytes=int(model.dtype.itemsize),
        longest=int(model.max_model_len),
        tile_rows=int(config.scheduler_config.max_num_batched_tokens),
        has_kernels=has_kernels,
        in_pages=has_kernels if in_pages is None else in_pages,  # most layouts have pages; no cache can be asked yet
        checked_vocab=int(model.get_vocab_size()) if settings.shadow_settings else 0,
    )


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


def logits(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor | None:
    """[n, vocab] of the last layer's output, [n, width]; None on ranks that do not sample."""
    named: Any = model
    found: torch.Tensor | None = named.compute_logits(named.model.norm(hidden))
    return found


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
        self.real, self.kv_cache, self.layer_name = real, real.kv_cache, real.layer_name
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
        if query.dtype != output.dtype:
            raise ModelNotBlendableError(
                f"{self.layer_name} quantises its queries to {query.dtype}; start vLLM with --kv-cache-dtype bfloat16"
            )
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
    with plain_queries([shim.real for shim in shims.values()]), override_forward_context(context):
        yield


@contextmanager
def recording_inputs(layers: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """The inputs of decoder layers that are called inside, [n, width] each: hidden state and residual added."""
    found: list[torch.Tensor] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("positions", "hidden_states", "residual"), args, strict=False)) | kwargs
        hidden, residual = given["hidden_states"], given.get("residual")
        found.append(hidden.clone() if residual is None else hidden + residual)

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


Replacement = tuple[Any, Callable[..., Any]]
"""A module, and what computes in its place."""


def cpu_kernels(layer: nn.Module) -> list[Replacement]:
    """vLLM's own CPU kernels for a layer's norms and rotations, which are many small operations if uncompiled."""
    found: list[Replacement] = []
    for module in layer.modules():
        named = type(module).__name__
        if named == "RMSNorm" and hasattr(torch.ops._C, "fused_add_rms_norm") and hasattr(module, "_forward_method"):
            found.append((module, _norm_of(module)))
        elif named == "RotaryEmbedding" and hasattr(module, "forward_cpu") and hasattr(module, "_forward_method"):
            found.append((module, cast(Any, module).forward_cpu))
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


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Inside, these modules compute by other functions."""
    before = [module._forward_method for module, _ in replacements]
    for module, function in replacements:
        module.__dict__["_forward_method"] = function
    try:
        yield
    finally:
        for (module, _), function in zip(replacements, before, strict=True):
            module.__dict__["_forward_method"] = function
