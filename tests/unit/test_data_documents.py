"""Sources of documents: folders, JSON lines and streams, with whatever may be wrong in them."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import Unreadable, read_documents
from cacheblend.engines.documents import Document


def test_a_folder_is_its_text_files_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/a.md").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / ".git").mkdir()
    for name in ("c.pdf", "d.pdf", "e", ".git/hidden.txt"):
        (tmp_path / name).write_text("x")
    source = read_documents(str(tmp_path))
    assert list(source.ids) == ["b.txt", "deep/er/a.md"]
    documents = [Document("b.txt", ""), Document("deep/er/a.md", "one\ntwo")]
    assert list(source.documents()) == documents
    assert source.skipped == ["1 files *", "2 files *.pdf"]

    (tmp_path / "gone.txt").write_text("text")
    (tmp_path / "wrong.txt").write_bytes(b"abc\xff")
    (tmp_path / os.fsdecode(b"n\xff.txt")).write_text("text")  # a name that is no text
    source = read_documents(str(tmp_path))
    (tmp_path / "gone.txt").unlink()
    found = list(source.documents())
    assert [each for each in found if isinstance(each, Document)] == documents
    bad = {each.id: each.reason for each in found if isinstance(each, Unreadable)}
    assert "No such file" in bad["gone.txt"] and "not UTF-8: byte 3" in bad["wrong.txt"] and len(bad) == 3
    assert len(source.ids) == 5  # none of them counts as vanished
    json.dumps(bad)


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents would count as vanished, and be dropped."""
    for name in ("a/x.txt", "b/y.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if os.fspath(path).endswith("a"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InvalidInputError, match=r"a cannot be read: Permission denied"):
        read_documents(str(tmp_path))


def test_links_whose_target_is_gone_stay_and_linked_folders_are_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "inside").rename(source)
    (tmp_path / "outside/x.txt").write_text("text")
    (source / "whole").symlink_to(tmp_path / "outside")
    (source / "one.txt").symlink_to(tmp_path / "outside/x.txt")
    (source / "gone.txt").symlink_to(tmp_path / "elsewhere")
    (source / "ring.txt").symlink_to(source / "ring.txt")
    os.mkfifo(source / "pipe.txt")
    found = read_documents(str(source))
    assert list(found.ids) == ["gone.txt", "one.txt", "ring.txt"] and found.skipped == ["1 linked folders"]
    read = {each.id: isinstance(each, Document) for each in found.documents()}
    assert read == {"gone.txt": False, "one.txt": True, "ring.txt": False}


@pytest.mark.parametrize("is_stream", [False, True])
def test_json_lines_from_a_file_or_a_stream(tmp_path: Path, is_stream: bool) -> None:
    rows = [{"id": "../../etc/passwd", "text": "a\u2028b"}, {"id": 7, "text": "", "title": "t"}]
    file = tmp_path / "d.jsonl"
    data = b"\xef\xbb\xbf" + b"".join(json.dumps(row).encode() + b"\r\n\n" for row in rows)
    file.write_bytes(data)
    source = read_documents("-", io.BytesIO(data)) if is_stream else read_documents(str(file))
    assert list(source.ids) == ["../../etc/passwd", "7"]
    for _ in range(2):
        assert list(source.documents()) == [Document("../../etc/passwd", "a\u2028b"), Document("7", "", "t")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "a", "text": "again"}', "line 3: an earlier line has the id 'a'"),
        (b"{", "line 3: not JSON"),
        (b"[" * 100_000, "line 3: not JSON"),
        (b"[]", "line 3: expected an object"),
        (b'{"id": "b"}', "line 3: the field 'text' is missing"),
        (b'{"text": "b"}', "line 3: the field 'id' is missing"),
        (b'{"id": true, "text": "b"}', "line 3, field 'id': expected a text, found a truth value"),
        (b'{"id": 1.5, "text": "b"}', "line 3, field 'id': expected a text"),
        (b'{"id": "b", "text": null}', "line 3, field 'text': expected a text, found null"),
        (b'{"id": "", "text": "b"}', "line 3: a document's id is empty"),
        (b'{"id": "b", "text": "\\ud800"}', "line 3: document 'b': the text has a lone surrogate"),
        (b'{"id": "b", "text": "\xff"}', "line 3 is not UTF-8: byte 21"),
        (b'{"id": "' + b"x" * 1025 + b'", "text": "b"}', "line 3: a document's id has 1025 characters"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_is_done(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(b'{"id": "a", "text": "one"}\n\n' + line + b"\n")
    with pytest.raises(InvalidInputError) as refused:
        read_documents(str(file))
    assert message in str(refused.value)


def test_an_empty_source_has_no_documents_and_other_sources_are_refused(tmp_path: Path) -> None:
    assert list(read_documents(str(tmp_path)).documents()) == []
    assert list(read_documents("-", io.BytesIO()).documents()) == []
    for name in ("missing", "d.csv", "d.json"):
        if name != "missing":
            (tmp_path / name).write_text("x")
        with pytest.raises(InvalidInputError, match=r"--source .*give a folder of texts, JSON lines"):
            read_documents(str(tmp_path / name))
