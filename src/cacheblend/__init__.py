"""CacheBlend: position-independent KV cache reuse for LLM serving.

The names that programs start from can be imported from here; each is loaded, with torch, when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheblend.core.config import BlendConfig
    from cacheblend.core.errors import CacheBlendError, InvalidInputError
    from cacheblend.core.plan.prompt import Prompt
    from cacheblend.engines.documents import Document
    from cacheblend.engines.hf.document_sync import DocumentSync
    from cacheblend.engines.hf.engine import BlendEngine
    from cacheblend.engines.hf.grammar import Grammar
    from cacheblend.engines.hf.request import Answer, BatchError
    from cacheblend.engines.hf.sampling import SamplingParams
    from cacheblend.engines.tokens.passage import Passage
    from cacheblend.store.open import open_store

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "BatchError",
    "BlendConfig",
    "BlendEngine",
    "CacheBlendError",
    "Document",
    "DocumentSync",
    "Grammar",
    "InvalidInputError",
    "Passage",
    "Prompt",
    "SamplingParams",
    "__version__",
    "open_store",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of this package's
    _PLACES = {
        "Answer": "engines.hf",
        "BatchError": "engines.hf",
        "BlendConfig": "core.config",
        "BlendEngine": "engines.hf",
        "CacheBlendError": "core.errors",
        "Document": "engines.documents",
        "DocumentSync": "engines.hf",
        "Grammar": "engines.hf",
        "InvalidInputError": "core.errors",
        "Passage": "engines.tokens",
        "Prompt": "core.plan.prompt",
        "SamplingParams": "engines.hf",
        "open_store": "store",
    }

    def __getattr__(name):
        """Loads a name on its first use (PEP 562)."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})
