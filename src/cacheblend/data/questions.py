"""Reads questions with passages and gold answers; every error names file, row and field.

| format     | a row |
|---|---|
| cacheblend | ``{"question", "passages": [{"text", "title"?}, ...], "answers"?: [...], "category"?, "id"?}`` |
| ctxs       | ``{"question", "ctxs": [{"title", "text"}, ...], "answers"?: [...]}``: inputs of the CacheBlend authors |
| longbench  | ``{"input", "context", "answers": [...], "_id"?, "dataset"?}``: one context, to be split into passages |

A file holds a JSON list of rows, or one row per line (JSONL).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError, check_encodable
from cacheblend.data.files import Text, kind, read_items, read_list, read_passage

NEAR_MISSES = {
    **dict.fromkeys(("answer", "gold", "golds", "gold_answer", "gold_answers"), "answers"),
    **dict.fromkeys(("questions", "query"), "question"),
}
"""Common other names of a field. Ignoring them would silently leave rows without answers or questions."""
NEAR_MISSES_OF_PASSAGES = dict.fromkeys(("passage", "contexts", "documents"), "passages")


@dataclass(frozen=True)
class QuestionRow:
    """One row of the data.

    Attributes:
        question: may be empty if the prompt's template states the task.
        passages: at least one.
        answers: gold answers, any of which is correct; may be empty.
        category: results are also reported by category; may be empty.
        id: from the file, or the number of the row.
        is_context: the only passage is a whole text that is still to be split.
    """

    question: str
    passages: tuple[Text, ...]
    answers: tuple[str, ...] = ()
    category: str = ""
    id: str = ""
    is_context: bool = False


class BadRowError(InvalidInputError):
    """A row that cannot be used, where the others may be."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; skip_bad (--skip-bad) leaves out such rows and counts them")
        self.reason = reason


def read_questions(path: Path, form: str = "auto", *, bad: list[str] | None = None) -> list[QuestionRow]:
    """Reads all rows of a file.

    Args:
        path: file with a JSON list, or JSON lines.
        form: one of `FORMATS`; ``auto`` detects it from the fields of the first row that can be used.
        bad: the reasons for rows that cannot be used are added to this list, and these rows left out; None: the first
            one is an error.

    Raises:
        BadRowError: a row has another form or is empty.
        InvalidInputError: the file cannot be read, or has no rows that can be used.
    """
    if form not in FORMATS:
        raise InvalidInputError(f"there is no format {form!r}; choose from {', '.join(FORMATS)}")
    rows: list[QuestionRow] = []
    reasons: list[str] = []
    for number, (where, _, item) in enumerate(read_items(path)):
        try:
            row = _object(item, where)
            form = _detect(row, where) if form == "auto" else form
            rows.append(_READERS[form](row, where, str(number)))
        except InvalidInputError as error:
            if bad is None:
                raise BadRowError(str(error)) from error
            reasons.append(str(error))
    if reasons and not rows:
        raise InvalidInputError(f"{path}: none of its {len(reasons)} rows can be used; the first: {reasons[0]}")
    if not rows:
        raise InvalidInputError(f"{path} has no rows")
    if bad is not None:
        bad += reasons
    return rows


