"""The lab's command line: `python -m lab NAME`; parses options, what is measured, and how, is in the other folders."""

from collections.abc import Callable, Sequence

from cacheblend.cli.help import App
from cacheblend.cli.program import run_program
from lab.cli import cuda, evaluation, paper, servers, speed, suite

COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Prefill": (speed.core, speed.controller, cuda.cuda, speed.peers),
    "Stores": (speed.match, speed.load, speed.store, speed.evict, speed.sync),
    "Servers": (servers.serve, servers.routing, servers.agent),
    "Answers": (
        speed.real,
        speed.orders,
        speed.adapt,
        speed.edits,
        speed.codecs,
        suite.suite,
        paper.paper,
        evaluation.inspect,
        evaluation.train,
    ),
}
"""By the panel of the help that shows them."""

app = App(
    name="lab",
    help="How the figures in docs/results are made, and measured again on this machine. "
    "Where neither --model nor --shape is given: random weights of the shape qwen2.5-0.5b.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
vllm_app = App(help="vLLM with the plug-in, and without; vLLM must be installed beside this package.")

for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(command.__name__.replace("_", "-"), rich_help_panel=panel)(command)
app.add_typer(vllm_app, name="vllm", rich_help_panel="Servers")
for command in (
    servers.vllm_ttft,
    servers.vllm_latency,
    servers.vllm_timeline,
    servers.vllm_replay,
    servers.vllm_faults,
):
    vllm_app.command(command.__name__.removeprefix("vllm_"))(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `run_program`."""
    run_program(app, "python -m lab", arguments)
