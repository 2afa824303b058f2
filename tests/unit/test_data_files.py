"""Passages, questions and documents from files: every form that is read, what is said of one that is not; contexts and
documents split.
"""

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import as_token_ids, join_ids
from cacheblend.data import (
    BadRowError,
    QuestionRow,
    Unreadable,
    read_documents,
    read_passages,
    read_questions,
    read_row,
)
from cacheblend.data.questions import split_contexts, split_text
from cacheblend.engines.documents import Document
from cacheblend.engines.tokens import Passage, chunker
from cacheblend.engines.tokens.chunker import Cutting
from campaign import share


# ---- passages -------------------------------------------------------------------------------------------------------
def test_data_formats(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("First\nstill first.\n \n\nSecond.\r\n\r\nThird.")
    (tmp_path / "b.txt").write_text("Fourth.")
    (tmp_path / "c.jsonl").write_text('{"text": "x", "title": "t"}\n\n{"text": "y"}\n')
    (tmp_path / "d.json").write_text('[{"ctxs": [{"title": "", "text": "x"}]}, {"text": "y"}]')
    texts = {name: [p.text for p in read_passages(tmp_path / name)] for name in ("", "a.txt", "c.jsonl", "d.json")}
    assert texts["a.txt"] == ["First\nstill first.", "Second.", "Third."]
    assert texts[""] == [*texts["a.txt"], "Fourth."]
    assert texts["c.jsonl"] == texts["d.json"] == ["x", "y"]
    assert [p.title for p in read_passages(tmp_path / "c.jsonl")] == ["t", "c #3"]
    assert read_row(tmp_path / "d.json", 1).passages[0].text == "y"
    lines = [{"question": f"{n}?", "passages": [{"text": f"{n}."}, {"text": "x", "title": "t"}]} for n in (1, 2)]
    (tmp_path / "e.jsonl").write_text("\n".join(map(json.dumps, lines)))
    row = read_row(tmp_path / "e.jsonl", 1)
    assert (row.question, [(p.text, p.title) for p in row.passages]) == ("2?", [("2.", "e #2.0"), ("x", "t")])
    assert len(read_passages(tmp_path / "e.jsonl")) == 4
    assert len(read_row(tmp_path / "c.jsonl", 0).passages) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a.json, line 1: not JSON"),
        ("a.json", "{}", "line 1: the field 'text' is missing (found none)"),
        ("a.json", '{\n "text": "x"\n}', "one JSON object over several lines; put rows into a list"),
        (
            "a.jsonl",
            '{"passages": null, "answer": null, "text": null}',
            "field 'passages': expected a list, found null",
        ),
        ("a.jsonl", '{"contexts": []}', "line 1: there is no field 'contexts'; rename it to 'passages'"),
        (
            "a.jsonl",
            '{"query": "?", "passages": [{"text": "x"}]}',
            "there is no field 'query'; rename it to 'question'",
        ),
        ("a.json", "[]", "has no passages"),
        ("a.json", "[7]", "row 0: expected an object, found a number"),
        ("a.json", '[{"ctxs": ["x"]}]', "row 0, ctxs[0]: expected an object"),
        ("a.json", '[{"ctxs": [{"text": "x"}, {"title": "t"}]}]', "row 0, ctxs[1]: the field 'text' is missing"),
        ("a.jsonl", '{"text": "x"}\n{"text"', "line 2: not JSON"),
        ("a.txt", " \n\n ", "has no passages"),
        ("a.csv", "x", "passages come as"),
    ],
)
def test_data_errors_name_the_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInputError) as error:
        read_passages(tmp_path / name)
    assert message in str(error.value)
    assert name in str(error.value)


# ---- questions ------------------------------------------------------------------------------------------------------


OWN = {
    "id": 7,
    "question": "Who?",
    "passages": [{"title": "A", "text": "Ann did."}, {"text": "Bob did not."}],
    "answers": ["Ann", "Ann B."],
    "category": "direct",
}
CTXS = {"question": "Who?", "ctxs": [{"title": "", "text": "Ann did."}], "answers": ["Ann"]}
BARE = {"question": "Who?", "passages": OWN["passages"]}
SURROGATE = ": the text has a lone surrogate at character 0"
LONGBENCH = {"input": "Who?", "context": "Ann did. Bob did not.", "answers": ["Ann"], "_id": "x1", "dataset": "qasper"}


