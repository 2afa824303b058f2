"""From a URL to a store, and wrong URLs."""

import re
import string
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.core.names import root_name
from cacheblend.store import (
    DiskStore,
    MemoryStore,
    TieredStore,
    check_store_url,
    lasting_url,
    open_store,
    parse_bytes,
)
from cacheblend.store.open import (
    CascadePlace,
    DevicePlace,
    FolderPlace,
    MemoryPlace,
    TieredPlace,
    page_locking,
    parse_seconds,
    parse_store_url,
)
from store_blocks import holds, make_block


def test_sizes_and_times_to_live() -> None:
    sizes = {"0": 0, 17: 17, "8GiB": 8 << 30, "8 GB": 8 * 10**9, "1.5KiB": 1536, "500MB": 5 * 10**8, "2TiB": 2 << 40}
    assert {text: parse_bytes(text) for text in (*sizes, "12B")} == sizes | {"12B": 12}
    times = {"30d": 2592000, "12h": 43200, "1.5m": 90, "90 s": 90, "3600": 3600}
    assert {text: parse_seconds(text) for text in times} == times


def test_what_is_no_size() -> None:
    for text in ("", "GiB", "-1", "8 gigs", "8Gi B", "1e9"):
        with pytest.raises(InvalidInputError, match=r"is not a size: write e\.g\. 8GiB"):
            parse_bytes(text)


