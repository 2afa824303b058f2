"""Damage to a store's files: whatever byte is wrong, nothing wrong is ever read."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from cacheblend.core.errors import BlockLostError
from cacheblend.core.plan.blocks import Block, LayerShape
from cacheblend.store import DiskStore
from cacheblend.store.format.block_file import encode_block
from faults import Faults
from store_blocks import holds, make_block, make_chain, make_manifest, record_at, same_bits
from store_folders import disk

SHAPES = [LayerShape(3, 4), LayerShape(2, 8)]
BLOCK = make_block(1, tokens=5, shapes=SHAPES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with disk(tmp_path / "s") as store:
        store.write(BLOCK)
        store.put_manifest(make_manifest(BLOCK))
    return tmp_path / "s"


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of reports are not worth keeping."""
    caplog.set_level(logging.ERROR, "cacheblend.store")


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def silent_wrong_reads(store: DiskStore, block: Block) -> int:
    """Reads all of the block as a loader would: records that came back, but with other bits."""
    wrong = 0
    entry = store.find([block.name])[0]
    if entry is None:
        return 0
    wrong += not np.array_equal(entry.token_ids, block.token_ids)
    for layer, record in enumerate(block.records):
        try:
            wrong += not same_bits(store.read(block.name, layer), record)
        except BlockLostError:
            break
    return wrong


def check_each(folder: Path, path: Path, damaged: Iterable[bytes], knowing: DiskStore | None = None) -> int:
    """Puts each content in the file's place: a miss, reported once, removed, to a store that never saw the block or to
    one that has just read it. How many were tried."""
    good, tried = path.read_bytes(), 0
    for content in damaged:
        if knowing is not None:
            path.write_bytes(good)
            assert holds(knowing, BLOCK)
        tried += 1
        path.write_bytes(content)
        with nullcontext(knowing) if knowing is not None else disk(folder) as store:
            before = store.stats().damaged
            assert silent_wrong_reads(store, BLOCK) == 0, f"variant {tried}"
            assert store.find([BLOCK.name]) == [None], f"variant {tried}"
            with pytest.raises(BlockLostError):
                store.read(BLOCK.name, 0)
            assert store.stats().damaged == before + 1, f"variant {tried}"
        assert not path.exists()
    path.write_bytes(good)
    with disk(folder) as store:
        assert holds(store, BLOCK)
    return tried


def flipped(good: bytes, positions: range, bit: int) -> Iterator[bytes]:
    for at in positions:
        yield good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("bit", [0, 5])  # 5 turns a digit a..f into A..F
