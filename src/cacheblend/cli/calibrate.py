"""`cacheblend calibrate`: measures the cost model that the loading controller decides by."""

from pathlib import Path

from cacheblend.cli.models import open_engine
from cacheblend.cli.option_groups import option
from cacheblend.cli.options import MOST_TOKENS, AsJson, Codec, DeviceOptions, ModelOptions, StoreOptions
from cacheblend.cli.output import check_outputs, console, print_json, status


def calibrate(
    model: ModelOptions,
    store: StoreOptions,
    device: DeviceOptions,
    out: Path = option(Path("cost-model.json"), "File of the cost model.", "-o"),
    length: list[int] | None = option(
        None,
        "Tokens of a prompt that is timed; several times. Default: 256, 1024, 4096.",
        "-l",
        least=1,
        most=MOST_TOKENS,
    ),
    runs: int = option(3, "Times are medians of so many runs.", least=1, most=1000),
    codec: Codec = "raw",
    json: AsJson = False,
) -> None:
    """Measure prefills by length, a blend, and each tier of a store, for the loading controller.

    Give the file to `ask --cost-model`, or to an engine as the setting `cost_model`. Measure on a quiet machine.
    """
    check_outputs(out)
    settings = {"codec": codec, "capture": False}
    with open_engine(model.model, store.store, settings, device, quiet=json) as engine:
        from cacheblend.engines.hf.calibrate import LENGTHS, calibrate
        from cacheblend.engines.settings import write_cost_model

        with status("measuring ...", quiet=json):
            measured = calibrate(engine, lengths=sorted(length or LENGTHS), rounds=runs)
        write_cost_model(out, measured, engine.fingerprint, engine.model.device.type, engine.runtime.stored_layout)
    if json:
        print_json({"file": str(out), **measured.to_dict()})
        return
    shown = console()
    for tokens, seconds in measured.prefill_s:
        shown.print(f"prefill of {tokens:>6} tokens  {seconds * 1000:8.1f} ms")
    for name, speed in measured.tiers.items():
        latency = f", {speed.layer_s * 1e3:.2f} ms a layer" if speed.layer_s else ""
        shown.print(f"read from {name:<12} {speed.bytes_per_s / 1e9:8.2f} GB/s{latency}")
    shown.print(f"a row of a blend takes {measured.overhead:.2f} times as long as one of a prefill")
    shown.print(f"written to {out}", style="dim", soft_wrap=True)
