"""Parts of `lab cuda` in a process of their own, so that none can take what the others found with it.

A kernel that reads memory that is not its own leaves a process in which nothing runs on the device any more; a part
that hangs never ends. What a part finds is told at once, in JSON lines through a pipe:

    {"progress": what}                                                 of a part that begins with "begun": name
    {"part": name, "found": {...}, "skipped": {...}, "is_done": false}      found: null if there is nothing
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cacheblend.core.errors import CacheBlendError
from cacheblend.core.failures import failed_since, failures, in_words
from lab.checkout import environment
from lab.gpu.context import Bench, Found, Weights, free
from lab.gpu.others import end_group

Message = dict[str, Any]
Tell = Callable[[Message], None]
TRACEBACK_LINES = 12
GRACE_S = 10.0
"""How much longer than it should a process may take."""


@dataclass(frozen=True)
class Task:
    """A part to be measured.

    Attributes:
        name: of the part.
        least: seconds; it is not begun if fewer are left.
        most: seconds that it may take.
        until: time (monotonic, which is one clock for all processes of a machine) by which it should have ended.
    """

    name: str
    least: float
    most: float
    until: float


def measure_here(
    tasks: Sequence[Task], dry_run: bool, tell: Tell, part: Callable[[str], Callable[[Bench], Found]]
) -> None:
    """Measures parts in this process; the one in which something goes wrong is the last.

    Args:
        tasks: the parts.
        dry_run: at tiny size.
        tell: called with messages, see above.
        part: what measures the part of a name.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    weights = Weights(device)
    for task in tasks:
        found = _measure(task, Bench(device, dry_run, 0.0, lambda what: tell({"progress": what}), weights), tell, part)
        if "error" in found:  # perhaps of a device on which nothing runs any more in this process
            return
        free(device)


def _measure(task: Task, bench: Bench, tell: Tell, part: Callable[[str], Callable[[Bench], Found]]) -> Found:
    begun, found = time.monotonic(), Found()
    bench.until = min(task.until, begun + task.most)

    def keep(new: Found, *, is_done: bool = False) -> None:
        found.update(new)
        whole = found | {"took_s": time.monotonic() - begun} if found else None
        tell({"part": task.name, "found": whole, "skipped": dict(bench.skipped), "is_done": is_done})

    bench.keep = keep
    tell({"progress": task.name, "begun": task.name})
    if not bench.has_time(task.name, task.least):
        keep({}, is_done=True)
        return found
    before = failures()
    try:
        new = part(task.name)(bench)
        if failed := failed_since(before):
            raise CacheBlendError(f"{in_words(failed)} failed while it was measured, and was computed in full")
        keep(new, is_done=True)
    except torch.OutOfMemoryError as error:
        bench.skipped[task.name] = f"out of memory: {str(error).splitlines()[0]}"
        keep({}, is_done=True)
    except Exception:  # whatever it is, the other parts are measured
        lines = traceback.format_exc().strip().splitlines()
        keep({"error": "\n".join(lines[1:][-TRACEBACK_LINES:])}, is_done=True)
    return found


def measure_apart(tasks: Sequence[Task], dry_run: bool, tell: Tell) -> str:
    """Measures parts in a new process, which is ended if it takes too long.

    Returns:
        What it printed last, if it ended with an error or had to be ended; else "".
    """
    reading, writing = os.pipe()
    asked = json.dumps({"tasks": [asdict(task) for task in tasks], "dry_run": dry_run, "pipe": writing})
    command = [sys.executable, "-m", "lab.gpu.child", asked]
    with tempfile.TemporaryFile("w+") as words, os.fdopen(reading, "rb") as lines:
        process = subprocess.Popen(
            command,
            env=environment(),
            pass_fds=(writing,),
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(writing)
        try:
            is_late = _listen(lines.fileno(), {task.name: task for task in tasks}, tell)
            code = 124 if is_late else process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            end_group(process)
        words.seek(0)
        tail = words.read()[-2000:]
    return (
        "" if code == 0 else f"its process {'took too long' if code == 124 else f'ended with {code}'}\n{tail}".strip()
    )


def _listen(pipe: int, tasks: Mapping[str, Task], tell: Tell) -> bool:
    """Passes messages on until the pipe is closed; whether a part took too long."""
    rest, until = b"", max(task.until for task in tasks.values())
    while (left := until + GRACE_S - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            continue
        new = os.read(pipe, 1 << 20)
        if not new:
            return False
        *whole, rest = (rest + new).split(b"\n")
        for message in map(json.loads, whole):
            if task := tasks.get(message.get("begun")):
                until = min(task.until, time.monotonic() + task.most)
            tell(message)
    return True
