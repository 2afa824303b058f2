"""Full prefill, transformers' own cache for prefixes, and blending: a request to its first token's logits."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import full_recompute, fused
from lab.speed.peers.requests import Request

MOST_KEPT = 16
"""Prompts whose KV a prefix cache keeps; the oldest go."""


@dataclass(frozen=True)
class First:
    """A first token.

    Attributes:
        logits: [vocab] at the prompt's last position.
        ttft_s: seconds until they are computed.
        reused: tokens of the prompt whose KV was not computed for it.
        ids: of the prompt that was computed.
    """

    logits: torch.Tensor
    ttft_s: float
    reused: int
    ids: list[int]


class Way(Protocol):
    """One way to the first token; keeps what it keeps from request to request."""

    changes: str
    """What becomes of the prompt."""

    def first(self, request: Request) -> First:
        """Computes a request's first token."""


class FullPrefill:
    """transformers' own forward of the whole prompt."""

    changes = "nothing"

    def __init__(self, engine: BlendEngine) -> None:
        self._engine = engine

    def first(self, request: Request) -> First:
        """See `Way`."""
        found = full_recompute(self._engine, request.prompt)
        return First(found.logits, found.ttft_s, 0, request.ids)


class Blending:
    """Stored passages, moved and blended. They are stored before the first request (`warm`)."""

    changes = "nothing"

    def __init__(self, engine: BlendEngine, selector: Selector) -> None:
        self._engine, self._selector = engine, selector

    def first(self, request: Request) -> First:
        """See `Way`."""
        found = fused(self._engine, request.prompt, self._selector)
        hits = 0 if found.report is None else sum(found.report.hit_tokens.values())
        return First(found.logits, found.ttft_s, hits, request.ids)


class TransformersPrefix:
    """transformers' `DynamicCache` of earlier prompts, cropped to the longest common prefix.

    Args:
        model: that computes.
        arrange: what becomes of a request before it is computed; its time counts.
        changes: that, in words.
    """

    def __init__(
        self, model: PreTrainedModel, arrange: Callable[[Request], Request] | None = None, changes: str = "nothing"
    ) -> None:
        self._model, self._arrange, self.changes = model, arrange, changes
        self._kept: list[tuple[list[int], DynamicCache]] = []

    @torch.no_grad()
    def first(self, request: Request) -> First:
        """See `Way`."""
        started = time.perf_counter()
        ids = (request if self._arrange is None else self._arrange(request)).ids
        known, used = self._longest(ids)
        given = torch.tensor([ids[known:]], device=self._model.device)
        logits = self._model(input_ids=given, past_key_values=used, use_cache=True, logits_to_keep=1).logits[0, -1]
        took = time.perf_counter() - started
        self._kept = [*self._kept, (ids, used)][-MOST_KEPT:]
        return First(logits, took, known, ids)

    def _longest(self, ids: list[int]) -> tuple[int, DynamicCache]:
        """Tokens of the longest common prefix with a kept prompt, and a copy of its cache that has only these."""
        found = [(min(_common(ids, kept), len(ids) - 1), kept, cache) for kept, cache in self._kept]
        known, kept, cache = max(found, key=lambda each: each[0], default=(0, [], None))
        if cache is None or not known:
            return 0, DynamicCache(config=self._model.config)
        copied = copy.deepcopy(cache)
        if known < len(kept):
            copied.crop(known - len(kept))  # negative: tokens that go
        return known, copied


def _common(ids: list[int], kept: list[int]) -> int:
    pairs = enumerate(zip(ids, kept, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ids), len(kept)))
