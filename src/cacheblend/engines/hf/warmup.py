"""Stores chunks: before their first use (`warm`), or after a request that missed them. Knows no engine."""

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import (
    ModelChangedError,
    ModelOverflowError,
    StoreError,
    StoreUnreachableError,
)
from cacheblend.core.failures import count_failure
from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.core.load.budget import LOOK_UP
from cacheblend.core.load.capture import CapturedChunk, ChunkJob, blocks_of, manifest_of, publish
from cacheblend.core.load.threads import DaemonPool, time_left
from cacheblend.core.names import BlockName, TokenIds, grouped, join_ids, state_name
from cacheblend.core.openmp import end_team
from cacheblend.core.plan.blocks import Block
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, Segment, check_ids, chunk, text
from cacheblend.core.select.selectors import AllRows
from cacheblend.engines.discovery import Discovery
from cacheblend.engines.hf.adapter_watch import AdapterWatch
from cacheblend.engines.hf.background import CLOSE_S, Background
from cacheblend.engines.hf.recurrent import SHORTEST, cache_argument, kv_of_cache, snapshot_blocks
from cacheblend.engines.hf.state import ModelState
from cacheblend.engines.hf.survey import check_mode
from cacheblend.engines.histories import Histories, exact_part, next_section
from cacheblend.engines.keeper import ChunkKeeper, WarmReport
from cacheblend.store import KVStore, WriteBehind
from cacheblend.store.writer import STUCK_S

Progress = Callable[[int, int], None]
Answered = TypeVar("Answered")
logger = logging.getLogger("cacheblend.engine")
MOST_BEGUN = 1 << 16  # names of blocks that are remembered to see whether prompts begin alike
STORE_S = 10.0  # that background work waits for the store where requests wait for it, and for promoted blocks
MOST_EDITED = 64  # conversations whose last prompt waits to be computed without an edit
HOLD_UP_TOKENS = 2048  # a longer chunk is captured only while there are no requests


@torch.no_grad()
def compute_chunks(
    model: PreTrainedModel, jobs: Sequence[ChunkJob], planner: Planner, model_name: str
) -> Iterator[CapturedChunk]:
    """One batched plain forward of the jobs, padded on the right: attention is causal, so that needs no mask."""
    longest = max(len(job) for job in jobs)
    ids = torch.zeros(len(jobs), longest, dtype=torch.int64)
    for row, job in enumerate(jobs):
        ids[row, : len(job)] = torch.from_numpy(join_ids((*job.anchor, job.token_ids)).astype("i8"))
    cache = DynamicCache()  # without a config, so that sliding-window layers keep all tokens: all of them are stored
    model.base_model(input_ids=ids.to(model.device), use_cache=True, **cache_argument(model.base_model, cache))
    for row, job in enumerate(jobs):
        layers = kv_of_cache(model, cache, row)
        yield CapturedChunk(blocks_of(job, planner, layers), manifest_of(job, planner, model_name))


@torch.no_grad()
def compute_with_states(state: ModelState, job: ChunkJob, planner: Planner, model_name: str) -> CapturedChunk:
    """A job's full prefill, layer by layer: a state behind padding would be another one, so jobs share no forward.
    Snapshots of recurrent layers follow its blocks; compressed chunks have none, since they are no exact prefix."""
    prompt = Prompt.of([*(text(part.tolist()) for part in job.anchor), chunk(job.token_ids.tolist())])
    with state.prefiller.open_alone(prompt, planner) as prefill:
        result = prefill.run()
    blocks = [*blocks_of(job, planner, result.kv), *snapshot_blocks(state.survey.kinds, result.states)]
    return CapturedChunk(blocks, manifest_of(job, planner, model_name))


class Asker(NamedTuple):
    """Whose request a discovered run was in: how its chunk is computed, and whether it may be stored."""

    state: ModelState
    planner: Planner
    anchor: tuple[TokenIds, ...]
    may_keep: Callable[[int], bool]


class _Edited(NamedTuple):
    """A prompt that was edited: it is computed as it is, of which so many tokens are done. `has_failed`: its next ones
    were computed once in vain."""

    state: ModelState
    planner: Planner
    prompt: Prompt
    done: int = 0
    has_failed: bool = False


