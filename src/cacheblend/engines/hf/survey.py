"""Finds the KV layout, rotations and limits that blending needs, and refuses other models. Nothing is looked up by
architecture: a few rows of noise are run through single layers of the loaded model. A layer's rotation is the one that
turns its keys at some positions into those at shifted positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError, PromptTooLongError
from cacheblend.core.fuse.prefill import check_latents, check_selector
from cacheblend.core.kernels.attention import AttentionSpec, HeadShape
from cacheblend.core.kernels.operations import attend_rows
from cacheblend.core.kernels.rope import KeyRotation, Pairing, reposition_keys, turn_by
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.core.select.selectors import Late, Selector
from cacheblend.engines.fingerprint import room_of
from cacheblend.engines.hf.latent import LatentShape, check_caching, latent_shape
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.model_loader import check_config, shift_limits
from cacheblend.engines.hf.recurrent import LayerKinds, LayerState, StatePart, layers_with_states, parts_of
from cacheblend.engines.hf.view import LayerMask, ModelView

ROWS = 5
TOLERANCE = 0.05  # relative to a pair's norm: bf16 rounding is 0.004, a wrong rotation gives about 1
PER_ROW_ARGUMENTS = ("position_embeddings", "position_ids", "cache_position", "attention_mask")
IN_PARTS, IN_STEPS = ((0, 1), (1, 3), (3, ROWS)), ((0, 2), (2, 3), (3, 4), (4, ROWS))
"""Rows that a recurrent layer is given in turn, to see whether it goes on from its state."""


@dataclass(frozen=True)
class Survey:
    """What blending needs to know of a model that it supports. Layout, rotations, windows, heads and latents are of the
    layers with attention (`kinds.kv_layers`), in order; of most models that is every layer."""

    view: ModelView  # of the model, for single layers
    layout: KVLayout  # of the KV cache
    rotations: tuple[KeyRotation | None, ...]  # None if the layer's keys carry no position (NoPE)
    windows: tuple[int | None, ...]  # sliding windows in tokens, None for full attention
    head_shapes: tuple[HeadShape, ...]
    # what each layer with latent attention keeps; None for layers that keep keys and values of heads
    latents: tuple[LatentShape | None, ...]
    kinds: LayerKinds  # which of the model's layers have attention, and which keep a state
    # longest prompt in tokens whose keys can be shifted; None: only the context limits it. Longer prompts use other
    # RoPE frequencies at all positions, so KV of shorter prompts cannot be reused in them.
    length_limit: int | None
    context_length: int | None  # the model's context in tokens, None if its config has none
    vocab_size: int  # token ids are 0..vocab_size - 1

    @property
    def num_layers(self) -> int:
        """Decoder layers, with and without attention."""
        return self.kinds.num_layers

    @property
    def room(self) -> int:
        return room_of(self.context_length, not (self.kinds.has_other_layers or any(self.latents)))

    def fit_selector(self, selector: Selector) -> Selector:
        """For this model; behind recurrent layers its checks come later (`Late`). Raises `InvalidInputError`: it checks
        at a layer that the model lacks, compares keys or values alone where a layer keeps one vector for both, asks the
        question's rows where these need a state, or corrects keys where layers have none."""
        if any(self.latents):
            check_latents(selector)
        selector = check_selector(selector, self.num_layers)
        if not self.kinds.has_other_layers:
            return selector
        if selector.correction:
            raise InvalidInputError("correction needs attention in every layer, which this model lacks; leave it at 0")
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

    def check_chunk(self, tokens: int, what: str) -> None:
        """Raises `PromptTooLongError` for a chunk that has too many tokens with its anchor to be computed."""
        if self.max_length is not None and tokens > self.max_length:
            limit = f"{self.max_length_reason} {self.max_length}"
            raise PromptTooLongError(f"{what} has {tokens} tokens with its anchor, more than {limit}; split it")


@torch.no_grad()
def survey_model(model: PreTrainedModel) -> Survey:
    """Surveys a loaded model by running a few rows through each layer. Raises `ModelNotBlendableError`, which says why,
    and `InvalidInputError` for a model in training mode."""
    check_mode(model)
    config = model.config.get_text_config(decoder=True)
    check_config(model.config)
    view = ModelView(model)
    limit = min((n for n in shift_limits(config) if n is not None), default=None)
    context = getattr(config, "max_position_embeddings", None)
    furthest = max(1, (limit or context or 4096) - ROWS)
    probe = Probe(model, view, shifts=(min(13, furthest), furthest))
    probe.check_calls()
    found = [probe.layer(index) for index in range(len(view.layers))]
    view.stepped = frozenset(probe.stepped)
    kv_layers = tuple(index for index, layer in enumerate(found) if layer is not None)
    layers = [layer for layer in found if layer is not None]
    if not layers:
        raise ModelNotBlendableError(f"no layer of {type(model).__name__} has attention; only a prefix could be reused")
    if len(dtypes := {layer.dtype for layer in layers}) != 1:
        raise ModelNotBlendableError(f"the layers' keys have several dtypes: {dtypes}; they must have one")
    return Survey(
        view=view,
        layout=KVLayout(tuple(layer.shape for layer in layers), dtypes.pop()),
        rotations=tuple(layer.rotation for layer in layers),
        windows=tuple(layer.window for layer in layers),
        head_shapes=tuple(layer.heads for layer in layers),
        latents=tuple(layer.latent for layer in layers),
        kinds=LayerKinds(len(found), kv_layers, probe.states, view.stepped),
        length_limit=limit,
        context_length=context,
        vocab_size=model.get_input_embeddings().num_embeddings,
    )


