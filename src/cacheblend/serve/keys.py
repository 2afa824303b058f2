"""API keys: several, hashed at rest, each a tenant of its own.

    keys.json   {"format": 1, "keys": [{"name", "sha256", "tenant"}, ...]}

A key is 32 random bytes, so a plain hash cannot be turned back. A tenant is a random word that goes into the names of
all that its key stores: no other key finds it, neither by an answer nor by the time it takes.
"""

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from cacheblend.core.errors import InvalidInputError

FORMAT = 1
PREFIX = "cb-"


@dataclass(frozen=True)
class ApiKey:
    """A key that was handed out.

    Attributes:
        name: for people, and for logs.
        sha256: of the key, hexadecimal.
        tenant: see `BlendEngine.planner_of`.
    """

    name: str
    sha256: str
    tenant: str


ANYONE = ApiKey("anyone", "", "")
"""Who asks a server without keys."""


class KeyRing:
    """The keys of a server.

    Args:
        keys: none of them: the server is open to anyone who reaches it.
    """

    def __init__(self, keys: tuple[ApiKey, ...] = ()) -> None:
        self.keys = keys

    def find(self, authorization: str | None) -> ApiKey | None:
        """Whose an ``Authorization`` header is; None: nobody's. Takes as long for a wrong key as for a right one."""
        if not self.keys:
            return ANYONE
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).hexdigest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found if scheme.lower() == "bearer" else None


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in a file; none if it is not there.

    Raises:
        InvalidInputError: it cannot be read, or is no such file.
    """
    if not path.exists():
        return ()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise InvalidInputError(f"{path} has format {data['format']}; this version reads {FORMAT}")
        return tuple(
            ApiKey(**{field: str(each[field]) for field in ("name", "sha256", "tenant")}) for each in data["keys"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path} is no file of keys ({error!r}); make one with `cacheblend keys add`"
        ) from error


def add_key(path: Path, name: str) -> str:
    """A new key, which is told this once; its hash goes into the file, that nobody else may read.

    Raises:
        InvalidInputError: there is a key of that name, or the file cannot be read or written.
    """
    keys = read_keys(path)
    if any(key.name == name for key in keys) or not name:
        raise InvalidInputError(f"{path} has a key of the name {name!r} already" if name else "a key needs a name")
    secret = PREFIX + secrets.token_urlsafe(32)
    new = ApiKey(name, hashlib.sha256(secret.encode()).hexdigest(), secrets.token_hex(16))
    _write(path, (*keys, new))
    return secret


def remove_key(path: Path, name: str) -> None:
    """Takes a key back. What it stored stays until it is evicted.

    Raises:
        InvalidInputError: there is none of that name.
    """
    keys = read_keys(path)
    if all(key.name != name for key in keys):
        raise InvalidInputError(f"{path} has no key of the name {name!r}")
    _write(path, tuple(key for key in keys if key.name != name))


def _write(path: Path, keys: tuple[ApiKey, ...]) -> None:
    text = json.dumps({"format": FORMAT, "keys": [asdict(key) for key in keys]}, indent=1) + "\n"
    new = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be written: {error.strerror}") from error
