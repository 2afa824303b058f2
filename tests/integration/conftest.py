"""Fixtures of several files: a tiny llama in a folder, and engines on it; servers without settings of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.settings import ServeSettings
from cacheblend.store import KVStore
from command_line import Run, runner
from serving import running, shallow
from small_llama import BLOCK, Open, build_llama

SETTINGS = ServeSettings(chunk_tokens=16, hosts=("server.example",), drain_s=5)


@pytest.fixture(scope="session")
def nano_url() -> Iterator[str]:
    """The address of a server on the model that ships."""
    with running(SETTINGS) as address:
        yield address


@pytest.fixture(scope="session")
def shallow_url() -> Iterator[str]:
    """The address of a server on two of its layers."""
    with running(SETTINGS, model=shallow()) as address:
        yield address


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, which no test writes to."""
    return build_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module", autouse=True)
def of_every_module(surroundings: None) -> None:
    """One thread, and a cache folder."""


@pytest.fixture(scope="module")
def loaded(built: Path) -> Iterator[BlendEngine]:
    """An engine loaded once; the tests' engines use its model and tokenizer."""
    with BlendEngine.from_pretrained(built) as engine:
        yield engine


@pytest.fixture
def open_engine(loaded: BlendEngine) -> Iterator[Open]:
    """Opens engines on a loaded one's model, and closes them at the end."""
    opened: list[BlendEngine] = []

    def open_one(store: KVStore | str | Path | None = None, **settings: Any) -> BlendEngine:
        config = BlendConfig(**{"block_size": BLOCK, **settings})
        known = {"fingerprint": "tiny", "name": loaded.name}
        opened.append(BlendEngine(loaded.model, loaded.tokenizer, store=store, config=config, **known))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process."""
    monkeypatch.setenv("COLUMNS", "120")
    return runner(capsys)
