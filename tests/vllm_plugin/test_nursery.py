"""What stands in for the interpreter in these tests does as it does: everything else here rests on it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 120


def ran(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=LIMIT_S, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("way", ["-c", "-m", "a file", "with options"])
def test_arguments_environment_folder_and_files_are_those_of_the_caller(way: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; print(sys.argv[1:], os.environ['SAID'], os.getcwd(), sys.stdin.read(), 'vllm' in sys.modules)"
    )
    (tmp_path / "program.py").write_text(f"{code}\nassert __name__ == '__main__'\nprint('no', file=sys.stderr)\n")
    start = {
        "-c": ["-c", f"{code}; print('no', file=sys.stderr)"],
        "-m": ["-m", "program"],
        "a file": [str(tmp_path / "program.py")],
        "with options": ["-B", "-X", "utf8", "-Wignore", "-m", "program"],
    }[way]
    found = ran(*start, "one", "two", input="in", env={**os.environ, "SAID": "yes"}, cwd=tmp_path)
    assert (found.stdout, found.stderr) == (f"['one', 'two'] yes {tmp_path} in True\n", "no\n")
    assert found.returncode == 0


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('words')", 1),
        ("raise ValueError('words')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_it_ends_as_its_program_does(code: str, ended: int) -> None:
    found = ran("-c", code)
    assert found.returncode == ended and ("words" in found.stderr) == ("words" in code)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_and_what_it_started_end_with_it(how: signal.Signals) -> None:
    """SIGTERM is the program's to take; killed, it can say nothing, nor can the program that it had started."""
    code = (
        "import multiprocessing, os, signal, sys, time\n"
        "def end(*_): child.kill(); child.join(); print('taken', flush=True); sys.exit(5)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(100,))\n"
        "    child.start()\n"
        "    signal.signal(signal.SIGTERM, end)\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(100)\n"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdout is not None
    program = int(started.stdout.readline())
    os.killpg(started.pid, how)
    assert started.wait(LIMIT_S) == (5 if how == signal.SIGTERM else -how)
    assert started.stdout.read() == ("taken\n" if how == signal.SIGTERM else "")  # all that held the file have ended
    end = time.monotonic() + LIMIT_S
    while Path(f"/proc/{program}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
