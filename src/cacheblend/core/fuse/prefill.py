"""One prompt's prefill over an engine's own layers, loaded KV fused with fresh KV.

    open ──> question's pass ──> layer 0 ──> ... ──> check layer ──> ... ──> last layer ──> logits, KV cache
             (if the selector                        rows dropped
              asks for it)          <── a block was lost, or the store is too slow: restart with it as a miss

For each layer: load, check (drop rows), compute the active rows, write their fresh KV over the loaded KV, attend over
the fused KV causally by true position. Rows go through a layer in tiles, ascending by position: a row attends only to
rows at or before its own position, and those are done. There is no global state; several prefills may be under way
in one process. `core.fuse.batching` runs them side by side.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.closable import Closable
from cacheblend.core.errors import BlockLostError, InvalidInputError, LoadTimeoutError
from cacheblend.core.failures import LOST_BLOCK, count_failure
from cacheblend.core.fuse.batching import LayerRows, LayerSteps, run_alone
from cacheblend.core.fuse.correction import Correctable, correct_keys
from cacheblend.core.fuse.question import OverRanks, QuestionPass
from cacheblend.core.fuse.rows import ActiveRows
from cacheblend.core.fuse.runner import Attend, LayerRunner
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.load.budget import LoadBudget
from cacheblend.core.load.layer_kv import LayerCache, LayerKV
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.names import BlockName
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selectors import Selector


@dataclass
class PrefillResult:
    """A finished prefill."""

    # [vocab] of the last position; [n, vocab] of the last n, if more than one was asked for; empty where the engine
    # computes them itself
    logits: torch.Tensor
    kv: list[LayerKV]  # the request's KV cache, one entry a layer; empty where it was handed out layer by layer
    plan: BlendPlan  # that was carried out in the end
    report: BlendReport  # times of decoding are still zero
    read_s: dict[str, float]  # seconds of reading, by tier, in passes that were given up too
    states: Any = None  # what recurrent layers keep of the prompt, see `Recurrence.kept`; None without such layers
    # stored blocks that the loading controller left out, since computing them was expected to be faster
    slow: frozenset[BlockName] = frozenset()


class Recurrence:
    """What recurrent layers (state-space, linear attention, convolution) ask of a prefill; an engine's own says what.

    This one asks for nothing, as of a model with attention in every layer. One object serves one prefill.

    The state behind a row is a function of all rows in front of it. So such a layer needs every row's hidden state, and
    no row can be dropped in front of it:

        layer       0 ....... last recurrent | first that drops ....... last that mixes rows | ...
        rows        all of them, exact       | selected                 K, V; then the last  | the last
        loaded KV   the exact prefix         | all of it

    and a pass can only begin where the states of the rows in front are known.
    """

    lost: Sequence[str] = ()
    """Why states that are held could not be used, one line each."""

    saveable_share: float | None = None
    """See `BlendReport`."""

    def first_to_drop(self, num_layers: int) -> int:
        """The first layer at whose entrance rows may be dropped; `num_layers`: none."""
        return 0

    def last_to_mix(self, num_layers: int) -> int:
        """The last layer with attention or a state: behind it only the prompt's last rows are needed."""
        return num_layers - 1

    def begin(self, plan: BlendPlan) -> BlendPlan:
        """The plan that a pass carries out; called once a pass, before its layers are opened."""
        return plan

    def cuts(self, plan: BlendPlan) -> Sequence[int]:
        """Positions that no tile spans, ascending, because layers keep their state there."""
        return ()

    def kept(self, runner: LayerRunner) -> Any:
        """What the layers have kept of the prompt, for `PrefillResult.states`."""
        return None


RowAttention = Callable[[int, torch.Tensor, LayerCache, torch.Tensor, AttentionSpec], torch.Tensor]
"""(layer, query [heads, n, head_dim], the layer's KV with these rows' fresh KV in place, their positions [n] int64,
spec) to [n, heads, head_dim]: each row attends up to its own position."""

OnResult = Callable[[PrefillResult, bool], None]
"""Is given the result, and whether nothing else was computed meanwhile, so that its times tell of this prompt alone."""


