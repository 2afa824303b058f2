"""What is asked over the loaded KV before any of it is recomputed: the question, then what it has found, hop by hop.

    prompt      | chunk A: "Ann owns the bowl ."  | chunk B: "The scarf stays with the bowl ." | "Who has the scarf ?" |
    question       ..................................  finds ^^^^^^^^^^^^^^^^^^^^^^^^^^^^  <------  asks
    hop            finds ^^^^^^^^^^^^^^^^  <---------------- asks, with the next tokens

The question attends to stored KV, in which no sentence knows another chunk. It finds the sentence about the scarf, but
nothing in it points to the bowl's owner. So the best spans ask in turn: their rare words are looked for everywhere in
front of the question, which computes nothing, and their own rows attend to what is in front of them, if the selector
wants that (`hop_rows`). All spans of a hop ask in one pass.

Knows passes, cues and what a selector declares. Does not know which rows are recomputed in the end.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.fuse.question import AskingRows, QuestionPass, rows_to_ask
from cacheblend.core.fuse.rows import ActiveRows, Cues
from cacheblend.core.layers.runner import LayerRunner
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.select.selectors import FoundSpan, Selector
from cacheblend.core.select.text_cues import repeated_words, sentence_indices, shared_words

OverRanks = Callable[[torch.Tensor, Literal["sum", "max"]], torch.Tensor]
"""Combines what rows are chosen by, [n], over tensor-parallel ranks, so that all ranks choose the same rows: deviations
are summed, of the question's attention the maximum counts."""

ROWS_BEHIND = 2
"""Rows behind a span that ask with it: models often keep a sentence's content in the first tokens of the next one."""

_NONE = np.empty(0, dtype=np.int64)


class Asking:
    """All passes that ask for one prompt, computed layer by layer.

    Args:
        plan: the prompt's plan.
        selector: how many rows ask, and how many hops there are.
        runner: layer runner for the rows from `plan.prefix_length` on.
        loader: loader of the same plan, with the LOADED rows of all layers.
        rows: all rows of the runner, of which none is dropped before all has been asked; given what was found as their
            `cues`.
        keep: see `QuestionPass`.
        sentence_end_ids: [n] ids of the tokens that end a sentence; None: unknown.
        over_ranks: see `OverRanks`; None on a single rank.
    """

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
    def asking(self) -> npt.NDArray[np.int64]:
        """[n] int64, positions of the rows that the next step computes."""
        return self._pass.asking

    @property
    def layer(self) -> int:
        """The next layer."""
        return self._pass.layer

    def advance(self) -> bool:
        """Computes one layer; True when nothing is left to ask, and all cues are known."""
        if not self._pass.advance():
            return False
        attention, cues = self._pass.attention, self._rows.cues
        if self._over_ranks is not None:
            attention = self._over_ranks(attention, "max")
        if cues.attention is None:
            self._rows.cues = self._cues_of_question(attention)
        else:
            cues.hops = _most(cues.hops, attention)
        return not self._next_hop()

    def _open(self, groups: Sequence[AskingRows]) -> QuestionPass:
        of_prompt = self._plan, self._runner, self._loader
        return QuestionPass(*of_prompt, groups, self._rows.hidden, keep=self._keep)

    def _cues_of_question(self, attention: torch.Tensor) -> Cues:
        prompt, ends, rows = self._plan.prompt, self._ends, self._rows
        words = rows.of_runner(shared_words(prompt.token_ids, self._question))
        sentences = None if ends is None else rows.of_runner(sentence_indices(prompt, ends))
        return Cues(attention, words, sentences=sentences)

    def _next_hop(self) -> bool:
        """Asks the best spans that were not asked yet, by their words at once; whether a pass of their rows is next."""
        while self._hops:
            self._hops -= 1
            spans = self._spans_to_ask()
            for span in spans:
                self._ask_words(span)
            if not self._hop_rows:
                continue
            groups = [group for group in map(self._rows_of, spans) if len(group.rows) > 1]  # one has no generic row
            if groups:
                self._pass = self._open(groups)
                return True
        return False

    def _spans_to_ask(self) -> list[FoundSpan]:
        most = self._selector.hop_spans
        found = self._selector.found_spans(self._rows.candidates(), len(self._asked) + most)
        spans = [span for span in found if span.first not in self._asked][:most]
        self._asked |= {span.first for span in spans}
        return spans

    def _ask_words(self, span: FoundSpan) -> None:
        """The weights count as much as the span was attended to: what nobody asks for is not worth following."""
        rows = self._plan.candidate_rows[span.first : span.stop]
        weights = repeated_words(self._plan.prompt.token_ids, rows, int(self._question[0]))
        found = self._rows.of_runner(weights * np.float32(min(1.0, span.attention)))
        self._rows.cues.hop_words = _most(self._rows.cues.hop_words, found)

    def _rows_of(self, span: FoundSpan) -> AskingRows:
        """The span's rows and those behind it in its segment; of more than may ask, the first and the last ones.

        Their attention to themselves does not count: that they are attended to is known.
        """
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