def _object(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidInputError(f"{where}: expected an object, found {kind(item)}")
    if not item:
        raise InvalidInputError(f"{where}: the row is empty; remove it")
    return item


def _detect(item: dict[str, Any], where: str) -> str:
    for field, form in (("passages", "cacheblend"), ("ctxs", "ctxs"), ("context", "longbench")):
        if field in item:
            return form
    refuse_near_misses(item, NEAR_MISSES_OF_PASSAGES, where)
    raise InvalidInputError(
        f"{where}: a row needs 'passages' (this project's format), 'ctxs' (the CacheBlend authors') or 'context' "
        f"(LongBench's); found {', '.join(map(repr, item))}"
    )


def _of_passages(field: str) -> "_Reader":
    """A reader of rows whose passages are a list in `field`."""

    def read(item: dict[str, Any], where: str, number: str) -> QuestionRow:
        refuse_near_misses(item, NEAR_MISSES | dict.fromkeys(NEAR_MISSES_OF_PASSAGES, field), where)
        return QuestionRow(
            question=_text(item, "question", where),
            passages=read_passages_of(item, field, where),
            answers=_answers(item, where),
            category=_text(item, "category", where, default=""),
            id=_id(item, "id", where, number),
        )

    return read


def _longbench(item: dict[str, Any], where: str, number: str) -> QuestionRow:
    context = _text(item, "context", where)
    refuse_near_misses(item, NEAR_MISSES | {"question": "input"}, where)
    return QuestionRow(
        question=_text(item, "input", where, may_be_empty=True),  # as in LongBench's summarisation tasks
        passages=(Text(context, ""),),
        answers=_answers(item, where),
        category=_text(item, "dataset", where, default=""),
        id=_id(item, "_id", where, number),
        is_context=True,
    )


_Reader = Callable[[dict[str, Any], str, str], QuestionRow]
_READERS: dict[str, _Reader] = {
    "cacheblend": _of_passages("passages"),
    "ctxs": _of_passages("ctxs"),
    "longbench": _longbench,
}
FORMATS = ("auto", *_READERS)


def _text(
    item: dict[str, Any], field: str, where: str, *, default: str | None = None, may_be_empty: bool = False
) -> str:
    value = item.get(field, default)
    if field not in item and default is None:
        raise InvalidInputError(f"{where}: the field {field!r} is missing (found {', '.join(map(repr, item))})")
    if not isinstance(value, str):
        raise InvalidInputError(f"{where}, field {field!r}: expected a text, found {kind(value)}")
    check_encodable(value, f"{where}, field {field!r}: the text")
    if default is None and not may_be_empty and not value.strip():
        raise InvalidInputError(f"{where}, field {field!r}: it is empty; remove the row")
    return value


def refuse_near_misses(item: dict[str, Any], right: Mapping[str, str], where: str) -> None:
    """Rejects common other names of fields, unless the row also has the correct field.

    Raises:
        InvalidInputError: the row has such a field; the message names the correct one.
    """
    for field, wanted in right.items():
        if field in item and wanted not in item:
            raise InvalidInputError(f"{where}: there is no field {field!r}; rename it to {wanted!r}")


def read_passages_of(item: dict[str, Any], field: str, where: str, title: str = "") -> tuple[Text, ...]:
    """The passages of a row, at least one; those without a title are titled `title` with ``.<number>`` appended.

    Raises:
        InvalidInputError: the field is missing, empty or not a list, or a passage has another form.
    """
    found = read_list(item, field, where)
    if not found:
        raise InvalidInputError(f"{where}, field {field!r}: it is empty; a row needs at least one passage")
    return tuple(
        read_passage(passage, f"{where}, {field}[{i}]", title and f"{title}.{i}") for i, passage in enumerate(found)
    )


def _answers(item: dict[str, Any], where: str) -> tuple[str, ...]:
    answers = read_list(item, "answers", where) if "answers" in item else []
    for index, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise InvalidInputError(f"{where}, answers[{index}]: expected a text, found {kind(answer)}")
        check_encodable(answer, f"{where}, answers[{index}]: the text")
        if not answer.strip():
            raise InvalidInputError(f"{where}, answers[{index}]: it is empty; remove empty answers")
    return tuple(answers)


def _id(item: dict[str, Any], field: str, where: str, number: str) -> str:
    value = item.get(field, number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidInputError(f"{where}, field {field!r}: expected a text or a whole number, found {kind(value)}")
    check_encodable(str(value), f"{where}, field {field!r}: the text")
    return str(value)


def question_lines(rows: Sequence[QuestionRow]) -> Iterator[str]:
    """Rows in this project's own format, one JSON object per line."""
    for row in rows:
        yield json.dumps(
            {
                "id": row.id,
                "category": row.category,
                "question": row.question,
                "answers": list(row.answers),
                "passages": [{"title": passage.title, "text": passage.text} for passage in row.passages],
            }
        )
