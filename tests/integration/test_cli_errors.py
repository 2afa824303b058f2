"""Errors of the command line: a user's and the system's are one line, or JSON; ports that cannot be listened on."""

import errno
import os
import socket
from pathlib import Path

import pytest

from cacheblend.cli.output import error_text
from cacheblend.core.errors import InvalidInputError
from cli_passages import build_model, write_rows
from command_line import Run, runner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("cli") / "tiny-llama")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process."""
    monkeypatch.setenv("COLUMNS", "120")
    return runner(capsys)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.json")


TINY = ("bench", "ttft", "--shape", "tiny", "--chunks", 2, "--chunk-tokens", 8, "--question-tokens", 2, "--runs", 1)
LEVELS = ("--check-layers", "1,2")
BAD = [
    (["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", "{tmp}/none.json"], "none.json cannot be read"),
    (["warm", "-m", "{model}", "-s", "memory", "-d", "{data}"], "ends with this command"),
    (["warm", "-m", "{tmp}/none", "-s", "{tmp}/s", "-d", "{data}"], "is no folder"),
    (["warm", "-m", "{tmp}", "-s", "{tmp}/s", "-d", "{data}"], "config.json"),
    (["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", "{data}", "--anchor", "x"], "anchor must be one of"),
    (
        ["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", "{data}", "--block-size", "0"],
        "--block-size: 0 is out of range, 1..",
    ),
    (["ask", "-m", "{model}", "-s", "memory"], "no question"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-r", "1.5"], "0..1, got 1.5"),
    (["ask", "-m", "{model}", "-s", "gs://x", "-q", "?"], "gs"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--selector", "best"], "'best'"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--check-layers", "9"], "check layer 9"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-r", "0.5,0.2"], "2 ratios need as many"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", *LEVELS, "-r", "0.2,0.5"], "must not rise"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", *LEVELS, "-r", "1,0", "--selector", "head"], "hkvd"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--selector", "threshold"], "needs a bound"),
    (["ask", "-m", "{model}", "-s", "{data}", "-q", "?"], "is not a folder"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", "@{tmp}/[/b]"], "[/b]: the file cannot be read"),
    (["store", "ls", "{data}"], "is not a folder"),
    (["store", "ls", "{tmp}/none [/b]"], "none [/b]: check the path"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--dtype", "int8"], "int8"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--device", "moon"], "moon"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-n", "0"], "--max-tokens: 0 is out of range, 1.."),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", ""], "-p: the value is empty"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", "@{tmp}/none"], "cannot be read"),
    (["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--chat"], "no chat template"),
    (["ask", "-m", "{model}", "-s", "memory", "-d", "{data}", "--row", "7"], "rows 0..0, not 7"),
    (["ask", "-m", "{model}", "-s", "memory", "-p", "word " * 900, "-q", "?"], "context"),
    (["store", "stat", "memory"], "name a folder"),
    (["store", "prune", "{tmp}", "--max-bytes", "much"], "not a size"),
    (["doctor"], "--model"),
    (["doctor", "--shape", "round"], "no shape is called"),
    (["bench", "ttft"], "model"),
    (["bench", "ttft", "--shape", "tiny", "--json-file", "{tmp}/no/r.json"], "no folder"),
    (["bench", "ttft", "--shape", "tiny", "--json-file", "{tmp}"], "it is a folder"),
    (["bench", "ttft", "--shape", "tiny", "--plot", "x.png"], "give --sweep"),
    (["bench", "ttft", "--shape", "tiny", "--sweep", "ratio", "--plot", "{tmp}/x.txt"], "'x.txt'"),
    (["bench", "ttft", "--shape", "tiny", "--sweep", "time"], "'time'"),
    (["bench", "ttft", "--shape", "tiny", "--chunks", "100"], "51264 tokens"),
    (["demo", "--ratio", "2"], "0..1"),
    (["demo", "--plot", "{tmp}/x.txt"], "'x.txt'"),
    (["demo", "--plot", "{tmp}/no/x.png"], "no folder"),
    (["demo", "--keep", "{tmp}"], "exists already"),
    (["demo", "--keep", "{data}/kept"], "the folder cannot be made: Not a directory"),
]


@pytest.mark.parametrize(("command", "message"), BAD, ids=[" ".join(c[:1] + c[-2:])[:40] for c, _ in BAD])
def test_a_users_error_is_one_line(
    run: Run, model: Path, data: Path, tmp_path: Path, command: list[str], message: str
) -> None:
    filled = [part.format(model=model, data=data, tmp=tmp_path) for part in command]
    result = run(*filled)
    assert result.code == 2
    assert result.out == ""
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_the_systems_errors_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/x/[/b]")

    monkeypatch.setattr("cacheblend.bench.ttft.run", full)
    result = run(*TINY)
    assert result.code == 2
    assert result.err == "error: /x/[/b]: No space left on device\n"
    assert error_text(OSError(5, "Input/output error")) == "Input/output error"
    assert error_text(OSError("said so")) == "said so"
    assert error_text(OSError()) == "OSError"


def test_what_cannot_be_written_is_said_before_the_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend.bench.ttft.run", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # as root, everything may be written
    result = run(*TINY, "--json-file", tmp_path / "r.json")
    assert result.code == 2
    assert result.err == f"error: {tmp_path / 'r.json'} cannot be written: permission denied\n"


def test_errors_as_json(run: Run, tmp_path: Path) -> None:
    result = run("ask", "-m", tmp_path / "none", "-s", "memory", "-q", "?", "--json")
    assert result.code == 2
    assert "is no folder" in result.json["error"]
    assert result.err == ""


def test_a_wrong_option_is_typers_to_explain(run: Run) -> None:
    result = run("warm", "--nonsense")
    assert result.code == 2
    assert "--nonsense" in result.err


# ---- addresses --------------------------------------------------------------------------------------------


def test_a_port_that_another_server_took_meanwhile_is_an_error_before_any_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both may bind a port while neither listens; the second must not say that it serves."""
    from cacheblend.cli import serve
    from cacheblend.serve.settings import ServeSettings

    monkeypatch.setattr("cacheblend.serve.app.create_app", lambda engine, settings: None)
    with serve.bind("127.0.0.1", 0) as (first,):
        port = first.getsockname()[1]
        with serve.bind("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(InvalidInputError, match=f"--port {port}: the server cannot listen there"):
                serve._run(None, ServeSettings(), "127.0.0.1", second)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


def test_a_host_of_several_addresses_is_served_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.cli import serve

    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", 0)) for n in (1, 2, 1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with serve.bind("several", 0) as sockets:
        names = [bound.getsockname() for bound in sockets]
    assert [address for address, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1
    assert all(bound.fileno() == -1 for bound in sockets)
