"""Reads passages and questions from a user's files."""

from cacheblend.data.documents import DocumentSource, Unreadable, read_documents
from cacheblend.data.files import Text
from cacheblend.data.passages import Row, read_passages, read_row
from cacheblend.data.questions import FORMATS, BadRowError, QuestionRow, read_questions

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
