"""Questions with their passages and gold answers, from a user's file; every error names file, row and field.

| format     | a row |
|---|---|
| cacheblend | ``{"question", "passages": [{"text", "title"?}, ...], "answers"?: [...], "category"?, "id"?}`` |
| ctxs       | ``{"question", "ctxs": [{"title", "text"}, ...], "answers"?: [...]}``: the CacheBlend authors' inputs |
| longbench  | ``{"input", "context", "answers": [...], "_id"?, "dataset"?}``: one context, split into passages later |

Rows stand in a JSON list, or one on each line (JSONL).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.data.files import Text, kind, read_items, read_list, read_passage

NEAR_MISSES = {
    **dict.fromkeys(("answer", "gold", "golds", "gold_answer", "gold_answers"), "answers"),
    **dict.fromkeys(("questions", "query"), "question"),
}
"""Names that other data has for a field of ours. Passing over one would score nothing, and say nothing."""
NEAR_MISSES_OF_PASSAGES = dict.fromkeys(("passage", "contexts", "documents"), "passages")


@dataclass(frozen=True)
class QuestionRow:
    """One row of the data.

    Attributes:
        question: may be empty where the prompt's template says what is asked.
        passages: at least one.
        answers: gold answers, any of which is right; empty where there are none.
        category: results are also given by it; empty for none.
        id: the file's, or the row's number.
        is_context: the one passage is a whole text, still to be split.
    """

    question: str
    passages: tuple[Text, ...]
    answers: tuple[str, ...] = ()
    category: str = ""
    id: str = ""
    is_context: bool = False


def read_questions(path: Path, form: str = "auto") -> list[QuestionRow]:
    """All rows of a file.

    Args:
        path: a JSON list, or JSON lines.
        form: one of `FORMATS`; ``auto`` takes it from the first row's fields.

    Raises:
        InvalidInputError: the file cannot be read, holds no row, or a row has another form or is empty.
    """
    if form not in FORMATS:
        raise InvalidInputError(f"no format is called {form!r}; there are {', '.join(FORMATS)}")
    rows: list[QuestionRow] = []
    for number, (where, _, item) in enumerate(read_items(path)):
        if not isinstance(item, dict):
            raise InvalidInputError(f"{where}: expected an object, found {kind(item)}")
        if not item:
            raise InvalidInputError(f"{where}: the row is empty; leave it out")
        if form == "auto":
            form = _detect(item, where)
        rows.append(_READERS[form](item, where, str(number)))
    if not rows:
        raise InvalidInputError(f"{path} holds no row")
    return rows


def _detect(item: dict[str, Any], where: str) -> str:
    for field, form in (("passages", "cacheblend"), ("ctxs", "ctxs"), ("context", "longbench")):
        if field in item:
            return form
    refuse_near_misses(item, NEAR_MISSES_OF_PASSAGES, where)
    raise InvalidInputError(
        f"{where}: a row has 'passages' (this project's format), 'ctxs' (the CacheBlend authors') or 'context' "
        f"(LongBench's); found {', '.join(map(repr, item))}"
    )


def _of_passages(field: str) -> "_Reader":
    """Rows that have their passages apart, in `field`."""

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
        question=_text(item, "input", where, may_be_empty=True),  # as LongBench's summaries have it
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
    if default is None and not may_be_empty and not value.strip():
        raise InvalidInputError(f"{where}, field {field!r}: it is empty; leave the row out")
    return value


def refuse_near_misses(item: dict[str, Any], right: Mapping[str, str], where: str) -> None:
    """Names the right field for a wrong one, unless the row has both.

    Raises:
        InvalidInputError: the row has a wrong one.
    """
    for field, wanted in right.items():
        if field in item and wanted not in item:
            raise InvalidInputError(f"{where}: there is no field {field!r}; it is called {wanted!r}")


def read_passages_of(item: dict[str, Any], field: str, where: str, title: str = "") -> tuple[Text, ...]:
    """A row's passages, at least one; those without a title get `title`, with their number behind a point.

    Raises:
        InvalidInputError: the field is missing, no list or empty, or a passage has another form.
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
        if not answer.strip():
            raise InvalidInputError(f"{where}, answers[{index}]: it is empty; leave empty answers out")
    return tuple(answers)


def _id(item: dict[str, Any], field: str, where: str, number: str) -> str:
    value = item.get(field, number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidInputError(f"{where}, field {field!r}: expected a text or a whole number, found {kind(value)}")
    return str(value)
