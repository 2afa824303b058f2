"""What commands print: results on stdout (tables, or one JSON object), progress and errors on stderr."""

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unicodedata import category

import typer
from rich.console import Console
from rich.text import Text

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.files import write_whole

Advance = Callable[[int, int], None]  # called with (done, in all)
AdvanceStage = Callable[[str, int, int], None]  # called with (stage, done, in all)


def console(*, stderr: bool = False) -> Console:
    """A console on the stream as it is now (tests and pipes replace it). Strings are printed as they are, since titles,
    paths and reasons may have brackets or ``:colons:`` in them; what is styled says so (`style=`, `Text`, or
    `markup=True` where nothing but constants and numbers is printed)."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def say(line: str) -> None:
    """A line beside the results, on stderr."""
    console(stderr=True).print(line, soft_wrap=True)


def write(text: str) -> None:
    """Exactly this on stdout, at once: a model's answer is neither wrapped nor styled."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(result: Any) -> None:
    """One JSON value on stdout."""
    typer.echo(json.dumps(result, ensure_ascii=False, indent=2))


@contextmanager
def progress(title: str, unit: str, *, quiet: bool) -> Iterator[Advance]:
    """Progress of one stage on stderr, see `stages`; none if `quiet`."""
    with stages({title: f"{title}, {unit}"}, quiet=quiet) as advance:
        yield partial(advance, title)


@contextmanager
def stages(titles: Mapping[str, str], *, quiet: bool) -> Iterator[AdvanceStage]:
    """Progress on stderr, with a title for each stage; none if `quiet`. A terminal has a bar for each stage. Stages
    that never advanced leave no bar, and an error removes all of them. Anything else has a line every `EVERY_S`, of the
    stage that advanced last, and one for each stage in the end."""
    if quiet:
        yield lambda stage, done, total: None
        return
    if not console(stderr=True).is_terminal:
        latest, began = dict[str, str](), dict[str, tuple[float, int]]()

        def advance(stage: str, done: int, total: int) -> None:
            since, first = began.setdefault(stage, (time.monotonic(), done))
            latest[stage] = f"{titles[stage]} {done}/{total}"
            left = (time.monotonic() - since) / max(1, done - first) * (total - done)
            say(latest[stage] + (f", about {duration_text(left)} left" if first < done < total else ""))

        with _lines() as say:
            yield advance
        for line in latest.values():
            typer.echo(line, err=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=console(stderr=True))
    tasks = {stage: bars.add_task(title, total=None) for stage, title in titles.items()}
    bars.start()
    try:
        yield lambda stage, done, total: bars.update(tasks[stage], completed=done, total=total)
    except BaseException:
        bars.live.transient = True
        bars.live.stop()  # `bars.stop` would print an empty line
        raise
    for task in bars.tasks:
        task.visible = task.total is not None
    bars.stop()


@contextmanager
def status(title: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr, without a terminal a line every `EVERY_S`; none if `quiet`. Yields what takes the state."""
    if quiet:
        yield lambda now: None
        return
    shown = console(stderr=True)
    if not shown.is_terminal:
        with _lines(title) as say:
            yield lambda now: say(f"{title} {now}")
        return
    with shown.status(Text(title)) as spinner:
        yield lambda now: spinner.update(Text(f"{title} {now}"))


EVERY_S = 10.0  # seconds between two lines that say where a command is, where there is no terminal


@contextmanager
def _lines(state: str = "") -> Iterator[Callable[[str], None]]:
    """Prints the latest state on stderr every `EVERY_S`, also where it has not changed for long."""
    began, ended = time.monotonic(), threading.Event()

    def say(now: str) -> None:
        nonlocal state
        state = now

    def run() -> None:
        while not ended.wait(EVERY_S):
            if state:
                typer.echo(f"{state} ({time.monotonic() - began:.0f} s)", err=True)

    printing = threading.Thread(target=run, name="cacheblend-progress", daemon=True)
    printing.start()
    try:
        yield say
    finally:
        ended.set()
        printing.join()


def check_folder(option: str, folder: Path) -> None:
    """Refuses a folder for results that cannot be made because a file has its name."""
    at = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not at.is_dir():
        raise InvalidInputError(f"{option} {folder}: {at} is a file; name a folder")
    if not os.access(at, os.W_OK):
        raise InvalidInputError(f"{option} {folder}: {at} cannot be written to: permission denied")


PICTURES = (".png", ".svg", ".pdf")
INSTALL_PLOT = "pip install 'cacheblend[plot]'"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def picture_file(plot: Path | None) -> Path | None:
    """What ``--plot`` names; None if it names nothing."""
    if plot is None:
        return None
    if not can_draw():
        raise InvalidInputError(f"--plot needs matplotlib: {INSTALL_PLOT}")
    if plot.suffix not in PICTURES:
        raise InvalidInputError(f"--plot draws {', '.join(PICTURES)}, not {plot.name!r}")
    check_outputs(plot)
    return plot


def write_json(file: Path, result: Any) -> None:
    """One JSON value in a file."""
    write_whole(file, json.dumps(result, ensure_ascii=False, indent=2) + "\n")


def check_outputs(*files: Path | None) -> None:
    """Refuses a file that a result cannot be written to: before minutes of measuring, not after them."""
    for file in files:
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise InvalidInputError(f"{file} cannot be written: there is no folder {folder}")
        if file.is_dir():
            raise InvalidInputError(f"{file} cannot be written: it is a folder")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise InvalidInputError(f"{file} cannot be written: permission denied")


def visible(text: str) -> str:
    """`text` from a file in one line, control characters (a terminal's escapes) shown as replaced."""
    return "".join("\ufffd" if category(c) == "Cc" else c for c in " ".join(text.split()))


def size_text(count: int) -> str:
    """``"1.5 GiB"``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """``"45 ms"`` or ``"1.25 s"``."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def duration_text(seconds: float) -> str:
    """``"40 s"``, ``"12 min"`` or ``"3 h"``."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def share_text(part: float, whole: float) -> str:
    """``"15.0 %"``; empty of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else ""
