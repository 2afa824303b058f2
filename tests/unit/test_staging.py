"""Staging memory: slabs that are used again once nobody reads them, and copies that are made together."""

import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch

from cacheblend.core.load.staging import StagingMemory, moved_together

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


def test_memory_is_aligned_apart_and_of_the_right_size() -> None:
    lease = memory(2).lease()
    sizes = [1, 3, PAGE, PAGE + 1, 5, SLAB // 2, SLAB]
    taken = [lease.take(size) for size in sizes]
    for number, (data, size) in enumerate(zip(taken, sizes, strict=True)):
        assert data.dtype == torch.uint8 and data.shape == (size,) and data.data_ptr() % PAGE == 0
        data.fill_(number)
    assert all(bool(data.eq(number).all()) for number, data in enumerate(taken))


def test_slabs_are_used_again_and_the_last_one_first() -> None:
    staging = memory(4)
    first, second = staging.lease(), staging.lease()
    places = [place_of(lease.take(SLAB)) for lease in (first, second)]
    first.release()
    second.release()
    assert [place_of(staging.lease().take(10)) for _ in range(1)] == places[1:]
    assert staging.nbytes == SLAB  # the other one: a lease that is dropped takes its slab along
    assert place_of(staging.lease().take(10)) == places[0]


def test_slabs_go_back_once_every_part_has_been_used_up() -> None:
    staging = memory(1)
    lease = staging.lease(uses=3)
    place = place_of(lease.take(10))
    for _ in range(2):
        lease.release()
        other = staging.lease()
        assert place_of(other.take(10)) != place
        other.release()
    lease.release()
    assert place_of(staging.lease().take(10)) == place


def test_who_finds_no_slab_gets_other_memory_and_never_waits_for_the_host() -> None:
    staging = memory(2)
    lease = staging.lease()
    taken = [lease.take(SLAB) for _ in range(5)]
    assert len({place_of(data) for data in taken}) == 5 and staging.nbytes == 2 * SLAB
    assert lease.take(3 * SLAB).nbytes == 3 * SLAB  # larger than a slab
    assert staging.nbytes == 2 * SLAB


def test_who_reads_faster_than_the_device_copies_waits_for_the_oldest_copy() -> None:
    staging, events = memory(2), [Event(), Event()]
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


def test_a_slab_that_may_still_be_copied_is_not_used_while_another_can_be_made() -> None:
    staging, event = memory(2), Event()
    lease = staging.lease()
    place = place_of(lease.take(SLAB))
    lease.release(event)
    other = staging.lease()
    assert place_of(other.take(SLAB)) != place and event.waits == 0


def test_a_lease_that_is_dropped_does_not_give_its_slabs_to_others() -> None:
    """Something may still write to them, as a read that was given up."""
    staging = memory(1)
    taken = staging.lease().take(SLAB)
    gc.collect()
    assert staging.nbytes == 0
    assert place_of(staging.lease().take(SLAB)) != place_of(taken)


def test_a_slab_that_cannot_be_made_may_be_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = memory(1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError):
            staging.lease().take(1)
    assert staging.lease().take(1).nbytes == 1


def test_a_lease_may_be_dropped_while_the_memory_is_locked() -> None:
    """A garbage collection may run its finalizer anywhere, in the thread that holds the lock, too."""
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


def test_what_the_device_still_reads_is_kept_alive() -> None:
    staging, events = memory(1), [Event(), Event()]
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


def test_records_of_odd_sizes_are_copied_to_where_their_elements_may_lie() -> None:
    slab = torch.arange(3 * PAGE, dtype=torch.int64).to(torch.uint8)
    records = {
        "odd": slab[7:1008],
        "half": slab[1010:2010].view(torch.float16),
        "full": slab[2012:2412].view(torch.float32),
    }
    moved = moved_together(records, lambda data: data.clone())
    assert all(torch.equal(moved[key].view(torch.uint8), record.view(torch.uint8)) for key, record in records.items())


def test_threads_never_share_memory() -> None:
    staging, errors = memory(8), list[str]()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            lease, uses = staging.lease(uses=2), []
            for _ in range(draw.randrange(1, 6)):
                data = lease.take(draw.randrange(1, SLAB))
                data.fill_(seed)
                uses.append(data)
            if not all(bool(data.eq(seed).all()) for data in uses):
                errors.append(f"thread {seed}")
            lease.release()
            if draw.random() < 0.8:
                lease.release(Event() if draw.random() < 0.3 else None)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
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


def test_what_lies_between_records_is_not_copied() -> None:
    """Of a slab with several layers, one layer's records."""
    slab = torch.arange(64 * PAGE, dtype=torch.int64).to(torch.uint8)
    records = {at: slab[at * 16 * PAGE : at * 16 * PAGE + 100] for at in range(4)}
    copies = []
    moved = moved_together(records, lambda data: (copies.append(data.nbytes), data.clone())[1])
    assert copies == [100] * 4
    assert all(torch.equal(moved[at], records[at]) for at in records)
