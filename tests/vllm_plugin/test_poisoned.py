"""No history of requests makes a stored block differ from a plain prefill of its chain: vLLM with the plug-in."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.faults.engine import environment
from lab.faults.prompts import make_model
from poison import HISTORIES, TOLERANCE, Tally
from tiny_folder import train_tokenizer

HERE = Path(__file__).parent
COMMAND = "CACHEBLEND_HISTORIES=400 pytest tests/vllm_plugin/test_poisoned.py"
SETTINGS = {"pieces": 0.5, "preemption": 0.2, "eviction": 0.3}
"""Of `poisoning.SETTINGS`, and the share of the histories that each plays."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, whose BOS token is the anchor of one of the engines."""
    folder = make_model(tmp_path_factory.mktemp("model"))
    train_tokenizer(["a text"], 300).save_pretrained(folder)
    return folder


def play(model: Path, folder: Path, setting: str, count: int, *, mistake: bool = False) -> Tally:
    """The histories of one engine, in a process of its own."""
    path = folder / f"{setting}.json"
    job = {"model": str(model), "store": str(folder / f"{setting} store"), "setting": setting, "seed": 11}
    path.write_text(json.dumps({**job, "count": count, "mistake": mistake}))
    known = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), *([known] if known else [])])
    ran = subprocess.run(
        [sys.executable, str(HERE / "poisoning.py"), str(path)],
        env=environment() | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600 + 120 * count,  # the machine may be busy
        check=False,
    )
    out = Path(f"{path}.out")
    assert out.is_file(), f"vLLM ended with {ran.returncode}:\n{(ran.stdout + ran.stderr)[-4000:]}"
    found: dict[str, Any] = json.loads(out.read_text())
    return Tally(**found)


@pytest.mark.may_fail("block lost", "store write")
def test_no_history_poisons_a_block(
    model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    tally = Tally()
    with ThreadPoolExecutor() as side_by_side:
        shares = [(name, math.ceil(share * HISTORIES)) for name, share in SETTINGS.items()]
        for found in [side_by_side.submit(play, model, tmp_path, *each) for each in shares]:
            tally.add(found.result())
    tally.report("vllm", record_property, COMMAND)
    assert tally.poisoned == 0, tally.what[:5]
    assert tally.histories >= HISTORIES and tally.blocks >= 3 * HISTORIES, tally  # or nothing was shown
    assert tally.met["requests (vLLM)"] > HISTORIES // 2, tally.met  # blended ones
    assert tally.met["num_preemptions (vLLM)"] or HISTORIES < 100, tally.met


@pytest.mark.may_fail("block lost", "store write")
def test_what_would_be_poisoned_is_found(model: Path, tmp_path: Path) -> None:
    tally = play(model, tmp_path, "pieces", 3, mistake=True)
    assert tally.poisoned > 3 and tally.smallest_poison > 100 * TOLERANCE
