"""`cacheblend keys`: API keys of a server, hashed in a file."""

from pathlib import Path
from typing import Annotated

import typer

from cacheblend.cli.help import App
from cacheblend.cli.option_groups import with_groups

app = App(help="API keys of a server, hashed in a file.")

KeyFile = Annotated[Path, typer.Option("--file", "-f", help="File of the keys.")]
Name = Annotated[str, typer.Argument(help="Name of the key, for logs.", show_default=False)]
DEFAULT = Path("keys.json")


@app.command("add")
@with_groups
def add(name: Name, file: KeyFile = DEFAULT) -> None:
    """Make a key and print it; it is not shown again. A running server that has the file accepts it within a second."""
    from cacheblend.serve.keys import add_key

    check_form(file)
    typer.echo(add_key(file, name))


@app.command("rm")
@with_groups
def remove(name: Name, file: KeyFile = DEFAULT) -> None:
    """Revoke a key."""
    from cacheblend.serve.keys import remove_key

    check_file(file)
    remove_key(file, name)


@app.command("ls")
@with_groups
def list_names(file: KeyFile = DEFAULT) -> None:
    """List the names of the keys, each with the label that the server's metrics have for it."""
    from cacheblend.serve.keys import read_keys

    check_file(file)
    for key in read_keys(file):
        typer.echo(f"{key.name}\t{key.label}")


def check_file(file: Path) -> None:
    """Refuses a file of keys that is not there.

    Raises:
        InvalidInputError: there is none, or as `check_form`.
    """
    from cacheblend.core.errors import InvalidInputError

    if not file.exists():
        raise InvalidInputError(f"there is no file {file}; make one with `cacheblend keys add NAME --file {file}`")
    check_form(file)


def check_form(file: Path) -> None:
    """Refuses what cannot be a file of keys.

    Raises:
        InvalidInputError: it is a folder, or an empty file.
    """
    from cacheblend.core.errors import InvalidInputError

    if file.is_dir():
        raise InvalidInputError(f"{file} is a folder; name a file, e.g. {file / 'keys.json'}")
    if file.is_file() and file.stat().st_size == 0:
        raise InvalidInputError(f"{file} is empty and has no keys; delete it, or name another file")
