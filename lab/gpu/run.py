"""All parts of `lab cuda` within a time; what is found is kept as soon as it is found.

A part that a machine cannot run is skipped, and the result says why; one that fails leaves its error and what it had
found. Without a GPU only a dry run is possible: all parts at tiny size on the CPU. Its numbers mean nothing.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cacheblend.bench.stamp import stamp
from cacheblend.core.errors import InvalidInputError
from lab.gpu.context import Progress
from lab.gpu.parts import HERE, PARTS
from lab.gpu.process import GRACE_S, Message, Task, measure_apart, measure_here

Result = dict[str, Any]
_MARGIN_S = 30.0  # of the minutes: to end what hangs, to write and draw


def run(
    asked: tuple[str, ...] = (),
    *,
    dry_run: bool = False,
    minutes: float = 9.0,
    progress: Progress | None = None,
    save: Callable[[Result], None] | None = None,
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

    Raises:
        InvalidInputError: no such part, or no GPU and no dry run.
    """
    for name in asked:
        if name not in PARTS:
            raise InvalidInputError(f"there is no part {name!r}; choose from {', '.join(PARTS)}")
    if not torch.cuda.is_available() and not dry_run:
        raise InvalidInputError("lab cuda needs a GPU, and there is none here; --dry-run tries it at tiny size")
    until = time.monotonic() + 60 * minutes - (0.0 if dry_run else _MARGIN_S)
    running = _Run(until, dry_run, progress or (lambda what: None), save or (lambda result: None))
    running.measure([name for name in PARTS if name in (asked or PARTS)], apart=not dry_run if apart is None else apart)
    return running.result


class _Run:
    """One run, and its result so far."""

    def __init__(self, until: float, dry_run: bool, progress: Progress, save: Callable[[Result], None]) -> None:
        self._begun, self._until, self._dry_run = time.monotonic(), until, dry_run
        self._progress, self._save = progress, save
        self._done: list[str] = []
        self.result: Result = {"device": device_name(), "dry_run": dry_run, "figures": {}, "parts": {}, "skipped": {}}
        self.result |= stamp()

    def measure(self, names: Sequence[str], *, apart: bool) -> None:
        """Measures these parts."""
        lacks = {name: PARTS[name].missing() for name in names}
        self.result["skipped"] |= {name: why for name, why in lacks.items() if why}
        waiting = [name for name in names if not lacks[name]]
        while waiting:
            self._done = []
            process = PARTS[waiting[0]].process
            others = [at for at, name in enumerate(waiting) if PARTS[name].process != process]
            group = waiting[: others[0] if others else None] if apart and process != HERE else waiting[:1]
            tasks = [self._task(name, waiting[waiting.index(name) + 1 :]) for name in group]
            if apart and process != HERE:
                self._add_error(group, measure_apart(tasks, self._dry_run, self._hear))
            else:
                measure_here(tasks, self._dry_run, self._hear, lambda name: PARTS[name].measure)
            waiting = waiting[max(1, len(self._done)) :]
        self._update()

    def _task(self, name: str, later: Sequence[str]) -> Task:
        """Of the time that is left, later parts keep what they need at least."""
        part = PARTS[name]
        if self._dry_run:
            return Task(name, 1.0, part.most, self._until)
        kept = sum(PARTS[each].least + GRACE_S for each in later if PARTS[each].is_reserved)
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
            self._done.append(name)
        self._update()

    def _add_error(self, group: Sequence[str], error: str) -> None:
        """Of a process that did not end as it should: the part that it was at keeps what it had told."""
        left = group[len(self._done) :]
        if error and left:
            found = self.result["parts"].setdefault(left[0], {})
            found["error"] = error
            self._done.append(left[0])

    def _update(self) -> None:
        parts = self.result["parts"].values()
        self.result["figures"] = {key: value for part in parts for key, value in part.get("figures", {}).items()}
        self.result["took_s"] = time.monotonic() - self._begun
        self._save(self.result)


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