def words(text: str) -> int:
    return len(text.split())


def write(tmp_path: Path, *rows: Any, as_list: bool = False) -> Path:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows) if as_list else "\n".join(json.dumps(row) for row in rows))
    return file


# ---- formats ----------------------------------------------------------------------------------------------
def test_formats_of_questions(tmp_path: Path) -> None:
    # The project's own, as a list and as lines
    for as_list in (True, False):
        rows = read_questions(write(tmp_path, OWN, {**OWN, "id": "b"}, as_list=as_list))
        passages = Passage("Ann did.", "A"), Passage("Bob did not.")
        assert rows[0] == QuestionRow("Who?", passages, ("Ann", "Ann B."), "direct", "7")
        assert rows[1].id == "b"
    # The authors format with and without answers
    bare = {"question": "Who?", "ctxs": CTXS["ctxs"]}
    rows = read_questions(write(tmp_path, CTXS, bare, as_list=True))
    assert rows == [
        QuestionRow("Who?", (Passage("Ann did."),), ("Ann",), "", "0"),
        QuestionRow("Who?", (Passage("Ann did."),), (), "", "1"),
    ]
    # Longbench has one context and may have no input
    first, second = read_questions(write(tmp_path, LONGBENCH, {**LONGBENCH, "input": ""}))
    assert first == QuestionRow("Who?", (Passage("Ann did. Bob did not."),), ("Ann",), "qasper", "x1", is_context=True)
    assert second.question == ""
    # An optional field that is null counts as absent
    null = {**OWN, "id": None, "category": None, "answers": None, "passages": [{"title": None, "text": "Ann did."}]}
    assert read_questions(write(tmp_path, null)) == [QuestionRow("Who?", (Passage("Ann did."),), id="0")]
    # A format that is named is not guessed
    both = {**CTXS, "passages": OWN["passages"]}
    assert len(read_questions(write(tmp_path, both))[0].passages) == 2
    assert len(read_questions(write(tmp_path, both), "ctxs")[0].passages) == 1
    with pytest.raises(InvalidInputError, match="there is no format 'musique'; choose from auto, cacheblend"):
        read_questions(write(tmp_path, both), "musique")
    # A field of another name beside the right one is left alone
    (row,) = read_questions(write(tmp_path, OWN | {"answer": "Bob", "gold": 3}))
    assert row.answers == ("Ann", "Ann B.")
    # A line separator inside a text is no new row
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**OWN, "question": "Who\u2028did?"}, ensure_ascii=False))
    assert read_questions(file)[0].question == "Who\u2028did?"


