"""Memory of fixed size that records are read into, and CUDA's stream for loading: copies overlap with computing.

    store ── read ──▶ slabs ── one copy a block ──▶ device ── place ──▶ buffers       all of it on the loading stream
                        ▲                             │
                        └──── event: copied ──────────┘

A layer's records lie in slabs, which are pinned where a GPU copies from them. A slab is used again once the device has
copied it: who reads faster than the device copies waits for it, and for nobody else. Where all slabs wait to be used by
the host, records get ordinary memory instead: a wait could be for a reader of the same thread. Nothing but slabs is
ever pinned here; records in ordinary memory, a store's or that one, pass through slabs (`_ThroughSlabs`).

Streams wait for each other; the host waits for neither, except where ordinary memory finds no slab. On a CPU there are
slabs, and nothing is copied.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.closable import Closable
from cacheblend.core.kernels.kv_placement import Located
from cacheblend.core.kernels.upload import upload
from cacheblend.core.names import grouped

SLAB_BYTES = 16 << 20
CPU_SLAB_BYTES = 8 << 20  # what one thread reads at once
CPU_BYTES = 128 << 20
"""Staging memory of a process that computes on the CPU: it spares the system new pages for each read."""

PINNED_BYTES = 256 << 20  # staging memory of a process for each GPU: four layers of 16,384 tokens of an 8B model
_ALIGNMENT = 4096  # as direct reads need it
_ELEMENT = 16  # bytes of the largest element of a record, and more: what is copied begins at a multiple
_HOST = torch.device("cpu")
_KIND = attrgetter("shape", "dtype")
Key = TypeVar("Key")


class StagingMemory:
    """Slabs of memory, made when they are needed and then kept; safe to call from several threads. `nbytes`,
    `slab_bytes`: of all slabs, at most, and of one; a larger record gets memory of its own. `pinned`: memory that a GPU
    copies from without the host."""

    def __init__(self, nbytes: int, slab_bytes: int = SLAB_BYTES, *, pinned: bool = False) -> None:
        self.slab_bytes, self._pinned = slab_bytes, pinned
        self._most = nbytes // slab_bytes
        self._made = 0
        self._free: list[torch.Tensor] = []  # the last one used is used next: it is in the processor's cache
        self._copied: deque[tuple[Any, list[torch.Tensor]]] = deque()  # slabs that the device copies until an event
        self._held: deque[tuple[Any, list[torch.Tensor]]] = deque()  # other memory that it reads until an event
        self._lost: deque[int] = deque()  # numbers of slabs; a finalizer may run anywhere, so it takes no lock
        self._lock = threading.Lock()

    def lease(self, uses: int = 1) -> "Lease":  # whose records are used up in so many parts
        return Lease(self, uses)

    @property
    def nbytes(self) -> int:  # bytes of the slabs that have been made and are not lost
        return (self._made - sum(self._lost)) * self.slab_bytes

    def slab(self) -> torch.Tensor | None:
        """A slab that nobody uses, uint8 [slab_bytes]; waits for the device if only copies use one; None: none left."""
        while True:
            with self._lock:
                while self._lost:
                    self._made -= self._lost.popleft()
                while self._copied and self._copied[0][0].query():
                    self._free += self._copied.popleft()[1]
                if self._free:
                    return self._free.pop()
                if self._made < self._most:
                    self._made += 1
                    break
                if not self._copied:
                    return None
                oldest = self._copied[0][0]
            oldest.synchronize()  # without the lock, which those need who give slabs back; others may take this one
        try:
            return _aligned(self.slab_bytes, self._pinned)
        except BaseException:
            self.forget(1)
            raise

    def hold(self, event: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps tensors alive until the device has passed an event (those of the last call maybe until the next one):
        their owner may drop them before it has read them. None: no device reads them."""
        with self._lock:
            while self._held and self._held[0][0].query():
                self._held.popleft()
            if event is not None:
                self._held.append((event, list(tensors)))

    def give_back(self, slabs: list[torch.Tensor], event: Any) -> None:
        """Takes slabs back that the device copies until an event; None: that nobody uses."""
        with self._lock:
            if event is None:
                self._free += slabs
            else:
                self._copied.append((event, slabs))

    def forget(self, count: int) -> None:  # others may be made for them
        self._lost.append(count)


