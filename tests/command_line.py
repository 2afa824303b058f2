"""Runs the command line in the process of the tests that look at it."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import typer

from cacheblend import cli


@dataclass
class Result:
    """A finished run."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]
made_once = cache(typer.main.get_command)
"""All commands with their options take much longer to make than most runs take."""


def runner(capsys: pytest.CaptureFixture[str], *always: str, main: Callable[[list[str]], None] = cli.main) -> Run:
    """A call of it is a run with these arguments, `always` in front, of `main`; a traceback fails the test."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        root = logging.getLogger()
        before = root.handlers[:], root.level
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("typer.main.get_command", made_once)
                main([*always, *(str(argument) for argument in arguments)])
            code = 0
        except SystemExit as leave:
            code = int(leave.code or 0)
        finally:  # a server's log would go on, to a stream that is closed
            root.handlers[:], root.level = before
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Result(code, captured.out, captured.err)

    return call
