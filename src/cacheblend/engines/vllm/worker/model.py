"""vLLM's loaded model as blending needs it: layers, shapes, rotations, this rank's heads. Checked when it is created.

Does not know prompts, stores or the paged cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.attention_spec import HeadShape
from cacheblend.core.kernels.operations import attend_rows
from cacheblend.core.kernels.rope import KeyRotation, reposition_keys, turn_by
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.engines.vllm import compat, compat_cache, compat_model
from cacheblend.engines.vllm.worker.layers import AttentionAnswer, VllmLayerRunner

_PROBE_ROWS, _PROBE_SHIFT = 8, 37
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class BlendModel:
    """One rank's part of a model.

    Args:
        config: vLLM's.

    Raises:
        ModelNotBlendableError: its layers cannot be run one by one, or its keys cannot be re-positioned; the message
            says why.
    """

    def __init__(self, config: compat.VllmConfig) -> None:
        self._config = config
        self.attention = list(compat_model.attention_layers(config).values())
        model = compat_model.model_of(self.attention[0])
        self._model = model
        self.layers = compat_model.decoder_layers(model)
        if len(self.layers) != len(self.attention):
            raise ModelNotBlendableError(
                f"{type(model).__name__} has {len(self.layers)} decoder layers and {len(self.attention)} attention "
                "modules; blending needs one attention module in each layer"
            )
        compat_cache.check_caches(self.attention)
        self._shims = {layer.layer_name: compat_model.AttentionShim(layer) for layer in self.attention}
        self.specs = [compat_model.attention_spec(layer) for layer in self.attention]
        self.device = next(model.parameters()).device
        on_cpu = self.device.type == "cpu"
        self._kernels = [compat_model.cpu_kernels(layer) if on_cpu else [] for layer in self.layers]
        self.dtype = config.model_config.dtype
        shapes = [LayerShape(int(layer.num_kv_heads), int(layer.head_size)) for layer in self.attention]
        self.layout = KVLayout(tuple(shapes), self.dtype)  # of this rank's heads
        self.head_shapes = [
            HeadShape(int(layer.num_heads), shape.kv_heads, shape.head_dim, spec.window)
            for layer, shape, spec in zip(self.attention, shapes, self.specs, strict=True)
        ]
        self.tp_size, self.tp_rank = compat.tp_size(), compat.tp_rank()
        total = config.model_config.get_total_num_kv_heads()
        self.total_kv_heads = int(total)
        self.heads = self._heads_of_rank(shapes[0].kv_heads)
        with torch.inference_mode():
            self._check_layers()
            self.rotations = self._find_rotations()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n, width] input of the first layer."""
        return compat_model.embed(self._model, token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab] of the last layer's output, [n, width]; empty on ranks that do not sample."""
        found = compat_model.logits(self._model, hidden)
        return hidden.new_empty(0) if found is None else found

    @contextmanager
    def answering(self, layer: int, answer: AttentionAnswer) -> Iterator[None]:
        """Inside, `answer` is the attention of this layer."""
        shim = self._shims[self.attention[layer].layer_name]
        shim.answer = answer
        try:
            with compat_model.shimmed(self._config, self._shims), compat_model.replaced(self._kernels[layer]):
                yield
        finally:
            shim.answer = None

    def _heads_of_rank(self, kv_heads: int) -> slice | None:
        """The KV heads of a record that this rank has; None: all, in a process that also looks blocks up.

        A process that does not look them up keeps in memory only what it has read by heads (`TieredStore`).
        """
        if self.tp_size == 1 and self._config.parallel_config.distributed_executor_backend in (None, "uni"):
            return None
        first = self.tp_rank * self.total_kv_heads // self.tp_size
        return slice(first, first + kv_heads)

    # ---- checks -----------------------------------------------------------------------------------------

    def _check_layers(self) -> None:
        """Checks that each layer, called by itself with its input of the model's own forward, has the same keys and the
        same output, but for rounding."""
        vocab = int(self._config.model_config.get_vocab_size())
        ids = (torch.arange(1, _PROBE_ROWS + 1, device=self.device) * 7919) % vocab
        positions = torch.arange(_PROBE_ROWS, device=self.device)
        inputs, plain = self._own_forward(ids, positions)
        runner = VllmLayerRunner(self, ids, positions)
        inputs[0] = runner.embed()
        for layer, hidden in enumerate(inputs):
            keys, _ = runner.project(layer, hidden, positions)
            self._check_same(layer, "keys", keys, plain[layer])
            if layer + 1 < len(inputs):
                out = runner.run(layer, hidden, positions, lambda q, k, v, spec: attend_rows(q, k, v, positions, spec))
                self._check_same(layer, "hidden states", out, inputs[layer + 1])

    def _check_same(self, layer: int, what: str, alone: torch.Tensor, plain: torch.Tensor) -> None:
        error = (alone.float() - plain.float()).norm()
        if not error <= _TOLERANCE[self.dtype] * plain.float().norm():
            raise ModelNotBlendableError(
                f"layer {layer} of {type(self._model).__name__}, called by itself, computes other {what} than in the "
                "model's own forward"
            )

    def _own_forward(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """In the model's own forward: each layer's input [n, width], and its keys [kv_heads, n, head_dim]."""
        seen: list[torch.Tensor] = []

        def answer_of(index: int) -> AttentionAnswer:
            def answer(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
                q, k, v = (part.transpose(0, 1).contiguous() for part in (query, keys, values))
                seen.append(k.clone())
                return attend_rows(q, k, v, positions, self.specs[index])

            return answer

        for index, layer in enumerate(self.attention):
            self._shims[layer.layer_name].answer = answer_of(index)
        try:
            with compat_model.shimmed(self._config, self._shims), compat_model.recording_inputs(self.layers) as inputs:
                model: Any = self._model
                model(ids, positions, None, None)
        finally:
            for shim in self._shims.values():
                shim.answer = None
        return inputs, seen

    def _find_rotations(self) -> list[KeyRotation | None]:
        """The rotation of each layer's keys, found by shifting positions and trying the model's own frequencies."""
        candidates = compat_model.candidate_rotations(self.layers)
        vocab = int(self._config.model_config.get_vocab_size())
        ids = (torch.arange(1, _PROBE_ROWS + 1, device=self.device) * 7919) % vocab
        rows = torch.arange(_PROBE_ROWS, device=self.device)
        first, moved = VllmLayerRunner(self, ids, rows), VllmLayerRunner(self, ids, rows + _PROBE_SHIFT)
        hidden = first.embed()
        found: list[KeyRotation | None] = []
        for layer in range(len(self.layers)):
            keys, values = first.project(layer, hidden, rows)
            new_keys, new_values = moved.project(layer, hidden, rows)
            if not self._close(values, new_values):
                raise ModelNotBlendableError(f"the values of layer {layer} depend on the position")
            found.append(self._rotation(layer, keys, new_keys, candidates))
        return found

    def _rotation(
        self, layer: int, keys: torch.Tensor, moved: torch.Tensor, candidates: list[KeyRotation]
    ) -> KeyRotation | None:
        if self._close(keys, moved):
            return None
        shift = torch.full((keys.shape[1],), _PROBE_SHIFT)
        for rotation in candidates:
            fits = rotation.rotary_dim <= keys.shape[-1]
            if fits and self._close(reposition_keys(keys, turn_by(rotation, shift, keys.device)), moved):
                return rotation
        raise ModelNotBlendableError(
            f"the keys of layer {layer} follow none of the model's {len(candidates)} rotations; "
            "they cannot be re-positioned"
        )

    def _close(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        error = (one.float() - other.float()).norm(dim=(0, 1))
        return bool((error <= _TOLERANCE[self.dtype] * other.float().norm(dim=(0, 1)).max() + 1e-9).all())
