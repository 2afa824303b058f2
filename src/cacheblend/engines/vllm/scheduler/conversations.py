"""Exact KV of recent conversations, for prompts whose history was edited (`engines.histories`).

    request ends            its prompt and answer: the newest history of its conversation
    there is no request     look-up in a thread: what the store holds of it
                            -> a job for the workers: its next tokens (`next_section`), computed exactly and stored
    the job has ended       looked up again: runs of what is stored are found from now on; the next section

vLLM's own blocks end with its prefix cache, and those of a prompt that was blended are not exact. So a history is
computed once more, when there is time: while an agent's tools run.
"""

import logging
import time
from collections import OrderedDict
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace

from cacheblend.core.errors import StoreError
from cacheblend.core.load.capture import ChunkJob
from cacheblend.core.load.threads import DaemonPool, PoolCall
from cacheblend.core.names import BlockName, TokenIds
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines.histories import Histories, next_section
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
    done: int = 0  # leading tokens that the store was given

    @property
    def key(self) -> tuple[BlockName, str]:
        return self.planner.root, self.conversation


class Conversations:
    """The histories of one engine, all but the look-ups in the scheduler's thread. `most_tokens`: ids that are kept;
    after a `reset` nothing is computed until vLLM computes again: it is paused, perhaps while weights are replaced."""

    def __init__(self, store: KVStore, min_run_tokens: int, most_tokens: int) -> None:
        self._store, self._min_run_tokens = store, min_run_tokens
        self.histories = Histories(min_run_tokens, most_tokens)
        self._pool = DaemonPool(1, "cacheblend-histories")
        self._waiting: OrderedDict[tuple[BlockName, str], _History] = OrderedDict()
        self._look_up: tuple[PoolCall[CaptureJob | None], _History, float] | None = None
        self._sent: tuple[CaptureJob, _History] | None = None  # with the workers
        self.is_held = False

    @property
    def has_work(self) -> bool:
        """An engine without requests has to go on stepping; False while the store hangs."""
        if self.is_held:
            return False
        if self._look_up is None:
            return bool(self._waiting) and self._sent is None
        return self._look_up[0].done() or time.monotonic() - self._look_up[2] < STUCK_S

    def add(self, planner: Planner, conversation: str, adapter: Adapter | None, token_ids: TokenIds) -> None:
        """A request has ended: its history takes the place of its conversation's last one."""
        if len(token_ids) >= self._min_run_tokens:
            self._wait(_History(planner, conversation, adapter, token_ids))

    def take(self, most: int) -> CaptureJob | None:
        """The next job, of at most so many tokens, to be given back by `finish`; None: there is none yet. Starts the
        next look-up, and waits for it a little."""
        if self._look_up is None and self._waiting and self._sent is None and not self.is_held:
            _, history = self._waiting.popitem(last=False)
            with suppress(RuntimeError):  # the system has no more threads
                self._look_up = self._pool.submit(self._plan, history, most), history, time.monotonic()
        if self._look_up is None:
            return None
        call, history, _ = self._look_up
        wait([call], LOOK_UP_WAIT_S)
        if not call.done():
            return None
        self._look_up, job = None, call.result()
        self._sent = None if job is None else (job, history)
        return job

    def finish(self, job: CaptureJob) -> None:
        """A job has ended, whether its blocks are stored or not: the next look-up tells."""
        if self._sent is None or self._sent[0] is not job:
            return  # forgotten meanwhile
        (_, history), self._sent = self._sent, None
        if history.key not in self._waiting:
            self._wait(replace(history, done=len(job.chunk)))
            # By turns none would be complete before all are.
            self._waiting.move_to_end(history.key, last=False)

    def drop(self) -> None:
        """The job that was taken last is not carried out."""
        self._sent = None

    def reset(self) -> None:
        """Forgets what waits; names of what was stored are found no more."""
        self._waiting.clear()
        self._look_up = self._sent = None
        self.is_held = True

    def close(self) -> None:
        self._pool.close()

    def _wait(self, history: _History) -> None:
        self._waiting[history.key] = history
        self._waiting.move_to_end(history.key)
        while len(self._waiting) > MOST_WAITING:
            begun = (key for key, each in self._waiting.items() if not each.done)
            del self._waiting[next(begun)]  # one at most has been begun

    def _plan(self, history: _History, most: int) -> CaptureJob | None:
        """Notes what the store holds of a history; the job for its next section, None: there is none."""
        planner, prompt = history.planner, Prompt.of([text(history.token_ids)])
        try:
            held, section = next_section(planner, prompt, self._store, history.done, most)
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
