"""The command line. Knows typer and rich; everything heavy is imported by the command that needs it.

Exit codes: 0 done, 1 the answer is no (`doctor`, `store verify`), 2 a user's error, in one line. What a user gave wrong
is an `InvalidInputError` that names it, wherever it is found.
"""

from collections.abc import Sequence

import typer

from cacheblend.cli import ask, bench, calibrate, demo, doctor, evaluate, keys, plan, serve, store, sync, warm
from cacheblend.cli.help import App
from cacheblend.cli.program import run_program

app = App(
    name="cacheblend",
    help="Store a passage's KV cache once, reuse it anywhere in any prompt.",
    epilog="New here? Try `cacheblend demo`: it needs no model.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

FIRST, DAILY, MEASURE = "See whether it fits", "Use it", "Measure it"

app.command("demo", rich_help_panel=FIRST)(demo.demo)
app.command("doctor", rich_help_panel=FIRST)(doctor.doctor)
app.command("warm", rich_help_panel=DAILY)(warm.warm)
app.command("sync", rich_help_panel=DAILY)(sync.sync)
app.command("calibrate", rich_help_panel=DAILY)(calibrate.calibrate)
app.command("plan", rich_help_panel=MEASURE)(plan.plan)
app.command("ask", rich_help_panel=DAILY)(ask.ask)
app.command("serve", rich_help_panel=DAILY)(serve.serve)
app.add_typer(keys.app, name="keys", rich_help_panel=DAILY)
app.add_typer(store.app, name="store", rich_help_panel=DAILY)
app.command("evaluate", rich_help_panel=MEASURE)(evaluate.evaluate)
app.add_typer(bench.app, name="bench", rich_help_panel=MEASURE)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", "-V", help="Show the version and exit.")) -> None:
    if version:
        from cacheblend import __version__

        typer.echo(f"cacheblend {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `run_program`."""
    run_program(app, "cacheblend", arguments)