@pytest.mark.parametrize(
    ("rows", "form", "message"),
    [
        ([{}], "auto", r"rows.json, line 1: the row is empty"),
        ([OWN, {}], "auto", r"rows.json, line 2: the row is empty"),
        ([OWN, None], "auto", r"line 2: expected an object, found null"),
        ([{"text": "x"}], "auto", r"line 1: a row needs 'passages'.*found 'text'"),
        ([OWN, CTXS], "auto", r"line 2: the field 'passages' is missing \(found 'question', 'ctxs', 'answers'\)"),
        ([OWN], "longbench", r"line 1: the field 'context' is missing"),
        ([{**OWN, "question": 3}], "auto", r"line 1, field 'question': expected a text, found a number"),
        ([{**OWN, "question": " "}], "auto", r"line 1, field 'question': it is empty"),
        ([{**OWN, "passages": []}], "auto", r"line 1, field 'passages': it is empty"),
        ([{**OWN, "passages": "x"}], "auto", r"line 1, field 'passages': expected a list, found a text"),
        ([{**OWN, "passages": [{"text": "\n"}]}], "auto", r"line 1, passages\[0\], field 'text': it is empty"),
        ([{**OWN, "passages": [{"title": "x"}]}], "auto", r"line 1, passages\[0\]: the field 'text' is missing"),
        ([{**OWN, "answers": "Ann"}], "auto", r"line 1, field 'answers': expected a list, found a text"),
        ([{**OWN, "answers": ["Ann", 3]}], "auto", r"line 1, answers\[1\]: expected a text, found a number"),
        ([{**OWN, "answers": [""]}], "auto", r"line 1, answers\[0\]: it is empty"),
        ([{**OWN, "category": 3}], "auto", r"line 1, field 'category': expected a text, found a number"),
        ([{**OWN, "question": None}], "auto", r"line 1, field 'question': expected a text, found null"),
        ([{**OWN, "id": []}], "auto", r"line 1, field 'id': expected a text or a whole number, found a list"),
        ([{**LONGBENCH, "context": " "}], "auto", r"line 1, field 'context': it is empty"),
        ([], "auto", r"rows.json has no rows"),
        ([CTXS, {**CTXS, "answers": 1}], "auto", r"line 2, field 'answers': expected a list"),
        ([BARE | {"answer": "Ann"}], "auto", r"line 1: there is no field 'answer'; rename it to 'answers'"),
        ([BARE | {"gold": "Ann"}], "auto", r"line 1: there is no field 'gold'; rename it to 'answers'"),
        ([{"question": "?", "passage": "x"}], "auto", r"no field 'passage'; rename it to 'passages'"),
        ([{"question": "?", "contexts": ["x"]}], "auto", r"no field 'contexts'; rename it to 'passages'"),
        ([{"question": "?", "contexts": ["x"]}], "ctxs", r"no field 'contexts'; rename it to 'ctxs'"),
        ([{"query": "?", "passages": OWN["passages"]}], "auto", r"no field 'query'; rename it to 'question'"),
        ([{"question": "?", "context": "x"}], "auto", r"no field 'question'; rename it to 'input'"),
        ([OWN | {"question": "\ud800"}], "auto", "line 1, field 'question'" + SURROGATE),
        ([OWN | {"answers": ["x", "\ud800"]}], "auto", r"line 1, answers\[1\]" + SURROGATE),
        ([OWN | {"id": "\ud800"}], "auto", "line 1, field 'id'" + SURROGATE),
        ([OWN | {"passages": [{"title": "\ud800", "text": "x"}]}], "auto", r"passages\[0\], field 'title'" + SURROGATE),
        ([LONGBENCH | {"context": "\ud800"}], "auto", "line 1, field 'context'" + SURROGATE),
    ],
)
def test_a_wrong_row_is_named_by_file_row_and_field(tmp_path: Path, rows: list[Any], form: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_questions(write(tmp_path, *rows), form)


def test_files_that_are_no_rows_are_named(tmp_path: Path) -> None:
    # A row of a list is counted from 0
    with pytest.raises(InvalidInputError, match=r"rows.json, row 1, field 'ctxs': expected a list, found an object"):
        read_questions(write(tmp_path, CTXS, {**CTXS, "ctxs": {}}, as_list=True))
    # Text that is no json and a file that is not there
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(OWN) + "\n{broken\n")
    seen: list[bytes] = []  # what is behind the limit is not read
    assert len(read_questions(file, limit=1, seen=seen.append)) == 1
    assert seen == [json.dumps(OWN).encode() + b"\n"]
    with pytest.raises(InvalidInputError, match=r"rows.jsonl, line 2: not JSON"):
        read_questions(file)
    with pytest.raises(InvalidInputError, match=r"none.json cannot be read"):
        read_questions(tmp_path / "none.json")
    # A byte order mark, Windows' line ends and blank lines
    file.write_text("\ufeff" + json.dumps(OWN) + "\r\n\r\n" + json.dumps(OWN), encoding="utf-8")
    assert len(read_questions(file)) == 2
    file.write_bytes(b"\xef\xbb\xbf\n [" + json.dumps(OWN).encode() + b",\n" + json.dumps(CTXS).encode() + b"]")
    with pytest.raises(InvalidInputError, match="row 1: the field 'passages' is missing"):
        read_questions(file)
    # One object over several lines is said to be that
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(OWN, indent=2))
    with pytest.raises(InvalidInputError, match=r"rows.json: it is one JSON object over several lines; put rows into"):
        read_questions(file)
    file.write_text(json.dumps(OWN))
    assert len(read_questions(file)) == 1
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        read_passages(tmp_path / "a.txt")