def test_memory() -> None:
    for url in (None, "memory", "memory://"):
        store = open_store(url)
        assert isinstance(store, MemoryStore)
        assert 0 < store.max_bytes <= 4 << 30
    assert open_store("memory://?max_bytes=8GiB").stats().max_bytes == 8 << 30
    assert open_store("memory://?max_bytes=8GiB", max_bytes="1MiB").stats().max_bytes == 1 << 20


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("memory,./kvx", "each needs a scheme"),
        ("memory,memory", "each needs a scheme"),
        ("memory,", "each needs a scheme"),
        ("memory,,file:///x", "each needs a scheme"),
        ("./a, ./b", "each needs a scheme"),
        ("file:///a,/b", "each needs a scheme"),
        ("a,", "each needs a scheme"),
        (",", "each needs a scheme"),
        ("Memory", "looks like 'memory': write memory, or ./Memory for a folder of that name"),
        ("memroy", "looks like 'memory': write memory, or ./memroy"),
        (":memory:", "looks like 'memory': write memory, or ./:memory:"),
        (" memory ", "looks like 'memory': write memory, or ./memory"),
        ("memory//", "looks like 'memory'"),
        ("redis", "looks like 'redis': write redis://host:6379/0, or ./redis"),
        ("Redis//localhost", "looks like 'redis'"),
        ("reddis", "looks like 'redis'"),
        ("valky", "looks like 'valkey'"),
        ("s3", "looks like 's3': write s3://bucket/folder, or ./s3"),
        ("S3:", "without its two slashes"),
        ("cuda", "looks like 'cuda': write cuda://?max_bytes=8GiB, or ./cuda"),
        ("file", "looks like 'file': write file:///folder, or ./file"),
        ("memory,redis", "each needs a scheme"),
        ("kv,redis", "each needs a scheme"),
        ("memroy, kv", "each needs a scheme"),
        ("file:", "without its two slashes"),
        ("file:/x", "without its two slashes"),
        ("mem:", "without its two slashes"),
        ("redis:localhost", "without its two slashes"),
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
            "no option 'max_byte'; it has max_bytes, ram_bytes, ttl, direct",
        ),
        ("memory://?max_bytes=lots", "'lots' is not a size"),
        ("memory://?evict=fifo", "no eviction policy is called 'fifo'; there are lru, worth"),
        ("file:///tmp/no-such-cacheblend-store?evict=fifo", "no eviction policy is called 'fifo'"),
        ("file:///tmp/no-such-cacheblend-store?max_bytes=0", "max_bytes must be above 0"),
        ("file:///tmp/no-such-cacheblend-store?direct=yes", "direct must be true or false, got 'yes'"),
        ("file:///tmp/no-such-cacheblend-store:/tmp/no-such-cacheblend-store", "names several folders"),
        ("redis://user:secret@host:no/0", "store 'redis://host:no/0': the port must be a number from 1 to 65535"),
        ("redis://host:70000/0", "the port must be a number"),
        ("redis://host:6379/one", "the database must be a number, got 'one'"),
        ("s3://bucket/x?endpoint=localhost:9000", "endpoint must begin with http:// or https://"),
        ("s3://[bucket/x", "is not a URL"),
        ("file:///tmp/no-such-cacheblend-store,redis://host:no", "the port must be a number"),
        ("cuda://", "a cuda store needs a bound, since models need the GPU's memory: cuda://?max_bytes=8GiB"),
        ("cuda://a?max_bytes=1GiB", "must name a GPU by its number"),
        ("cuda://0/folder?max_bytes=1GiB", "must name a GPU by its number"),
        ("cuda://-1?max_bytes=1GiB", "must name a GPU by its number"),
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
        ("redis://h:1/0?timeout=-1", "timeout must be a number of seconds above 0, got '-1'"),
        ("redis://h:1/0?timeout=x", "timeout must be"),
        ("redis://h:1/0?cluster=1", "cluster must be true or false, got '1'"),
        ("redis://h:1/0?evict=1", "no option 'evict'; it has max_bytes, ram_bytes, ttl, prefix, timeout, cluster"),
        ("s3://b/x?prefix=y", "no option 'prefix'; it has max_bytes, ram_bytes, ttl, timeout, endpoint, region"),
        ("s3://b/x?timeout=0", "timeout must be a number of seconds above 0"),
        *(
            (f"memory://?ttl={text}", "not a time to live")
            for text in ("", "d", "-1", "0", "0s", "3 days", "nan", "inf")
        ),
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
        "file://{folder}?max_bytes=1GiB&ram_bytes=1MiB&direct=true&locks=false&evict=worth",
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
def test_an_engine_opens_its_store_with_locked_memory_where_it_is_on_a_gpu() -> None:
    with open_store("memory://?page_locked=false", page_locked=True) as store:
        assert not isinstance(store, TieredStore)
    with pytest.raises(InvalidInputError, match="needs a GPU"):
        open_store("memory", page_locked=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("url", ["cuda://?max_bytes=1GiB", "cuda://2?max_bytes=1GiB", "memory://?page_locked=true"])
def test_without_a_gpu_the_message_says_so(url: str) -> None:
    with pytest.raises(InvalidInputError, match=r"there are 0 GPUs here|needs a GPU, and there is none"):
        open_store(url)


def test_arguments_are_checked_with_the_url() -> None:
    with pytest.raises(InvalidInputError, match="'lots' is not a size"):
        check_store_url("memory", max_bytes="lots")
    with pytest.raises(InvalidInputError, match="no option 'ram_bytes'"):
        check_store_url("memory", ram_bytes="1GiB")
    with pytest.raises(InvalidInputError, match="a bound of its own"):
        open_store("file:///tmp/no-such-a,file:///tmp/no-such-b", max_bytes=1)


def test_a_folder_with_commas_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a,", "memory,b", "memory,"):
        (tmp_path / name).mkdir()
        for url in (name, f"file://{tmp_path}/{name}"):
            check_store_url(url)
    check_store_url("a,b")
    check_store_url("./Memory")
    check_store_url("./mem:")
    check_store_url(tmp_path / "kv?max_bytes=1")


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


def test_names_of_folders_that_are_not_like_a_scheme() -> None:
    for name in ("kv", "store", "cache", "cude", "files", "tile", "kv3", "s4", "mem", "memories", "reads"):
        check_store_url(name)


def test_a_store_that_is_there_under_the_name_of_a_scheme_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "redis").mkdir()
    with pytest.raises(InvalidInputError, match=r"or \./redis for a folder"):
        open_store("redis")
    open_store("./redis").close()
    with open_store("redis") as store:
        assert isinstance(store, DiskStore) and store.path == tmp_path / "redis"


def test_a_relative_folder_stays_where_it_was_when_the_current_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_relative_folder_of_no_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match="kv is relative, and the current folder is gone: name the whole path"):
        open_store("kv")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("url", "lasting"),
    [
        ("/kv", "/kv"),
        ("file:///a,b?ram_bytes=1GiB", "file:///a,b?ram_bytes=1GiB"),
        ("memory://?max_bytes=1GiB, file:///a?max_bytes=2GiB", "file:///a?max_bytes=2GiB"),
        ("cuda://?max_bytes=1GiB,memory://,file:///a,file:///b", "file:///a, file:///b"),
    ],
)
def test_what_is_left_of_a_store_without_the_memory_in_front(url: str, lasting: str) -> None:
    assert lasting_url(url) == lasting


def test_a_store_of_which_nothing_lasts_is_named_and_what_is_wrong_in_front_is_not_passed_over() -> None:
    for url in ("memory", "memory://", "memory://?max_bytes=1GiB", "cuda://?max_bytes=1GiB,memory://"):
        with pytest.raises(InvalidInputError, match=re.escape(f"the store {url!r} ends with this command")):
            lasting_url(url)
    with pytest.raises(InvalidInputError, match="has no option 'ttl'"):
        lasting_url("memory://?ttl=1d, file:///a")
