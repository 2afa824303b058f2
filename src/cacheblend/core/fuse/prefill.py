"""The fusor: one prefill over an engine's own layers, loaded KV fused with fresh, as a re-entrant stepper.

For each layer: load, check (drop rows), compute the active rows, write their fresh KV over the loaded, attend over
the fused KV causally by true position. Rows go through a layer in tiles, in order of position: a row attends only
to rows in front of it, and those are done. No global state; several passes may be under way in one process.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.errors import BlockLostError, InvalidInputError
from cacheblend.core.fuse.batching import LayerRows, LayerSteps, run_alone
from cacheblend.core.fuse.question import QuestionPass
from cacheblend.core.layers.attention import AttentionSpec, attend_rows
from cacheblend.core.layers.runner import Attend, LayerRunner
from cacheblend.core.load.loader import LayerKV, LayerLoader
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.select.deviation import kv_deviation
from cacheblend.core.select.selectors import Candidates, Selector
from cacheblend.core.select.text_cues import sentence_indices, shared_words

OverRanks = Callable[[torch.Tensor, Literal["sum", "max"]], torch.Tensor]
"""Joins what rows are chosen by [n] over tensor-parallel ranks, so that all of them choose the same rows: deviations
are summed, of the question's attention the highest counts."""

RowAttention = Callable[[int, torch.Tensor, LayerKV, torch.Tensor, AttentionSpec], torch.Tensor]
"""(layer, query [heads, n, head_dim], the layer's KV with these rows' fresh KV in place, their positions [n] int64,
spec) to [n, heads, head_dim]: each row attends up to its own position."""


