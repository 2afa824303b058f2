"""Pages of a list, in the form of OpenAI's lists: ``limit``, ``after``; ``has_more``, ``last_id``."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query

from cacheblend.core.naming import BlockName
from cacheblend.serve.errors import ApiError

T = TypeVar("T")
Limit = Annotated[int, Query(ge=1, le=1000, description="Entries of a page, at most.")]
After = Annotated[str, Query(max_length=64, description="`last_id` of the page before; empty: the first page.")]


def page_of(
    listed: Sequence[T], limit: int, after: str, name_of: Callable[[T], BlockName], show: Callable[[list[T]], list[Any]]
) -> dict[str, Any]:
    """One page.

    Args:
        listed: the whole list, ordered by name.
        limit: entries, at most.
        after: name of the last entry of the page before, hexadecimal; that entry may be gone.
        name_of: the name of an entry.
        show: the entries as clients see them.

    Raises:
        ApiError: `after` is no name.
    """
    try:
        name = bytes.fromhex(after)
    except ValueError:
        raise ApiError(400, f"after {after!r} is not the last_id of a page; leave it out", param="after") from None
    left = [each for each in listed if name_of(each) > name]
    page = left[:limit]
    last = name_of(page[-1]).hex() if page else None
    return {"object": "list", "data": show(page), "has_more": len(left) > len(page), "last_id": last}
