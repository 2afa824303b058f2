"""The Python of README and docs runs as it stands, on the model that ships: a page's blocks one after the other, with
what its text takes as given; and so do the commands of README. Its `pip install .` and the demo in an environment of
their own are `make wheel`."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cacheblend import BlendConfig, BlendEngine, Document, Passage
from cacheblend.engines.vllm.config import read_config
from cacheblend.nano import model_path
from cacheblend.serve.settings import ServeSettings
from lab.servers.processes import free_port
from serving import is_ready, running

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
PAGES = {
    str(page.relative_to(ROOT)): blocks
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.name != "log.md" and (blocks := BLOCK.findall(page.read_text(encoding="utf-8")))
}
PASSAGES = [Passage("The bell was sold to Motan. The square seemed calm."), Passage("The boot went to him. " * 8)]
IDS = list(range(300, 340))


def _python() -> dict[str, Any]:
    rows = [PASSAGES, PASSAGES[::-1]]
    asked = [("Who has the bell?", row) for row in rows]
    return {"passages": PASSAGES, "found": [], "rows": rows, "asked": asked, "ids_a": IDS, "ids_b": IDS[::-1]}


def _documents() -> dict[str, Any]:
    messages, lc = pytest.importorskip("langchain_core.messages"), pytest.importorskip("langchain_core.documents")
    retrievers = pytest.importorskip("langchain_core.retrievers")

    class Fixed(retrievers.BaseRetriever):  # type: ignore[misc, name-defined]
        def _get_relevant_documents(self, query: str, **_: Any) -> list[Any]:
            return documents

    documents = [lc.Document(page_content=each.text, id=str(number)) for number, each in enumerate(PASSAGES)]
    store = SimpleNamespace(as_retriever=lambda: Fixed(vectorstore=None, add_documents=lambda *_, **__: []))
    given = {"store": store, "documents": documents, "question": "Who has the bell?", "model": Mock()}
    return given | {"HumanMessage": messages.HumanMessage}


def _inspected() -> dict[str, Any]:
    engine = BlendEngine.from_pretrained(model_path(), store="memory", config=BlendConfig(anchor="bos"))
    engine.warm(PASSAGES)
    parts = ["Answer. ", *PASSAGES, "Who has the bell?"]
    return {
        "engine": engine,
        "parts": parts,
        "prompt": engine.prompt(parts),
        "selector": engine.runtime.settings.selector(),
    }


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/python.md": _python,
    "docs/serve.md": lambda: {"passages": [each.text for each in PASSAGES]},
    "docs/inspect.md": _inspected,
    "docs/evaluation.md": lambda: {"engine": BlendEngine.from_pretrained(model_path(), store="memory")},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of its own, since what the pages store is not what other tests list."""
    with running(ServeSettings(chunk_tokens=16)) as address:
        yield address


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_as_it_stands(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Only names of folders and addresses are this test's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path/to").mkdir(parents=True)
    model = tmp_path / "path/to/model"
    model.mkdir()
    for file in model_path().iterdir():
        if "profile" not in file.name:
            (model / file.name).symlink_to(file)
    row = {"question": "Who?", "answers": ["Motan"], "passages": [{"text": each.text} for each in PASSAGES]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row) + "\n")
    if page == "docs/documents.md":
        _check_documents(PAGES[page], url)
        return
    names = GIVEN.get(page, dict)()
    _run(page, PAGES[page], names, url)


def _check_documents(blocks: list[str], url: str) -> None:
    """Two libraries' parts, each with documents of its own."""
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        documents = [Document(str(number), each.text) for number, each in enumerate(PASSAGES)]
        _run("docs/documents.md", blocks[1:], {"engine": engine, "documents": documents}, url)
    _run("docs/documents.md", blocks[:1], _documents(), url)


def _run(page: str, blocks: list[str], names: dict[str, Any], url: str) -> None:
    try:
        for number, block in enumerate(blocks):
            own = block.replace("/var/cache/cacheblend", str(Path.cwd() / "store"))
            exec(compile(own.replace("http://127.0.0.1:8000", url), f"{page}, block {number + 1}", "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, BlendEngine):
                value.close()


# ---- the commands of README ------------------------------------------------------------------------------------------


def _check_vllm(flag: str, value: str) -> None:
    settings = json.loads(value)
    assert flag == "--kv-transfer-config" and settings.pop("kv_role") == "kv_both"
    store = read_config(settings.pop("kv_connector_extra_config")).store
    assert store == "file:///var/cache/cacheblend?max_bytes=200GiB"
    module = (ROOT / "src" / settings.pop("kv_connector_module_path").replace(".", "/") / "__init__.py").read_text()
    assert settings.pop("kv_connector") in module and not settings


def _check_serve(arguments: list[str], folder: Path) -> None:
    own = {"DIR": str(model_path()), "file:///var/cache/cacheblend": f"file://{folder}/store"}
    port = free_port()
    command = [sys.executable, "-m", "cacheblend", *(own.get(each, each) for each in arguments), "--port", str(port)]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            while not is_ready(f"http://127.0.0.1:{port}"):
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0, (folder / "log").read_text()


def test_the_commands_of_the_readme_do_what_it_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"'\.\[(\w+)\]'", readme)) <= project["optional-dependencies"].keys()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.S | re.M)
    for block in [block for language, block in blocks if not language]:
        match shlex.split(block, comments=True):
            case ["git", "clone", url, "&&", "cd", "cacheblend", "make", "demo"]:
                assert url in project["urls"].values()
                said = subprocess.run(
                    ["make", "--no-print-directory", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
                )
                assert said.stdout.splitlines()[-1].strip().endswith("bin/cacheblend demo")
            case ["pip", "install", "."]:
                pass
            case ["vllm", "serve", "MODEL", flag, value]:
                _check_vllm(flag, value)
            case ["cacheblend", *arguments]:
                _check_serve(arguments, tmp_path)
            case other:
                pytest.fail(f"a command that no test runs: {other}")
