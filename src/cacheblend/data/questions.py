"""Reads questions with passages and gold answers, and passages alone; every error names file, row and field.

Questions, by format; a file holds a JSON list of rows, or one row per line (JSONL):

| format     | a row |
|---|---|
| cacheblend | ``{"question", "passages": [{"text", "title"?}, ...], "answers"?: [...], "category"?, "id"?}`` |
| ctxs       | ``{"question", "ctxs": [{"title", "text"}, ...], "answers"?: [...]}``: inputs of the CacheBlend authors |
| longbench  | ``{"input", "context", "answers": [...], "_id"?, "dataset"?}``: one context, to be split into passages |

Passages, by the file's ending:

| ending  | form |
|---|---|
| .json   | a list of rows as above, ``passages`` or ``ctxs``, ``question``?; or a list of ``{"text", "title"?}`` |
| .jsonl  | the same, one row or passage per line |
| .txt    | one passage per paragraph; blank lines separate paragraphs |
| folder  | all ``*.txt`` in it, each as above |
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError, check_encodable
from cacheblend.data.files import as_object, as_text, kind, read_items, read_list, read_text, required
from cacheblend.engines.tokens.passage import Passage

_FIELDS = {
    "cacheblend": ("question", "passages", "category", "id"),
    "ctxs": ("question", "ctxs", "category", "id"),
    "longbench": ("input", "context", "dataset", "_id"),
}
"""By format, names of the fields with question, passages, category and id."""
FORMATS = ("auto", *_FIELDS)

SHORTEST = 8  # tokens that a passage of a context must allow
NEAR = 0.8  # of these, from which on the whole is counted
_SENTENCE_END = re.compile(r"[.!?]+[\"'”’)\]]*\s+|[。！？]+[”’」』）]*\s*|\n\s*")  # noqa: RUF001
CountTokens = Callable[[str], int]
_OTHER_QUESTIONS, _OTHER_PASSAGES = ("questions", "query"), ("passage", "contexts", "documents")
_OTHER_ANSWERS = ("answer", "gold", "golds", "gold_answer", "gold_answers")
"""Common other names of fields. Ignoring them would silently leave rows without answers or questions."""


@dataclass(frozen=True)
class QuestionRow:
    """One row of the data."""

    question: str  # empty where there is none: the prompt's template may state the task
    passages: tuple[Passage, ...]  # at least one
    answers: tuple[str, ...] = ()  # gold answers, any of which is correct; may be empty
    category: str = ""  # results are also reported by category; may be empty
    id: str = ""  # from the file, or the number of the row
    is_context: bool = False  # the only passage is a whole text that is still to be split


class BadRowError(InvalidInputError):
    """A row that cannot be used, where the others may be."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; skip_bad (--skip-bad) leaves out such rows and counts them")
        self.reason = reason


def read_questions(
    path: Path,
    form: str = "auto",
    *,
    bad: list[str] | None = None,
    limit: int | None = None,
    seen: Callable[[bytes], object] = len,
) -> list[QuestionRow]:
    """Reads the rows of a file, the first `limit` that can be used, or all; the form ``auto`` is detected from the
    fields of the first of them.

    `bad` gets the reasons for rows that cannot be used, which are left out; None: the first one is a `BadRowError`.
    `seen` is called with the bytes that are read, which end with the last row of a limit.
    Raises `InvalidInputError`: the file cannot be read, or has no rows that can be used.
    """
    if form not in FORMATS:
        raise InvalidInputError(f"there is no format {form!r}; choose from {', '.join(FORMATS)}")
    rows: list[QuestionRow] = []
    reasons: list[str] = []
    for number, (where, _, item) in enumerate(read_items(path, seen)):
        try:
            row = as_object(item, where)
            if not row:
                raise InvalidInputError(f"{where}: the row is empty; remove it")
            if form == "auto":
                form = next((name for name, (_, passages, *_) in _FIELDS.items() if passages in row), form)
            if form == "auto":
                _refuse_other_names(row, dict.fromkeys(_OTHER_PASSAGES, "passages"), where)
                raise InvalidInputError(
                    f"{where}: a row needs 'passages' (this project's format), 'ctxs' (the CacheBlend authors') or "
                    f"'context' (LongBench's); found {', '.join(map(repr, row))}"
                )
            rows.append(_question_row(row, form, where, number))
        except InvalidInputError as error:
            if bad is None:
                raise BadRowError(str(error)) from error
            reasons.append(str(error))
        if len(rows) == limit:
            break
    if reasons and not rows:
        raise InvalidInputError(f"{path}: none of its {len(reasons)} rows can be used; the first: {reasons[0]}")
    if not rows:
        raise InvalidInputError(f"{path} has no rows")
    if bad is not None:
        bad += reasons
    return rows


