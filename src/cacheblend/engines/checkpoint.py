"""A model folder's weight files: which of them are loaded, whether they are whole, and a sample of what they hold.

    model.safetensors | model.safetensors.index.json -> its files | pytorch_model.bin | pytorch_model.bin.index.json

The first of these that is there is loaded, as transformers and vLLM do it. Reads headers and a few kilobytes, never a
whole file.
"""

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from cacheblend.core.errors import InvalidInputError

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_READ_FILES = ("*.safetensors", "*.bin", "*.pt", "*.index.json", "config.json", "params.json")
OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
SPOT_BYTES = 256  # bytes that are read at each spot of a sample
TENSOR_SPOTS, FILE_SPOTS = 4, 2048  # spots of a tensor at most, and of a file together; every tensor has one
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit

State = tuple[int, int, int, int]
"""What a file system says of a file's contents: size, time of the last write, time of the last change, inode. The last
change's time is the kernel's alone: `cp -p`, `tar` and `touch` set the other one."""


def weight_files(folder: Path) -> list[Path]:
    """All weight files in a folder, by name, loaded or not."""
    return sorted({file for pattern in WEIGHT_FILES for file in folder.glob(pattern)})


def state_of(file: Path) -> State:
    """Size, times and inode of a file. Raises `OSError`."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def states_in(folder: Path) -> dict[str, State]:
    """States of the weight files, the config and the indices; equal states mean that nothing was written in between."""
    found = {}
    files = {file for pattern in _READ_FILES for file in folder.glob(pattern) if file.name not in OF_TRAINING}
    for file in sorted(files):
        with contextlib.suppress(OSError):
            found[file.name] = state_of(file)
    return found


def loaded_files(folder: Path, variant: str | None = None, use_safetensors: bool | None = None) -> list[Path]:
    """The files that the weights in a folder are loaded from, with transformers' options of these names. Raises
    `InvalidInputError`: an index is damaged, or names a file that is not there."""
    suffix, names = f".{variant}" if variant else "", list[str]()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        names = [str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["transformers_weights"])]
    names += [] if use_safetensors is False else [f"model{suffix}.safetensors", f"model.safetensors.index{suffix}.json"]
    names += [] if use_safetensors else [f"pytorch_model{suffix}.bin", f"pytorch_model.bin.index{suffix}.json"]
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        return []
    return [file] if file.suffix != ".json" else shards_of(file)


def shards_of(index: Path) -> list[Path]:
    """The files that an index names, by name. Raises `InvalidInputError`: it is damaged, or one is not there."""
    try:
        shards = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError(f"{index} is no index of weight files ({error}); download it again") from error
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InvalidInputError(
            f"{index.name} names {len(shards)} files, of which {', '.join(missing[:3])}{more} cannot be found in "
            f"{index.parent}; download what is missing"
        )
    return [index.parent / name for name in shards]


def check_files(folder: Path, variant: str | None = None, use_safetensors: bool | None = None) -> None:
    """Raises `InvalidInputError` for a weight file that is missing, empty, cut off, or a pointer in its place, before
    anything is read from it."""
    for file in loaded_files(folder, variant, use_safetensors):
        with file.open("rb") as stream:
            start, size = stream.read(len(_LFS_POINTER)), os.fstat(stream.fileno()).st_size
        if not size:
            raise InvalidInputError(f"{file} is empty (0 bytes); download it again")
        if start == _LFS_POINTER:
            raise InvalidInputError(
                f"{file} is a pointer of git-lfs in place of the weights ({size} bytes); fetch them with `git lfs pull`"
            )
        if file.suffix == ".safetensors":
            try:
                with file.open("rb") as stream:
                    header = _header(stream.fileno(), size)
                described = 8 + len(header) + max((end for _, end in _offsets(header)), default=0)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidInputError(
                    f"{file} ({size} bytes) has no readable header of tensors, so that it is cut off or no safetensors "
                    "file; download it again"
                ) from error
            if size != described:
                what = "is cut off" if size < described else "is damaged"
                raise InvalidInputError(f"{file} {what}: it has {size} of {described} bytes; download it again")
        elif start[:2] == b"PK" and not zipfile.is_zipfile(file):
            raise InvalidInputError(
                f"{file} is cut off after {size} bytes: its directory is missing; download it again"
            )


def sample_of(file: Path) -> str:
    """SHA-256, hex, of a sample of a file's bytes: headers, and a few spots of every tensor. Raises `OSError`. Reads at
    most `FILE_SPOTS` spots, or one of each tensor, and asks for all of them before it waits for the first."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        descriptor = stream.fileno()
        size = os.fstat(descriptor).st_size
        header, regions = _regions(file, descriptor, size)
        found.update(f"{size} ".encode() + header)
        regions = [(begin, end) for begin, end in regions if 0 <= begin < end <= size]
        each = max(1, min(TENSOR_SPOTS, FILE_SPOTS // max(1, len(regions))))
        spots = [spot for begin, end in regions for spot in _spots(begin, end, each)]
        if hasattr(os, "posix_fadvise"):
            for at, length in spots:
                os.posix_fadvise(descriptor, at, length, os.POSIX_FADV_WILLNEED)
        for at, length in spots:
            found.update(os.pread(descriptor, length, at))
    return found.hexdigest()


def _spots(begin: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of spots spread over a region, or all of it where it is short."""
    if end - begin <= count * SPOT_BYTES:
        yield begin, end - begin
        return
    for number in range(count):
        yield begin + (end - begin) * (2 * number + 1) // (2 * count) - SPOT_BYTES // 2, SPOT_BYTES


def _regions(file: Path, descriptor: int, size: int) -> tuple[bytes, list[tuple[int, int]]]:
    """A file's header, and (begin, end) of each tensor's bytes; equal parts of the file if its format is unknown."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        if file.suffix == ".safetensors":
            header = _header(descriptor, size)
            start = 8 + len(header)
            return header, [(start + begin, start + end) for begin, end in _offsets(header)]
    with contextlib.suppress(zipfile.BadZipFile, OSError, ValueError):
        if file.suffix == ".bin":
            parts = zipfile.ZipFile(file).infolist()
            lines = "\n".join(f"{part.filename} {part.file_size} {part.CRC}" for part in parts)
            return lines.encode(), [(part.header_offset, part.header_offset + part.compress_size) for part in parts]
    step = max(SPOT_BYTES, -(-size // FILE_SPOTS))
    return b"", [(at, min(size, at + step)) for at in range(0, size, step)]


def _header(descriptor: int, size: int) -> bytes:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > min(_MOST_HEADER_BYTES, size):
        raise ValueError("no header")
    return os.pread(descriptor, length, 8)


def _offsets(header: bytes) -> list[tuple[int, int]]:
    """(begin, end) of each tensor's bytes, by a safetensors header."""
    tensors = [each["data_offsets"] for name, each in json.loads(header).items() if name != "__metadata__"]
    return sorted((int(begin), int(end)) for begin, end in tensors)
