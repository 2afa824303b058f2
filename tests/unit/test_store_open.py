"""From a URL to a store, and wrong URLs; where memory keeps records, page-locked or on a GPU, by stand-ins for CUDA."""

import errno
import gc
import mmap
import random
import re
import string
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError, StoreFullError
from cacheblend.core.names import root_name
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.store import DiskStore, MemoryStore, TieredStore, check_store_url, lasting_url, open_store, parse_bytes
from cacheblend.store.open import (
    CascadePlace,
    DevicePlace,
    FolderPlace,
    MemoryPlace,
    TieredPlace,
    existing_url,
    page_locking,
    parse_seconds,
    parse_store_url,
    shown_url,
)
from cacheblend.store.residence import OnDevice, PageLocked, _register, _unregister
from campaign import share
from store_blocks import before, holds, make_block, same_bits
from store_folders import disk, failing


def test_sizes_times_memory_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"0": 0, 17: 17, "8GiB": 8 << 30, "8 GB": 8 * 10**9, "1.5KiB": 1536, "500MB": 5 * 10**8, "2TiB": 2 << 40}
    assert {text: parse_bytes(text) for text in (*sizes, "12B")} == sizes | {"12B": 12}
    times = {"30d": 2592000, "12h": 43200, "1.5m": 90, "90 s": 90, "3600": 3600}
    assert {text: parse_seconds(text) for text in times} == times
    for text in ("", "GiB", "-1", "8 gigs", "8Gi B", "1e9"):
        with pytest.raises(InvalidInputError, match=r"is not a size: write e\.g\. 8GiB"):
            parse_bytes(text)
    # what is left of a store without the memory in front
    for url, lasting in (
        ("/kv", "/kv"),
        ("file:///a,b?ram_bytes=1GiB", "file:///a,b?ram_bytes=1GiB"),
        ("memory://?max_bytes=1GiB, file:///a?max_bytes=2GiB", "file:///a?max_bytes=2GiB"),
        ("cuda://?max_bytes=1GiB,memory://,file:///a,file:///b", "file:///a, file:///b"),
    ):
        assert lasting_url(url) == lasting
    for url in ("memory", "memory://", "memory://?max_bytes=1GiB", "cuda://?max_bytes=1GiB,memory://"):
        with pytest.raises(InvalidInputError, match=re.escape(f"the store {url!r} ends with this command")):
            lasting_url(url)
    with pytest.raises(InvalidInputError, match="has no option 'ttl'"):
        lasting_url("memory://?ttl=1d, file:///a")
    for url, there in (
        (f"file://{tmp_path}, file:///no/a", f"file://{tmp_path}"),
        ("no/a", "memory"),
        ("s3://a", "s3://a"),
    ):
        assert existing_url(url) == there
    for url in (None, "memory", "memory://"):  # memory, and folders
        store = open_store(url)
        assert isinstance(store, MemoryStore)
        assert 0 < store.max_bytes <= 4 << 30
    assert open_store("memory://?max_bytes=8GiB").stats().max_bytes == 8 << 30
    assert open_store("memory://?max_bytes=8GiB", max_bytes="1MiB").stats().max_bytes == 1 << 20
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (tmp_path / "a", str(tmp_path / "a"), f"file://{tmp_path}/a", "~/a"):
        with open_store(url) as store:
            assert isinstance(store, DiskStore)
            assert store.path == tmp_path / "a"
            assert store.stats().max_bytes == 50 << 30
    with open_store(f"file://{tmp_path}/b%20c?max_bytes=1GiB&ram_bytes=1MiB") as store:
        assert isinstance(store, TieredStore)
        assert [tier.max_bytes for tier in store.stats().tiers] == [1 << 20, 1 << 30]
        assert (tmp_path / "b c" / "cacheblend.json").exists()
    with open_store(tmp_path / "a", read_only=True) as store:
        assert isinstance(store, DiskStore)
        assert store.read_only
    with pytest.raises(InvalidInputError, match="'lots' is not a size"):  # arguments are checked with the URL
        check_store_url("memory", max_bytes="lots")
    with pytest.raises(InvalidInputError, match="no option 'ram_bytes'"):
        check_store_url("memory", ram_bytes="1GiB")
    with pytest.raises(InvalidInputError, match="a bound of its own"):
        open_store("file:///tmp/no-such-a,file:///tmp/no-such-b", max_bytes=1)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://localhost", "unknown scheme 'ftp'; use \"memory\""),
        ("gs://bucket/x", "unknown scheme 'gs'"),
        ("file:///no/a:/no/b", "names several folders; name one: disks side by side become one by LVM"),
        ("/no/a:~/b", "names several folders"),
        ("kvfoo?max_bytes=1MiB", "write file:///abs/path?max_bytes=1MiB"),
        ("./kvfoo?max_bytes=1MiB&ttl=3d", "write file:///abs/path?max_bytes=1MiB&ttl=3d"),
        ("memory?max_bytes=1MiB", "write memory://?max_bytes=1MiB"),
        *((url, "each needs a scheme") for url in ["memory,./kvx", "memory,memory", "memory,", "memory,,file:///x"]),
        *((url, "each needs a scheme") for url in ["file:///a,/b", "a,", ",", "memory,redis", "kv,redis", "./a, ./b"]),
        ("Memory", "looks like 'memory': write memory, or ./Memory for a folder of that name"),
        ("memroy", "looks like 'memory': write memory, or ./memroy"),
        (":memory:", "looks like 'memory': write memory, or ./:memory:"),
        (" memory ", "looks like 'memory': write memory, or ./memory"),
        ("memory//", "looks like 'memory'"),
        ("reddis", "looks like 'redis'"),
        ("valky", "looks like 'valkey'"),
        ("redis", "looks like 'redis': write redis://host:6379/0, or ./redis"),
        ("Redis//localhost", "looks like 'redis'"),
        ("s3", "looks like 's3': write s3://bucket/folder, or ./s3"),
        *((url, "without its two slashes") for url in ["S3:", "file:", "file:/x", "mem:", "redis:localhost"]),
        ("cuda", "looks like 'cuda': write cuda://?max_bytes=8GiB, or ./cuda"),
        ("file", "looks like 'file': write file:///folder, or ./file"),
        ("memroy, kv", "each needs a scheme"),
        ("s3://", "store 's3://' names no bucket"),
        ("s3:///folder", "store 's3:///folder' names no bucket"),
        ("memory://somewhere", "names a place in memory"),
        ("file://relative/path", "absolute path after three slashes"),
        ("file://", "three slashes"),
        ("", "empty store name"),
        ("~no-such-user/x", "home folder of a user who is not known"),
        ("memory://?ram_bytes=1", "memory store has no option 'ram_bytes'; it has max_bytes"),
        (
            "file:///tmp/no-such-cacheblend-store?max_byte=1",
            "no option 'max_byte'; it has max_bytes, ram_bytes, ttl, evict",
        ),
        ("memory://?max_bytes=lots", "'lots' is not a size"),
        ("memory://?evict=fifo", "no eviction policy is called 'fifo'; there are lru, worth"),
        ("file:///tmp/no-such-cacheblend-store?evict=fifo", "no eviction policy is called 'fifo'"),
        ("file:///tmp/no-such-cacheblend-store?max_bytes=0", "max_bytes must be above 0"),
        ("file:///tmp/no-such-cacheblend-store?locks=yes", "locks must be true or false, got 'yes'"),
        ("file:///tmp/no-such-cacheblend-store:/tmp/no-such-cacheblend-store", "names several folders"),
        ("redis://user:secret@host:no/0", "store 'redis://host:no/0': the port must be a number from 1 to 65535"),
        ("redis://host:70000/0", "the port must be a number"),
        ("redis://host:6379/one", "the database must be a number, got 'one'"),
        ("s3://bucket/x?endpoint=localhost:9000", "endpoint must begin with http:// or https://"),
        ("s3://[bucket/x", "is not a URL"),
        ("file:///tmp/no-such-cacheblend-store,redis://host:no", "the port must be a number"),
        ("cuda://", "a cuda store needs a bound, since models need the GPU's memory: cuda://?max_bytes=8GiB"),
        *((f"cuda://{gpu}?max_bytes=1GiB", "must name a GPU by its number") for gpu in ("a", "0/folder", "-1")),
        ("cuda://?max_bytes=1GiB&ram_bytes=1", "no option 'ram_bytes'"),
        ("cuda://?max_bytes=1GiB&ttl=1h, file:///a", "in front of other stores has no option 'ttl'"),
        ("file:///a, cuda://?max_bytes=1GiB", "cuda:// can only stand in front"),
        ("memory://, cuda://?max_bytes=1GiB", "cuda:// can only stand in front"),
        ("cuda://?max_bytes=1, cuda://1?max_bytes=1, file:///a", "cuda:// can only stand in front"),
        ("cuda://?max_bytes=1, file:///a, memory://", "memory:// can only stand in front"),
        ("memory://, memory://", "memory:// can only stand in front"),
        ("memory://?page_locked=yes", "page_locked must be true or false"),
        ("cuda://?max_bytes=1GiB&page_locked=true", "no option 'page_locked'"),
        ("file:///a?page_locked=true", "set ram_bytes, too"),
        ("file:///a?ram_bytes=1KiB&page_locked=1", "page_locked must be true or false"),
        ("file:///tmp/no-such-a,memory://", "only stand in front"),
        ("file:///tmp/no-such-a,gs://b", "unknown scheme 'gs'"),
        ("redis://", "names no server"),
        ("redis://:pa#ss@host/0", "the redis store's URL has a #, behind which nothing is read; write it as %23"),
        ("file:///tmp/no-such-cacheblend-store#1?max_bytes=1GiB", "has a #"),
        ("memory://?max_bytes=1GiB#", "has a #"),
        ("redis://h:1/0?timeout=-1", "timeout must be a number of seconds above 0, got '-1'"),
        ("redis://h:1/0?timeout=x", "timeout must be"),
        ("redis://h:1/0?cluster=1", "cluster must be true or false, got '1'"),
        ("redis://h:1/0?evict=1", "no option 'evict'; it has max_bytes, ram_bytes, ttl, prefix, timeout, cluster"),
        ("s3://b/x?prefix=y", "no option 'prefix'; it has max_bytes, ram_bytes, ttl, timeout, endpoint, region"),
        ("s3://b/x?timeout=0", "timeout must be a number of seconds above 0"),
        *((f"memory://?ttl={s}", "not a time to live") for s in ("", "d", "-1", "0", "0s", "3 days", "nan", "inf")),
        *((f"file:///tmp/no-such-a?mode={text}", "octal") for text in ("0", "0444", "9", "rw", "0o600", "01777")),
    ],
)
def test_what_cannot_be_opened(url: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for reports in (open_store, check_store_url):
        with pytest.raises(InvalidInputError) as caught:
            reports(url)
        assert message in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert not Path("/tmp/no-such-cacheblend-store").exists()


@pytest.mark.parametrize(
    "url",
    [
        None,
        "memory",
        "memory://?max_bytes=8GiB&ttl=1h&evict=worth",
        "{folder}",
        "file://{folder}?max_bytes=1GiB&ram_bytes=1MiB&locks=false&evict=worth",
        "redis://user:secret@no-such-host:6379/3?prefix=x&timeout=0.5&cluster=true",
        "valkey://no-such-host",
        "s3://no-such-bucket/folder?endpoint=https://no-such-host&region=eu-central-1",
        "memory://?max_bytes=8MiB, file://{folder}, s3://no-such-bucket/folder",
    ],
)
def test_checking_a_url_opens_nothing(url: str | None, tmp_path: Path) -> None:
    check_store_url(url and url.format(folder=tmp_path / "store"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("cuda://?max_bytes=1GiB", DevicePlace(1 << 30)),
        ("cuda://3?max_bytes=1GiB&ttl=1h&evict=worth", DevicePlace(1 << 30, 3, 3600.0, "worth")),
        ("memory://?page_locked=true", MemoryPlace(page_locked=True)),
        ("cuda://?max_bytes=1KiB, memory://?max_bytes=2KiB", TieredPlace(DevicePlace(1024), MemoryPlace(2048))),
        (
            "cuda://1?max_bytes=1KiB, memory://?max_bytes=2KiB&page_locked=true, file:///a, file:///b",
            TieredPlace(
                DevicePlace(1024, 1),
                TieredPlace(
                    MemoryPlace(2048, page_locked=True),
                    CascadePlace((FolderPlace(Path("/a")), FolderPlace(Path("/b")))),
                ),
            ),
        ),
        (
            "file:///a?ram_bytes=1KiB&page_locked=true",
            TieredPlace(MemoryPlace(1024, page_locked=True), FolderPlace(Path("/a"))),
        ),
        ("cuda://?max_bytes=1KiB, file:///a", TieredPlace(DevicePlace(1024), FolderPlace(Path("/a")))),
    ],
)
def test_urls_name_places(url: str, place: object) -> None:
    assert parse_store_url(url) == place


LOCKED = {"page_locked": True, "is_lock_required": False}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        (None, MemoryPlace(**LOCKED)),
        ("memory://?page_locked=false", MemoryPlace(page_locked=False)),
        ("memory://?page_locked=true", MemoryPlace(page_locked=True)),
        ("file:///a", FolderPlace(Path("/a"))),
        ("file:///a?ram_bytes=1KiB", TieredPlace(MemoryPlace(1024, **LOCKED), FolderPlace(Path("/a")))),
        (
            "cuda://?max_bytes=1KiB, memory://?max_bytes=2KiB, file:///a",
            TieredPlace(DevicePlace(1024), TieredPlace(MemoryPlace(2048, **LOCKED), FolderPlace(Path("/a")))),
        ),
    ],
)
def test_an_engine_on_a_gpu_locks_memory_of_which_nothing_else_is_said(url: str | None, place: object) -> None:
    assert page_locking(parse_store_url(url)) == place


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_message_says_so() -> None:
    with open_store("memory://?page_locked=false", page_locked=True) as store:
        assert not isinstance(store, TieredStore)
    with pytest.raises(InvalidInputError, match="needs a GPU"):
        open_store("memory", page_locked=True)
    for url in ("cuda://?max_bytes=1GiB", "cuda://2?max_bytes=1GiB", "memory://?page_locked=true"):
        with pytest.raises(InvalidInputError, match=r"there are 0 GPUs here|needs a GPU, and there is none"):
            open_store(url)


