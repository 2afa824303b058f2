"""Write-behind: blocks are written to a store by one thread from a bounded queue, so that no request waits for it."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cacheblend.core.closable import Closable
from cacheblend.core.errors import InvalidInputError, StoreUnreachableError
from cacheblend.core.names import BlockName
from cacheblend.core.openmp import end_team
from cacheblend.core.plan.blocks import Block
from cacheblend.store.base import LOGGER_NAME, KVStore

logger = logging.getLogger(LOGGER_NAME)

BlockMaker = Callable[[], Block | None]
"""Makes a block on the writer's thread, when it is written; None: nothing is written."""

_AT_ONCE, _BYTES_AT_ONCE = 16, 32 << 20  # blocks that follow each other are written together


@dataclass
class WriterStats:
    """What happened to the blocks that were submitted."""

    waiting: int = 0  # blocks in the queue, those being written included
    waiting_bytes: int = 0  # their bytes, as submitted
    written: int = 0  # blocks that the store took
    held: int = 0  # blocks that the store held already
    duplicates: int = 0  # blocks not accepted because one of the same name was waiting
    dropped: int = 0  # blocks not accepted because the queue was full or closed
    failed: int = 0  # blocks for which making or writing raised


class WriteBehind(Closable):
    """Writes blocks to a store on a thread of its own; safe to call from several threads.

    The thread is a daemon and starts with the first block. Blocks that still wait when the process ends are lost
    unless `flush` or `close` is called. The store stays open.

    `max_bytes`: bound on the bytes that wait. A block that would exceed it is dropped and counted, so a slow store
    causes misses but delays no request. Raises `InvalidInputError`: it is not above 0.
    """

    def __init__(self, store: KVStore, max_bytes: int = 1 << 30) -> None:
        if max_bytes <= 0:
            raise InvalidInputError(f"max_bytes must be above 0, got {max_bytes}")
        self._store, self._max_bytes = store, max_bytes
        # Entered in place of the condition, which is entered in Python: a Ctrl-C at a bad moment would leave it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: OrderedDict[BlockName, tuple[Block | BlockMaker, int]] = OrderedDict()
        self._writing: list[BlockName] = []  # the first of them
        self._counts, self._closed = WriterStats(), False
        self._thread: threading.Thread | None = None
        self._reported: set[type[BaseException]] = set()

    def submit(self, item: Block | BlockMaker, name: BlockName | None = None, nbytes: int = 0) -> bool:
        """Queues a block; False if it is dropped or waits already. Returns at once. `item`: the block, whose tensors
        must not change afterwards, or a callable that makes it, with the block's `name`, and `nbytes` of the records
        that it keeps alive or will make. Raises `InvalidInputError`: a callable without a name."""
        if isinstance(item, Block):
            name, nbytes = item.name, sum(record.nbytes for record in item.records)
        if name is None:
            raise InvalidInputError("submit needs the name of the block that a callable will make")
        with self._lock:
            if name in self._waiting:
                self._counts.duplicates += 1
                return False
            if self._closed or self._counts.waiting_bytes + nbytes > self._max_bytes:
                self._counts.dropped += 1
                return False
            self._waiting[name] = (item, nbytes)
            self._counts.waiting_bytes += nbytes
            if self._thread is None or not self._thread.is_alive():  # not alive: after a fork
                self._writing = []
                self._thread = threading.Thread(target=self._run, name="cacheblend-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

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
                items = self._next()
            self._write(items)
            del items
            end_team()
            with self._lock:
                for name in self._writing:
                    _, nbytes = self._waiting.pop(name)
                    self._counts.waiting_bytes -= nbytes
                self._writing = []
                self._changed.notify_all()

    def _next(self) -> list[Block | BlockMaker]:
        """What is written next: the first that waits, and the blocks behind it that continue its chain."""
        items: list[Block | BlockMaker] = []
        total = 0
        for name, (item, nbytes) in self._waiting.items():
            last, total = items[-1] if items else None, total + nbytes
            follows = isinstance(item, Block) and isinstance(last, Block) and item.parent == last.name
            if items and not (follows and len(items) < _AT_ONCE and total <= _BYTES_AT_ONCE):
                break
            items.append(item)
            self._writing.append(name)
        return items

    def _write(self, items: Sequence[Block | BlockMaker]) -> None:
        try:
            made = [item if isinstance(item, Block) else item() for item in items]
            blocks = [block for block in made if block is not None]
            new = self._store.write_all(blocks) if blocks else []
        except Exception as error:  # the thread must survive every error of a maker or a store
            if len(items) > 1:
                for item in items:
                    self._write([item])
                return
            self._counts.failed += 1
            # An unreachable place is logged by its own store.
            if type(error) not in self._reported and not isinstance(error, StoreUnreachableError):
                self._reported.add(type(error))
                logger.warning(
                    "a block was not stored: %s: %s (further %s are counted, not logged)",
                    type(error).__name__,
                    error,
                    type(error).__name__,
                )
            return
        self._counts.written += sum(new)
        self._counts.held += len(new) - sum(new)

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
                self._counts.waiting_bytes -= self._waiting.pop(name)[1]
                self._changed.notify_all()
            elif self._thread is not threading.current_thread():
                self._changed.wait_for(lambda: self._waiting.get(name) is not queued)
            return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all blocks submitted before are written; False if that takes longer than `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            before = list(self._waiting.items())
            while any(self._waiting.get(name) is queued for name, queued in before):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        self._store.flush()
        return True

    def stats(self) -> WriterStats:
        """The counters, a snapshot."""
        with self._lock:
            return replace(self._counts, waiting=len(self._waiting))

    def close(self, timeout_s: float | None = None) -> bool:
        """Accepts no more blocks, writes those that wait and ends the thread; may be called twice. False if that takes
        longer than `timeout_s`: then all waiting blocks are dropped except those being written."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        if not thread.is_alive():
            return True
        with self._lock:
            for name in list(self._waiting)[len(self._writing) :]:
                _, nbytes = self._waiting.pop(name)
                self._counts.waiting_bytes -= nbytes
                self._counts.dropped += 1
        return False
