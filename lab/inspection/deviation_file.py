"""File of measured deviations in a run's folder: an interrupted run resumes, a finished one can be reported again.

The folder's name identifies model, data, prompts, methods and the code of the prefills; the file holds the digest of
the code that measures them. Deviations measured by other code, or of other methods, are measured again.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend.core.errors import InvalidInputError
from cacheblend.evaluation.bootstrap import Values
from cacheblend.evaluation.records import write_whole
from lab import checkout

FILE = "deviations.json"
CODE = (*(f"inspection/{name}.py" for name in ("deviations", "deviation_file", "deviation", "observation", "parts")),)


class DeviationFile:
    """Deviations by prompt; written to the folder, if any, as soon as they are added.

    Two processes may use the same folder: each measures again what it has not read of the other's results.

    Args:
        folder: folder of the run; None keeps deviations in memory.
        methods: names of the measured methods.

    Attributes:
        found: (number of the row, `top_k`) -> name of the method -> [2, layers]; empty if nothing could be measured.

    Raises:
        InvalidInputError: the file is damaged.
    """

    def __init__(self, folder: Path | None, methods: Iterable[str]) -> None:
        self._path = None if folder is None else folder / FILE
        self._of = {"code": checkout.code_digest(CODE), "methods": list(methods)}
        self.found: dict[tuple[int, int | None], dict[str, Values]] = {}
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def add(self, row: int, top_k: int | None, deviations: Mapping[str, Values]) -> None:
        """Adds a prompt; after this call, killing the process does not lose it."""
        self.found[row, top_k] = dict(deviations)
        if self._path is not None:
            prompts = [{"row": row, "top_k": k, "methods": _plain(methods)} for (row, k), methods in self.found.items()]
            write_whole(self._path, json.dumps(self._of | {"prompts": prompts}, ensure_ascii=False) + "\n")

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if {key: content.get(key) for key in self._of} == self._of:
                self.found = {(at["row"], at["top_k"]): _arrays(at["methods"]) for at in content["prompts"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInputError(f"{path}: damaged ({error}); delete it to measure deviation again") from error


def _plain(methods: Mapping[str, Values]) -> dict[str, Any]:
    """Nested lists with None in place of NaN, for JSON."""
    return {name: [[None if np.isnan(v) else v for v in line] for line in of.tolist()] for name, of in methods.items()}


def _arrays(methods: Mapping[str, Any]) -> dict[str, Values]:
    found = {name: np.array(of, dtype=np.float64) for name, of in methods.items()}
    if any(of.ndim != 2 or len(of) != 2 for of in found.values()) or len({of.shape for of in found.values()}) > 1:
        raise ValueError("a method does not have two lists of equal length")
    return found
