"""Runs the child programs, and watches them: a child that writes nothing for `PATIENCE_S` hangs, one that ends before
it is done has lost its engine. In both cases the next child goes on behind that trial.

A child is ``python -m lab.faults.children JOB.json``.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.failures import failed_since, failures
from lab.faults.engine import environment

CHILD = "lab.faults.children"

START_S, PATIENCE_S = 240.0, 120.0
"""Seconds in which a child has to begin its first trial, and to end each."""

MOST_RESTARTS = 5
"""Of one engine: where faults end every engine, that is known after a few."""


@dataclass
class Watched:
    """What came out of the children of one engine: results of trials, children that were lost, their last words.

    `is_complete`: the last child came to its end.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    ended: int = 0
    hung: int = 0
    words: str = ""
    lost: list[dict[str, Any]] = field(default_factory=list)
    is_complete: bool = False

    def total(self, key: str) -> int:
        return sum(int(line.get(key, 0)) for line in self.lines)

    @property
    def done(self) -> int:
        """Trials; of a campaign that counts faults, those that met one."""
        return sum(int(line.get("met", 1)) for line in self.lines)

    @property
    def failed(self) -> Counter[str]:
        return sum((Counter(line.get("failed", {})) for line in self.lines), Counter[str]())

    def described(self, *, injects: bool = True) -> dict[str, Any]:
        """What is written beside the counts: the first trials in which something went wrong, among others.

        `injects`: a blend that fails is not remarkable.
        """
        keys = ("wrong", "hung", "polluted", "left", *(() if injects else ("failed",)))
        remarkable = [line for line in self.lines if any(line.get(key) for key in keys)] + self.lost
        return {
            "trials": len(self.lines),
            "is_complete": self.is_complete,
            "remarkable": remarkable[:20],
            "words": self.words,
        }


def watch(
    folder: Path,
    job: dict[str, Any],
    name: str,
    *,
    restarts: int = MOST_RESTARTS,
    on_line: Callable[[int], None] | None = None,
) -> Watched:
    """Runs a job, and goes on behind a trial that ended the engine or hung."""
    found = Watched()
    label = f"{job['campaign']} {name}".replace(" ", "-")  # campaigns have engines of the same name
    for number in range(restarts + 1):
        begun: dict[str, Any] | None = None
        first = 1 + max((int(line["begin"]) for line in found.lost), default=-1)
        met = found.done if job["campaign"] == "faults" else 0
        one = {**job, "first": first, "count": job.get("count", 0) - met, "folder": f"{job['folder']}-{number}"}
        with _Child(folder / f"{label}-{number}", one) as child:
            for line in child.lines():
                if line.get("done"):
                    found.is_complete = True
                elif "begin" in line:
                    begun = line
                else:
                    begun = None
                    found.lines.append(line)
                    if on_line is not None:
                        on_line(found.done)
        if found.is_complete:
            return found
        found.words = child.words()
        if not restarts:
            return found
        if begun is None:
            if not found.lines and not found.lost:
                raise InvalidInputError(f"the engine {name!r} did not start:\n{found.words}")
            begun = {"begin": first}
        found.lost.append({**begun, "lost": "hung" if child.is_hung else "ended", "words": found.words[-600:]})
        found.hung += child.is_hung
        found.ended += not child.is_hung
    return found


class _Child:
    """A child process and the lines that it writes; inside `with` it runs. Beside `path` are job, lines and output."""

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self._out, self._job, self._said = (path.with_name(f"{path.name}.{kind}") for kind in ("out", "job", "log"))
        self._job.write_text(json.dumps({**job, "out": str(self._out)}))
        self._environment = environment(job.get("ranks", 1))
        self.is_hung = False

    def __enter__(self) -> "_Child":
        self._out.write_text("")
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(self._job)],
                env=self._environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its workers end with it
            )
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Its lines as they come; ends with the process, or once it has been silent for too long."""
        patience, heard = START_S, time.monotonic()
        with self._out.open() as out:
            while True:
                running, line = self._process.poll() is None, out.readline()
                if line.endswith("\n"):
                    patience, heard = PATIENCE_S, time.monotonic()
                    found: dict[str, Any] = json.loads(line)
                    yield found
                    if found.get("done"):
                        return
                elif not running:
                    return
                elif time.monotonic() - heard > patience:
                    self.is_hung = True
                    return
                else:
                    out.seek(out.tell() - len(line))
                    time.sleep(0.05)

    def words(self) -> str:
        return self._said.read_text(errors="replace")[-3000:]


def main(path: Path) -> None:
    """Runs the job, and ends the process without waiting for vLLM's threads."""
    job = json.loads(path.read_text())
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    seen: dict[str, int] = {}
    with Path(job["out"]).open("a", buffering=1) as out:
        for line in run(job):
            if "begin" not in line:
                line, seen = {**line, "failed": failed_since(seen)}, failures()
            out.write(json.dumps(line) + "\n")
        out.write(json.dumps({"done": True}) + "\n")


def _end_with_parent(parent: int) -> None:
    """Ends this process once nobody watches it any more."""
    while os.getppid() == parent:
        time.sleep(2)
    os._exit(1)


def run(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of a job: ``{"campaign", "model", "folder", "seed", "count", "first", ...}``.

    One for each trial is appended to the file ``out``: ``{"begin": n}`` before it, its result after it, with what
    `failed` meanwhile by reason, and ``{"done": true}`` at the end.
    """
    from lab.faults import measured, pollution, trials

    model, folder, campaign = Path(job["model"]), Path(job["folder"]), job["campaign"]
    if campaign == "right answers":
        settings = [pollution.SETTINGS[name] for name in job["settings"]]
        yield {"answers": pollution.right_answers(model, settings, job["seed"], job["count"])}
    elif campaign == "pollution":
        right = json.loads(Path(job["right"]).read_text())
        yield from pollution.play(model, folder, job["setting"], right, job["seed"], job["count"], job["first"])
    elif campaign == "faults":
        yield from trials.run(model, folder, job["setting"], job["seed"], job["count"], job["first"])
    else:
        yield from measured.run(model, folder, job["seed"], job["measures"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
