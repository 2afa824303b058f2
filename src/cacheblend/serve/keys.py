"""API keys: hashed in a file, each a tenant of its own.

    keys.json   {"format": 1, "keys": [{"name", "sha256", "tenant"}, ...]}

A key is 32 random bytes, so a plain hash cannot be reversed. A tenant is a random word that becomes part of the names
of all blocks stored with its key: no other key can find them, neither from answers nor from response times.
"""

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cacheblend.core.errors import InvalidInputError

FORMAT = 1
LOOK_S = 1.0  # seconds between two looks at a file of keys
logger = logging.getLogger("cacheblend.serve")


@dataclass(frozen=True)
class ApiKey:
    """A key as it is kept: its name for people and logs, its hash (hexadecimal), and its tenant (`planner_of`)."""

    name: str
    sha256: str
    tenant: str

    @property
    def label(self) -> str:
        """What figures call the key; everyone with a key may read them, so it says nothing of whose it is."""
        return self.sha256[:8] or self.name


ANYONE = ApiKey("anyone", "", "")  # the key of every request to a server without keys


class KeyRing:
    """The keys of a server, read again when their file, if any, changes; without keys at first, it needs none."""

    def __init__(self, keys: tuple[ApiKey, ...] = (), file: Path | None = None) -> None:
        self.needs_key, self._file = bool(keys), file  # also once the last one has been removed
        self._keys, self._looked_at, self._stamp = keys, time.monotonic(), _stamp(file)

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """The keys now; looks at the file once a second."""
        if self._file is not None and time.monotonic() > self._looked_at + LOOK_S:
            self._looked_at = time.monotonic()
            if _stamp(self._file) != self._stamp:
                self.reload()
        return self._keys

    def reload(self) -> None:
        """Reads the file. Keys stay as they are if it cannot be read; without any left, nobody is let in."""
        if self._file is None:
            return
        stamp = _stamp(self._file)
        try:
            self._keys = read_keys(self._file)
        except InvalidInputError as error:
            logger.error("the keys stay as they are: %s", error)
        else:
            logger.warning("%d keys were read from %s", len(self._keys), self._file)
        self._stamp = stamp

    def find(self, authorization: str | None) -> ApiKey | None:
        """The key in an ``Authorization`` header, None if unknown; takes the same time for wrong and right keys."""
        keys = self.keys
        if not self.needs_key:
            return ANYONE
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).hexdigest()
        found = [key for key in keys if hmac.compare_digest(key.sha256, digest)]
        return found[-1] if found and scheme.lower() == "bearer" else None


def _stamp(file: Path | None) -> tuple[int, ...]:
    """Changes whenever a file does; empty if there is none."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        status = None
    return () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in a file; none if it does not exist. Raises `InvalidInputError` if it cannot be read."""
    if not path.exists():
        return ()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise InvalidInputError(f"{path} has format {data['format']}; this version reads {FORMAT}")
        return tuple(ApiKey(*(str(each[field]) for field in ("name", "sha256", "tenant"))) for each in data["keys"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{path} is not a file of keys ({error!r}); make one with `cacheblend keys add`"
        raise InvalidInputError(message) from error


def add_key(path: Path, name: str) -> str:
    """Makes a new key and returns it, this once; the file, at first readable by its owner only, keeps the hash. Raises
    `InvalidInputError` if the name is empty or taken, or the file cannot be read or written."""
    path = path.resolve()  # of a link the file that it names, which a server reads, too
    with _locked(path):
        keys = read_keys(path)
        if any(key.name == name for key in keys) or not name:
            raise InvalidInputError(f"{path} already has a key of the name {name!r}" if name else "a key needs a name")
        secret = f"cb-{secrets.token_urlsafe(32)}"
        new = ApiKey(name, hashlib.sha256(secret.encode()).hexdigest(), secrets.token_hex(16))
        _write(path, (*keys, new))
    return secret


def remove_key(path: Path, name: str) -> None:
    """Removes a key; blocks stored with it stay until they are evicted. Raises `InvalidInputError`, as `add_key`."""
    path = path.resolve()
    with _locked(path):
        keys = read_keys(path)
        if all(key.name != name for key in keys):
            raise InvalidInputError(f"{path} has no key of the name {name!r}")
        _write(path, tuple(key for key in keys if key.name != name))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else changes the file meanwhile: of two that add a key at once one would be lost, and it has been told."""
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, keys: tuple[ApiKey, ...]) -> None:
    """Replaces the file by one of the same owner and permissions, which a server can read as it could the other."""
    text = json.dumps({"format": FORMAT, "keys": [asdict(key) for key in keys]}, indent=1) + "\n"
    new = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            if path.exists():
                before = path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), before.st_mode & 0o777)
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise InvalidInputError(f"{path} cannot be written: {error.strerror}") from error
