"""Records of documents in a store made of other stores: each in all of them."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from cacheblend.core.naming import BlockName
from cacheblend.store.base import KVStore
from cacheblend.store.documents import DamagedRecord, DocumentRecord, DocumentRecords


class CombinedDocuments(DocumentRecords):
    """The records of several stores.

    Args:
        members: the stores, nearest first.
    """

    def __init__(self, members: Sequence[KVStore]) -> None:
        self._members = members

    def put(self, record: DocumentRecord) -> None:
        """See `DocumentRecords`. In all members."""
        for member in self._members:
            member.documents.put(record)

    def get(self, root: BlockName, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        """See `DocumentRecords`. The nearest member's, an intact one before a damaged one."""
        found = [member.documents.get(root, name) for member in self._members]
        return _best(each for each in found if each is not None) if any(found) else None

    def all(self, root: BlockName) -> list[DocumentRecord | DamagedRecord]:
        """See `DocumentRecords`."""
        found: dict[BlockName, list[DocumentRecord | DamagedRecord]] = {}
        for member in self._members:
            for record in member.documents.all(root):
                found.setdefault(record.name, []).append(record)
        return [_best(found[name]) for name in sorted(found)]

    def names(self, root: BlockName) -> list[BlockName]:
        """See `DocumentRecords`."""
        return sorted({name for member in self._members for name in member.documents.names(root)})

    def delete(self, root: BlockName, name: BlockName) -> bool:
        """See `DocumentRecords`."""
        deleted = [member.documents.delete(root, name) for member in self._members]
        return any(deleted)

    def roots(self) -> list[BlockName]:
        """See `DocumentRecords`."""
        return sorted({root for member in self._members for root in member.documents.roots()})

    def changing(self, root: BlockName) -> AbstractContextManager[None]:
        """See `DocumentRecords`. By the last member's lock: a near one may be each machine's own."""
        return self._members[-1].documents.changing(root)


def _best(found: Iterable[DocumentRecord | DamagedRecord]) -> DocumentRecord | DamagedRecord:
    records = list(found)
    return next((each for each in records if isinstance(each, DocumentRecord)), records[0])
