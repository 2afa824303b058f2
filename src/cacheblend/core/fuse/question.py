"""The question pass: measures how much some rows attend to each loaded row, before any of them is recomputed.

    prompt     | system | chunk A | chunk B | chunk C | suffix: g  ...  q q q |
    source     | prefix | loaded  | miss    | loaded  | text                  |
    seen       | yes    | yes     | no      | yes     | g and the last rows   |

Only the asking rows go through the layers; they attend to the stored rows and to each other. Rows without KV are
masked out. The cost is asking rows x layers, independent of the prompt's length. Mostly the question asks; spans that
it has found may ask in turn, all of them in one pass (`core.fuse.asking`). Nothing is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.kernels.attention_spec import AttentionSpec
from cacheblend.core.kernels.latent import attended
from cacheblend.core.kernels.upload import upload_together
from cacheblend.core.layers.attention_weights import attention_weights
from cacheblend.core.layers.runner import Attend, LayerRunner
from cacheblend.core.load.layer_kv import LayerCache
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.plan import BlendPlan

_MAX_WEIGHTS = 1 << 24  # attention weights at a time, 64 MB in fp32: KV heads are processed in groups


@dataclass(frozen=True)
class AskingRows:
    """Rows of the question, or of a span, that ask together.

    Attributes:
        rows: [n] int64 positions, ascending, at least one; the first of several is generic, see `QuestionPass`.
        own: [m] int64 positions to which their attention does not count.
    """

    rows: npt.NDArray[np.int64]
    own: npt.NDArray[np.int64]


class QuestionPass:
    """A pass of rows that ask: the question's, or several spans'.

    Args:
        plan: the prompt's plan.
        runner: layer runner for the rows from `plan.prefix_length` on.
        loader: loader of the same plan, with the LOADED rows of all layers; its buffers are not changed.
        groups: the rows that ask; groups may overlap.
        hidden: input of layer 0, [rows of the runner, width]; not changed.
        keep: keep the loaded layers in the loader for the following prefill; otherwise it reads them again.

    Attributes:
        asking: [n] int64, positions of all rows that ask, ascending.
    """

    def __init__(
        self,
        plan: BlendPlan,
        runner: LayerRunner,
        loader: LayerLoader,
        groups: Sequence[AskingRows],
        hidden: torch.Tensor,
        *,
        keep: bool = True,
    ) -> None:
        self._runner, self._loader, self._first, self._keep = runner, loader, plan.prefix_length, keep
        device = hidden.device
        self.asking = asking = np.unique(np.concatenate([group.rows for group in groups]))
        self._oldest = int(asking[0])
        stored = plan.stored_rows
        self._visible = np.union1d(stored[stored < asking[-1]], asking)
        known = [asking, self._visible, np.searchsorted(self._visible, asking)]
        known += [np.searchsorted(asking, group.rows) for group in groups] + [group.own for group in groups]
        self._positions, self._all_seen, self._places, *rest = upload_together(known, device)
        # each group's places among the asking rows, and the positions that do not count
        self._members, self._own = rest[: len(groups)], rest[len(groups) :]
        self._received = torch.zeros(len(groups), len(plan), dtype=torch.float32, device=device)
        self._rows = self._positions - self._first
        self._hidden, self._layer = hidden[self._rows], 0

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
        """The attention to each row of the runner, [rows] fp32.

        For each row: the maximum over layers, heads and asking rows of (the asking row's weight - the weight of a
        generic row). The generic row is the first row of the suffix, which has seen no word of the question, or of the
        span; the subtraction removes what every row attends to (above all sinks). In a suffix of one row nothing is
        subtracted. The maximum, not the sum: only few heads look facts up, and a sum over all heads hides them
        (docs/log.md).
        """
        counted = [row.index_fill(0, own, 0.0) for row, own in zip(self._received, self._own, strict=True)]
        return torch.stack(counted).amax(0)[self._first :]

    def _attend(self, kv: LayerCache) -> Attend:
        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            seen = self._within(spec.window)
            known = kv.rows(seen)  # a copy: a span's rows may be kept as they were stored
            places = self._places - (len(self._all_seen) - len(seen))
            known.keys.index_copy_(1, places, keys)
            known.values.index_copy_(1, places, values)
            looked_at, mixed = attended(known.keys, known.values, spec)
            outputs = []
            for heads, kv_heads in _groups(query, len(seen), len(keys)):
                part = replace(spec, sinks=None if spec.sinks is None else spec.sinks[heads])
                weights = attention_weights(query[heads], looked_at[kv_heads], self._positions, seen, part)
                self._receive(weights, seen)
                folded = weights.view(len(looked_at[kv_heads]), -1, len(seen))
                outputs.append(torch.bmm(folded, mixed[kv_heads].float()).view(*weights.shape[:2], -1))
            return torch.cat(outputs).transpose(0, 1).to(query.dtype).contiguous()

        return attend

    def _receive(self, weights: torch.Tensor, seen: torch.Tensor) -> None:
        """Notes the weights [heads, asking, n] that some heads give to the rows `seen`."""
        for received, members in zip(self._received, self._members, strict=True):
            of_group = weights if len(members) == len(self.asking) else weights[:, members]
            received[seen] = torch.maximum(received[seen], _beyond_generic(of_group))

    def _within(self, window: int | None) -> torch.Tensor:
        """Positions of the keys that at least one asking row attends to, ascending."""
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
    fold, of_a_head = len(query) // kv_heads, max(1, query.shape[1] * seen)
    if kv_heads == 1:  # as of latents, which all heads share
        at_once = max(1, _MAX_WEIGHTS // of_a_head)
        return [(slice(start, start + at_once), slice(0, 1)) for start in range(0, fold, at_once)]
    step = max(1, _MAX_WEIGHTS // (fold * of_a_head))
    starts = range(0, kv_heads, step)
    return [(slice(s * fold, min(s + step, kv_heads) * fold), slice(s, min(s + step, kv_heads))) for s in starts]
