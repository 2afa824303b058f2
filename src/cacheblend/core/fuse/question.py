"""The question pass: measures how much some rows attend to each loaded row, before any of them is recomputed.

    prompt     | system | chunk A | chunk B | chunk C | suffix: g  ...  q q q |
    source     | prefix | loaded  | miss    | loaded  | text                  |
    seen       | yes    | yes     | no      | yes     | g and the last rows   |

Only the asking rows go through the layers; they attend to the stored rows and to each other. Rows without KV are
masked out. The cost is asking rows x layers, independent of the prompt's length. Mostly the question asks; spans that
it has found may ask in turn, hop by hop, all of a hop in one pass (`Asking`). Nothing is written.

    prompt      | chunk A: "Ann owns the bowl ."  | chunk B: "The scarf stays with the bowl ." | "Who has the scarf ?" |
    question       ..................................  finds ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^  <------  asks
    hop            finds ^^^^^^^^^^^^^^^^  <---------------- asks, with the next tokens

The question attends to stored KV, in which no sentence knows another chunk. It finds the sentence about the scarf, but
nothing in it points to the bowl's owner. So the best spans ask in turn: their rare words are looked for everywhere in
front of the question, which computes nothing, and their own rows attend to what is in front of them, if the selector
wants that (`hop_rows`). Knows passes, cues and what a selector declares, not which rows are recomputed in the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.fuse.rows import ActiveRows
from cacheblend.core.fuse.runner import Attend, LayerRunner
from cacheblend.core.kernels.attention import Askers, AttentionSpec
from cacheblend.core.kernels.operations import attend_asking
from cacheblend.core.kernels.upload import upload_together
from cacheblend.core.load.layer_kv import LayerCache
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.names import TokenIds
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import FoundSpan, Selector

OverRanks = Callable[[torch.Tensor, Literal["sum", "max"]], torch.Tensor]
"""Combines what rows are chosen by, [n], over tensor-parallel ranks, so that all ranks choose the same rows: deviations
are summed, of the question's attention the maximum counts."""
ROWS_BEHIND = 2
"""Rows behind a span that ask with it: models often keep a sentence's content in the first tokens of the next one."""
LONGEST_SENTENCE = 64  # tokens: text without full stops (tables, code, Thai) would be one sentence otherwise
_NONE = np.empty(0, dtype=np.int64)


class AskingRows(NamedTuple):
    """Positions of the question, or of a span, that ask together, [n] int64 ascending, the first of several generic
    (`QuestionPass.attention`); and those to which their attention does not count, [m]."""

    rows: npt.NDArray[np.int64]
    own: npt.NDArray[np.int64]


