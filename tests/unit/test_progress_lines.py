"""Where a command is, on stderr: without a terminal a line every few seconds, also while nothing moves."""

import time
from collections.abc import Callable

import pytest
import typer

from cacheblend.cli import output


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Waits until a text is on stderr; returns all since the last one."""
    monkeypatch.setattr(output, "EVERY_S", 0.02)

    def wait(text: str) -> str:
        found, end = "", time.monotonic() + 60
        while text not in found and time.monotonic() < end:
            time.sleep(0.01)
            found += capsys.readouterr().err
        assert text in found
        return found

    return wait


def test_stages_say_where_they_are_while_they_last(shown: Callable[[str], str]) -> None:
    titles = {"warming": "warming, passages", "answering": "answering, rows", "never": "never"}
    with output.stages(titles, quiet=False) as advance:
        advance("warming", 1, 3)
        assert "warming, passages 1/3 (0 s)\n" in shown("1/3")
        shown("1/3")  # again: it takes long
        advance("warming", 3, 3)
        advance("answering", 2, 5)
        shown("answering, rows 2/5")
    assert shown("answering").endswith("warming, passages 3/3\nanswering, rows 2/5\n")


def test_a_status_says_what_is_done(shown: Callable[[str], str]) -> None:
    with output.status("examining ...", quiet=False) as say:
        shown("examining ... (")
        say("done: a [check]")
        shown("examining ... done: a [check] (")


def test_errors_and_quiet_commands_leave_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), output.progress("warming", "passages", quiet=False) as advance:
        advance(1, 2)
        raise typer.Exit
    with output.progress("warming", "passages", quiet=True) as advance, output.status("x", quiet=True) as say:
        advance(1, 2)
        say("y")
    assert capsys.readouterr().err == ""
