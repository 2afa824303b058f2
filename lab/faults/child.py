"""Runs one campaign in a process of its own: ``python -m lab.faults.child JOB.json``.

The job is ``{"campaign", "model", "folder", "seed", "count", "first", ...}``. A JSON line for each trial is appended to
the file ``out``: ``{"begin": n}`` before it, its result after it, with what `failed` meanwhile by reason, and
``{"done": true}`` at the end.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheblend.core.failures import failed_since, failures


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
    """The lines of a job."""
    from lab.faults import faulting, measured, pollution

    model, folder, campaign = Path(job["model"]), Path(job["folder"]), job["campaign"]
    if campaign == "right answers":
        settings = [pollution.SETTINGS[name] for name in job["settings"]]
        yield {"answers": pollution.right_answers(model, settings, job["seed"], job["count"])}
    elif campaign == "pollution":
        right = json.loads(Path(job["right"]).read_text())
        yield from pollution.play(model, folder, job["setting"], right, job["seed"], job["count"], job["first"])
    elif campaign == "faults":
        yield from faulting.run(model, folder, job["setting"], job["seed"], job["count"], job["first"])
    else:
        yield from measured.run(model, folder, job["seed"], job["measures"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
