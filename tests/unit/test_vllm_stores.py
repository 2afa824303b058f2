"""Which tiers of a store lie in which of vLLM's processes. A CPU stands in for the ranks' devices."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.engines.vllm.stores import check_device, device_bytes, shared_store
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend.store.open import DevicePlace
from cacheblend.store.residence import OnDevice
from store_blocks import make_block, same_bits

SHAPES = (LayerShape(4, 4),) * 3
LAYERS = range(len(SHAPES))


class Device(OnDevice):
    """A CPU, with room for as many records as are left."""

    room = 1 << 30

    def keep(self, records: Any) -> Any:
        Device.room -= len(records)
        return None if Device.room < 0 else super().keep(records)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def open_there(place: DevicePlace, read_only: bool = False) -> MemoryStore:
        return MemoryStore(place.max_bytes, residence=Device(torch.device("cpu")))

    monkeypatch.setattr(DevicePlace, "open", open_there)
    monkeypatch.setattr(Device, "room", 1 << 30)
    yield


def opened(url: str, process: str, *, looks_up: bool = False, is_one: bool = False) -> KVStore:
    """The store of a process; processes of one engine stand here side by side, so each has a name."""
    return shared_store(url, process, is_one_process=is_one, looks_up=looks_up)


def test_one_process_has_one_store_with_all_tiers(tmp_path: Path) -> None:
    url = f"cuda://?max_bytes=1MiB, memory://?max_bytes=2MiB, file://{tmp_path}"
    with opened(url, "engine", looks_up=True, is_one=True) as store:
        assert opened(url, "engine", is_one=True) is store
        assert opened(url, "another engine", is_one=True) is not store
        assert store.tier_names == ("cuda", "memory", "disk")
        block = make_block(1)
        assert store.write(block)
        (entry,) = store.find([block.name])
        assert entry is not None and entry.tier == "cuda"


@pytest.mark.parametrize("seed", range(8))
def test_ranks_keep_their_heads_on_their_devices_and_the_scheduler_looks_up_without_one(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    memory = draw.choice(["", "memory://?max_bytes=2KiB, "])
    max_bytes = draw.choice([0, 500, 3000, 1 << 20])
    monkeypatch.setattr(Device, "room", draw.choice([1 << 30, draw.randrange(20)]))
    url = f"cuda://?max_bytes={max_bytes}, {memory}file://{tmp_path}"
    scheduler, ranks = opened(url, "s", looks_up=True), [opened(url, f"r{rank}") for rank in range(2)]
    assert "cuda" not in scheduler.tier_names
    fronts = []
    for store in ranks:
        assert isinstance(store, TieredStore) and store.tier_names[0] == "cuda"
        fronts.append(store.front)
    blocks = [make_block(number, draw.choice([5, 20]), SHAPES) for number in range(6)]
    for block in blocks:
        ranks[0].write(block)
    assert all(front.stats().bytes == 0 for front in fronts), (
        "whole records would take the room of several ranks' heads"
    )
    for _ in range(10):
        if draw.random() < 0.2:
            ranks[1].drop_copies()
            assert fronts[1].stats().bytes == 0
        asked = draw.sample(blocks, draw.randrange(1, 6))
        names = [block.name for block in asked]
        assert all(entry is not None and entry.tier in ("memory", "disk") for entry in scheduler.find(names))
        for rank, heads in enumerate((slice(0, 2), slice(2, 4))):
            for block, read in zip(asked, ranks[rank].read_layers(names, LAYERS, heads), strict=True):
                assert isinstance(read, list)
                assert all(same_bits(near, far[heads]) for near, far in zip(read, block.records, strict=True))
        assert all(front.stats().bytes <= max_bytes for front in fronts)
    for store in (*ranks, scheduler):
        store.close()


def test_what_a_rank_has_read_is_not_read_again_and_after_a_reset_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, block, heads = f"cuda://?max_bytes=1MiB, file://{tmp_path}", make_block(3, 9, SHAPES), slice(2, 4)
    with opened(url, "rank") as store:
        store.write(block)
        reads, real = [], DiskStore.read_layers

        def read_layers(self: DiskStore, *arguments: Any) -> Any:
            reads.append(arguments)
            return real(self, *arguments)

        monkeypatch.setattr(DiskStore, "read_layers", read_layers)
        for times in (1, 1, 1):
            store.read_layers([block.name], LAYERS, heads)
            assert len(reads) == times
        store.drop_copies()
        assert store.held([block.name]) == [True]
        (read,) = store.read_layers([block.name], LAYERS, heads)
        assert len(reads) == 2 and isinstance(read, list) and same_bits(read[1], block.records[1][heads])


def test_dropping_copies_loses_no_store_its_blocks(tmp_path: Path) -> None:
    """Memory alone is no copy; in front of a folder it is, wherever in the order of tiers."""
    block = make_block(4)
    for number, url in enumerate(
        ["memory", "memory://, file://{}", "file://{}", "memory://, file://{}/a, file://{}/b"]
    ):
        with opened(url.replace("{}", str(tmp_path / str(number))), "e", is_one=True) as store:
            store.write(block)
            store.drop_copies()
            assert store.held([block.name]) == [True]
            if isinstance(store, TieredStore):
                assert store.front.stats().bytes == 0


@pytest.mark.parametrize("behind", ["memory", "memory://?max_bytes=1MiB"])
def test_memory_alone_is_of_one_process(behind: str, tmp_path: Path) -> None:
    with opened(f"memory://?max_bytes=1MiB, file://{tmp_path}", "rank") as store:
        assert store.tier_names == ("memory", "disk"), "in front of a folder it is of each process, as ram_bytes is"
    for url in (behind, f"cuda://?max_bytes=1MiB, {behind if '://' in behind else 'memory://'}"):
        with pytest.raises(InvalidInputError, match=r"memory of one process.*use a folder"):
            opened(url, "rank")
        with opened(url, "engine", is_one=True) as store:
            assert store.tier_names[-1] == "memory"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("cuda://1?max_bytes=1GiB, file:///a", "names the GPU 1.*each rank keeps records on its own.*without a number"),
        ("cuda://0?max_bytes=1GiB, file:///a", "names the GPU 0"),
        ("cuda://?max_bytes=1GiB", "nothing behind.*add a store"),
        ("cuda://, file:///a", "needs a bound"),
        ("cuda://?max_bytes=lots, file:///a", "lots"),
        ("cuda://?max_bytes=-1, file:///a", "-1"),
        ("cuda://?max_bytes=1GiB&ttl=1h, file:///a", "no option 'ttl'"),
        ("file:///a, cuda://?max_bytes=1GiB", "can only stand in front"),
    ],
)
def test_a_url_that_cannot_be_served_is_refused_on_every_side_with_a_way_out(url: str, message: str) -> None:
    asked = [lambda: device_bytes(url), lambda: check_device(url, "cuda")]
    asked += [lambda one=one, up=up: opened(url, "e", is_one=one, looks_up=up) for one in (0, 1) for up in (0, 1)]  # type: ignore[misc]
    for ask in asked:
        with pytest.raises(InvalidInputError, match=message):
            ask()


def test_a_device_tier_is_what_each_rank_sets_aside_and_a_cpu_has_none() -> None:
    assert device_bytes("cuda://?max_bytes=3GiB, memory://?max_bytes=9GiB, file:///a?max_bytes=20GiB") == 3 << 30
    assert device_bytes("cuda://?max_bytes=0, file:///a") == device_bytes("memory") == device_bytes("file:///a") == 0
    url = "cuda://?max_bytes=1GiB, file:///a"
    check_device(url, "cuda")
    check_device("file:///a?ram_bytes=1GiB", "cpu")
    with pytest.raises(InvalidInputError, match=r"cuda://\?max_bytes=1GiB.*on a CPU: leave cuda:// out; ram_bytes"):
        check_device(url, "cpu")
