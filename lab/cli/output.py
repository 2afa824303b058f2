"""What a command does around its benchmark."""

from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

from cacheblend.cli.bench import ResultOptions
from cacheblend.cli.output import picture_file, progress, stages
from lab.settings import ModelSettings


def measure(
    result: ResultOptions,
    where: str,
    *what: Any,
    unit: str = "rounds",
    title: str = "measuring",
    plot: Path | None = None,
) -> None:
    """Runs a benchmark, shows what it found, and draws it.

    Args:
        result: where the result goes; that it can go there is checked before minutes of measuring.
        where: of the benchmark: ``speed.load``, or ``servers.vllm_bench:ttft`` if its function is not called `run`.
        what: its arguments, behind which it is given its progress: by its module's `STAGES`, or in units.
        unit, title: of the bar, if it has no stages.
        plot: the picture's file.
    """
    from cacheblend.cli.models import quiet_transformers

    result.check()
    quiet_transformers()
    picture, (module, _, function) = picture_file(plot), where.partition(":")
    asked = [each.resolved() if isinstance(each, ModelSettings) else each for each in what]
    bench = import_module(f"lab.{module}")
    bar: AbstractContextManager[Any] = progress(title, unit, quiet=result.json)
    if names := getattr(bench, "STAGES", ()):
        bar = stages({name: name for name in names}, quiet=result.json)
    with bar as advance:
        found: dict[str, Any] = getattr(bench, function or "run")(*asked, advance)
    from lab.bench import figure_lines

    result.show(getattr(bench, "table", figure_lines)(found), found)
    if picture is not None:
        bench.plot(found, picture)
