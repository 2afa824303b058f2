"""The examples against a running server, each as its reader would run it."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cacheblend.serve.settings import ServeSettings
from campaign import rotating
from serving import running

EXAMPLES = Path(__file__).parents[2] / "examples"
OPENAI = "serve_openai", "openai"


@pytest.fixture
def url() -> Iterator[str]:
    with running(ServeSettings()) as address:
        yield address


@pytest.mark.parametrize(
    "name, library",
    rotating([OPENAI, ("serve_langchain", "langchain_openai"), ("serve_llamaindex", "llama_index")], core=[OPENAI]),
)
def test_an_example_stores_passages_and_then_reuses_them(url: str, name: str, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    first, before, second, after = ended.stdout.splitlines()
    assert first.startswith("Luden") and second.startswith("Luden")
    loaded = [re.search(r"from the store {'\w+': (\d+)|(\d+) tokens from the store", each) for each in (before, after)]
    counts = [0 if each is None else int(each[1] or each[2]) for each in loaded]
    assert counts[0] == 0 < counts[1], ended.stdout  # the first answer stores, the second reuses
    assert len(httpx.get(f"{url}/v1/chunks").json()["data"]) >= 2  # both passages, each a chunk of its own


@pytest.mark.parametrize(
    "name, library",
    rotating(
        [
            ("retriever_langchain", "langchain_openai"),
            ("retriever_llamaindex", "llama_index"),
            ("retriever_chroma", "chromadb"),
        ]
    ),
)
def test_an_example_of_a_retriever_answers_whether_its_passages_are_stored_or_not(
    url: str, name: str, library: str
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for _ in range(2):
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == 0, ended.stderr
        assert "Luden" in ended.stdout.split()
