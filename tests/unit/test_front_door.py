"""What a newcomer meets first: the README, its links and code, and what the wheel may hold."""

import ast
import re
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"]


def load_check_wheel() -> ModuleType:
    """The script has no ending that the import system knows."""
    loader = SourceFileLoader("check_wheel", str(ROOT / ".ci" / "check-wheel"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def make_wheel(folder: Path, *names: str) -> Path:
    wheel = folder / "cacheblend-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return wheel


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_the_readme_shows_code_that_parses():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert blocks
    for block in blocks:
        ast.parse(block)


def test_a_wheel_of_the_package_alone_passes(tmp_path):
    wheel = make_wheel(tmp_path, "cacheblend/__init__.py", "cacheblend/py.typed", "cacheblend-0.1.0.dist-info/METADATA")
    assert load_check_wheel().complaints(wheel) == []


@pytest.mark.parametrize(
    "name",
    [
        "lab/nano/training/train.py",
        "cacheblend/nano/training.py",
        "lab/cli/paper.py",
        "cacheblend/faults/a.py",
        "tests/reference.py",
    ],
)
def test_a_wheel_with_anything_else_fails(tmp_path, name):
    wheel = make_wheel(tmp_path, "cacheblend/__init__.py", "cacheblend/py.typed", name)
    assert any(line.startswith(name) for line in load_check_wheel().complaints(wheel))


def test_a_wheel_without_its_type_marker_fails(tmp_path):
    assert load_check_wheel().complaints(make_wheel(tmp_path, "cacheblend/__init__.py")) == [
        "cacheblend/py.typed: missing"
    ]
