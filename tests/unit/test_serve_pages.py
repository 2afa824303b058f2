"""Pages of a list: each entry once, whatever comes and goes, and only a page's entries are read."""

from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.names import BlockName
from cacheblend.serve.routes.chunks import page_of

NAMES = st.sets(st.binary(min_size=1, max_size=3), max_size=30).map(lambda names: [BlockName(n) for n in sorted(names)])


@given(NAMES, st.integers(1, 8), st.integers(1, 4))
def test_pages_have_every_entry_of_the_list_once(names: list[BlockName], limit: int, every: int) -> None:
    wanted, read, found, after = names[::every], list[BlockName](), list[str](), ""

    def entry(name: BlockName) -> BlockName | None:
        read.append(name)
        return name if name in wanted else None

    for _ in range(len(names) + 1):
        page = page_of(names, limit, after, entry, lambda page: [name.hex() for name in page])
        assert len(page["data"]) <= limit
        assert len(read) <= (limit + 1) * every  # up to the first entry of the next page
        read.clear()
        found += page["data"]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert found == [name.hex() for name in wanted]


def test_the_entry_that_a_page_ended_with_may_be_gone() -> None:
    names = [BlockName(bytes([number])) for number in (1, 3, 5)]
    assert page_of(names, 2, "02", lambda name: name, list)["data"] == names[1:]
