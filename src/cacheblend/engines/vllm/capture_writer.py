"""Stores a worker's captured chunks in a thread of its own while the engine goes on, and counts the finished ones."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cacheblend.core.load.capture import CapturedChunk, blocks_of, manifest_of
from cacheblend.core.load.loader import LayerKV
from cacheblend.engines.keeper import ChunkKeeper
from cacheblend.engines.vllm import compat
from cacheblend.engines.vllm.jobs import CaptureJob
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.model import BlendModel
from cacheblend.store import KVStore

logger = logging.getLogger("cacheblend.vllm")


class CaptureWriter:
    """Stores what one rank captured: with several ranks, the first one writes the heads of all.

    Args:
        model: this rank's part.
        store: where chunks are kept.
        counts: get the stored tokens and the failures.
        name: of the model, for people.
    """

    def __init__(self, model: BlendModel, store: KVStore, counts: Counts, name: str) -> None:
        self._model, self._counts, self._name = model, counts, name
        self._keeper = ChunkKeeper(store)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-writer")
        self._done, self._lock = 0, threading.Lock()

    @property
    def done(self) -> int:
        """Chunks that need no more work since the start, whether they were stored or not."""
        return self._done

    def write(self, job: CaptureJob, kv: Sequence[LayerKV]) -> None:
        """Has a chunk stored; returns before it is.

        Args:
            job: what was computed.
            kv: [kv_heads of this rank, tokens, head_dim] each, of anchor and chunk.
        """
        if self._model.tp_size > 1:
            kv = [self._all_heads(layer) for layer in kv]
        if self._model.tp_rank or self._keeper.is_paused:
            self.count_done()
            return
        chunk = CapturedChunk(blocks_of(job.chunk, job.planner, kv), manifest_of(job.chunk, job.planner, self._name))
        self._thread.submit(self._store, chunk)

    def count_done(self) -> None:
        """Counts a chunk that needs no more work."""
        with self._lock:
            self._done += 1

    def close(self) -> None:
        """Waits for the chunk that is being written; those after it are not stored."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _store(self, chunk: CapturedChunk) -> None:
        try:
            if self._keeper.keep(chunk):
                self._counts.add("captured_tokens", len(chunk.manifest.token_ids))
            else:
                self._counts.add_fallback("store write")
        except Exception:
            logger.exception("a missed chunk is not stored")
        finally:
            self.count_done()

    def _all_heads(self, kv: LayerKV) -> LayerKV:
        """The heads of all ranks; of heads that several ranks hold, one copy each."""
        copies = max(1, self._model.tp_size // self._model.total_kv_heads)
        keys, values = (compat.gather_heads(part)[::copies] for part in kv)
        return LayerKV(keys, values)
