"""Finds the KV layout, rotations and limits that blending needs, by running the loaded model. Refuses other models.

The running is done by `probing`.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.core.fuse.prefill import check_latents, check_selector
from cacheblend.core.kernels.attention_spec import HeadShape
from cacheblend.core.kernels.rope import KeyRotation
from cacheblend.core.plan.blocks import KVLayout
from cacheblend.core.select.late import Late
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf.configs import check_config, shift_limits
from cacheblend.engines.hf.latent import LatentShape
from cacheblend.engines.hf.layer_probe import ROWS, Probe
from cacheblend.engines.hf.recurrent import LayerKinds
from cacheblend.engines.hf.view import ModelView


@dataclass(frozen=True)
class Survey:
    """What blending needs to know of a model that it supports.

    Layout, rotations, windows, heads and latents are of the layers with attention (`kinds.kv_layers`), in order; of
    most models that is every layer.

    Attributes:
        layout: layout of the KV cache.
        rotations: one per layer, None if the layer's keys carry no position (NoPE).
        windows: sliding window of each layer in tokens, None for full attention.
        heads: query heads of each layer.
        latents: what each layer with latent attention keeps; None for layers that keep keys and values of heads.
        kinds: which of the model's layers have attention, and which keep a state.
        length_limit: longest prompt in tokens whose keys can be shifted; None: only the context limits it. Longer
            prompts use other RoPE frequencies at all positions, so KV of shorter prompts cannot be reused in them.
        context_length: the model's context in tokens, None if its config has none.
        vocab_size: token ids are 0..vocab_size - 1.
    """

    layout: KVLayout
    rotations: tuple[KeyRotation | None, ...]
    windows: tuple[int | None, ...]
    heads: tuple[int, ...]
    latents: tuple[LatentShape | None, ...]
    kinds: LayerKinds
    length_limit: int | None
    context_length: int | None
    vocab_size: int

    @property
    def head_shapes(self) -> list[HeadShape]:
        """Of each layer, for kernels."""
        layers = zip(self.heads, self.layout.layers, self.latents, self.windows, strict=True)
        return [
            HeadShape(heads, shape.kv_heads, latent.width if latent else shape.head_dim, window, latent is not None)
            for heads, shape, latent, window in layers
        ]

    @property
    def num_layers(self) -> int:
        """The model's decoder layers, with and without attention."""
        return self.kinds.num_layers

    def fit_selector(self, selector: Selector) -> Selector:
        """The selector for this model; behind recurrent layers its checks are made later (`Late`).

        Raises:
            InvalidInputError: it checks at a layer that the model does not have, compares keys or values alone where a
                layer keeps one vector for both, or asks the question's rows where these need a state.
        """
        if any(self.latents):
            check_latents(selector)
        selector = check_selector(selector, self.num_layers)
        if not self.kinds.has_other_layers:
            return selector
        if selector.question_rows and self.kinds.states:
            raise InvalidInputError(
                f"selector {selector.name!r} asks the question's rows before the first layer, but layer "
                f"{min(self.kinds.states)} of this model needs the state of all rows in front of them; use hkvd"
            )
        checked = [layer for layer in self.kinds.kv_layers if layer >= self.kinds.first_to_drop]
        return Late.of(selector, checked)

    @property
    def max_length(self) -> int | None:
        """Longest prompt with its answer: the context, or LongRoPE's switch if that is shorter; None: no limit."""
        return min((n for n in (self.context_length, self.length_limit) if n is not None), default=None)

    @property
    def max_length_reason(self) -> str:
        """The origin of `max_length`, for messages."""
        if self.length_limit is not None and self.max_length == self.length_limit:
            return "LongRoPE's switch, up to which this model can be blended, at"
        return "the model's context"


@torch.no_grad()
def survey_model(model: PreTrainedModel, view: ModelView | None = None) -> Survey:
    """Surveys a loaded model by running a few rows through each layer; `view`: of the model, where there is one.

    Raises:
        ModelNotBlendableError: the model cannot be blended; the message says why.
        InvalidInputError: it is in training mode.
    """
    check_mode(model)
    config = model.config.get_text_config(decoder=True)
    check_config(model.config)
    view = view or ModelView(model)
    limit = min((n for n in shift_limits(config) if n is not None), default=None)
    context = getattr(config, "max_position_embeddings", None)
    furthest = max(1, (limit or context or 4096) - ROWS)
    probe = Probe(model, view, shifts=(min(13, furthest), furthest))
    probe.check_calls()
    found = [probe.layer(index) for index in range(len(view.layers))]
    view.stepped = frozenset(probe.stepped)
    layers = [layer for layer in found if layer is not None]
    dtypes = {layer.dtype for layer in layers}
    if not layers:
        raise ModelNotBlendableError(f"no layer of {type(model).__name__} has attention; only a prefix could be reused")
    if len(dtypes) != 1:
        raise ModelNotBlendableError(f"the layers' keys have several dtypes: {dtypes}; they must have one")
    return Survey(
        layout=KVLayout(tuple(layer.shape for layer in layers), dtypes.pop()),
        rotations=tuple(layer.rotation for layer in layers),
        windows=tuple(layer.window for layer in layers),
        heads=tuple(layer.heads for layer in layers),
        latents=tuple(layer.latent for layer in layers),
        kinds=LayerKinds(
            len(found),
            tuple(i for i, layer in enumerate(found) if layer is not None),
            probe.states,
            frozenset(probe.stepped),
        ),
        length_limit=limit,
        context_length=context,
        vocab_size=model.get_input_embeddings().num_embeddings,
    )


def check_mode(model: PreTrainedModel) -> None:
    """Refuses a model in training mode: with dropout no two passes agree, and what is stored would be one of them.

    It is not switched: the model is the caller's, who may be in the middle of training it.

    Raises:
        InvalidInputError: the model, or a part of it that drops something, is in training mode.
    """
    found = next((name for name, module in model.named_modules() if module.training and _is_random(module)), None)
    if model.training or found:
        raise InvalidInputError(
            f"{f'{found} of ' if found else ''}{type(model).__name__} is in training mode, in which dropout makes "
            "every pass another one; call model.eval() first"
        )


def _is_random(module: nn.Module) -> bool:
    """Whether a module drops something in training mode: it is a dropout, or has a rate of one, as attentions do."""
    rates = {"p": getattr(module, "p", 0.0)} if isinstance(module, nn.modules.dropout._DropoutNd) else vars(module)
    return any(isinstance(rate, float) and rate > 0 for name, rate in rates.items() if name == "p" or "drop" in name)
