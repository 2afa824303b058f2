"""Reads passages and questions from a user's files."""

from cacheblend.data.files import Text
from cacheblend.data.passages import Row, read_passages, read_row
from cacheblend.data.questions import FORMATS, BadRowError, QuestionRow, read_questions

__all__ = ["FORMATS", "BadRowError", "QuestionRow", "Row", "Text", "read_passages", "read_questions", "read_row"]
