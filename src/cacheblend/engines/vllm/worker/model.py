"""vLLM's loaded model as blending needs it: layers, shapes, rotations, this rank's heads; checked when created."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.attention import AttentionSpec, HeadShape
from cacheblend.core.kernels.operations import attend_rows
from cacheblend.core.kernels.rope import KeyRotation, reposition_keys, turn_by
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.engines.vllm.calls import FORMS, RecordedCall, VllmLayerCall, hidden_after, hidden_before, learn_calls
from cacheblend.engines.vllm.internals import attention_shim, decoder, interface, kv_cache, lora, weight_loader
from cacheblend.engines.vllm.internals.attention_shim import NO_ADAPTER, AttentionAnswer, AttentionShim
from cacheblend.engines.vllm.worker.layers import VllmLayerRunner


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention, on this rank."""

    shim: AttentionShim
    spec: AttentionSpec
    kept: LayerShape  # of its records
    heads: HeadShape  # of queries, and of what they attend to


def attention_of(layer: Any, tolerance: float) -> LayerAttention:
    """Of one of vLLM's attention modules; `tolerance`: of sums in another order, as a share. Raises
    ModelNotBlendableError: it attends in a way that is not blended."""
    if attention_shim.is_latent(layer):
        spec, width = attention_shim.latent_spec(layer), attention_shim.kept_width(layer)
        attention_shim.check_expansion(layer, tolerance)
        heads = HeadShape(int(layer.num_heads), 1, width, spec.window, is_latent=True)
        return LayerAttention(attention_shim.LatentShim(layer), spec, LayerShape(1, heads.placed_dim), heads)
    spec = decoder.attention_spec(layer)
    kept = LayerShape(int(layer.num_kv_heads), int(layer.head_size))
    features = {"is_capped": spec.softcap is not None, "has_sinks": spec.sinks is not None}
    heads = HeadShape(int(layer.num_heads), kept.kv_heads, kept.head_dim, spec.window, **features)
    return LayerAttention(AttentionShim(layer), spec, kept, heads)


_PROBE_ROWS, _PROBE_SHIFT = 11, 37
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_QUANTISED_TOLERANCE = 5e-2  # where activations are quantised: a sum in another order crosses steps


class _EmbeddedError(Exception):
    """Leaves the model with its first layer's input."""


