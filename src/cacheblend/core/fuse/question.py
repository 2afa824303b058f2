"""The question's pass: what the question attends to in the loaded KV, before a loaded row is computed.

    prompt     | system | chunk A | chunk B | chunk C | suffix: g  ...  q q q |
    source     | prefix | loaded  | miss    | loaded  | text                  |
    seen       | yes    | yes     | no      | yes     | g and the last rows   |

Only the question's rows go through the layers, over what the store holds and over each other. Its cost is
rows x layers, whatever the prompt's length; what has no KV yet is masked out.
"""

import math
from dataclasses import replace

import torch

from cacheblend.core.layers.attention import AttentionSpec
from cacheblend.core.layers.attention_weights import attention_weights
from cacheblend.core.layers.runner import Attend, LayerRunner
from cacheblend.core.load.loader import LayerKV, LayerLoader
from cacheblend.core.plan.plan import BlendPlan

_SCORES_AT_ONCE = 1 << 24  # 64 MB of fp32 weights: KV heads are taken in groups


class QuestionPass:
    """One prompt's. It fills the loader's buffers at the question's positions; the fusor writes over them.

    Args:
        plan: of the prompt.
        runner: over the rows from `plan.prefix_length` on.
        loader: of the same plan, with all layers' LOADED rows.
        limit: question rows at most, see `BlendPlan.question_rows`; `rows_to_ask` may be fewer.
        embedded: the first layer's input of all rows of the runner, [rows, width]; not changed.
        keep: leave the loaded layers with the loader for the pass to come; otherwise it reads them once more.

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
        asking = torch.from_numpy(self.asking)
        self._oldest = int(asking[0])
        stored = torch.from_numpy(plan.stored_rows)
        self._all_seen = torch.cat([stored[stored < self._oldest], asking])
        self._seen: dict[int | None, torch.Tensor] = {}  # by window, on the device
        self._positions = asking.to(device)
        self._received = torch.zeros(len(plan), dtype=torch.float32, device=device)
        self._rows = self._positions - self._first
        self._hidden, self._layer = embedded[self._rows], 0

    def advance(self) -> bool:
        """One layer; True when all are done."""
        kv = self._loader.layer(self._layer)
        self._hidden = self._runner.run(self._layer, self._hidden, self._rows, self._attend(kv))
        if not self._keep:
            self._loader.release(self._layer)
        self._layer += 1
        return self._layer == self._runner.num_layers

    @property
    def attention(self) -> torch.Tensor:
        """What each row of the runner received, [rows] fp32.

        It is the highest over layers, heads and question rows of what the row's weight exceeds a generic row's by: the
        first row of the suffix, which has seen no word of the question, so that what every row looks at (sinks,
        above all) counts for nothing. A suffix of one row has none to compare with: its weights count as they are.
        The highest, not the sum: few heads look something up, and the many others' sum drowns them (docs/log.md).
        """
        return self._received[self._first :]

    def _attend(self, kv: LayerKV) -> Attend:
        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            kv.write(self._positions, keys, values)
            seen = self._within(spec.window)
            known = LayerKV(kv.keys[:, seen], kv.values[:, seen])
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
        """Positions of the keys that some question row sees, ascending."""
        if window not in self._seen:
            first = 0 if window is None else self._oldest - window + 1
            self._seen[window] = self._all_seen[self._all_seen >= first].to(self._positions.device)
        return self._seen[window]


def rows_to_ask(tokens: int) -> int:
    """Question rows at most in a prompt of so many tokens, so that the pass costs 5 % of a full prefill; 2 at least."""
    return max(2, tokens // 20)


def _beyond_generic(weights: torch.Tensor) -> torch.Tensor:
    """[heads, rows, n] weights, the first row generic: what the others exceed it by, at most, [n]."""
    if weights.shape[1] > 1:
        weights = (weights[:, 1:] - weights[:, :1]).clamp_(min=0)
    return weights.amax((0, 1))


def _groups(query: torch.Tensor, seen: int, kv_heads: int) -> list[tuple[slice, slice]]:
    """Slices of the query's heads and of the KV heads that they use, so that a group's weights stay in bounds."""
    fold = len(query) // kv_heads
    step = max(1, _SCORES_AT_ONCE // max(1, math.prod((fold, query.shape[1], seen))))
    starts = range(0, kv_heads, step)
    return [(slice(s * fold, min(s + step, kv_heads) * fold), slice(s, min(s + step, kv_heads))) for s in starts]
