"""`cacheblend doctor`: can this model be blended, and does it keep its promises on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.cli.options import AsJson, Device, Dtype
from cacheblend.cli.output import console, print_json, status

if TYPE_CHECKING:
    from cacheblend.engines.hf.doctor import Diagnosis

Folder = Annotated[Path | None, typer.Option("--model", "-m", help="Model folder.", show_default=False)]
Shape = Annotated[
    str | None,
    typer.Option("--shape", help="Random weights of a known shape, e.g. qwen2.5-0.5b.", show_default=False),
]

MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}


def doctor(
    model: Folder = None, shape: Shape = None, dtype: Dtype = "auto", device: Device = None, json: AsJson = False
) -> None:
    """Check whether a model can be blended, down to a live run of both exactness laws. Exit code 1 means no."""
    from cacheblend.core.errors import InvalidInputError

    if (model is None) == (shape is None):
        raise InvalidInputError("name a model folder with --model, or a shape with --shape; one of them")
    if model is not None and not model.is_dir():
        raise InvalidInputError(f"{model} is no folder; --model takes a folder with config.json and weights")
    with status("examining ...", quiet=json):
        diagnosis = _diagnose(model, shape, dtype, device)
    if json:
        print_json(diagnosis.to_dict())
    else:
        _show(diagnosis)
    if not diagnosis.blendable:
        raise typer.Exit(1)


def _diagnose(model: Path | None, shape: str | None, dtype: str, device: str | None) -> "Diagnosis":
    from cacheblend.cli.models import checked_device, checked_dtype, quiet_transformers

    quiet_transformers()
    from cacheblend.engines.hf.doctor import diagnose

    if shape is None:
        assert model is not None
        return diagnose(model, dtype=checked_dtype(dtype), device=checked_device(device))
    import torch

    from cacheblend.bench.shapes import build_shape

    wanted = torch.bfloat16 if dtype == "auto" else checked_dtype(dtype)
    built = build_shape(shape, dtype=wanted, device=device)
    return diagnose(built, name=f"{shape} (random weights)")


def _show(diagnosis: "Diagnosis") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=diagnosis.model, title_justify="left", box=None, padding=(0, 1), show_header=False)
    for check in diagnosis.checks:
        table.add_row(Text(*MARKS[check.ok]), check.name, check.detail)
    out = console()
    out.print(table)
    if diagnosis.blendable:
        out.print(Text.assemble("\n", ("yes", "bold green"), ", this model can be blended"))
    else:
        out.print(Text.assemble("\n", ("no", "bold red"), ": ", diagnosis.reason))
