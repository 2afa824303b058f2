"""A folder's bound while several processes write to it, each as a store of its own: files of any size, some of them
being written."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cacheblend.core.errors import StoreFullError
from cacheblend.core.names import BlockName
from cacheblend.store.disk import folder as folder_module
from cacheblend.store.disk.folder import Folder
from store_folders import disk, occupied

MOST = 1 << 20
SHARE = MOST // 32


class Writer:
    """A process that writes files of given sizes, some at the same time; what it is writing is not there yet."""

    def __init__(self, folder: Path, number: int) -> None:
        self.store = disk(folder, max_bytes=MOST)
        self.number, self.written = number, 0
        self.under_way: list[Iterator[None]] = []

    def begin(self, nbytes: int) -> None:
        writing = self._write(nbytes)
        try:
            next(writing)
        except StoreFullError:  # too much is being written at the same time
            return
        self.under_way.append(writing)

    def end(self, draw: random.Random) -> None:
        if self.under_way:
            next(self.under_way.pop(draw.randrange(len(self.under_way))), None)

    def _write(self, nbytes: int) -> Iterator[None]:
        self.written += 1
        name = BlockName(self.number.to_bytes(16, "little") + self.written.to_bytes(16, "little"))
        path = Path(self.store.file_of(name))
        with self.store._capacity.reserved(nbytes):
            yield
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.truncate(nbytes)


@contextmanager
def writers(folder: Path, count: int) -> Iterator[list[Writer]]:
    opened = [Writer(folder, number) for number in range(count)]
    try:
        yield opened
    finally:
        for each in opened:
            each.under_way.clear()
            each.store.close()


@pytest.mark.parametrize("largest", [SHARE // 4, SHARE, 2 * SHARE, 6 * SHARE])
@pytest.mark.parametrize("seed", range(5))
def test_each_further_process_exceeds_the_bound_by_a_32nd_at_most(seed: int, largest: int, tmp_path: Path) -> None:
    draw = random.Random(f"{seed} {largest}")
    count, at_once = draw.randint(1, 5), draw.randint(1, 4)
    most = 0
    with writers(tmp_path, count) as all_writers:
        for _ in range(8 * MOST // largest + 200):
            writer = draw.choice(all_writers)
            if len(writer.under_way) < at_once and draw.random() < 0.6:
                writer.begin(draw.randint(largest // 2, largest))
            else:
                writer.end(draw)
            most = max(most, occupied(tmp_path))
            assert most <= MOST + (count - 1) * SHARE
    assert most > MOST // 2  # else this test does not test it
    print(f"{count} processes, files up to {largest / MOST:.1%}: {most / MOST:.1%} of the bound")


def test_what_is_reserved_by_a_process_that_dies_is_free_again(tmp_path: Path) -> None:
    with disk(tmp_path, max_bytes=MOST) as store:
        died = os.fork()
        if not died:
            with disk(tmp_path, max_bytes=MOST) as other, other._capacity.reserved(MOST * 3 // 4):
                os._exit(0)
        os.waitpid(died, 0)
        assert len(list((tmp_path / "tmp").iterdir())) == 1
        with store._capacity.reserved(MOST * 3 // 4):
            pass
        assert not list((tmp_path / "tmp").iterdir())
        died = os.fork()
        if not died:
            with disk(tmp_path, max_bytes=MOST) as other, other._capacity.reserved(MOST * 3 // 4):
                os._exit(0)
        os.waitpid(died, 0)
    with disk(tmp_path):
        assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("locks", [True, False])
def test_a_process_never_counts_what_it_reserves_itself_as_another_ones(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at, as another thread might, between any two steps of a reservation's end."""
    folder, seen = Folder(tmp_path, durable=False, locks=locks), list[int]()

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def unlink(self, path: str) -> None:
            seen.append(folder.reserved_bytes())
            Path(path).unlink()
            seen.append(folder.reserved_bytes())

    with folder.reservation(SHARE):
        assert folder.reserved_bytes() == 0
        monkeypatch.setattr(folder_module, "os", Watched())
    assert seen == [0, 0] and folder.reserved_bytes() == 0


def test_without_locks_what_a_dead_process_reserved_is_free_after_the_time_that_writing_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that may be being written stays for an hour."""
    folder, now = Folder(tmp_path, durable=False, locks=False), time.time()
    big, small = 600_000_000, 4096
    for number, nbytes in enumerate((big, small)):
        file = tmp_path / "tmp" / f"1-{number:016x}.reserved"
        file.touch()
        os.truncate(file, nbytes)
    written = tmp_path / "tmp" / f"1-{0:016}"
    written.touch()
    expected = {50: big + small, 300: big, 650: big, 700: 0}
    for after, nbytes in expected.items():
        monkeypatch.setattr(folder_module.time, "time", lambda after=after: now + after)
        assert folder.reserved_bytes() == nbytes
        Folder(tmp_path, durable=False, locks=False)
        assert written.exists()
    monkeypatch.setattr(folder_module.time, "time", lambda: now + 3700)
    Folder(tmp_path, durable=False, locks=False)
    assert not written.exists()
