"""Questions from files: three formats, told by their fields; contexts split at sentence ends."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import BadRowError, QuestionRow, Text, read_questions
from cacheblend.data.split import split_contexts, split_text

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


def test_the_authors_format_with_and_without_answers(tmp_path: Path) -> None:
    bare = {"question": "Who?", "ctxs": CTXS["ctxs"]}
    rows = read_questions(write(tmp_path, CTXS, bare, as_list=True))
    assert rows == [
        QuestionRow("Who?", (Text("Ann did.", ""),), ("Ann",), "", "0"),
        QuestionRow("Who?", (Text("Ann did.", ""),), (), "", "1"),
    ]


def test_longbench_has_one_context_and_may_have_no_input(tmp_path: Path) -> None:
    first, second = read_questions(write(tmp_path, LONGBENCH, {**LONGBENCH, "input": ""}))
    assert first == QuestionRow("Who?", (Text("Ann did. Bob did not.", ""),), ("Ann",), "qasper", "x1", is_context=True)
    assert second.question == ""


def test_a_format_that_is_named_is_not_guessed(tmp_path: Path) -> None:
    both = {**CTXS, "passages": OWN["passages"]}
    assert len(read_questions(write(tmp_path, both))[0].passages) == 2
    assert len(read_questions(write(tmp_path, both), "ctxs")[0].passages) == 1
    with pytest.raises(InvalidInputError, match="there is no format 'musique'; choose from auto, cacheblend"):
        read_questions(write(tmp_path, both), "musique")


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


def test_a_row_of_a_list_is_counted_from_0(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"rows.json, row 1, field 'ctxs': expected a list, found an object"):
        read_questions(write(tmp_path, CTXS, {**CTXS, "ctxs": {}}, as_list=True))


def test_text_that_is_no_json_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(OWN) + "\n{broken\n")
    with pytest.raises(InvalidInputError, match=r"rows.jsonl, line 2: not JSON"):
        read_questions(file)
    with pytest.raises(InvalidInputError, match=r"none.json cannot be read"):
        read_questions(tmp_path / "none.json")


def test_one_object_over_several_lines_is_said_to_be_that(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(OWN, indent=2))
    with pytest.raises(InvalidInputError, match=r"rows.json: it is one JSON object over several lines; put rows into"):
        read_questions(file)
    file.write_text(json.dumps(OWN))
    assert len(read_questions(file)) == 1


def test_a_field_of_another_name_beside_the_right_one_is_left_alone(tmp_path: Path) -> None:
    (row,) = read_questions(write(tmp_path, OWN | {"answer": "Bob", "gold": 3}))
    assert row.answers == ("Ann", "Ann B.")


def test_a_line_separator_inside_a_text_is_no_new_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**OWN, "question": "Who\u2028did?"}, ensure_ascii=False))
    assert read_questions(file)[0].question == "Who\u2028did?"


# ---- splitting --------------------------------------------------------------------------------------------


def test_passages_end_where_sentences_do() -> None:
    text = 'One two three four five. Six seven eight? "Nine ten!" Eleven twelve.\nThirteen fourteen'
    assert split_text(text, words, 8) == [
        "One two three four five. Six seven eight?",
        '"Nine ten!" Eleven twelve.\nThirteen fourteen',
    ]


def test_sentences_without_spaces_between_them_are_split_too() -> None:
    assert split_text("一二三四五。六七八九十。", len, 8) == ["一二三四五。", "六七八九十。"]


def test_a_sentence_that_is_too_long_is_cut_between_words() -> None:
    text = " ".join(f"w{i}" for i in range(20)) + "."
    assert [words(part) for part in split_text(text, words, 8)] == [8, 8, 4]


def test_a_word_that_is_too_long_is_cut_between_characters() -> None:
    assert split_text("abcdefghijklmnopqrst", len, 8) == ["abcdefgh", "ijklmnop", "qrst"]


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 8 tokens, got 7"):
        split_text("One.", words, 7)


@given(st.text(alphabet="ab .!?\n。”xyz", min_size=1).filter(str.strip), st.integers(8, 30))
def test_nothing_is_lost_and_nothing_is_too_long(text: str, tokens: int) -> None:
    for count in (len, lambda part: 2 * len(part.encode()) // 3 + 1):
        parts = split_text(text, count, tokens)
        assert "".join("".join(parts).split()) == "".join(text.split())
        assert all(part == part.strip() and count(part) <= tokens for part in parts)


def test_only_contexts_are_split() -> None:
    whole = Text("One two three four five six. Seven eight nine ten.", "")
    rows = [QuestionRow("?", (whole,), is_context=True), QuestionRow("?", (whole,))]
    split, left = split_contexts(rows, words, 8)
    assert [text.text for text in split.passages] == ["One two three four five six.", "Seven eight nine ten."]
    assert left is rows[1]


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
