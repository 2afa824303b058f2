"""Pages of a list, in the form of OpenAI's lists: ``limit``, ``after``; ``has_more``, ``last_id``."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Annotated, Any, TypeVar

from fastapi import Query

from cacheblend.core.names import BlockName
from cacheblend.serve.errors import ApiError

T = TypeVar("T")
Limit = Annotated[int, Query(ge=1, le=1000, description="Entries of a page, at most.")]
After = Annotated[str, Query(max_length=64, description="`last_id` of the page before; empty: the first page.")]


def page_of(
    names: Sequence[BlockName],
    limit: int,
    after: str,
    read: Callable[[BlockName], T | None],
    show: Callable[[list[T]], list[Any]],
) -> dict[str, Any]:
    """One page; only its entries are read.

    Args:
        names: of the whole list, ordered.
        limit: entries, at most.
        after: name of the last entry of the page before, hexadecimal; that entry may be gone.
        read: the entry of a name; None: it does not belong to the list.
        show: the entries as clients see them.

    Raises:
        ApiError: `after` is no name.
    """
    try:
        before = BlockName(bytes.fromhex(after))
    except ValueError:
        raise ApiError(400, f"after {after!r} is not the last_id of a page; leave it out", param="after") from None
    left = islice(names, bisect_right(names, before), None)
    found = ((name, entry) for name in left if (entry := read(name)) is not None)
    page = list(islice(found, limit))
    last = page[-1][0].hex() if page else None
    has_more = next(found, None) is not None
    return {"object": "list", "data": show([entry for _, entry in page]), "has_more": has_more, "last_id": last}
