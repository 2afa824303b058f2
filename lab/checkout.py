"""The checkout that the lab runs in, and the processes that it starts."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cacheblend
from cacheblend.core.errors import CacheBlendError
from cacheblend.engines import provenance

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
