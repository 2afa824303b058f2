"""`bench cuda`: everything that is measured on a GPU, in one run."""

from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from cacheblend.cli.bench.options import HOW, WHAT
from cacheblend.cli.options import OUTPUT, AsJson
from cacheblend.cli.output import INSTALL_PLOT, check_outputs, console, print_json, write_json

Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help="tests, kernels, ttft, timeline or vllm; several times for several. Default: all.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        help="Where cuda-<device>.json and its pictures go. Default: docs/results; a dry run writes none.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]


def cuda(
    part: Parts = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Try all parts at tiny size, on a CPU, too.", rich_help_panel=HOW),
    ] = False,
    minutes: Annotated[
        float,
        typer.Option("--minutes", min=0.1, max=1e6, help="Nothing more is begun after these.", rich_help_panel=HOW),
    ] = 9.0,
    folder: Folder = None,
    json: AsJson = False,
) -> None:
    """A GPU: tests, kernels, time to first token, a pass's timeline, vLLM; and what falls short of its bar.

    A part that was run alone is added to the file of the same commit.
    """
    from cacheblend.cli.models import quiet_transformers
    from cacheblend.core.errors import InvalidInputError

    if folder is not None and not folder.is_dir():
        raise InvalidInputError(f"--folder {folder}: there is no such folder")
    default = Path("docs/results")
    results = folder or (default if default.is_dir() and not dry_run else None)
    quiet_transformers()
    from cacheblend.bench.cuda import run as bench

    path = None if results is None else bench.file_of(results)
    check_outputs(path)
    started = monotonic()

    def say(what: str) -> None:
        if not json:
            console(stderr=True).print(f"{monotonic() - started:5.0f} s  {what}", soft_wrap=True)

    found = bench.run(tuple(part or ()), dry_run=dry_run, minutes=minutes, progress=say)
    if path is not None:
        found = bench.merged(path, found)
        write_json(path, found)
        _draw(found, path)
    if json:
        print_json(found)
    else:
        console().print(bench.table(found))


def _draw(found: dict[str, object], path: Path) -> None:
    if find_spec("matplotlib") is None:
        console(stderr=True).print(f"no pictures are drawn, that needs matplotlib: {INSTALL_PLOT}", soft_wrap=True)
        return
    from cacheblend.bench.cuda.plots import draw

    for each in [path, *draw(found, path)]:
        console(stderr=True).print(f"wrote {each}", soft_wrap=True)
