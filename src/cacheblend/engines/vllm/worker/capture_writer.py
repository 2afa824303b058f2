"""Stores a worker's captured chunks in a thread of its own while the engine goes on, and counts the finished ones.

engine step   compute the chunk, gather all ranks' heads -> write
thread        copy to the host, make blocks, store them -> done
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch

from cacheblend.core.load.capture import CapturedChunk, blocks_of, manifest_of, publish
from cacheblend.core.load.loader import LayerKV
from cacheblend.core.load.staging_buffers import Staging
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.names import grouped
from cacheblend.core.plan.blocks import Block, ChunkManifest
from cacheblend.core.plan.plan import Source
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.engines.vllm.jobs import CaptureJob
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.reasons import NOT_WRITTEN
from cacheblend.engines.vllm.worker.model import BlendModel
from cacheblend.engines.vllm.worker.ranks import Ranks
from cacheblend.store import KVStore

CLOSE_S = 5.0  # seconds that `close` waits for the chunk that is being written
WRITTEN = 1 << 26  # bytes of a history that are written at once: a slow store shows that it goes on
logger = logging.getLogger("cacheblend.vllm")


class CaptureWriter:
    """Stores what one rank captured: with several ranks, the first one writes the heads of all."""

    def __init__(self, model: BlendModel, store: KVStore, counts: Counts, name: str, ranks: Ranks) -> None:
        self._model, self._counts, self._name, self._ranks = model, counts, name, ranks
        self._keeper = ChunkKeeper(store)
        self._staging = Staging(model.device)
        # Two threads: while the store takes a chunk, or hangs, others are still copied off the device.
        self._copying, self._storing = DaemonPool(1, "cacheblend-copier"), DaemonPool(1, "cacheblend-writer")
        self._unfinished: dict[Future[None], int] = {}
        self.done, self._ended, self._lock = 0, set[int](), threading.Lock()
        self.written = 0  # tokens of histories, of which one may take long

    def gather(self, kv: Sequence[LayerKV]) -> list[LayerKV]:
        """What this rank has to write of a chunk: all ranks' heads, or nothing. All ranks call it, in a section; `kv`:
        [kv_heads of this rank, tokens, head_dim] each, of anchor and chunk."""
        if self._ranks.size == 1:
            return list(kv)
        found = []
        copies = max(1, self._ranks.size // self._model.total_kv_heads)  # of heads that several ranks hold
        for layer in kv:
            whole = LayerKV(*(self._ranks.gather_heads(part)[::copies] for part in layer))
            if self._ranks.rank == 0:
                found.append(whole)
        return found

    def write(self, number: int, job: CaptureJob, kv: list[LayerKV]) -> None:
        """Has a chunk stored; returns before it is. `number`: in the order of sending; `kv`: see `gather`; the list is
        emptied as soon as the host has its content."""
        self._unfinished = {chunk: each for chunk, each in self._unfinished.items() if not chunk.done()}
        if self._ranks.rank or self._keeper.is_paused:
            return self.refuse(number)
        try:
            copied = self._copying.submit(self._on_host, job, kv, self._staging.now())
            self._unfinished[self._storing.submit(self._store, number, copied)] = number
        except RuntimeError as error:  # no more threads
            logger.warning("a missed chunk is not stored: %s", error)
            self._counts.add_fallback(type(error).__name__)
            self.end(number)

    def end(self, number: int) -> None:
        """A chunk needs no more work, stored or not. It counts as done once those that were sent before it are."""
        with self._lock:
            self._ended.add(number)
            while self.done in self._ended:
                self._ended.remove(self.done)
                self.done += 1

    def refuse(self, number: int) -> None:
        """A chunk is not stored, since the store has refused another one. The rank that writes counts it."""
        if not self._ranks.rank:
            self._counts.add_fallback(NOT_WRITTEN)
        self.end(number)

    @property
    def is_refusing(self) -> bool:
        """The store has just refused a chunk, and none is being written; known by the rank that writes."""
        return not self._ranks.rank and self._keeper.is_paused and all(each.done() for each in self._unfinished)

    def drop(self) -> None:
        for chunk, number in [*self._unfinished.items()]:
            if chunk.cancel():
                del self._unfinished[chunk]
                self.end(number)

    def wait(self, seconds: float) -> None:
        """Waits until a chunk is stored, at most so long; not at all if there is none."""
        wait([each for each in self._unfinished if not each.done()], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Waits `CLOSE_S` at most for the chunk that is being written; those after it are not stored."""
        self._copying.close()
        self._storing.close()
        self._storing.join(CLOSE_S)

    def _store(self, number: int, copied: "Future[tuple[list[Block], ChunkManifest | None]]") -> None:
        try:
            blocks, manifest = copied.result()
            if manifest is None:
                is_kept, tokens = self._write(blocks), sum(len(block.token_ids) for block in blocks)
            else:
                is_kept, tokens = self._keeper.keep(CapturedChunk(blocks, manifest)), len(manifest.token_ids)
            if is_kept:
                self._counts.add("captured_tokens", tokens)
            else:
                self._counts.add_fallback(NOT_WRITTEN)
        except Exception as error:
            logger.exception("a missed chunk is not stored")
            self._counts.add_fallback(type(error).__name__)
        finally:
            self.end(number)

    def _write(self, blocks: Sequence[Block]) -> bool:
        for part in grouped(blocks, lambda some, block: (len(some) + 1) * _nbytes(block) <= WRITTEN):
            if not self._keeper.write(part):
                return False
            self.written += sum(len(block.token_ids) for block in part)
        return True

    @torch.inference_mode()
    def _on_host(self, job: CaptureJob, kv: list[LayerKV], computed: Any) -> tuple[list[Block], ChunkManifest | None]:
        """Blocks to be stored, and the manifest behind them; text has none."""
        try:
            with self._staging.stream():
                self._staging.wait(computed, [part for layer in kv for part in layer])
                if job.exact is not None:
                    new = [span for span in job.exact.spans if span.source is Source.TEXT]
                    return publish(job.exact, kv, new, first=job.exact.prefix_length), None
                blocks = blocks_of(job.chunk, job.planner, kv)
            return blocks, manifest_of(job.chunk, job.planner, self._name)
        finally:
            kv.clear()


def _nbytes(block: Block) -> int:
    return block.layout.block_bytes(len(block.token_ids))
