"""Syncs of the same documents at the same time leave no chunk that nobody has: it would stay until the store is full.

Situations: two syncs that read the same records and then put other texts of one document, in any order of their ends;
documents that are dropped, or edited, while another sync computes them; a chunk that a third document has.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend.engines.documents import Document
from cacheblend.engines.hf import BlendEngine, DocumentSync
from cacheblend.store import DiskStore
from integration.test_sync import CUTTING, check, opened, sentences, sync


def body(seed: int) -> str:
    return " ".join(sentences(random.Random(seed), 20))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BlendEngine, BlendEngine]]:
    folder: Path = tmp_path_factory.mktemp("together") / "s"
    with opened(DiskStore(folder, durable=False)) as one, opened(DiskStore(folder, durable=False)) as two:
        yield one, two


@pytest.mark.parametrize("is_first_last", [False, True])
def test_two_texts_of_one_document_at_once(pair: tuple[BlendEngine, BlendEngine], is_first_last: bool) -> None:
    one, two = pair
    tenant = f"two {is_first_last}"
    sync(one, {"a": body(1)}, tenant=tenant)
    syncs = [DocumentSync(engine, cutting=CUTTING, tenant=tenant) for engine in pair]
    for each, seed in zip(syncs, (2, 3), strict=True):
        each.put([Document("a", body(seed))])
    for each in syncs[::-1] if is_first_last else syncs:
        each.finish()
    check(two, {"a": body(3)}, tenant)


@pytest.mark.parametrize("then", ["dropped", "edited"])
def test_documents_that_change_while_they_are_computed(pair: tuple[BlendEngine, BlendEngine], then: str) -> None:
    one, two = pair
    sync(two, {"c": body(6)}, tenant=then)  # its chunks are those of "b", too
    first = DocumentSync(one, cutting=CUTTING, tenant=then, reads_all=False)
    steps = first.steps([Document("a", body(5)), Document("b", body(6))], 48)
    for _ in range(4):
        next(steps)
    second = DocumentSync(two, cutting=CUTTING, tenant=then, reads_all=False)
    if then == "dropped":
        second.drop(["a", "b"])
    else:
        second.put([Document("a", body(7)), Document("b", "")])
    second.finish()
    assert all(step is None for step in steps)
    report = first.finish()
    assert report.missing_documents == 0 and report.dropped_chunks > 0
    check(two, {"c": body(6)} | ({"a": body(7), "b": ""} if then == "edited" else {}), then)
