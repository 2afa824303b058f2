"""Staging memory: slabs that are used again once nobody reads them, and copies that are made together."""

import gc
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend.core.load import staging_buffers as staging_module
from cacheblend.core.load.staging_buffers import (
    Lease,
    StagingMemory,
    _steps,
    _ThroughSlabs,
    copied_together,
    moved_together,
)

SLAB = 1 << 16
PAGE = 4096


class Event:
    """A device's event that passes when it is waited for, or when it is told to."""

    def __init__(self) -> None:
        self.has_passed = False
        self.waits = 0

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.waits += not self.has_passed
        self.has_passed = True


def memory(slabs: int) -> StagingMemory:
    return StagingMemory(slabs * SLAB, SLAB)


def place_of(taken: torch.Tensor) -> int:
    return int(taken.untyped_storage().data_ptr())


def test_slabs_are_aligned_apart_used_again_the_last_one_first_and_waited_for_if_none_is_left() -> None:
    lease = memory(2).lease()
    sizes = [1, 3, PAGE, PAGE + 1, 5, SLAB // 2, SLAB]
    taken = [lease.take(size) for size in sizes]
    for number, (data, size) in enumerate(zip(taken, sizes, strict=True)):
        assert data.dtype == torch.uint8 and data.shape == (size,) and data.data_ptr() % PAGE == 0
        data.fill_(number)
    assert all(bool(data.eq(number).all()) for number, data in enumerate(taken))
    staging = memory(2)  # who finds no slab gets other memory, and so does what is larger than a slab
    lease = staging.lease()
    taken = [lease.take(SLAB) for _ in range(5)]
    assert len({place_of(data) for data in taken}) == 5 and staging.nbytes == 2 * SLAB
    assert lease.take(3 * SLAB).nbytes == 3 * SLAB and staging.nbytes == 2 * SLAB
    staging = memory(4)  # slabs are used again
    first, second = staging.lease(), staging.lease()
    places = [place_of(lease.take(SLAB)) for lease in (first, second)]
    first.release()
    second.release()
    assert [place_of(staging.lease().take(10)) for _ in range(1)] == places[1:]
    assert staging.nbytes == SLAB  # the other one: a lease that is dropped takes its slab along
    assert place_of(staging.lease().take(10)) == places[0]
    staging = memory(1)
    lease = staging.lease(uses=3)
    place = place_of(lease.take(10))
    for _ in range(2):  # not before every part has been used up
        lease.release()
        other = staging.lease()
        assert place_of(other.take(10)) != place
        other.release()
    lease.release()
    assert place_of(staging.lease().take(10)) == place
    staging = memory(1)
    with torch.inference_mode():  # without which it is written to
        lease = staging.lease()
        lease.take(10)
        lease.release()
    assert staging.lease().take(10).copy_(torch.arange(10)).tolist() == list(range(10))
    staging, events = memory(2), [Event(), Event()]  # who reads faster than the device copies waits for the oldest copy
    places = []
    for event in events:
        lease = staging.lease()
        places.append(place_of(lease.take(SLAB)))
        lease.release(event)
    third = staging.lease()
    assert place_of(third.take(SLAB)) == places[0]
    assert [event.waits for event in events] == [1, 0]
    events[1].has_passed = True
    fourth = staging.lease()
    assert place_of(fourth.take(SLAB)) == places[1]
    assert [event.waits for event in events] == [1, 0]
    staging, event = memory(2), Event()  # not while another one can be made
    lease = staging.lease()
    place = place_of(lease.take(SLAB))
    lease.release(event)
    other = staging.lease()
    assert place_of(other.take(SLAB)) != place and event.waits == 0


def test_slabs_of_dropped_leases_go_to_nobody_and_may_be_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something may still write to them, as a read that was given up."""
    staging = memory(1)
    taken = staging.lease().take(SLAB)
    gc.collect()
    assert staging.nbytes == 0
    assert place_of(staging.lease().take(SLAB)) != place_of(taken)
    # a garbage collection may run the finalizer anywhere, in the thread that holds the lock, too
    staging = memory(1)
    lease = staging.lease()
    lease.take(1)
    done = threading.Event()

    def drop() -> None:
        nonlocal lease
        with staging._lock:
            lease = None  # type: ignore[assignment]
        done.set()

    threading.Thread(target=drop, daemon=True).start()
    assert done.wait(20), "the finalizer waits for a lock"
    again = staging.lease()
    assert again.take(1).nbytes == 1 and staging.nbytes == SLAB
    staging = memory(1)  # a slab that cannot be made
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError):
            staging.lease().take(1)
    assert staging.lease().take(1).nbytes == 1
    staging, events = memory(1), [Event(), Event()]  # what the device still reads is kept alive
    tensors = [torch.zeros(3), torch.zeros(3)]
    kept = [weakref.ref(tensor) for tensor in tensors]
    for event in events:
        staging.hold(event, [tensors.pop(0)])
    gc.collect()
    assert all(ref() is not None for ref in kept)
    events[1].has_passed = True
    staging.hold(None, [])
    assert all(ref() is not None for ref in kept), "events pass in their order"
    events[0].has_passed = True
    staging.hold(None, [])
    gc.collect()
    assert all(ref() is None for ref in kept)


def test_records_are_copied_to_where_their_elements_may_lie_and_from_where_they_are() -> None:
    slab = torch.arange(3 * PAGE, dtype=torch.int64).to(torch.uint8)
    records = {
        "odd": slab[7:1008],
        "half": slab[1010:2010].view(torch.float16),
        "full": slab[2012:2412].view(torch.float32),
    }
    moved = moved_together(records, lambda data: data.clone())
    assert all(torch.equal(moved[key].view(torch.uint8), record.view(torch.uint8)) for key, record in records.items())
    # of a slab with several layers one layer's records: what lies between them is not copied
    slab = torch.arange(64 * PAGE, dtype=torch.int64).to(torch.uint8)
    apart = {at: slab[at * 16 * PAGE : at * 16 * PAGE + 100] for at in range(4)}
    copies = []
    sent = moved_together(apart, lambda data: (copies.append(data.nbytes), data.clone())[1])
    assert copies == [100] * 4 and all(torch.equal(sent[at], apart[at]) for at in apart)
    # as from another GPU: two storages of a device without addresses are told apart from the host's
    there = torch.zeros(2, 2, 5, 8, dtype=torch.bfloat16, device="meta")
    here, asked = torch.ones(3, 2, 4, 8), []
    both = moved_together({"there": there, "here": here}, lambda data: (asked.append(data.device.type), data)[1])
    assert sorted(asked) == ["cpu", "meta"] and both["there"].device.type == "meta"
    assert both["there"].shape == there.shape and both["there"].dtype == there.dtype
    assert torch.equal(both["here"], here)


class _Operations(TorchDispatchMode):
    """Counts what is dispatched, each of which the host works for."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(call.overloadpacket.__name__)
        return call(*args, **(kwargs or {}))


def side_by_side(layers: int, shape: tuple[int, ...], dtype: torch.dtype, gap: int, start: int) -> list[torch.Tensor]:
    """One block's records in one memory, so many bytes apart."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.randint(0, 99, (start + layers * (nbytes + gap) - gap,), dtype=torch.uint8)
    starts = range(start, len(memory), nbytes + gap)
    return [memory[at : at + nbytes].view(dtype).view(shape) for at in starts]


@pytest.mark.parametrize("seed", range(20))
def test_a_blocks_records_of_several_layers_are_one_copy_where_they_lie_side_by_side(seed: int) -> None:
    draw, layers = random.Random(seed), 1 + seed % 5
    dtype = draw.choice([torch.bfloat16, torch.float32, torch.uint8])
    width = 7 if layers == 1 else 16  # of one layer, records of any size
    shapes = [(draw.randrange(1, 4), 2, draw.randrange(1, 40), width) for _ in range(draw.randrange(1, 9))]
    blocks = [side_by_side(layers, s, dtype, draw.choice([0, 16, 240]), draw.choice([0, 48])) for s in shapes]
    by_layer, device = list(zip(*blocks, strict=True)), torch.device("cpu")
    steps = _steps(by_layer)
    assert steps is not None
    with _Operations() as seen:
        sent = copied_together(by_layer, steps, device)
    assert seen.names.count("_foreach_copy_") == seen.names.count("empty") == 1
    for layer, found in enumerate(sent):
        assert found.table.tolist() == [record.data_ptr() for record in found] and len(found) == len(shapes)
        assert all(int(address) % 16 == 0 for address in found.table)
        assert found.kinds == [(record.nbytes, record.dtype, record.device) for record in found]
        assert all(map(torch.equal, found, by_layer[layer])) and all(record.dtype == dtype for record in found)


def test_other_records_are_copied_one_by_one() -> None:
    whole = side_by_side(4, (2, 2, 5, 16), torch.bfloat16, 16, 0)
    like = whole[0]
    permuted = [record.transpose(2, 3) for record in whole]
    others = {
        "backwards": whole[::-1],
        "one is left out": [whole[0], whole[1], whole[3]],
        "more than a page between": side_by_side(3, (2, 2, 5, 16), torch.bfloat16, PAGE, 0),
        "odd distance": side_by_side(3, (2, 2, 4, 16), torch.bfloat16, 8, 0),
        "shapes": [whole[0], whole[1].view(4, 2, 5, 8), whole[2]],
        "not contiguous": permuted,
        "overlap": [like[:1], like.view(-1)[80 : 80 + 160].view(1, 2, 5, 16), like[1:]],
    }
    assert _steps([(record,) for record in whole]) is not None
    for why, records in others.items():
        assert _steps([(record,) for record in records]) is None, why
        assert _steps(list(zip(whole, records, strict=False))) is None, f"beside another: {why}"
    # neighbours by chance: the memory of the first one ends with it
    apart = torch.zeros(64, dtype=torch.uint8)
    near = [apart[:16], torch.zeros(0, dtype=torch.uint8).set_(apart.untyped_storage(), 16, (16,))]
    assert _steps([(record,) for record in near]) is not None
    owned = torch.frombuffer(memoryview(apart.numpy())[:16], dtype=torch.uint8)
    assert owned.data_ptr() == apart.data_ptr() and _steps([(owned,), (near[1],)]) is None


def test_nobody_waits_for_a_lock_while_a_slab_is_waited_for() -> None:
    staging = memory(1)

    class Waited(Event):
        def synchronize(self) -> None:
            free.append(not staging._lock.locked())
            super().synchronize()

    free, lease = list[bool](), staging.lease()
    place = place_of(lease.take(SLAB))
    lease.release(Waited())
    assert place_of(staging.lease().take(SLAB)) == place and free == [True]


def test_threads_never_share_memory() -> None:
    staging = memory(8)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            lease, uses = staging.lease(uses=2), []
            for _ in range(draw.randrange(1, 6)):
                uses.append(lease.take(draw.randrange(1, SLAB)).fill_(seed))
            assert all(bool(data.eq(seed).all()) for data in uses)
            lease.release()
            if draw.random() < 0.8:
                lease.release(Event() if draw.random() < 0.3 else None)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert staging.nbytes <= 8 * SLAB


@pytest.mark.parametrize("seed", range(20))
def test_records_are_copied_together_where_they_lie_together(seed: int) -> None:
    draw, staging = random.Random(seed), StagingMemory(1 << 20, 1 << 18)
    lease, records = staging.lease(), dict[Any, torch.Tensor]()
    for number in range(draw.randrange(1, 12)):
        dtype = draw.choice([torch.uint8, torch.bfloat16, torch.float32])
        shape = (draw.randrange(1, 4), 2, draw.randrange(1, 40), 8)
        record = torch.randint(0, 100, shape).to(dtype)
        if draw.random() < 0.7:
            data = lease.take(record.nbytes)
            data.copy_(record.view(-1).view(torch.uint8))
            record = data.view(dtype).view(shape)
        records[number] = record
    copies = []

    def copied(data: torch.Tensor) -> torch.Tensor:
        assert data.dtype == torch.uint8 and data.dim() == 1
        copies.append(data.nbytes)
        return data.clone()

    moved = moved_together(records, copied)
    assert sorted(moved) == sorted(records)
    for key, record in records.items():
        assert moved[key].dtype == record.dtype and torch.equal(moved[key], record)
    storages = {record.untyped_storage().data_ptr() for record in records.values()}
    assert len(copies) <= len(storages) + 1
    assert sum(copies) <= sum(record.nbytes + PAGE for record in records.values())


class LateDevice(TorchFunctionMode):
    """A stream whose copies are made when it gets to them: who writes to their source before that is found out.

    Inside, tensors made with a device are the device's; `memory`'s slabs are pinned, and nothing else is.
    """

    def __init__(self, memory: StagingMemory) -> None:
        super().__init__()
        self.memory = memory
        self.waiting: deque[Callable[[], object]] = deque()
        self.done = self.started = self.blocking = 0
        self.slabs = set[int]()  # where they begin
        self._own: list[torch.Tensor] = []
        take, self.kept = memory.slab, list[torch.Tensor]()

        def slab() -> torch.Tensor | None:
            found = take()
            if found is not None:
                self.slabs.add(found.untyped_storage().data_ptr())
                self.kept.append(found)  # so that nothing else gets its address
            return found

        memory.slab = slab  # type: ignore[method-assign]

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(call, "__name__", "")
        if name == "is_pinned":
            return place_of(args[0]) in self.slabs
        if name == "to" and kwargs.get("non_blocking"):
            target = torch.empty_like(args[0])
            self._start(lambda: target.copy_(args[0]))
            return target
        if name == "copy_" and kwargs.pop("non_blocking", False):
            self._start(lambda: args[0].copy_(args[1]))
            return args[0]
        if name == "copy_" and place_of(args[0]) in {place_of(each) for each in self._own}:
            self.blocking += 1
            self.advance(len(self.waiting))
        result = call(*args, **kwargs)
        if kwargs.get("device") is not None and len(result):  # an empty one is given other memory
            self._own.append(result)
        return result

    def _start(self, copy: Callable[[], object]) -> None:
        self.waiting.append(copy)
        self.started += 1

    def advance(self, copies: int) -> None:
        for _ in range(min(copies, len(self.waiting))):
            with torch._C.DisableTorchFunction():
                self.waiting.popleft()()
            self.done += 1

    def now(self) -> "LateEvent":
        return LateEvent(self, self.started)


class LateEvent:
    def __init__(self, device: LateDevice, behind: int) -> None:
        self.device, self.behind = device, behind

    def query(self) -> bool:
        return self.device.done >= self.behind

    def synchronize(self) -> None:
        self.device.advance(self.behind - self.device.done)


Sent = list[tuple[torch.Tensor, torch.Tensor]]
"""Records on the device, and what they should be once all copies are made."""


def request(device: LateDevice, draw: random.Random, sent: Sent) -> Iterator[None]:
    """Reads up to two layers ahead of the one it sends; a store's records lie in staging or in ordinary memory."""
    ahead = deque[tuple[Lease, dict[int, torch.Tensor]]]()
    for _ in range(draw.randrange(2, 7)):
        lease, records = device.memory.lease(), dict[int, torch.Tensor]()
        for number in range(draw.randrange(1, 5)):
            size = draw.choice([100, PAGE, SLAB // 3, SLAB // 2, SLAB, SLAB + 5, 2 * SLAB + 7])
            content = torch.randint(0, 256, (size,), dtype=torch.uint8)
            records[number] = lease.take(size).copy_(content) if draw.random() < 0.6 else content
        ahead.append((lease, records))
        yield
        while len(ahead) > draw.randrange(3):
            yield from _send(device, *ahead.popleft(), sent)
    while ahead:
        yield from _send(device, *ahead.popleft(), sent)


def _send(device: LateDevice, lease: Lease, records: dict[int, torch.Tensor], sent: Sent) -> Iterator[None]:
    expected = {number: record.clone() for number, record in records.items()}
    with _ThroughSlabs(device.memory, torch.device("cpu"), device.now) as slabs:
        moved = moved_together(records, slabs.copied)
    sent += [(moved[number], expected[number]) for number in records]
    lease.release(device.now())
    device.memory.hold(device.now(), list(records.values()))  # as `Staging.hold`
    yield


@pytest.mark.parametrize("seed", range(60))
def test_two_requests_share_two_slabs_and_each_gets_its_own_records(seed: int) -> None:
    draw, sent = random.Random(seed), list[tuple[torch.Tensor, torch.Tensor]]()
    torch.manual_seed(seed)
    with LateDevice(memory(2)) as device:
        running = [request(device, draw, sent) for _ in range(2)]
        while running:
            each = draw.choice(running)
            if next(each, "done") == "done":
                running.remove(each)
            device.advance(draw.choice([0, 0, 1, 4]))
            assert device.memory.nbytes <= 2 * SLAB
        device.advance(len(device.waiting))
    assert len(sent) > 5 and all(torch.equal(found, expected) for found, expected in sent)


def test_only_slabs_are_pinned_through_which_ordinary_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with LateDevice(memory(2)) as device:
        data = torch.randint(0, 256, (5 * SLAB // 2,), dtype=torch.uint8)
        with _ThroughSlabs(device.memory, torch.device("cpu"), device.now) as slabs:
            found = slabs.copied(data)
        assert device.started == 3 and device.done == 1, "the third part waits for the first part's copy alone"
        held = [device.memory.lease() for _ in range(2)]
        device.advance(3)
        for lease in held:
            lease.take(SLAB)  # a reader fills it: nobody may wait for that
        with _ThroughSlabs(device.memory, torch.device("cpu"), device.now) as slabs:
            again = slabs.copied(data)
        assert device.blocking == 3 and device.started == 3
        device.advance(9)
    assert torch.equal(found, data) and torch.equal(again, data)
    made = list[tuple[int, bool]]()  # only slabs are pinned

    def aligned(nbytes: int, pinned: bool) -> torch.Tensor:
        made.append((nbytes, pinned))
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(staging_module, "_aligned", aligned)
    shared = StagingMemory(2 * SLAB, SLAB, pinned=True)
    leases = [shared.lease() for _ in range(4)]
    for lease in leases:
        for size in (SLAB, 10, 3 * SLAB):
            assert lease.take(size).nbytes == size
    assert sum(nbytes for nbytes, pinned in made if pinned) == 2 * SLAB == shared.nbytes
    assert len(made) == 12
