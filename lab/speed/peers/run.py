"""Other ways to reuse KV beside blending, on the same shuffled requests; what is not installed is skipped.

Ways take turns by request. The first request of each is not counted: the others have computed nothing to reuse, and
blending's passages are stored before it (`warm_s`).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from cacheblend.bench.stamp import stamp
from cacheblend.bench.ttft import read_chunks
from cacheblend.core.config import BlendConfig
from cacheblend.core.select.selection import Selection
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import agreement
from cacheblend.engines.hf.shapes import build_shape, check_choice
from cacheblend.store import MemoryStore
from lab.speed.peers.others import KVBOOST_CHUNK, ContextPilot, KVBoost, NotInstalledError
from lab.speed.peers.requests import Request, shuffled
from lab.speed.peers.ways import Blending, First, FullPrefill, TransformersPrefix, Way

FULL = "full prefill"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PeersBench:
    """What is compared.

    Attributes:
        data: passages, as `cacheblend.data.read_passages` reads them.
        model: a model folder; or `shape`: random weights of a known shape.
        chunks, chunk_tokens: passages of each request.
        question_tokens: tokens of the head that all requests have, and of each question.
        requests: measured, after one that is not.
        ratios: recompute ratios of blending, an arm each.
        seed: of weights, plain text and orders.
    """

    data: Path
    model: str | None = None
    shape: str | None = None
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    requests: int = 5
    ratios: tuple[float, ...] = (0.15, 0.05)
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self.model, self.shape)


def run(what: PeersBench, advance: Progress = lambda done, total: None) -> dict[str, Any]:
    """Asks all ways; returns `figures`, every request, and what was skipped and why.

    Args:
        what: is compared.
        advance: called with requests done, and in all.

    Raises:
        InvalidInputError: the passages or the model cannot be read.
    """
    engine = _engine(what)
    model = engine.model
    chunks = read_chunks(what.data, engine, what.chunks, what.chunk_tokens)
    asked = shuffled(chunks, what.requests + 1, what.question_tokens, engine.survey.vocab_size, what.seed)
    started = time.perf_counter()
    engine.warm(chunks)
    warm_s = time.perf_counter() - started
    ways, skipped = _ways(engine, model, what.ratios, gcd(what.chunk_tokens, what.question_tokens))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for number, request in enumerate(asked):
        full = ways[FULL].first(request)
        for name, way in ways.items():
            try:
                got = full if name == FULL else way.first(request)
            except Exception as error:
                if name in skipped or not isinstance(way, KVBoost | ContextPilot):
                    raise
                skipped[name] = f"stopped at request {number + 1}: {type(error).__name__}: {error}"
                continue
            if number and name not in skipped:
                rows[name].append(_row(got, full, request))
        advance(number + 1, len(asked))
    rows = {name: found for name, found in rows.items() if found and name not in skipped}
    called = Path(what.model).name if what.model else what.shape
    return {
        "figures": {way: _figures(found, rows[FULL]) for way, found in rows.items()},
        "changes": {name: ways[name].changes for name in rows},
        "skipped": skipped,
        "requests": rows,
        "warm_s": warm_s,
        "model": called,
        "settings": {
            **vars(what),
            "model": what.model and called,
            "data": what.data.name,
            "dtype": str(model.dtype),
            **{name: way.settings for name, way in ways.items() if isinstance(way, KVBoost | ContextPilot)},
        },
        **stamp(),
    }


def _engine(what: PeersBench) -> BlendEngine:
    config = BlendConfig(discover=False, capture=False)
    if what.model is not None:
        return BlendEngine.from_pretrained(what.model, store=MemoryStore(), config=config)
    model = build_shape(what.shape or "", seed=what.seed)
    return BlendEngine(model, store=MemoryStore(), config=config, fingerprint="bench", name="bench")


def _ways(
    engine: BlendEngine, model: PreTrainedModel, ratios: tuple[float, ...], aligned: int
) -> tuple[dict[str, Way], dict[str, str]]:
    """All ways by name, and why others are left out.

    Args:
        engine: with the passages stored.
        model: its.
        ratios: of blending.
        aligned: length of chunks of which head and passages are whole multiples.
    """
    ways: dict[str, Way] = {FULL: FullPrefill(engine), "transformers' prefix cache": TransformersPrefix(model)}
    skipped: dict[str, str] = {}
    others: dict[str, Callable[[], Way]] = {"kvboost": partial(KVBoost, model)}
    if aligned != KVBOOST_CHUNK:
        others[f"kvboost, chunks of {aligned}"] = partial(KVBoost, model, aligned)
    others["contextpilot"] = partial(ContextPilot, model)
    for name, make in others.items():
        try:
            ways[name] = make()
        except NotInstalledError as error:
            skipped[name] = str(error)
        except Exception as error:  # a package of others may refuse the model in any way
            skipped[name] = f"{type(error).__name__}: {error}"
    for ratio in ratios:
        ways[f"cacheblend, r = {ratio:g}"] = Blending(engine, Selection(recompute_ratio=ratio).make_selector())
    return ways, skipped


def _row(got: First, full: First, request: Request) -> dict[str, Any]:
    return {
        "ttft_s": got.ttft_s,
        "tokens": len(got.ids),
        "reused": got.reused,
        "same_prompt": got.ids == request.ids,
        **agreement(got.logits, full.logits).to_dict(),
        "max_abs": float((got.logits.float() - full.logits.float()).abs().max()),
    }


def _figures(rows: list[dict[str, Any]], full: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the requests."""
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
    lines = [
        "| | tokens reused | first token, s | gain | KL to full prefill, nats | largest logit difference "
        "| what it changes in the prompt |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in result["figures"].items():
        lines.append(
            f"| {name} | {found['reused']:.0%} | {found['ttft_s']:.2f} | {found['speedup']:.2f} | {found['kl']:.2g} "
            f"| {found['max_abs']:.2g} | {result['changes'][name]} |"
        )
    return "\n".join([*lines, *(f"{name}: skipped, {why}" for name, why in result["skipped"].items())])
