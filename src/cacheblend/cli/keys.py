"""`cacheblend keys`: API keys of a server, hashed in a file."""

from pathlib import Path
from typing import Annotated

import typer

from cacheblend.cli.help import App
from cacheblend.cli.option_groups import option
from cacheblend.core.errors import InvalidInputError
from cacheblend.serve.keys import add_key, read_keys, remove_key

app = App(help="API keys of a server, hashed in a file.")

KeyFile = Annotated[Path, option(..., "File of the keys.", "-f")]
Name = Annotated[str, typer.Argument(help="Name of the key, for logs.")]
DEFAULT = Path("keys.json")


@app.command("add")
def add(name: Name, file: KeyFile = DEFAULT) -> None:
    """Make a key and print it; it is not shown again. A running server that has the file accepts it within a second."""
    check_file(file, is_new=True)
    typer.echo(add_key(file, name))


@app.command("rm")
def remove(name: Name, file: KeyFile = DEFAULT) -> None:
    """Revoke a key."""
    check_file(file)
    remove_key(file, name)


@app.command("ls")
def list_names(file: KeyFile = DEFAULT) -> None:
    """List the names of the keys, each with the label that the server's metrics have for it."""
    check_file(file)
    for key in read_keys(file):
        typer.echo(f"{key.name}\t{key.label}")


def check_file(file: Path, *, is_new: bool = False) -> None:
    """Refuses a folder, an empty file, and one that is not there, unless it `is_new`, with `InvalidInputError`."""
    if not file.exists() and not is_new:
        raise InvalidInputError(f"there is no file {file}; make one with `cacheblend keys add NAME --file {file}`")
    if file.is_dir():
        raise InvalidInputError(f"{file} is a folder; name a file, e.g. {file / 'keys.json'}")
    if file.is_file() and file.stat().st_size == 0:
        raise InvalidInputError(f"{file} is empty and has no keys; delete it, or name another file")
