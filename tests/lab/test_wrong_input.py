"""Wrong invocations of the lab, as those of `cacheblend`."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaign import share
from command_line import Run, runner
from lab.cli import app, main
from wrong_invocations import WRONG_LAB, check, check_junk, commands_of, filled, places

__all__ = ["places"]  # a fixture
CASES = [(line.split(" "), kind) for kind, lines in WRONG_LAB.items() for line in lines]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the lab in this process, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return runner(capsys, main=main)


def test_every_command_is_among_them() -> None:
    shown = {tuple(arguments[:length]) for arguments, _ in CASES for length in (1, 2)}
    assert {names for names, _ in commands_of(app)} <= shown


@pytest.mark.parametrize(("arguments", "kind"), CASES, ids=[f"{k}: {' '.join(a)[-50:]}" for a, k in CASES])
def test_a_wrong_invocation_is_one_line(
    run: Run, places: dict[str, str], tmp_path: Path, arguments: list[str], kind: str
) -> None:
    (tmp_path / "empty").mkdir()
    result = run(*filled(arguments, places, tmp_path / "empty"))
    check(result.code, result.out, result.err)
    assert not list((tmp_path / "here").iterdir())


def test_an_error_names_the_lab(run: Run) -> None:
    assert "see python -m lab vllm --help" in run("vllm", "nonsense").err


@pytest.mark.parametrize("line", ["ttft", "latency", "replay --trace {tmp}"])
def test_without_vllm_its_benchmarks_end_before_they_make_weights(
    run: Run, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr("lab.servers.vllm_server.find_spec", lambda name: None)
    monkeypatch.setattr("lab.servers.vllm_server.build_shape", lambda *_, **__: pytest.fail("made weights"))
    result = run("vllm", *filled(line.split(" "), places, tmp_path))
    check(result.code, result.out, result.err)
    assert "make vllm" in result.err


@pytest.mark.parametrize("arguments", [[], ["vllm"]])
def test_a_group_without_a_command_shows_its_help_and_is_no_success(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "Usage: python -m lab" in capsys.readouterr().out


@settings(max_examples=share(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_junk_in_any_option_is_no_traceback(capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    check_junk(app, main, capsys, data)
