"""Finds a request's chunks and plans it: what needs no store at once, the rest in a thread. options, token ids ->
spans, or runs that the list knows -> look-up: plan, missed chunks, what is loaded"""

import logging
import math
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import StoreError, StoreUnreachableError
from cacheblend.core.failures import count_failure
from cacheblend.core.load.budget import LEAST_S, PAUSE_S
from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.names import BlockName, TokenIds, as_token_ids, join_ids
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.plan.recurrence import Run
from cacheblend.engines.chunk_index import ChunkListing, ListChanges
from cacheblend.engines.discovery import Discovery, DiscoveryFigures
from cacheblend.engines.fingerprint import ModelIdentity
from cacheblend.engines.histories import Histories, plan_of_held
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.vllm.config import ConnectorConfig
from cacheblend.engines.vllm.internals import interface
from cacheblend.engines.vllm.internals.prefix_cache import PrefixCache
from cacheblend.engines.vllm.jobs import Adapter, BlendOutcome, CaptureJob
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.reasons import SLOW_STORE, UNREADABLE
from cacheblend.engines.vllm.scheduler.adapters import named
from cacheblend.engines.vllm.scheduler.capture_queue import CaptureQueue
from cacheblend.engines.vllm.scheduler.conversations import Conversations
from cacheblend.engines.vllm.scheduler.load_control import LoadControl
from cacheblend.engines.vllm.scheduler.options import RequestOptions, named_chunks
from cacheblend.engines.vllm.scheduler.tracked_requests import (
    NOTHING_STORED,
    Answers,
    FoundChunks,
    LookUp,
    Tracked,
    salt_of,
)
from cacheblend.store import KVStore

LONG_PROMPT = 1024  # tokens from which on contents are matched in a thread: that takes milliseconds
THREADS = 8  # of look-ups

FRESH_S = 0.1  # seconds that a look-up waits at most for a list that is due
_MOST_PLANNERS = 4096  # kept; one more is made in microseconds
logger = logging.getLogger("cacheblend.vllm")


class TenantPlanners:
    """The planner of each tenant and LoRA adapter: a request's `cache_salt` and adapter are part of its chunks' names.
    The embedded engine gives a tenant of the same name the same planner."""

    def __init__(self, identity: ModelIdentity, config: BlendConfig) -> None:
        self._config = config
        self._made = lru_cache(_MOST_PLANNERS)(
            lambda cache_salt, adapter: replace(identity, adapters=adapter).planner(self._config, cache_salt)
        )
        self.of()  # a wrong anchor shows at the start

    def of(self, cache_salt: str | None = None, adapter: str = "") -> Planner:
        """The planner of the requests with this salt and this adapter (see `adapters.named`)."""
        return self._made(cache_salt or "", adapter)

    def renew(self) -> None:
        """Changes all roots for the rest of this process: what was stored so far is not found any more."""
        self._config = replace(self._config, salt=f"{self._config.salt}\x1freset {secrets.token_hex(8)}")
        self._made.cache_clear()


