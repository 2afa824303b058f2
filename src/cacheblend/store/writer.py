"""Write-behind: blocks are written to a store by one thread from a bounded queue, so that no request waits for it."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cacheblend.core.closable import Closable
from cacheblend.core.errors import StoreUnreachableError
from cacheblend.core.failures import NOT_WRITTEN, count_failure
from cacheblend.core.load.threads import time_left
from cacheblend.core.names import BlockName
from cacheblend.core.openmp import end_team
from cacheblend.core.plan.blocks import Block
from cacheblend.store.base import LOGGER_NAME, KVStore

logger = logging.getLogger(LOGGER_NAME)

BlockMaker = Callable[[], Block | None]
"""Makes a block on the writer's thread, when it is written; None: nothing is written."""


class _Item(NamedTuple):
    """What waits: a block, or what makes it."""

    made: Block | BlockMaker
    nbytes: int
    is_copy: bool


STUCK_S = 120.0  # of a write, after which closing waits for no further one: places have shorter limits of their own
_AT_ONCE, _BYTES_AT_ONCE = 16, 32 << 20  # blocks that follow each other are written together


class WriteBehind(Closable):
    """Writes blocks to a store on a thread of its own; safe to call from several threads.

    The thread is a daemon and starts with the first block. Blocks that still wait when the process ends are lost
    unless `flush` or `close` is called. The store stays open.

    `max_bytes`: bound on the bytes that wait. A block that would exceed it is dropped, so a slow store causes misses
    but delays no request. What is dropped, or cannot be written, counts as failed, unless it `is_copy`: of what another
    store holds.
    """

    def __init__(self, store: KVStore, max_bytes: int = 1 << 30) -> None:
        self._store, self._max_bytes = store, max_bytes
        # Entered in place of the condition, which is entered in Python: a Ctrl-C at a bad moment would leave it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: OrderedDict[BlockName, _Item] = OrderedDict()
        self._writing: list[BlockName] = []  # the first of them
        self._began_at = 0.0  # when they were taken
        self._bytes, self._closed, self._is_full = 0, False, False  # bytes that wait; whether one was dropped since
        self._thread: threading.Thread | None = None
        self._reported: set[type[BaseException]] = set()

    def submit(self, block: Block) -> bool:
        """Queues a block, whose tensors must not change afterwards, as `submit_made`."""
        return self.submit_made(block.name, block, sum(record.nbytes for record in block.records))

    def submit_made(self, name: BlockName, item: Block | BlockMaker, nbytes: int = 0, *, is_copy: bool = False) -> bool:
        """Queues a block, or a callable that makes it; False if it is dropped or waits already. Returns at once.
        `nbytes`: of the records that it keeps alive or will make."""
        with self._lock:
            if self._closed or name in self._waiting:
                return False
            if self._bytes + nbytes > self._max_bytes:
                if not self._is_full:
                    self._is_full = True
                    message = "%d bytes wait for a slow store, at most %d may: blocks are dropped until fewer do"
                    logger.warning(message, self._bytes, self._max_bytes)
                count_failure(NOT_WRITTEN, not is_copy)
                return False
            self._is_full = self._is_full and 2 * self._bytes > self._max_bytes
            if self._thread is None or not self._thread.is_alive():  # not alive: after a fork
                self._writing = []
                thread = threading.Thread(target=self._run, name="cacheblend-writer", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more
                    count_failure(NOT_WRITTEN, not is_copy)
                    return False
                self._thread = thread
            self._waiting[name] = _Item(item, nbytes, is_copy)
            self._bytes += nbytes
            self._changed.notify_all()
        return True

    @property
    def room(self) -> int:
        """Bytes that may wait beside those that do."""
        return max(0, self._max_bytes - self._bytes)

    @property
    def writing_s(self) -> float:
        """Seconds that the store has taken for the blocks that are being written; 0: none are."""
        return time.monotonic() - self._began_at if self._writing else 0.0

    def submit_all(self, blocks: Sequence[Block]) -> list[bool]:
        """Queues blocks as `submit` does each, all before one is written: those that follow each other go together."""
        with self._lock:
            return [self.submit(block) for block in blocks]

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                items, self._began_at = self._next(), time.monotonic()
            self._write(items)
            del items
            end_team()
            with self._lock:
                for name in self._writing:
                    self._bytes -= self._waiting.pop(name).nbytes
                self._writing = []
                self._changed.notify_all()

    def _next(self) -> list[_Item]:
        """What is written next: the first that waits, and the blocks behind it that continue its chain."""
        items: list[_Item] = []
        total = 0
        for name, item in self._waiting.items():
            made, last, total = item.made, items[-1].made if items else None, total + item.nbytes
            follows = isinstance(made, Block) and isinstance(last, Block) and made.parent == last.name
            if items and not (follows and len(items) < _AT_ONCE and total <= _BYTES_AT_ONCE):
                break
            items.append(item)
            self._writing.append(name)
        return items

    def _write(self, items: Sequence[_Item]) -> None:
        try:
            made = [item.made if isinstance(item.made, Block) else item.made() for item in items]
            if blocks := [block for block in made if block is not None]:
                self._store.write_all(blocks)
        except Exception as error:  # the thread must survive every error of a maker or a store
            if len(items) > 1:
                for item in items:
                    self._write([item])
                return
            count_failure(NOT_WRITTEN, not items[0].is_copy)
            # An unreachable place is logged by its own store.
            if type(error) not in self._reported and not isinstance(error, StoreUnreachableError):
                self._reported.add(type(error))
                logger.warning(
                    "a block was not stored: %s: %s (further %s are not logged)",
                    type(error).__name__,
                    error,
                    type(error).__name__,
                )

    def is_waiting(self, names: Iterable[BlockName]) -> bool:
        """Whether any of these blocks waits or is being written."""
        with self._lock:
            return any(name in self._waiting for name in names)

    def withdraw(self, name: BlockName) -> bool:
        """Takes a waiting block out of the queue, and waits for it if it is being written; False if it did not wait.
        Afterwards no block of this name that was submitted before reaches the store."""
        with self._lock:
            queued = self._waiting.get(name)
            if queued is None:
                return False
            if name not in self._writing:
                self._bytes -= self._waiting.pop(name).nbytes
                self._changed.notify_all()
            elif self._thread is not threading.current_thread():
                self._changed.wait_for(lambda: self._waiting.get(name) is not queued)
            return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all blocks submitted before are written; False if that takes longer than `timeout_s`."""
        left = time_left(timeout_s)
        with self._lock:
            before = list(self._waiting.items())
            while any(self._waiting.get(name) is queued for name, queued in before):
                if left() == 0:
                    return False
                self._changed.wait(left())
        return self._store.flush(left())

    def close(self, timeout_s: float | None = None) -> bool:
        """Accepts no more blocks, writes those that wait and ends the thread; may be called twice. False if that takes
        longer than `timeout_s`, or a write than `STUCK_S`: then all waiting blocks are dropped except those being
        written."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        left = time_left(timeout_s)
        while thread.is_alive() and left() != 0 and self.writing_s < STUCK_S:
            thread.join(min(1.0, left() or 1.0))
        if not thread.is_alive():
            return True
        with self._lock:
            for name in list(self._waiting)[len(self._writing) :]:
                item = self._waiting.pop(name)
                self._bytes -= item.nbytes
                count_failure(NOT_WRITTEN, not item.is_copy)
        return False