# ---- splitting --------------------------------------------------------------------------------------------
def test_texts_are_split_at_sentences_words_characters() -> None:
    # Passages end where sentences do
    text = 'One two three four five. Six seven eight? "Nine ten!" Eleven twelve.\nThirteen fourteen'
    assert split_text(text, words, 8) == [
        "One two three four five. Six seven eight?",
        '"Nine ten!" Eleven twelve.\nThirteen fourteen',
    ]
    # Sentences without spaces between them are split too
    assert split_text("一二三四五。六七八九十。", len, 8) == ["一二三四五。", "六七八九十。"]
    # A sentence that is too long is cut between words
    text = " ".join(f"w{i}" for i in range(20)) + "."
    assert [words(part) for part in split_text(text, words, 8)] == [8, 8, 4]
    # A word that is too long is cut between characters
    assert split_text("abcdefghijklmnopqrst", len, 8) == ["abcdefgh", "ijklmnop", "qrst"]
    # Too few tokens are refused
    with pytest.raises(InvalidInputError, match="at least 8 tokens, got 7"):
        split_text("One.", words, 7)
    # Only contexts are split
    whole = Passage("One two three four five six. Seven eight nine ten.")
    rows = [QuestionRow("?", (whole,), is_context=True), QuestionRow("?", (whole,))]
    split, left = split_contexts(rows, words, 8)
    assert [text.text for text in split.passages] == ["One two three four five six.", "Seven eight nine ten."]
    assert left is rows[1]


