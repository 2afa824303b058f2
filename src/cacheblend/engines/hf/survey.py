"""What blending must know of a model, found out on the live model: KV layout, rotations, limits. Refuses the rest.

Nothing is looked up by architecture. Each layer's keys are computed at some positions and at shifted ones; the
rotation that turns the one into the other is the layer's, and where none does, the model is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.layers.attention import AttentionSpec, attend_rows
from cacheblend.core.load.rope import KeyRotation, Pairing, reposition_keys, shift_limit, turn_by
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.view import LayerMask, ModelView

ROWS = 5
TOLERANCE = 0.05  # of a pair's norm: bf16 rounds at 0.004, a wrong rotation is off by about 1
PER_ROW_ARGUMENTS = ("position_embeddings", "position_ids", "cache_position", "attention_mask")


@dataclass(frozen=True)
class Survey:
    """A blendable model.

    Attributes:
        layout: of its KV cache.
        rotations: one a layer, None where keys carry no position (NoPE).
        windows: sliding window of each layer, None for full attention.
        length_limit: longest prompt whose keys can be shifted; None: no limit but the context. Behind it other
            frequencies hold for all positions at once, so neither stored nor fresh KV of a shorter prompt fits.
        context_length: the model's own limit, None if its config names none.
        vocab_size: ids are 0..vocab_size - 1.
    """

    layout: KVLayout
    rotations: tuple[KeyRotation | None, ...]
    windows: tuple[int | None, ...]
    length_limit: int | None
    context_length: int | None
    vocab_size: int

    @property
    def max_length(self) -> int | None:
        """Longest prompt with its answer: the context, or LongRoPE's switch where that comes first."""
        return min((n for n in (self.context_length, self.length_limit) if n is not None), default=None)

    @property
    def max_length_reason(self) -> str:
        """What `max_length` is, for messages."""
        if self.length_limit is not None and self.max_length == self.length_limit:
            return "LongRoPE's switch, up to which this model can be blended, at"
        return "the model's context"


@torch.no_grad()
def survey_model(model: PreTrainedModel, view: ModelView) -> Survey:
    """Surveys a loaded model; a few rows through each layer.

    Raises:
        ModelNotBlendableError: with the reason.
    """
    config = model.config.get_text_config(decoder=True)
    check_config(model.config)
    limit = min((n for n in _shift_limits(config) if n is not None), default=None)
    context = getattr(config, "max_position_embeddings", None)
    furthest = max(1, (limit or context or 4096) - ROWS)
    probe = _Probe(model, view, shifts=(min(13, furthest), furthest))
    probe.check_calls()
    layers = [probe.layer(index) for index in range(len(view.layers))]
    dtypes = {dtype for _, dtype, _ in layers}
    if len(dtypes) != 1:
        raise ModelNotBlendableError(f"the layers' keys have several dtypes: {dtypes}")
    return Survey(
        layout=KVLayout(tuple(shape for shape, _, _ in layers), dtypes.pop()),
        rotations=tuple(rotation for _, _, rotation in layers),
        windows=tuple(mask.window for mask in probe.masks),
        length_limit=limit,
        context_length=context,
        vocab_size=model.get_input_embeddings().num_embeddings,
    )


def expected_layout(config: PretrainedConfig, dtype: torch.dtype | None = None) -> KVLayout:
    """The KV cache's shape by a configuration alone, for plans and measurements that open no model.

    Layers are taken for alike; what a model really keeps, `survey_model` finds out.

    Args:
        config: a model's.
        dtype: None: the configuration's, fp32 where it names none.

    Raises:
        AttributeError: the configuration does not say.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    return KVLayout((LayerShape(int(heads), int(width)),) * int(config.num_hidden_layers), dtype)


def check_config(config: Any) -> None:
    """Refuses by config alone what would only fail in unclear ways later.

    Raises:
        ModelNotBlendableError: encoder-decoder, latent attention, or RoPE that cannot be shifted.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotBlendableError(f"{config.model_type} is an encoder-decoder model; only decoders are blended")
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise ModelNotBlendableError(
            f"{text.model_type} uses multi-head latent attention (kv_lora_rank = {text.kv_lora_rank}), "
            "whose cache is not keys and values by head; serve it without blending"
        )
    for _ in _shift_limits(text):
        pass


