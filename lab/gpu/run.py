"""All parts of `lab cuda` within a time; what is found is kept as soon as it is found.

tests      tests/gpu of the checkout: kernels beside plain PyTorch, the invariants
kernels    each kernel by what the device can do, attention beside other ways to the same
ttft       time to first token by length, share and place of the store, with and without graphs, llama-3.1-8b
tiles      tile shapes of the attention kernel, with windows, pages and several head sizes
profile    where a pass's time goes: kernels by name, launches, the device's idle share
timeline   one pass: what was read, copied, placed and computed when, as a picture
vllm       the plug-in in vLLM, where vLLM is installed

A part that a machine cannot run is skipped, and the result says why; one that fails leaves its error and what it had
found. Without a GPU only a dry run is possible: all parts at tiny size on the CPU. Its numbers mean nothing.

Each part has a process of its own (`python -m lab.gpu.run`), so that none can take what the others found with it: a
kernel that reads memory that is not its own leaves a process in which nothing runs on the device any more, and a part
that hangs never ends. What a part finds is told at once, in JSON lines through a pipe:

    {"progress": what}                                                 when the part begins with "begun": true
    {"part": name, "found": {...}, "skipped": {...}, "is_done": false}      found: null if there is nothing
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.core.failures import failed_since, failures, in_words
from cacheblend.engines.provenance import stamp
from lab.bench import silent
from lab.checkout import environment
from lab.gpu import kernels, others, profile, tiles, timeline, ttft
from lab.gpu.context import TRACEBACK_LINES, Bench, Found, Progress, free
from lab.gpu.others import end_group

Result = dict[str, Any]
Message = dict[str, Any]
Tell = Callable[[Message], None]
GRACE_S = 10.0
"""How much longer than it should a process may take."""
MARGIN_S = 30.0
"""Of the minutes: to end what hangs, to write and draw."""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        measure: returns what it found.
        least: seconds; it is not begun if fewer are left.
        most: seconds that it may take.
        is_apart: whether it has a process of its own; parts that start other programs need none.
        missing: what it lacks on this machine; "": nothing.
    """

    measure: Callable[[Bench], Found]
    least: float
    most: float = math.inf
    is_apart: bool = True
    missing: Callable[[], str] = lambda: ""


PARTS: Mapping[str, Part] = {
    "tests": Part(others.tests, 20, 180, is_apart=False, missing=others.tests_miss),
    "kernels": Part(kernels.measure, 20, 100),
    "ttft": Part(ttft.measure, 30),
    "timeline": Part(timeline.measure, 20, 60),
    "profile": Part(profile.measure, 30, 80),
    "tiles": Part(tiles.measure, 20, 90, missing=tiles.misses),
    "vllm": Part(others.vllm, 240, 360, is_apart=False, missing=others.vllm_misses),
}
"""In their order."""


@dataclass(frozen=True)
class Task:
    """A part to be measured, see `Part`, until a time (monotonic: one clock for all processes of a machine)."""

    name: str
    least: float
    most: float
    until: float


def run(
    asked: tuple[str, ...] = (),
    *,
    dry_run: bool = False,
    minutes: float = 9.0,
    progress: Progress = silent,
    save: Callable[[Result], None] = silent,
    apart: bool | None = None,
) -> Result:
    """Runs the parts asked for, or all.

    Args:
        asked: names of parts; none: all.
        dry_run: at tiny size, on the CPU where there is no GPU.
        minutes: after which everything has ended.
        progress: called with what is done next.
        save: called with the result so far, whenever something was found.
        apart: whether parts have processes of their own; None: unless it is a dry run.
    """
    for name in asked:
        if name not in PARTS:
            raise InvalidInputError(f"there is no part {name!r}; choose from {', '.join(PARTS)}")
    if not torch.cuda.is_available() and not dry_run:
        raise InvalidInputError("lab cuda needs a GPU, and there is none here; --dry-run tries it at tiny size")
    until = time.monotonic() + 60 * minutes - (0.0 if dry_run else MARGIN_S)
    running = Run(until, dry_run, progress, save)
    running.measure([name for name in PARTS if name in (asked or PARTS)], apart=not dry_run if apart is None else apart)
    return running.result


class Run:
    def __init__(self, until: float, dry_run: bool, progress: Progress, save: Callable[[Result], None]) -> None:
        self._begun, self._until, self._dry_run = time.monotonic(), until, dry_run
        self._progress, self._save = progress, save
        self._done: set[str] = set()
        self.result: Result = {"device": device_name(), "dry_run": dry_run, "figures": {}, "parts": {}, "skipped": {}}
        self.result |= stamp()

    def measure(self, names: Sequence[str], *, apart: bool) -> None:
        lacks = {name: PARTS[name].missing() for name in names}
        self.result["skipped"] |= {name: why for name, why in lacks.items() if why}
        waiting = [name for name in names if not lacks[name]]
        for at, name in enumerate(waiting):
            task = self.task(name, waiting[at + 1 :])
            if not apart or not PARTS[name].is_apart:
                measure_here(task, self._dry_run, self._hear)
            elif (error := measure_apart(task, self._dry_run, self._hear)) and name not in self._done:
                self.result["parts"].setdefault(name, {})["error"] = error  # beside what it had told
        self._update()

    def task(self, name: str, later: Sequence[str]) -> Task:
        """Of the time that is left, later parts keep what they need at least."""
        part = PARTS[name]
        if self._dry_run:
            return Task(name, 1.0, part.most, self._until)
        kept = sum(PARTS[each].least + GRACE_S for each in later)
        return Task(name, part.least, part.most, self._until - kept)

    def _hear(self, message: Message) -> None:
        if "progress" in message:
            self._progress(message["progress"])
            return
        name = message["part"]
        if message["found"] is not None:
            self.result["parts"][name] = message["found"]
        self.result["skipped"] |= message["skipped"]
        if message["is_done"]:
            self._done.add(name)
        self._update()

    def _update(self) -> None:
        parts = self.result["parts"].values()
        self.result["figures"] = {key: value for part in parts for key, value in part.get("figures", {}).items()}
        self.result["took_s"] = time.monotonic() - self._begun
        self._save(self.result)


