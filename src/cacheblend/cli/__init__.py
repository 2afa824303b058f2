"""The command line. Knows typer and rich; everything heavy is imported by the command that needs it.

Exit codes: 0 done, 1 the answer is no (`doctor`, `store verify`), 2 a user's error, in one line.
"""

import sys
from collections.abc import Sequence

import typer

from cacheblend.cli import ask, calibrate, demo, doctor, evaluate, inspect, keys, plan, serve, store, sync, warm
from cacheblend.cli.bench import app as bench_app
from cacheblend.cli.errors import empty_value, invalid_text, is_help, is_usage_error, usage_text
from cacheblend.cli.help import App
from cacheblend.cli.option_groups import with_groups
from cacheblend.cli.output import error_text, print_error
from cacheblend.cli.waiting import bound_waiting

ERROR = 2

app = App(
    name="cacheblend",
    help="Store a passage's KV cache once, reuse it anywhere in any prompt.",
    epilog="New here? Try `cacheblend demo`: it needs no model.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

FIRST, DAILY, MEASURE = "See whether it fits", "Use it", "Measure it"

app.command("demo", rich_help_panel=FIRST)(with_groups(demo.demo))
app.command("doctor", rich_help_panel=FIRST)(with_groups(doctor.doctor))
app.command("warm", rich_help_panel=DAILY)(with_groups(warm.warm))
app.command("sync", rich_help_panel=DAILY)(with_groups(sync.sync))
app.command("calibrate", rich_help_panel=DAILY)(with_groups(calibrate.calibrate))
app.command("plan", rich_help_panel=MEASURE)(with_groups(plan.plan))
app.command("ask", rich_help_panel=DAILY)(with_groups(ask.ask))
app.command("serve", rich_help_panel=DAILY)(with_groups(serve.serve))
app.add_typer(keys.app, name="keys", rich_help_panel=DAILY)
app.add_typer(store.app, name="store", rich_help_panel=DAILY)
app.command("evaluate", rich_help_panel=MEASURE)(with_groups(evaluate.evaluate))
app.command("inspect", rich_help_panel=MEASURE)(with_groups(inspect.inspect))
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", "-V", help="Show the version and exit.")) -> None:
    if version:
        from cacheblend import __version__

        typer.echo(f"cacheblend {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. A user's error, or the system's, is one line on stderr and exit code 2.

    With ``--json`` the error is an object on stdout instead; arguments that do not parse are always a line on stderr.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    bound_waiting()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if problem := empty_value(arguments) or invalid_text(arguments):
        _leave(problem)
    code = 0
    try:
        code = app(arguments, prog_name="cacheblend", standalone_mode=False)
    except Exception as error:
        from cacheblend.core.errors import CacheBlendError

        if is_help(error):
            typer.echo(error)
            sys.exit(ERROR)
        elif is_usage_error(error):
            _leave(usage_text(error, arguments))
        elif isinstance(error, CacheBlendError | OSError):
            _leave(error_text(error), as_json="--json" in arguments)
        else:
            raise
    if code:
        sys.exit(code)


def _leave(message: str, *, as_json: bool = False) -> None:
    print_error(message, as_json=as_json)
    sys.exit(ERROR)
