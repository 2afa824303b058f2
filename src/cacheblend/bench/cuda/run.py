"""All parts of `bench cuda` within a time, and what falls short of its bar.

tests      tests/gpu of the checkout: kernels beside plain PyTorch, the invariants
kernels    each kernel by what the device can do
ttft       time to first token by shape, length, share and place of the store
timeline   one pass: what was read, copied, placed and computed when, as a picture
vllm       the plug-in in vLLM, where vLLM is installed

A part that a machine cannot run is skipped, and the result says why. Without a GPU only a dry run is possible: all
parts at tiny size on the CPU. Its numbers mean nothing.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cacheblend.bench.cuda import kernels, others, timeline, ttft
from cacheblend.bench.cuda.context import Bench, Progress
from cacheblend.bench.stamp import stamp
from cacheblend.core.errors import InvalidInputError

BARS: dict[str, tuple[str, float]] = {
    "ttft_speedup_4k": ("full prefill / blend, llama-3.1-8b, r = 0.15, 4,096 tokens", 4.0),
    "ttft_speedup_16k": ("the same, 16,384 tokens", 5.0),
    "ttft_speedup_32k": ("the same, 32,768 tokens", 5.0),
    "of_limit_16k": ("the same at 16,384 tokens / what its rows and layers allow", 0.8),
    "ttft_speedup_16k_r05": ("full prefill / blend, r = 0.05, 16,384 tokens", 8.0),
    "attention_of_peak": ("attention of 2,458 rows of 16,384 / flash attention, equal FLOPs", 0.6),
    "place_of_bandwidth": ("bytes placed / bytes copied a second", 0.6),
    "vllm_ttft_speedup_16k": ("vLLM's prefix caching / the plug-in, 16,384 tokens", 4.0),
}
"""What each figure is, and the least that it should be."""


PARTS: Mapping[str, Callable[[Bench], dict[str, Any]]] = {
    "tests": others.tests,
    "kernels": kernels.measure,
    "ttft": ttft.measure,
    "timeline": timeline.measure,
    "vllm": others.vllm,
}
"""The parts in their order; each returns `figures` and its raw numbers."""


def run(
    asked: tuple[str, ...] = (), *, dry_run: bool = False, minutes: float = 9.0, progress: Progress | None = None
) -> dict[str, Any]:
    """Runs the parts asked for, or all.

    Args:
        asked: names of parts; none: all.
        dry_run: at tiny size, on the CPU where there is no GPU.
        minutes: after which no part begins anything more.
        progress: called with what is done next.

    Raises:
        InvalidInputError: no such part, or no GPU and no dry run.
    """
    for name in asked:
        if name not in PARTS:
            raise InvalidInputError(f"there is no part {name!r}; choose from {', '.join(PARTS)}")
    if not torch.cuda.is_available() and not dry_run:
        raise InvalidInputError("bench cuda needs a GPU, and there is none here; --dry-run tries it at tiny size")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench(device, dry_run, time.monotonic() + 60 * minutes, progress or (lambda what: None))
    started = time.monotonic()
    result: dict[str, Any] = {"device": device_name(), "dry_run": dry_run, "figures": {}, "parts": {}}
    for name in asked or PARTS:
        if not bench.has_time(name, 1.0):
            continue
        bench.progress(name)
        begun = time.monotonic()
        try:
            found = PARTS[name](bench)
        except torch.OutOfMemoryError as error:
            bench.skipped[name] = f"out of memory: {str(error).splitlines()[0]}"
            continue
        result["figures"] |= found.pop("figures", {})
        result["parts"][name] = found | {"took_s": time.monotonic() - begun}
    return result | {"skipped": bench.skipped, "took_s": time.monotonic() - started, **stamp()}


def device_name() -> str:
    """The GPU's name, ``cpu`` where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def file_of(folder: Path) -> Path:
    """Where a run's result belongs: ``cuda-nvidia-h200.json``."""
    return folder / f"cuda-{device_name().lower().replace(' ', '-').replace('/', '-')}.json"


def merged(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """The result with the parts of an earlier run of the same commit and device that it does not have itself."""
    try:
        old = json.loads(path.read_text())
    except (OSError, ValueError):
        return result
    same = all(old.get(key) == result[key] for key in ("commit", "device", "dry_run"))
    if not same or str(result["commit"]).endswith("+"):
        return result
    skipped = {what: why for what, why in old["skipped"].items() if what.split()[0] not in result["parts"]}
    return result | {
        "figures": old["figures"] | result["figures"],
        "parts": old["parts"] | result["parts"],
        "skipped": skipped | result["skipped"],
    }


def table(result: dict[str, Any]) -> Table:
    """Every figure beside its bar; what was not measured says why."""
    out = Table(
        title=f"{result['device']}{', a dry run: the numbers mean nothing' if result['dry_run'] else ''}",
        caption="\n".join(f"{what} was skipped: {why}" for what, why in result["skipped"].items()),
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    out.add_column("", no_wrap=True)
    for column in ("measured", "at least"):
        out.add_column(column, justify="right", no_wrap=True)
    out.add_column("")
    for key, (_, bar) in BARS.items():
        value = result["figures"].get(key)
        is_short = value is not None and value < bar and not result["dry_run"]
        measured = "not measured" if value is None else f"{value:.2f}"
        out.add_row(key, measured, f"{bar:g}", "falls short" if is_short else "")
    return out
