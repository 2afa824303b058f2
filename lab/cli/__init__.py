"""The lab's command line: `python -m lab NAME`; parses options, what is measured, and how, is in the other folders."""

from collections.abc import Sequence

from cacheblend.cli.bench import ttft
from cacheblend.cli.help import App
from cacheblend.cli.program import run_program
from lab.cli import agents, evaluate, gpu, inspect, paper, prefill, quality, routing, servers, stores, suite, train

app = App(
    name="lab",
    help="How the figures in docs/results are made, and measured again on this machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
vllm_app = App(help="vLLM with the plug-in, and without; vLLM must be installed beside this package.")

PREFILL, STORES, SERVERS, QUALITY = "Prefill", "Stores", "Servers", "Answers"

app.command("ttft", rich_help_panel=PREFILL)(ttft)
app.command("memory", rich_help_panel=PREFILL)(prefill.memory)
app.command("controller", rich_help_panel=PREFILL)(prefill.controller)
app.command("core", rich_help_panel=PREFILL)(prefill.core)
app.command("cuda", rich_help_panel=PREFILL)(gpu.cuda)
app.command("plan", rich_help_panel=STORES)(stores.plan)
app.command("match", rich_help_panel=STORES)(stores.match)
app.command("load", rich_help_panel=STORES)(stores.load)
app.command("store", rich_help_panel=STORES)(stores.store)
app.command("evict", rich_help_panel=STORES)(stores.evict)
app.command("sync", rich_help_panel=STORES)(stores.sync)
app.command("serve", rich_help_panel=SERVERS)(servers.serve)
app.command("routing", rich_help_panel=SERVERS)(routing.routing)
app.command("agent", rich_help_panel=SERVERS)(agents.agent)
app.command("peers", rich_help_panel=PREFILL)(agents.peers)
app.command("codecs", rich_help_panel=QUALITY)(quality.codecs)
app.command("random-shapes", rich_help_panel=QUALITY)(quality.random_shapes)
app.command("suite", rich_help_panel=QUALITY)(suite.suite)
app.command("paper", rich_help_panel=QUALITY)(paper.paper)
app.command("evaluate", rich_help_panel=QUALITY)(evaluate.evaluate)
app.command("inspect", rich_help_panel=QUALITY)(inspect.inspect)
app.command("train", rich_help_panel=QUALITY)(train.train)
app.add_typer(vllm_app, name="vllm", rich_help_panel=SERVERS)

vllm_app.command("ttft")(servers.vllm_ttft)
vllm_app.command("latency")(servers.vllm_latency)
vllm_app.command("shadow")(servers.vllm_shadow)
vllm_app.command("replay")(servers.vllm_replay)
vllm_app.command("faults")(servers.vllm_faults)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `run_program`.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    run_program(app, "python -m lab", arguments)
