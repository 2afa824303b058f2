"""The scheduler side: finds a request's chunks, plans it, claims its tokens, and makes jobs for the workers.

    on_new      ids and options -> a look-up in a thread: chunks, plan, what to load
    claim       the look-up is over: blended blocks get names that plain requests do not find;
                all tokens but the last, if the store holds some beyond those that vLLM has cached.
                "Ask again" while the look-up goes on, or while another request makes the same blocks
    allocated   -> a job for the workers; missed chunks -> the capture queue
    finished    -> a job that is not complete is dropped; the client is told what became of its request

vLLM itself computes the last token, and a request that has nothing to load. No step that computes waits for the store.
An error in one request disables blending for this request only.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cacheblend.core.errors import InvalidInputError, StoreError, StoreUnreachableError
from cacheblend.core.failures import count_failure
from cacheblend.core.names import as_token_ids
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.shadow import ShadowWatch
from cacheblend.engines.vllm.config import ConnectorConfig
from cacheblend.engines.vllm.internals import interface
from cacheblend.engines.vllm.internals.prefix_cache import PrefixCache, salt_from
from cacheblend.engines.vllm.jobs import BlendJob, StepJobs, StepReport
from cacheblend.engines.vllm.metrics import MISSED_TOKENS, NEAR_MISSES, NOT_BLENDED
from cacheblend.engines.vllm.reasons import BAD_SPANS, OTHER_WEIGHTS, SLOW_STORE, UNREADABLE
from cacheblend.engines.vllm.scheduler.adapters import AdapterUnusableError, RequestAdapters
from cacheblend.engines.vllm.scheduler.capture_queue import CaptureQueue
from cacheblend.engines.vllm.scheduler.chunk_finder import ChunkFinder
from cacheblend.engines.vllm.scheduler.options import read_options
from cacheblend.engines.vllm.scheduler.shadow_answers import AnswerDraws
from cacheblend.engines.vllm.scheduler.tracked_requests import (
    FULL_RECOMPUTE,
    HELD_BY_VLLM,
    LITTLE_STORED,
    NO_ROOM,
    NOTHING_STORED,
    OTHER_CONNECTOR,
    SHARED,
    SLOWER_TO_LOAD,
    ComingBlocks,
    LookUp,
    Tracked,
)

logger = logging.getLogger("cacheblend.vllm")

MOST_OUTSTANDING = 8  # requests whose blocks the workers fill: more would take memory without being faster
STALLED_S = 0.1  # that all of them wait for the store, before vLLM computes those that wait for their turn
PAUSE_S = 10.0  # in which nothing is blended after the workers waited too long for the store
SETTLING_S = 0.005  # of a step in which blocks are renamed; look-ups that ended at the same time wait a step
MOST_EVENTS = 64  # chunks announced in a step: a list that is read first may have a hundred thousand
IDLE_WAIT_S = 0.01
"""Seconds after its begin that a look-up is waited for while no request is computed. Most end by then, and a request
that comes to an idle engine is computed in its first step: a step more is a message more, for which vLLM spins.
"""


class Scheduling:
    """The scheduler side of one engine; `bytes_per_token`: of a chunk's KV while it is captured; `longest`: tokens that
    the model computes at once, of a chunk behind its anchor, too; `is_paused`: vLLM is, or waits for this engine's work
    to end: nothing is begun then that no request has asked for; `copied_bytes`: of an ended request's KV that may
    be copied from vLLM's cache in a step, where what it holds under plain names is exact; 0: nothing; `spare_blocks`:
    that vLLM keeps free for drafts beside a prompt that is loaded."""

    def __init__(
        self,
        config: ConnectorConfig,
        settings: BlendSettings,
        finder: ChunkFinder,
        block_size: int,
        *,
        bytes_per_token: int = 1,
        longest: int = 1 << 62,
        windows: Sequence[int | None] = (None,),
        watch: ShadowWatch | None = None,
        window: int | None = None,
        is_paused: Callable[[], bool] = lambda: False,
        copied_bytes: int = 0,
        spare_blocks: int = 0,
    ) -> None:
        self._config, self._settings, self._is_paused = config, settings, is_paused
        self._spare_blocks = spare_blocks
        self._most_copied, self._may_copy = copied_bytes // bytes_per_token, copied_bytes > 0
        self._finder, self._block_size = finder, block_size
        self._requests: dict[str, Tracked] = {}
        self._outstanding: set[str] = set()
        self._coming, self._adapters = ComingBlocks(), RequestAdapters(config.lookup_timeout_s)
        self._jobs = StepJobs()
        self._paused, self._settling_s = (0.0, ""), 0.0  # until when nothing is blended, by `time.monotonic`, and why
        self._may_wait, self._is_stalled = True, False
        self.counts = finder.counts
        self._checks = AnswerDraws(watch, self.counts, window)
        most_tokens = config.capture_bytes // bytes_per_token
        self._captures = CaptureQueue(settings.config.capture_queue, most_tokens, longest, self.counts)
        self.cache = PrefixCache(block_size, windows)

    @property
    def is_busy(self) -> bool:
        """Something is computed, or queued for that, also while there is no request: chunks, the shadow check."""
        is_paused = self._is_paused()
        if self._checks.is_busy or (self._captures.is_computing if is_paused else self._captures.is_busy):
            return True
        # A request that is held back keeps no engine stepping for a history either.
        may_learn = self._finder.is_discovering or (self._finder.may_store_history and not self._has_requests)
        return may_learn and self._captures.is_empty and not is_paused

    @property
    def _has_requests(self) -> bool:
        return not all(interface.is_open(tracked.request) for tracked in self._requests.values())

    # ---- a request comes --------------------------------------------------------------------------------

    def on_new(self, request: Any) -> None:
        """A request came: starts its look-up. Raises nothing."""
        tracked = self._requests[request.request_id] = Tracked(request, self._checks.step)
        if reason := interface.unsuited(request):
            tracked.leave(reason)
        else:
            self._guarded(request, tracked, self._start)
        self._may_wait &= tracked.lookup is not None

    def _start(self, request: Any, tracked: Tracked) -> None:
        end = interface.text_tokens(request)
        tracked.options = read_options(request.kv_transfer_params, len(request.prompt_token_ids)).until(end)
        tracked.token_ids = as_token_ids(request.prompt_token_ids[:end])  # of options that can be carried out
        if tracked.options.mode == "full":
            return tracked.leave("mode full")
        if reason := self._why_paused:
            self.counts.add_fallback(reason)
            return tracked.leave(reason)
        tracked.adapter = None if request.lora_request is None else self._adapters.of(request)
        if tracked.waits_for_adapter:
            return  # begins again when it is claimed
        started = self._finder.start(tracked.token_ids, tracked.options, request.cache_salt, tracked.adapter)
        if isinstance(started, LookUp):
            tracked.lookup = started
        else:
            if started == SLOW_STORE:
                self.counts.add_fallback(SLOW_STORE)
            tracked.leave(started)

    # ---- vLLM schedules it ------------------------------------------------------------------------------

    def claim(self, request: Any, num_computed_tokens: int) -> int | None:
        """How many tokens after those that vLLM has cached the workers will provide; None: ask again later."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        if tracked.waits_for_adapter:
            self._guarded(request, tracked, self._start)
            if tracked.waits_for_adapter:
                return None
        is_exact = False  # what vLLM holds
        if tracked.lookup is not None:
            if self._may_wait:  # no request is computed
                tracked.lookup.wait(IDLE_WAIT_S)
            if not tracked.lookup.is_over or self._settling_s > SETTLING_S:
                return None
            self._guarded(request, tracked, self._settle)
            cached = self.cache.tokens(request)
            if tracked.found is not None and cached > num_computed_tokens:
                return None  # under its blocks' new names vLLM holds more
            is_exact = cached < num_computed_tokens  # it was found under plain names
        if tracked.found is None or tracked.tried == request.num_preemptions:
            return 0
        if tracked.waits_for is not None and tracked.waits_for in self._coming:
            return None
        claimed = self._claimed(tracked, num_computed_tokens, is_exact)
        if not claimed:
            return 0
        first, fewest = num_computed_tokens // self._block_size, max(1, claimed // self._block_size // 2)
        tracked.waits_for = self._coming.leader(request.block_hashes, first, fewest)  # it makes most of the blocks
        is_full = len(self._outstanding) >= MOST_OUTSTANDING
        if tracked.waits_for is not None or (is_full and not self._is_stalled):
            return None
        if not is_full:
            return claimed
        self._is_stalled = False  # one request a report, so that a short stall costs few their reuse
        if not tracked.reason:  # else it was left to vLLM before, which has no blocks for it
            self.counts.add_fallback(SLOW_STORE)
        return self._claimed(tracked, num_computed_tokens, is_exact, SLOW_STORE)

    def _settle(self, request: Any, tracked: Tracked) -> None:
        """The look-up is over: decides whether the request is blended, and renames its blocks if so."""
        assert tracked.lookup is not None
        began = time.perf_counter()
        lookup, tracked.lookup = tracked.lookup, None
        found = lookup.result()
        if found is None:
            tracked.leave(NOTHING_STORED)
            return
        tracked.missed = found.missed, found.missed_at
        tracked.missed_tokens, tracked.near_miss_tokens = found.missed_tokens, found.near_miss_tokens
        size, cached = self._block_size, self.cache.tokens(request)
        if found.is_full:
            self._checks.left_out()
        takes_blended = tracked.options.mode != "prefix" and not found.is_full  # not what vLLM holds of an equal prompt
        before = found.blended_before(request, self.cache) if takes_blended else None
        if cached and found.held - cached < size and before is None:  # vLLM computes less than a block as fast
            tracked.leave(HELD_BY_VLLM if found.held else NOTHING_STORED)
        elif before is not None or found.reused_share(0) >= max(self._config.min_reused_share, 1e-9):
            tracked.found = found
            if before is not None or found.is_blended:
                start = found.first_loaded if before is None else before
                tracked.plain_tokens = salt_from(request, start, size, found.salt)
        elif found.held:
            tracked.leave(LITTLE_STORED)
        else:
            tracked.leave(FULL_RECOMPUTE if found.is_full else SLOWER_TO_LOAD if found.is_slow else NOTHING_STORED)
        self._settling_s += time.perf_counter() - began

    def _claimed(self, tracked: Tracked, start: int, is_exact: bool, why_not: str = "") -> int:
        """The tokens after the first `start` that the workers provide; 0: vLLM computes the rest."""
        found = tracked.found
        assert found is not None
        claimed = len(found.plan) - start
        tracked.held_by_vllm = min(start, len(found.plan))  # after a preemption, of the answer too
        plain = math.inf if tracked.plain_tokens is None else tracked.plain_tokens
        is_shared = not is_exact and start > plain
        is_tail = is_shared and claimed < self._block_size
        # From `plain` on blocks have names of their own, and none in front of it may hold a row that is blended.
        if start >= found.held or is_tail or max(start, found.first_loaded) < plain < math.inf:
            reason = HELD_BY_VLLM if found.held else NOTHING_STORED
        elif found.reused_share(start) < self._config.min_reused_share:
            reason = LITTLE_STORED  # the rest is plain text or missed
        elif self._spare_blocks and not self.cache.has_room(len(found.plan) + 1, self._spare_blocks):
            reason = NO_ROOM  # vLLM would ask for ever; of a plain prefill it leaves the drafts out
        elif not (reason := why_not or self._why_paused):  # its look-up may have ended before the store became slow
            return claimed
        elif not why_not and not tracked.reason:  # asked again, it was counted
            self.counts.add_fallback(reason)
        tracked.reason = SHARED if is_shared else reason
        return 0

    @property
    def _why_paused(self) -> str:
        until, reason = self._paused
        return reason if time.monotonic() < until else ""

    def allocated(self, request: Any, block_ids: list[list[int]], claimed: int) -> None:
        """A request got blocks, of each group: at first, after a preemption, or when its prompt has been provided."""
        self._may_wait = False
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if claimed and tracked.found is not None:
            found, plan = tracked.found, tracked.found.plan
            tracked.tried, tracked.outcome, tracked.reason = request.num_preemptions, None, ""
            tracked.block_ids = block_ids
            self._outstanding.add(request.request_id)
            self._coming.add(request.request_id, list(request.block_hashes[: len(plan) // self._block_size]))
            local = len(plan) - claimed
            held = self.cache.keep(request, local, block_ids)
            what = request.request_id, plan, found.selector, local, block_ids, held, tracked.adapter, found.load_s
            self._jobs.blend.append(BlendJob(*what))
        else:
            self._coming.remove(request.request_id)  # vLLM has cached its blocks before
            if tracked.found is not None and tracked.tried < 0 and not tracked.reason:
                tracked.reason = OTHER_CONNECTOR
        if tracked.missed:
            self._captures.add_missed(request, *tracked.missed)
            tracked.missed = None

    def take_jobs(self, *, is_idle: bool = False) -> StepJobs:
        """New jobs since the last call; chunks are captured once their request has its first token."""
        jobs, self._jobs, self._settling_s = self._jobs, StepJobs(), 0.0
        if not is_idle:
            self._finder.resume()
        is_paused = self._is_paused()
        if not is_paused:
            may_compute = is_idle and not self._has_requests
            self._finder.add_history(self._captures, self.cache, self._most_copied, may_compute=may_compute)
            self._finder.add_discovered(self._captures)
        jobs.capture = self._captures.take(is_paused=is_paused)
        jobs.is_idle, jobs.adapters = is_idle, self._adapters.take()
        # Requests that a pause keeps are not served: checks have their time, and end.
        self._checks.fill(jobs, has_requests=bool(self._requests) and not (is_idle and is_paused))
        self._may_wait = is_idle and all(each.lookup is not None for each in self._requests.values())
        return jobs

    # ---- the workers report -----------------------------------------------------------------------------

    def provided(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._outstanding.discard(request_id)
            self.cache.let_go(request_id)

    def reported(self, report: StepReport) -> None:
        """Takes the outcomes of jobs, and adds chunks that were captured and stored to the list."""
        self._is_stalled = report.stalled_s >= STALLED_S
        for request_id, outcome in report.outcomes.items():
            if outcome.failure:
                self._coming.remove(request_id)
            if outcome.failure == SLOW_STORE:
                self._paused = max(self._paused, (time.monotonic() + PAUSE_S, SLOW_STORE))
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.outcome = outcome
                if tracked.found is not None:
                    self._finder.learn(tracked.found.plan, outcome)
                    self._checks.begin(tracked)
        self._checks.reported(report)
        self._adapters.seen(report.adapters)
        self._finder.list_captured(self._captures.finish(report.captured, report.capture_work))
        if report.has_other_weights and self._paused[1] != OTHER_WEIGHTS:
            self.counts.add_fallback(OTHER_WEIGHTS)
            self._paused = math.inf, OTHER_WEIGHTS
            self.reset()  # what is stored is of weights that do not run

    # ---- a request ends ---------------------------------------------------------------------------------

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request ended, or was aborted; returns what its client is told. See `holds`."""
        tracked = self._requests.pop(request.request_id, None)
        if request.request_id in self._outstanding:
            self._jobs.dropped.append(request.request_id)
        self._coming.remove(request.request_id)
        self._captures.end_request(request.request_id)
        self._adapters.forget(request)
        if tracked is None:
            return None
        tracked.drop_lookup()
        if self._paused[1] != OTHER_WEIGHTS:
            try:
                may_copy = self._may_copy and not tracked.is_older
                self._finder.watch(tracked, self.cache if may_copy else None)
            except Exception as error:  # vLLM's scheduler would end
                logger.exception("nothing is learnt of request %s", request.request_id)
                count_failure(type(error).__name__)
        for name, tokens in ((MISSED_TOKENS, tracked.missed_tokens), (NEAR_MISSES, tracked.near_miss_tokens)):
            if tokens:
                self.counts.add(name, tokens)
        if tracked.why_not:
            self.counts.add(NOT_BLENDED, 1, tracked.why_not)
        elif tracked.outcome is not None:
            self.counts.add_blended(tracked.outcome)
        return tracked.answer()

    def holds(self, request: Any) -> bool:
        """Whether vLLM has to keep the blocks of a request that has ended until a worker says that they were read."""
        return self._checks.finished(request)

    def reset(self) -> None:
        """The weights have changed: nothing that was stored, or is being computed, is used from now on."""
        # vLLM has emptied its cache before, or could not, for a request holds blocks: of the weights before, perhaps.
        self._may_copy = self._most_copied > 0 and self.cache.is_empty
        if self._most_copied and not self._may_copy:
            logger.warning("vLLM's cache was not emptied: no history is copied from it until it is; reset it once more")
        self._finder.reset()
        self._captures.clear()
        self._checks.reset()
        self._jobs.is_reset = True
        for tracked in self._requests.values():
            tracked.forget()

    def take_events(self) -> list[Any]:
        """vLLM's events about chunks that the store has got or lost since the last call, some at a time."""
        changes = self._finder.take_changes(MOST_EVENTS)
        found = changes.added, changes.removed, self._settings.config.block_size
        return interface.events_of(*found) if changes.added or changes.removed else []

    def close(self) -> None:
        self.provided(list(self._outstanding))
        self._finder.close()

    def _guarded(self, request: Any, tracked: Tracked, what: Callable[[Any, Tracked], None]) -> None:
        where = f"request {request.request_id} is not blended"
        try:
            what(request, tracked)
            return
        except InvalidInputError as error:
            logger.warning("%s: %s", where, error)
            label, told = BAD_SPANS, ("bad parameters", str(error))
        except AdapterUnusableError as error:
            logger.warning("%s: its LoRA adapter: %s", where, error)
            label, told = error.reason, (error.reason, str(error))
        except TimeoutError:
            logger.warning("%s: the store did not answer in time", where)
            label, told = SLOW_STORE, (SLOW_STORE, "")
        except (StoreError, OSError) as error:
            if not isinstance(error, StoreUnreachableError):  # which the store has logged
                logger.warning("%s: %s", where, error)
            label, told = UNREADABLE, (UNREADABLE, "")
        except Exception as error:
            logger.error(where, exc_info=error)
            label, told = type(error).__name__, (type(error).__name__, "")
        self.counts.add_fallback(label)
        tracked.leave(*told)
