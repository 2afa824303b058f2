"""Time to first token: full prefill, prefix caching, full reuse and blend, alternating on the same prompts.

A prompt is 32 tokens of plain text that no cache holds (new ones each round), the stored chunks in shuffled order,
the question: no chunk is an exact prefix hit. Full prefill is transformers' own forward with SDPA and a cache, last
logits only.
"""

import hashlib
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.core.profile import quality_settings
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selection import Selection
from cacheblend.core.select.selectors import NoRows, check_ratio
from cacheblend.data import read_passages
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import FirstToken, full_recompute, fused, prefix_caching
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.engines.provenance import stamp
from cacheblend.evaluation.report import PLAIN
from cacheblend.store import KVStore, MemoryStore, open_store

ARMS = ("full", "prefix", "reuse", "blend", "miss")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TtftSettings:
    """One benchmark."""

    model: str | None = None  # a model folder; or `shape`: random weights of a known shape
    shape: str | None = None
    data: str | None = None  # real passages (`read_passages`); None: random tokens
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    plain_tokens: int = 32
    selection: Selection = field(default_factory=Selection)  # how the blend arms select rows
    ratios: tuple[float, ...] = (0.15,)
    """Each is measured as its own blend arm; that of `selection` with its own check layers' ratios."""
    profile: str | None = None  # name under which the first blend arm's gain is among the figures
    arms: tuple[str, ...] = ("full", "prefix", "reuse", "blend")  # ``miss`` is blend with nothing stored
    stores: tuple[str, ...] = ("memory",)  # or ``disk``, without memory in front; arms that load run on each
    runs: int = 5  # measured, after one warm-up
    threads: int | None = None  # of torch; None keeps torch's own number
    seed: int = 0  # of weights, tokens and orders

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            raise InvalidInputError("give either a model folder or a shape, not both and not none")
        for name in ("chunks", "chunk_tokens", "question_tokens", "plain_tokens", "runs"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        for ratio in self.ratios:
            check_ratio(ratio)
        for what, given, known in (("method", self.arms, ARMS), ("store", self.stores, ("memory", "disk"))):
            if unknown := [name for name in given if name not in known]:
                raise InvalidInputError(f"there is no {what} {unknown[0]!r} here; choose from {', '.join(known)}")
            if not given:
                raise InvalidInputError(f"there is no {what} to measure; choose from {', '.join(known)}")

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.plain_tokens + self.chunks * self.chunk_tokens + self.question_tokens


@dataclass
class Arm:
    """One way to the first token, and its times so far."""

    name: str
    run: Callable[[Prompt], FirstToken]
    ratio: float | None = None
    store: str | None = None
    seconds: list[float] = field(default_factory=list)
    reports: list[BlendReport] = field(default_factory=list)


def run(settings: TtftSettings, on_progress: Progress | None = None) -> dict[str, Any]:
    """Runs the benchmark; its result for JSON. Raises `InvalidInputError`: the context or the data is too short."""
    before = torch.get_num_threads()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        model, tokenizer, name = open_model(settings)
        with _engine(model, tokenizer, "memory", settings) as engine:  # what does not fit is refused first
            draw = random.Random(settings.seed)
            chunks = open_chunks(settings, engine, draw)
            engine.prompt(draw_prompt(settings, chunks, engine.runtime.survey.vocab_size, draw))
        measured = _measure(settings, model, tokenizer, on_progress)
        arms = [summary(arm, measured) for arm in measured]
        # The gain of each blend from the first store, by its ratio; the first of them also by the profile's name.
        blends = [arm for arm in arms if arm["arm"] == "blend" and arm["store"] == settings.stores[0]]
        figures = {f"blend_{arm['ratio']:g}_speedup": arm["speedup_vs_full"] for arm in blends}
        if settings.profile and blends:
            figures[f"{settings.profile}_speedup"] = blends[0]["speedup_vs_full"]
        return {
            "figures": figures,
            "selection": quality_settings(settings.selection),
            "arms": arms,
            "model": name,
            "prompt": _prompt_facts(settings),
            **stamp(),
        }
    finally:
        torch.set_num_threads(before)


def open_model(settings: TtftSettings) -> tuple[PreTrainedModel, Any, str]:
    """Model, tokenizer (None for a shape) and name."""
    if settings.shape is not None:
        model = build_shape(settings.shape, seed=settings.seed)
        return model, None, settings.shape
    with BlendEngine.from_pretrained(settings.model or "") as engine:
        return engine.model, engine.tokenizer, engine.name


def _measure(settings: TtftSettings, model: PreTrainedModel, tokenizer: Any, on_progress: Progress | None) -> list[Arm]:
    draw = random.Random(settings.seed)
    with ExitStack() as stack:
        engines = {store: stack.enter_context(_engine(model, tokenizer, store, settings)) for store in settings.stores}
        chunks = open_chunks(settings, next(iter(engines.values())), draw)
        for engine in engines.values():
            engine.warm(chunks)
        empty = stack.enter_context(_engine(model, tokenizer, "memory", settings))
        selection, arms = empty.config.selection, list[Arm]()
        for name in settings.arms:
            if name == "full":
                arms.append(Arm(name, partial(full_recompute, empty)))
            elif name == "miss":
                arms.append(Arm(name, partial(fused, empty, selector=empty.config.make_selector())))
            elif name == "prefix":
                arms += [Arm(name, partial(prefix_caching, engine), store=store) for store, engine in engines.items()]
            elif name == "reuse":
                none = partial(fused, selector=NoRows())
                arms += [Arm(name, partial(none, engine), 0.0, store) for store, engine in engines.items()]
            else:
                for (store, engine), ratio in product(engines.items(), settings.ratios):
                    chosen = selection.make_selector(None if ratio == selection.final_ratio else ratio)
                    arms.append(Arm(name, partial(fused, engine, selector=chosen), ratio, store))
        for round_ in range(settings.runs + 1):
            prompt = draw_prompt(settings, chunks, empty.runtime.survey.vocab_size, draw)
            for arm in arms:
                if on_progress is not None:
                    on_progress(round_, settings.runs + 1, arm.name)
                seconds, report = timed(arm, prompt, model)
                if round_:
                    arm.seconds.append(seconds)
                    arm.reports += [report] if report else []
    return arms


@contextmanager
def _engine(model: PreTrainedModel, tokenizer: Any, store: str, settings: TtftSettings) -> Iterator[BlendEngine]:
    with ExitStack() as stack:
        kept: KVStore = MemoryStore(64 << 30)
        if store == "disk":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-bench-"))
            kept = open_store(folder, ram_bytes=0)
        stack.enter_context(kept)
        config = BlendConfig.of(vars(settings.selection) | {"capture": False, "load_timeout_s": math.inf})
        yield stack.enter_context(
            BlendEngine(model, tokenizer, store=kept, config=config, fingerprint="bench", name="bench")
        )


def open_chunks(settings: TtftSettings, engine: BlendEngine, draw: random.Random) -> list[Segment]:
    """The chunks that are stored: real passages, or random tokens."""
    if settings.data is not None:
        return read_chunks(Path(settings.data), engine, settings.chunks, settings.chunk_tokens)
    vocab = engine.runtime.survey.vocab_size
    return [chunk(_random_ids(vocab, settings.chunk_tokens, draw)) for _ in range(settings.chunks)]


def draw_prompt(settings: TtftSettings, chunks: list[Segment], vocab: int, draw: random.Random) -> Prompt:
    """New plain text, the chunks in a new order, a new question."""
    shuffled = draw.sample(chunks, len(chunks))
    plain = text(_random_ids(vocab, settings.plain_tokens, draw))
    return Prompt.of([plain, *shuffled, text(_random_ids(vocab, settings.question_tokens, draw))])


def read_chunks(path: Path, engine: BlendEngine, count: int, tokens: int) -> list[Segment]:
    """`count` different chunks of exactly `tokens` tokens, passages joined where one is too short. Without a tokenizer
    each word becomes one id; equal words get equal ids. Raises `InvalidInputError`."""
    chunks: list[Segment] = []
    ids: list[int] = []
    for passage in dict.fromkeys(passage.text for passage in read_passages(path)):
        if engine.runtime.builder:
            ids += engine.runtime.builder.encode(passage)
        else:
            words = (hashlib.blake2b(word.encode(), digest_size=8).digest() for word in passage.split())
            ids += [int.from_bytes(word) % engine.runtime.survey.vocab_size for word in words]
        while len(ids) >= tokens and len(chunks) < count:
            chunks.append(chunk(ids[:tokens]))
            ids = ids[tokens:]
        if len(chunks) == count:
            return chunks
    raise InvalidInputError(f"{path} gives {len(chunks)} chunks of {tokens} tokens, {count} are needed")


def _random_ids(vocab: int, count: int, draw: random.Random) -> list[int]:
    return [draw.randrange(vocab) for _ in range(count)]


def timed(arm: Arm, prompt: Prompt, model: PreTrainedModel) -> tuple[float, BlendReport | None]:
    """Seconds of one method until the device is done, and its report."""
    is_cuda = model.device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(model.device)
    started = time.perf_counter()
    report = arm.run(prompt).report
    if is_cuda:
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - started, report


def summary(arm: Arm, arms: list[Arm]) -> dict[str, Any]:
    """A method's times beside full prefill's, as they are written to JSON."""
    median = statistics.median(arm.seconds)
    full = next((statistics.median(other.seconds) for other in arms if other.name == "full"), None)
    last = arm.reports[-1] if arm.reports else BlendReport()
    return {
        "arm": arm.name,
        "ratio": arm.ratio,
        "store": arm.store,
        "ttft_s": {"median": median, "min": min(arm.seconds), "max": max(arm.seconds), "all": arm.seconds},
        "speedup_vs_full": None if full is None else full / median,
        "load_s": statistics.median([r.load_s for r in arm.reports] or [0.0]),
        "compute_s": statistics.median([r.compute_s for r in arm.reports] or [median]),
        "loaded_tokens": last.loaded_tokens,
        "recomputed_tokens": last.recomputed_tokens,
    }


def _prompt_facts(settings: TtftSettings) -> dict[str, Any]:
    numbers = {name: getattr(settings, name) for name in ("plain_tokens", "chunks", "chunk_tokens", "question_tokens")}
    data = Path(settings.data).name if settings.data else None
    return {"tokens": settings.prompt_tokens, **numbers, "data": data}


def table(result: dict[str, Any]) -> Table:
    """The result for people, 80 columns wide."""
    on_disk = any(arm["store"] == "disk" for arm in result["arms"])
    disk = "; disk: a folder in $TMPDIR, whose files were just written and may be in memory" if on_disk else ""
    out = Table(
        title=Text(f"Time to first token, {result['model']}", "table.title"),
        caption=f"gain: full / method; loaded: tokens from the store; again: recomputed{disk}",
        **PLAIN,
    )
    for column in ("method", "store"):
        out.add_column(column, no_wrap=True)
    for column in ("TTFT, s", "min", "max", "gain", "load, s", "loaded", "again"):
        out.add_column(column, justify="right", no_wrap=True)
    out.add_row(Text(f"{result['prompt']['chunks']} x {result['prompt']['chunk_tokens']}", "dim"))
    for arm in result["arms"]:
        name = arm["arm"] if arm["arm"] != "blend" else f"blend {arm['ratio']:g}"
        times = [_seconds(arm["ttft_s"][of]) for of in ("median", "min", "max")]
        gain = "" if arm["speedup_vs_full"] is None else f"{arm['speedup_vs_full']:.2f}"
        rows = str(arm["loaded_tokens"]), str(arm["recomputed_tokens"])
        out.add_row(name, arm["store"] or "", *times, gain, _seconds(arm["load_s"]), *rows)
    return out


def _seconds(value: float) -> str:
    """Six characters at most, below three hours."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"
