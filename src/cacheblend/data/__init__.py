"""Reads passages and questions from a user's files."""

from cacheblend.data.documents import DocumentSource, Unreadable, read_documents
from cacheblend.data.files import Text
from cacheblend.data.questions import (
    FORMATS,
    BadRowError,
    QuestionRow,
    Row,
    read_passages,
    read_questions,
    read_row,
)

__all__ = [
    "FORMATS",
    "BadRowError",
    "DocumentSource",
    "QuestionRow",
    "Row",
    "Text",
    "Unreadable",
    "read_documents",
    "read_passages",
    "read_questions",
    "read_row",
]