def read_passages(path: Path) -> list[Passage]:
    """All passages of a file or a folder, in order, repeats included. Raises `InvalidInputError`: the file cannot be
    read, has another form, or has no passages."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise InvalidInputError(f"the folder {path} has no .txt file")
    found = [passage for file in files for row in _passage_rows(file) for passage in row.passages]
    if not found:
        raise InvalidInputError(f"{path} has no passages")
    return found


def read_row(path: Path, number: int) -> QuestionRow:
    """Row `number`, from 0. Text files, and passages without questions in JSON lines, are one row together. In a JSON
    list each such passage is a row. Raises `InvalidInputError` as `read_passages`, or where there is no such row."""
    rows = [QuestionRow("", tuple(read_passages(path)))] if path.is_dir() else list(_passage_rows(path))
    if not any(row.passages for row in rows):
        raise InvalidInputError(f"{path} has no passages")
    if not 0 <= number < len(rows):
        together = "" if rows[0].question else "; passages without questions are one row together, but in a JSON list"
        raise InvalidInputError(f"{path} has rows 0..{len(rows) - 1}, not {number}{together}")
    return rows[number]


def question_lines(rows: Sequence[QuestionRow]) -> Iterator[str]:
    """Rows in this project's own format, one JSON object per line."""
    for row in rows:
        passages = [{"title": passage.title, "text": passage.text} for passage in row.passages]
        about = {"id": row.id, "category": row.category, "question": row.question}
        yield json.dumps({**about, "answers": list(row.answers), "passages": passages})


def _question_row(item: dict[str, Any], form: str, where: str, number: int) -> QuestionRow:
    names = question, passages, category, own_id = _FIELDS[form]
    item = _without_nulls(item, question, passages)
    places = dict(zip(names, (f"{where}, field {name!r}" for name in names), strict=True))
    is_context, remove = form == "longbench", "remove the row"
    if is_context:
        context = as_text(required(item, passages, where), places[passages], remove)
        _refuse_other_names(item, _other_names(question) | {"question": question}, where)
    else:
        _refuse_other_names(item, _other_names(question) | dict.fromkeys(_OTHER_PASSAGES, passages), where)
    texts = (Passage(context),) if is_context else _passages_in(item, passages, where)
    # LongBench's summarisation tasks have an empty question.
    asked = as_text(required(item, question, where), places[question], None if is_context else remove)
    answers = read_list(item, "answers", where) if "answers" in item else []
    for index, answer in enumerate(answers):
        as_text(answer, f"{where}, answers[{index}]", "remove empty answers")
    found_id = item.get(own_id, number)
    if isinstance(found_id, bool) or not isinstance(found_id, str | int):
        raise InvalidInputError(f"{places[own_id]}: expected a text or a whole number, found {kind(found_id)}")
    check_encodable(str(found_id), f"{places[own_id]}: the text")
    return QuestionRow(
        asked, texts, tuple(answers), as_text(item.get(category, ""), places[category]), str(found_id), is_context
    )


def _without_nulls(item: dict[str, Any], *required_fields: str) -> dict[str, Any]:
    """A row whose optional fields that are null are absent."""
    return {name: value for name, value in item.items() if value is not None or name in required_fields}


def _passage_rows(path: Path) -> Iterator[QuestionRow]:
    """Rows of a file; passages without questions are a row each in a list, and one row together in other files."""
    together: list[Passage] = []
    stem = path.stem.encode("utf-8", "backslashreplace").decode()  # a name need not be UTF-8, a title must
    if path.suffix == ".txt":
        parts = (part.strip() for part in re.split(r"\n[ \t]*\n", read_text(path)))
        together = [Passage(part, f"{stem} #{n}") for n, part in enumerate(filter(None, parts), start=1)]
    elif path.suffix in (".json", ".jsonl"):
        for where, number, value in read_items(path):
            item = _without_nulls(as_object(value, where), "passages", "ctxs", "text")
            title = f"{stem} #{number}"
            field = next((field for field in ("passages", "ctxs") if field in item), None)
            if field is not None:
                _refuse_other_names(item, _other_names("question"), where)
                question = item.get("question")
                asked = "" if question is None else as_text(question, f"{where}, field 'question'")
                yield QuestionRow(asked, _passages_in(item, field, where, title))
                continue
            _refuse_other_names(item, dict.fromkeys(_OTHER_PASSAGES, "passages"), where)
            if path.suffix == ".jsonl":
                together.append(_passage(item, where, title))
            else:
                yield QuestionRow("", (_passage(item, where, title),))
    else:
        why = f"the ending {path.suffix!r} is not known" if path.suffix else "the name has no ending"
        if not path.exists():
            why = "there is no such file"
        elif not path.is_file():
            why = "it is a pipe or a device, not a file; write its contents to a file first"
        raise InvalidInputError(f"{path}: {why}; passages come as .json, .jsonl, .txt or a folder of .txt")
    if together:
        yield QuestionRow("", tuple(together))


