"""CacheBlend: position-independent KV cache reuse for LLM serving."""

__version__ = "0.1.0"
