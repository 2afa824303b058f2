"""A store's folder: its layout and format version, locks, and files that appear complete or not at all.

cacheblend.json          the format version; makes the folder a store
blocks/ab/abcd....safetensors
manifests/abcd....json
documents/abcd.../ef01....json    by root, with a lock that is held while it is decided what is referred to
pins/abcd...             empty files
tmp/                     files being written, each locked (flock) by its writer; what large ones will take
lock                     locked while files are evicted
"""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH104, PTH106, PTH108, PTH110, PTH112, PTH114, PTH116, PTH120, PTH123, PTH208

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cacheblend.core.errors import StoreError, StoreFormatError, StoreFullError, StoreReadOnlyError
from cacheblend.core.names import BlockName
from cacheblend.store.base import LOGGER_NAME, SMALL_FILE_BYTES
from cacheblend.store.format.block_file import CHAIN_FORMAT, name_of_file
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.sealed import DOCUMENTS, MANIFESTS, Bytes, Sealed

FORMAT_FILE = "cacheblend.json"
OWNER_ONLY = 0o600  # permissions of files: passages can be read back from what a store holds
BLOCK_SUFFIX, JSON_SUFFIX = ".safetensors", ".json"
STAMP_SETTLES_NS = 2 * 10**9
"""Two changes within one tick of a file system's clock have the same time; the coarsest ticks are 2 s."""
logger = logging.getLogger(LOGGER_NAME)

_RESERVED = ".reserved"
_TEMPORARY = re.compile(rf"\d+-[0-9a-f]{{16}}({re.escape(_RESERVED)})?")
_STALE_AFTER_S = 3600.0
_RESERVED_FOR_S, _WRITTEN_BYTES_PER_S = 60.0, 1e6  # see `_lasts_s`
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_BUFFERS_PER_CALL = 512  # below IOV_MAX, which is 1024 on Linux


