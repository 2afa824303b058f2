import os
from pathlib import Path

import pytest

from vllm_running import Vllm, make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    return Vllm(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers find `injecting`."""
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *([known] if known else [])]))