class QuestionPass:
    """A pass of rows that ask: the question's, or several spans', which may overlap. Changes neither the loader's
    buffers nor `hidden`, the input of layer 0 for all rows of the runner; for the others see `Asking`."""

    def __init__(
        self,
        plan: BlendPlan,
        runner: LayerRunner,
        loader: LayerLoader,
        groups: Sequence[AskingRows],
        hidden: torch.Tensor,
        keep: bool,
    ) -> None:
        self._runner, self._loader, self._first, self._keep = runner, loader, plan.prefix_length, keep
        device = hidden.device
        # positions of all rows that ask, [n] int64 ascending
        self.asking = asking = np.unique(np.concatenate([group.rows for group in groups]))
        self._oldest = int(asking[0])
        stored = plan.stored_rows
        self._visible = np.union1d(stored[stored < asking[-1]], asking)
        members = np.searchsorted(asking, np.concatenate([group.rows for group in groups]))
        sizes = [len(group.rows) for group in groups]
        known = [asking, self._visible, np.searchsorted(self._visible, asking), members, np.cumsum([0, *sizes])]
        known += [group.own for group in groups]
        # `_own`: for each group the positions that do not count
        self._positions, seen, self._places, of_groups, begins, *self._own = upload_together(known, device)
        self._askers = Askers(self._positions, seen, of_groups, begins, sizes)
        self._received = torch.zeros(len(groups), len(plan), dtype=torch.float32, device=device)
        self._rows = self._positions - self._first
        self._hidden, self.layer = hidden[self._rows], 0  # the next one

    def advance(self) -> bool:
        """Computes one layer; True when all are done."""
        kv = self._loader.layer(self.layer)
        self._hidden = self._runner.run(self.layer, self._hidden, self._rows, self._attend(kv))
        if not self._keep:
            self._loader.release(self.layer)
        self.layer += 1
        return self.layer == self._runner.num_layers

    @property
    def attention(self) -> torch.Tensor:
        """The attention to each row of the runner, [rows] fp32. For each row: the maximum over layers, heads and asking
        rows of (the asking row's weight - the weight of a generic row). The generic row is the first row of the suffix,
        which has seen no word of the question, or of the span; the subtraction removes what every row attends to (above
        all sinks). In a suffix of one row nothing is subtracted. The maximum, not the sum: only few heads look facts
        up, and a sum over all heads hides them (docs/log.md)."""
        counted = [row.index_fill(0, own, 0.0) for row, own in zip(self._received, self._own, strict=True)]
        return torch.stack(counted).amax(0)[self._first :]

    def _attend(self, kv: LayerCache) -> Attend:
        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            first = 0 if spec.window is None else self._oldest - spec.window + 1
            hidden = int(np.searchsorted(self._visible, first))  # to which no asking row attends
            seen = self._askers.key_positions[hidden:]
            known = kv.rows(seen)  # a copy: a span's rows may be kept as they were stored
            known.write(self._places - hidden, keys, values)
            out, received = attend_asking(query, *known, self._askers._replace(key_positions=seen), spec)
            self._received[:, seen] = torch.maximum(self._received[:, seen], received)
            return out

        return attend


