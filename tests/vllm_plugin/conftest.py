import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from vllm_running import Vllm, make_models
from vllm_table import RECORDED, merge, verdicts


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "feature(line, verdict): shows a line of the table of features, see vllm_table")


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


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    with closing(Vllm(tmp_path_factory.mktemp("vllm"))) as running:
        yield running


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers find `injecting`."""
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *([known] if known else [])]))