class BlendModel:
    """One rank's part of a model. Raises ModelNotBlendableError: its layers cannot be run one by one, or its keys
    cannot be re-positioned; the message says why."""

    def __init__(self, config: interface.VllmConfig) -> None:
        self._config = config
        attention = list(decoder.attention_layers(config).values())
        if not attention:
            raise ModelNotBlendableError("the model has no attention module with a KV cache")
        model = weight_loader.model_of(attention[0])
        self._model, own = model, set(model.modules())
        self._decoder = decoder.text_decoder(model, config)
        attention = [layer for layer in attention if layer in own]  # a drafter's are not blended
        self._modules = decoder.layers_with(model, attention)
        by_id = {id(each): each for each in attention}
        self.attention = [next(by_id[id(each)] for each in one.modules() if id(each) in by_id) for one in self._modules]
        has_adapters = getattr(model, "lora_manager", None) is not None
        self.adapters = lora.LoadedAdapters(model, config) if has_adapters else None
        self._inside = [self.adapters.modules_of(layer) if self.adapters else [] for layer in self._modules]
        self._beside = self.adapters.modules_beside(self._modules) if self.adapters else []
        kv_cache.check_caches(self.attention)
        self.dtype = config.model_config.dtype
        quantised = _QUANTISED_TOLERANCE if config.model_config.quantization else 0.0
        self._tolerance = max(_TOLERANCE[self.dtype], quantised)
        with torch.inference_mode():
            kinds = [attention_of(layer, self._tolerance) for layer in self.attention]
        self._shims = {kind.shim.layer_name: kind.shim for kind in kinds}
        self.specs, self.head_shapes = [kind.spec for kind in kinds], [kind.heads for kind in kinds]
        self.device = next(model.parameters()).device
        on_cpu = self.device.type == "cpu"
        kernels = [decoder.cpu_kernels(layer) if on_cpu else [] for layer in self._modules]
        self._kernels = [([module for module, _ in each], [compute for _, compute in each]) for each in kernels]
        self.layout = KVLayout(tuple(kind.kept for kind in kinds), self.dtype)  # of this rank's heads
        self.total_kv_heads = interface.kv_layout(config).layers[0].kv_heads
        self.heads: slice | None = None
        """The KV heads of a record that this rank has; None: all, in a process that also looks blocks up. One that does
        not keeps in memory only what it has read by heads (`TieredStore`)."""
        if not interface.is_one_process(config):
            ranks = int(config.parallel_config.tensor_parallel_size)
            start = interface.get_tensor_model_parallel_rank() * self.total_kv_heads // ranks
            self.heads = slice(start, start + kinds[0].kept.kv_heads)
        without = None if self.adapters is None else self.adapters.modules_beside([])
        with torch.inference_mode(), self._with_adapter(NO_ADAPTER, _PROBE_ROWS, without):
            self._learn()

    def embed(self, token_ids: torch.Tensor, adapter: int = NO_ADAPTER) -> torch.Tensor:
        """[n, width] input of the first layer: the model's own forward up to there, whatever it does to embeddings."""
        if self.adapters is None:
            return self._embed(token_ids, torch.arange(len(token_ids), device=token_ids.device))
        parts, most = [], self._config.scheduler_config.max_num_batched_tokens
        for tile in torch.split(token_ids, most):  # vLLM's LoRA layers take memory by rows
            with self._with_adapter(adapter, len(tile), self._beside):
                parts.append(self._embed(tile, torch.arange(len(tile), device=tile.device)))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _with_adapter(self, adapter: int, rows: int, modules: Any) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.applied(adapter, rows, modules)

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        def stop(*args: Any, **kwargs: Any) -> None:
            raise _EmbeddedError(self.layers[0].state[0].take(pytree.tree_leaves((args, kwargs))))

        try:
            with decoder.computed_by(self._modules[:1], [stop]):
                self._forward(token_ids, positions)
        except _EmbeddedError as embedded:
            hidden: torch.Tensor = embedded.args[0]
            return hidden
        raise RuntimeError("the model's forward did not call its first layer")

    def logits(self, hidden: torch.Tensor, adapter: int = NO_ADAPTER) -> torch.Tensor:
        """[n, vocab] of the last layer's output, [n, width]; empty on ranks that do not sample."""
        model: Any = self._model
        with self._with_adapter(adapter, len(hidden), self._beside):
            found: torch.Tensor | None = model.compute_logits(self._tail(hidden))
        return hidden.new_empty(0) if found is None else found

    def row_inputs(
        self, token_ids: torch.Tensor, positions: torch.Tensor, adapter: int = NO_ADAPTER
    ) -> list[tuple[torch.Tensor, ...]]:
        """What the model computes for each layer in front of all of them, [n, ...] each: its forward without layers."""
        found: list[tuple[torch.Tensor, ...]] = []
        if not any(layer.inputs for layer in self.layers):
            return [() for _ in self.layers]

        def forward(layer: VllmLayerCall, *args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            found.append(tuple(at.take(leaves) for at in layer.inputs))
            return layer.returned(layer.state[0].take(leaves).clone())

        functions = [partial(forward, layer) for layer in self.layers]
        beside = self._with_adapter(adapter, len(token_ids), self._beside)
        with beside, decoder.computed_by(self._modules, functions):
            self._forward(token_ids, positions)
        return found

    def _tail(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model's forward makes of the last layer's output, [n, width]: it is run without its layers."""

        def forward(layer: VllmLayerCall, *_: Any, **__: Any) -> Any:
            return layer.returned(hidden.clone())

        rows = torch.arange(len(hidden), device=hidden.device)
        with decoder.computed_by(self._modules, [partial(forward, layer) for layer in self.layers]):
            return self._forward(torch.zeros_like(rows), rows)

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with decoder.shimmed(self._config, self._shims):
            out: torch.Tensor = self._decoder(token_ids, positions, None, None)
        return out

    @contextmanager
    def answering(self, layer: int, answer: AttentionAnswer, adapter: int, rows: int) -> Iterator[None]:
        shim = self._shims[self.attention[layer].layer_name]
        shim.answer = answer
        kernels = decoder.computed_by(*self._kernels[layer], attribute="_forward_method")
        adapted = self._with_adapter(adapter, rows, self._inside[layer])
        try:
            with decoder.shimmed(self._config, self._shims), kernels, adapted:
                yield
        finally:
            shim.answer = None

    def _learn(self) -> None:
        """How the layers are called, and how their keys turn; refuses the model also for whatever its own code raises,
        since nobody knows what layers need that cannot be called one by one."""
        try:
            self._learn_layers()
            self.rotations = self._find_rotations()
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            first_line = f"{error}".partition("\n")[0]
            raise ModelNotBlendableError(
                f"the layers of {self._name} cannot be called one by one: {type(error).__name__}: {first_line}"
            ) from error

    def _learn_layers(self) -> None:
        ids, positions = self._probe()
        recorded, keys, out = self._own_forward(ids, positions)
        if self._decoder is not self._model:  # a language model inside another model is compared with the whole one
            _, _, served = self._own_forward(ids, positions, is_served=True)
            self._check_same("the language model", "hidden states", out, served)
        if len(recorded) != len(self._modules):
            raise ModelNotBlendableError(
                f"the forward of {self._name} calls {len(recorded)} layers one after the other, of {len(self._modules)}"
            )
        refused: list[ModelNotBlendableError] = []
        for form in FORMS:
            self.layers = learn_calls(self._modules, recorded, positions, form)
            try:
                self._check_layers(recorded, keys, out, ids, positions)
            except ModelNotBlendableError as error:
                refused.append(error)
            else:
                return
        raise refused[0]

    def _probe(self) -> tuple[torch.Tensor, torch.Tensor]:
        vocab = int(self._config.model_config.get_vocab_size())
        ids = (torch.arange(1, _PROBE_ROWS + 1, device=self.device) * 7919) % vocab
        return ids, torch.arange(_PROBE_ROWS, device=self.device)

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _check_layers(
        self,
        recorded: list[RecordedCall],
        plain_keys: list[torch.Tensor],
        out: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Checks that each layer, called by itself with its input of the model's own forward, has the same keys and the
        same output, but for rounding; and what stands in front of the layers and behind them."""
        runner = VllmLayerRunner(self, ids, positions)
        for layer, (call, learnt) in enumerate(zip(recorded, self.layers, strict=True)):
            keys, _ = runner.project(layer, hidden_before(call, learnt), positions)
            self._check_same(f"layer {layer}", "keys", keys, plain_keys[layer])
            found = runner.run(
                layer,
                hidden_before(call, learnt),
                positions,
                lambda q, k, v, spec: attend_rows(q, k, v, positions, spec),
            )
            self._check_same(f"layer {layer}", "hidden states", found, hidden_after(call, learnt))
        embedded = hidden_before(recorded[0], self.layers[0])
        self._check_same("the embedding", "hidden states", runner.embed(), embedded)
        self._check_same(
            "the final norm", "hidden states", self._tail(hidden_after(recorded[-1], self.layers[-1])), out
        )
        moved = self._embed(ids, positions + _PROBE_SHIFT)
        if not self._close(moved[None], embedded[None]):
            raise ModelNotBlendableError(
                f"{self._name} adds positions to its embeddings; keys with absolute positions cannot be re-positioned"
            )

    def _check_same(self, where: str, what: str, alone: torch.Tensor, plain: torch.Tensor) -> None:
        error = (alone.float() - plain.float()).norm()
        if not error <= self._tolerance * plain.float().norm():
            raise ModelNotBlendableError(
                f"{where} of {self._name}, called by itself, computes other {what} than in the model's own forward"
            )

    def _own_forward(
        self, ids: torch.Tensor, positions: torch.Tensor, *, is_served: bool = False
    ) -> tuple[list[RecordedCall], list[torch.Tensor], torch.Tensor]:
        """Of the model's own forward, of a whole multimodal model if `is_served`: each layer's call and keys [kv_heads,
        n, head_dim], and the result [n, width]."""
        seen: list[torch.Tensor] = []

        def answer(spec: AttentionSpec, *given: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(0, 1).contiguous() for part in given)
            seen.append(k.clone())
            return attend_rows(q, k, v, positions, spec)

        for layer, spec in zip(self.attention, self.specs, strict=True):
            self._shims[layer.layer_name].answer = partial(answer, spec)
        try:
            with decoder.recording_calls(self._modules) as recorded, decoder.shimmed(self._config, self._shims):
                if is_served:
                    out = decoder.forward_as_served(self._model, self._config, ids, positions)
                else:
                    out = self._decoder(ids, positions, None, None)
        finally:
            for shim in self._shims.values():
                shim.answer = None
        return recorded, seen, out

    def _find_rotations(self) -> list[KeyRotation | None]:
        """The rotation of each layer's keys, found by shifting positions and trying the model's own frequencies."""
        candidates = decoder.candidate_rotations(self._model)
        ids, rows = self._probe()
        first, moved = VllmLayerRunner(self, ids, rows), VllmLayerRunner(self, ids, rows + _PROBE_SHIFT)
        hidden, shift = first.embed(), torch.full((_PROBE_ROWS,), _PROBE_SHIFT)
        found: list[KeyRotation | None] = []
        for layer in range(len(self.layers)):
            keys, values = first.project(layer, hidden, rows)
            new_keys, new_values = moved.project(layer, hidden, rows)
            if not self._close(values, new_values):
                raise ModelNotBlendableError(f"the values of layer {layer} depend on the position")
            if self._close(keys, new_keys):
                found.append(None)
                continue
            fitting = (each for each in candidates if each.rotary_dim <= keys.shape[-1])
            turned = ((each, reposition_keys(keys, turn_by(each, shift, keys.device))) for each in fitting)
            found.append(next((each for each, now in turned if self._close(now, new_keys)), None))
            if found[-1] is None:
                raise ModelNotBlendableError(
                    f"the keys of layer {layer} follow none of the model's {len(candidates)} rotations; "
                    "they cannot be re-positioned"
                )
        return found

    def _close(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        error = (one.float() - other.float()).norm(dim=(0, 1))
        return bool((error <= self._tolerance * other.float().norm(dim=(0, 1)).max() + 1e-9).all())
