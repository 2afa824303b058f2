"""Exact KV of recent conversations, for prompts whose history was edited (`engines.histories`).

    request ends            its prompt and answer: the newest history of its conversation, to be copied and computed
    soon                    look-up in a thread: what the store holds of it
                            -> a job for the workers: its next tokens (`next_section`), copied from vLLM's prefix cache
    there is no request     the same of what vLLM does not hold, or holds blended: computed exactly, and stored
    the job has ended       looked up again: runs of what is stored are found from now on; the next section

vLLM's own blocks end with its prefix cache, and those of a prompt that was blended are not exact. Of these a history is
computed once more, when there is time: while an agent's tools run.
"""

import logging
import time
from collections import OrderedDict
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import NamedTuple

from cacheblend.core.errors import StoreError, StoreUnreachableError
from cacheblend.core.failures import count_failure
from cacheblend.core.load.capture import ChunkJob
from cacheblend.core.load.threads import DaemonPool, PoolCall
from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines.histories import Histories, next_section
from cacheblend.engines.keeper import PAUSE_S
from cacheblend.engines.vllm.internals.prefix_cache import PrefixCache
from cacheblend.engines.vllm.jobs import Adapter, CaptureJob
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.reasons import NOT_WRITTEN, QUEUE_FULL
from cacheblend.engines.vllm.scheduler.capture_queue import CaptureQueue
from cacheblend.store import KVStore

LOOK_UP_WAIT_S = 0.01  # of a step of an engine without requests
MOST_WAITING = 64  # conversations, of copies and of the rest; of further ones some are forgotten
STUCK_S = 10.0  # seconds of a look-up after which an idle engine stops stepping for it
logger = logging.getLogger("cacheblend.vllm")
Key = tuple[BlockName, str]


@dataclass(frozen=True, eq=False)
class _History:
    """What a conversation's newest request left."""

    planner: Planner
    conversation: str
    adapter: Adapter | None
    token_ids: TokenIds
    names: tuple[bytes, ...] = ()  # of its exact blocks in vLLM's cache, as far as it may hold them
    exact: int = 0  # tokens of these blocks, when it ended
    begun: int = 0  # leading tokens that the store held before it was given the last ones
    done: int = 0  # and with them
    has_failed: bool = False

    @property
    def key(self) -> Key:
        return self.planner.root, self.conversation

    @property
    def rest(self) -> int:
        """Tokens that have to be computed, if the others are copied."""
        return len(self.token_ids) - self.exact


class _LookUp(NamedTuple):
    """The store is asked for a history's next section, which is copied (`is_copy`) or computed."""

    history: _History
    is_copy: bool
    call: PoolCall[tuple[int, CaptureJob | None]]
    began: float


