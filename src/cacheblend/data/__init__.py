"""Reads passages and questions from a user's files."""

from cacheblend.data.documents import Unreadable, read_documents
from cacheblend.data.questions import BadRowError, QuestionRow, read_passages, read_questions, read_row

__all__ = [
    "BadRowError",
    "QuestionRow",
    "Unreadable",
    "read_documents",
    "read_passages",
    "read_questions",
    "read_row",
]
