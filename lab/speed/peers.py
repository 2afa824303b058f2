"""Other ways to reuse KV beside blending, on the same shuffled requests; what is not installed is skipped.

Ways take turns by request. The first request of each is not counted: the others have computed nothing to reuse, and
blending's passages are stored before it (`warm_s`). `kvboost` and `contextpilot` are imported on use.
"""

import copy
import importlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from io import StringIO
from math import gcd
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend.bench.ttft import read_chunks
from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt, Segment, text
from cacheblend.core.select.selection import Selection
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import full_recompute, fused
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.engines.provenance import stamp
from cacheblend.engines.shadow import agreement
from cacheblend.store import MemoryStore
from lab.bench import Advance, markdown_table, silent
from lab.settings import Peers

FULL = "full prefill"
RATIOS = (0.15, 0.05)
MOST_KEPT = 16
"""Prompts whose KV a prefix cache keeps; the oldest go."""
KVBOOST_SETTINGS: dict[str, Any] = {
    "max_cache_bytes": 8 << 30,
    "max_chunks": 4096,
    "recency_window_chunks": 0,
    "recompute_strategy": "cacheblend",
    "recompute_ratio": 0.15,
}
"""Its defaults, but a cache that holds all, and its blending for seams."""
KVBOOST_CHUNK = 128
"""Its default: tokens of a chunk."""


@dataclass(frozen=True)
class Request:
    """A head that is the same in all requests, passages in the order of this one, a question."""

    head: Segment
    passages: tuple[Segment, ...]
    question: Segment

    @property
    def ids(self) -> list[int]:
        return list(map(int, self.prompt.token_ids))

    @property
    def prompt(self) -> Prompt:
        return Prompt.of([self.head, *self.passages, self.question])

    def ordered(self, order: Sequence[int]) -> "Request":
        """With its passages in another order: numbers of `passages`."""
        return replace(self, passages=tuple(self.passages[number] for number in order))


def shuffled(chunks: Sequence[Segment], count: int, question_tokens: int, vocab: int, seed: int) -> list[Request]:
    """Requests of the chunks, each in an order of its own; head and questions are random."""
    rng = random.Random(seed)

    def plain() -> Segment:
        return text([rng.randrange(vocab) for _ in range(question_tokens)])

    head = plain()
    return [Request(head, tuple(rng.sample(list(chunks), len(chunks))), plain()) for _ in range(count)]


# ---- ways ---------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Way:
    """One way to the first token, which keeps what it keeps from request to request.

    Attributes:
        first: computes a request's first token.
        changes: what becomes of the prompt.
        settings: of another's package; what it raises is no error of the comparison. None: it is no such package.
    """

    first: Callable[[Request], First]
    changes: str = "nothing"
    settings: dict[str, Any] | None = None


def full_prefill(engine: BlendEngine, request: Request) -> First:
    """transformers' own forward of the whole prompt."""
    found = full_recompute(engine, request.prompt)
    return First(found.logits, found.ttft_s, 0, request.ids)


def blended(engine: BlendEngine, selector: Selector, request: Request) -> First:
    """Passages that were stored before the first request, moved and blended."""
    found = fused(engine, request.prompt, selector)
    hits = 0 if found.report is None else sum(found.report.hit_tokens.values())
    return First(found.logits, found.ttft_s, hits, request.ids)


class TransformersPrefix:
    """transformers' `DynamicCache` of earlier prompts, cropped to the longest common prefix.

    `arrange` is what becomes of a request before it is computed, and its time counts.
    """

    def __init__(self, model: PreTrainedModel, arrange: Callable[[Request], Request] = lambda request: request) -> None:
        self._model, self._arrange = model, arrange
        self._kept: list[tuple[list[int], DynamicCache]] = []

    @torch.no_grad()
    def first(self, request: Request) -> First:
        started = time.perf_counter()
        ids = self._arrange(request).ids
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


class NotInstalledError(Exception):
    """A package is not there, or its import fails; the message says how to get it, or why."""


def required(name: str) -> Any:
    """A package of others; raises `NotInstalledError`."""
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


def kvboost(model: PreTrainedModel, chunk_size: int = KVBOOST_CHUNK) -> Way:
    """`kvboost`: chunks of a fixed length by content, its own recomputation. Raises `NotInstalledError`.

    It cuts from a prompt's first token, so passages are found at another place only where head and passages are whole
    chunks.
    """
    package, settings = required("kvboost"), {**KVBOOST_SETTINGS, "chunk_size": chunk_size}
    engine = package.KVBoost(model, _Ids(), device=str(model.device), **settings)

    def first(request: Request) -> First:
        """Its own `ttft_ms` leaves out how the cache is put together; storing comes behind the token."""
        ids, came = request.ids, list[float]()
        started = time.perf_counter()
        found = engine.generate(
            " ".join(map(str, ids)), max_new_tokens=1, on_token=lambda token: came.append(time.perf_counter())
        )
        return First(torch.from_numpy(found.first_token_logits), came[0] - started, int(found.cached_tokens), ids)

    return Way(first, settings={**settings, "version": version("kvboost")})


