"""Exact KV of recent conversations, for prompts whose history was edited (`engines.histories`).

    request ends            its prompt and answer: the newest history of its conversation
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
from cacheblend.engines.vllm.internals.prefix_cache import PrefixCache
from cacheblend.engines.vllm.jobs import Adapter, CaptureJob
from cacheblend.store import KVStore

LOOK_UP_WAIT_S = 0.01  # of a step of an engine without requests
MOST_WAITING = 64  # conversations; of further ones the histories that have waited longest are forgotten
STUCK_S = 10.0  # seconds of a look-up after which an idle engine stops stepping for it
logger = logging.getLogger("cacheblend.vllm")


@dataclass(frozen=True, eq=False)
class _History:
    """What a conversation's newest request left."""

    planner: Planner
    conversation: str
    adapter: Adapter | None
    token_ids: TokenIds
    names: tuple[bytes, ...] = ()  # of its exact blocks in vLLM's cache, as far as they may be worth a copy
    done: int = 0  # leading tokens that the store was given

    @property
    def key(self) -> tuple[BlockName, str]:
        return self.planner.root, self.conversation


class _LookUp(NamedTuple):
    """The store is asked for a history's next section, which is copied (`is_copy`) or computed."""

    history: _History
    call: PoolCall[CaptureJob | None]
    is_copy: bool
    began: float


class Conversations:
    """The histories of one engine, all but the look-ups in the scheduler's thread. `most_tokens`: ids that are kept;
    after a `reset` nothing is computed until vLLM computes again: it is paused, perhaps while weights are replaced."""

    def __init__(self, store: KVStore, min_run_tokens: int, most_tokens: int) -> None:
        self._store, self._min_run_tokens = store, min_run_tokens
        self.histories = Histories(min_run_tokens, most_tokens)
        self._pool = DaemonPool(1, "cacheblend-histories")
        self._waiting: OrderedDict[tuple[BlockName, str], _History] = OrderedDict()
        self._look_up: _LookUp | None = None
        self._sent: tuple[CaptureJob, _History] | None = None  # with the workers
        self.is_held, self._forgotten = False, 0

    @property
    def has_work(self) -> bool:
        """An engine without requests has to go on stepping; False while the store hangs."""
        if self.is_held:
            return False
        if self._look_up is None:
            return bool(self._waiting) and self._sent is None
        return self._look_up.call.done() or time.monotonic() - self._look_up.began < STUCK_S

    def add(
        self,
        planner: Planner,
        conversation: str,
        adapter: Adapter | None,
        token_ids: TokenIds,
        names: tuple[bytes, ...] = (),
    ) -> None:
        """A request has ended: its history takes the place of its conversation's last one."""
        if len(token_ids) >= self._min_run_tokens:
            self._wait(_History(planner, conversation, adapter, token_ids, names))

    def take(self, cache: PrefixCache, most_copied: int, most_computed: int) -> CaptureJob | None:
        """The next job, of at most so many tokens, to be given back by `finish`; None: there is none yet. Starts the
        next look-up, and waits for it a little if something may be computed: there is no request."""
        if self._look_up is None and self._sent is None and not self.is_held:
            self._begin(cache.block_size, most_copied, most_computed)
        if self._look_up is None:
            return None
        if most_computed:
            wait([self._look_up.call], LOOK_UP_WAIT_S)
        if not self._look_up.call.done():
            return None
        (history, call, is_copy, _), self._look_up = self._look_up, None
        job = call.result()
        if is_copy and job is not None and job.exact is not None:
            pages, names = cache.pages_of(history.names, job.exact.prefix_length, len(job.chunk))
            history, job = replace(history, names=names), replace(job, pages=pages)
            if pages is None:  # vLLM has lost some: with those in front of them again
                self._wait_first(history)
                return None
        if job is not None and (is_copy or most_computed):
            self._sent = job, history
            return job
        if is_copy:  # all of it is stored as far as vLLM holds it
            self._wait_first(replace(history, names=()))
        elif not most_computed:  # a request has come meanwhile
            self._wait_first(history)
        return None

    def _begin(self, size: int, most_copied: int, most_computed: int) -> None:
        """`size`: of vLLM's blocks. What vLLM may lose comes first."""
        copied = next((each for each in self._waiting.values() if each.names), None)
        history = copied or (next(iter(self._waiting.values()), None) if most_computed else None)
        if history is None:
            return
        del self._waiting[history.key]
        most, within = (most_computed, None) if copied is None else (most_copied, len(history.names) * size)
        with suppress(RuntimeError):  # the system has no more threads
            call = self._pool.submit(self._plan, history, most, within)
            self._look_up = _LookUp(history, call, copied is not None, time.monotonic())

    def finish(self, job: CaptureJob) -> None:
        """A job has ended, whether its blocks are stored or not: the next look-up tells."""
        if self._sent is None or self._sent[0] is not job:
            return  # forgotten meanwhile
        (_, history), self._sent = self._sent, None
        self._wait_first(replace(history, done=len(job.chunk)))

    def drop(self) -> None:
        """The job that was taken last is not carried out."""
        self._sent = None

    def take_forgotten(self) -> int:
        """How many conversations more waited than may, since the last call."""
        forgotten, self._forgotten = self._forgotten, 0
        return forgotten

    def reset(self) -> None:
        """Forgets what waits; names of what was stored are found no more."""
        self._waiting.clear()
        self._look_up = self._sent = None
        self.is_held = True

    def close(self) -> None:
        self._pool.close()

    def _wait(self, history: _History, *, last: bool = True) -> None:
        self._waiting[history.key] = history
        self._waiting.move_to_end(history.key, last)
        while len(self._waiting) > MOST_WAITING:
            self._forgotten += 1
            del self._waiting[min(self._waiting, key=self._worth)]

    def _worth(self, key: tuple[BlockName, str]) -> tuple[bool, bool]:
        """Of histories that wait, the first of least worth is forgotten."""
        return bool(self._waiting[key].names), self._waiting[key].done > 0

    def _wait_first(self, history: _History) -> None:
        """By turns none would be complete before all are. Unless its conversation has a newer one."""
        if history.key not in self._waiting:
            self._wait(history, last=False)

    def _plan(self, history: _History, most: int, within: int | None) -> CaptureJob | None:
        """Notes what the store holds of a history; the job for its next section, None: there is none."""
        planner, prompt = history.planner, Prompt.of([text(history.token_ids)])
        try:
            held, section = next_section(planner, prompt, self._store, history.done, most, within)
        except (StoreError, OSError) as error:
            logger.warning("a history is not stored: %s", error)
            return None
        except Exception:
            logger.exception("a history is not stored")
            return None
        if held is not None:
            self.histories.note(*history.key, held)
        if section is None:
            return None
        return CaptureJob(ChunkJob((), section.prompt.token_ids), planner, history.adapter, section)
