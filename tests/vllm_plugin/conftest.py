import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_running import Nursery, Served, Vllm, make_models
from vllm_table import RECORDED, merge, verdicts

PYTHON = "CACHEBLEND_WARM_PYTHON"
"""The variable that names what stands in for the interpreter."""

if find_spec("vllm") is None:  # `make vllm` installs it
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # nothing is compiled unasked


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "feature(line, verdict): shows a line of the table of features, see vllm_table")
    if PYTHON not in os.environ and find_spec("vllm") is not None and not config.option.collectonly:
        nursery = Nursery()
        os.environ[PYTHON] = str(nursery.python)  # workers of xdist inherit it
        config.add_cleanup(nursery.close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties += [("feature", json.dumps(mark.args)) for mark in item.iter_markers("feature")]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in terminalreporter.stats.values() for report in kind if hasattr(report, "when")]
    if not (lines := verdicts(reports)):
        return
    terminalreporter.section("features in vLLM")
    for line, verdict in (merge(Path(RECORDED), "features", lines) if RECORDED else lines).items():
        terminalreporter.write_line(f"{line:60} {verdict}")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", autouse=True)
def warm_python() -> Iterator[None]:
    """Programs are started from a process that has imported vLLM, see `nursery`."""
    with pytest.MonkeyPatch.context() as patch:
        if PYTHON in os.environ:
            patch.setattr(sys, "executable", os.environ[PYTHON])
        yield


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    return Vllm(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def llama(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> Served:
    return Served(vllm, models["llama"], tmp_path / "store")


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers find `injecting`."""
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *([known] if known else [])]))
