"""`doctor` walks through eight files, as docs/structure.md draws it: each that examines is entered once."""

import sys
import threading
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import cacheblend
import cacheblend.engines.hf.doctor
import cacheblend.engines.settings  # imported before it is traced
from cacheblend.cli.doctor import QualityOptions, doctor
from cacheblend.cli.options import DeviceOptions, ModelOrShape, QuestionOptions
from cli_passages import build_model

PACKAGE = Path(cacheblend.__file__).parent
DOCTOR = ("cli/doctor.py", "engines/hf/doctor.py")
EXAMINERS = [
    "engines/checkpoint.py",
    "engines/hf/model_loader.py",
    "engines/hf/survey.py",
    "engines/tokens/builder.py",
    "engines/hf/live_check.py",
    "engines/settings.py",
]
GUARD = "engines/hf/ambient.py"
TERMINAL = ("cli/options.py", "cli/models.py", "cli/output.py")
"""What reads options and prints is no step, nor is the guard around an entry point or a method of a value in `core`."""


def file_of(frame: FrameType | None) -> str:
    path = Path(frame.f_code.co_filename) if frame is not None else Path()
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


def test_the_walk_of_doctor(tmp_path: Path) -> None:
    model, steps = build_model(tmp_path / "tiny-llama"), list[str]()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        file, caller = file_of(frame), frame.f_back
        if event != "call" or not file or file in (GUARD, *TERMINAL) or file.startswith("core/"):
            return
        while caller is not None and file_of(caller) in ("", GUARD):
            caller = caller.f_back
        if caller is None or file_of(caller) in DOCTOR:
            steps.append(file)

    def run() -> None:
        sys.setprofile(trace)
        try:
            doctor(ModelOrShape(model), DeviceOptions(device="cpu"), QuestionOptions(), QualityOptions(), json=True)
        finally:
            sys.setprofile(None)

    run_once = threading.Thread(target=run)
    run_once.start()
    run_once.join()
    assert list(dict.fromkeys(steps)) == [*DOCTOR, *EXAMINERS]
    examined = [step for step in steps if step not in DOCTOR]
    assert [step for step, _ in groupby(examined)] == EXAMINERS  # none is entered again behind a later one