def test_folders_named_like_a_scheme_or_with_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a,", "memory,b", "memory,"):
        (tmp_path / name).mkdir()
        for url in (name, f"file://{tmp_path}/{name}"):
            check_store_url(url)
    check_store_url("a,b")
    check_store_url("./Memory")
    check_store_url("./mem:")
    check_store_url(tmp_path / "kv?max_bytes=1")
    # names that are not like a scheme
    for name in ("kv", "store", "cache", "cude", "files", "tile", "kv3", "s4", "mem", "memories", "reads"):
        check_store_url(name)
    monkeypatch.chdir(tmp_path)  # a store that is there under the name of a scheme opens
    (tmp_path / "redis").mkdir()
    with pytest.raises(InvalidInputError, match=r"or \./redis for a folder"):
        open_store("redis")
    open_store("./redis").close()
    with open_store("redis") as store:
        assert isinstance(store, DiskStore) and store.path == tmp_path / "redis"


@settings(deadline=None)
@given(st.sampled_from(["memory", "redis", "rediss", "valkey"]), st.data())
def test_a_typo_of_a_scheme_is_no_folder(scheme: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(scheme) - 1))
    letter = data.draw(st.sampled_from(string.ascii_letters))
    before, after = scheme[:at], scheme[at:]
    typos = [before + after[1:], before + letter + after, before + letter + after[1:]]
    if len(after) > 1:
        typos.append(before + after[1] + after[0] + after[2:])
    typo = data.draw(st.sampled_from(typos))
    if typo != "memory":
        with pytest.raises(InvalidInputError, match=re.escape(f"or ./{typo} for a folder of that name")):
            check_store_url(typo)
    for form in ("./{}", "/{}", "~/{}", "{}/", "kv/{}", "my-{}", "{}2", "{}-kv"):
        check_store_url(form.format(typo))
    check_store_url(Path(typo))


