"""`lab evaluate`: as `cacheblend evaluate`, and deviation inside the model. `lab train`: the model that ships."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from lab.settings import count, named, needed

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
    """Deviations on `count` rows of the methods that load KV at new positions; see `Further`."""

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
    out: Annotated[Path, needed("--out", text="Folder of checkpoint, history and model.", panel=None)],
    seed: Annotated[int, count("--seed", "Of weights and draws.", 0, MOST_SEED, None)] = 1,
    threads: Annotated[int, count("--threads", "CPU threads; 0: one per core.", 0, 4096, None)] = 0,
    device: Annotated[str | None, named("--device", "Default: CUDA if available.", None)] = None,
    shorten: Annotated[int, count("--shorten", "Divide all step counts by this, to try it.", 1, 1_000_000, None)] = 1,
) -> None:
    """Trains the model that ships, from scratch. The same command goes on from where it was interrupted.

    A stage that misses its goal is extended, then restarted once; if it misses it again, training fails: exit code 2.
    """
    from lab.nano.train import train

    train(out, seed, threads, device, shorten)