def _shift_limits(config: Any) -> Iterator[int | None]:
    """Of each RoPE in the config: one, or one a layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    original = getattr(config, "original_max_position_embeddings", None)
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        yield shift_limit({"original_max_position_embeddings": original, **rope})


class _Probe:
    """Runs a few rows of noise through single layers, at positions 0.. and at shifted ones."""

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

    def _open(self, shift: int, ids: torch.Tensor | None = None) -> HfLayerRunner:
        try:
            return HfLayerRunner(self._view, self._ids if ids is None else ids, self._rows + shift)
        except ModelNotBlendableError:
            raise
        except Exception as error:
            raise ModelNotBlendableError(
                f"the forward of {self._name} cannot be run with its layers taken out "
                f"(does it build attention masks of its own?): {error}"
            ) from error

    def check_calls(self) -> None:
        """Absolute positions in the embedding, or arguments that are neither positions nor our mask, are refused."""
        # Some models count rows and ignore the positions they are given: the same token must look alike everywhere.
        alike = self._open(0, self._ids[:1].expand(ROWS)).embed()
        if not torch.equal(alike, alike[:1].expand_as(alike)) or any(
            not torch.equal(self._embedded, moved.embed()) for moved in self._moved
        ):
            raise ModelNotBlendableError(
                f"{self._name} adds positions to its embeddings; keys that carry absolute positions cannot be moved"
            )
        for index, call in enumerate(self._base.calls):
            named = {**{f"argument {i + 1}": value for i, value in enumerate(call.args)}, **call.kwargs}
            masks = [value for value in named.values() if isinstance(value, LayerMask)]
            for name, value in named.items():
                if name not in PER_ROW_ARGUMENTS and _holds_tensor(value):
                    raise ModelNotBlendableError(
                        f"layer {index} of {self._name} takes {name!r}, which blending does not know; "
                        "it can only pass on positions and masks"
                    )
            if not masks:
                raise ModelNotBlendableError(
                    f"layer {index} of {self._name} does not use transformers' attention masks; this is not supported"
                )
            if masks[0].refusal:
                raise ModelNotBlendableError(f"the attention of layer {index} of {self._name} {masks[0].refusal}")
            self.masks.append(masks[0])

    def layer(self, index: int) -> tuple[LayerShape, torch.dtype, KeyRotation | None]:
        """One layer's record shape, dtype and rotation."""
        try:
            self._check_run(index)
            return self._shape_and_rotation(index)
        except ModelNotBlendableError:
            raise
        except Exception as error:
            raise ModelNotBlendableError(f"{self._layer(index)} cannot be walked: {error}") from error

    def _shape_and_rotation(self, index: int) -> tuple[LayerShape, torch.dtype, KeyRotation | None]:
        keys, values = self._base.project(index, self._noise, self._rows)
        if keys.shape != values.shape or keys.dim() != 3:
            raise ModelNotBlendableError(
                f"{self._layer(index)} has keys {list(keys.shape)} and values {list(values.shape)}; "
                "they must have one shape"
            )
        return LayerShape(keys.shape[0], keys.shape[2]), keys.dtype, self._rotation(index, keys, values)

    def _layer(self, index: int) -> str:
        return f"layer {index} of {self._name} ({type(self._view.layers[index]).__name__})"

    def _check_run(self, index: int) -> None:
        """The layer attends once, through transformers' attention interface, and rows meet nowhere else."""
        attended: list[torch.Tensor] = []

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            if spec.softcap is not None and self._plain_attention == "sdpa":
                raise ModelNotBlendableError(
                    f"{self._name} caps its attention's logits, which transformers' SDPA leaves out: plain and blended "
                    'passes would differ; load the model with attn_implementation="eager"'
                )
            attended.append(attend_rows(query, keys, values, self._rows, spec))
            return attended[-1]

        out = self._base.run(index, self._noise, self._rows, attend)
        if len(attended) != 1 or out.shape != self._noise.shape:
            raise ModelNotBlendableError(
                f"{self._layer(index)} called transformers' attention interface {len(attended)} times; "
                "blending needs one attention a layer (state-space and convolution layers have none)"
            )
        alone = 0
        for row in range(1, ROWS):
            rows = self._rows[row : row + 1]
            single = self._base.run(index, self._noise[rows], rows, lambda *_, rows=rows: attended[0][rows])
            alone += _same_change(self._noise[rows], single, out[rows])
        # Not all of them: rounding may send a row to another expert.
        if alone < ROWS // 2:
            raise ModelNotBlendableError(
                f"{self._layer(index)} mixes rows outside its attention (a state-space or convolution part); "
                "rows cannot be computed alone"
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
            f"the keys of {self._layer(index)} do not move by any of its {len(self._candidates)} rotations; "
            "they cannot be re-positioned"
        )

    def _check_without_positions(self, index: int) -> None:
        """Keys that stay when positions move must not depend on the row's number either."""
        alike, _ = self._base.project(index, self._noise[:1].expand_as(self._noise), self._rows)
        if not _close(alike, alike[:, :1].expand_as(alike)):
            raise ModelNotBlendableError(f"{self._layer(index)} ignores the positions it is given and counts rows")


def _candidate_rotations(model: nn.Module) -> Iterator[KeyRotation]:
    """Every inverse frequency that the model holds, in both pairings and both directions (NanoChat turns back)."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dim() == 1 and buffer.numel():
            for pairing, sign in product(get_args(Pairing), (1, -1)):
                yield KeyRotation(sign * buffer.detach().cpu().double(), pairing)


def _shifted(keys: torch.Tensor, rotation: KeyRotation, shift: int) -> torch.Tensor | None:
    if rotation.rotary_dim > keys.shape[-1]:
        return None
    return reposition_keys(keys, turn_by(rotation, torch.full((keys.shape[1],), shift), keys.device))


def _close(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Equal to rounding in every dimension, over all heads and rows."""
    if one is None:
        return False
    error = (one.float() - other.float()).norm(dim=(0, 1))
    size = other.float().norm(dim=(0, 1)).max()
    return bool((error <= TOLERANCE * size + 1e-9).all())


def _same_change(given: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """A layer did the same to `given` both times: equal to rounding, beside what it changed."""
    rounding = 4 * torch.finfo(other.dtype).eps
    given, one, other = given.float(), one.float(), other.float()
    return bool((one - other).norm() <= 0.01 * (other - given).norm() + rounding * other.norm())


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_tensor(part) for part in value)
    return isinstance(value, torch.Tensor)
