"""Reads passages and questions from a user's files."""

from cacheblend.data.documents import Unreadable, read_documents
from cacheblend.data.files import Text
from cacheblend.data.questions import BadRowError, QuestionRow, read_passages, read_questions, read_row

__all__ = [
    "BadRowError",
    "QuestionRow",
    "Text",
    "Unreadable",
    "read_documents",
    "read_passages",
    "read_questions",
    "read_row",
]
