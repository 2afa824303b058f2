"""Reads documents with ids from a folder, a file of JSON lines, or a stream; every error names the place.

| source    | a document |
|---|---|
| folder    | each ``.txt`` and ``.md`` file in it or below it; its id is the path, with ``/`` |
| .jsonl, - | each line: ``{"id", "text", "title"?}`` |

A source is read twice: first all ids, so that nothing is changed where two are equal or a line is wrong, then the texts
one by one, so that a large source does not have to fit into memory.
"""

# Many files, listed by the system's walk, which tells of folders that it cannot read:
# ruff: noqa: PTH110, PTH113, PTH114, PTH118

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.data.files import as_object, kind, parse_json, read_text, required
from cacheblend.engines.documents import Document

ENDINGS = (".txt", ".md")  # of files in a folder that are documents


@dataclass(frozen=True)
class Unreadable:
    """A document that is in the source, but cannot be read now; what is stored of it stays."""

    id: str  # of the document
    reason: str  # what is wrong, with the file's name


def read_documents(source: str, stream: IO[bytes] | None = None) -> "FolderSource | LinesSource":
    """The documents of a folder, a file, or for ``-`` the stream; their ids are read and checked. Raises
    `InvalidInputError`: there is no such source, two documents have one id, or a line is no document."""
    path = Path(source)
    if source == "-" and stream is not None:
        # A copy that can be read twice: in memory, or in a file where it is long.
        copy = tempfile.SpooledTemporaryFile(max_size=1 << 26)  # noqa: SIM115  # lives as long as the source
        shutil.copyfileobj(stream, copy)
        return LinesSource("standard input", copy)
    if path.is_dir():
        return FolderSource(path)
    if path.suffix == ".jsonl" and path.is_file():
        try:
            return LinesSource(source, path.open("rb"))
        except OSError as error:
            raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from error
    what = "is not a folder or a .jsonl file" if path.exists() else "does not exist"
    raise InvalidInputError(f'--source {source} {what}; give a folder of texts, JSON lines of {{"id", "text"}}, or -')


@dataclass
class FolderSource:
    """The files of a folder."""

    folder: Path
    ids: dict[str, None] = field(init=False)  # of all documents, in order
    skipped: list[str] = field(init=False)  # files that are not documents, as ``"3 files *.pdf"``

    def __post_init__(self) -> None:
        """Lists the files; a folder that cannot be read is an error, since its documents would seem to be gone."""

        def fail(error: OSError) -> None:
            raise InvalidInputError(f"{error.filename or self.folder} cannot be read: {error.strerror}") from error

        others, names = Counter[str](), list[str]()
        for folder, folders, files in os.walk(self.folder, onerror=fail):
            folders[:] = [name for name in folders if not name.startswith(".")]
            others["linked folders"] += sum(os.path.islink(os.path.join(folder, name)) for name in folders)
            for name in files:
                path = Path(folder, name)
                if name.startswith(".") or (os.path.exists(path) and not os.path.isfile(path)):  # a device, a pipe
                    continue
                if name.endswith(ENDINGS):
                    names.append(path.relative_to(self.folder).as_posix())
                else:
                    others[f"files *{path.suffix}"] += 1
        self.ids = dict.fromkeys(sorted(names, key=lambda name: name.split("/")))
        self.skipped = [f"{count} {what}" for what, count in sorted(others.items()) if count]

    def documents(self) -> Iterator[Document | Unreadable]:
        """Reads the documents, in the order of `ids`."""
        for name in self.ids:
            try:
                document: Document | Unreadable = Document(name, read_text(self.folder / name))
            except InvalidInputError as error:
                shown, reason = (text.encode("utf-8", "backslashreplace").decode() for text in (name, str(error)))
                document = Unreadable(shown, reason if shown in reason else f"{shown}: {reason}")
            yield document


class LinesSource:
    """As `FolderSource`: JSON lines of a file that can be read from its start again; `name`: of the source, for
    errors. Raises `InvalidInputError`: a line is no document, or two have one id."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name, self._file = name, file
        self.skipped: list[str] = []
        self.ids: dict[str, None] = {}
        for number, document in self._read():
            if document.id in self.ids:
                raise InvalidInputError(
                    f"{name}, line {number}: an earlier line has the id {document.id[:80]!r}, too; give each document "
                    "an id of its own"
                )
            self.ids[document.id] = None

    def documents(self) -> Iterator[Document | Unreadable]:
        for _, document in self._read():
            if document.id in self.ids:  # else it came after the ids were read: the next sync has it
                yield document

    def _read(self) -> Iterator[tuple[int, Document]]:
        """(number, document) of each line that is not blank, numbered from 1."""
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            where = f"{self._name}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InvalidInputError(f"{where} is not UTF-8: byte {error.start} ({error.reason})") from error
            if text.strip():
                yield number, _document(parse_json(text, where), where)


def _document(row: Any, where: str) -> Document:
    """A document from ``{"id", "text", "title"?}``; other fields are the source's own."""
    row = as_object(row, where, " with 'id' and 'text'")
    given, text = required(row, "id", where), required(row, "text", where)
    is_number = isinstance(given, int) and not isinstance(given, bool)
    fields = {"id": str(given) if is_number else given, "text": text, "title": row.get("title", "")}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise InvalidInputError(f"{where}, field {name!r}: expected a text, found {kind(value)}")
    try:
        return Document(**fields)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from error
