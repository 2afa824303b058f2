"""Batched decoding: one row per answer goes through the model's layers together, each attending over its own KV cache.

    answer 1   prompt and answer so far ......... r  \\
    answer 2   ..................... r               >  one call of each layer: r r r  ->  each attends over its own KV
    answer 3   ............... r                    /

Each KV cache starts as the prefill left it and grows at its end. Nothing is padded; answers may join and leave the
batch between any two steps. A single answer is decoded by the same code (as fast as transformers' own loop at 64 tokens
of context, and faster at thousands, where that loop copies its whole cache for every token: docs/log.md).
"""

from collections.abc import Sequence

import torch

from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.operations import attend_last
from cacheblend.core.load.loader import LayerKV
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.recurrent import States
from cacheblend.engines.hf.sampling import Sampler
from cacheblend.engines.hf.view import ModelView

GROW_ROWS = 256  # rows added each time a KV cache is full


class Decoding:
    """The decoding state of one answer. `kv` is the prompt's, one entry per layer, emptied layer by layer, so that no
    layer is held twice; `states` are of recurrent layers behind the prompt, changed with each token."""

    def __init__(self, sampler: Sampler, kv: list[LayerKV], states: States | None = None) -> None:
        self.sampler, self._prompt_kv = sampler, dict(enumerate(kv))
        self._kv: dict[int, LayerKV] = {}
        self.states: States = {} if states is None else states

    @property
    def position(self) -> int:
        """Position of the row that is computed next, which is the last token."""
        return len(self.sampler) - 1

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, together: bool = False) -> LayerKV:
        """Writes the row at `position`, [kv_heads, head_dim] each; returns the layer's KV up to and including it.
        `together`: a row's key and value lie next to each other, as latent attention wants them."""
        if layer not in self._kv:
            self._kv[layer] = _grown(self._prompt_kv.pop(layer), self.position, together)
        elif self._kv[layer].keys.shape[1] == self.position:
            self._kv[layer] = _grown(self._kv[layer], self.position, together)
        kv, at = self._kv[layer], self.position
        kv.keys[:, at], kv.values[:, at] = keys, values
        return LayerKV(kv.keys[:, : at + 1], kv.values[:, : at + 1])


def _grown(kv: LayerKV, length: int, together: bool) -> LayerKV:
    kv_heads, _, head_dim = kv.keys.shape
    size = (kv_heads, length + GROW_ROWS, head_dim)
    if together:
        grown = kv.keys.new_empty(*size[:2], 2 * head_dim).chunk(2, dim=-1)
    else:
        grown = tuple(part.new_empty(size) for part in kv)
    for new, old in zip(grown, kv, strict=True):
        new[:, :length] = old[:, :length]
    return LayerKV(*grown)


@torch.no_grad()
def compute_logits(view: ModelView, answers: Sequence[Decoding]) -> None:
    """Sets the logits for each answer's next token; answers without a token yet keep those of their prefill."""
    begun = [answer for answer in answers if answer.sampler.has_begun]
    if begun:
        with view.threads.held():
            following = _forward(view, begun)
        for answer, logits in zip(begun, following, strict=True):
            answer.sampler.logits = logits


def _forward(view: ModelView, answers: Sequence[Decoding]) -> torch.Tensor:
    """[answers, vocab] logits that follow the last token of each answer."""
    token_ids = torch.cat([answer.sampler.last_id for answer in answers])
    positions = torch.tensor([answer.position for answer in answers])
    runner, rows = HfLayerRunner(view, token_ids, positions), torch.arange(len(answers), device=token_ids.device)
    hidden = runner.embed()
    for layer in range(runner.num_layers):
        if layer in view.recurrent:  # each row from the state of its own answer
            each = zip(answers, torch.split(hidden, 1), torch.split(rows, 1), strict=True)
            parts = [runner.run_from(a.states[layer], layer, h, row, _attend(layer, [a])) for a, h, row in each]
            hidden = torch.cat(parts)
        else:
            hidden = runner.run(layer, hidden, rows, _attend(layer, answers))
    return runner.logits(hidden).view(len(answers), -1)


def _attend(layer: int, answers: Sequence[Decoding]) -> Attend:
    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        mixed = []
        for row, answer in enumerate(answers):
            kv = answer.write(layer, keys[:, row], values[:, row], together=spec.is_latent)
            mixed.append(attend_last(query[:, row], kv.keys, kv.values, spec))
        return torch.stack(mixed)

    return attend
