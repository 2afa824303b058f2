"""Where the time of one blended request goes in vLLM, from its arrival to its first token: every part by name.

The engine runs in a process of its own, without HTTP and without vLLM's second process, so that all of it is in one
thread: what is no part of another belongs to `REST`. A part's time is its own, without the parts that it calls.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from cacheblend.cli.bench import RoundOptions
from cacheblend.core.errors import InvalidInputError
from lab.bench import Advance, picture, silent
from lab.servers.clients import Prompts
from lab.servers.vllm_server import Pair, dtype_of, folder_of
from lab.settings import PromptShape

MODULE = "lab.faults.timeline"
REST = "vLLM's other work"
PRODUCTS, ATTENTION = "products of the rows", "attention of the rows"
_MINE, _VLLM = "cacheblend.engines.vllm.", "vllm.v1."
PLACES = {
    "arrival": (_VLLM + "engine.llm_engine:LLMEngine.add_request",),
    "scheduler": (_VLLM + "core.sched.scheduler:Scheduler.schedule",),
    "look-up": (
        _MINE + "scheduler.scheduler:Scheduling.on_new",
        _MINE + "scheduler.scheduler:Scheduling.claim",
        _MINE + "scheduler.scheduler:Scheduling.allocated",
    ),
    "waiting for the look-up": (_MINE + "scheduler.tracked_requests:LookUp.wait",),
    "opening": (_MINE + "worker.worker:Worker._start",),
    "waiting for reads": (
        _MINE + "worker.tasks:Readiness.of",
        "cacheblend.core.load.loader:LayerLoader.layer",
    ),
    ATTENTION: (_MINE + "worker.paged_kv:PagedKV.attend", _MINE + "worker.paged_kv:PagedAttention.__call__"),
    "writing to pages": (_MINE + "worker.paged_kv:PagedKV.write", _MINE + "worker.paged_cache:PagedLayer.write"),
    PRODUCTS: (_MINE + "calls:VllmLayerCall.__call__",),
    "selection": ("cacheblend.core.fuse.rows:ActiveRows.keep", "cacheblend.core.fuse.rows:ActiveRows.candidates"),
    "beside the layers": (_MINE + "worker.worker:Worker._compute",),
    "delivery": (
        _MINE + "worker.worker:Worker._finish",
        "cacheblend.core.fuse.prefill:BlendedPrefill._hand_out",
    ),
    "the worker's step": (_MINE + "worker.worker:Worker.step",),
    "last token, forward": (_VLLM + "worker.gpu_model_runner:GPUModelRunner._model_forward",),
    "vLLM's runner": (
        _VLLM + "worker.gpu_model_runner:GPUModelRunner.execute_model",
        _VLLM + "worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    ),
    "results": (
        _VLLM + "core.sched.scheduler:Scheduler.update_from_output",
        _VLLM + "engine.output_processor:OutputProcessor.process_outputs",
    ),
}
"""Functions whose own time is a part's, by the part."""


