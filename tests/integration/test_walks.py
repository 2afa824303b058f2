"""How many files a reader passes on the way of one call, as docs/structure.md says."""

import sys
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import cacheblend
import cacheblend.engines.hf.doctor
import cacheblend.engines.settings  # imported before it is traced
from cacheblend.cli.doctor import QualityOptions, doctor
from cacheblend.cli.options import DeviceOptions, ModelOrShape, QuestionOptions
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.store import DiskStore
from cli_passages import build_model
from store_blocks import ROOT, make_block

_PACKAGE = Path(cacheblend.__file__).parent
_GUARD = "engines/hf/ambient.py"
"""Stands around each entry point, and is no step."""


def walk(call: Callable[[], Any], *, unseen: str = "", seen_from: tuple[str, ...] = ()) -> list[str]:
    """The package's files that a call enters, each time another one than before.

    Traced in a thread of its own, and what it starts on other threads is not.

    Args:
        call: what is walked through.
        unseen: files whose names begin with it are no steps.
        seen_from: steps are calls that these files make; none: all calls.
    """
    entered: list[str] = []
    failed: list[BaseException] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = _file_of(frame)
        if event != "call" or not name or name == _GUARD or (unseen and name.startswith(unseen)):
            return
        caller = frame.f_back
        while seen_from and caller is not None and _file_of(caller) in ("", _GUARD):
            caller = caller.f_back
        if not seen_from or caller is None or _file_of(caller) in seen_from:
            entered.append(name)

    def traced() -> None:
        sys.setprofile(note)
        try:
            call()
        except BaseException as error:  # the test fails with it, not the thread
            failed.append(error)
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=traced)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return [name for name, _ in groupby(entered)]


def _file_of(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else ""


def test_the_read_of_a_layer_from_a_folder(tmp_path: Path) -> None:
    block, entered = make_block(1, tokens=8, shapes=[LayerShape(2, 8)] * 4), list[str]()
    with DiskStore(tmp_path / "s") as store:
        store.write(block)
        plan = Planner(ROOT, block_size=8).plan(Prompt.of([text([1, 2]), chunk(block.token_ids), text([3])]), store)
        read = store.read_layers

        def traced_read(*asked: Any) -> Any:
            answers: list[Any] = []
            entered.extend(walk(lambda: answers.append(read(*asked)), unseen="core/kernels/"))
            return answers[0]

        with LayerLoader(plan, store, block.layout, [None] * 4, read_ahead=0) as loader:
            store.read_layers = traced_read  # type: ignore[method-assign]
            loader.layer(0)
    assert list(dict.fromkeys(entered)) == [
        "store/disk/store.py",
        "store/disk/block_files.py",
        "store/base.py",
        "core/load/staging_buffers.py",
        "store/format/block_file.py",
    ], entered
    assert len(entered) <= 8, entered


def test_generate_enters_no_file_twice_but_the_prefill() -> None:
    engine_file, prefill = "engines/hf/engine.py", "core/fuse/prefill.py"
    passages = [Passage("The red scarf lies in the box. " * 3), Passage("Ann has the key of the barn. " * 3)]
    with BlendEngine.from_pretrained("nano", store="memory") as engine:
        engine.warm(passages)
        prompt = ["Answer. ", *reversed(passages), "Who has the key?"]
        engine.generate(prompt, max_new_tokens=1)  # what is imported and measured at the first request
        steps = walk(lambda: engine.generate(prompt, max_new_tokens=1), seen_from=(engine_file,))
    assert [step for step, _ in groupby(step for step in steps if step not in (engine_file, prefill))] == [
        "engines/hf/sampling.py",
        "engines/tokens/builder.py",
        "engines/tokens/detokenizer.py",
        "engines/hf/prompts.py",
        "engines/hf/grammar.py",
        "engines/hf/background.py",
        "engines/hf/state.py",
        "engines/hf/prefiller.py",
        "engines/hf/request.py",
    ]


def test_doctor_enters_each_file_that_examines_once(tmp_path: Path) -> None:
    model, doctors = build_model(tmp_path / "tiny-llama"), ("cli/doctor.py", "engines/hf/doctor.py")
    terminal = ("cli/options.py", "cli/models.py", "cli/output.py")  # what reads options and prints is no step
    options = ModelOrShape(model), DeviceOptions(device="cpu"), QuestionOptions(), QualityOptions()
    steps = walk(lambda: doctor(*options, json=True), unseen="core/", seen_from=doctors)
    assert [step for step, _ in groupby(step for step in steps if step not in (*doctors, *terminal))] == [
        "engines/checkpoint.py",
        "engines/hf/model_loader.py",
        "engines/hf/survey.py",
        "engines/tokens/builder.py",
        "engines/hf/live_check.py",
        "engines/settings.py",
    ]
