"""Time to first token on a GPU: full prefill by transformers, and blends from its memory, the host's, and a disk.

Lengths are measured in the order of their importance, so that a run that is short of time has the first ones. Every
round asks a new prompt of each arm in turn; a point that runs out of time keeps the rounds that it has.
"""

import math
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cacheblend.bench.ttft import Arm, TtftSettings, draw_prompt, open_chunks, summary, timed
from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.question_selectors import Hybrid
from cacheblend.core.select.selectors import Corrected, Head, Selector
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.baselines import full_recompute, fused
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.store import DiskStore, KVStore, MemoryStore
from cacheblend.store.residence import HERE, OnDevice, PageLocked
from lab.gpu.context import TRACEBACK_LINES, Bench, Found, free
from lab.speed.disk_reads import drop_pages, is_cached

ON_DISK = "disk"
STORES = ("pinned memory", "device", ON_DISK)
EIGHT_BITS = "pinned memory, fp8 records"
GRAPHS = "pinned memory, layer graphs"
"""The first store, and an engine that starts a layer's kernels by graphs."""
_MOST_BYTES = 48 << 30  # of a store; no prompt here needs as much
RATIOS = (0.15, 0.05, 1.0)
"""From page-locked memory; from the other stores only the first two."""
HEAD = "head"
"""Blends by the selector that chooses in front of layer 0: the first rows of each chunk, and other keys corrected."""
HYBRID = "hybrid"
"""By the question's attention in front of layer 0, which takes a pass of the question's rows, and by deviation."""
DECODED = 48  # tokens

_LEAST = 0.5  # of the seconds that a point takes about: it is begun if they are left, with fewer rounds


@dataclass(frozen=True)
class Point:
    """One length of one shape; `key`: of its figures; `seconds`: that it takes about, as expected."""

    shape: str
    key: str
    chunks: int
    chunk_tokens: int = 512
    runs: int = 5
    seconds: float = 15.0

    @property
    def tokens(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.tokens} tokens"

    @property
    def settings(self) -> TtftSettings:
        return TtftSettings(shape=self.shape, chunks=self.chunks, chunk_tokens=self.chunk_tokens, runs=self.runs)


POINTS = (
    Point("llama-3.1-8b", "16k", 32, seconds=35),
    Point("llama-3.1-8b", "4k", 8, seconds=15),
    Point("llama-3.1-8b", "32k", 64, runs=3, seconds=60),
)
DRY = (Point("tiny", "16k", 3, 32, 1, 1.0), Point("tiny", "4k", 2, 32, 1, 1.0))


@dataclass
class TimedArm(Arm):
    """An arm, and what surrounds a run of it without being timed."""

    around: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def label(self) -> str:
        return self.name if self.ratio is None else label(self.name, self.ratio, self.store)


def label(name: str, ratio: float, store: str | None) -> str:
    """Of a blend; its selector is named unless it is the default one."""
    return f"{'' if name == 'blend' else f'{name}, '}r = {ratio:g}, {store}"


@dataclass(frozen=True)
class Engines:
    """Engines of one model, opened once for all lengths."""

    model: PreTrainedModel
    by_store: dict[str, BlendEngine]
    folder: Path

    @property
    def first(self) -> BlendEngine:
        """That of the store that counts."""
        return self.by_store[STORES[0]]

    def files(self) -> list[Path]:
        """Of the store on the disk."""
        return [path for path in self.folder.rglob("*") if path.is_file()]


