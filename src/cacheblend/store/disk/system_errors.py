"""The system's errors while a folder is read or written, as errors of the store that say what to do."""

import errno
from pathlib import Path

from cacheblend.core.errors import StoreError, StoreFullError, StoreReadOnlyError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def is_full(error: OSError) -> bool:
    """Whether the disk or a quota is full, so that evicting blocks could help."""
    return error.errno in _FULL


def is_refused(error: OSError) -> bool:
    """Whether permissions or the mount forbid to write."""
    return error.errno in _READ_ONLY


def store_error(error: OSError, what: str) -> StoreError:
    """The `StoreError` for a system error while writing; `what` says what failed."""
    if is_full(error):
        return StoreFullError(f"{what}: {error.strerror}; free some space or raise the quota")
    if error.errno == errno.EFBIG:
        return StoreFullError(f"{what}: {error.strerror}; raise the limit on file sizes (ulimit -f)")
    if is_refused(error):
        return StoreReadOnlyError(f"{what}: {error.strerror}; check the folder's permissions and its mount")
    return StoreError(f"{what}: {error}")


def unreadable(path: Path, error: OSError) -> StoreError:
    """The `StoreError` for a system error while the folder at `path` was read."""
    where = "" if error.filename in (None, str(path)) else f"{error.filename}: "
    return StoreError(
        f"the store in {path} cannot be read: {where}{error.strerror or error}; check what is there and its "
        "permissions, or use another folder"
    )
