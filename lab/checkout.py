"""The checkout that the lab runs in, and the environment of the processes that it starts."""

import os
from collections.abc import Sequence
from pathlib import Path

import cacheblend
from cacheblend.engines import provenance

ROOT = Path(__file__).resolve().parents[1]


def code_digest(parts: Sequence[str]) -> str:
    """Hash of the lab's source; see `provenance.code_digest`."""
    return provenance.code_digest(parts, ROOT / "lab")


def environment() -> dict[str, str]:
    """This process's variables; a child finds the modules of the lab and of the package from any folder."""
    paths = [str(ROOT), str(Path(cacheblend.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
