"""`lab evaluate`: as `cacheblend evaluate`, and deviation inside the model. `lab train`: the model that ships."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend.cli.evaluate import Destination, EvaluateOptions, run_evaluation
from cacheblend.cli.option_groups import option
from cacheblend.cli.options import (
    IN_MEMORY,
    MOST_SEED,
    SCORES,
    DeviceOptions,
    MethodOptions,
    QuestionOptions,
    StoreOptions,
)
from cacheblend.cli.output import console, progress, say

if TYPE_CHECKING:
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Evaluation, Method, Settings


def evaluate(
    questions: QuestionOptions,
    method: MethodOptions,
    device: DeviceOptions,
    options: EvaluateOptions,
    to: Destination,
    deviation_rows: int = option(
        0,
        "Also measure on so many rows how far reuse and blend are from full recompute, by layer: KV, and the "
        "question's attention. Takes longer than answering.",
        least=0,
        panel=SCORES,
    ),
    store: StoreOptions = IN_MEMORY,
) -> None:
    """As `cacheblend evaluate`; --deviation-rows: also KV and attention of reuse and blend beside full recompute."""
    further = Deviation(deviation_rows, quiet=to.json) if deviation_rows else None
    run_evaluation(questions, method, device, options, to, store, further)


class Deviation:
    """Deviations on `count` rows of the methods that load KV at new positions; see `run_evaluation`."""

    def __init__(self, count: int, *, quiet: bool) -> None:
        self._count, self._quiet = count, quiet

    def check(self, methods: "list[Method]") -> None:
        from lab.inspection.deviations import fused_methods

        fused_methods(methods)

    def measure(
        self,
        engine: "BlendEngine",
        rows: "list[QuestionRow]",
        methods: "list[Method]",
        settings: "Settings",
        found: "Evaluation",
        summary: dict[str, Any],
    ) -> dict[str, Any]:
        from lab.inspection.deviations import measure_deviations, with_deviations

        with progress("measuring deviation", "prompts", quiet=self._quiet) as advance:
            measured = measure_deviations(
                engine, rows, methods, self._count, settings=settings, folder=found.folder, advance=advance
            )
        return with_deviations(summary, measured)

    def draw(self, summary: dict[str, Any], folder: Path, data: str) -> list[Path]:
        from importlib.util import find_spec

        from lab.inspection.deviation_report import draw_deviation

        return [] if find_spec("matplotlib") is None else draw_deviation(summary, folder, data=data)

    def show(self, summary: dict[str, Any]) -> None:
        from lab.inspection import deviation_report as report

        if any(method.get("deviation") for method in summary["methods"]):
            console().print(report.table(summary))
            console().print()
        for line in report.notes(summary):
            say(f"note: {line}")


def train(
    out: Path = option(..., "Folder of checkpoint, history and model.", panel=None),
    seed: int = option(1, "Of weights and draws.", least=0, most=MOST_SEED, panel=None),
    threads: int = option(0, "CPU threads; 0: one per core.", least=0, most=4096, panel=None),
    device: str | None = option(None, "Default: CUDA if available.", panel=None),
    shorten: int = option(1, "Divide all step counts by this, to try it.", least=1, most=1_000_000, panel=None),
) -> None:
    """Trains the model that ships, from scratch. The same command goes on from where it was interrupted.

    A stage that misses its goal is extended, then restarted once; if it misses it again, training fails: exit code 2.
    """
    from lab.nano.train import train

    train(out, seed, threads, device, shorten)
