"""The examples against a running server, each as its reader would run it."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cacheblend.serve.settings import ServeSettings
from serving import running

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def url() -> Iterator[str]:
    with running(ServeSettings()) as address:
        yield address


@pytest.mark.parametrize(
    "name, library",
    [("serve_openai", "openai"), ("serve_langchain", "langchain_openai"), ("serve_llamaindex", "llama_index")],
)
def test_an_example_answers_from_passages_that_are_stored(url: str, name: str, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for _ in range(2):  # stored or not
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("Luden")
    assert len(httpx.get(f"{url}/v1/chunks").json()["data"]) >= 2  # both passages, each a chunk of its own
