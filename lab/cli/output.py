"""What a command does around its benchmark."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheblend.cli.bench import ResultOptions
from cacheblend.cli.output import AdvanceStage, picture_file, progress, stages


def prepare(result: ResultOptions, plot: Path | None = None) -> Path | None:
    """Checks where the result goes, before minutes of measuring; the picture's file."""
    from cacheblend.cli.models import quiet_transformers

    result.check()
    quiet_transformers()
    return picture_file(plot)


def measure(result: ResultOptions, unit: str, bench: Any, *what: Any, title: str = "measuring") -> None:
    """Runs a benchmark, a module with `run` and `table`, with a bar of these units, and shows what it found."""
    with progress(title, unit, quiet=result.json) as advance:
        found = bench.run(*what, advance)
    result.show(bench.table(found), found)


@contextmanager
def bars(names: Sequence[str], result: ResultOptions) -> Iterator[AdvanceStage]:
    """Progress of these stages; none where JSON goes to stdout."""
    with stages({name: name for name in names}, quiet=result.json) as advance:
        yield advance
