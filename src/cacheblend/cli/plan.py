"""`cacheblend plan`: loading against recomputing by device, before anything is bought."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from cacheblend.cli.option_groups import option
from cacheblend.cli.options import MOST_TOKENS, AsJson, Codec, ModelOptions, OneRatio
from cacheblend.cli.output import console, print_json
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.folders import model_folder

if TYPE_CHECKING:
    from cacheblend.core.cost.devices import DeviceCost

DEVICES = "memory:20:3 nvme:3:0.1 ssd:0.5:0.08 disk:0.15:0.02 bucket:0.1:0.023"
RATIOS = (0.05, 0.15, 0.3, 0.5, 1.0)


def plan(
    model: ModelOptions,
    context: int = option(4096, "Tokens of a context.", "-c", least=2, most=MOST_TOKENS),
    cost_model: Path | None = option(None, "Cost model of `calibrate`: its times of a prefill and of loading."),
    prefill_s: float | None = option(None, "Seconds of its full prefill, above 0, where there is no --cost-model."),
    device: list[str] | None = option(
        None,
        "name:GB/s:price of a GB a month, or name::price for a tier of --cost-model; several times. Default (examples, "
        f"not offers): {DEVICES}.",
        "-d",
    ),
    stored_tokens: float = option(1e8, "Tokens to be stored, for the price.", least=1, most=1e18),
    ratio: OneRatio = 0.15,
    codec: Codec = "raw",
    json: AsJson = False,
) -> None:
    """Where to keep KV caches: time of loading and of recomputing by device, the ratio, the price a month.

    Prefill times come from a cost model (`calibrate`), or from --prefill-s.
    """
    from cacheblend.core.cost.devices import Device, cheapest, place, recompute_s

    if (cost_model is None) == (prefill_s is None):
        raise InvalidInputError("give either a cost model (--cost-model), or the time of a prefill (--prefill-s)")
    if prefill_s is not None and prefill_s <= 0:
        raise InvalidInputError(f"--prefill-s {prefill_s:g}: the seconds of a full prefill must be above 0")
    speeds, seconds = dict[str, float](), prefill_s or 0.0
    if cost_model is not None:
        from cacheblend.engines.settings import load_cost_model

        measured = load_cost_model(cost_model, codec=codec)
        speeds = {name: tier.bytes_per_s for name, tier in measured.tiers.items()}
        seconds = measured.full_s(context)
    offered = [Device.parse(text, speeds) for text in device or DEVICES.split()]
    for each in offered:
        if not math.isfinite(each.bytes_per_s + each.price):
            raise InvalidInputError(f"--device {each.name}: throughput and price must be finite numbers")
    folder = model_folder(model.model)

    from transformers import AutoConfig

    from cacheblend.core.plan.codec import codec_of
    from cacheblend.engines.hf.model_loader import expected_layout

    codec_of(codec)
    try:
        layout = replace(expected_layout(AutoConfig.from_pretrained(folder)), codec=codec)
    except Exception as error:  # transformers checks some fields with exceptions of its own
        raise InvalidInputError(f"{folder}: config.json does not say what the KV cache looks like: {error}") from error
    a_token, layers = layout.block_bytes(256) / 256, len(layout.layers)
    sizes = {"context_bytes": a_token * context, "stored_bytes": a_token * stored_tokens}
    placed = place(offered, prefill_s=seconds, layers=layers, floor=ratio, **sizes)
    best = cheapest(placed, seconds)
    result: dict[str, Any] = {
        "prefill_s": seconds,
        "bytes_per_token": a_token,
        "recompute_s": {str(each): recompute_s(seconds, layers, each) for each in RATIOS},
        "devices": [
            {
                **vars(each),
                "device": each.device.name,
                "bytes_per_s": each.device.bytes_per_s,
                "speedup": seconds / each.ttft_s,
            }
            for each in placed
        ],
        "best": None if best is None else best.device.name,
    }
    if json:
        print_json(result)
        return
    out = console()
    out.print(
        f"{context} tokens: {a_token * context / 1e6:.0f} MB of KV cache ({a_token / 1e3:.1f} kB a token), "
        f"a full prefill takes {seconds:.3f} s"
    )
    by_ratio = ", ".join(f"{taken:.3f} s at {ratio}" for ratio, taken in result["recompute_s"].items())
    out.print(f"recomputing takes {by_ratio}")
    out.print(_table(placed, best, stored_tokens))
    if best is None:
        out.print("no device here is faster than computing everything")
    elif best.hides:
        out.print(f"{best.device.name} is the cheapest device that hides its loading behind recomputing")
    else:
        out.print(f"none hides its loading; {best.device.name} is the fastest")


def _table(placed: "list[DeviceCost]", best: "DeviceCost | None", stored_tokens: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("device", "loads in", "recomputes in", "ratio", "first token", "hides loading"):
        table.add_column(column, justify="left" if column == "device" else "right")
    table.add_column(f"{stored_tokens / 1e6:g} M tokens a month", justify="right")
    for each in placed:
        table.add_row(
            each.device.name,
            f"{each.load_s:.3f} s",
            f"{each.recompute_s:.3f} s",
            f"{each.ratio:.2f}",
            f"{each.ttft_s:.3f} s",
            "yes" if each.hides else "no",
            f"{each.monthly:,.2f}",
            style="bold green" if each is best else None,
        )
    return table
