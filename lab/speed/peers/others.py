"""Packages of others, where they are installed: `kvboost` and `contextpilot`. Imported on use."""

import importlib
import time
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from typing import Any

import torch
from transformers import PreTrainedModel

from lab.speed.peers.requests import Request
from lab.speed.peers.ways import First, TransformersPrefix

CACHE_BYTES, CHUNKS = 8 << 30, 4096
KVBOOST_SETTINGS: dict[str, Any] = {
    "max_cache_bytes": CACHE_BYTES,
    "max_chunks": CHUNKS,
    "recency_window_chunks": 0,
    "recompute_strategy": "cacheblend",
    "recompute_ratio": 0.15,
}
"""Its defaults, but a cache that holds all, and its blending for seams."""
KVBOOST_CHUNK = 128
"""Its default: tokens of a chunk."""


class NotInstalledError(Exception):
    """A package is not there, or its import fails; the message says how to get it, or why."""


def required(name: str) -> Any:
    """A package of others.

    Raises:
        NotInstalledError: see there.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise NotInstalledError(f"{name} needs {error.name}, which is not installed") from error
        raise NotInstalledError(f"{name} is not installed: pip install {name}") from error
    except Exception as error:  # whatever its import does
        raise NotInstalledError(f"{name} cannot be imported: {error}") from error


class _Ids:
    """In place of a tokenizer: a prompt is its ids, so that every way computes the same."""

    eos_token_id = None

    def encode(self, prompt: str, **_: Any) -> list[int]:
        return [int(each) for each in prompt.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


class KVBoost:
    """`kvboost`: chunks of a fixed length by content, its own recomputation.

    Args:
        model: that computes.
        chunk_size: tokens of its chunks. It cuts from a prompt's first token, so passages are found at another place
            only where head and passages are whole chunks.

    Raises:
        NotInstalledError: as `required`.
    """

    changes = "nothing"

    def __init__(self, model: PreTrainedModel, chunk_size: int = KVBOOST_CHUNK) -> None:
        package, settings = required("kvboost"), {**KVBOOST_SETTINGS, "chunk_size": chunk_size}
        self._engine = package.KVBoost(model, _Ids(), device=str(model.device), **settings)
        self.settings = {**settings, "version": version("kvboost")}

    def first(self, request: Request) -> First:
        """See `Way`. Its own `ttft_ms` leaves out how the cache is put together; storing comes behind the token."""
        ids, came = request.ids, list[float]()
        started = time.perf_counter()
        found = self._engine.generate(
            " ".join(map(str, ids)), max_new_tokens=1, on_token=lambda token: came.append(time.perf_counter())
        )
        return First(torch.from_numpy(found.first_token_logits), came[0] - started, int(found.cached_tokens), ids)


class ContextPilot(TransformersPrefix):
    """`contextpilot`: passages in the order that hits prefixes of earlier prompts, then transformers' prefix cache.

    Raises:
        NotInstalledError: as `required`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._pilot = required("contextpilot").ContextPilot(use_gpu=False)
        self._numbers: dict[bytes, int] = {}
        self.settings = {"use_gpu": False, "call": "reorder, a request at a time", "version": version("contextpilot")}
        super().__init__(model, self._reordered, "the order of the passages")

    def _reordered(self, request: Request) -> Request:
        keys = [passage.token_ids.tobytes() for passage in request.passages]
        names = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        with redirect_stdout(StringIO()):  # it prints what it does
            [order], _ = self._pilot.reorder([names])
        return request.ordered([names.index(name) for name in order])