class ChunkFinder:
    """Finds the chunks of one engine's requests. `control` decides what is loaded, None: all that is stored;
    `keeps_events`: `take_changes` will be called; `counts`: of the whole scheduler side."""

    def __init__(
        self,
        config: ConnectorConfig,
        settings: BlendSettings,
        planners: TenantPlanners,
        store: KVStore,
        control: LoadControl | None = None,
        *,
        keeps_events: bool = False,
    ) -> None:
        self._settings, self._planners, self._store, self._control = settings, planners, store, control
        self.counts = Counts()
        self._chunk_end_token_id = config.chunk_end_token_id
        given = settings.config.load_timeout_s
        self._timeout_s = min(config.lookup_timeout_s, math.inf if given is None else given)
        self._pool, self._lookups = DaemonPool(THREADS, "cacheblend-lookup"), list[LookUp]()
        self._captured_pool = DaemonPool(1, "cacheblend-captured")
        self._answers = Answers()
        self._answered = -math.inf  # when the latest look-up of those that were answered had asked the store
        self._listing: ChunkListing | None = None
        self._keeps_events = keeps_events
        least, fresh_s = config.min_match_tokens, min(FRESH_S, config.lookup_timeout_s / 4)
        if config.match_content:
            anchor, how = join_ids(planners.of().anchor.segments(None)), (least, config.refresh_s)
            self._listing = ChunkListing(store, anchor, *how, fresh_s=fresh_s, keeps_changes=keeps_events)
        self._discovery: Discovery[tuple[Planner, Adapter | None]] | None = None
        self._counted = DiscoveryFigures()
        self._discovered: dict[BlockName, Run] = {}  # sent to be captured, by chunk
        if self._listing is not None and config.discover and settings.config.capture:
            self._discovery = Discovery(store, self._listing, least, settings.config.watch_tokens)
        self._conversations: Conversations | None = None
        if settings.config.edits:
            self._conversations = Conversations(store, least, settings.config.watch_tokens, self.counts)

    def start(
        self, token_ids: TokenIds, options: RequestOptions, cache_salt: str | None, adapter: Adapter | None = None
    ) -> LookUp | str:
        """Starts a request's look-up; or says why there is none. Raises InvalidInputError: the options cannot be
        carried out."""
        settings = self._settings  # the floor may change them while the look-up goes on
        if options.sets_selection:
            options.selector_of(settings)  # raises for wrong ones
        planner = self._planners.of(cache_salt, named(adapter))
        prompt, after = named_chunks(token_ids, options.spans, self._chunk_end_token_id), None
        has_history = self._histories_of(planner, options) is not None
        if prompt is None and self._listing is not None:
            is_new, has_index = self._listing.refresh(), self._listing.has_index(planner.root)
            if is_new and has_index and len(token_ids) < LONG_PROMPT and not has_history:
                prompt = self._listing.match(planner.root, Prompt.of([text(token_ids)]))
            elif not self._listing.has_read and self._listing.age_s > self._timeout_s:  # others have waited in vain
                return SLOW_STORE
            elif not has_index:
                after = self._listing.prepare(planner.root)
        may_find_chunks = self._listing is not None if prompt is None else bool(prompt.chunks)
        if not has_history and not may_find_chunks:
            return NOTHING_STORED
        asked = LookUp(self._timeout_s, self._answers)
        if after is not None or settings.config.load_timeout_s is not None:  # an index, whose time counts; or a limit
            asked.began = asked.asked
        look_up = partial(self._look_up, asked, token_ids, prompt, options, planner, settings, adapter)
        self._lookups = [each for each in self._lookups if not each.future.done()]
        late = [each for each in self._lookups if each.future.running() and each.is_over]
        if len(late) >= THREADS or any(
            self._answered < each.began and asked.asked < each.deadline + PAUSE_S for each in late
        ):
            return SLOW_STORE  # it did not answer in time, and nobody since
        asked.future = self._pool.submit(look_up) if after is None else self._pool.submit_after(after, look_up)
        self._lookups.append(asked)
        return asked

    def raise_by(self, factor: float) -> None:
        """From now on the shares that requests name none of are so many times as large; infinite: full recompute."""
        self._settings = replace(self._settings, raised_by=factor)

    def watch(self, tracked: Tracked, cache: PrefixCache | None = None) -> None:
        """Has a request that has ended taken note of, to learn text that recurs, and for its conversation, whose KV may
        be copied from `cache`; returns at once."""
        is_unknown, ids = tracked.adapter is None and tracked.request.lora_request is not None, tracked.token_ids
        if ids is None or is_unknown:
            return
        planner = self._planners.of(tracked.cache_salt, named(tracked.adapter))
        if self._conversations is not None and tracked.request.num_output_tokens > 0:  # else nobody computed it
            request, names, exact = tracked.request, tuple[bytes, ...](), 0
            history = join_ids([ids, as_token_ids(interface.answer_of(request))])
            if len(history) != request.num_tokens and not interface.has_images(request):  # a session, of several pieces
                history = as_token_ids(request.all_token_ids)
            if cache is not None and tracked.adapter is None:  # an adapter's weights may have changed since
                names = cache.plain_names(request, tracked.plain_tokens, len(history))
                exact = len(names) * cache.block_size
            self._conversations.add(planner, tracked.options.conversation, tracked.adapter, history, names, exact)
        if self._discovery is None:
            return
        plan, prompt = None, named_chunks(ids, tracked.options.spans, self._chunk_end_token_id)
        if tracked.found is not None:
            plan, prompt = tracked.found.plan, tracked.found.plan.prompt
        self._discovery.watch(planner.root, prompt or Prompt.of([text(ids)]), plan, (planner, tracked.adapter))

    def add_discovered(self, captures: CaptureQueue) -> None:
        """Queues the learnt run of most worth behind what requests have missed, and counts; returns at once."""
        if self._discovery is None:
            return
        self._counted = self.counts.add_discovered(self._discovery.figures, self._counted)
        wanted = self._discovery.take() if captures.has_room else None
        if wanted is not None:
            run, (planner, adapter) = wanted
            job = CaptureJob(ChunkJob(tuple(planner.anchor.segments(None)), run.token_ids), planner, adapter)
            if captures.add(job, time.monotonic()):
                self._discovered[manifest_of(job.chunk, planner, "").chunk_id] = run

    def add_history(self, captures: CaptureQueue, cache: PrefixCache, most_copied: int, *, may_compute: bool) -> None:
        """As `Conversations.queue_next`, but raises nothing."""
        if self._conversations is None:
            return
        try:
            self._conversations.queue_next(captures, cache, most_copied, may_compute=may_compute)
        except Exception as error:  # vLLM's scheduler would end
            logger.exception("what waited of histories is not stored")
            count_failure(type(error).__name__)
            self._conversations.reset()

    @property
    def is_discovering(self) -> bool:
        return self._discovery is not None and self._discovery.has_work

    @property
    def may_store_history(self) -> bool:
        return self._conversations is not None and self._conversations.has_work

    def resume(self) -> None:
        """vLLM computes: its weights are those that blocks are named by."""
        if self._conversations is not None:
            self._conversations.is_held = False

    def list_captured(self, captured: Sequence[CaptureJob]) -> None:
        """Has those of the captured chunks found by content that the store took; returns at once."""
        chunks = [job for job in captured if job.exact is None]
        if self._listing is not None and chunks:
            with suppress(RuntimeError):  # no more threads: they are found when the list is read again
                self._captured_pool.submit(self._list, self._listing, chunks)
        for job in captured:
            if self._conversations is not None and job.exact is not None:
                self._conversations.finish(job)

    def learn(self, plan: BlendPlan, outcome: BlendOutcome) -> None:
        if self._control is not None:
            self._control.learn(plan, outcome)

    def reset(self) -> None:
        self._planners.renew()
        if self._listing is not None:
            self._listing.withdraw()
        if self._discovery is not None:
            self._discovery.reset()
            self._discovered.clear()
        if self._conversations is not None:
            self._conversations.reset()

    def take_changes(self, most: int) -> ListChanges:
        return ListChanges() if self._listing is None else self._listing.take_changes(most)

    def close(self) -> None:
        self._pool.close()
        self._captured_pool.close()
        if self._discovery is not None:
            self._discovery.close()
        if self._conversations is not None:
            self._conversations.close()
        if self._listing is not None:
            self._listing.close()

    def _histories_of(self, planner: Planner, options: RequestOptions) -> Histories | None:
        """Those of a conversation that is named, since the store may hold what is not remembered, or of which something
        is known; None: it is not such a one."""
        found = None if self._conversations is None else self._conversations.histories
        is_known = found is not None and (options.conversation or found.knows(planner.root, ""))
        return found if is_known else None

    def _look_up(
        self,
        asked: LookUp,
        token_ids: TokenIds,
        prompt: Prompt | None,
        options: RequestOptions,
        planner: Planner,
        settings: BlendSettings,
        adapter: Adapter | None,
    ) -> FoundChunks | None:
        asked.began = min(asked.began, time.monotonic())
        histories, is_marked = self._histories_of(planner, options), prompt is not None
        if self._listing is not None and not is_marked:
            self._listing.update()

        def match(prompt: Prompt, lost: Collection[BlockName] = ()) -> Prompt:
            if histories is not None:
                prompt = histories.match(planner.root, replace(prompt, conversation=options.conversation), lost)
            return prompt if self._listing is None or is_marked else self._listing.match(planner.root, prompt)

        prompt = match(prompt or Prompt.of([text(token_ids)]))
        if histories is None and not prompt.chunks:
            return None
        missed_at = time.monotonic()
        plan = plan_of_held(prompt, lambda each: planner.plan(each, self._store), match)
        answered_at = time.monotonic()
        looked_up_s, self._answered = answered_at - missed_at, max(self._answered, missed_at)
        if answered_at < asked.began + self._timeout_s:
            self._answers.at = answered_at
        is_held = any(span.source in (Source.PREFIX, Source.LOADED) for span in plan.spans)
        if not is_held and self._store.is_away:
            raise StoreUnreachableError("the store does not answer")
        missed, anchor = plan.missed_chunks(), tuple(planner.anchor.segments(plan.prompt))
        jobs = [CaptureJob(ChunkJob(anchor, chunk.token_ids, chunk.label), planner, adapter) for chunk in missed]
        if self._listing is not None and self._keeps_events and self._store.is_reachable:
            self._listing.observe(plan.held_chunks())
        near = 0 if self._listing is None or not is_marked else self._listing.near_misses(planner.root, plan)
        is_full = settings.is_full and options.follows_floor
        if options.mode == "prefix" or is_full:
            plan = plan.exact_only()
        is_full, plan = is_full and bool(plan.left_out), plan.without_last_row()
        is_moved = plan.is_moved and not options.sets_selection
        selector = named_by = settings.of_moved() if is_moved else options.selector_of(settings)
        is_slow, seconds = False, settings.config.load_timeout_s  # of the look-up and of loading
        if self._control is not None:
            choice = self._control.decide(plan, selector.share, raises=not options.sets_selection)
            plan, is_slow = choice.plan, choice.is_all_left_out
            if choice.ratio is not None:  # which makes KV more exact: its blocks serve the others as well
                selector = (settings.of_moved if is_moved else settings.at_least)(choice.ratio)
            if seconds is None and (compute_s := self._control.compute_s(plan)) is not None:
                seconds = max(LEAST_S, compute_s)
        own = any(segment.is_moved for segment in plan.prompt.segments)  # of its conversation alone
        salt = salt_of(planner, named_by, adapter, options.conversation if own else None)
        found = FoundChunks(
            plan,
            selector,
            salt,
            named_by,
            jobs if settings.config.capture else [],
            missed_at,
            is_slow,
            is_full,
            missed_tokens=sum(map(len, missed)),
            near_miss_tokens=near,
        )
        if seconds is None:
            return found
        if not found.held or looked_up_s < seconds:
            return replace(found, load_s=seconds - looked_up_s)
        return replace(found, plan=plan.leaving_out("all"), is_slow=True)

    def _list(self, listing: ChunkListing, captured: Sequence[CaptureJob]) -> None:
        chunks, held = [manifest_of(job.chunk, job.planner, "") for job in captured], set[BlockName]()
        try:
            held = {chunk.chunk_id for chunk in chunks if self._store.has_manifest(chunk.chunk_id)}
            listing.add([chunk for chunk in chunks if chunk.chunk_id in held])
        except (StoreError, OSError) as error:
            logger.warning("captured chunks are found when the store's list is read again: %s", error)
            count_failure(UNREADABLE)
            held = set()
        for chunk in chunks:
            run = self._discovered.pop(chunk.chunk_id, None)
            if run is not None and self._discovery is not None and chunk.chunk_id in held:
                self._discovery.stored(run, chunk)
