"""How OpenMP's threads wait: bounded by the command line before torch is loaded; a warning where they spin in vain."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines import waiting
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.waiting import BOUNDED, BusyWarning, Moment
from families import tiny_model

PROGRAM = """
import json, os, sys
from cacheblend.cli import main
main(["--version"])
found = {k: v for k, v in os.environ.items() if k.startswith(("OMP", "GOMP", "KMP"))}
print(json.dumps(["torch" in sys.modules, found]))
"""


def environment_of_the_command_line(**chosen: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP", "GOMP", "KMP"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept | chosen, capture_output=True, text=True, check=True
    )
    has_torch, found = json.loads(done.stdout.splitlines()[-1])
    assert not has_torch
    return found


def test_the_command_line_bounds_how_long_threads_spin() -> None:
    assert environment_of_the_command_line(OMP_NUM_THREADS="2") == {"OMP_NUM_THREADS": "2", **BOUNDED}


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "200"}])
def test_the_users_own_choice_stands(chosen: dict[str, str]) -> None:
    assert environment_of_the_command_line(**chosen) == chosen


def test_nothing_is_set_once_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have no effect here, and one on other programs."""
    for name in (*BOUNDED, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    waiting.bound_waiting()
    assert not waiting.is_chosen(os.environ)
    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items() if name != "torch"})
    monkeypatch.setattr(os, "environ", environment := dict[str, str]())
    waiting.bound_waiting()
    assert environment == BOUNDED


@pytest.mark.parametrize(
    ("threads", "seconds", "interruptions", "environment", "warnings"),
    [
        (2, 1.0, 200, {}, 1),
        (2, 1.0, 5, {}, 0),
        (1, 1.0, 200, {}, 0),
        (2, 0.01, 10, {}, 0),
        (2, 1.0, None, {}, 0),
        (2, 1.0, 200, {"GOMP_SPINCOUNT": "100"}, 0),
    ],
)
def test_it_warns_once_where_threads_are_interrupted(
    threads: int,
    seconds: float,
    interruptions: int | None,
    environment: dict[str, str],
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    busy = BusyWarning()
    for began in (0, 5):
        busy.check(
            Moment(began, None if interruptions is None else 7),
            threads,
            Moment(began + seconds, None if interruptions is None else 7 + interruptions),
        )
    assert len(caplog.records) == warnings


def test_an_engine_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = iter(range(1000))
    monkeypatch.setattr(Moment, "now", classmethod(lambda cls: Moment((at := next(times)), at * 300)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for name in (*BOUNDED, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    with BlendEngine(tiny_model("llama"), fingerprint="x", config=BlendConfig(capture=False)) as engine:
        for _ in range(2):
            engine.generate(Prompt.of([text([5, 6, 7, 8])]), max_new_tokens=1)
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "3 threads were interrupted 300 times a second" in record.message
    assert "GOMP_SPINCOUNT" in record.message
