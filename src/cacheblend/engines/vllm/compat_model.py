"""Every use of vLLM's internals that concerns the loaded model; the rest of them is in `compat`."""

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, override_forward_context

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.layers.attention import AttentionSpec
from cacheblend.core.load.rope import KeyRotation
from cacheblend.engines.vllm.compat import ARCHITECTURES

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