def test_relative_folders_stay_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = make_block(1)
    for name in ("kv2", "./kv3", "a/../kv4"):
        with open_store(name) as store:
            elsewhere = tmp_path / f"elsewhere-{Path(name).name}"
            elsewhere.mkdir()
            monkeypatch.chdir(elsewhere)
            store.write(block)
            assert holds(store, block)
            with store.documents.changing(root_name("a model", "bfloat16")):
                pass
            assert not list(elsewhere.iterdir())
        monkeypatch.chdir(tmp_path)
        with open_store(tmp_path / Path(name).name) as store:
            assert holds(store, block)
    (tmp_path / "gone").mkdir()  # no current folder
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match="kv is relative, and the current folder is gone: name the whole path"):
        open_store("kv")
    monkeypatch.chdir(tmp_path)


PAGE = 4096


class Locks:
    """What CUDA would have locked: bytes by address."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.held: dict[int, int] = {}
        self.most = most
        self.times = 0

    def lock(self, address: int, nbytes: int) -> None:
        if nbytes + sum(self.held.values()) > self.most:
            raise torch.OutOfMemoryError(f"{nbytes} bytes cannot be locked")
        assert address % PAGE == 0 and nbytes % PAGE == 0 and nbytes
        assert all(address + nbytes <= at or at + n <= address for at, n in self.held.items()), "pages are shared"
        self.held[address] = nbytes
        self.times += 1

    def unlock(self, address: int) -> None:
        assert is_mapped(address), "memory was unmapped before it was unlocked"
        del self.held[address]

    def covers(self, record: torch.Tensor) -> bool:
        return any(
            at <= record.data_ptr() and record.data_ptr() + record.nbytes <= at + n for at, n in self.held.items()
        )


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)


class NoRoom(OnDevice):
    """A device that is full after some records."""

    def __init__(self, room: int) -> None:
        super().__init__(torch.device("cpu"))
        self.room = room

    def keep(self, records: Any) -> Any:
        self.room -= len(records)
        return None if self.room < 0 else super().keep(records)


def locked(locks: Locks, max_bytes: int = 1 << 24, **options: Any) -> MemoryStore:
    return MemoryStore(max_bytes, residence=PageLocked(locks.lock, locks.unlock, **options))


def test_a_block_lies_in_locked_memory_of_its_own_which_stays_locked_for_the_next_of_its_size() -> None:
    locks = Locks()
    store = locked(locks)
    blocks = [make_block(seed, tokens) for seed, tokens in enumerate((5, 64, 300))]
    for block in blocks:
        assert store.write(block) and holds(store, block)
    assert len(locks.held) == 3
    record = store.read(blocks[1].name, 2)
    assert locks.covers(record)
    for block in blocks:
        store.delete(block.name)
    gc.collect()
    assert len(locks.held) == 1 and locks.covers(record)
    assert same_bits(record, blocks[1].records[2])
    del record
    gc.collect()
    assert not locks.held
    # memory that became free stays locked for the next records of its size
    locks, blocks = Locks(), [make_block(seed) for seed in range(8)]
    nbytes = PageLocked(locks.lock, locks.unlock).taken(blocks[0].records)
    store = locked(locks, 2 * nbytes, spare_bytes=1 << 20)
    for block in blocks:  # evicts those before
        store.write(block)
        gc.collect()
    assert len(locks.held) <= 3 and locks.times == len(locks.held)
    assert all(holds(store, block) for block in blocks[-2:])
    locks = Locks()
    store, read = locked(locks, nbytes, spare_bytes=1 << 20), list[torch.Tensor]()
    for block in blocks:  # what is read is not given to others before it is dropped
        store.write(block)
        read.append(store.read(block.name, 1))
        gc.collect()
    assert all(same_bits(record, block.records[1]) for record, block in zip(read, blocks, strict=True))
    read.clear()
    gc.collect()
    assert sum(locks.held.values()) <= (1 << 20) + 2 * PAGE * 64
    locks, most = Locks(), 4 * PAGE
    store = locked(locks, spare_bytes=most)  # what is spare is bounded
    for seed, tokens in enumerate((5, 64, 300, 300, 5)):
        store.write(make_block(seed, tokens))
    store.close()
    gc.collect()
    assert sum(locks.held.values()) <= most


def test_memory_that_cannot_be_locked_is_a_full_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks, block = Locks(most=0), make_block(1)
    with pytest.raises(StoreFullError, match="no memory left"):
        locked(locks).write(block)
    with TieredStore(locked(locks), disk(tmp_path)) as store:
        assert store.write(block)
        store.find([block.name])
        for _ in range(2):
            assert all(same_bits(store.read(block.name, layer), block.records[layer]) for layer in range(3))
    ordinary = locked(locks, is_required=False)  # locking that was not asked for gives way to ordinary memory
    for each in [make_block(seed) for seed in range(3)]:
        assert ordinary.write(each) and holds(ordinary, each)
    assert not locks.held
    monkeypatch.setattr("mmap.mmap", failing(errno.ENOMEM, lambda *_, **__: True, mmap.mmap))
    with pytest.raises(StoreFullError, match="no memory left"):  # what the system does not map is no memory
        locked(Locks()).write(block)


@pytest.mark.parametrize("spare_bytes", [0, 4 * PAGE, 1 << 20])
def test_nothing_stays_locked_behind_a_store(spare_bytes: int) -> None:
    """Memory that is unmapped while it is locked makes CUDA refuse the next of its address: here `Locks.lock` does."""
    locks = Locks()
    for round_ in range(4):
        store = locked(locks, spare_bytes=spare_bytes)
        blocks = [make_block(seed + 7 * round_, 5) for seed in range(7)]
        for block in blocks:
            assert store.write(block)
        record = store.read(blocks[3].name, 1)
        if round_ % 2:
            store.close()
        del store
        gc.collect()
        assert locks.covers(record) and same_bits(record, blocks[3].records[1])
        del record
        gc.collect()
        assert not locks.held


def test_cuda_refuses_to_lock_or_unlock(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    locks, blocks, refused = Locks(), [make_block(seed) for seed in range(4)], [True, False, True, False]

    def lock(address: int, nbytes: int) -> None:
        if refused.pop():
            raise RuntimeError("CUDA error 712")
        locks.lock(address, nbytes)

    residence = PageLocked(lock, locks.unlock)
    store = MemoryStore(1 << 24, residence=residence)
    for block in blocks:
        assert store.write(block) and holds(store, block)
    assert [locks.covers(store.read(block.name, 0)) for block in blocks] == [True, False, True, False]
    assert residence.not_locked == 2 and caplog.text.count("cannot be page-locked") == 1
    locks, stuck = Locks(), list[Any]()
    monkeypatch.setattr("cacheblend.store.residence._stuck", stuck)

    def unlock(address: int) -> None:
        raise RuntimeError("CUDA error 713")

    store = MemoryStore(1 << 24, residence=PageLocked(locks.lock, unlock))
    store.write(make_block(1))
    store.close()
    gc.collect()
    assert len(stuck) == 1 and all(map(is_mapped, locks.held))


class Driver:
    """CUDA's runtime, as torch gives it: each call fails with an error that is then also the thread's last."""

    def __init__(self, code: int) -> None:
        self.code, self.last = code, 0

    def fail(self, *_: int) -> int:
        self.last = self.code
        return self.code

    def arange(self, *_: object, **__: object) -> None:
        last, self.last = self.last, 0
        if last:
            raise RuntimeError(f"CUDA error: {last}")


@pytest.mark.parametrize(
    ("code", "kind"), [(2, torch.OutOfMemoryError), (304, torch.OutOfMemoryError), (712, RuntimeError)]
)
def test_a_failed_lock_leaves_no_error(code: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(code)
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=driver.fail, cudaHostUnregister=driver.fail)
    )
    monkeypatch.setattr(torch, "arange", driver.arange)
    with pytest.raises(RuntimeError) as refused:
        _register(PAGE, PAGE)
    assert refused.type is kind and not driver.last
    with pytest.raises(RuntimeError):
        _unregister(PAGE)
    assert not driver.last


FRONTS: dict[str, Callable[[int, random.Random], MemoryStore]] = {
    "here": lambda bound, draw: MemoryStore(bound),
    "locked": lambda bound, draw: locked(Locks(), bound),
    "device": lambda bound, draw: MemoryStore(bound, residence=OnDevice(torch.device("cpu"))),
    "full device": lambda bound, draw: MemoryStore(bound, residence=NoRoom(draw.randrange(12))),
}


HEADS = [None, *(slice(first, last) for first, last in ((0, 2), (2, 4), (1, 3), (None, 2), (0, 4), (3, 4)))]
numbers = st.lists(st.integers(0, 3), min_size=1, unique=True)
reads = st.tuples(
    st.just("read"),
    numbers,
    st.sampled_from([range(1), range(1, 2), range(2)]),
    st.sampled_from(HEADS),
    st.booleans(),
)
others = st.tuples(st.sampled_from(["find", "write", "delete", "prune", "lose"]), numbers)


class EndlessFront:
    """The model of a front that has room for everything.

    Attributes:
        there: blocks that the back has.
        found: those that a look-up found, whose whole records are kept.
        kept: of a block and a layer the heads that it answers for; None: all.
    """

    def __init__(self) -> None:
        self.there, self.found = {*range(4)}, set[int]()
        self.kept: dict[tuple[int, int], set[tuple[int, int] | None]] = defaultdict(set)

    def read(self, number: int, layers: range, heads: slice | None) -> bool:
        """Whether the back is asked."""
        form = None if heads is None else (heads.start or 0, heads.stop)
        if all(self.kept[number, layer] & {None, form} for layer in layers):
            return False
        if number in self.there and (form is not None or number in self.found):
            for layer in layers:  # of a block that was found all heads are known to be all
                self.kept[number, layer].add(None if number in self.found and form == (0, 4) else form)
        return True

    def find(self, number: int) -> None:
        self.found.discard(number)
        if number in self.there:
            self.found.add(number)

    def write(self, number: int) -> None:
        self.there.add(number)
        for layer in range(2):
            self.kept[number, layer].add(None)

    def lose(self, number: int) -> None:
        self.there.discard(number)

    def delete(self, number: int) -> None:
        self.lose(number)
        self.found.discard(number)
        for layer in range(2):
            self.kept[number, layer].clear()


@pytest.mark.parametrize("kind", FRONTS)
@settings(max_examples=share(200))
@given(st.lists(reads | others, max_size=40), st.integers(0, 4) | st.none(), st.randoms())
def test_any_reads_of_any_heads_give_the_stored_bits_within_the_bound(
    kind: str, tmp_path_factory: pytest.TempPathFactory, taken: list[Any], room: int | None, draw: random.Random
) -> None:
    """Nothing that is kept is in the reader's memory, which is overwritten after each read, as slabs are; and what is
    kept is not read again."""
    blocks = [make_block(number, tokens, [LayerShape(4, 4)] * 2) for number, tokens in enumerate((5, 5, 5, 40))]
    number_of = {block.name: number for number, block in enumerate(blocks)}
    bound = 1 << 30 if room is None else room * blocks[0].layout.block_bytes(5) * 3 // 4
    front, model, asked, slabs = FRONTS[kind](bound, draw), EndlessFront(), list[int](), list[torch.Tensor]()
    tier = "cuda" if "device" in kind else "memory"

    def memory(nbytes: int) -> torch.Tensor:
        slabs.append(torch.empty(nbytes, dtype=torch.uint8))
        return slabs[-1]

    with TieredStore(front, disk(tmp_path_factory.mktemp("back"))) as store:
        store.back.write_all(blocks)
        assert store.tier_names == (tier, "disk")
        before(store.back, "read_layers", lambda names, *_: asked.extend(number_of[name] for name in names))
        for action, chosen, *how in taken:
            names = [blocks[number].name for number in chosen]
            if action == "read":
                layers, heads, has_memory = how
                asked.clear()
                read = store.read_layers(names, layers, heads, memory if has_memory else None)
                expected = [number for number in chosen if model.read(number, layers, heads)]
                assert sorted(asked) == sorted(expected) or room is not None or kind == "full device"
                for number, records in zip(chosen, read, strict=True):
                    if isinstance(records, list):
                        for layer, record in zip(layers, records, strict=True):
                            assert same_bits(record, blocks[number].records[layer][heads or slice(None)])
                    else:
                        assert number not in model.there
                for slab in slabs:
                    slab.fill_(255)
                slabs.clear()
            elif action == "find":
                found = [entry is not None for entry in store.find(names)]
                assert found == [number in model.there for number in chosen]
            elif action == "write":
                store.write_all([blocks[number] for number in chosen])
            elif action == "delete":
                for name in names:
                    store.delete(name)
                assert all(isinstance(each, BlockLostError) for each in store.read_layers(names, range(1), slice(2, 4)))
            elif action == "lose":
                for name in names:
                    store.back.delete(name)  # by another process
            else:
                front.prune(front.max_bytes // 2)
            for number in chosen if action not in ("read", "prune") else ():
                getattr(model, action)(number)
            assert front.stats().bytes <= front.max_bytes and front.stats().tier == tier
            held = sum(part.nbytes for each in front._held.values() for part in each.records if part is not None)
            assert held == front.stats().bytes or kind == "locked"  # whose pages count whole


@pytest.mark.parametrize("max_bytes", [0, 1 << 30])
def test_what_is_not_kept_is_read_into_the_readers_memory(max_bytes: int, tmp_path: Path) -> None:
    """Blocks that nobody looked for, and all of them in front of which nothing is kept."""
    blocks, taken = [make_block(number) for number in range(4)], list[int]()

    def memory(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    with TieredStore(MemoryStore(max_bytes), disk(tmp_path)) as store:
        for block in blocks:
            store.back.write(block)
        store.find([block.name for block in blocks[:2]])
        store.read_layers([block.name for block in blocks], range(3), None, memory)
    record = blocks[0].records[0].nbytes
    assert sum(taken) == (12 if not max_bytes else 6) * record


def test_locked_pages_count_whole_and_the_least_used_blocks_go(caplog: pytest.LogCaptureFixture) -> None:
    blocks = [make_block(seed, 5) for seed in range(6)]
    taken = PageLocked(Locks().lock, Locks().unlock).taken(blocks[0].records)
    assert taken % PAGE == 0 and taken >= sum(record.nbytes for record in blocks[0].records)
    store = locked(Locks(), max_bytes=3 * taken)
    for block in blocks:
        store.write(block)
    assert [store.held([block.name])[0] for block in blocks] == [False] * 3 + [True] * 3
    short = locked(Locks(most=2 * taken), max_bytes=100 * taken)
    for block in blocks:
        store.read_layers([], range(1))
        assert short.write(block)
        gc.collect()
    assert [short.held([block.name])[0] for block in blocks] == [False] * 4 + [True] * 2
    assert all(holds(short, block) for block in blocks[-2:])
    assert len([record for record in caplog.records if "cannot be page-locked" in record.message]) == 1


def test_a_url_is_shown_without_users_and_passwords() -> None:
    shown = shown_url("redis://:x@h, s3://bucket/a@b, file:///a@b")
    assert shown == "redis://h, s3://bucket/a@b, file:///a@b"
    assert shown_url("redis://me:secret@host:1/0?prefix=a@b") == "redis://host:1/0?prefix=a@b"
    assert shown_url("redis://me:sec,ret@host, redis://:x@h, file:///a") == "redis://host, redis://h, file:///a"


def test_page_locked_memory_behind_several_stores_and_of_a_command_that_opens_none() -> None:
    place = page_locking(parse_store_url("file:///a?ram_bytes=1KiB, file:///b"))
    assert place == CascadePlace(
        (
            TieredPlace(MemoryPlace(1024, page_locked=True, is_lock_required=False), FolderPlace(Path("/a"))),
            FolderPlace(Path("/b")),
        )
    )
    own = "file:///a?ram_bytes=1KiB&page_locked=true"
    assert parse_store_url(own, ram_bytes=0) == FolderPlace(Path("/a"))
