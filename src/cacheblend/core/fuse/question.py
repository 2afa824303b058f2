"""The question pass: measures how much the question attends to each loaded row, before any of them is recomputed.

    prompt     | system | chunk A | chunk B | chunk C | suffix: g  ...  q q q |
    source     | prefix | loaded  | miss    | loaded  | text                  |
    seen       | yes    | yes     | no      | yes     | g and the last rows   |

Only the question's rows go through the layers; they attend to the stored rows and to each other. Rows without KV are
masked out. The cost is question rows x layers, independent of the prompt's length.
"""

import math
from dataclasses import replace

import numpy as np
import torch

from cacheblend.core.kernels.attention_spec import AttentionSpec
from cacheblend.core.kernels.upload import upload_together
from cacheblend.core.layers.attention_weights import attention_weights
from cacheblend.core.layers.runner import Attend, LayerRunner
from cacheblend.core.load.layer_kv import LayerCache
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.plan import BlendPlan

_MAX_WEIGHTS = 1 << 24  # attention weights at a time, 64 MB in fp32: KV heads are processed in groups


class QuestionPass:
    """The question pass of one prompt.

    Writes KV into the loader's buffers at the question's positions; the following prefill overwrites it.

    Args:
        plan: the prompt's plan.
        runner: layer runner for the rows from `plan.prefix_length` on.
        loader: loader of the same plan, with the LOADED rows of all layers.
        limit: maximum number of question rows, see `BlendPlan.question_rows`; `rows_to_ask` may lower it.
        embedded: the first layer's input for all rows of the runner, [rows, width]; not changed.
        keep: keep the loaded layers in the loader for the following prefill; otherwise it reads them again.

    Attributes:
        asking: [n] int64, positions of the question's rows.
    """

    def __init__(
        self,
        plan: BlendPlan,
        runner: LayerRunner,
        loader: LayerLoader,
        limit: int,
        embedded: torch.Tensor,
        *,
        keep: bool = True,
    ) -> None:
        self._runner, self._loader, self._first, self._keep = runner, loader, plan.prefix_length, keep
        device = embedded.device
        self.asking = plan.question_rows(min(limit, rows_to_ask(len(plan))))
        self._oldest = int(self.asking[0])
        stored = plan.stored_rows
        self._visible = np.concatenate([stored[stored < self._oldest], self.asking])  # ascending
        self._positions, self._all_seen = upload_together([self.asking, self._visible], device)
        self._received = torch.zeros(len(plan), dtype=torch.float32, device=device)
        self._rows = self._positions - self._first
        self._hidden, self._layer = embedded[self._rows], 0

    def advance(self) -> bool:
        """Computes one layer; True when all are done."""
        kv = self._loader.layer(self._layer)
        self._hidden = self._runner.run(self._layer, self._hidden, self._rows, self._attend(kv))
        if not self._keep:
            self._loader.release(self._layer)
        self._layer += 1
        return self._layer == self._runner.num_layers

    @property
    def layer(self) -> int:
        """The next layer."""
        return self._layer

    @property
    def attention(self) -> torch.Tensor:
        """The question's attention to each row of the runner, [rows] fp32.

        For each row: the maximum over layers, heads and question rows of (the question row's weight - the weight of a
        generic row). The generic row is the first row of the suffix, which has seen no word of the question; the
        subtraction removes what every row attends to (above all sinks). In a suffix of one row nothing is subtracted.
        The maximum, not the sum: only few heads look facts up, and a sum over all heads hides them (docs/log.md).
        """
        return self._received[self._first :]

    def _attend(self, kv: LayerCache) -> Attend:
        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            kv.write(self._positions, keys, values)
            seen = self._within(spec.window)
            known = kv.rows(seen)
            outputs = []
            for heads, kv_heads in _groups(query, len(seen), len(keys)):
                part = replace(spec, sinks=None if spec.sinks is None else spec.sinks[heads])
                weights = attention_weights(query[heads], known.keys[kv_heads], self._positions, seen, part)
                self._received[seen] = torch.maximum(self._received[seen], _beyond_generic(weights))
                folded = weights.view(len(known.keys[kv_heads]), -1, len(seen))
                outputs.append(torch.bmm(folded, known.values[kv_heads].float()).view(*weights.shape[:2], -1))
            return torch.cat(outputs).transpose(0, 1).to(query.dtype).contiguous()

        return attend

    def _within(self, window: int | None) -> torch.Tensor:
        """Positions of the keys that at least one question row attends to, ascending."""
        first = 0 if window is None else self._oldest - window + 1
        return self._all_seen[int(np.searchsorted(self._visible, first)) :]


def rows_to_ask(tokens: int) -> int:
    """Maximum number of question rows: the pass costs at most 5 % of a full prefill of so many tokens; at least 2."""
    return max(2, tokens // 20)


def _beyond_generic(weights: torch.Tensor) -> torch.Tensor:
    """How much the other rows' weights exceed those of the first, generic row: [heads, rows, n] -> maximum, [n]."""
    if weights.shape[1] > 1:
        weights = (weights[:, 1:] - weights[:, :1]).clamp_(min=0)
    return weights.amax((0, 1))


def _groups(query: torch.Tensor, seen: int, kv_heads: int) -> list[tuple[slice, slice]]:
    """Slices of query heads and of the KV heads that they use, with at most about `_MAX_WEIGHTS` weights each."""
    fold = len(query) // kv_heads
    step = max(1, _MAX_WEIGHTS // max(1, math.prod((fold, query.shape[1], seen))))
    starts = range(0, kv_heads, step)
    return [(slice(s * fold, min(s + step, kv_heads) * fold), slice(s, min(s + step, kv_heads))) for s in starts]
