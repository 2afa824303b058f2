"""Blending inside Hugging Face transformers."""

from cacheblend.engines.hf.document_sync import DocumentSync, SyncReport
from cacheblend.engines.hf.engine import BlendEngine
from cacheblend.engines.hf.grammar import Grammar
from cacheblend.engines.hf.request import Answer, BatchError, Delta, Request
from cacheblend.engines.hf.sampling import SamplingParams
from cacheblend.engines.keeper import WarmReport
from cacheblend.engines.tokens import Passage

__all__ = [
    "Answer",
    "BatchError",
    "BlendEngine",
    "Delta",
    "DocumentSync",
    "Grammar",
    "Passage",
    "Request",
    "SamplingParams",
    "SyncReport",
    "WarmReport",
]