@dataclass(frozen=True)
class PrefillOptions:
    """How an engine has its prompts computed."""

    tile_rows: int = 1024  # rows that go through a layer at once; bounds the memory of a long prompt
    sentence_end_ids: npt.NDArray[np.int64] | None = None  # [n] ids of the tokens that end a sentence; None: unknown
    over_ranks: OverRanks | None = None  # see `OverRanks`; None on a single rank
    # receives every layer's KV once it is final, which is then released; None: it is kept for the result
    on_layer: Callable[[int, LayerCache], None] | None = None
    # layers lie in the engine's own cache, so that what the question's pass loaded need not be read again
    stays: bool = False
    # of scattered rows, where the engine has a faster one than that of `LayerCache`
    attention: RowAttention = lambda layer, query, kv, positions, spec: kv.attend(query, positions, spec)
    last_rows: int = 1  # rows at the prompt's end whose logits the result has, none of them a candidate
    synchronize: Callable[[], None] = lambda: None  # waits for the device, so that a clock read afterwards is right
    on_result: OnResult | None = None
    recurrence: Recurrence = field(default_factory=Recurrence)
    # what the request may wait for the store, which its loaders have, too; for the report
    budget: LoadBudget = field(default_factory=LoadBudget)


class BlendedPrefill(Closable):
    """A stepper: `advance` it until it is `done`, then take its `result`; close it in the end, or use `with`.

    A block that fails to load, or does not load in time, becomes a miss, and the prefill starts again without it. If
    rows had already been dropped, which cannot be restored, that happens once: if a later pass loses a block after a
    selection again, everything is recomputed. Blocks that were too slow are left out, not missed: the store has them.

    Args:
        open_runner: an engine's layers for the plan's rows from `plan.prefix_length` on; called once a pass.
        open_loader: a loader of the plan, given the first layer whose loaded rows are needed; called once a pass.
        started: when the request came, by `time.perf_counter`; None: now.
        named: the selector as settings name it, for the report; None: `selector`.

    Raises:
        InvalidInputError: the selector checks at a layer that the model does not have.
    """

    def __init__(
        self,
        plan: BlendPlan,
        open_runner: Callable[[BlendPlan], LayerRunner],
        open_loader: Callable[[BlendPlan, int], LayerLoader],
        selector: Selector,
        options: PrefillOptions | None = None,
        *,
        started: float | None = None,
        named: Selector | None = None,
    ) -> None:
        self._open_runner, self._open_loader, self._selector = open_runner, open_loader, selector
        self._named = (named or selector).name, (named or selector).share
        self._options = options or PrefillOptions()
        self._report, self._read_s = BlendReport(), dict[str, float]()  # of passes that were given up, too
        self._restarts = 0  # after rows had been dropped
        self._is_alone = True
        self._started = time.perf_counter() if started is None else started
        self._start(plan)
        self._planned = time.perf_counter()

    def _start(self, plan: BlendPlan) -> None:
        recurrence = self._options.recurrence
        self._plan = plan = recurrence.begin(plan)
        self._runner = self._open_runner(plan)
        self._selector = check_selector(self._selector, self._runner.num_layers)
        self._first_to_drop = recurrence.first_to_drop(self._runner.num_layers)
        self._last_to_mix = recurrence.last_to_mix(self._runner.num_layers)
        reused = max(self._first_to_drop, first_reused_layer(self._selector))
        self._loader = self._open_loader(plan, reused)
        self._rows = rows = ActiveRows(plan, self._runner.embed(), recurrence.cuts(plan))
        self.layer, self._kv = 0, list[LayerKV]()  # the next layer to be computed; of those before it
        self._question: QuestionPass | None = None  # what the next step computes, until all is known
        if rows.total and self._selector.question_rows:
            self._question = QuestionPass(
                plan,
                self._selector,
                self._runner,
                self._loader,
                rows,
                keep=self._options.stays or self._options.on_layer is None,
                sentence_end_ids=self._options.sentence_end_ids,
                over_ranks=self._options.over_ranks,
            )

    @property
    def active_rows(self) -> int:  # rows that the next step computes at most
        return len(self._rows) if self._question is None else len(self._question.asking)

    @property
    def awaited(self) -> "Future[Any] | None":
        """The read that the next step would wait for; None: it would not wait for the store. Begins to read."""
        if self.done:
            return None
        return self._loader.awaited(self.layer if self._question is None else self._question.layer)

    @property
    def reading(self) -> str:  # the tier that is being read, or was read last; empty: none yet
        return self._loader.reading

    @property
    def lost_reads(self) -> int:  # that restarted it so far
        return len(self._report.fallbacks)

    @property
    def prefix_length(self) -> int:  # leading tokens of which nothing is computed
        return self._plan.prefix_length

    @property
    def done(self) -> bool:  # all layers are computed
        return self.layer == self._runner.num_layers

    def advance(self, layers: int = 1) -> bool:
        """Computes up to so many layers, those of the question's pass among them, or restarts; True when done."""
        for _ in range(layers):
            if self.done:
                break
            run_alone(self.next_layer())
        return self.done

    def next_layer(self) -> LayerSteps:
        """The next layer, of the question's pass or of the prompt, or a restart; for `PrefillBatcher`."""
        began = time.perf_counter()
        try:
            if self._question is not None:  # a layer of its pass
                self._report.question_row_layers += len(self._question.asking)
                if self._question.advance():
                    self._question = None
            else:
                yield from self._compute_layer()
        except BlockLostError as error:
            is_late = isinstance(error, LoadTimeoutError)
            if not is_late:
                self._report.fallbacks.append(str(error))
                count_failure(LOST_BLOCK)
            self._restarts += self._rows.has_dropped
            self._add_loads()
            self.close()
            names: Iterable[BlockName] | Literal["all"] = "all" if self._restarts > 1 else error.names
            self._start(self._plan.leaving_out(names) if is_late else self._plan.without(names))
        finally:
            self._report.compute_s += time.perf_counter() - began

    def mark_shared(self) -> None:
        """Something else is computed before this is done: its times then say little about this prompt."""
        self._is_alone = False

    def result(self) -> PrefillResult:
        """Logits, KV cache and report; valid once `done`, asked for once."""
        if not self.done:
            raise InvalidInputError(f"the prefill is at layer {self.layer} of {self._runner.num_layers}; advance it")
        began = time.perf_counter()
        logits = self._runner.logits(self._rows.hidden[-self._options.last_rows :])
        self._options.synchronize()
        ended = time.perf_counter()
        self._add_loads()
        plan, recurrence, so_far = self._plan, self._options.recurrence, self._report
        tokens = plan.tokens_by_source()
        left_out = sum(len(span) for span in plan.spans if span.source is Source.MISS and span.name in plan.left_out)
        selector, ratio = self._named if self._rows.total else ("", None)
        report = replace(
            so_far,
            prompt_tokens=len(plan),
            hit_tokens=plan.hit_tokens(),
            missed_tokens=tokens["miss"] - left_out,
            left_out_tokens=left_out,
            text_tokens=tokens["text"],
            recomputed_tokens=self._rows.recomputed,
            selector=selector,
            recompute_ratio=ratio,
            row_layers=so_far.row_layers + so_far.question_row_layers,
            plan_s=self._planned - self._started,
            compute_s=so_far.compute_s + ended - began - so_far.wait_s,
            ttft_s=ended - self._started,
            fallbacks=[*so_far.fallbacks, *recurrence.lost],
            load_timeouts=list(self._options.budget.timeouts),
            saveable_share=recurrence.saveable_share,
            changed_contents=plan.prompt.changed_contents,
        )
        result = PrefillResult(logits, self._kv, plan, report, self._read_s, recurrence.kept(self._runner))
        if self._options.on_result is not None:
            self._options.on_result(result, self._is_alone)
        return result

    def _add_loads(self) -> None:
        """Adds the times of a pass's loader, which loads no more."""
        self._report.load_s += self._loader.load_s
        self._report.wait_s += self._loader.wait_s
        for tier, seconds in self._loader.read_s.items():
            self._read_s[tier] = self._read_s.get(tier, 0.0) + seconds

    def close(self) -> None:
        """Stops loading and releases buffers. Idempotent."""
        self._loader.close()

    def _compute_layer(self) -> LayerSteps:
        layer, rows = self.layer, self._rows
        if layer == self._first_to_drop and rows.total and self._selector.at_start:
            rows.keep(self._selector.select(rows.candidates()))
        kv = self._loader.layer(layer)
        if layer in self._selector.check_layers and rows.has_candidates:
            # Measured of all active rows: which of them are candidates is known on the device only.
            measure, tiles = self._selector.measure, rows.tiles(self._options.tile_rows)
            parts = [kv.deviation(self._project(layer, tile), measure, rows.positions(tile)) for tile in tiles]
            deviation = torch.cat(parts)
            if self._options.over_ranks is not None:
                deviation = self._options.over_ranks(deviation, "sum")
            rows.keep(self._selector.select(rows.candidates(layer, deviation)))
        correction = self._correction(layer, kv)
        if layer == self._last_to_mix and layer >= self._first_to_drop:
            for tile in rows.tiles(self._options.tile_rows):  # of the others only keys and values are needed
                kv.write(rows.positions(tile), *self._project(layer, tile))
            rows.keep_last(self._options.last_rows)
        elif layer > self._last_to_mix:
            rows.keep_last(self._options.last_rows)
        for tile in rows.tiles(self._options.tile_rows):
            attend = self._fuse_and_attend(layer, kv, rows.positions(tile), correction)
            rows.put(tile, (yield LayerRows(self._runner, layer, rows.hidden[tile], rows.index_of(tile), attend)))
        self._report.row_layers += len(rows)
        self.layer += 1
        self._hand_out(layer, kv)

    def _project(self, layer: int, tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
        index = self._rows.index_of(tile)
        self._report.projected_rows += len(index)
        return self._runner.project(layer, self._rows.hidden[tile], index)

    def _correction(self, layer: int, kv: LayerCache) -> Correctable | None:
        """Corrects a layer's keys; or what `_fuse_and_attend` still corrects, which sees the fresh keys of one tile."""
        rows, weight = self._rows, self._selector.correction
        if not (weight and rows.has_dropped and rows.has_candidates):
            return None
        tiles = list(rows.tiles(self._options.tile_rows))
        if len(tiles) == 1 and layer < self._last_to_mix:
            return rows.correctable
        keys = torch.cat([self._project(layer, tile)[0] for tile in tiles], 1)
        correct_keys(kv, keys, rows.correctable, weight)
        return None

    def _fuse_and_attend(
        self, layer: int, kv: LayerCache, positions: torch.Tensor, correction: Correctable | None
    ) -> Attend:
        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            if correction is not None:
                correct_keys(kv, keys, correction, self._selector.correction)
            kv.write(positions, keys, values)
            return self._options.attention(layer, query, kv, positions, spec)

        return attend

    def _hand_out(self, layer: int, kv: LayerCache) -> None:
        if self._options.on_layer is None:
            self._kv.append(LayerKV(kv.keys, kv.values))
        else:
            self._options.on_layer(layer, kv)
            self._loader.release(layer)


@dataclass(eq=False)
class PrefillJob:
    """A job for `PrefillBatcher` from before its prefill is opened until that is closed."""

    prefill: BlendedPrefill | None = field(default=None, kw_only=True)

    @property
    def layer(self) -> int:
        return 0 if self.prefill is None else self.prefill.layer

    @property
    def active_rows(self) -> int:
        return 0 if self.prefill is None else self.prefill.active_rows

    def next_layer(self) -> LayerSteps:
        assert self.prefill is not None
        return self.prefill.next_layer()


def check_selector(selector: Selector, num_layers: int) -> Selector:
    """The selector for a model of so many layers. Raises `InvalidInputError`: it checks at a layer that the model does
    not have."""
    selector = selector.of_model(num_layers)
    if selector.check_layers and num_layers == 1:
        raise InvalidInputError(
            f"check layer {selector.check_layers[-1]} does not exist: the model has one layer only, and nothing is "
            "left to recompute behind it; use a selector without check layers (head, query), or no blending"
        )
    if selector.check_layers and selector.check_layers[-1] >= num_layers:
        raise InvalidInputError(
            f"check layer {selector.check_layers[-1]} does not exist: the model has layers 0..{num_layers - 1}"
        )
    return selector


def check_latents(selector: Selector) -> None:
    """Whether a selector is one for a model with latent attention. Raises `InvalidInputError`: it compares or corrects
    keys or values alone, where a layer keeps one vector for both."""
    if selector.correction:
        raise InvalidInputError(
            "correction moves keys alone, but this model keeps one latent for keys and values; leave it at 0"
        )
    if selector.check_layers and selector.measure != "kv":
        raise InvalidInputError(
            f"measure {selector.measure!r} compares keys or values alone, but this model keeps one latent for both; "
            "use measure 'kv', which compares latent and rotated key part"
        )


def first_reused_layer(selector: Selector) -> int:
    """First layer in which the loaded KV of candidates is needed: rows may be dropped, or the question is asked."""
    early = selector.at_start or selector.question_rows
    return 0 if early or not selector.check_layers else selector.check_layers[0]
