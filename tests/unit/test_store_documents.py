"""Records of documents, on each kind of store."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend.core.errors import StoreReadOnlyError
from cacheblend.core.names import BlockName, root_name
from cacheblend.store import DiskStore, KVStore
from cacheblend.store.documents import DamagedRecord, DocumentRecord, document_name
from cacheblend.store.remote.bucket import BucketObjects
from store_kinds import KINDS, open_kind

ROOTS = [root_name("a model", "bfloat16", salt=salt) for salt in ("", "other")]
IDS = ["a", "../../etc/passwd", "", "x" * 1024, "ünï \u0000 \n\u2028", "a/b", "a%2Fb", ".", "COM1", "🦩" * 300]


def record(document_id: str, root: BlockName = ROOTS[0], collection: str = "c", chunks: int = 2) -> DocumentRecord:
    names = [BlockName(bytes([number + 1]) * 32) for number in range(2 * chunks)]
    pairs = tuple(zip(names[::2], names[1::2], strict=True))
    return DocumentRecord(root, collection, document_id, "0f" * 32, 70 * chunks, pairs[1:], pairs[:1])


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path):  # type: ignore[no-untyped-def]
    with open_kind(request.param, tmp_path / "store") as opened:
        yield opened


def test_records_of_any_id_come_back_by_root(store: KVStore) -> None:
    records = [record(each, root, collection) for root in ROOTS for collection in ("c", "d") for each in IDS]
    assert len({each.name for each in records}) == len(records)
    assert store.documents.roots() == []
    for each in records:
        store.documents.put(each)
    assert store.documents.roots() == sorted(ROOTS)
    for root in ROOTS:
        expected = sorted((each for each in records if each.root == root), key=lambda each: each.name)
        assert store.documents.all(root) == expected
        assert store.documents.names(root) == [each.name for each in expected]
    first = records[0]
    newer = replace(first, digest="ab" * 32, stale=())
    store.documents.put(newer)
    assert store.documents.get(first.root, first.name) == newer
    assert store.documents.delete(first.root, first.name)
    assert not store.documents.delete(first.root, first.name)
    assert store.documents.get(first.root, first.name) is None
    assert len(store.documents.all(first.root)) == len(records) // 2 - 1
    assert store.manifests() == []  # they are no chunks


def test_ids_and_collections_are_not_confused() -> None:
    names = {document_name(ROOTS[0], collection, each) for collection, each in [("a", "bc"), ("ab", "c"), ("", "abc")]}
    assert len(names) == 3


def test_what_is_referred_to_is_changed_by_one_thread_at_a_time(store: KVStore) -> None:
    inside = most = 0

    def change(_: int) -> None:
        nonlocal inside, most
        with store.documents.changing(ROOTS[0]):
            inside += 1
            most = max(most, inside)
            store.documents.put(record("a"))
            inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(change, range(40)))
    if not isinstance(getattr(store, "_objects", None), BucketObjects):  # a bucket has no locks
        assert most == 1
    assert store.documents.all(ROOTS[0]) == [record("a")]


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_record_is_named_and_stays_until_it_is_verified(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    with DiskStore(tmp_path / "s", durable=False) as store:
        store.documents.put(record("intact"))
        damaged = record("damaged")
        store.documents.put(damaged)
        (file,) = (tmp_path / "s").rglob(f"{damaged.name.hex()}.json")
        data = bytearray(file.read_bytes())
        how = rng.choice(["flip", "cut", "empty", "other"])
        if how == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes({"cut": data[: rng.randrange(len(data))], "empty": b"", "other": b"{}"}.get(how, bytes(data)))
        for _ in range(2):
            found = store.documents.all(ROOTS[0])
            (bad,) = [each for each in found if isinstance(each, DamagedRecord)]
            assert bad.name == damaged.name and damaged.name.hex() in bad.reason
            assert record("intact") in found
            assert isinstance(store.documents.get(ROOTS[0], damaged.name), DamagedRecord)
        (damage,) = store.verify()
        assert (damage.kind, damage.name, damage.removed) == ("document", damaged.name, True)
        assert store.documents.all(ROOTS[0]) == [record("intact")]


def test_a_record_under_another_name_is_damage(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "s", durable=False) as store:
        store.documents.put(record("a"))
        (file,) = (tmp_path / "s").rglob("documents/*/*.json")
        other = record("b")
        file.rename(file.with_name(f"{other.name.hex()}.json"))
        (bad,) = store.documents.all(ROOTS[0])
        assert isinstance(bad, DamagedRecord) and "'a'" in bad.reason


def test_a_store_opened_to_be_read_keeps_damage_and_refuses_changes(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "s", durable=False) as store:
        store.documents.put(record("a"))
    (file,) = (tmp_path / "s").rglob("documents/*/*.json")
    file.write_bytes(b"")
    with DiskStore(tmp_path / "s", read_only=True) as store:
        assert [damage.removed for damage in store.verify()] == [False]
        for change in (
            lambda: store.documents.put(record("b")),
            lambda: store.documents.delete(ROOTS[0], record("a").name),
            lambda: store.documents.changing(ROOTS[0]).__enter__(),
        ):
            with pytest.raises(StoreReadOnlyError):
                change()
    assert file.exists()


def test_another_process_sees_records_at_once(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "s", durable=False) as one, DiskStore(tmp_path / "s", durable=False) as other:
        one.documents.put(record("a"))
        assert other.documents.all(ROOTS[0]) == [record("a")]
        one.documents.put(replace(record("a"), tokens=1))
        assert other.documents.get(ROOTS[0], record("a").name) == replace(record("a"), tokens=1)
        other.documents.delete(ROOTS[0], record("a").name)
        assert one.documents.all(ROOTS[0]) == []