class ChunkWarmer:
    """Computes chunks alone, each with its anchor in front of it, and stores them. `model` is the caller's, whose mode
    is looked at before anything is computed; KV computed while its adapters change is not stored. `discovery` learns
    text that recurs, and finds stored chunks in plain text; None: nothing is learnt or found."""

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        config: BlendConfig,
        background: Background,
        name: str,
        adapters: AdapterWatch,
        discovery: Discovery[Asker] | None,
        histories: Histories | None,
    ) -> None:
        self._model, self._store, self._config = model, store, config
        self._background, self._name, self._adapters = background, name, adapters
        self._writer = WriteBehind(store)
        self.keeper = ChunkKeeper(store)
        if discovery is not None:
            self.keeper.listeners.append(lambda manifest: discovery.listing.add([manifest]))
        self._discovery, self._lock = discovery, threading.Lock()
        self._histories = histories
        self._edited = OrderedDict[tuple[BlockName, str], _Edited]()  # by conversation, its newest
        self._keeps_edited = True
        self._store_thread = DaemonPool(1, "cacheblend-keeper")
        self._asked: tuple[Future[Any], float] | None = None  # what the store was asked last in that thread, and when
        self._begun: dict[BlockName, None] = {}  # blocks that prompts without chunks begin with, the newest last

    def warm(
        self,
        state: ModelState,
        tenant: str,
        anchor: Sequence[TokenIds],
        segments: Sequence[Segment],
        progress: Progress | None = None,
    ) -> WarmReport:
        """Stores the segments that the store does not hold; see `BlendEngine.warm`."""
        started = time.perf_counter()
        planner, survey = state.planner_of(tenant), state.survey
        distinct: dict[bytes, ChunkJob] = {}
        for number, segment in enumerate(segments, 1):
            job, what = ChunkJob(tuple(anchor), segment.token_ids, segment.label), f"chunk {segment.label or number}"
            check_ids(segment.token_ids, survey.vocab_size, what)
            survey.check_chunk(len(job), what)
            distinct.setdefault(segment.token_ids.tobytes(), job)
        jobs = list(distinct.values())
        missing = [job for job in jobs if not self._is_held(job, state, planner)]
        done = len(jobs) - len(missing)
        if progress is not None:
            progress(done, len(jobs))
        most = self._config.capture_batch_tokens
        # Jobs of similar length together, with padding at most as many tokens, but at least one job.
        try:
            for batch in grouped(sorted(missing, key=len), lambda batch, job: len(job) * (len(batch) + 1) <= most):
                computed = self._compute(batch, state, planner)
                self._store.flush()  # a farther store that is slower drops what comes too soon
                for captured in computed:
                    self.keeper.store(captured)
                done += len(batch)
                if progress is not None:
                    progress(done, len(jobs))
        finally:
            end_team()
        self._store.flush()
        tokens = sum(len(job.token_ids) for job in missing)
        evicted = self.keeper.missing([manifest_of(job, planner, "") for job in jobs]) if missing else 0
        return WarmReport(len(missing), len(jobs) - len(missing), tokens, time.perf_counter() - started, evicted)

    def after_request(
        self,
        state: ModelState,
        tenant: str,
        result: PrefillResult,
        *,
        text: bool = True,
        may_keep: Callable[[int], bool] = lambda tokens: True,
    ) -> None:
        """After a request: writes its exact blocks as they are, and queues its missed chunks to be computed alone, as
        the text that recurs in it. Blocks that the loading controller left out because they are slow to load are
        promoted to a faster tier, since they are in use. `state` is of the model, now. `text`: also write the exact
        blocks of plain text at the prompt's start. `may_keep` is called with the tokens of missed chunks, at once, or
        of a run that recurs, later and in another thread; returns whether to store them."""
        if result.slow:
            self._background.submit(result.slow, partial(self._promote, sorted(result.slow)), patient=True)
        if not self._config.capture:
            return
        missed, asked = result.plan.missed_chunks(), result.plan.prompt.as_asked
        planner = state.planner_of(tenant)
        anchor = tuple(planner.anchor.segments(result.plan.prompt))
        if not self._is_current(state) or planner.chain_of(anchor) != result.plan.anchor_name:
            return  # the request was computed with other adapters
        if self.keeper.is_paused:
            if text and asked is not None and self._histories is not None and may_keep(0):
                self._queue_edited(state, planner, asked)
            return self._background.give_up("store", len(missed))
        self._go_on_with_edited()  # what the store did not take before
        if self._discovery is not None:
            asker = Asker(state, planner, anchor, may_keep)
            queue = partial(self._queue_discovered, self._discovery)
            self._discovery.watch(planner.root, result.plan.prompt, result.plan, asker, queue)
        if not may_keep(sum(map(len, missed))):
            return self._background.give_up("quota", max(len(missed), text and self._histories is not None))
        if text:
            try:
                exact, blocks, is_all = self._exact_blocks(planner, result, self._writer.room)
            except ModelOverflowError as error:  # the answer is not affected: it was drawn
                exact, blocks, is_all = None, list[Block](), False
                logger.warning("a prompt's own text is not stored: %s", error)
                count_failure(type(error).__name__)
            taken, conversation = self._writer.submit_all(blocks), result.plan.prompt.conversation
            if exact is not None and self._histories is not None:
                refused = (block.name for block, is_taken in zip(blocks, taken, strict=True) if not is_taken)
                if is_all and all(self._writer.is_waiting([name]) for name in refused):
                    self._histories.note(planner.root, conversation, exact)
                else:  # more than may wait for the store at once is computed again, section by section
                    asked, exact = asked or replace(exact.prompt, conversation=conversation), None
            self._writer.submit_all(snapshot_blocks(state.survey.kinds, result.states) if result.states else ())
            if asked is not None and (exact is None or len(exact) < len(asked)):
                self._queue_edited(state, planner, asked)
        for segment in missed:
            job, longest = ChunkJob(anchor, segment.token_ids, segment.label), state.survey.max_length
            if longest is not None and len(job) > longest:  # an anchor of text does not stand in the prompt
                logger.warning("a missed chunk has %d tokens with its anchor, %d fit: not stored", len(job), longest)
                self._background.give_up("too long")
                continue
            self._background.submit(
                manifest_of(job, planner, "").chunk_id,
                partial(self._capture, state, planner, job),
                patient=len(job) > HOLD_UP_TOKENS,
            )

    def _exact_blocks(
        self, planner: Planner, result: PrefillResult, room: float = math.inf
    ) -> tuple[BlendPlan | None, list[Block], bool]:
        """The text in front of the first chunk; of a prompt without chunks what an earlier one began with, too. Where
        later prompts of the conversation may have it at other places all of it, with a plan of it (`exact_part`); and
        whether these are all blocks of it: no more than `room` bytes are made."""
        plan = result.plan
        if self._histories is not None:
            is_unknown = all(span.name in plan.left_out for span in plan.spans)
            if is_unknown or (exact := exact_part(planner, plan)) is None:
                return None, [], False  # nobody knows what is stored, or it begins with a chunk
            # Of a moved run that is left out nothing is known but that this prompt's blocks are others.
            segments = plan.prompt.segments
            left_out = [s for s in plan.spans if s.name in plan.left_out and not segments[s.segment].is_moved]
            held = {span.name for span in plan.spans if span.source is Source.PREFIX}
            new = [
                span
                for span in exact.spans
                if span.name not in held and all(span.stop <= out.start or out.stop <= span.start for out in left_out)
            ]
            a_token = sum(layer[:, :1].nbytes for pair in result.kv for layer in pair)
            total = accumulate(len(span) * a_token for span in new)
            fitting = [span for span, nbytes in zip(new, total, strict=True) if nbytes <= room]
            return exact, publish(exact, result.kv, fitting), len(fitting) == len(new)
        if plan.prompt.chunks or self._discovery is None:
            return None, publish(plan, result.kv), True
        computed = [span for span in plan.spans if span.source is Source.TEXT and span.name not in plan.left_out]
        with self._lock:
            again = [span for span in computed if span.name in self._begun]
            self._begun |= dict.fromkeys(span.name for span in computed)
            for name in list(islice(self._begun, max(0, len(self._begun) - MOST_BEGUN))):
                del self._begun[name]
        return None, publish(plan, result.kv, again), True

    def flush(self, timeout: float | None = None) -> bool:
        """Waits for the work that `after_request` queued; False if it took longer than `timeout` seconds."""
        left = time_left(timeout)
        self._go_on_with_edited()
        watched = self._discovery is None or self._discovery.flush(left())
        done = self._background.flush(left())
        return self._writer.flush(left()) and done and watched

    def give_up_edited(self) -> None:
        """Of edited prompts no more is computed than the section that is under way."""
        with self._lock:
            self._keeps_edited = False
            waiting = len(self._edited)
            self._edited.clear()
        if waiting:
            logger.warning("closed with %d edited prompt(s) waiting to be computed; they are dropped", waiting)
            self._background.give_up("histories", waiting)

    def close(self) -> None:
        """Ends writing and discovery. The background queue is closed by its owner."""
        self._store_thread.close()
        self._writer.close(CLOSE_S)
        if self._discovery is not None:
            self._discovery.close()
            self._discovery.listing.close()

    @property
    def _is_awaited(self) -> bool:
        return self._asked is not None and not self._asked[0].done()

    @property
    def is_stuck(self) -> bool:
        """The store has not answered background work for `STORE_S`, or a write for `STUCK_S`."""
        is_awaited = self._is_awaited and self._asked is not None and time.monotonic() > self._asked[1] + STORE_S
        is_deleting = self._discovery is not None and self._discovery.is_stuck
        return is_awaited or is_deleting or max(self._writer.writing_s, self._store.writing_s) > STUCK_S

    def _ask_store(self, call: Callable[[], Answered]) -> Answered:
        """Has the store called in a thread that may hang. Where requests wait, its answer is waited for `STORE_S`.
        Raises `StoreError`: it does not answer in time; later work is left out until it does."""
        asked = self._store_thread.submit(call)
        self._asked = asked, time.monotonic()
        try:
            return asked.result(STORE_S if self._background.holds_up_requests else None)
        except TimeoutError:
            if asked.done():  # it is the store's own
                raise
            raise StoreUnreachableError(f"the store has not answered background work for {STORE_S:g} s") from None

    def _promote(self, names: Sequence[BlockName]) -> None:
        if not self._is_awaited:
            asked = self._store_thread.submit(partial(self._store.promote, names))
            self._asked = asked, time.monotonic()
            if wait([asked], STORE_S).done:
                asked.result()

    def _capture(
        self, state: ModelState, planner: Planner, job: ChunkJob, may_keep: Callable[[int], bool] | None = None
    ) -> bool | None:
        """Computes and keeps a chunk; False: the store holds it by now. None: it is not kept, for the store cannot take
        chunks now, `may_keep` forbids it, or the adapters were switched."""
        if self.keeper.is_paused or self._is_awaited:
            self._background.give_up("store")
            return None
        if self._ask_store(partial(self._is_held, job, state, planner)):
            return False
        if may_keep is not None and not may_keep(len(job.token_ids)):
            self._background.give_up("quota")
            return None
        try:
            [captured] = self._compute([job], state, planner)
        except ModelChangedError:  # no failure: the request that missed it was one of the other adapters
            logger.info("a missed chunk of %d tokens is not stored: the adapters were switched", len(job.token_ids))
            return None
        if not self._ask_store(partial(self.keeper.keep, captured)):
            self._background.give_up("store")
            return None
        return True

    def _queue_discovered(self, discovery: Discovery[Asker]) -> None:
        for is_long in (False, True):
            keep = partial(self._keep_discovered, discovery, is_long)
            self._background.submit(("discovered", is_long), keep, patient=is_long)

    def _keep_discovered(self, discovery: Discovery[Asker], is_long: bool) -> None:
        wanted = discovery.take(lambda run: (len(run) > HOLD_UP_TOKENS) == is_long)
        if wanted is None:
            return
        run, (state, planner, anchor, may_keep) = wanted
        job, longest = ChunkJob(anchor, run.token_ids), state.survey.max_length
        if longest is not None and len(job) > longest:
            self._background.give_up("too long")
        else:
            computed = self._capture(state, planner, job, may_keep)
            if computed is not None:
                discovery.stored(run, manifest_of(job, planner, self._name), computed=computed)
        self._queue_discovered(discovery)

    def _queue_edited(self, state: ModelState, planner: Planner, prompt: Prompt) -> None:
        """Has an edited prompt computed as it is, when there is time: the next one then begins with it."""
        with self._lock:
            self._edited[planner.root, prompt.conversation] = _Edited(state, planner, prompt)
            while len(self._edited) > MOST_EDITED:  # one of those who have most
                (root, _), *_ = Counter(root for root, _ in self._edited).most_common(1)
                del self._edited[next(key for key in self._edited if key[0] == root)]
                self._background.give_up("histories")
        self._go_on_with_edited()

    def _go_on_with_edited(self) -> None:
        if self._edited:
            self._background.submit("edited", self._keep_edited, patient=True)

    def _keep_edited(self) -> None:
        """Computes the next blocks of the edited prompt that waits longest, some thousand tokens at a time. Where the
        store takes or answers nothing, all of them wait until another request has ended."""
        if self.keeper.is_paused or self._is_awaited:
            return
        with self._lock:
            key, edited = self._edited.popitem(last=False) if self._edited else (None, None)
        if key is None or edited is None:
            return
        rest: _Edited | None = None
        waits = False
        try:
            rest = self._keep_section(key, edited)
        except (StoreError, OSError) as error:
            rest, waits = edited, True
            if not isinstance(error, StoreUnreachableError):  # which the store has logged
                logger.warning("an edited prompt is not stored yet: %s", error)
        finally:
            with self._lock:
                if rest is not None and self._keeps_edited and key not in self._edited:  # else a newer one has come
                    self._edited[key] = rest
                    self._edited.move_to_end(key, last=waits)
            if not waits:
                self._go_on_with_edited()

    def _keep_section(self, key: tuple[BlockName, str], edited: _Edited) -> _Edited | None:
        """What is left of it; None: it is complete, or given up. Raises StoreError: it has to wait, since the store
        does not answer now."""
        state, planner, prompt, done, has_failed = edited
        self._writer.flush(STORE_S)  # what waits to be written need not be computed
        held, section = self._ask_store(partial(next_section, planner, prompt, self._store, HOLD_UP_TOKENS))
        stored = 0 if held is None else len(held)
        if self._store.is_away or (stored < done and not self._store.is_reachable):
            raise StoreUnreachableError("the store does not answer")
        if held is not None and self._histories is not None:
            self._histories.note(*key, held)
        if section is None:
            return None
        if stored < done or not self._is_current(state):  # not kept, or of weights or adapters that are others now
            self._background.give_up("histories")
            return None
        with state.prefiller.open(section.prompt, planner, AllRows(), "prefix") as prefill:
            # What is late is passed over for a while: all would be computed.
            if prefill.prefix_length < stored or state.prefiller.late_tiers.left_s(LOOK_UP) > 0:
                raise StoreUnreachableError("the store has been too slow")
            exact, blocks, _ = self._exact_blocks(planner, prefill.run())
        if exact is None or len(exact) <= stored:  # the store was late, or what it holds is damaged
            if has_failed:
                self._background.give_up("histories")
            return None if has_failed else edited._replace(has_failed=True)
        if not self._is_current(state) or not self._ask_store(partial(self.keeper.write, blocks)):
            return edited
        return edited._replace(done=len(exact), has_failed=False)

    def _compute(self, jobs: Sequence[ChunkJob], state: ModelState, planner: Planner) -> list[CapturedChunk]:
        """The chunks' KV, with the adapters that the planner names: by one padded forward of the model, or by prefills
        of their own, which note recurrent layers' states. Raises `ModelChangedError` if the adapters have changed."""
        check_mode(self._model)
        captured: list[CapturedChunk] = []
        if self._is_current(state) and state.survey.kinds.has_other_layers:
            captured += [compute_with_states(state, job, planner, self._name) for job in jobs]
        elif self._is_current(state):
            captured += compute_chunks(state.adapted.model, jobs, planner, self._name)
        if not self._is_current(state):  # also weights that were replaced in their place
            raise ModelChangedError(
                "the model's weights or adapters were changed while passages were computed, which are not stored; "
                "warm them again"
            )
        return captured

    def _is_held(self, job: ChunkJob, state: ModelState, planner: Planner) -> bool:
        """Whether the store holds a chunk, lists it, and holds the states behind it, if it has any."""
        manifest = manifest_of(job, planner, self._name)
        if not self.keeper.is_held(manifest):
            return False
        can_be_prefix = codec_of(planner.codec).is_exact
        if not state.survey.kinds.states or not can_be_prefix or len(job) < SHORTEST:
            return True
        [found] = self._store.lasting.find([state_name(manifest.chunk_id)])
        return found is not None

    def _is_current(self, state: ModelState) -> bool:
        return self._adapters.latest_version() == state.adapted.version