@given(st.text(alphabet="ab .!?\n。”xyz", min_size=1).filter(str.strip), st.integers(8, 30))
def test_nothing_is_lost_and_nothing_is_too_long(text: str, tokens: int) -> None:
    for count in (len, lambda part: 2 * len(part.encode()) // 3 + 1):
        parts = split_text(text, count, tokens)
        assert "".join("".join(parts).split()) == "".join(text.split())
        assert all(part == part.strip() and count(part) <= tokens for part in parts)


def test_a_long_text_without_sentences_is_not_tokenised_again_and_again() -> None:
    counted = list[int]()

    def count(part: str) -> int:
        counted.append(len(part))
        return len(part) // 4

    assert len("".join(split_text("x" * 40_000, count, 64))) == 40_000
    assert sum(counted) < 30 * 40_000


# ---- rows that cannot be used -------------------------------------------------------------------------------

WRONG: list[Any] = [
    {**BARE, "passages": []},
    {**BARE, "passages": "none"},
    {**BARE, "question": " "},
    {"question": "Who?"},
    {**BARE, "answers": ["\ud800"]},
    {},
    3,
]


@given(st.lists(st.one_of(st.just(OWN), st.sampled_from(WRONG)), min_size=1, max_size=12))
def test_wrong_rows_are_left_out_and_counted(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    file, bad = write(tmp_path_factory.mktemp("rows"), *rows, as_list=True), list[str]()
    wrong = [number for number, row in enumerate(rows) if row is not OWN]
    if len(wrong) == len(rows):
        with pytest.raises(InvalidInputError, match=f"none of its {len(rows)} rows can be used"):
            read_questions(file, bad=bad)
        return
    assert len(read_questions(file, bad=bad)) == len(rows) - len(wrong)
    assert [f"row {number}" in reason for number, reason in zip(wrong, bad, strict=True)] == [True] * len(wrong)
    if wrong:
        with pytest.raises(BadRowError, match=rf"row {wrong[0]}.*skip_bad \(--skip-bad\) leaves out"):
            read_questions(file)


# ---- sources of documents: folders, JSON lines and streams ----------------------------------------------------
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
    assert bad["n\\udcff.txt"].startswith("n\\udcff.txt: a document's id")
    assert [text.title for text in read_passages(tmp_path / os.fsdecode(b"n\xff.txt"))] == ["n\\udcff #1"]
    assert len(source.ids) == 5  # none of them counts as vanished
    json.dumps(bad)


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


def test_empty_sources_and_those_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(read_documents(str(tmp_path)).documents()) == []
    assert list(read_documents("-", io.BytesIO()).documents()) == []
    for name in ("missing", "d.csv", "d.json"):
        if name != "missing":
            (tmp_path / name).write_text("x")
        with pytest.raises(InvalidInputError, match=r"--source .*give a folder of texts, JSON lines"):
            read_documents(str(tmp_path / name))
    # its documents would count as vanished, and be dropped
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


# ---- cuts by content ------------------------------------------------------------------------------------------


END = 1


def sentence(rng: random.Random) -> list[int]:
    return [rng.randrange(2, 30_000) for _ in range(rng.randint(3, 40))] + [END]


@given(st.lists(st.integers(0, 6), max_size=3000), st.integers(1, 40), st.integers(0, 300), st.booleans())
@settings(max_examples=share(150), deadline=None)
def test_chunks_are_the_document_within_bounds(ids: list[int], least: int, more: int, has_ends: bool) -> None:
    cutting = Cutting(2 * least + more, least)
    ends = np.array([END]) if has_ends else None
    pieces = cutting.cut(as_token_ids(ids), ends)
    assert join_ids(pieces).tolist() == ids
    assert all(len(piece) <= cutting.most for piece in pieces)
    assert len(pieces) == 1 or all(len(piece) >= least for piece in pieces)
    assert [piece.tolist() for piece in pieces] == [p.tolist() for p in cutting.cut(as_token_ids(ids), ends)]


def test_cuts_are_behind_sentences_stay_there_and_are_found_in_bounded_time() -> None:
    rng = random.Random(0)
    ids = as_token_ids([i for _ in range(200) for i in sentence(rng)])
    pieces = Cutting().cut(ids, np.array([END]))
    assert len(pieces) > 8
    assert all(piece[-1] == END for piece in pieces)
    # what is put in front moves no cut behind it
    rng = random.Random(3)
    text = [i for _ in range(300) for i in sentence(rng)]
    old = {piece.tobytes() for piece in Cutting().cut(as_token_ids(text), np.array([END]))}
    new = Cutting().cut(as_token_ids([*sentence(rng), *text]), np.array([END]))
    assert sum(piece.tobytes() not in old for piece in new) <= 4 < len(new) // 2
    # sorted by their hashes each cut would take one sentence off the front
    looked_at = 0

    class Counting(Cutting):
        def _place(self, start, stop, ends, hashes, depth):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            looked_at += stop - start
            return super()._place(start, stop, ends, np.arange(len(hashes)).astype(np.uint64), depth)

    ids = as_token_ids(np.full(100_000, END))
    Counting(128, 16).cut(ids, np.array([END]))
    assert looked_at < 100 * len(ids)
    # texts without sentences are cut as well
    for ids in (np.zeros(300_000), np.arange(300_000) % 2, np.arange(300_000)):
        pieces = Cutting(256, 64).cut(as_token_ids(ids.astype("<u4")), np.array([END + 10**6]))
        assert sum(map(len, pieces)) == len(ids) and max(map(len, pieces)) <= 256
    # bounds that cannot be kept are refused
    for most, least in ((100, 64), (2, 0), (1, 1), (-5, -3)):
        with pytest.raises(InvalidInputError, match=f"{least} to {most}"):
            Cutting(most, least)


@pytest.mark.parametrize("seed", range(5))
def test_an_edit_changes_few_chunks_wherever_it_is(seed: int) -> None:
    """On average over 60 documents; single ones may be cut anew, where the edit has the lowest hash."""
    rng, changed, of = random.Random(seed), 0, 0
    for _ in range(60):
        before = [sentence(rng) for _ in range(92)]
        after, at = list(before), rng.choice([0, len(before) // 2, len(before) - 1])
        edit = rng.choice(["replace", "insert", "delete"])
        after[at : at + (edit != "insert")] = [] if edit == "delete" else [sentence(rng)]
        cut = [
            Cutting().cut(as_token_ids([i for each in text for i in each]), np.array([END])) for text in (before, after)
        ]
        held = {piece.tobytes() for piece in cut[0]}
        changed += sum(len(piece) for piece in cut[1] if piece.tobytes() not in held)
        of += sum(map(len, cut[1]))
    assert changed / of < 0.22


@given(st.integers(0, 40), st.integers(1, 12))
def test_cuts_do_not_depend_on_how_many_tokens_are_hashed_at_once(length: int, at_once: int) -> None:
    ids = as_token_ids(np.random.default_rng(length).integers(0, 50, length))
    with pytest.MonkeyPatch.context() as patch:
        whole = chunker._hashes(ids)
        patch.setattr(chunker, "_HASHED_AT_ONCE", at_once)
        assert np.array_equal(chunker._hashes(ids), whole)