class Lease:
    """Memory for the records of one read; slabs go back once every part of the records has been used up. Dropped before
    that, its slabs are not used again: something may still read from them, or write to them."""

    def __init__(self, memory: StagingMemory, uses: int) -> None:
        self._memory, self._uses = memory, uses
        self._slabs: list[torch.Tensor] = []
        self._used = memory.slab_bytes  # bytes of the last slab
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """Memory for one record, uint8 [nbytes]; a `RecordMemory`."""
        if not 0 < nbytes <= self._memory.slab_bytes:
            return _aligned(nbytes, pinned=False)  # nothing would bound pinned memory
        with self._lock:
            if self._used + nbytes > self._memory.slab_bytes:
                slab = self._memory.slab()
                if slab is None:
                    return _aligned(nbytes, pinned=False)
                self._slabs.append(slab)
                self._used = 0
            slab, start = self._slabs[-1], self._used
            self._used += nbytes + -nbytes % _ALIGNMENT
        return slab.narrow(0, start, nbytes)

    def release(self, event: Any = None) -> None:
        """One part of the records has been used up, on a device once `event` has passed."""
        with self._lock:
            self._uses -= 1
            slabs = self._slabs if not self._uses else []
            self._slabs = [] if slabs else self._slabs
        if slabs:  # a device's events pass in the order of its stream: the last part's is the last
            self._memory.give_back(slabs, event)

    def __del__(self) -> None:
        if self._slabs:
            self._memory.forget(len(self._slabs))


