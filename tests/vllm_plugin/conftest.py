import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_models import MODELS, make_model
from vllm_running import PLUGIN, SETTINGS, Serve, Served, Vllm
from vllm_table import RECORDED, merge, verdicts

PYTHON = "CACHEBLEND_WARM_PYTHON"
"""The variable that names what stands in for the interpreter."""

if find_spec("vllm") is None:  # `make vllm` installs it
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # nothing is compiled unasked


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "feature(line, verdict): shows a line of the table of features, see vllm_table")
    if PYTHON in os.environ or find_spec("vllm") is None or config.option.collectonly:
        return
    temporary = tempfile.TemporaryDirectory(prefix="nursery-")
    folder = Path(temporary.name)
    python = folder / "python"
    stand_in = PLUGIN.joinpath("warm_python.py").read_text()
    python.write_text(f"#!{sys.executable} -IS\nADDRESS = {str(folder / 'socket')!r}\n{stand_in}")
    python.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as asked:
        asked.bind(str(folder / "socket"))
        asked.listen(128)  # from now on programs can be started, and wait for the imports
        env = os.environ | SETTINGS
        del env["TORCH_COMPILE_DISABLE"]  # some programs compile
        nursery = subprocess.Popen(
            [sys.executable, str(PLUGIN / "nursery.py"), str(asked.fileno()), str(python)],
            env=env,
            stdin=subprocess.PIPE,
            pass_fds=[asked.fileno()],
            start_new_session=True,
        )
    os.environ[PYTHON] = str(python)  # workers of xdist inherit it
    config.add_cleanup(lambda: (nursery.communicate(), temporary.cleanup()))


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


@pytest.fixture(scope="session", autouse=True)
def warm_python() -> Iterator[None]:
    """Programs are started from a process that has imported vLLM, see `nursery`."""
    with pytest.MonkeyPatch.context() as patch:
        if PYTHON in os.environ:
            patch.setattr(sys, "executable", os.environ[PYTHON])
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(config, folder / name) for name, config in MODELS.items()}


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    return Vllm(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def serve(vllm: Vllm, models: dict[str, Path], tmp_path: Path) -> Serve:
    """A model by name or folder, in vLLM with these options."""
    return lambda model, **engine: Served(vllm, models.get(model, model), tmp_path / "store", engine)


@pytest.fixture
def llama(serve: Serve) -> Served:
    return serve("llama")


@pytest.fixture(params=[True, False], ids=["the other in front", "ours in front"])
def in_front(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def beside(in_front: bool, tmp_path: Path) -> list[Any]:
    """The connectors of a `MultiConnector`. The other loads in the step that schedules a request, and keeps an ended
    request's blocks, as ours does."""
    other = {
        "kv_connector": "Holding",
        "kv_connector_module_path": "holding",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    return [other, None] if in_front else [None, other]
