"""Blending inside Hugging Face transformers."""

from cacheblend.engines.hf.decode import SamplingParams
from cacheblend.engines.hf.engine import Answer, BlendEngine, Delta, WarmReport
from cacheblend.engines.hf.tokens import Passage

__all__ = ["Answer", "BlendEngine", "Delta", "Passage", "SamplingParams", "WarmReport"]
