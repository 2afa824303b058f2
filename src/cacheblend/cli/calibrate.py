"""`cacheblend calibrate`: what the loading controller needs to know of model, device and store."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend.cli.options import (
    AsJson,
    Codec,
    Device,
    Dtype,
    ModelFolder,
    StoreUrl,
)
from cacheblend.cli.output import check_outputs, console, print_json, status

Out = Annotated[Path, typer.Option("--out", "-o", help="The cost model's file.")]
Lengths = Annotated[
    list[int] | None,
    typer.Option("--length", "-l", help="Of a prompt that is timed; several times. Default: 256, 1024, 4096."),
]
Rounds = Annotated[int, typer.Option("--rounds", help="The median of so many.", min=1)]


def calibrate(
    model: ModelFolder,
    store: StoreUrl,
    out: Out = Path("cost-model.json"),
    length: Lengths = None,
    rounds: Rounds = 3,
    dtype: Dtype = "auto",
    device: Device = None,
    codec: Codec = "raw",
    json: AsJson = False,
) -> None:
    """Measure prefills by length, a blend, and each tier of a store, for the loading controller.

    Give the file to `ask --cost-model`, or to an engine as the setting `cost_model`. Measure on a quiet machine.
    """
    check_outputs(out)
    from cacheblend.cli.models import open_engine
    from cacheblend.engines.cost_model import write_cost_model
    from cacheblend.engines.hf.calibrate import LENGTHS, calibrate

    settings: dict[str, Any] = {"codec": codec, "capture": False}
    with open_engine(model, store, settings, dtype=dtype, device=device, quiet=json) as engine:
        with status("measuring ...", quiet=json):
            measured = calibrate(engine, lengths=sorted(length or LENGTHS), rounds=rounds)
        where = engine.model.device.type
        write_cost_model(out, measured, engine.fingerprint, where, engine.stored_layout)
    if json:
        print_json({"file": str(out), **measured.to_dict()})
        return
    out_to = console()
    for tokens, seconds in measured.prefill_s:
        out_to.print(f"prefill of {tokens:>6} tokens  {seconds * 1000:8.1f} ms")
    for name, speed in measured.tiers.items():
        latency = f", {speed.layer_s * 1e3:.2f} ms a layer" if speed.layer_s else ""
        out_to.print(f"read from {name:<12} {speed.bytes_per_s / 1e9:8.2f} GB/s{latency}")
    out_to.print(f"a row of a blend takes {measured.overhead:.2f} times as long as one of a prefill")
    out_to.print(f"[dim]written to {out}[/dim]")