class Timeline:
    """Seconds by part in the thread that made it, and calls, since the last `begin`."""

    def __init__(self) -> None:
        self._thread, self._open = threading.get_ident(), [REST]
        self._since, self.calls = 0.0, Counter[str]()
        self.seconds: dict[str, float] = defaultdict(float)

    def begin(self) -> None:
        self._since = time.perf_counter()
        self.seconds, self.calls = defaultdict(float), Counter[str]()

    def end(self) -> dict[str, float]:
        """What each part has taken; all of them together are the time since `begin`."""
        self._turn()
        return dict(self.seconds)

    def watch(self, part: str, place: str) -> None:
        """Has the own time of the function there counted as the part's, for as long as this process lives."""
        module, _, path = place.partition(":")
        owner, name = path.split(".")
        owned = getattr(import_module(module), owner)
        setattr(owned, name, self._timed(part, getattr(owned, name)))

    def _timed(self, part: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:
                return real(*args, **options)
            self._turn()
            self._open.append(part)
            self.calls[part] += 1
            try:
                return real(*args, **options)
            finally:
                self._turn()
                self._open.pop()

        return call

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


def run(pair: Pair, shape: PromptShape, rounds: RoundOptions, advance: Advance = silent) -> dict[str, Any]:
    """`shares` of the time to the first token, by part, medians; `figures`: the layers' and the largest three beside
    them. Each round begins with an empty prefix cache."""
    from lab.faults.engine import environment

    with folder_of(pair) as folder, tempfile.TemporaryDirectory(prefix="cacheblend-timeline-") as name:
        out = Path(name) / "found.json"
        job: dict[str, Any] = {
            "model": str(folder),
            "store": f"{name}/store",
            "out": str(out),
            "dtype": dtype_of(pair.dtype),
        }
        job |= {"shape": vars(shape), "ratio": pair.ratio, "batched": pair.batched_tokens}
        job |= {"rounds": rounds.runs, "seed": rounds.seed}
        environ = environment() | {"TORCH_COMPILE_DISABLE": "1"}
        ended = subprocess.run([sys.executable, "-m", MODULE, json.dumps(job)], env=environ, check=False)
        advance(1, 1)
        if ended.returncode or not out.is_file():
            raise InvalidInputError(f"vLLM ended with {ended.returncode} before it was measured; see above")
        found: dict[str, Any] = json.loads(out.read_text())
    return {**found, **summary(found["rounds"]), "prompt": vars(shape), **pair.facts()}


def summary(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """See `run`; `rounds`: the seconds of each part."""
    parts = {part for each in rounds for part in each}
    shares = {part: statistics.median(each.get(part, 0.0) / sum(each.values()) for each in rounds) for part in parts}
    shares = dict(sorted(shares.items(), key=lambda each: -each[1]))
    beside = {part: share for part, share in shares.items() if part not in (PRODUCTS, ATTENTION)}
    figures = {"row-layers": shares[PRODUCTS] + shares[ATTENTION], **dict(islice(beside.items(), 3))}
    return {"figures": figures, "shares": shares, "ttft_s": [sum(each.values()) for each in rounds]}


def table(result: dict[str, Any]) -> str:
    """A line for each part."""
    lines = [f"{share:7.1%}  {part} ({result['calls'].get(part, 0)} calls)" for part, share in result["shares"].items()]
    return "\n".join([f"{statistics.median(result['ttft_s']):.2f} s to the first token", *lines])


def plot(result: dict[str, Any], path: Path) -> None:
    """A bar for each part, the longest first; the axis is logarithmic, or one could see the rows' alone."""
    whole = statistics.median(result["ttft_s"])
    with picture(path, height=5.0) as (axes,):
        parts = list(reversed(result["shares"].items()))
        bars = axes.barh([part for part, _ in parts], [1e3 * whole * share for _, share in parts])
        axes.bar_label(bars, [f" {share:.2%}" for _, share in parts], fontsize="small")
        axes.set_xscale("log")
        axes.set(xlabel="ms of one request", title=f"From arrival to the first token: {whole:.1f} s")
        axes.margins(x=0.15)


def child(job: dict[str, Any]) -> None:
    """Asks in a process that has an engine; ends without waiting for vLLM's threads."""
    from lab.faults.engine import Engine, Request

    shape = PromptShape(**job["shape"])
    extra = {"store": f"file://{job['store']}?ram_bytes=4GiB", "recompute_ratio": job["ratio"], "check_layers": [1]}
    options = {"dtype": job["dtype"], "max_num_batched_tokens": job["batched"], "max_model_len": shape.tokens + 64}
    engine = Engine(Path(job["model"]), extra | {"selector": "hkvd"}, kv_cache_memory_bytes=1 << 30, **options)
    timeline, prompts = Timeline(), Prompts(shape, job["seed"])
    for part, places in PLACES.items():
        for place in places:
            timeline.watch(part, place)
    ids, spans = prompts.draw()
    engine.fill(ids, [(start, stop) for start, stop in spans])
    rounds, calls = [], Counter[str]()
    for number in range(job["rounds"] + 1):
        engine.forget()
        ids, spans = prompts.draw()
        timeline.begin()
        with engine.patient():
            engine.ask([Request(f"asked {number}", ids, [(start, stop) for start, stop in spans], 1)])
        if number:  # the first one warms up
            rounds.append(timeline.end())
            calls = timeline.calls
        engine.settle()
    counters = engine.counters()
    Path(job["out"]).write_text(json.dumps({"rounds": rounds, "calls": calls, "counters": counters}))
    os._exit(0)


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
