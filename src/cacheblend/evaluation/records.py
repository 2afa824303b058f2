"""Records of an evaluation: a cell for each row and method, in a folder from which an interrupted run resumes.

<out>/<name>-<hash of config>/
  config.json    the config; another model, data file, setting, code or library gives another hash
  rows.jsonl     one line per row, written as soon as all methods have answered
"""

import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from cacheblend.core.closable import Closable
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.files import write_whole

T = TypeVar("T")
CONFIG, ROWS = "config.json", "rows.jsonl"


@dataclass(frozen=True)
class Cell:
    """One row answered by one method; figures as in `Outcome`."""

    method: str
    top_k: int | None  # most passages retrieved; None: all of the row
    chunks: int  # passages in the prompt
    skipped: str = ""  # why the method gave no answer; if not empty, the remaining fields are meaningless
    answer: str = ""
    token_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    row_layers: int = 0
    projected_rows: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    missed_tokens: int = 0
    total_compute: float = 0.0  # as a share of a full prefill of the row's prompt
    top_1: bool | None = None  # the likeliest first token is full recompute's; None if they cannot be compared
    kl: float | None = None  # KL(full || method) of the first token, in nats; None if they cannot be compared
    own_kl: float | None = None  # over the model's own answer, as in `Outcome`; None if that was not asked for
    own_top_1: float | None = None


@dataclass(frozen=True)
class RowResult:
    """One row answered by all methods."""

    number: int  # index of the row, from 0
    id: str
    category: str
    answers: list[str]
    cells: list[Cell]  # one for each method and `top_k`
    too_long: list[tuple[int | None, str]] = field(default_factory=list)
    """Prompts skipped because they exceed the model's context: (`top_k`, reason)."""
    machine: str = ""  # and number of threads, that the times were measured on

    @staticmethod
    def of_dict(fields: dict[str, Any]) -> "RowResult":
        """From the form of `asdict`."""
        row = RowResult(**fields)
        cells = [Cell(**cell) for cell in fields["cells"]]
        return replace(row, cells=cells, too_long=[(k, reason) for k, reason in fields["too_long"]])


class LineLog(Closable, Generic[T]):
    """Results in a folder's file of JSON lines, each written as soon as it is added. Close it, or use `with`. `folder`
    is created if missing; None: nothing is written. `parse` makes a result of a line's JSON; `items` are those
    that were in the file. `torn`: the process that wrote the file was killed while it wrote the last line, which is
    dropped. Raises `InvalidInputError`: a line is damaged, or another process writes to the folder."""

    def __init__(self, folder: Path | None, config: Mapping[str, Any], parse: Callable[[Any], T]) -> None:
        self.folder, self.torn, self.items = folder, False, list[T]()
        self._file: IO[bytes] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / ROWS).open("ab+")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_whole(folder / CONFIG, json.dumps(config, ensure_ascii=False, indent=2) + "\n")
                self._file.seek(0)
                raw = self._file.read()
                whole = raw.rfind(b"\n") + 1
                if whole < len(raw):  # the process was killed while it wrote this line
                    self.torn = True
                    self._file.truncate(whole)
                for number, line in enumerate(raw[:whole].split(b"\n")[:-1], start=1):
                    try:
                        self.items.append(parse(json.loads(line)))
                    except (ValueError, TypeError, KeyError) as error:
                        where = f"{folder / ROWS}, line {number}"
                        raise InvalidInputError(
                            f"{where}: damaged ({error}); delete that line to evaluate its row again"
                        ) from error
            except BlockingIOError as error:
                self._file.close()
                raise InvalidInputError(f"{folder} is being written by another process; wait until it ends") from error
            except BaseException:
                self._file.close()
                raise

    def append(self, line: Any) -> None:
        """Adds a line of JSON; after this call, killing the process does not lose it."""
        if self._file is not None:
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file and releases its lock."""
        if self._file is not None:
            self._file.close()


def folder_name(name: str, config: Mapping[str, Any]) -> str:
    """``<name>-<12 digits of the config's hash>``."""
    text = json.dumps(config, ensure_ascii=False, sort_keys=True)
    readable = re.sub(r"[^\w.=-]+", "-", name).strip("-.") or "run"
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
