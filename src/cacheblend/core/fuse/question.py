"""The question pass: measures how much the question's rows attend to each loaded row, before any of them is recomputed.

    prompt     | system | chunk A | chunk B | chunk C | suffix: g  ...  q q q |
    source     | prefix | loaded  | miss    | loaded  | text                  |
    seen       | yes    | yes     | no      | yes     | g and the last rows   |

Only the question's rows go through the layers; they attend to the stored rows and to each other. Rows without KV are
masked out. The cost is question rows x layers, independent of the prompt's length. Nothing is written.

    prompt      | chunk A: "Ann owns the bowl ."  | chunk B: "The scarf stays with the bowl ." | "Who has the scarf ?" |
    question       ..................................  finds ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^  <------  asks
    hop            finds ^^^^^^^^^^^^^^^^  <---------------- its rare words are looked for

The question attends to stored KV, in which no sentence knows another chunk. It finds the sentence about the scarf, but
nothing in it points to the bowl's owner. So the rare words of the best spans are looked for everywhere in front of the
question, hop by hop, which computes nothing. (That spans attend, too, cost more and found no more: docs/log.md.) Knows
cues and what a selector declares, not which rows are recomputed in the end.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.fuse.rows import ActiveRows
from cacheblend.core.fuse.runner import Attend, LayerRunner
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.operations import attend_asking
from cacheblend.core.kernels.upload import upload_together
from cacheblend.core.load.layer_kv import LayerCache
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.names import TokenIds
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Selector

OverRanks = Callable[[torch.Tensor, Literal["sum", "max"]], torch.Tensor]
"""Combines what rows are chosen by, [n], over tensor-parallel ranks, so that all ranks choose the same rows: deviations
are summed, of the question's attention the maximum counts."""
LONGEST_SENTENCE = 64  # tokens: text without full stops (tables, code, Thai) would be one sentence otherwise


def rows_to_ask(tokens: int) -> int:
    """Maximum number of question rows: the pass costs at most 5 % of a full prefill of so many tokens; at least 2."""
    return max(2, tokens // 20)


class QuestionPass:
    """The pass of the question's rows, computed layer by layer, and the hops behind it; `rows` is told what was found
    (`known`). Changes neither the loader's buffers nor the hidden states of `rows`. `keep`: the loaded layers stay in
    the loader for the prefill that follows, which else reads them again. `sentence_end_ids`, `over_ranks`: see
    `PrefillOptions`.

    A row's attention, [rows of the runner] fp32, is the maximum over layers, heads and asking rows of (the asking row's
    weight - the weight of the generic row). The generic row is the first row of the suffix, which has seen no word of
    the question; the subtraction removes what every row attends to (above all sinks). In a suffix of one row nothing
    is subtracted. The maximum, not the sum: only few heads look facts up, and a sum over all heads hides them
    (docs/log.md)."""

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
        most = min(selector.question_rows, rows_to_ask(len(plan)))
        self.asking = asking = plan.question_rows(most)  # positions of the rows that ask, [n] int64 ascending
        stored, device = plan.stored_rows, rows.hidden.device
        self._visible = np.union1d(stored[stored < asking[-1]], asking)
        known = [asking, self._visible, np.searchsorted(self._visible, asking)]
        self._positions, self._seen, self._places = upload_together(known, device)
        self._received = torch.zeros(len(plan), dtype=torch.float32, device=device)
        self._asking_rows = self._positions - plan.prefix_length
        self._hidden, self.layer = rows.hidden[self._asking_rows], 0  # the next one

    def advance(self) -> bool:
        """Computes one layer; True when all are done, and all is known."""
        kv = self._loader.layer(self.layer)
        self._hidden = self._runner.run(self.layer, self._hidden, self._asking_rows, self._attend(kv))
        if not self._keep:
            self._loader.release(self.layer)
        self.layer += 1
        if self.layer < self._runner.num_layers:
            return False
        if not self._keep:
            self._loader.rewind()
        self._tell()
        followed = set[int]()
        for _ in range(self._selector.hops):
            self._follow(followed)
        return True

    def _attend(self, kv: LayerCache) -> Attend:
        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            first = 0 if spec.window is None else int(self.asking[0]) - spec.window + 1
            hidden = int(np.searchsorted(self._visible, first))  # to which no asking row attends
            seen = self._seen[hidden:]
            known = kv.rows(seen)  # a copy, since nothing is written
            known.write(self._places - hidden, keys, values)
            out, received = attend_asking(query, *known, self._positions, seen, spec)
            self._received[seen] = torch.maximum(self._received[seen], received)
            return out

        return attend

    def _tell(self) -> None:
        attention, rows, prompt = self._received[self._plan.prefix_length :], self._rows, self._plan.prompt
        if self._over_ranks is not None:
            attention = self._over_ranks(attention, "max")
        words = rows.of_runner(rare_words(prompt.token_ids, self.asking, int(self.asking[0])))
        sentences = None if self._ends is None else rows.of_runner(sentence_indices(prompt, self._ends))
        rows.known = replace(rows.known, attention=attention, words=words, sentences=sentences)

    def _follow(self, followed: set[int]) -> None:
        """Looks for the rare words of the best spans that were not followed yet, by their first candidates."""
        rows, most = self._rows, self._selector.hop_spans
        found = self._selector.found_spans(rows.candidates(), len(followed) + most)
        for span in [span for span in found if span.first not in followed][:most]:
            followed.add(span.first)
            inside = self._plan.candidate_rows[span.first : span.stop]
            words = rare_words(self._plan.prompt.token_ids, inside, int(self.asking[0]))
            # They count as much as the span was attended to: what nobody asks for is not worth following.
            weights = rows.of_runner(words * np.float32(min(1.0, span.attention)))
            known = rows.known.hop_words
            rows.known = replace(rows.known, hop_words=weights if known is None else torch.maximum(known, weights))


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
