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
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from cacheblend.core.errors import StoreError
from cacheblend.core.load.capture import ChunkJob
from cacheblend.core.load.threads import DaemonPool, PoolCall
from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines.histories import Histories, next_section
from cacheblend.engines.keeper import PAUSE_S
from cacheblend.engines.vllm.internals.prefix_cache import PrefixCache
from cacheblend.engines.vllm.jobs import Adapter, CaptureJob
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
    done: int = 0  # leading tokens that the store was given
    has_failed: bool = False

    @property
    def key(self) -> Key:
        return self.planner.root, self.conversation

    @property
    def rest(self) -> int:
        """Tokens that have to be computed."""
        return len(self.token_ids) - self.exact


class _LookUp(NamedTuple):
    """The store is asked for a history's next section, which is copied (`is_copy`) or computed."""

    history: _History
    is_copy: bool
    call: PoolCall[CaptureJob | None]
    began: float


class Conversations:
    """The histories of one engine, all but the look-ups in the scheduler's thread. `most_tokens`: ids that are kept;
    after a `reset` nothing is begun until vLLM computes again: it is paused, perhaps while weights are replaced."""

    def __init__(self, store: KVStore, min_run_tokens: int, most_tokens: int) -> None:
        self._store, self._min_run_tokens = store, min_run_tokens
        self.histories = Histories(min_run_tokens, most_tokens)
        self._pool = DaemonPool(1, "cacheblend-histories")
        self._copied: OrderedDict[Key, _History] = OrderedDict()  # that wait, of each conversation one
        self._computed: OrderedDict[Key, _History] = OrderedDict()  # the same, once there is no request
        self._look_up: _LookUp | None = None
        self._sent: tuple[CaptureJob, _History] | None = None  # with the workers
        self.is_held, self._forgotten, self._resume_at = False, 0, 0.0

    @property
    def has_work(self) -> bool:
        """An engine without requests has to go on stepping; False while the store hangs, or has failed."""
        if self.is_held or time.monotonic() < self._resume_at:
            return False
        if self._look_up is None:
            return bool(self._copied or self._computed) and self._sent is None
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
        self._wait(history, is_copy=False)
        if names:
            self._wait(history, is_copy=True)

    def take(self, cache: PrefixCache, most_copied: int, most: int, *, may_compute: bool) -> CaptureJob | None:
        """The next job, of at most `most` tokens, to be given back by `finish`; None: there is none yet. Starts the
        next look-up, and waits for it a little if something may be computed: there is no request."""
        is_busy = self._look_up is not None or self._sent is not None or self.is_held
        if not is_busy and time.monotonic() >= self._resume_at:
            self._begin(cache.block_size, most_copied, most, may_compute=may_compute)
        if self._look_up is None:
            return None
        if may_compute:
            wait([self._look_up.call], LOOK_UP_WAIT_S)
        if not self._look_up.call.done():
            return None
        (history, is_copy, call, _), self._look_up = self._look_up, None
        try:
            job = call.result()
        except (StoreError, OSError) as error:
            logger.warning("a history is not stored: %s", error)
            self._resume_at = time.monotonic() + PAUSE_S
            if not history.has_failed:
                self._wait_again(replace(history, done=0, has_failed=True), is_copy=is_copy)
            return None
        except Exception:
            logger.exception("a history is not stored")
            return None
        if job is None or job.exact is None:
            return None  # it is complete
        if is_copy:
            pages, names = cache.pages_of(history.names, job.exact.prefix_length, len(job.chunk))
            history, job = replace(history, names=names), replace(job, pages=pages)
        if job.pages is None and (is_copy or not may_compute):  # vLLM has lost some, or a request has come meanwhile
            self._wait_again(history, is_copy=is_copy)
            return None
        self._sent = job, history
        return job

    def finish(self, job: CaptureJob) -> None:
        """A job has ended, whether its blocks are stored or not: the next look-up tells."""
        if self._sent is None or self._sent[0] is not job:
            return  # forgotten meanwhile
        (_, history), self._sent = self._sent, None
        self._wait_again(replace(history, done=len(job.chunk)), is_copy=job.pages is not None)

    def drop(self) -> None:
        """The job that was taken last is not carried out."""
        self._sent = None

    def take_forgotten(self) -> int:
        """How many histories more waited than may, since the last call."""
        forgotten, self._forgotten = self._forgotten, 0
        return forgotten

    def reset(self) -> None:
        """Forgets what waits; names of what was stored are found no more."""
        self._copied.clear()
        self._computed.clear()
        self._look_up = self._sent = None
        self.is_held = True

    def close(self) -> None:
        self._pool.close()

    def _begin(self, size: int, most_copied: int, most: int, *, may_compute: bool) -> None:
        """`size`: of vLLM's blocks. What vLLM may lose comes first."""
        is_copy = bool(self._copied)
        waiting = self._copied if is_copy else self._computed
        if not waiting or not (is_copy or may_compute):
            return
        history = next(iter(waiting.values()))
        within = len(history.names) * size if is_copy else None
        with suppress(RuntimeError):  # the system has no more threads
            call = self._pool.submit(self._plan, history, most_copied if is_copy else most, within)
            self._look_up = _LookUp(history, is_copy, call, time.monotonic())
            del waiting[history.key]

    def _plan(self, history: _History, most: int, within: int | None) -> CaptureJob | None:
        """Notes what the store holds of a history; the job for its next section, None: there is none. Raises StoreError
        or OSError: the store cannot be read, or does not keep what it is given."""
        planner, prompt = history.planner, Prompt.of([text(history.token_ids)])
        held, section = next_section(planner, prompt, self._store, most, within)
        stored = 0 if held is None else len(held)
        if held is not None:
            self.histories.note(*history.key, held)
        if stored < history.done:
            raise StoreError(f"of {history.done} tokens that were stored it holds {stored}")
        if section is None:
            return None
        return CaptureJob(ChunkJob((), section.prompt.token_ids), planner, history.adapter, section)

    def _wait_again(self, history: _History, *, is_copy: bool) -> None:
        """In front of others: by turns none would be complete before all are."""
        waiting = self._copied if is_copy else self._computed
        self._wait(history, is_copy=is_copy)
        if history.key in waiting:
            waiting.move_to_end(history.key, last=False)

    def _wait(self, history: _History, *, is_copy: bool) -> None:
        """Unless its conversation has a newer one. To be copied is the one of which vLLM holds more: of a newer prompt
        that is blended it may be what stands in front of the edit."""
        waiting = self._copied if is_copy else self._computed
        other = waiting.get(history.key)
        if other is None or (is_copy and len(history.names) > len(other.names)):
            waiting[history.key] = history
        while len(self._copied) > MOST_WAITING:
            self._copied.popitem(last=False)
            self._forgotten += 1
        while len(self._computed) > MOST_WAITING:
            least = self._computed.pop(min(self._computed, key=lambda key: self._computed[key].rest))
            self._forgotten += least.rest >= least.planner.block_size