@contextmanager
def open_engines(model: PreTrainedModel, device: torch.device) -> Iterator[Engines]:
    """Engines with empty stores; that of `GRAPHS` has the first one's."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-bench-"))
        locked = PageLocked() if device.type == "cuda" else HERE
        stores: dict[str, KVStore] = {
            STORES[0]: MemoryStore(_MOST_BYTES, residence=locked),
            STORES[1]: MemoryStore(_MOST_BYTES, residence=OnDevice(device)),
            ON_DISK: DiskStore(folder, max_bytes=_MOST_BYTES, durable=False),
            EIGHT_BITS: MemoryStore(_MOST_BYTES, residence=locked),
        }
        engines = {}
        for store in stores.values():
            stack.enter_context(store)
        for name, store in (stores | {GRAPHS: stores[STORES[0]]}).items():
            config = BlendConfig(
                capture=False,
                load_timeout_s=math.inf,
                layer_graphs=name == GRAPHS,
                codec="fp8" if name == EIGHT_BITS else "raw",
            )
            engine = BlendEngine(model, None, store=store, config=config, fingerprint="bench", name="bench")
            engines[name] = stack.enter_context(engine)
        yield Engines(model, engines, Path(folder))


def measure(bench: Bench) -> Found:
    return _measure(DRY if bench.dry_run else POINTS, bench)


@torch.no_grad()
def _measure(points: tuple[Point, ...], bench: Bench) -> Found:
    """Points of one shape."""
    shape = points[0].shape
    found: Found = {"figures": {}, "points": []}
    if not bench.has_time(f"ttft {shape}", _LEAST * min(point.seconds for point in points)):
        return found
    bench.progress(f"ttft: weights of {shape}")
    try:
        model = build_shape(shape, device=str(bench.device))
    except torch.OutOfMemoryError:
        bench.skipped[f"ttft {shape}"] = "its weights do not fit on this device"
        return found
    taken = expected = 0.0
    with open_engines(model, bench.device) as engines:
        for point in points:
            name, slower = f"ttft {point.name}", taken / expected if expected else 1.0
            if not bench.has_time(name, _LEAST * slower * point.seconds):
                continue
            begun = time.monotonic()
            arms = _measure_point(point, name, engines, found, bench)
            if any(arm.seconds for arm in arms):
                _add(point, arms, engines, found)
            for engine in engines.by_store.values():
                engine.store.prune(0)
            free(bench.device)
            taken, expected = taken + time.monotonic() - begun, expected + point.seconds
            bench.keep(found)
            if not arms and "error" in found:  # nothing runs any more on a device that has failed
                break
    return found


def _measure_point(point: Point, name: str, engines: Engines, found: Found, bench: Bench) -> list[TimedArm]:
    """Its arms, with the times of as many rounds as there was time for."""
    bench.progress(f"ttft: {point.name}")
    settings, draw = point.settings, random.Random(point.chunks)
    chunks = open_chunks(settings, engines.first, draw)
    arms = _arms(engines)
    for store, engine in engines.by_store.items():
        try:
            engine.warm(chunks)
        except Exception as error:
            _drop([arm for arm in arms if arm.store in (store, f"{store}, cold")], arms, name, error, found, bench)
    longest = 0.0
    for run in range(point.runs + 1):
        if run > 1 and bench.left_s < longest:
            bench.skipped[f"{name}, rounds"] = f"time was up after {run - 1} of {point.runs}"
            break
        begun = time.monotonic()
        prompt = draw_prompt(settings, chunks, engines.first.runtime.survey.vocab_size, draw)
        for arm in list(arms):
            try:
                with arm.around():
                    seconds, report = timed(arm, prompt, engines.model)
                if report is not None and report.loaded_tokens < point.tokens:
                    raise _NotLoadedError(f"its store had {report.loaded_tokens} of {point.tokens} tokens")
                if run:
                    arm.seconds.append(seconds)
                    arm.reports += [report] if report else []
            except Exception as error:
                _drop([arm], arms, name, error, found, bench)
        longest = max(longest if run > 1 else 0.0, time.monotonic() - begun)  # kernels are compiled in the first
    if point.key == "4k":
        found["decoded_per_s"] = _decoding(engines, prompt)
    return arms


class _NotLoadedError(Exception):
    """A store did not hold what it was given, so that its arm would measure something else."""


def _drop(
    dropped: list[TimedArm], arms: list[TimedArm], name: str, error: Exception, found: Found, bench: Bench
) -> None:
    """Goes on without these arms; their earlier rounds do not count, as something was wrong with them."""
    reason = str(error).splitlines()[0] if str(error) else ""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()[-TRACEBACK_LINES:]
    for arm in list(dropped):
        arms.remove(arm)
        bench.skipped[f"{name}, {arm.label}"] = f"{type(error).__name__.strip('_')}: {reason}"
        if not isinstance(error, torch.OutOfMemoryError | _NotLoadedError | _StillCachedError):
            found["error"] = "\n".join([*found.get("error", "").splitlines(), f"{name}, {arm.label}:", *lines])
    error.__traceback__ = None  # its frames hold tensors
    free(bench.device)


def _arms(engines: Engines) -> list[TimedArm]:
    """Full prefill by each attention, then blends, those from page-locked memory first."""
    model, first = engines.model, engines.first
    arms = [
        TimedArm(f"full, {how}", partial(full_recompute, first), around=partial(_attending, model, how))
        for how in ("sdpa", *(["flash_attention_2"] if find_spec("flash_attn") is not None else []))
    ]
    arms += [_blend(engines, STORES[0], ratio) for ratio in RATIOS]
    arms += [_blend(engines, GRAPHS, ratio) for ratio in RATIOS[:2]]
    arms += [_blend(engines, STORES[0], ratio, name) for name in (HEAD, HYBRID) for ratio in RATIOS[:2]]
    arms += [_blend(engines, EIGHT_BITS, ratio) for ratio in RATIOS[:2]]
    for store in STORES[1:]:
        for ratio in RATIOS[:2]:
            arms.append(_blend(engines, store, ratio))
            if store == ON_DISK:
                arms[-1].store = f"{store}, cold"
                arms[-1].around = partial(_cold, engines)
                arms.append(_blend(engines, store, ratio))
    return arms


def _blend(engines: Engines, store: str, ratio: float, name: str = "blend") -> TimedArm:
    engine = engines.by_store[store]
    return TimedArm(name, partial(fused, engine, selector=chosen(engine, name, ratio)), ratio=ratio, store=store)


def chosen(engine: BlendEngine, name: str, ratio: float) -> Selector:
    """The selector of an arm."""
    if name == HEAD:
        return Corrected(Head(ratio, recency=1.0), 0.5)
    return Hybrid((1,), (ratio,)) if name == HYBRID else engine.config.make_selector(ratio)


def _decoding(engines: Engines, prompt: Prompt) -> dict[str, float]:
    """Tokens a second behind the first one, by the kinds of layers."""
    found = {}
    for name in (STORES[0], GRAPHS):
        params = SamplingParams(max_new_tokens=DECODED, temperature=0.0, ignore_eos=True)
        for _ in range(2):  # the first captures graphs
            report = engines.by_store[name].generate(prompt, params).report
        found[name] = (DECODED - 1) / (report.total_s - report.ttft_s)
    return found


@contextmanager
def _attending(model: PreTrainedModel, how: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(how)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _StillCachedError(Exception):
    """The file system keeps pages that were dropped, so that nothing is cold."""


@contextmanager
def _cold(engines: Engines) -> Iterator[None]:
    files = engines.files()
    for file in files:
        drop_pages(file)
    if any(is_cached(file) for file in files[:8]):
        raise _StillCachedError("the file system keeps its pages in memory: put TMPDIR on a disk")
    yield


def _add(point: Point, arms: list[TimedArm], engines: Engines, found: Found) -> None:
    measured = [arm for arm in arms if arm.seconds]
    full = [arm for arm in measured if arm.name.startswith("full")]
    if full:
        min(full, key=lambda arm: statistics.median(arm.seconds)).name = "full"
    row_layers = point.settings.prompt_tokens * engines.first.runtime.survey.num_layers  # of a full prefill
    summaries = []
    for arm in measured:  # how much faster a blend would be if time were proportional to rows times layers
        limit = row_layers / arm.reports[-1].row_layers if arm.reports else None
        summaries.append(summary(arm, list(measured)) | {"row_layer_limit": limit, "runs": len(arm.seconds)})
    is_checked = all(is_cached(file) is not None for file in engines.files()[:1])
    facts = {"shape": point.shape, "tokens": point.tokens, "cold_is_checked": is_checked}
    found["points"].append(facts | {"arms": summaries})
    # Figures are those from page-locked memory.
    timed_by_full = [each for each in summaries if each["speedup_vs_full"] is not None]
    counted = [each for each in timed_by_full if (each["arm"], each["store"]) == ("blend", STORES[0])]
    blends, figures = {each["ratio"]: each for each in counted}, found["figures"]
    if 0.15 in blends:
        figures[f"ttft_speedup_{point.key}"] = float(blends[0.15]["speedup_vs_full"])
        if point.key == "16k":
            figures["of_limit_16k"] = figures["ttft_speedup_16k"] / blends[0.15]["row_layer_limit"]
    if point.key == "16k" and 0.05 in blends:
        figures["ttft_speedup_16k_r05"] = float(blends[0.05]["speedup_vs_full"])
