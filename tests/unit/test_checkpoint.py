"""Weight files: in whatever way they are replaced, their name is that of what they hold; parts of files are refused."""

import json
import mmap
import os
import random
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines import checkpoint, fingerprint
from cacheblend.engines.checkpoint import check_files, loaded_files, sample_of
from cacheblend.engines.fingerprint import fingerprint_folder

LONG_AGO = 1_577_836_800
Write = Callable[[Path, bytes], None]


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are noted at once, so that every test could be given a stale one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(40, 256, generator=drawn) for i in range(3)}


def write_folder(folder: Path, kind: str, seed: int = 0) -> Path:
    """A folder of one of four kinds, with files of one fixed time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    held = tensors(seed)
    if kind == "shards":
        files = {name: f"model-{i:05}-of-00003.safetensors" for i, name in enumerate(held, 1)}
        for name, file in files.items():
            save_file({name: held[name]}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    elif kind == "safetensors":
        save_file(held, folder / "model.safetensors")
    else:
        torch.save(held, folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin")
    for file in folder.iterdir():
        os.utime(file, (LONG_AGO, LONG_AGO))
    return folder


def anew(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    """The fingerprint by all bytes, without any note."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return fingerprint_folder(folder)


def in_place(file: Path, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.write(content)
        stream.truncate()
    os.utime(file, (LONG_AGO, LONG_AGO))


def renamed(file: Path, content: bytes) -> None:
    fresh = file.with_suffix(".part")
    fresh.write_bytes(content)
    os.utime(fresh, (LONG_AGO, LONG_AGO))
    fresh.replace(file)


def source_of(file: Path, content: bytes) -> Path:
    """A file of this name, alone in a folder, to be copied."""
    folder = file.parent.parent / "source"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    renamed(folder / file.name, content)
    return folder / file.name


def copied(file: Path, content: bytes) -> None:
    shutil.copy2(source_of(file, content), file)  # as `cp -p`: the file stays, its time is set


def from_archive(file: Path, content: bytes) -> None:
    archive = file.parent.parent / "source.tar"
    with tarfile.open(archive, "w") as written:
        written.add(source_of(file, content), file.name)
    file.unlink()  # as `tar` does
    with tarfile.open(archive) as read:
        read.extractall(file.parent, filter="data")


def mapped(file: Path, content: bytes) -> None:
    os.truncate(file, len(content))
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        memory[:] = content
        memory.flush()
    os.utime(file, (LONG_AGO, LONG_AGO))


def behind_a_link(file: Path, content: bytes) -> None:
    """As in the hub's cache: the name is a link, which then leads to other bytes."""
    blob = file.parent.parent / f"blob-{random.randrange(1 << 40)}"
    renamed(blob, content)
    file.unlink()
    file.symlink_to(blob)


WAYS: list[Write] = [in_place, renamed, copied, from_archive, mapped, behind_a_link]


def test_whatever_replaces_a_file_is_named_by_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(38)
    for kind in ("safetensors", "shards", "bin", "old bin"):
        folder, other = write_folder(tmp_path / kind, kind), write_folder(tmp_path / f"other {kind}", kind, seed=1)
        seen = {fingerprint_folder(folder)}
        for number, way in enumerate(draws.sample(WAYS, len(WAYS))):
            file = draws.choice(checkpoint.weight_files(folder))
            if draws.random() < 0.3:  # all of another model's
                content = (other / file.name).read_bytes()
            else:
                edited = bytearray(file.read_bytes())
                edited[draws.randrange(len(edited))] ^= 1 << draws.randrange(8)
                content = bytes(edited)
            time.sleep(0.02)  # file systems tell times apart that are a few milliseconds apart
            way(file, content)
            found = fingerprint_folder(folder)
            assert found == anew(folder, monkeypatch, tmp_path / f"empty {kind} {number}"), (kind, number, way)
            seen.add(found)
        assert len(seen) > 4


@pytest.mark.parametrize("kind", ["safetensors", "shards", "bin", "old bin"])
def test_where_the_file_system_lies_the_sample_tells(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it does not tell: a byte outside of it is the stated limit."""
    folder, other = write_folder(tmp_path / "a", kind), write_folder(tmp_path / "b", kind, seed=1)
    monkeypatch.setattr(fingerprint, "state_of", lambda file: (1, 2, 3, 4))
    first = fingerprint_folder(folder)
    for file in checkpoint.weight_files(folder):
        shutil.copy2(other / file.name, file)
    second = fingerprint_folder(folder)
    assert second == anew(folder, monkeypatch, tmp_path / "empty") != first
    one = checkpoint.weight_files(folder)[0]
    before, edited, noticed = sample_of(one), one.read_bytes(), 0
    places = range(len(edited) // 3, 2 * len(edited) // 3, 127 if kind != "old bin" else 1999)
    for at in places:
        one.write_bytes(edited[:at] + bytes([edited[at] ^ 1]) + edited[at + 1 :])
        if sample_of(one) != before:
            noticed += 1
            assert fingerprint_folder(folder) == anew(folder, monkeypatch, tmp_path / f"empty {at}") != second
    assert 0 < noticed < len(places) or kind == "old bin"  # of unknown formats so small all bytes are read


def test_a_sample_has_a_spot_of_every_tensor_and_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"expert.{i}": torch.full((256,), float(i)) for i in range(3000)}
    file = tmp_path / "model.safetensors"
    save_file(many, file)
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: (read.append(n), pread(fd, n, at))[1])
    before = sample_of(file)
    assert len(read) == 3000 + 2 and sum(read[2:]) == 3000 * checkpoint.SPOT_BYTES
    for i in (0, 1234, 2999):
        save_file({**many, f"expert.{i}": many[f"expert.{i}"] + 1}, file)
        assert sample_of(file) != before


def test_a_name_covers_what_is_loaded_and_nothing_beside_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "shards")
    plain = fingerprint_folder(folder)
    index, tuned = folder / "model.safetensors.index.json", tensors(2)
    files = {name: f"tuned-{i:05}-of-00003.safetensors" for i, name in enumerate(tuned, 1)}
    save_file(tensors(1), folder / "consolidated.safetensors")  # Mistral's beside transformers' own
    for name, file in files.items():
        save_file({name: tuned[name]}, folder / file)
    (folder / "pytorch_model.bin").write_bytes(b"the same, for PyTorch")
    assert fingerprint_folder(folder) == plain
    index.write_text(json.dumps({"weight_map": files}))
    second = fingerprint_folder(folder)
    (folder / "parts").mkdir()
    save_file(tensors(3), folder / "parts" / "w.safetensors")
    index.write_text(json.dumps({"weight_map": {"w": "parts/w.safetensors"}}))
    third = fingerprint_folder(folder)
    save_file(tensors(4), folder / "parts" / "w.safetensors")
    named = {plain, second, third, fingerprint_folder(folder)}
    for content in (b"one", b"two"):
        (folder / "pytorch_model.bin").write_bytes(content)
        named.add(fingerprint_folder(folder, {"use_safetensors": False}))
    assert len(named) == 6
    # the files that are loaded
    folder = write_folder(tmp_path / "loaded", "shards")
    assert [file.name[:11] for file in loaded_files(folder)] == ["model-00001", "model-00002", "model-00003"]
    (folder / "pytorch_model.bin").write_bytes(b"")
    check_files(folder)  # what is not loaded may be anything
    assert loaded_files(folder, use_safetensors=False) == [folder / "pytorch_model.bin"]
    save_file(tensors(0), folder / "model.safetensors")
    assert loaded_files(folder) == [folder / "model.safetensors"]
    save_file(tensors(0), folder / "model.fp16.safetensors")
    assert loaded_files(folder, "fp16") == [folder / "model.fp16.safetensors"]
    (folder / "config.json").write_text('{"transformers_weights": "own.safetensors"}')
    save_file(tensors(0), folder / "own.safetensors")
    assert loaded_files(folder) == [folder / "own.safetensors"]


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1000)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("safetensors", cut, r"model\.safetensors is cut off: it has 12\d* of 12\d* bytes; download it again"),
        ("shards", cut, r"model-00001-of-00003\.safetensors is cut off: it has \d+ of \d+ bytes; download it again"),
        ("safetensors", lambda file: os.truncate(file, 40), r"model\.safetensors \(40 bytes\) has no readable header"),
        (
            "safetensors",
            lambda file: file.write_bytes(file.read_bytes() + b"more"),
            r"model\.safetensors is damaged: it has \d+ of \d+ bytes; download it again",
        ),
        ("safetensors", lambda file: file.write_bytes(b""), r"is empty \(0 bytes\); download it again"),
        ("safetensors", lambda file: file.write_bytes(POINTER), r"pointer of git-lfs .*`git lfs pull`"),
        ("bin", lambda file: file.write_bytes(POINTER), r"pytorch_model\.bin is a pointer of git-lfs"),
        ("bin", lambda file: file.write_bytes(b""), r"pytorch_model\.bin is empty"),
        ("bin", cut, r"pytorch_model\.bin is cut off after \d+ bytes: .*; download it again"),
        ("shards", lambda file: file.unlink(), r"index\.json names 3 files, of which model-00001-of-00003"),
        (
            "shards",
            lambda file: (file.parent / "model.safetensors.index.json").write_text("{"),
            r"index\.json is no index of weight files .*download it again",
        ),
    ],
)
def test_damaged_files_are_refused_by_name(
    kind: str, damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", kind)
    check_files(folder)
    damage(checkpoint.weight_files(folder)[0])
    with pytest.raises(InvalidInputError, match=message):
        check_files(folder)


def test_links_to_nothing_and_files_being_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "linked", "safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(InvalidInputError, match=r"model\.safetensors cannot be read \(No such file"):
        fingerprint_folder(folder)
    folder, states = write_folder(tmp_path / "model", "safetensors"), iter(range(100))
    monkeypatch.setattr(fingerprint, "SETTLED_S", 60.0)
    fingerprint_folder(folder)
    assert not list((tmp_path / "cache").rglob("*.json"))
    monkeypatch.setattr(fingerprint, "state_of", lambda file: (1, 2, next(states), 4))
    with pytest.raises(InvalidInputError, match=r"model\.safetensors is being written to"):
        fingerprint_folder(folder)
