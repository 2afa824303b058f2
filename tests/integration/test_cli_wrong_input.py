"""Errors of the command line: wrong invocations of every command, the system's errors, addresses that are taken.

Exit code 2, one line on stderr, nothing on stdout, no traceback.

What is named in braces is as in `wrong_invocations`.
"""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend.cli import app, main, serve
from cacheblend.cli.program import error_text
from cacheblend.core.errors import InvalidInputError
from cacheblend.serve.settings import ServeSettings
from campaign import rotating, share
from command_line import Run, runner
from wrong_invocations import SAID, WRONG, check, check_junk, commands_of, filled, places

__all__ = ["places"]  # a fixture
TINY = ("bench", "ttft", "--shape", "tiny", "--chunks", 2, "--chunk-tokens", 8, "--question-tokens", 2, "--runs", 1)

EMPTY = [
    ["ask", "-m", "", "-s", "memory", "-q", "?"],
    ["ask", "-m", "{model}", "-s", "", "-q", "?"],
    ["ask", "-m", "{model}", "-s", "memory", "-q", ""],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", ""],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--device="],
    ["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", ""],
    ["keys", "add", ""],
    ["keys", "add", "a b\x1b[2J", "--file", ""],
    ["store", "ls", ""],
    [""],
    ["serve", "-m", "{model}", "--host", ""],
    ["evaluate", "-m", "{model}", "-d", "{data}", "--methods", ","],
    ["bench", "ttft", "--shape", "tiny", "--arms", " "],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", "word " * 900],
    ["store", "ls", "none\udcff"],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "Why?", "-p", "\udcff"],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "Why?", "--salt=\udcff"],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "Why?", "--json", "-p", "a\ud800b" * 200],
    ["warm", "-m", "{model}", "-s", "{tmp}/\udcff", "-d", "{data}"],
    ["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", "{surrogate}"],
    ["evaluate", "-m", "{model}", "-d", "{surrogate}"],
    ["ask", "-m", "{model}", "-s", "memory", "-d", "{surrogate}"],
    ["ask", "-m", "a\x00b", "-s", "memory", "-q", "?"],
]
ODD = {
    "ask -m {model} -s memory -q Why? -p \udcff": "argument 9, '\\udcff', has bytes that are not UTF-8",
    "ask -m {model} -s memory -d {surrogate}": "row 0, passages[1], field 'text': the text has a lone surrogate at",
}
"""What the line says of some of these."""
LINES = {"said": [line for line in SAID if not line.endswith(" ")]} | WRONG
CASES = [(line.split(" "), kind) for kind, lines in LINES.items() for line in lines] + [(each, "odd") for each in EMPTY]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command line in this process, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return runner(capsys)


def test_there_are_enough_of_them_and_every_command_is_among_them() -> None:
    assert len(CASES) >= 120
    assert len({tuple(arguments) for arguments, _ in CASES}) == len(CASES)
    assert {names for names, _ in commands_of(app)} <= {
        tuple(arguments[:length]) for arguments, _ in CASES for length in (1, 2, 3)
    }


@pytest.mark.parametrize(("arguments", "kind"), CASES, ids=[f"{k}: {' '.join(a)[-50:]}" for a, k in CASES])
def test_a_wrong_invocation_is_one_line(
    run: Run, places: dict[str, str], tmp_path: Path, arguments: list[str], kind: str
) -> None:
    (tmp_path / "empty").mkdir()
    result = run(*filled(arguments, places, tmp_path / "empty"))
    check(result.code, result.out, result.err)
    if said := (SAID | ODD).get(" ".join(arguments)):
        assert said in result.err
        assert "Error(" not in result.err and "('" not in result.err
    assert not list((tmp_path / "here").iterdir())


IN_A_PROCESS = ["ask -m {model} -s gs://x -q ?", "serve -m {model} --port {busy}", "bench ttft --threads 0"]


@pytest.mark.parametrize("line", rotating([*IN_A_PROCESS, "store ls {tmp}/a"], core=["store ls {tmp}/a"]))
def test_the_same_in_a_process(places: dict[str, str], tmp_path: Path, line: str) -> None:
    program = [sys.executable, "-c", "from cacheblend.cli import main; main()"]
    arguments = filled(line.split(" "), places, tmp_path)
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, cwd=tmp_path)
    check(done.returncode, done.stdout, done.stderr)


def test_a_port_of_zero_is_told_as_the_one_that_was_taken(
    run: Run, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: seen.append(sockets[0].getsockname()[1]))
    result = run("serve", "-m", places["model"], "--port", 0)
    assert f"http://127.0.0.1:{seen[0]}/v1" in result.err


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("config.json", '"hidden_size": "wide"', "'hidden_size' expected int"),
        ("config.json", '"vocab_size": 290', "the weights do not fit config.json"),
        ("config.json", '"model_type": "unheard"', "model type `unheard`"),
        ("tokenizer.json", "{", "has no tokenizer that transformers can open"),
        ("model.safetensors", "x", "has no readable header of tensors"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(
    run: Run, places: dict[str, str], tmp_path: Path, file: str, text: str, reason: str
) -> None:
    model = Path(shutil.copytree(places["model"], tmp_path / "model"))
    config = (model / file).read_bytes()
    changed = json.loads(config) | json.loads(f"{{{text}}}") if file == "config.json" else None
    (model / file).write_text(text if changed is None else json.dumps(changed))
    result = run("ask", "-m", model, "-s", "memory", "-q", "Why?", "-p", "text")
    check(result.code, result.out, result.err)
    assert reason.lower() in result.err.lower()
    assert "with_tokenizer" not in result.err and "above report" not in result.err


@pytest.mark.parametrize(
    ("command", "wrong"), [("plan", "load only what"), ("bench ttft", "evaluate also"), ("evaluate", "bench ttft")]
)
def test_help_speaks_of_its_own_command(run: Run, command: str, wrong: str) -> None:
    assert wrong not in " ".join(run(*command.split(" "), "--help").out.replace("│", " ").split())


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


def test_a_port_that_another_server_took_meanwhile_is_an_error_before_any_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both may bind a port while neither listens; the second must not say that it serves."""
    monkeypatch.setattr("cacheblend.serve.app.create_app", lambda engine, settings: None)
    with serve.bind("127.0.0.1", 0) as (first,):
        port = first.getsockname()[1]
        with serve.bind("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(InvalidInputError, match=f"--port {port}: the server cannot listen there"):
                serve._run(None, ServeSettings(), "127.0.0.1", second)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


def test_a_host_of_several_addresses_is_served_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", 0)) for n in (1, 2, 1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with serve.bind("several", 0) as sockets:
        names = [bound.getsockname() for bound in sockets]
    assert [address for address, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1
    assert all(bound.fileno() == -1 for bound in sockets)


@settings(max_examples=share(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_junk_in_any_option_is_no_traceback(capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    check_junk(app, main, capsys, data)