# ---- processes ----------------------------------------------------------------------------------------------


def measure_here(task: Task, dry_run: bool, tell: Tell) -> None:
    """Measures a part in this process."""
    begun, found = time.monotonic(), Found()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def keep(new: Found, *, is_done: bool = False) -> None:
        found.update(new)
        whole = found | {"took_s": time.monotonic() - begun} if found else None
        tell({"part": task.name, "found": whole, "skipped": dict(bench.skipped), "is_done": is_done})

    until = min(task.until, begun + task.most)
    bench = Bench(device, dry_run, until, lambda what: tell({"progress": what}), keep)
    tell({"progress": task.name, "begun": True})
    if not bench.has_time(task.name, task.least):
        keep({}, is_done=True)
        return
    before = failures()
    try:
        new = PARTS[task.name].measure(bench)
        if failed := failed_since(before):
            raise CacheBlendError(f"{in_words(failed)} failed while it was measured, and was computed in full")
        keep(new, is_done=True)
    except torch.OutOfMemoryError as error:
        bench.skipped[task.name] = f"out of memory: {str(error).splitlines()[0]}"
        keep({}, is_done=True)
    except Exception:  # whatever it is, the other parts are measured
        lines = traceback.format_exc().strip().splitlines()
        keep({"error": "\n".join(lines[1:][-TRACEBACK_LINES:])}, is_done=True)
    free(device)


def measure_apart(task: Task, dry_run: bool, tell: Tell) -> str:
    """Measures a part in a new process, which is ended if it takes too long.

    Returns:
        What it printed last, if it ended with an error or had to be ended; else "".
    """
    reading, writing = os.pipe()
    asked = json.dumps({"task": asdict(task), "dry_run": dry_run, "pipe": writing})
    with tempfile.TemporaryFile("w+") as words, os.fdopen(reading, "rb") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.gpu.run", asked],
            env=environment(),
            pass_fds=(writing,),
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(writing)
        try:
            is_late = _listen(lines.fileno(), task, tell)
            code = 124 if is_late else process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            end_group(process)
        words.seek(0)
        tail = words.read()[-2000:]
    if code == 0:
        return ""
    return f"its process {'took too long' if code == 124 else f'ended with {code}'}\n{tail}".strip()


def _listen(pipe: int, task: Task, tell: Tell) -> bool:
    """Passes messages on until the pipe is closed; whether the part took too long."""
    rest, until = b"", task.until
    while (left := until + GRACE_S - time.monotonic()) > 0:
        if not wait([pipe], left):  # not `select`: it takes no descriptor above 1,023
            continue
        new = os.read(pipe, 1 << 20)
        if not new:
            return False
        *whole, rest = (rest + new).split(b"\n")
        for message in map(json.loads, whole):
            if message.get("begun"):
                until = min(task.until, time.monotonic() + task.most)
            tell(message)
    return True


def main() -> None:
    """The program of `measure_apart`: measures the part that its argument names, and tells through its pipe."""
    asked = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with os.fdopen(asked["pipe"], "w") as pipe:
        tell = partial(print, file=pipe, flush=True)
        measure_here(Task(**asked["task"]), asked["dry_run"], lambda message: tell(json.dumps(message)))


# ---- results ------------------------------------------------------------------------------------------------


def device_name() -> str:
    """The GPU's name, ``cpu`` where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def file_of(folder: Path) -> Path:
    """Where a run's result belongs: ``cuda-nvidia-h200.json``."""
    return folder / f"cuda-{device_name().lower().replace(' ', '-').replace('/', '-')}.json"


def read(path: Path) -> Result | None:
    """The result of an earlier run, if there is one that can be read."""
    try:
        found: Result = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def merged(old: Result | None, result: Result) -> Result:
    """The result with the parts of an earlier run of the same commit and device that it does not have itself."""
    keys = ("commit", "device", "dry_run")
    if old is None or str(result["commit"]).endswith("+") or any(old.get(key) != result[key] for key in keys):
        return result
    skipped = {what: why for what, why in old["skipped"].items() if what.split()[0].rstrip(",:") not in result["parts"]}
    kept = {name: found for name, found in old["parts"].items() if name not in result["parts"]}
    figures = {key: value for part in kept.values() for key, value in part.get("figures", {}).items()}
    return result | {
        "figures": figures | result["figures"],
        "parts": kept | result["parts"],
        "skipped": skipped | result["skipped"],
    }


if __name__ == "__main__":
    main()
