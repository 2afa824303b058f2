"""The checkout that the lab runs in, the processes that it starts, and the measurements that it keeps."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cacheblend
from cacheblend.core.errors import CacheBlendError
from cacheblend.engines import provenance
from cacheblend.evaluation.records import LineLog

ROOT = Path(__file__).resolve().parents[1]


def code_digest(parts: Sequence[str]) -> str:
    """Hash of the lab's source; see `provenance.code_digest`."""
    return provenance.code_digest(parts, ROOT / "lab")


def environment() -> dict[str, str]:
    """This process's variables; a child finds the modules of the lab and of the package from any folder."""
    paths = [str(ROOT), str(Path(cacheblend.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def measured_apart(module: str, *arguments: str, given: str = "") -> dict[str, Any]:
    """The JSON that a module's program prints last, in a process of its own, so that its memory is that of its work."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise CacheBlendError(f"the process that measures failed: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Kept(LineLog[dict[str, Any]]):
    """Measurements by key, each written as soon as it is finished, with the machine. Close it, or use `with`."""

    def __init__(self, folder: Path | None, config: Mapping[str, Any]) -> None:
        super().__init__(folder, config, lambda line: {name: line[name] for name in ("key", "value", "machine")})

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The measurement of this key; measured if it is not there yet. Plain JSON."""
        if not self.has(key):
            self.items.append({"key": key, "value": measure(), "machine": provenance.machine_line()})
            self.append(self.items[-1])
        return self.value(key)

    def has(self, key: str) -> bool:
        return any(item["key"] == key for item in self.items)

    def value(self, key: str) -> Any:
        return next(item["value"] for item in self.items if item["key"] == key)

    @property
    def machines(self) -> list[str]:
        return list(dict.fromkeys(item["machine"] for item in self.items))