def test_every_flipped_byte_is_found(folder: Path, bit: int, faults: Faults) -> None:
    path = only(folder, "blocks/*/*")
    good = path.read_bytes()
    tried = check_each(folder, path, flipped(good, range(len(good)), bit))
    faults.count("flipped bytes of a block's file", tried)
    assert tried == len(good) > 4096 + sum(r.nbytes for r in BLOCK.records) - 1
    if bit == 0:
        with disk(folder) as knowing:
            assert check_each(folder, path, flipped(good, range(0, len(good), 3), 2), knowing) == -(-len(good) // 3)


@pytest.mark.usefixtures("quiet")
def test_every_length_is_found(folder: Path, faults: Faults) -> None:
    path = only(folder, "blocks/*/*")
    good = path.read_bytes()
    lengths = [*range(len(good)), *range(len(good) + 1, len(good) + 20)]
    tried = check_each(folder, path, ((good + bytes(20))[:length] for length in lengths))
    assert tried == len(good) + 19
    faults.count("block files cut short or too long", tried)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("knows", [False, True])
def test_a_flipped_byte_of_a_file_of_several_blocks_costs_those_that_it_is_in(
    knows: bool, tmp_path: Path, faults: Faults
) -> None:
    chain, tried = make_chain(3), 0
    with disk(tmp_path) as store:
        store.write_all(chain)
        first, *others = (Path(store.file_of(block.name)) for block in chain)
        good = first.read_bytes()
        places = {block.name: [record_at(first, block, layer) for layer in range(3)] for block in chain}
        data_at = min(begin for each in places.values() for begin, _ in each)
    with disk(tmp_path) as knowing:
        for at in [*range(0, data_at, 7), *range(data_at, len(good))]:
            first.write_bytes(good)
            for other in others:
                other.unlink(missing_ok=True)
                other.hardlink_to(first)
            assert not knows or all(holds(knowing, block) for block in chain)
            first.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            with nullcontext(knowing) if knows else disk(tmp_path) as store:
                assert sum(silent_wrong_reads(store, block) for block in chain) == 0, at
                hit = [at < data_at or any(begin <= at < end for begin, end in places[block.name]) for block in chain]
                assert [entry is None for entry in store.find([block.name for block in chain])] == hit, at
            assert [path.exists() for path in (first, *others)] == [not each for each in hit], at
            tried += 1
            first.unlink(missing_ok=True)
    faults.count("flipped bytes of files of several blocks", tried)


def test_other_damage_is_found(folder: Path) -> None:
    path = only(folder, "blocks/*/*")
    good = path.read_bytes()
    other = make_block(2, tokens=5, shapes=SHAPES)
    foreign = b"".join(encode_block(other))
    rng = np.random.default_rng(0)
    contents = [
        foreign,  # a sound file under a wrong name
        good[:4096] + foreign[4096:],
        bytes(len(good)),
        b"\xff" * len(good),
        rng.bytes(len(good)),
        good[:4096] + bytes(len(good) - 4096),  # written, but its data never reached the disk
        good[4096:] + good[:4096],
        (1 << 63).to_bytes(8, "little") + good[8:],
    ]
    for start in rng.integers(0, len(good) - 64, 200):
        contents.append(good[:start] + rng.bytes(64) + good[start + 64 :])
    assert check_each(folder, path, contents) == 208


def test_damage_is_reported_by_name_and_verify_removes_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocks = [make_block(seed) for seed in range(2, 12)]
    hurt, seen = blocks[::3], list[tuple[int, int]]()
    with disk(folder) as store, caplog.at_level(logging.WARNING, "cacheblend.store"):
        for block in blocks:
            store.write(block)
        for block in [*hurt, BLOCK]:  # the last head of the last layer
            path = only(folder, f"blocks/*/{block.name.hex()}*")
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 128]))
        assert same_bits(store.read(BLOCK.name, 1, slice(0, 1)), BLOCK.records[1][:1])  # other heads are not lost
        with pytest.raises(BlockLostError, match="layer 1, head 1 does not match"):
            store.read(BLOCK.name, 1, slice(1, 2))
        found = store.verify(lambda done, total: seen.append((done, total)))
        assert {(damage.kind, damage.name) for damage in found} == {("block", block.name) for block in hurt}
        assert all("layer 2, head 0 does not match its checksum" in damage.reason for damage in found)
        assert seen == [(i, 10) for i in range(1, 11)]
        assert all(block.name.hex() in caplog.text for block in hurt)
        assert store.verify() == []
        assert [holds(store, b) for b in blocks] == [b not in hurt for b in blocks]
        assert store.stats().damaged == len(hurt) + 1


def test_every_damage_to_a_manifest_is_found(folder: Path, caplog: pytest.LogCaptureFixture, faults: Faults) -> None:
    path = only(folder, "manifests/*")
    good = path.read_bytes()
    contents = [*flipped(good, range(len(good)), 0), *flipped(good, range(len(good)), 5)]
    contents += [good[:length] for length in range(len(good))] + [good + b" ", good + b"\n"]
    contents += [b"{}", b"", b"\xff" * 200]
    with disk(folder) as knowing:
        for number, content in enumerate(contents):
            path.write_bytes(good)
            assert len(knowing.manifests()) == 1
            path.write_bytes(content)
            with nullcontext(knowing) if number % 2 else disk(folder) as store:
                before = store.stats().damaged
                assert store.manifests() == [], f"variant {number}"
                assert store.stats().damaged == before + 1
            assert not path.exists()
            caplog.clear()
        path.write_bytes(good[:50])
        (damage,) = knowing.verify()
    assert (damage.kind, damage.name) == ("manifest", BLOCK.name)
    assert BLOCK.name.hex() in caplog.text
    faults.count("damaged manifests", len(contents))
