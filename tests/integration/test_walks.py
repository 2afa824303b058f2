"""How many files a reader passes on the way of one call, as docs/structure.md says."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import cacheblend
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.blocks import LayerShape
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.store import DiskStore
from store_blocks import ROOT, make_block

_PACKAGE = f"{Path(cacheblend.__file__).parent}/"
_KERNELS = "core/kernels/"


def walk(call: Callable[[], Any]) -> list[str]:
    """The package's files that a call enters, each time another one than before; kernels count as one step each.

    Traced in a thread of its own, and what it starts on other threads is not.
    """
    entered: list[str] = []
    failed: list[BaseException] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_PACKAGE):
            name = file.removeprefix(_PACKAGE)
            if not name.startswith(_KERNELS) and (not entered or entered[-1] != name):
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
    return entered


def files(entered: list[str]) -> list[str]:
    """Each file once, in the order in which they were entered first."""
    return list(dict.fromkeys(entered))


def test_the_read_of_a_layer_from_a_folder(tmp_path: Path) -> None:
    block = make_block(1, tokens=8, shapes=[LayerShape(2, 8)] * 4)
    with DiskStore(tmp_path / "s") as store:
        store.write(block)
        plan = Planner(ROOT, block_size=8).plan(Prompt.of([text([1, 2]), chunk(block.token_ids), text([3])]), store)
        real, entered = store.read_layers, list[str]()
        with LayerLoader(plan, store, block.layout, [None] * 4, read_ahead=0) as loader:
            store.read_layers = lambda *asked: _noted(entered, real, *asked)  # type: ignore[method-assign]
            loader.layer(0)
    assert files(entered) == [
        "store/disk/store.py",
        "store/disk/block_files.py",
        "store/base.py",
        "core/load/staging_buffers.py",
        "store/format/block_file.py",
    ], entered
    assert len(entered) <= 8, entered


def _noted(entered: list[str], call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a call, whose walk is noted."""
    answers: list[Any] = []
    entered += walk(lambda: answers.append(call(*arguments)))
    return answers[0]