def rows_to_ask(tokens: int) -> int:
    """Maximum number of question rows: the pass costs at most 5 % of a full prefill of so many tokens; at least 2."""
    return max(2, tokens // 20)


class Asking:
    """All passes that ask for one prompt, computed layer by layer, before a row is dropped; `rows` is told what was
    found (`known`). `keep`: the loaded layers stay in the loader for the prefill that follows, which else reads them
    again. `sentence_end_ids`, `over_ranks`: see `PrefillOptions`."""

    def __init__(
        self,
        plan: BlendPlan,
        selector: Selector,
        runner: LayerRunner,
        loader: LayerLoader,
        rows: ActiveRows,
        *,
        keep: bool,
        sentence_end_ids: npt.NDArray[np.int64] | None,
        over_ranks: OverRanks | None,
    ) -> None:
        self._plan, self._selector, self._rows = plan, selector, rows
        self._runner, self._loader, self._keep = runner, loader, keep
        self._ends, self._over_ranks = sentence_end_ids, over_ranks
        most = rows_to_ask(len(plan))
        self._question = plan.question_rows(min(selector.question_rows, most))
        self._hop_rows = min(selector.hop_rows, most)
        self._hops, self._asked = selector.hops, set[int]()
        self._pass = self._open([AskingRows(self._question, _NONE)])

    @property
    def asking(self) -> npt.NDArray[np.int64]:  # [n] int64, positions of the rows that the next step computes
        return self._pass.asking

    @property
    def layer(self) -> int:  # the next layer
        return self._pass.layer

    def advance(self) -> bool:
        """Computes one layer; True when nothing is left to ask, and all is known."""
        if not self._pass.advance():
            return False
        attention, rows = self._pass.attention, self._rows
        if self._over_ranks is not None:
            attention = self._over_ranks(attention, "max")
        if rows.known.attention is None:
            prompt, ends = self._plan.prompt, self._ends
            words = rows.of_runner(rare_words(prompt.token_ids, self._question, int(self._question[0])))
            sentences = None if ends is None else rows.of_runner(sentence_indices(prompt, ends))
            rows.known = replace(rows.known, attention=attention, words=words, sentences=sentences)
        else:
            rows.known = replace(rows.known, hops=_most(rows.known.hops, attention))
        return not self._next_hop()

    def _open(self, groups: Sequence[AskingRows]) -> QuestionPass:
        return QuestionPass(self._plan, self._runner, self._loader, groups, self._rows.hidden, self._keep)

    def _next_hop(self) -> bool:
        """Asks the best spans that were not asked yet, by their words at once; whether a pass of their rows is next."""
        rows = self._rows
        while self._hops:
            self._hops -= 1
            most = self._selector.hop_spans
            found = self._selector.found_spans(rows.candidates(), len(self._asked) + most)
            spans = [span for span in found if span.first not in self._asked][:most]
            self._asked |= {span.first for span in spans}
            for span in spans:
                inside = self._plan.candidate_rows[span.first : span.stop]
                words = rare_words(self._plan.prompt.token_ids, inside, int(self._question[0]))
                # They count as much as the span was attended to: what nobody asks for is not worth following.
                weights = rows.of_runner(words * np.float32(min(1.0, span.attention)))
                rows.known = replace(rows.known, hop_words=_most(rows.known.hop_words, weights))
            if not self._hop_rows:
                continue
            groups = [group for group in map(self._rows_of, spans) if len(group.rows) > 1]  # one has no generic row
            if groups:
                self._pass = self._open(groups)
                return True
        return False

    def _rows_of(self, span: FoundSpan) -> AskingRows:
        """The span's rows and those behind it in its segment; of more than may ask, the first and the last ones. Their
        attention to themselves does not count: that they are attended to is known."""
        candidates, segments = self._plan.candidate_rows, self._plan.segment_indices
        inside, behind = candidates[span.first : span.stop], candidates[span.stop : span.stop + ROWS_BEHIND]
        last = inside[-1]
        near = (behind <= last + ROWS_BEHIND) & (segments[behind] == segments[last])
        own = np.concatenate([inside, behind[near]])
        surplus = len(own) - self._hop_rows
        rows = own if surplus <= 0 else np.concatenate([own[:1], own[surplus + 1 :]])
        return AskingRows(rows, own)


def _most(known: torch.Tensor | None, found: torch.Tensor) -> torch.Tensor:
    return found if known is None else torch.maximum(known, found)


# ---- cues from token ids alone --------------------------------------------------------------------------------


def sentence_indices(prompt: Prompt, end_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """The sentence that each token of a prompt belongs to.

        tokens    | The fox . Who ? ! | It is here | ...
        ends      |         *     * * |            |
        sentence  |  0   0  0  1  1 1 |  2  2   2  | 3

    A run of ending tokens ends one sentence. No sentence spans two segments or has more than `LONGEST_SENTENCE`
    tokens. Returns [len(prompt)] int64, from 0, ascending without gaps.
    """
    at = np.arange(len(prompt))
    ends = np.isin(prompt.token_ids, end_ids)
    begins = np.zeros(len(prompt), dtype=bool)
    begins[1:] = ends[:-1] & ~ends[1:]
    begins[np.cumsum([0, *(len(segment) for segment in prompt.segments[:-1])])] = True
    start = np.maximum.accumulate(np.where(begins, at, 0))
    begins |= (at - start) % LONGEST_SENTENCE == 0
    indices: npt.NDArray[np.int64] = np.cumsum(begins, dtype=np.int64) - 1
    return indices


def rare_words(token_ids: TokenIds, asking: npt.NDArray[np.int64], stop: int) -> npt.NDArray[np.float32]:
    """Weight of each token as a rare word of the question, or of a span in front of it; `asking`: positions of the one
    or the other, `stop`: the question's first. [tokens] fp32: 1 / (occurrences of the token in front of `stop`, outside
    of `asking`) where `asking` contains the token, too; 0 elsewhere, at `asking` itself and from `stop` on."""
    places = np.delete(np.arange(stop), asking[asking < stop])
    ids, place, count = np.unique(token_ids[places], return_inverse=True, return_counts=True)
    weight_of_id = np.where(np.isin(ids, token_ids[asking]), 1 / np.maximum(count, 1), 0)
    weights = np.zeros(len(token_ids), dtype=np.float32)
    weights[places] = weight_of_id[place] if len(places) else 0
    return weights
