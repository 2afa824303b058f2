"""Figure 7: quality and time to first token by storage device, with the loading controller.

Memory, this machine's disk, and emulated devices: memory whose reads take so long that loading a prompt takes a share,
or a multiple, of the time of its full prefill. So every model meets devices that are fast and slow for it.
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from cacheblend.core.cost.cost_model import CostModel, TierSpeed
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import FirstToken
from cacheblend.engines.hf.calibrate import calibrate, measure_store
from cacheblend.engines.settings import controller_of
from cacheblend.evaluation import Evaluation
from cacheblend.evaluation.methods import Asked, Label, Method, Outcome, answer_by
from cacheblend.evaluation.runner import Case, make_cases
from cacheblend.store import KVStore, open_store
from lab.paper import drawing
from lab.paper.context import (
    BLEND,
    FULL,
    REUSE,
    TITLES,
    Answered,
    Context,
    LeftOutError,
    Part,
    methods,
    of_evaluation,
    points,
)
from lab.paper.quality import facts, skipped_rows
from lab.speed.throttle import ThrottledStore

TOKENS = 256  # of the block by which bytes per token are counted
COMPARED = (FULL, REUSE)


@dataclass(frozen=True)
class Device:
    """A storage device, and how fast it is if it is emulated."""

    name: str
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Controlled:
    """A blend whose ratio, and what of the prompt is loaded, the engine's loading controller decides."""

    label: Label

    def check(self, layers: int) -> None: ...

    def answer(self, asked: Asked) -> Outcome:
        def prefill() -> FirstToken:
            result = asked.engine.prefill(asked.prompt)
            report = result.report
            return FirstToken(result.logits, report.ttft_s, report.row_layers, result.kv, report)

        return answer_by(asked, prefill)


def measure(context: Context) -> dict[str, Any]:
    """See `Part`. The cost model and the devices' speeds are measured once and kept."""
    cases = [case for case in make_cases(context.engine, context.settings, context.some_rows) if case.prompts]
    if not cases:
        raise LeftOutError("no prompt fits the model's context")
    known = {method.label.family: method for method in methods(context.engine)}
    blend = replace(known[BLEND].label, name=f"{TITLES[BLEND]}, controller", ratio=None)
    compared: list[Method] = [*(known[family] for family in COMPARED), Controlled(blend)]
    answers: list[Answered] = []
    found: list[Evaluation] = []
    with context.kept("device", {"slowness": context.sweeps.slowness}, cases) as kept:
        tokens = int(median(len(case.longest) for case in cases))
        plain = CostModel.from_dict(kept.get("cost model", lambda: _cost_model(context, cases)))
        bytes_per_s = (
            context.engine.runtime.stored_layout.block_bytes(TOKENS) / TOKENS / (plain.full_s(tokens) / tokens)
        )
        emulated = [Device(f"{each:g} x prefill", bytes_per_s / each) for each in sorted(set(context.sweeps.slowness))]
        devices = [Device("memory"), Device("disk"), *emulated]  # from fast to slow
        speeds: dict[str, float] = {}
        for x, device in enumerate(devices):
            with _engine_on(context, device) as engine:
                tier, speed = kept.get(f"speed of {device.name}", lambda: _speed(engine, device))  # noqa: B023
                speeds[device.name] = speed["bytes_per_s"]
                model = replace(plain, tiers={tier: TierSpeed(**speed)})
                engine.runtime.prefiller.controller = controller_of(model, engine.config, engine.runtime.stored_layout)
                own = {"name": f"device-{device.name}", "engine": engine}
                found.append(context.evaluated("device", context.some_rows, compared, (x, len(devices)), **own))
            answers += of_evaluation(found[-1], context.scorers, lambda cell, x=x: x)  # type: ignore[misc]
    slowness = ", ".join(f"{each:g}" for each in sorted(set(context.sweeps.slowness)))
    explained = (
        f"devices named {slowness} x prefill are emulated: loading a prompt takes so many times as long as its full "
        "prefill; disk is the folder for temporary files, cached by the system"
    )
    return {
        "points": [point | {"device": devices[point["x"]].name} for point in points(answers)],
        "devices": [{"name": device.name, "bytes_per_s": speeds[device.name]} for device in devices],
        "cost_model": plain.to_dict(),
        "notes": [*skipped_rows(found[0]), explained],
        **facts(found),
    }


def _cost_model(context: Context, cases: list[Case]) -> dict[str, Any]:
    longest = max(len(case.longest) for case in cases)
    with _engine_on(context, Device("memory")) as engine:
        return calibrate(engine, lengths=sorted({max(1, longest // 4), longest}), rounds=3).to_dict()


@contextmanager
def _engine_on(context: Context, device: Device) -> Iterator[BlendEngine]:
    """The engine's model on an empty store of this device."""
    of = context.engine
    with ExitStack() as stack:
        kept: KVStore
        if device.bytes_per_s is not None:
            kept = ThrottledStore(device.bytes_per_s)
        elif device.name == "disk":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-paper-"))
            kept = open_store(folder, ram_bytes=0)
        else:
            kept = open_store(device.name)
        stack.enter_context(kept)
        config = replace(of.config, load_timeout_s=math.inf)  # the device is what is measured
        engine = BlendEngine(
            of.model, of.tokenizer, store=kept, config=config, fingerprint=of.fingerprint, name=of.name
        )
        yield stack.enter_context(engine)


def _speed(engine: BlendEngine, device: Device) -> tuple[str, dict[str, float]]:
    """Tier and speed, ready for JSON; an emulated device's is known."""
    if device.bytes_per_s is not None:
        return engine.store.tier_names[0], vars(TierSpeed(device.bytes_per_s))
    tier, speed = measure_store(engine.store, engine.runtime.stored_layout)
    return tier, vars(speed)


def draw(result: dict[str, Any], title: str, path: Any) -> None:
    """Quality and time by device, and the share that the controller recomputes."""
    names = [f"{device['name']}\n{_rate(device['bytes_per_s'])}" for device in result["devices"]]
    blends = [point for point in result["points"] if point["family"] == BLEND]
    measure = drawing.measure_of(result["points"])
    with drawing.sheet(title, 3, path) as (quality, ttft, share):
        drawing.curves(quality, result["points"], drawing.quality(measure), lambda point: point["x"])
        drawing.curves(ttft, result["points"], drawing.ttft, lambda point: point["x"])
        drawing.curves(share, blends, drawing.computed, lambda point: point["x"])
        quality.set_ylabel(drawing.quality_label(measure))
        drawing.log_times(ttft, result["points"])
        share.set(ylabel="total compute of blend, % of a full prefill", ylim=(0, 103))
        for axes in (quality, ttft, share):
            axes.set_xticks(range(len(names)), names, fontsize=8)
            axes.set_xlabel("storage device, from fast to slow")


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2g} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2g} MB/s"


COLUMNS = {"device": lambda point: str(point["device"])}
PART = Part("device", "Storage device, with the loading controller", measure, draw, COLUMNS)
