"""Deviations that were measured, kept in a run's folder: an interrupted run goes on, a finished one is reported anew.

The folder's name stands for model, data, prompts, arms and the source of the passes; the file carries the digest of the
source that watches them. Deviations of another source, or of other arms, are measured again.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines import provenance
from cacheblend.evaluation.bootstrap import Values
from cacheblend.evaluation.records import write_whole

FILE = "deviations.json"
CODE = (
    *(f"evaluation/{name}.py" for name in ("deviations", "deviation_file")),
    *(f"evaluation/inspection/{name}.py" for name in ("deviation", "observation", "parts")),
)


class DeviationFile:
    """Deviations by prompt; on disk, whole, as soon as they are added, where there is a folder.

    Two processes on one folder do not hurt each other: what one has not read of the other's is measured again.

    Args:
        folder: of the run; None keeps them in memory.
        arms: names of those that are measured.

    Attributes:
        found: (number of the row, `top_k`) -> name of the arm -> [2, layers]; empty where nothing was to be measured.

    Raises:
        InvalidInputError: the file is damaged.
    """

    def __init__(self, folder: Path | None, arms: Iterable[str]) -> None:
        self._path = None if folder is None else folder / FILE
        self._of = {"code": provenance.code_digest(CODE), "arms": list(arms)}
        self.found: dict[tuple[int, int | None], dict[str, Values]] = {}
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def add(self, row: int, top_k: int | None, deviations: Mapping[str, Values]) -> None:
        """Keeps a prompt's; behind this call, killing the process does not lose it."""
        self.found[row, top_k] = dict(deviations)
        if self._path is not None:
            prompts = [{"row": row, "top_k": k, "arms": _plain(arms)} for (row, k), arms in self.found.items()]
            write_whole(self._path, json.dumps(self._of | {"prompts": prompts}, ensure_ascii=False) + "\n")

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if {key: content[key] for key in self._of} == self._of:
                self.found = {(at["row"], at["top_k"]): _arrays(at["arms"]) for at in content["prompts"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInputError(f"{path}: damaged ({error}); delete it, and deviation is measured again") from error


def _plain(arms: Mapping[str, Values]) -> dict[str, Any]:
    """JSON knows no NaN."""
    return {name: [[None if np.isnan(v) else v for v in line] for line in of.tolist()] for name, of in arms.items()}


def _arrays(arms: Mapping[str, Any]) -> dict[str, Values]:
    found = {name: np.array(of, dtype=np.float64) for name, of in arms.items()}
    if any(of.ndim != 2 or len(of) != 2 for of in found.values()) or len({of.shape for of in found.values()}) > 1:
        raise ValueError("an arm's deviations are not two lines of one length")
    return found
