"""Passages and questions from files: every form that is read, what is said of one that is not; contexts split."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import BadRowError, QuestionRow, Text, read_passages, read_questions, read_row
from cacheblend.data.split import split_contexts, split_text

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
        ("a.jsonl", '{"contexts": []}', "line 1: there is no field 'contexts'; rename it to 'passages'"),
        (
            "a.jsonl",
            '{"query": "?", "passages": [{"text": "x"}]}',
            "there is no field 'query'; rename it to 'question'",
        ),
        ("a.json", "[]", "has no passages"),
        ("a.json", "[7]", "row 0: expected an object, found a number"),
        ("a.json", '[{"ctxs": 1}]', "row 0, field 'ctxs': expected a list"),
        ("a.json", '[{"ctxs": ["x"]}]', "row 0, ctxs[0]: expected an object"),
        ("a.json", '[{"ctxs": [{"text": "x"}, {"title": "t"}]}]', "row 0, ctxs[1]: the field 'text' is missing"),
        ("a.json", '[{"ctxs": [{"text": null}]}]', "row 0, ctxs[0], field 'text': expected a text, found null"),
        ("a.json", '[{"ctxs": [{"text": " "}]}]', "it is empty"),
        ("a.json", '[{"ctxs": [], "question": 1}]', "row 0, field 'question'"),
        ("a.jsonl", '{"text": "x"}\n{"text"', "line 2: not JSON"),
        ("a.jsonl", '{"text": "x", "title": 1}', "line 1, field 'title'"),
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


def test_data_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        read_passages(tmp_path / "a.txt")


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
LONGBENCH = {"input": "Who?", "context": "Ann did. Bob did not.", "answers": ["Ann"], "_id": "x1", "dataset": "qasper"}


def words(text: str) -> int:
    return len(text.split())


def write(tmp_path: Path, *rows: Any, as_list: bool = False) -> Path:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows) if as_list else "\n".join(json.dumps(row) for row in rows))
    return file


# ---- formats ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [True, False])
def test_the_projects_own_format(tmp_path: Path, as_list: bool) -> None:
    rows = read_questions(write(tmp_path, OWN, {**OWN, "id": "b"}, as_list=as_list))
    assert rows[0] == QuestionRow(
        "Who?", (Text("Ann did.", "A"), Text("Bob did not.", "")), ("Ann", "Ann B."), "direct", "7"
    )
    assert rows[1].id == "b"


def test_formats_of_questions(tmp_path: Path) -> None:
    # The authors format with and without answers
    bare = {"question": "Who?", "ctxs": CTXS["ctxs"]}
    rows = read_questions(write(tmp_path, CTXS, bare, as_list=True))
    assert rows == [
        QuestionRow("Who?", (Text("Ann did.", ""),), ("Ann",), "", "0"),
        QuestionRow("Who?", (Text("Ann did.", ""),), (), "", "1"),
    ]
    # Longbench has one context and may have no input
    first, second = read_questions(write(tmp_path, LONGBENCH, {**LONGBENCH, "input": ""}))
    assert first == QuestionRow("Who?", (Text("Ann did. Bob did not.", ""),), ("Ann",), "qasper", "x1", is_context=True)
    assert second.question == ""
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
        ([{**OWN, "category": None}], "auto", r"line 1, field 'category': expected a text, found null"),
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
    with pytest.raises(InvalidInputError, match=r"rows.jsonl, line 2: not JSON"):
        read_questions(file)
    with pytest.raises(InvalidInputError, match=r"none.json cannot be read"):
        read_questions(tmp_path / "none.json")
    # One object over several lines is said to be that
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(OWN, indent=2))
    with pytest.raises(InvalidInputError, match=r"rows.json: it is one JSON object over several lines; put rows into"):
        read_questions(file)
    file.write_text(json.dumps(OWN))
    assert len(read_questions(file)) == 1


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
    whole = Text("One two three four five six. Seven eight nine ten.", "")
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


@pytest.mark.parametrize(
    ("row", "place"),
    [
        (OWN | {"question": "\ud800"}, "line 1, field 'question'"),
        (OWN | {"answers": ["x", "\ud800"]}, r"line 1, answers\[1\]"),
        (OWN | {"id": "\ud800"}, "line 1, field 'id'"),
        (OWN | {"passages": [{"text": "x"}, {"title": "\ud800", "text": "x"}]}, r"passages\[1\], field 'title'"),
        (LONGBENCH | {"context": "\ud800"}, "line 1, field 'context'"),
    ],
)
def test_a_lone_surrogate_is_refused_with_its_place(tmp_path: Path, row: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{place}: the text has a lone surrogate at character 0"):
        read_questions(write(tmp_path, row))


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
def test_rows_that_cannot_be_used_are_left_out_and_counted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any]
) -> None:
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
