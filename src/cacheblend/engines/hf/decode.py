"""Answers decoded together: one row each through the model's layers, side by side, each over its own KV cache.

    answer 1   prompt and answer so far ......... r  \\
    answer 2   ..................... r               >  one call of each layer: r r r  ->  each attends over its own KV
    answer 3   ............... r                    /

The KV cache of each stays where its prefill left it and grows at its end: nothing is padded, and answers begin and end
between any two steps. A single answer goes the same way (as fast as transformers' own loop at 64 tokens of context,
and faster at thousands, where that copies its whole cache at every token: docs/log.md).
"""

from collections.abc import Sequence

import torch

from cacheblend.core.layers.attention import AttentionSpec, attend_last
from cacheblend.core.load.loader import LayerKV
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.sampling import Sampler
from cacheblend.engines.hf.view import ModelView

GROW_ROWS = 256  # rows that a KV cache grows by


class Decoding:
    """One answer, being decoded.

    Args:
        sampler: draws its tokens.
        kv: of the prompt, a layer each; emptied, so that no layer is held twice.
    """

    def __init__(self, sampler: Sampler, kv: list[LayerKV]) -> None:
        self.sampler, self._prompt_kv = sampler, kv
        self._kv: list[LayerKV] = []

    @property
    def position(self) -> int:
        """Of the row that is computed next: the last token's."""
        return len(self.sampler) - 1

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
        """The layer's KV up to the row at `position`, whose own, [kv_heads, head_dim], is put there."""
        if len(self._kv) == layer:
            self._kv.append(_grown(self._prompt_kv.pop(0), self.position))
        elif self._kv[layer].keys.shape[1] == self.position:
            self._kv[layer] = _grown(self._kv[layer], self.position)
        kv, at = self._kv[layer], self.position
        kv.keys[:, at], kv.values[:, at] = keys, values
        return LayerKV(kv.keys[:, : at + 1], kv.values[:, : at + 1])


def _grown(kv: LayerKV, length: int) -> LayerKV:
    kv_heads, _, head_dim = kv.keys.shape
    grown = [part.new_empty(kv_heads, length + GROW_ROWS, head_dim) for part in kv]
    for new, old in zip(grown, kv, strict=True):
        new[:, :length] = old[:, :length]
    return LayerKV(*grown)


@torch.no_grad()
def compute_logits(view: ModelView, answers: Sequence[Decoding]) -> None:
    """Logits for the next token of each answer; those that have begun go through the layers together."""
    begun = [answer for answer in answers if answer.sampler.has_begun]
    if begun:
        for answer, logits in zip(begun, _forward(view, begun), strict=True):
            answer.sampler.logits = logits


def _forward(view: ModelView, answers: Sequence[Decoding]) -> torch.Tensor:
    """[answers, vocab] logits behind the last token of each."""
    token_ids = torch.cat([answer.sampler.last_id for answer in answers])
    positions = torch.tensor([answer.position for answer in answers], device=token_ids.device)
    runner, rows = HfLayerRunner(view, token_ids, positions), torch.arange(len(answers), device=token_ids.device)
    hidden = runner.embed()
    for layer in range(runner.num_layers):

        def attend(
            query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec, layer: int = layer
        ) -> torch.Tensor:
            mixed = []
            for row, answer in enumerate(answers):
                kv = answer.write(layer, keys[:, row], values[:, row])
                mixed.append(attend_last(query[:, row], kv.keys, kv.values, spec))
            return torch.stack(mixed)

        hidden = runner.run(layer, hidden, rows, attend)
    return runner.logits_of_all(hidden)
