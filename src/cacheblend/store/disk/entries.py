"""Entries of a store's folder: which are named as blocks, and how anything is removed that stands in a file's place."""

# ruff: noqa: PTH104, PTH106, PTH108, PTH112, PTH114, PTH208

import os

from cacheblend.core.names import BlockName
from cacheblend.store.disk.system_errors import store_error
from cacheblend.store.format.block_file import NAME_BYTES


def named_files(folder: str, suffix: str = "") -> list[BlockName]:
    """Block names, sorted, of the files in `folder` that are named by a block name in hexadecimal and `suffix`."""
    try:
        files = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for file in files if (name := name_of_file(file, suffix)) is not None)


def name_of_file(file: str, suffix: str) -> BlockName | None:
    """The block name in a file's name, None if it has another form."""
    text = file.removesuffix(suffix)
    if len(file) != 2 * NAME_BYTES + len(suffix) or len(text) != 2 * NAME_BYTES or text.lower() != text:
        return None
    try:
        return BlockName(bytes.fromhex(text))
    except ValueError:
        return None


def remove_entry(path: str) -> None:
    """Removes what stands in a file's place; a directory with something in it is moved aside, to ``.aside``."""
    try:
        return os.unlink(path)
    except OSError:
        if not os.path.isdir(path) or os.path.islink(path):
            raise
    try:
        os.rmdir(path)
    except OSError:
        os.rename(path, f"{path}.aside")


def unlink(path: str) -> bool:
    """Removes a file; False if it does not exist. Raises `StoreError`."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise store_error(error, f"cannot remove {path}") from error
    return True
