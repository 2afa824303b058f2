"""The command line. Knows typer and rich; everything heavy is imported by the command that needs it.

Exit codes: 0 done, 1 the answer is no (`doctor`, `store verify`), 2 a user's error, in one line.
"""

import sys
from collections.abc import Sequence

import typer

from cacheblend.cli import ask, bench, bench_vllm, calibrate, demo, doctor, evaluate, inspect, plan, serve, store, warm
from cacheblend.cli.output import error_text, print_error

ERROR = 2
WRITES_JSON = (["bench"], ["evaluate"])  # there --json names a file

app = typer.Typer(
    name="cacheblend",
    help="Store a passage's KV cache once, reuse it anywhere in any prompt.",
    epilog="New here? Try [bold]cacheblend demo[/bold]: it needs no model.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

FIRST, DAILY, MEASURE = "See whether it fits", "Use it", "Measure it"

app.command("demo", rich_help_panel=FIRST)(demo.demo)
app.command("doctor", rich_help_panel=FIRST)(doctor.doctor)
app.command("warm", rich_help_panel=DAILY)(warm.warm)
app.command("calibrate", rich_help_panel=DAILY)(calibrate.calibrate)
app.command("plan", rich_help_panel=MEASURE)(plan.plan)
app.command("ask", rich_help_panel=DAILY)(ask.ask)
app.command("serve", rich_help_panel=DAILY)(serve.serve)
app.add_typer(serve.keys_app, name="keys", rich_help_panel=DAILY)
app.add_typer(store.app, name="store", rich_help_panel=DAILY)
app.command("evaluate", rich_help_panel=MEASURE)(evaluate.evaluate)
app.command("inspect", rich_help_panel=MEASURE)(inspect.inspect)
bench.app.add_typer(bench_vllm.app, name="vllm")
app.add_typer(bench.app, name="bench", rich_help_panel=MEASURE)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", "-V", help="Show the version and leave.")) -> None:
    if version:
        from cacheblend import __version__

        typer.echo(f"cacheblend {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a user's error, or the system's, is one line (with ``--json`` an object), exit code 2.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(arguments)
    except Exception as error:
        from cacheblend.core.errors import CacheBlendError

        if not isinstance(error, CacheBlendError | OSError):
            raise
        print_error(error_text(error), as_json="--json" in arguments and arguments[:1] not in WRITES_JSON)
        sys.exit(ERROR)