def attend_dense(
    layer: int, query: torch.Tensor, kv: LayerKV, positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Over the layer's buffers; see `attend_rows`."""
    return attend_rows(query, kv.keys, kv.values, positions, spec)


OnLayer = Callable[[int, LayerKV], None]
"""Takes a layer's whole KV cache, as soon as it is final."""


@dataclass
class Work:
    """What was computed, by all passes of a prompt: one that was spent counts as well.

    Attributes:
        row_layers: rows times layers, those of the question's pass apart.
        question_row_layers: of the question's pass.
        projected_rows: see `Prefill`.
    """

    row_layers: int = 0
    question_row_layers: int = 0
    projected_rows: int = 0


@dataclass
class Prefill:
    """What a pass leaves behind.

    Attributes:
        logits: [vocab] of the last position.
        kv: the request's fused KV cache, a layer each; empty where it was handed out layer by layer.
        plan: the plan that was carried out in the end.
        recomputed_tokens: loaded rows that were still active behind the last selection.
        row_layers: rows times layers that were computed, the question's pass included.
        question_row_layers: those of the question's pass alone.
        projected_rows: rows that went through a layer's norm and projections only: at checks, and in the last layer.
        load_s, wait_s: time the loader took, and time the pass waited for it.
        read_s: time the loader read, by tier.
        fallbacks: why the pass was restarted, a line each.
    """

    logits: torch.Tensor
    kv: list[LayerKV]
    plan: BlendPlan
    recomputed_tokens: int
    row_layers: int
    question_row_layers: int
    projected_rows: int
    load_s: float
    wait_s: float
    read_s: dict[str, float]
    fallbacks: list[str] = field(default_factory=list)


class FusedPrefill:
    """One pass; `advance` it a few layers at a time, then read `result`.

    Args:
        plan: of the prompt.
        runner: over the rows from `plan.prefix_length` on: row i stands at position prefix_length + i.
        loader: of the same plan.
        selector: which loaded rows are recomputed.
        over_ranks: see `OverRanks`; None on a single rank.
        tile_rows: rows that go through a layer at once.
        sentence_end_ids: [n] ids of the tokens that end a sentence; None: unknown.
        on_layer: is handed every layer's KV, which is then let go of; None: all of it is kept for `result`.
        work: counts on; None: from nothing.
        attention: an engine's own, where it has a faster one.
    """

    def __init__(
        self,
        plan: BlendPlan,
        runner: LayerRunner,
        loader: LayerLoader,
        selector: Selector,
        *,
        over_ranks: OverRanks | None = None,
        tile_rows: int = 1024,
        sentence_end_ids: npt.NDArray[np.int64] | None = None,
        on_layer: OnLayer | None = None,
        work: Work | None = None,
        attention: RowAttention = attend_dense,
    ) -> None:
        check_selector(selector, runner.num_layers)
        self._plan, self._runner, self._loader, self._selector = plan, runner, loader, selector
        self._over_ranks, self._tile_rows = over_ranks, tile_rows
        self._sentence_end_ids, self._on_layer = sentence_end_ids, on_layer
        self._kv: list[LayerKV] = []
        self._layer = 0
        self._work = work or Work()
        self._attention_of_rows = attention
        self._start()

    @property
    def layer(self) -> int:
        """The next layer to be computed."""
        return self._layer

    @property
    def has_dropped(self) -> bool:
        """Rows were dropped: there is nothing left from which to compute them."""
        return self._has_dropped

    @property
    def active_rows(self) -> int:
        """Rows that the next step computes at most."""
        return len(self._rows) if self._question is None else len(self._question.asking)

    @property
    def done(self) -> bool:
        """All layers are computed."""
        return self.layer == self._runner.num_layers

    def advance(self, layers: int = 1) -> bool:
        """Computes up to so many layers, those of the question's pass among them; True when all are done.

        Raises:
            BlockLostError: a block could not be read. The pass is spent: plan without it and start anew.
        """
        for _ in range(layers):
            if self.done:
                break
            run_alone(self.next_layer())
        return self.done

    def next_layer(self) -> LayerSteps:
        """The next layer, of the question's pass or of the pass itself, for `run_together`; raises as `advance`."""
        if self._question is not None:
            self._ask_question(self._question)
            return
        yield from self._compute_layer()

    def result(self) -> Prefill:
        """Logits and KV cache; valid once `done`."""
        if not self.done:
            raise InvalidInputError(f"the pass stands at layer {self.layer} of {self._runner.num_layers}; advance it")
        return Prefill(
            logits=self._runner.logits(self._hidden[-1:]),
            kv=self._kv,
            plan=self._plan,
            recomputed_tokens=self._recomputed,
            row_layers=self._work.row_layers + self._work.question_row_layers,
            question_row_layers=self._work.question_row_layers,
            projected_rows=self._work.projected_rows,
            load_s=self._loader.load_s,
            wait_s=self._loader.wait_s,
            read_s=self._loader.read_s,
        )

    def _start(self) -> None:
        self._hidden = self._runner.embed()
        device = self._hidden.device
        self._rows = torch.arange(len(self._hidden), device=device)
        candidates = torch.from_numpy(self._plan.candidate_rows - self._plan.prefix_length).to(device)
        self._chunk_offsets = self._of_rows(self._plan.chunk_offsets)
        self._segments = self._of_rows(self._plan.segment_indices)
        self._sentences: torch.Tensor | None = None
        self._attention: torch.Tensor | None = None
        self._words: torch.Tensor | None = None
        self._is_candidate = torch.zeros(len(self._rows), dtype=torch.bool, device=device)
        self._is_candidate[candidates] = True
        self._total = self._recomputed = len(candidates)
        self._has_dropped = False
        self._question: QuestionPass | None = None
        if self._total and self._selector.question_rows:
            limit, keep = self._selector.question_rows, self._on_layer is None
            self._question = QuestionPass(self._plan, self._runner, self._loader, limit, self._hidden, keep=keep)

    def _choose_at_start(self) -> None:
        """The selection before layer 0, if it falls there."""
        if self._total and self._selector.at_start:
            self._keep(self._selector.select(self._candidates()))

    def _ask_question(self, question: QuestionPass) -> None:
        """A layer of the question's pass; behind the last one, what it found."""
        self._work.question_row_layers += len(question.asking)
        if not question.advance():
            return
        self._question = None
        attention = question.attention
        self._attention = attention if self._over_ranks is None else self._over_ranks(attention, "max")
        words = shared_words(self._plan.prompt.token_ids, question.asking)
        self._words = torch.from_numpy(words[self._plan.prefix_length :]).to(self._hidden.device)
        if self._sentence_end_ids is not None:
            self._sentences = self._of_rows(sentence_indices(self._plan.prompt, self._sentence_end_ids))

    def _compute_layer(self) -> LayerSteps:
        layer = self.layer
        if layer == 0:
            self._choose_at_start()
        kv = self._loader.layer(layer)
        if layer in self._selector.check_layers and self._is_candidate.any():
            self._check(layer, kv)
        if layer == self._runner.num_layers - 1:
            self._finish_all_but_last_row(layer, kv)
        for tile in self._tiles():
            rows = self._rows[tile]
            attend = self._fuse_and_attend(layer, kv, rows)
            self._hidden[tile] = yield LayerRows(self._runner, layer, self._hidden[tile], rows, attend)
        self._work.row_layers += len(self._rows)
        self._layer += 1
        if self._on_layer is None:
            self._kv.append(kv)
        else:
            self._on_layer(layer, kv)
            self._loader.release(layer)

    def _check(self, layer: int, kv: LayerKV) -> None:
        """Measures the deviation of every candidate and drops those that are not selected."""
        parts = []
        for tile in self._tiles():
            rows, candidates = self._rows[tile], self._is_candidate[tile]
            fresh = self._project(layer, tile)
            at = rows[candidates] + self._plan.prefix_length
            loaded = (kv.keys[:, at], kv.values[:, at])
            parts.append(
                kv_deviation((fresh[0][:, candidates], fresh[1][:, candidates]), loaded, self._selector.measure)
            )
        deviation = torch.cat(parts)
        if self._over_ranks is not None:
            deviation = self._over_ranks(deviation, "sum")
        self._keep(self._selector.select(self._candidates(layer, deviation)))

    def _project(self, layer: int, tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows[tile]
        self._work.projected_rows += len(rows)
        return self._runner.project(layer, self._hidden[tile], rows)

    def _finish_all_but_last_row(self, layer: int, kv: LayerKV) -> None:
        """In the last layer nobody reads the other rows' output, only their keys and values."""
        for tile in self._tiles():
            at = self._rows[tile] + self._plan.prefix_length
            kv.write(at, *self._project(layer, tile))
        self._hidden, self._rows = self._hidden[-1:].clone(), self._rows[-1:]

    def _fuse_and_attend(self, layer: int, kv: LayerKV, rows: torch.Tensor) -> Attend:
        positions = rows + self._plan.prefix_length

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            kv.write(positions, keys, values)
            return self._attention_of_rows(layer, query, kv, positions, spec)

        return attend

    def _candidates(self, layer: int | None = None, deviation: torch.Tensor | None = None) -> Candidates:
        rows = self._rows[self._is_candidate]
        return Candidates(
            positions=rows + self._plan.prefix_length,
            chunk_offsets=self._chunk_offsets[rows],
            total=self._total,
            layer=layer,
            deviation=deviation,
            attention=None if self._attention is None else self._attention[rows],
            words=None if self._words is None else self._words[rows],
            segments=self._segments[rows],
            sentences=None if self._sentences is None else self._sentences[rows],
        )

    def _of_rows(self, by_position: npt.NDArray[np.int64]) -> torch.Tensor:
        """[len(plan)] to the runner's rows, on its device."""
        return torch.from_numpy(by_position[self._plan.prefix_length :]).to(self._hidden.device)

    def _keep(self, selected: torch.Tensor) -> None:
        """Drops the candidates that are not selected; all other rows stay active."""
        active = ~self._is_candidate
        active[self._is_candidate] = selected
        self._recomputed = int(selected.sum())
        if bool(active.all()):
            return
        self._has_dropped = True
        self._hidden, self._rows = self._hidden[active], self._rows[active]
        self._is_candidate = self._is_candidate[active]

    def _tiles(self) -> Iterator[slice]:
        for start in range(0, len(self._rows), self._tile_rows):
            yield slice(start, min(start + self._tile_rows, len(self._rows)))


def check_selector(selector: Selector, num_layers: int) -> None:
    """Raises `InvalidInputError` if the selector checks at a layer that the model does not have."""
    if selector.check_layers and selector.check_layers[-1] >= num_layers:
        raise InvalidInputError(
            f"check layer {selector.check_layers[-1]} does not exist: the model has layers 0..{num_layers - 1}"
        )


def first_reused_layer(selector: Selector) -> int:
    """First layer in which the loaded KV of candidates is needed: rows may be dropped, or the question is asked."""
    early = selector.at_start or selector.question_rows
    return 0 if early or not selector.check_layers else selector.check_layers[0]


class PrefillRun:
    """One prompt, start to first logits, a layer at a time; restarts by itself where a block is lost.

    A block that fails to load is a miss, and the pass begins anew without it. Where rows had been dropped, which cannot
    be brought back, that is done once: if a later pass loses a block there, too, everything is recomputed.

    Args:
        plan: of the prompt.
        open_runner: an engine's runner over the plan's rows.
        open_loader: a loader of the plan, with the first layer whose loaded rows are needed.
        selector: which loaded rows are recomputed.
        **options: for `FusedPrefill`.
    """

    def __init__(
        self,
        plan: BlendPlan,
        open_runner: Callable[[BlendPlan], LayerRunner],
        open_loader: Callable[[BlendPlan, int], LayerLoader],
        selector: Selector,
        **options: Any,
    ) -> None:
        self._open_runner, self._open_loader, self._selector, self._options = (
            open_runner,
            open_loader,
            selector,
            options,
        )
        self._fallbacks: list[str] = []
        self._restarts = 0  # of passes that had dropped rows
        self._work = Work()
        self._start(plan)

    @property
    def layer(self) -> int:
        """The next layer to be computed."""
        return self._pass.layer

    @property
    def active_rows(self) -> int:
        """Rows that the next step computes at most."""
        return self._pass.active_rows

    @property
    def done(self) -> bool:
        """All layers are computed."""
        return self._pass.done

    def advance(self) -> bool:
        """Computes a layer, or starts anew; True when all are done."""
        run_alone(self.next_layer())
        return self.done

    def next_layer(self) -> LayerSteps:
        """The next layer for `run_together`, or a new start."""
        try:
            yield from self._pass.next_layer()
        except BlockLostError as error:
            self._fallbacks.append(str(error))
            self._restarts += self._pass.has_dropped
            self.close()
            self._start(self._plan.without("all" if self._restarts > 1 else error.names))

    def result(self) -> Prefill:
        """What the pass leaves behind; valid once `advance` said so."""
        result = self._pass.result()
        result.fallbacks = list(self._fallbacks)
        return result

    def close(self) -> None:
        """Stops loading and lets go of buffers. Idempotent."""
        self._loader.close()

    def __enter__(self) -> "PrefillRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, plan: BlendPlan) -> None:
        self._plan = plan
        self._loader = self._open_loader(plan, first_reused_layer(self._selector))
        self._pass = FusedPrefill(
            plan, self._open_runner(plan), self._loader, self._selector, work=self._work, **self._options
        )