class Folder:
    """A folder opened as a store; made if it is not there. A relative `path` is of the current folder now, and stays so
    if that is changed. `durable`: fsync files and folders before a write counts as done. `locks`: flock files being
    written, and the folder while evicting. Without locks (on a network file system they may hang or be missing)
    temporary files of dead processes are recognised by their age, an hour, what they had reserved after a minute and a
    second for each megabyte; and processes that evict at the same time may evict more than necessary. `mode`:
    permissions of new files, whatever the umask; new folders can be entered by those who may read files. Raises
    `StoreFormatError`: written in a newer format; `StoreError`: not a folder, one with other things in it, or one that
    cannot be read; a relative path, and the current folder is gone."""

    def __init__(
        self, path: Path, read_only: bool = False, durable: bool = True, locks: bool = True, mode: int = OWNER_ONLY
    ) -> None:
        try:
            self.path = path = path.absolute()
        except OSError as error:
            raise StoreError(f"{path} is relative, and the current folder is gone: name the whole path") from error
        self.durable, self._locks, self._mode = durable, locks, mode
        self.read_only = read_only  # as requested, or because the folder cannot be written to
        self.blocks = path / "blocks"
        self.manifests = path / "manifests"
        self.documents = path / "documents"
        self.pins = path / "pins"
        self.tmp = path / "tmp"
        self._blocks_prefix = f"{self.blocks}/"
        self._reserved: set[str] = set()  # this process's own reservations
        self._format_file = str(path / FORMAT_FILE)
        self.format = 0  # the version of the cacheblend that made it
        if not self._has_format():
            self._create()
            self._has_format()
        if not self.read_only:
            self._prepare()

    @property
    def is_there(self) -> bool:
        """Whether it has its format file. One stat."""
        return os.path.exists(self._format_file)

    def block_path(self, name: BlockName) -> str:
        """Path of the block's file, whether it exists or not."""
        text = name.hex()
        return f"{self._blocks_prefix}{text[:2]}/{text}{BLOCK_SUFFIX}"

    # Opening

    def _has_format(self) -> bool:
        """Checks the format file; False if there is none."""
        file = self.path / FORMAT_FILE
        try:
            content = json.loads(file.read_text())
            version = content["format"]
            if type(version) is not int or version < 1:
                raise ValueError(f"format {version!r} is not a whole number from 1")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise unreadable(self.path, error) from error
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise StoreFormatError(
                f"{file} is damaged ({error!r}): write {_format_file_text()!r} to it if the folder holds a "
                f"store of format {CHAIN_FORMAT}, else use another folder"
            ) from error
        if version > CHAIN_FORMAT:
            raise StoreFormatError(
                f"{self.path} is a store of format {version}; this version of cacheblend reads "
                f"formats up to {CHAIN_FORMAT}: upgrade cacheblend, or use another folder"
            )
        self.format = version
        return True

    def _create(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is not a folder: name a folder for the store")
        if self.read_only:
            entries = os.listdir(self.path) if self.path.is_dir() else []
            if {"blocks", "manifests"} <= set(entries):
                raise StoreError(self._not_a_store(entries))
            raise StoreError(f"there is no store in {self.path}: check the path")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.make(self.path)
            others = set(os.listdir(self.path)) - {"lost+found"}
            if self.tmp.is_dir() and all(map(_TEMPORARY.fullmatch, os.listdir(self.tmp))):
                others.discard("tmp")  # left by a process that died while it made the store
            if others and not self._has_format():  # checked again: another process may have just made the store
                raise StoreError(self._not_a_store(others))
            self.make(self.tmp)
            self.publish(self.path / FORMAT_FILE, [memoryview(_format_file_text().encode())])
        except OSError as error:
            raise store_error(error, f"cannot make a store in {self.path}") from error

    def _not_a_store(self, entries: Iterable[str]) -> str:
        if {"blocks", "manifests"} <= set(entries):
            return (
                f"{self.path} has blocks and manifests, and no {FORMAT_FILE}: if it is a store "
                f"whose format file was deleted, write {_format_file_text()!r} to {self.path / FORMAT_FILE}; else use "
                "another folder"
            )
        return f"{self.path} is not a store and not empty (it has {sorted(entries)[0]!r}): use an empty folder"

    def _prepare(self) -> None:
        try:
            for folder in (self.blocks, self.manifests, self.pins, self.tmp):
                self.make(folder)
            for entry in os.scandir(self.tmp):  # those of dead processes go; a live writer holds its file's lock
                if _TEMPORARY.fullmatch(entry.name):
                    self._size_in_use(entry.path)
            path, fd = self._new_temporary()
            os.unlink(path)
            os.close(fd)
        except OSError as error:
            if error.errno in _REFUSED:
                self.read_only = True
            elif not is_full(error):
                raise store_error(error, f"cannot open the store in {self.path}") from error

    def _size_in_use(self, path: str) -> int:
        """Bytes of a temporary file of a live writer; that of a dead one is removed, and has none."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            status = os.fstat(fd)
            try:
                self._lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return status.st_size
            except OSError:  # a file system without flock: decide by age
                if time.time() - status.st_mtime <= _lasts_s(path, status.st_size):
                    return status.st_size
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return 0
        finally:
            os.close(fd)

    # What is being written

    @contextlib.contextmanager
    def reservation(self, nbytes: int) -> Iterator[None]:
        """A context in which others see that so many bytes are being written, if there is room for an empty file."""
        try:
            path, fd = self._new_temporary(_RESERVED)
        except OSError:
            yield
            return
        self._reserved.add(path)
        try:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, nbytes)  # takes no room
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
            self._reserved.discard(path)  # only then: it would count as another process's
            os.close(fd)

    def reserved_bytes(self) -> int:
        """Bytes that other processes are writing, as far as they have reserved them."""
        try:
            paths = [f"{self.tmp}/{name}" for name in os.listdir(self.tmp) if name.endswith(_RESERVED)]
        except (FileNotFoundError, NotADirectoryError):
            return 0
        return sum(self._size_in_use(path) for path in paths if path not in self._reserved)

    # Writing

    def publish(
        self, target: Path | str, buffers: Sequence[memoryview], mtime_ns: int | None = None, others: Sequence[str] = ()
    ) -> None:
        """Makes a file with this content appear at `target` in one step, replacing an existing one, and as hard links
        at `others`. If it raises `OSError` no file is left, not even at `target` if it failed after that appeared."""
        path, fd = self._new_temporary()
        made = [path]
        try:
            _write_all(fd, buffers)
            if mtime_ns is not None:
                os.utime(fd, ns=(mtime_ns, mtime_ns))
            if self.durable:
                os.fsync(fd)
            for other in others:
                made.append(self._new_temporary_name())
                os.link(path, made[-1])
                made[-1] = self._rename(made[-1], other)
            made[0] = self._rename(path, str(target))
            for parent in {os.path.dirname(each) for each in made} if self.durable else ():
                sync_folder(parent)
        except BaseException:
            for each in made:
                with contextlib.suppress(OSError):
                    os.unlink(each)
            raise
        finally:
            os.close(fd)

    def _rename(self, path: str, target: str) -> str:
        """Moves the file and returns where it is now."""
        try:
            os.rename(path, target)
        except FileNotFoundError:  # the first block of its sub-folder
            parent = os.path.dirname(target)
            self.make(Path(parent))
            if self.durable:
                sync_folder(os.path.dirname(parent))
            os.rename(path, target)
        return target

    def make(self, folder: Path) -> None:
        """Makes a folder and those that it lies in, unless they are there; raises `OSError`."""
        mode = self._mode | (self._mode & 0o444) >> 2
        if not folder.parent.exists():
            self.make(folder.parent)
        try:
            folder.mkdir(mode)
        except FileExistsError:
            return
        if self._mode != OWNER_ONLY:
            folder.chmod(mode)

    def touch(self, path: Path) -> None:
        """Makes an empty file, unless it is there; raises `OSError`."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        except FileExistsError:
            return
        try:
            if self._mode != OWNER_ONLY:
                os.fchmod(fd, self._mode)
        finally:
            os.close(fd)

    def _new_temporary(self, suffix: str = "") -> tuple[str, int]:
        """A new file in the folder, locked: (path, descriptor)."""
        while True:
            path = self._new_temporary_name() + suffix
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
            if self._mode != OWNER_ONLY:
                os.fchmod(fd, self._mode)  # whatever the umask
            with contextlib.suppress(OSError):  # a file system without flock
                self._lock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:  # else: another process cleaned it up before it was locked
                return path, fd
            os.close(fd)

    def _new_temporary_name(self) -> str:
        return str(self.tmp / f"{os.getpid()}-{secrets.token_hex(8)}")

    def _lock(self, fd: int, how: int) -> None:
        """Raises `OSError` where there are no locks."""
        if not self._locks:
            raise OSError(errno.ENOLCK, "locks are turned off")
        fcntl.flock(fd, how)

    @contextlib.contextmanager
    def locked(self, part: Path | None = None) -> Iterator[None]:
        """A context that one process at a time holds (any number, if the disk is too full for the lock's file). `part`:
        the folder whose file ``lock`` is locked; None: the store's own, for evictions."""
        lock = (part or self.path) / "lock"
        try:
            self.touch(lock)
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if not is_full(error):
                raise
            yield
            return
        try:
            with contextlib.suppress(OSError):  # a file system without flock
                self._lock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _lasts_s(path: str, nbytes: int) -> float:
    """The age up to which a temporary file may have a live writer, where nothing but the age tells. A file that is
    being written would be lost with its name. A reservation costs its writer nothing when it goes early, but others
    would count on its bytes while it is there: it lasts as long as writing them does on a slow disk."""
    return _RESERVED_FOR_S + nbytes / _WRITTEN_BYTES_PER_S if path.endswith(_RESERVED) else _STALE_AFTER_S


def _format_file_text() -> str:
    return json.dumps({"format": CHAIN_FORMAT, "what": "cacheblend KV cache store, see docs/format.md"}) + "\n"


def sync_folder(path: str) -> None:
    """Makes the folder's entries survive a power failure, where its file system can."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # folders of shares and of FUSE may have none
            raise
    finally:
        os.close(fd)


def _write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    waiting = [buffer for buffer in reversed(buffers) if len(buffer)]
    while waiting:
        written = os.writev(fd, waiting[: -_BUFFERS_PER_CALL - 1 : -1])
        while waiting and written >= len(waiting[-1]):
            written -= len(waiting.pop())
        if written:
            waiting[-1] = waiting[-1][written:]


class SealedFiles:
    """A folder's manifests and documents' records, see `SealedPlace`. Raises `OSError` where it cannot be read."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._path = folder, str(folder.path)
        self._locks: dict[str, threading.Lock] = {}

    def where(self, kind: str, name: BlockName) -> str:
        return f"{self._path}/{kind}/{name.hex()}{JSON_SUFFIX}"

    def put_sealed(self, kind: str, name: BlockName, data: Bytes) -> None:
        path = self.where(kind, name)
        try:
            self._folder.publish(path, [memoryview(data)])
        except OSError as error:
            raise store_error(error, f"cannot write {path}") from error

    def sealed(self, kind: str) -> Mapping[BlockName, Sealed]:
        found: dict[BlockName, Sealed] = {}
        for name in named_files(f"{self._path}/{kind}", JSON_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(self.where(kind, name))
                mark = status.st_ino, status.st_size, status.st_mtime_ns
                found[name] = Sealed(mark, whole_pages(status.st_size))
        return found

    def read_sealed(self, kind: str, names: Sequence[BlockName]) -> list[Bytes | DamagedError | None]:
        """An I/O error of the disk counts as damage; a manifest that cannot be opened is left out."""
        return [self._read(kind, name) for name in names]

    def _read(self, kind: str, name: BlockName) -> Bytes | DamagedError | None:
        path = self.where(kind, name)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would never end
                return DamagedError("it is no regular file")
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                return DamagedError(f"cannot be read: {error}")
            if kind != MANIFESTS:
                raise
            logger.warning("manifest %s cannot be read: %s; left out", path, error.strerror)
            return None

    def has_sealed(self, kind: str, name: BlockName) -> bool:
        return os.path.exists(self.where(kind, name))

    def delete_sealed(self, kind: str, name: BlockName) -> bool:
        return unlink(self.where(kind, name), remove_entry)

    def kinds(self) -> list[str]:
        """Folders that are empty but for the lock have no records."""
        try:
            folders = os.listdir(self._folder.documents)
        except FileNotFoundError:
            return []
        roots = [folder for folder in sorted(folders) if name_of_file(folder) is not None]
        return [f"{DOCUMENTS}{root}" for root in roots if named_files(f"{self._folder.documents}/{root}", JSON_SUFFIX)]

    @contextlib.contextmanager
    def lock(self, kind: str) -> Iterator[None]:
        """By flock, where the file system has it."""
        place = self._folder.path / kind
        if not self._folder.is_there:  # made here, it would be no store to whoever opens it next
            raise StoreError(f"the store {self._folder.path} is gone; restart this process once it is there again")
        try:
            self._folder.make(place)
        except OSError as error:
            raise store_error(error, f"cannot make {place}") from error
        with self._locks.setdefault(kind, threading.Lock()), self._folder.locked(place):
            yield

    def listing_stamp(self) -> Hashable | None:
        """When the folder of manifests last changed; None while a change may still go unnoticed."""
        try:
            status = os.stat(self._folder.manifests)
        except FileNotFoundError:
            return None  # `sealed` finds none either
        settled = time.time_ns() - status.st_mtime_ns > STAMP_SETTLES_NS
        return (status.st_ino, status.st_mtime_ns) if settled else None


def whole_pages(nbytes: int) -> int:
    """What a small file occupies on a disk."""
    return -(-nbytes // SMALL_FILE_BYTES) * SMALL_FILE_BYTES


# ---- entries ------------------------------------------------------------------------------------------------


def named_files(folder: str, suffix: str = "") -> list[BlockName]:
    """Block names, sorted, of the files in `folder` that are named by a block name in hexadecimal and `suffix`."""
    try:
        files = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for file in files if (name := name_of_file(file, suffix)) is not None)


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


def unlink(path: str, remove: Callable[[str], None] = os.unlink) -> bool:
    """Removes a file; False if it does not exist. Raises `StoreError`."""
    try:
        remove(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise store_error(error, f"cannot remove {path}") from error
    return True


# ---- the system's errors, as errors of the store that say what to do ----------------------------------------


def is_full(error: OSError) -> bool:
    """Whether the disk or a quota is full, so that evicting blocks could help."""
    return error.errno in _FULL


def store_error(error: OSError, what: str) -> StoreError:
    """The `StoreError` for a system error while writing; `what` says what failed."""
    if is_full(error):
        return StoreFullError(f"{what}: {error.strerror}; free some space or raise the quota")
    if error.errno == errno.EFBIG:
        return StoreFullError(f"{what}: {error.strerror}; raise the limit on file sizes (ulimit -f)")
    if error.errno in _REFUSED:
        return StoreReadOnlyError(f"{what}: {error.strerror}; check the folder's permissions and its mount")
    return StoreError(f"{what}: {error}")


def unreadable(path: Path, error: OSError) -> StoreError:
    """The `StoreError` for a system error while the folder at `path` was read."""
    where = "" if error.filename in (None, str(path)) else f"{error.filename}: "
    return StoreError(
        f"the store in {path} cannot be read: {where}{error.strerror or error}; check what is there and its "
        "permissions, or use another folder"
    )