class AttentionLayer(NamedTuple):
    """What a layer with attention keeps of each token."""

    shape: LayerShape
    dtype: torch.dtype
    rotation: KeyRotation | None
    window: int | None
    heads: HeadShape
    latent: LatentShape | None


class Probe:
    """Runs a few rows of noise through single layers, at positions from 0 on and at positions moved by `shifts`. Notes
    in `states` what each recurrent layer keeps; those in `stepped` go on from it one row at a time only."""

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
        self._candidates = [  # both directions: NanoChat rotates backwards
            KeyRotation(sign * buffer.detach().cpu().double(), pairing)
            for name, buffer in view.model.named_buffers()
            if name.endswith("inv_freq") and buffer.dim() == 1 and buffer.numel()
            for pairing, sign in product(get_args(Pairing), (1, -1))
        ]
        self._stateful = layers_with_states(model)
        self._spec = AttentionSpec(1.0)  # of the attention that was run last
        self._masks: list[LayerMask | None] = []
        self.states: dict[int, tuple[StatePart, ...]] = {}
        self.stepped = set[int]()

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
            if masks and masks[0].refusal:
                raise ModelNotBlendableError(f"the attention of layer {index} of {self._name} {masks[0].refusal}")
            self._masks.append(masks[0] if masks else None)

    def layer(self, index: int) -> AttentionLayer | None:
        """What a layer keeps of each token; None if it has no attention."""
        try:
            module, latent = self._view.latent[index], None
            if module is not None:
                latent = latent_shape(module, self._noise)
            else:
                check_caching(self._view.layers[index])
            heads = self._heads(index)
            if heads is None:
                return None
            keys, values = self._base.project(index, self._noise, self._rows)
            if keys.shape != values.shape or keys.dim() != 3:
                raise ModelNotBlendableError(
                    f"{self._layer(index)} has keys {list(keys.shape)} and values {list(values.shape)}; "
                    "both must have the same shape"
                )
            shape, mask = LayerShape(keys.shape[0], keys.shape[2]), self._masks[index]
            rotation, window = self._rotation(index, keys, values), mask.window if mask else None
            width, spec = latent.width if latent else shape.head_dim, self._spec
            head_shape = HeadShape(
                heads,
                shape.kv_heads,
                width,
                window,
                is_latent=latent is not None,
                is_capped=spec.softcap is not None,
                has_sinks=spec.sinks is not None,
            )
            return AttentionLayer(shape, keys.dtype, rotation, window, head_shape, latent)
        except ModelNotBlendableError:
            raise
        except Exception as error:
            raise ModelNotBlendableError(f"{self._layer(index)} cannot be run on its own: {error}") from error

    def _layer(self, index: int) -> str:
        return f"layer {index} of {self._name} ({type(self._view.layers[index]).__name__})"

    def _heads(self, index: int) -> int | None:
        """Query heads of a layer; None if it has no attention. Checks that it calls transformers' attention interface
        at most once, and mixes rows nowhere else but in a state that it can go on from."""
        attended, out = self._run({}, index)
        is_plain = len(attended) == 1 and index not in self._stateful
        if is_plain and self._mixes_nowhere_else(index, attended, out):
            return attended[0].shape[1]
        state: LayerState = {}
        self._view.recurrent |= {index}
        with_state, out_with_state = self._run(state, index)
        if state and len(with_state) <= 1:
            if not self._goes_on(index, IN_PARTS, with_state, out_with_state):
                if with_state or not self._goes_on(index, IN_STEPS, with_state, out_with_state):
                    raise ModelNotBlendableError(
                        f"{self._layer(index)} keeps a state of the rows in front, but the next rows do not go on from "
                        "it as one piece does; a newer version of transformers may"
                    )
                self.stepped.add(index)
            self.states[index] = parts_of(state)
            return with_state[0].shape[1] if with_state else None
        self._view.recurrent -= {index}
        if len(attended) > 1:
            raise ModelNotBlendableError(
                f"{self._layer(index)} called transformers' attention interface {len(attended)} times; "
                "blending needs at most one call per layer"
            )
        if not attended and self._mixes_nowhere_else(index, attended, out):
            return None
        if not bool(out.isfinite().all()):
            raise ModelNotBlendableError(
                f"{self._layer(index)} makes infinities or NaN of random rows: its values exceed the range of "
                f"{str(out.dtype)[6:]}, or its weights are damaged; open the model in bfloat16 or float32"
            )
        raise ModelNotBlendableError(
            f"{self._layer(index)} mixes rows outside its attention, and keeps no state in transformers' cache from "
            "which it could go on; single rows cannot be recomputed"
        )

    def _run(self, state: LayerState, index: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        attended: list[torch.Tensor] = []

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            if spec.softcap is not None and self._plain_attention == "sdpa":
                raise ModelNotBlendableError(
                    f"{self._name} caps its attention's logits, which transformers' SDPA does not: plain and blended "
                    'passes would differ; load the model with attn_implementation="eager"'
                )
            self._spec = spec
            attended.append(attend_rows(query, keys, values, self._rows, spec))
            return attended[-1]

        try:
            out = self._base.run_from(state, index, self._noise, self._rows, attend)
        except ModelNotBlendableError:
            if self._masks[index] is None:
                raise ModelNotBlendableError(
                    f"layer {index} of {self._name} does not use transformers' attention masks, which blending needs"
                ) from None
            raise
        if out.shape != self._noise.shape:
            raise ModelNotBlendableError(
                f"{self._layer(index)} makes {list(out.shape)} of {list(self._noise.shape)}; both must be the same"
            )
        return attended, out

    def _mixes_nowhere_else(self, index: int, attended: list[torch.Tensor], out: torch.Tensor) -> bool:
        """Whether single rows give what all of them do, if their attention is the same."""
        alone = 0
        for row in range(1, ROWS):
            rows = self._rows[row : row + 1]
            single = self._base.run(index, self._noise[rows], rows, lambda *_, rows=rows: attended[0][rows])
            alone += _same_change(self._noise[rows], single, out[rows])
        return alone >= ROWS // 2  # some rows may differ: rounding can route a row to another expert

    def _goes_on(
        self, index: int, parts: Sequence[tuple[int, int]], attended: list[torch.Tensor], out: torch.Tensor
    ) -> bool:
        """Whether parts of the rows, each from the state behind the one before, give what all rows do. A state may
        matter too little to be seen in a few rows; but what ignores it gives the same numbers with another one."""
        state, same = LayerState(), 0
        for start, stop in parts:
            rows = self._rows[start:stop]

            def run(state: LayerState, rows: torch.Tensor = rows) -> torch.Tensor:
                return self._base.run_from(state, index, self._noise[rows], rows, lambda *_: attended[0][rows])

            others = [
                {key: 2 * part + 1 if key == changed else part.clone() for key, part in state.items()}
                for changed in state
            ]
            part = run(state)
            if any(torch.equal(run(other), part) for other in others):
                return False
            each = zip(self._noise[rows], part, out[rows], strict=True)
            same += sum(_same_change(*row) for row in each)
        return same > ROWS // 2

    def _rotation(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> KeyRotation | None:
        moved = [runner.project(index, self._noise, self._rows) for runner in self._moved]
        if any(not _close(new_values, values) for _, new_values in moved):
            raise ModelNotBlendableError(f"the values of {self._layer(index)} depend on the position")
        if all(_close(new_keys, keys) for new_keys, _ in moved):
            alike, _ = self._base.project(index, self._noise[:1].expand_as(self._noise), self._rows)
            if not _close(alike, alike[:, :1].expand_as(alike)):
                raise ModelNotBlendableError(
                    f"{self._layer(index)} ignores the given positions and counts rows instead"
                )
            return None
        targets = [(shift, new_keys) for shift, (new_keys, _) in zip(self._shifts, moved, strict=True)]
        for rotation in [*self._found, *self._candidates]:
            if rotation.rotary_dim <= keys.shape[-1] and all(
                _close(reposition_keys(keys, turn_by(rotation, torch.full((ROWS,), shift), keys.device)), new_keys)
                for shift, new_keys in targets
            ):
                if rotation not in self._found:
                    self._found.append(rotation)
                return rotation
        raise ModelNotBlendableError(
            f"none of the model's {len(self._candidates)} rotations moves the keys of {self._layer(index)}; "
            "they cannot be re-positioned"
        )


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    error = (one.float() - other.float()).norm(dim=(0, 1))
    size = other.float().norm(dim=(0, 1)).max()
    return bool((error <= TOLERANCE * size + 1e-9).all())


def _same_change(given: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a layer changed `given` equally both times, up to rounding, relative to the size of the change."""
    rounding = 4 * torch.finfo(other.dtype).eps
    given, one, other = given.float(), one.float(), other.float()
    return bool((one - other).norm() <= 0.01 * (other - given).norm() + rounding * other.norm())


def _holds_tensor(value: Any) -> bool:
    return any(map(_holds_tensor, value)) if isinstance(value, tuple | list) else isinstance(value, torch.Tensor)


def check_mode(model: PreTrainedModel) -> None:
    """Refuses a model in training mode: with dropout no two passes agree, and what is stored would be one of them. It
    is not switched: the model is the caller's, who may be in the middle of training it. Raises `InvalidInputError`."""
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
