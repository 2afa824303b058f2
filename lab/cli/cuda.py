"""`lab cuda`: everything that is measured on a GPU, in one run."""

from json import dumps
from pathlib import Path
from time import monotonic
from typing import Any

import typer

from cacheblend.cli.bench import HOW, WHAT
from cacheblend.cli.option_groups import option
from cacheblend.cli.options import OUTPUT, AsJson
from cacheblend.cli.output import INSTALL_PLOT, can_draw, check_outputs, console, print_json


def cuda(
    part: list[str] | None = option(
        None, "tests, kernels, ttft, timeline, profile, tiles or vllm; several times. Default: all.", panel=WHAT
    ),
    dry_run: bool = option(False, "Try all parts at tiny size, on a CPU, too.", panel=HOW),
    minutes: float = option(9.0, "Everything has ended after these.", least=0.1, most=1e6, panel=HOW),
    folder: Path | None = option(
        None, "Where cuda-<device>.json, .md, pictures go. Default: docs/results; a dry run writes none.", panel=OUTPUT
    ),
    json: AsJson = False,
) -> None:
    """A GPU: tests, kernels, time to first token, a pass's timeline, vLLM; and what falls short of its bar.

    What is found is written at once. A part that was run alone is added to the file of the same commit. Ends with 1 if
    a test or a part fails.
    """
    from cacheblend.cli.models import quiet_transformers
    from cacheblend.core.errors import InvalidInputError

    if folder is not None and not folder.is_dir():
        raise InvalidInputError(f"--folder {folder}: there is no such folder")
    default = Path("docs/results")
    results = folder or (default if default.is_dir() and not dry_run else None)
    quiet_transformers()
    from cacheblend.engines.files import write_whole
    from lab.gpu import report
    from lab.gpu import run as bench

    path = None if results is None else bench.file_of(results)
    page = None if path is None else path.with_suffix(".md")
    check_outputs(path, page)
    earlier = None if path is None else bench.read(path)
    started = monotonic()

    def say(what: str) -> None:
        if not json:
            console(stderr=True).print(f"{monotonic() - started:5.0f} s  {what}", soft_wrap=True)

    def save(result: dict[str, Any]) -> None:
        whole = bench.merged(earlier, result)
        if path is not None and page is not None:
            write_whole(path, dumps(whole, ensure_ascii=False, indent=2) + "\n")
            write_whole(page, report.page(whole))

    found = bench.run(tuple(part or ()), dry_run=dry_run, minutes=minutes, progress=say, save=save)
    whole = bench.merged(earlier, found)
    if path is not None and page is not None:
        drawn = []
        if not can_draw():
            console(stderr=True).print(f"no pictures are drawn, that needs matplotlib: {INSTALL_PLOT}", soft_wrap=True)
        else:
            drawn = report.draw(whole, path)
        for each in [path, page, *drawn]:
            console(stderr=True).print(f"wrote {each}", soft_wrap=True)
    if json:
        print_json(whole)
    else:
        console().print(report.table(whole))
    for name, error in report.failures(whole).items():
        console(stderr=True).print(f"FAILED: {name}\n{error}\n", soft_wrap=True)
    if report.failures(found):
        raise typer.Exit(1)