class Staging:
    """One request's use of the staging memory and of the loading stream of a device on which records are needed."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:  # another thread may have another device
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.memory = memory_of(device)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Work that is started inside goes onto the loading stream."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(_stream(self.device)):
            yield

    def send(self, layers: Sequence[Sequence[torch.Tensor]]) -> Sequence[Sequence[torch.Tensor]]:
        """Some layers' records of the same blocks, [layers][blocks], on the device; copies may still be in progress on
        the current stream, and the caller holds the records until then (`StagingMemory.hold`). Those of pinned memory
        take one call, in which other threads run."""
        if self.device.type != "cuda":
            return [[record.to(self.device) for record in records] for records in layers]
        here = [record.device == self.device for record in layers[0]]
        if all(here):
            return layers
        if any(here):  # a tier on the device holds some blocks
            rest = [[r for r, stays in zip(records, here, strict=True) if not stays] for records in layers]
            sent = map(iter, self.send(rest))
            return [
                [record if stays else next(own) for record, stays in zip(records, here, strict=True)]
                for records, own in zip(layers, sent, strict=True)
            ]
        first = layers[0][0]
        # Asking takes longer than starting a copy. One that is not pinned is copied all the same, by waiting.
        if {(record.dtype, record.device) for record in layers[0]} == {(first.dtype, _HOST)} and first.is_pinned():
            steps = _steps(layers)
            if steps is None:
                return [self.send([records])[0] for records in layers]
            return copied_together(layers, steps, self.device)
        keyed = {(i, at): record for i, records in enumerate(layers) for at, record in enumerate(records)}
        with _ThroughSlabs(self.memory, self.device, self.now) as slabs:
            moved = moved_together(keyed, slabs.copied)
        return [[moved[i, at] for at in range(len(here))] for i in range(len(layers))]

    def now(self) -> Any:
        """An event for `wait`: all work started so far on the current stream is done."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def wait(self, event: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Work that is started on the current stream after this call runs after an event of another stream; None: no
        wait. The memory of these tensors, allocated there, is not reused before this stream is done with them."""
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            for tensor in tensors:
                tensor.record_stream(stream)


class _ThroughSlabs(Closable):
    """Copies to a device. Those from ordinary memory go through slabs: one is filled while the device copies others.
    `now`: an event behind the work of the current stream so far."""

    def __init__(self, memory: StagingMemory, device: torch.device, now: Callable[[], Any]) -> None:
        self._memory, self._device, self._now = memory, device, now
        self._slab: torch.Tensor | None = None
        self._used = 0

    def copied(self, data: torch.Tensor) -> torch.Tensor:
        """The bytes on the device, uint8 [bytes]; the copy may still be in progress on the current stream. The host
        waits for it where all slabs are being read into."""
        if data.device.type != "cpu" or data.is_pinned():
            return data.to(self._device, non_blocking=True)
        target = torch.empty(len(data), dtype=torch.uint8, device=self._device)
        step = self._memory.slab_bytes
        for start in range(0, len(data), step):
            part, place = data[start : start + step], target[start : start + step]
            if self._slab is None or self._used + len(part) > step:
                self.close()
                self._slab, self._used = self._memory.slab(), 0
            if self._slab is None:  # none is left
                place.copy_(part)
            else:
                room = self._slab[self._used : self._used + len(part)]
                self._used += len(part) + -len(part) % _ALIGNMENT
                place.copy_(room.copy_(part), non_blocking=True)
        return target

    def close(self) -> None:
        """Gives the slab in use back, which others may fill once it is copied."""
        if self._slab is not None:
            slab, self._slab = self._slab, None
            self._memory.give_back([slab], self._now())


def _steps(layers: Sequence[Sequence[torch.Tensor]]) -> npt.NDArray[np.int64] | None:
    """[blocks] bytes from layer to layer, where each block's records, all alike, lie side by side in one memory at
    multiples of 16 bytes; 0 of a single layer; None: not all lie so."""
    first = layers[0]
    if len(layers) == 1:
        return np.zeros(len(first), dtype=np.int64)
    kinds = [list(map(_KIND, records)) for records in layers]  # no loop of Python's: it would be most of a layer's time
    if any(own != kinds[0] for own in kinds[1:]) or not all(map(torch.Tensor.is_contiguous, chain(*layers))):
        return None
    at = np.array([list(map(torch.Tensor.data_ptr, records)) for records in layers])
    nbytes = np.array([r.nbytes for r in first])
    steps, ends = at[1] - at[0], np.array([s.data_ptr() + s.nbytes() for s in (r.untyped_storage() for r in first)])
    fits = (nbytes <= steps) & (steps < nbytes + _ALIGNMENT) & (steps % _ELEMENT == 0) & (at[-1] + nbytes <= ends)
    return steps if fits.all() and (np.diff(at, axis=0) == steps).all() else None


def copied_together(
    layers: Sequence[Sequence[torch.Tensor]], steps: npt.NDArray[np.int64], device: torch.device
) -> list[Located]:
    """Copies of pinned records of one type whose `_steps` are known: one a block, in one memory, by one call, during
    which the interpreter's lock is free: the thread that computes needs it for each kernel it starts. No record gets a
    tensor, which would take longer than the rest."""
    first, size = layers[0], layers[0][0].element_size()
    used = (steps * (len(layers) - 1) + [record.nbytes for record in first]) // size
    slots = used + -used % (_ELEMENT // size)
    memory = torch.empty(int(slots.sum()), dtype=first[0].dtype, device=device)
    targets = list(torch.split(memory, slots.tolist()))
    if (slots > used).any():
        targets = [target[:count] for target, count in zip(targets, used.tolist(), strict=True)]
    sources = [r.contiguous().as_strided((count,), (1,)) for r, count in zip(first, used.tolist(), strict=True)]
    torch._foreach_copy_(targets, sources, non_blocking=True)
    starts = np.cumsum(slots) - slots + np.arange(len(layers))[:, None] * (steps // size)
    tables, shapes = upload(memory.data_ptr() + size * starts, device), [record.shape for record in first]
    kind = memory.dtype, memory.device
    kinds = [(record.nbytes, *kind) for record in first]
    by_layer = zip(starts.tolist(), tables.unbind(), strict=True)
    return [Located(memory, own, shapes, kinds, table) for own, table in by_layer]


def moved_together(
    records: Mapping[Key, torch.Tensor], copied: Callable[[torch.Tensor], torch.Tensor]
) -> dict[Key, torch.Tensor]:
    """Copies of contiguous records; `copied` is called with uint8 [bytes], once for those that lie close together."""
    by_storage: dict[tuple[torch.device, int], list[Key]] = {}
    for key, record in records.items():  # each device has addresses of its own
        by_storage.setdefault((record.device, record.untyped_storage().data_ptr()), []).append(key)
    moved: dict[Key, torch.Tensor] = {}
    for keys in by_storage.values():
        starts = {key: int(records[key].storage_offset()) * records[key].element_size() for key in keys}
        whole = records[keys[0]]
        flat = torch.empty(0, dtype=torch.uint8, device=whole.device).set_(whole.untyped_storage())
        for run in _close(sorted(keys, key=starts.__getitem__), starts, records):
            first = starts[run[0]] - starts[run[0]] % _ELEMENT
            data = copied(flat[first : starts[run[-1]] + records[run[-1]].nbytes])
            for key in run:
                record, start = records[key], starts[key] - first
                moved[key] = data[start : start + record.nbytes].view(record.dtype).view(record.shape)
    return moved


def _close(keys: Sequence[Key], starts: Mapping[Key, int], records: Mapping[Key, torch.Tensor]) -> Iterator[list[Key]]:
    """Keys in the order of their bytes, those together between whose bytes there is at most the rest of a page."""
    return grouped(keys, lambda run, key: starts[key] - starts[run[-1]] - records[run[-1]].nbytes < _ALIGNMENT)


@cache
def memory_of(device: torch.device) -> StagingMemory:
    """The process's staging memory for a device."""
    is_cuda = device.type == "cuda"
    return StagingMemory(PINNED_BYTES, pinned=True) if is_cuda else StagingMemory(CPU_BYTES, CPU_SLAB_BYTES)


@cache
def _stream(device: torch.device) -> Any:
    """One for each device: torch caches memory by stream, so a stream for each request would cost memory for each."""
    make: Any = torch.cuda.Stream  # torch has no types for it
    return make(device)


@torch.inference_mode(False)  # else only inference mode could write to it, for as long as it is kept
def _aligned(nbytes: int, pinned: bool) -> torch.Tensor:
    if pinned:  # aligned by itself; torch rounds the size up to a power of 2
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _ALIGNMENT :][:nbytes]