class Conversations:
    """The histories of one engine, all but the look-ups in the scheduler's thread. `most_tokens`: ids that are kept;
    after a `reset` nothing is begun until vLLM computes again: it is paused, perhaps while weights are replaced."""

    def __init__(self, store: KVStore, min_run_tokens: int, most_tokens: int, counts: Counts) -> None:
        self._store, self._min_run_tokens, self._counts = store, min_run_tokens, counts
        self.histories = Histories(min_run_tokens, most_tokens)
        self._pool = DaemonPool(1, "cacheblend-histories")
        self._copied: OrderedDict[Key, _History] = OrderedDict()  # that wait, of each conversation one
        self._computed: OrderedDict[Key, _History] = OrderedDict()  # the same, once there is no request
        self._look_up: _LookUp | None = None
        self._sent: dict[CaptureJob, _History] = {}  # with the workers: one that is copied, one that is computed
        self.is_held, self._resume_at = False, 0.0
        self._refused: Key | None = None  # whose section the store did not keep, the last one

    @property
    def has_work(self) -> bool:
        """An engine without requests has to go on stepping; False while the store hangs, or has failed."""
        if self._is_paused:
            return False
        if self._look_up is None:
            return bool(self._copied or self._computed) and not self._sent
        return self._look_up.call.done() or time.monotonic() - self._look_up.began < STUCK_S

    def add(
        self,
        planner: Planner,
        conversation: str,
        adapter: Adapter | None,
        token_ids: TokenIds,
        names: tuple[bytes, ...] = (),
        exact: int = 0,
    ) -> None:
        """A request has ended: its history takes the place of its conversation's last one. `names`: of vLLM's blocks
        of its first `exact` tokens, which are to be copied."""
        if len(token_ids) < self._min_run_tokens:
            return
        history = _History(planner, conversation, adapter, token_ids, names, exact)
        self._computed.pop(history.key, None)
        self._wait(self._computed, history)
        waiting = self._copied.get(history.key)
        if names and not (waiting and _goes_on(waiting, history)):
            self._copied.pop(history.key, None)
            self._wait(self._copied, history)

    def queue_next(self, captures: CaptureQueue, cache: PrefixCache, most_copied: int, *, may_compute: bool) -> None:
        """Queues the next job, if there is one yet, to be given back by `finish`. Starts the next look-up, and waits
        for it a little if something `may_compute`: there is no request. What is copied, `most_copied` tokens at once,
        is sent in this very step."""
        most, may_compute = captures.longest, may_compute and captures.is_empty
        most_copied = min(most_copied, most)
        if self._look_up is None and not self._is_paused:
            self._begin(cache.block_size, most_copied, most, may_compute=may_compute)
        look_up = self._look_up
        if look_up is None:
            return
        if may_compute:
            wait([look_up.call], LOOK_UP_WAIT_S)
        longest = min(most, max(most_copied, look_up.history.planner.block_size))
        if not look_up.call.done() or (look_up.is_copy and not captures.sends_at_once(longest)):
            return
        self._look_up = None
        job = self._answer(look_up)
        if job is None or job.exact is None:
            return
        history = replace(look_up.history, begun=job.exact.prefix_length, done=len(job.chunk))
        if look_up.is_copy:
            pages, names = cache.pages_of(history.names, history.begun, history.done)
            history, job = replace(history, names=names), replace(job, pages=pages)
            if pages is None:
                self._note_lost(history, len(names) * cache.block_size)
        if job.pages is None and (look_up.is_copy or not may_compute):  # vLLM has lost some, or a request has come
            self._wait_again(replace(history, begun=0, done=0), is_copy=look_up.is_copy)
        elif job in captures:  # of a history that has begun alike: another look-up, behind others, tells what is left
            self._wait(self._copied if look_up.is_copy else self._computed, replace(history, begun=0, done=0))
        elif captures.add(job, time.monotonic()):
            self._sent[job] = history

    def finish(self, job: CaptureJob) -> None:
        """A job has ended, whether its blocks are stored or not: the next look-up tells."""
        if (history := self._sent.pop(job, None)) is not None:  # else it was forgotten meanwhile
            self._wait_again(history, is_copy=job.pages is not None)

    def reset(self) -> None:
        """Forgets what waits; names of what was stored are found no more."""
        for each in (self._copied, self._computed, self._sent):
            each.clear()
        self._look_up = self._refused = None
        self.is_held = True

    def close(self) -> None:
        self._pool.close()

    @property
    def _is_paused(self) -> bool:
        return self.is_held or time.monotonic() < self._resume_at

    def _begin(self, size: int, most_copied: int, most: int, *, may_compute: bool) -> None:
        """`size`: of vLLM's blocks. What vLLM may lose comes first."""
        is_copy = bool(self._copied) and not any(job.pages is not None for job in self._sent)
        waiting = self._copied if is_copy else self._computed
        if not waiting or not (is_copy or (may_compute and not self._sent)):
            return
        history = next(iter(waiting.values()))
        within = len(history.names) * size if is_copy else None
        try:
            call = self._pool.submit(self._plan, history, most_copied if is_copy else most, within)
        except RuntimeError:  # the system has no more threads
            self._resume_at = time.monotonic() + PAUSE_S
            return
        self._look_up = _LookUp(history, is_copy, call, time.monotonic())
        del waiting[history.key]

    def _answer(self, look_up: _LookUp) -> CaptureJob | None:
        """The job of a look-up that has ended; None: the history is complete, or waits for another attempt."""
        history = look_up.history
        try:
            stored, job = look_up.call.result()
        except (StoreError, OSError) as error:
            self._fail(look_up, str(error), pauses=True, is_away=isinstance(error, StoreUnreachableError))
            return None
        except Exception:
            logger.exception("a history is not stored")
            self._give_up()
            return None
        if stored >= history.done:
            self._refused = None if history.done else self._refused
            return job
        # The store has given the place to others, or refused the section; an adapter's weights may have changed; a
        # worker failed. If it did not keep a section of two histories in a row, it refuses everything.
        is_refused = stored >= history.begun and history.adapter is None
        before, self._refused = self._refused, history.key if is_refused else None
        others = {*self._copied, *self._computed} - {history.key}
        pauses = not others or (is_refused and before not in (None, history.key))
        self._fail(look_up, f"of {history.done} tokens that were stored it holds {stored}", pauses=pauses)
        return None

    def _fail(self, look_up: _LookUp, why: str, *, pauses: bool, is_away: bool = False) -> None:
        """A history waits again, behind others: once, or as often as the store is away. `pauses`: nothing is begun for
        a minute."""
        logger.warning("a history is not stored: %s", why)
        if pauses:
            self._resume_at = time.monotonic() + PAUSE_S
        history = look_up.history
        if history.has_failed and not is_away:
            return self._give_up()
        again = history if is_away else replace(history, begun=0, done=0, has_failed=True)
        self._wait(self._copied if look_up.is_copy else self._computed, again)

    def _give_up(self) -> None:
        self._counts.add_fallback(NOT_WRITTEN)
        count_failure(NOT_WRITTEN)

    def _plan(self, history: _History, most: int, within: int | None) -> tuple[int, CaptureJob | None]:
        """Notes what the store holds of a history; so many leading tokens, and the job for its next section, None:
        there is none. Raises StoreError or OSError: the store cannot be read."""
        planner, prompt = history.planner, Prompt.of([text(history.token_ids)])
        held, section = next_section(planner, prompt, self._store, most, within)
        stored = 0 if held is None else len(held)
        if held is not None:
            self.histories.note(*history.key, held)
        if stored < history.done and not self._store.is_reachable:
            raise StoreUnreachableError("the store does not answer")
        if section is None:
            return stored, None
        return stored, CaptureJob(ChunkJob((), section.prompt.token_ids), planner, history.adapter, section)

    def _note_lost(self, history: _History, exact: int) -> None:
        """Of a history vLLM holds the first `exact` tokens alone."""
        rest = self._computed.get(history.key)
        if rest is not None and rest.token_ids is history.token_ids:
            self._computed[history.key] = replace(rest, exact=exact)

    def _wait_again(self, history: _History, *, is_copy: bool) -> None:
        """In front of others: by turns none would be complete before all are. Unless its conversation has a newer one,
        but one that goes on with what stands in front of an edit."""
        waiting = self._copied if is_copy else self._computed
        newer = waiting.get(history.key)
        if newer is not None and not (is_copy and _goes_on(history, newer)):
            return
        waiting.pop(history.key, None)
        self._wait(waiting, history)
        if history.key in waiting:
            waiting.move_to_end(history.key, last=False)

    def _wait(self, waiting: OrderedDict[Key, _History], history: _History) -> None:
        """Behind others, unless its conversation has a newer one. Of too many the oldest is forgotten, or one of which
        little is left."""
        waiting.setdefault(history.key, history)
        while len(self._copied) > MOST_WAITING:
            self._note_lost(self._copied.popitem(last=False)[1], 0)
        while len(self._computed) > MOST_WAITING:
            done = (key for key in self._computed if key not in self._copied and self._is_little(self._computed[key]))
            forgotten = self._computed.pop(next(done, next(iter(self._computed))))
            if not self._is_little(forgotten):
                self._counts.add_fallback(QUEUE_FULL)

    @staticmethod
    def _is_little(history: _History) -> bool:
        return history.rest < history.planner.block_size


def _goes_on(older: _History, newer: _History) -> bool:
    """Whether vLLM holds more of an older history: a newer one was blended from where it is edited."""
    return len(older.names) > len(newer.names) and older.names[: len(newer.names)] == newer.names
