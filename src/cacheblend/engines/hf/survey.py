"""Finds the KV layout, rotations and limits that blending needs, by running the loaded model. Refuses other models.

Nothing is looked up by architecture. Each layer's keys are computed at some positions and at shifted positions; the
layer's rotation is the one that turns the former into the latter. If there is none, the model is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.core.fuse.prefill import check_selector
from cacheblend.core.kernels.attention_spec import AttentionSpec, HeadShape
from cacheblend.core.kernels.operations import attend_rows
from cacheblend.core.kernels.rope import KeyRotation, Pairing, reposition_keys, turn_by
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf.configs import check_config, shift_limits
from cacheblend.engines.hf.latent import LatentShape, check_caching, latent_shape
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.view import LayerMask, ModelView

ROWS = 5
TOLERANCE = 0.05  # relative to a pair's norm: bf16 rounding is 0.004, a wrong rotation gives about 1
PER_ROW_ARGUMENTS = ("position_embeddings", "position_ids", "cache_position", "attention_mask")


@dataclass(frozen=True)
class Survey:
    """What blending needs to know of a model that it supports.

    Attributes:
        layout: layout of the KV cache.
        rotations: one per layer, None if the layer's keys carry no position (NoPE).
        windows: sliding window of each layer in tokens, None for full attention.
        heads: query heads of each layer.
        latents: what each layer with latent attention keeps; None for layers that keep keys and values of heads.
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

    def check_selector(self, selector: Selector) -> Selector:
        """The selector for this model.

        Raises:
            InvalidInputError: it checks at a layer that the model does not have, or compares keys or values alone where
                a layer keeps one vector for both.
        """
        if selector.check_layers and selector.measure != "kv" and any(self.latents):
            raise InvalidInputError(
                f"measure {selector.measure!r} compares keys or values alone, but this model keeps one latent for "
                "both; use measure 'kv', which compares latent and rotated key part"
            )
        return check_selector(selector, len(self.layout.layers))

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
def survey_model(model: PreTrainedModel, view: ModelView) -> Survey:
    """Surveys a loaded model by running a few rows through each layer.

    Raises:
        ModelNotBlendableError: the model cannot be blended; the message says why.
        InvalidInputError: it is in training mode.
    """
    check_mode(model)
    config = model.config.get_text_config(decoder=True)
    check_config(model.config)
    limit = min((n for n in shift_limits(config) if n is not None), default=None)
    context = getattr(config, "max_position_embeddings", None)
    furthest = max(1, (limit or context or 4096) - ROWS)
    probe = _Probe(model, view, shifts=(min(13, furthest), furthest))
    probe.check_calls()
    layers = [probe.layer(index) for index in range(len(view.layers))]
    dtypes = {dtype for _, dtype, _ in layers}
    if len(dtypes) != 1:
        raise ModelNotBlendableError(f"the layers' keys have several dtypes: {dtypes}; they must have one")
    return Survey(
        layout=KVLayout(tuple(shape for shape, _, _ in layers), dtypes.pop()),
        rotations=tuple(rotation for _, _, rotation in layers),
        windows=tuple(mask.window for mask in probe.masks),
        heads=tuple(probe.heads),
        latents=tuple(probe.latents),
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


class _Probe:
    """Runs a few rows of noise through single layers, at positions from 0 on and at shifted positions."""

    def __init__(self, model: PreTrainedModel, view: ModelView, shifts: Sequence[int]) -> None:
        self._view, self._shifts = view, shifts
        self._name, self._plain_attention = type(model).__name__, model.config._attn_implementation
        device = model.get_input_embeddings().weight.device
        generator = torch.Generator().manual_seed(0)
        vocab = model.get_input_embeddings().num_embeddings
        self._ids = torch.randint(vocab, (ROWS,), generator=generator).to(device)
        self._rows = torch.arange(ROWS, device=device)
        self._base = self._open(0)
        self._moved = [self._open(shift) for shift in shifts]
        self._embedded = self._base.embed()
        self._noise = torch.randn(self._embedded.shape, generator=generator).to(self._embedded)
        self._found: list[KeyRotation] = []
        self._candidates = list(_candidate_rotations(view.model))
        self.masks: list[LayerMask] = []
        self.heads: list[int] = []
        self.latents: list[LatentShape | None] = []

    def _open(self, shift: int, ids: torch.Tensor | None = None) -> HfLayerRunner:
        try:
            return HfLayerRunner(self._view, self._ids if ids is None else ids, self._rows + shift)
        except ModelNotBlendableError:
            raise
        except Exception as error:
            raise ModelNotBlendableError(
                f"the forward of {self._name} cannot be run without its layers "
                f"(it may build its own attention masks): {error}"
            ) from error

    def check_calls(self) -> None:
        """Refuses absolute positions in the embedding, and layer arguments other than positions and our masks."""
        # Some models count rows and ignore the given positions: the same token must have the same embedding everywhere.
        alike = self._open(0, self._ids[:1].expand(ROWS)).embed()
        if not torch.equal(alike, alike[:1].expand_as(alike)) or any(
            not torch.equal(self._embedded, moved.embed()) for moved in self._moved
        ):
            raise ModelNotBlendableError(
                f"{self._name} adds positions to its embeddings; keys with absolute positions cannot be re-positioned"
            )
        for index, call in enumerate(self._base.calls):
            named = {**{f"argument {i + 1}": value for i, value in enumerate(call.args)}, **call.kwargs}
            masks = [value for value in named.values() if isinstance(value, LayerMask)]
            for name, value in named.items():
                if name not in PER_ROW_ARGUMENTS and _holds_tensor(value):
                    raise ModelNotBlendableError(
                        f"layer {index} of {self._name} takes {name!r}, which blending does not support; "
                        "layers may only take positions and masks"
                    )
            if not masks:
                raise ModelNotBlendableError(
                    f"layer {index} of {self._name} does not use transformers' attention masks, which blending needs"
                )
            if masks[0].refusal:
                raise ModelNotBlendableError(f"the attention of layer {index} of {self._name} {masks[0].refusal}")
            self.masks.append(masks[0])

    def layer(self, index: int) -> tuple[LayerShape, torch.dtype, KeyRotation | None]:
        """KV shape, dtype and rotation of one layer."""
        try:
            self.latents.append(self._latent(index))
            self._check_run(index)
            return self._shape_and_rotation(index)
        except ModelNotBlendableError:
            raise
        except Exception as error:
            raise ModelNotBlendableError(f"{self._layer(index)} cannot be run on its own: {error}") from error

    def _shape_and_rotation(self, index: int) -> tuple[LayerShape, torch.dtype, KeyRotation | None]:
        keys, values = self._base.project(index, self._noise, self._rows)
        if keys.shape != values.shape or keys.dim() != 3:
            raise ModelNotBlendableError(
                f"{self._layer(index)} has keys {list(keys.shape)} and values {list(values.shape)}; "
                "both must have the same shape"
            )
        return LayerShape(keys.shape[0], keys.shape[2]), keys.dtype, self._rotation(index, keys, values)

    def _latent(self, index: int) -> LatentShape | None:
        module = self._view.latent[index]
        if module is not None:
            return latent_shape(module, self._noise)
        check_caching(self._view.layers[index])
        return None

    def _layer(self, index: int) -> str:
        return f"layer {index} of {self._name} ({type(self._view.layers[index]).__name__})"

    def _check_run(self, index: int) -> None:
        """Checks that the layer calls transformers' attention interface once and mixes rows nowhere else."""
        attended: list[torch.Tensor] = []

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            if spec.softcap is not None and self._plain_attention == "sdpa":
                raise ModelNotBlendableError(
                    f"{self._name} caps its attention's logits, which transformers' SDPA does not: plain and blended "
                    'passes would differ; load the model with attn_implementation="eager"'
                )
            attended.append(attend_rows(query, keys, values, self._rows, spec))
            return attended[-1]

        out = self._base.run(index, self._noise, self._rows, attend)
        if len(attended) != 1 or out.shape != self._noise.shape:
            raise ModelNotBlendableError(
                f"{self._layer(index)} called transformers' attention interface {len(attended)} times; "
                "blending needs exactly one call per layer (state-space and convolution layers have none)"
            )
        self.heads.append(attended[0].shape[1])
        alone = 0
        for row in range(1, ROWS):
            rows = self._rows[row : row + 1]
            single = self._base.run(index, self._noise[rows], rows, lambda *_, rows=rows: attended[0][rows])
            alone += _same_change(self._noise[rows], single, out[rows])
        # Some rows may differ: rounding can route a row to another expert.
        if alone < ROWS // 2:
            raise ModelNotBlendableError(
                f"{self._layer(index)} mixes rows outside its attention (as state-space and convolution layers do); "
                "single rows cannot be recomputed"
            )

    def _rotation(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> KeyRotation | None:
        moved = [runner.project(index, self._noise, self._rows) for runner in self._moved]
        if any(not _close(new_values, values) for _, new_values in moved):
            raise ModelNotBlendableError(f"the values of {self._layer(index)} depend on the position")
        if all(_close(new_keys, keys) for new_keys, _ in moved):
            self._check_without_positions(index)
            return None
        for rotation in [*self._found, *self._candidates]:
            if all(
                _close(_shifted(keys, rotation, shift), new_keys)
                for shift, (new_keys, _) in zip(self._shifts, moved, strict=True)
            ):
                if rotation not in self._found:
                    self._found.append(rotation)
                return rotation
        raise ModelNotBlendableError(
            f"none of the model's {len(self._candidates)} rotations moves the keys of {self._layer(index)}; "
            "they cannot be re-positioned"
        )

    def _check_without_positions(self, index: int) -> None:
        """Checks that keys that do not depend on the position do not depend on the row's index either."""
        alike, _ = self._base.project(index, self._noise[:1].expand_as(self._noise), self._rows)
        if not _close(alike, alike[:, :1].expand_as(alike)):
            raise ModelNotBlendableError(f"{self._layer(index)} ignores the given positions and counts rows instead")


def _candidate_rotations(model: nn.Module) -> Iterator[KeyRotation]:
    """All inverse frequencies of the model, in both pairings and both directions (NanoChat rotates backwards)."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dim() == 1 and buffer.numel():
            for pairing, sign in product(get_args(Pairing), (1, -1)):
                yield KeyRotation(sign * buffer.detach().cpu().double(), pairing)


def _shifted(keys: torch.Tensor, rotation: KeyRotation, shift: int) -> torch.Tensor | None:
    if rotation.rotary_dim > keys.shape[-1]:
        return None
    return reposition_keys(keys, turn_by(rotation, torch.full((keys.shape[1],), shift), keys.device))


def _close(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Equal up to rounding in every dimension, over all heads and rows."""
    if one is None:
        return False
    error = (one.float() - other.float()).norm(dim=(0, 1))
    size = other.float().norm(dim=(0, 1)).max()
    return bool((error <= TOLERANCE * size + 1e-9).all())


def _same_change(given: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a layer changed `given` equally both times, up to rounding, relative to the size of the change."""
    rounding = 4 * torch.finfo(other.dtype).eps
    given, one, other = given.float(), one.float(), other.float()
    return bool((one - other).norm() <= 0.01 * (other - given).norm() + rounding * other.norm())


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_tensor(part) for part in value)
    return isinstance(value, torch.Tensor)
