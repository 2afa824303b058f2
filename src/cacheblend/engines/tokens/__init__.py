"""Texts and messages to token ids, the same in every engine."""

from cacheblend.engines.tokens.builder import PromptBuilder
from cacheblend.engines.tokens.chat import Content, Message
from cacheblend.engines.tokens.chunker import find_sentence_end_ids
from cacheblend.engines.tokens.passage import Passage

__all__ = ["Content", "Message", "Passage", "PromptBuilder", "find_sentence_end_ids"]
