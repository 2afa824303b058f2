"""Passages and questions from files: every form that is read, and what is said of one that is not."""

import json
from pathlib import Path

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import read_passages, read_row


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
