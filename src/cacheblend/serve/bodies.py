"""What a body may be before it is parsed: bytes, of all requests together too, and values.

Parsing and checking JSON holds up every other request. Text is quick; millions of numbers or empty lists are not.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from cacheblend.serve.errors import ApiError

LARGE = 1 << 16
"""Bytes from which on a body is looked at before it is parsed."""
VALUES, CONTAINERS = 1 << 18, 1 << 16
"""Values, and lists and objects, of a body: these are parsed and checked in a tenth of a second."""
FREE = 1 << 16
"""Bytes of every body that count against no bound: short requests are read whatever long ones there are."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""Keeps no way back: texts may have 16 MB. One that nothing ends goes to the end: or each quote in it began one."""


def check_shape(body: bytes, values: int = VALUES) -> None:
    """Refuses JSON of more values, or more lists and objects, than are parsed in a moment.

    Args:
        body: JSON or not; only its punctuation is looked at.
        values: numbers, texts and others; at most `VALUES` or the tokens of a context, whichever is more.

    Raises:
        ApiError: 413, it has more.
    """
    found, nested = body.count(b","), body.count(b"[") + body.count(b"{")
    if found <= values and nested <= CONTAINERS:
        return
    found = nested = at = 0
    for match in _STRING.finditer(body):  # the same outside of texts
        found += body.count(b",", at, match.start())
        nested += body.count(b"[", at, match.start()) + body.count(b"{", at, match.start())
        at = match.end()
    found += body.count(b",", at)
    nested += body.count(b"[", at) + body.count(b"{", at)
    for count, most, what in ((found, values, "values"), (nested, CONTAINERS, "lists and objects")):
        if count > most:
            raise ApiError(
                413, f"the body has {count:,} {what}; at most {most:,} are read; send several requests", code="too_long"
            )


class BodyBudget:
    """Bytes of all bodies that are in memory at a time, since many connections may send a part of a long one.

    A tenant takes at most half of what the others leave, so that there is always something left for one more.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: dict[str, int] = {}

    @contextmanager
    def open(self, tenant: str) -> Iterator["BodyShare"]:
        """What one body of a tenant takes; given back in the end."""
        share = BodyShare(self, tenant)
        try:
            yield share
        finally:
            self.take(tenant, -share.bytes)

    def take(self, tenant: str, count: int) -> None:
        """Takes so many bytes, or gives them back.

        Raises:
            ApiError: 503, other bodies have them.
        """
        taken, own = sum(self._taken.values()), self._taken.get(tenant, 0)
        if count > 0 and own + count > (self._limit - (taken - own)) // 2:
            raise ApiError(
                503,
                f"{taken:,} bytes of other requests are being read, {own:,} of this key's own",
                code="overloaded",
                retry_after_s=5,
            )
        self._taken[tenant] = own + count
        if not self._taken[tenant]:
            del self._taken[tenant]


class BodyShare:
    """One body's part of a `BodyBudget`; its first `FREE` bytes are none of it.

    Attributes:
        bytes: taken so far.
    """

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget, self._tenant = budget, tenant
        self._read = self.bytes = 0

    def take(self, count: int) -> None:
        """Takes more; raises as `BodyBudget.take`."""
        self._read += count
        more = max(0, self._read - FREE) - self.bytes
        self._budget.take(self._tenant, more)
        self.bytes += more
