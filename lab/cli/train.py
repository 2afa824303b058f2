"""`python -m lab train`: trains the model that ships."""

from pathlib import Path
from typing import Annotated

import typer

from cacheblend.cli.options import MOST_SEED

Out = Annotated[Path, typer.Option("--out", help="Folder of checkpoint, history and model.", show_default=False)]
Threads = Annotated[int, typer.Option("--threads", min=0, max=4096, help="CPU threads; 0: one per core.")]
Device = Annotated[str | None, typer.Option("--device", help="Default: CUDA if available.")]
Shorten = Annotated[
    int, typer.Option("--shorten", min=1, max=1_000_000, help="Divide all step counts by this, to try it.")
]


def train(
    out: Out,
    seed: Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Of weights and draws.")] = 1,
    threads: Threads = 0,
    device: Device = None,
    shorten: Shorten = 1,
) -> None:
    """Trains the model that ships, from scratch. The same command goes on from where it was interrupted.

    A stage that misses its goal is extended, then restarted once; if it misses it again, training fails: exit code 2.
    """
    from lab.nano.training.train import train

    train(out, seed, threads, device, shorten)
