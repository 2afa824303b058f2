"""Several answers decoded together: one row each through the model's layers, side by side, each over its own KV.

    answer 1   prompt and answer so far ......... r  \
    answer 2   ..................... r               >  one call of each layer: r r r  ->  each attends over its own KV
    answer 3   ............... r                    /

The KV of each stays where its prefill left it, with room behind it: nothing is padded, and answers come and go between
any two steps.
"""

from collections.abc import Sequence

import torch

from cacheblend.core.layers.attention import AttentionSpec, attend_last
from cacheblend.core.load.loader import LayerKV
from cacheblend.engines.hf.decode import Draws
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.view import ModelView

GROW_ROWS = 256  # rows that a KV cache grows by


class Answering:
    """An answer under way.

    Args:
        draws: of its tokens.
        kv: of the prompt, a layer each; emptied, so that no layer is held twice.
    """

    def __init__(self, draws: Draws, kv: list[LayerKV]) -> None:
        self.draws, self._prompt_kv = draws, kv
        self._kv: list[LayerKV] = []

    @property
    def position(self) -> int:
        """Of the row that is computed next: the last token's."""
        return len(self.draws) - 1

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
        """The layer's KV up to the row at `position`, whose own, [kv_heads, head_dim], is put there."""
        if len(self._kv) == layer:
            self._kv.append(_with_room(self._prompt_kv.pop(0), self.position))
        elif self._kv[layer].keys.shape[1] == self.position:
            self._kv[layer] = _with_room(self._kv[layer], self.position)
        kv, at = self._kv[layer], self.position
        kv.keys[:, at], kv.values[:, at] = keys, values
        return LayerKV(kv.keys[:, : at + 1], kv.values[:, : at + 1])


def _with_room(kv: LayerKV, length: int) -> LayerKV:
    kv_heads, _, head_dim = kv.keys.shape
    grown = [part.new_empty(kv_heads, length + GROW_ROWS, head_dim) for part in kv]
    for new, old in zip(grown, kv, strict=True):
        new[:, :length] = old[:, :length]
    return LayerKV(*grown)


@torch.no_grad()
def compute_logits(view: ModelView, answers: Sequence[Answering]) -> None:
    """Logits for the next token of each answer; those that have begun go through the layers together."""
    begun = [answer for answer in answers if answer.draws.has_begun]
    if begun:
        for answer, logits in zip(begun, _forward(view, begun), strict=True):
            answer.draws.logits = logits


def _forward(view: ModelView, answers: Sequence[Answering]) -> torch.Tensor:
    """[answers, vocab] logits behind the last token of each."""
    token_ids = torch.cat([answer.draws.last_id for answer in answers])
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