def _passages_in(item: dict[str, Any], field: str, where: str, title: str = "") -> tuple[Passage, ...]:
    """The passages of a row, at least one; those without a title are titled `title` with ``.<number>`` appended."""
    found = read_list(item, field, where)
    if not found:
        raise InvalidInputError(f"{where}, field {field!r}: it is empty; a row needs at least one passage")
    return tuple(_passage(each, f"{where}, {field}[{i}]", title and f"{title}.{i}") for i, each in enumerate(found))


def _passage(item: Any, where: str, fallback: str) -> Passage:
    """A passage from ``{"text", "title"?}``; `fallback` is the title if there is none."""
    item = as_object(item, where, " with 'text'")
    text = as_text(required(item, "text", where), f"{where}, field 'text'", "remove empty passages")
    return Passage(text, as_text(item.get("title") or "", f"{where}, field 'title'") or fallback)


def _other_names(question: str) -> dict[str, str]:
    return dict.fromkeys(_OTHER_ANSWERS, "answers") | dict.fromkeys(_OTHER_QUESTIONS, question)


def _refuse_other_names(item: dict[str, Any], right: Mapping[str, str], where: str) -> None:
    """Rejects other names of fields, unless the row has the correct field, too."""
    for field, wanted in right.items():
        if field in item and wanted not in item:
            raise InvalidInputError(f"{where}: there is no field {field!r}; rename it to {wanted!r}")


# ---- contexts, split into passages at sentence ends ----


def split_contexts(rows: Sequence[QuestionRow], count: CountTokens, tokens: int) -> list[QuestionRow]:
    """The rows with every whole context split into passages; other rows are unchanged."""
    return [
        replace(row, passages=tuple(Passage(part) for part in split_text(row.passages[0].text, count, tokens)))
        if row.is_context
        else row
        for row in rows
    ]


def split_text(text: str, count: CountTokens, tokens: int) -> list[str]:
    """Passages of at most `tokens` tokens, each with as many whole sentences as fit, stripped of white space. A
    sentence that is too long is cut between words, and a word that is too long between characters. `count`: of a text's
    tokens. Raises `InvalidInputError` if `tokens` is below `SHORTEST`."""
    if tokens < SHORTEST:
        raise InvalidInputError(f"a passage must allow at least {SHORTEST} tokens, got {tokens}")
    parts: list[str] = []
    held, held_tokens = "", 0
    ends = [0, *(end.end() for end in _SENTENCE_END.finditer(text)), len(text)]
    for sentence in (text[start:end] for start, end in pairwise(ends)):  # each with the white space that follows it
        for piece in _pieces(sentence, count, tokens):
            size = count(piece)
            sum_ = held_tokens + size
            # The sum of the parts may be lower than the count of the whole, so count the whole near the limit.
            if held and (sum_ > tokens or (sum_ > NEAR * tokens and count((held + piece).strip()) > tokens)):
                parts.append(held)
                held, held_tokens = "", 0
            held, held_tokens = held + piece, held_tokens + size
    return [part for part in (part.strip() for part in [*parts, held]) if part]


def _pieces(sentence: str, count: CountTokens, tokens: int) -> Iterator[str]:
    """A sentence in pieces that fit, each the longest, cut behind a space if it has one; of a character at least."""
    while sentence:
        fits = too_long = min(tokens, len(sentence))  # a token stands for some characters, seldom for many
        while count(sentence[:too_long]) <= tokens:
            if too_long == len(sentence):
                yield sentence
                return
            fits, too_long = too_long, min(2 * too_long, len(sentence))
        fits = 1 if fits == too_long else fits
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (middle, too_long) if count(sentence[:middle]) <= tokens else (fits, middle)
        cut = sentence.rfind(" ", 0, fits) + 1 or fits
        yield sentence[:cut]
        sentence = sentence[cut:]