def contextpilot(model: PreTrainedModel) -> Way:
    """`contextpilot`: passages in the order that hits prefixes of earlier prompts, then transformers' prefix cache.

    Raises `NotInstalledError`.
    """
    pilot, numbers = required("contextpilot").ContextPilot(use_gpu=False), dict[bytes, int]()

    def reordered(request: Request) -> Request:
        keys = [passage.token_ids.tobytes() for passage in request.passages]
        names = [numbers.setdefault(key, len(numbers)) for key in keys]
        with redirect_stdout(StringIO()):  # it prints what it does
            [order], _ = pilot.reorder([names])
        return request.ordered([names.index(name) for name in order])

    settings = {"use_gpu": False, "call": "reorder, a request at a time", "version": version("contextpilot")}
    return Way(TransformersPrefix(model, reordered).first, "the order of the passages", settings)


# ---- the comparison -----------------------------------------------------------------------------------------


def run(what: Peers, advance: Advance = silent) -> dict[str, Any]:
    """Asks all ways; returns `figures`, every request, and what was skipped and why."""
    config, ratios = BlendConfig(discover=False, capture=False), tuple(what.ratio or RATIOS)
    if what.model is not None:
        engine = BlendEngine.from_pretrained(what.model, store=MemoryStore(), config=config)
    else:
        shape = build_shape(what.shape or "", seed=what.seed)
        engine = BlendEngine(shape, store=MemoryStore(), config=config, fingerprint="bench", name="bench")
    chunks = read_chunks(what.data, engine, what.chunks, what.chunk_tokens)
    asked = shuffled(chunks, what.runs + 1, what.question_tokens, engine.runtime.survey.vocab_size, what.seed)
    started = time.perf_counter()
    engine.warm(chunks)
    warm_s = time.perf_counter() - started
    ways, skipped = _ways(engine, ratios, gcd(what.chunk_tokens, what.question_tokens))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for number, request in enumerate(asked):
        full = ways[FULL].first(request)
        for name, way in ways.items():
            try:
                got = full if name == FULL else way.first(request)
            except Exception as error:
                if name in skipped or way.settings is None:
                    raise
                skipped[name] = f"stopped at request {number + 1}: {type(error).__name__}: {error}"
                continue
            if number and name not in skipped:
                rows[name].append(_row(got, full, request))
        advance(number + 1, len(asked))
    rows = {name: found for name, found in rows.items() if found and name not in skipped}
    settings = {name: value for name, value in vars(what).items() if name not in ("runs", "ratio")}
    called = what.model.name if what.model else what.shape
    return {
        "figures": {way: _figures(found, rows[FULL]) for way, found in rows.items()},
        "changes": {name: ways[name].changes for name in rows},
        "skipped": skipped,
        "requests": rows,
        "warm_s": warm_s,
        "model": called,
        "settings": {
            **settings,
            "requests": what.runs,
            "ratios": ratios,
            "model": what.model and called,
            "data": what.data.name,
            "dtype": str(engine.model.dtype),
            **{name: way.settings for name, way in ways.items() if way.settings is not None},
        },
        **stamp(),
    }


def _ways(engine: BlendEngine, ratios: tuple[float, ...], aligned: int) -> tuple[dict[str, Way], dict[str, str]]:
    """All ways by name, and why others are left out; head and passages are whole multiples of `aligned` tokens."""
    model, skipped = engine.model, dict[str, str]()
    prefix = TransformersPrefix(model)
    ways = {FULL: Way(partial(full_prefill, engine)), "transformers' prefix cache": Way(prefix.first)}
    others: dict[str, Callable[[], Way]] = {"kvboost": partial(kvboost, model)}
    if aligned != KVBOOST_CHUNK:
        others[f"kvboost, chunks of {aligned}"] = partial(kvboost, model, aligned)
    others["contextpilot"] = partial(contextpilot, model)
    for name, make in others.items():
        try:
            ways[name] = make()
        except Exception as error:  # a package of others may refuse the model in any way
            kind = "" if isinstance(error, NotInstalledError) else f"{type(error).__name__}: "
            skipped[name] = f"{kind}{error}"
    for ratio in ratios:
        selector = Selection(recompute_ratio=ratio).make_selector()
        ways[f"cacheblend, r = {ratio:g}"] = Way(partial(blended, engine, selector))
    return ways, skipped


def _row(got: First, full: First, request: Request) -> dict[str, Any]:
    close = agreement(got.logits, full.logits)
    return {
        "ttft_s": got.ttft_s,
        "tokens": len(got.ids),
        "reused": got.reused,
        "same_prompt": got.ids == request.ids,
        "kl": close.kl,
        "top_1": close.first,
        "max_abs": float((got.logits.float() - full.logits.float()).abs().max()),
    }


def _figures(rows: list[dict[str, Any]], full: list[dict[str, Any]]) -> dict[str, float]:
    ttft, plain = (statistics.median(row["ttft_s"] for row in found) for found in (rows, full))
    return {
        "reused": sum(row["reused"] for row in rows) / sum(row["tokens"] for row in rows),
        "ttft_s": ttft,
        "speedup": plain / ttft,
        "kl": statistics.median(row["kl"] for row in rows),
        "max_abs": statistics.median(row["max_abs"] for row in rows),
        "top_1": sum(row["top_1"] for row in rows) / len(rows),
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown table, and a line for each package that was skipped."""
    numbers = ("tokens reused", "first token, s", "gain", "KL to full prefill, nats", "largest logit difference")
    form = "{reused:.0%},{ttft_s:.2f},{speedup:.2f},{kl:.2g},{max_abs:.2g}"
    figures = result["figures"].items()
    rows = [(name, result["changes"][name], *form.format_map(found).split(",")) for name, found in figures]
    lines = [markdown_table(("", "what it changes in the prompt"), numbers, rows)]
    return "\n".join([*lines, *(f"{name}: skipped, {why}" for name, why in result["skipped"].items())])
