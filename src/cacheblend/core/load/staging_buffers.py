"""Memory of fixed size that records are read into, and CUDA's stream for loading: copies overlap with computing.

    store ── read ──▶ slabs ── one copy a slab ──▶ device ── place ──▶ buffers       all of it on the loading stream
                        ▲                            │
                        └──── event: copied ─────────┘

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
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch

from cacheblend.core.closable import Closable
from cacheblend.core.kernels.kv_placement import Located

SLAB_BYTES = 16 << 20
CPU_SLAB_BYTES = 8 << 20  # what one thread reads at once
CPU_BYTES = 128 << 20
"""Staging memory of a process that computes on the CPU: it spares the system new pages for each read."""

PINNED_BYTES = 256 << 20  # staging memory of a process for each GPU: four layers of 16,384 tokens of an 8B model
_ALIGNMENT = 4096  # as direct reads need it
_ELEMENT = 16  # bytes of the largest element of a record, and more: what is copied begins at a multiple
_HOST = torch.device("cpu")
Key = TypeVar("Key")
Sent = Callable[[Sequence[Key]], Sequence[torch.Tensor]]  # the records of some keys


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
        self._held: deque[tuple[Any, object]] = deque()  # what has other memory that it reads until an event
        self._lost: deque[int] = deque()  # numbers of slabs; a finalizer may run anywhere, so it takes no lock
        self._lock = threading.Lock()

    def lease(self, uses: int = 1) -> "Lease":  # whose records are used up in so many parts
        return Lease(self, uses)

    @property
    def nbytes(self) -> int:  # bytes of the slabs that have been made and are not lost
        return (self._made - sum(self._lost)) * self.slab_bytes

    def slab(self) -> torch.Tensor | None:
        """A slab that nobody uses, uint8 [slab_bytes]; waits for the device if only copies use one; None: none left."""
        with self._lock:
            while self._lost:
                self._made -= self._lost.popleft()
            while self._copied and ((not self._free and self._made == self._most) or self._copied[0][0].query()):
                event, slabs = self._copied.popleft()
                event.synchronize()
                self._free += slabs
            if self._free:
                return self._free.pop()
            if self._made == self._most:
                return None
            self._made += 1
        try:
            return _aligned(self.slab_bytes, self._pinned)
        except BaseException:
            self.forget(1)
            raise

    def hold(self, event: Any, held: object) -> None:
        """Keeps what has tensors alive until the device has passed an event (that of the last call maybe until the next
        one): their owner may drop them before it has read them. None: no device reads them."""
        with self._lock:
            while self._held and self._held[0][0].query():
                self._held.popleft()
            if event is not None:
                self._held.append((event, held))

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

    def send(self, blocks: Mapping[Key, Sequence[torch.Tensor]], layers: int) -> list[Sent[Key]]:
        """So many layers' records of each block on the device, by layer; copies may still be in progress on the current
        stream, and the caller holds the records until then (`StagingMemory.hold`)."""
        firsts = [records[0] for records in blocks.values()]
        if self.device.type == "cuda" and {each.device for each in firsts} == {_HOST} and firsts[0].is_pinned():
            # Asking takes longer than starting a copy. One that is not pinned is copied all the same, by waiting.
            return sent_together(blocks, self.device)
        records = {(key, at): each for key, of in blocks.items() for at, each in enumerate(of)}
        with _ThroughSlabs(self.memory, self.device, self.now) as slabs:
            for key, record in records.items():
                if record.device != self.device:
                    data = slabs.copied(record.contiguous().view(-1).view(torch.uint8))
                    records[key] = data.view(record.dtype).view(record.shape)
        by_layer = [{key: records[key, at] for key in blocks} for at in range(layers)]
        return [partial(lambda own, keys: [own[key] for key in keys], own) for own in by_layer]

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


def sent_together(blocks: Mapping[Key, Sequence[torch.Tensor]], device: torch.device) -> list[Sent[Key]]:
    """Copies of pinned records of some layers of each block, by layer: memory for those of one size in one piece, one
    copy of a block's records that lie side by side, and one call for all. The interpreter's lock is free during that
    call, and the thread that computes needs it for each kernel it starts."""
    alike: dict[Any, list[Key]] = {}
    for key, records in blocks.items():
        shapes = (records[0].shape,) if (step := _step(records)) else tuple(record.shape for record in records)
        alike.setdefault((step, len(records), shapes, records[0].dtype), []).append(key)
    sent: dict[Key, Any] = {}  # memory, a block's address in it, bytes from layer to layer, kinds by layer
    targets, sources = list[torch.Tensor](), list[torch.Tensor]()
    for (joined, layers, shapes, dtype), keys in alike.items():
        most = max(shape.numel() for shape in shapes)
        step = joined or most * dtype.itemsize + -most * dtype.itemsize % _ELEMENT
        numbers = step // dtype.itemsize
        memory = torch.empty((len(keys) * layers, numbers), dtype=dtype, device=device)
        flat, begin = memory.view(-1), memory.data_ptr()
        kinds = [(shape.numel() * dtype.itemsize, dtype, memory.device) for shape in shapes] * (layers // len(shapes))
        sent |= {key: (flat, begin + at * layers * step, step, kinds) for at, key in enumerate(keys)}
        if joined:
            used = (layers - 1) * numbers + most
            targets += memory.view(len(keys), -1)[:, :used].unbind()
            sources += [blocks[key][0].as_strided((used,), (1,)) for key in keys]
            continue
        records = [record for key in keys for record in blocks[key]]
        sources += records
        if most == numbers and len(set(shapes)) == 1:
            targets += memory.view(-1, *shapes[0]).unbind()
        else:
            targets += [row[: r.numel()].view(r.shape) for row, r in zip(memory, records, strict=True)]
    torch._foreach_copy_(targets, sources, non_blocking=True)

    def located(layer: int, keys: Sequence[Key]) -> Located:
        where = [sent[key] for key in keys]
        addresses, kinds = [at + layer * step for _, at, step, _ in where], [each[3][layer] for each in where]

        def made(index: int) -> torch.Tensor:
            memory, like = where[index][0], blocks[keys[index]][layer]
            start = (addresses[index] - memory.data_ptr()) // memory.element_size()
            return cast(torch.Tensor, memory[start : start + like.numel()].view(like.shape))

        return Located(addresses, kinds, made)

    return [partial(located, layer) for layer in range(max(map(len, blocks.values())))]


def _step(records: Sequence[torch.Tensor]) -> int:
    """Bytes from each record to the next where records of one size lie side by side in one memory; 0: they do not."""
    at, first, nbytes = [record.data_ptr() for record in records], records[0], records[0].nbytes
    step = at[1] - at[0] if len(at) > 1 else 0
    if step % _ELEMENT or not nbytes <= step < nbytes + _ALIGNMENT or at != list(range(at[0], at[-1] + 1, step)):
        return 0
    end = first.storage_offset() * first.element_size() + at[-1] - at[0] + nbytes
    is_one = first.is_contiguous() and end <= first.untyped_storage().nbytes()
    return step if is_one and [record.nbytes for record in records].count(nbytes) == len(records) else 0


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
