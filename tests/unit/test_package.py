"""What a newcomer meets first: README, structure, what the wheel holds, and what can be imported from `cacheblend`."""

import ast
import importlib
import re
import subprocess
import sys
import zipfile
from collections import Counter
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import typer

import cacheblend
from lab.cli import app

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


def test_the_readme_is_short_and_links_of_pages_lead_to_files() -> None:
    assert len(README.read_text().splitlines()) <= 140
    for page in PAGES:
        missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
        assert missing == [], page


def test_a_wheel_has_the_package_alone_with_its_type_marker(tmp_path):
    complaints, whole = load_check_wheel().complaints, ("cacheblend/__init__.py", "cacheblend/py.typed")
    assert complaints(make_wheel(tmp_path, *whole, "cacheblend-0.1.0.dist-info/METADATA")) == []
    wrong = ("lab/nano/training/train.py", "cacheblend/nano/training.py", "lab/cli/paper.py", "cacheblend/faults/a.py")
    for name in (*wrong, "tests/reference.py"):
        assert any(line.startswith(name) for line in complaints(make_wheel(tmp_path, *whole, name)))
    assert complaints(make_wheel(tmp_path, "cacheblend/__init__.py")) == ["cacheblend/py.typed: missing"]


def test_each_name_is_that_of_its_module_and_loads_no_torch_until_it_is_used() -> None:
    found = {name: getattr(cacheblend, name) for name in cacheblend.__all__ if name != "__version__"}
    for name, value in found.items():
        assert getattr(importlib.import_module(value.__module__), name) is value
    assert set(cacheblend.__all__) <= set(dir(cacheblend))
    with pytest.raises(AttributeError, match="module 'cacheblend' has no attribute 'BlendEngin'"):
        _ = cacheblend.BlendEngin  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="BlendEngin"):
        exec("from cacheblend import BlendEngin")
    names: dict[str, object] = {}
    exec("from cacheblend import *", names)
    assert set(cacheblend.__all__) <= set(names)
    # importing loads no torch until a name is used
    code = (
        "import sys, cacheblend; assert 'torch' not in sys.modules and 'numpy' not in sys.modules;"
        "cacheblend.__version__, dir(cacheblend); assert not [m for m in sys.modules if m.startswith('cacheblend.')];"
        "from cacheblend import CacheBlendError, InvalidInputError; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pages_name_every_folder_and_modules_and_classes_have_names_of_their_own() -> None:
    page = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    tree = page.split("## Folders")[1].split("```")[1].split("\nlab/")[0]
    named = sorted(re.findall(r"(?:^ +|\()(\w+)/", tree, re.MULTILINE))
    package = ROOT / "src/cacheblend"
    folders = {each.parent for each in package.rglob("*.*") if "__pycache__" not in each.parts} - {package}
    assert named == sorted(each.name for each in folders)
    assert len(page.splitlines()) <= 90
    for file in re.findall(r"`([\w/]+\.py)`", page):
        assert (package / file).is_file(), file
    # the lab's folders, and its README's commands
    tree = (ROOT / "docs/structure.md").read_text(encoding="utf-8").split("\nlab/")[1].split("\ntests/")[0]
    folders = [path.parent.name for path in (ROOT / "lab").glob("*/__init__.py")]
    assert sorted(re.findall(r"(\w+)/", tree.split("\n", 1)[1])) == sorted(folders)
    readme = (ROOT / "lab/README.md").read_text(encoding="utf-8")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if f"`{name}" not in readme] == []
    # modules are no gerunds, and a class name means one thing in the package
    stems = {path.stem for path in (ROOT / "src/cacheblend").rglob("*.py")}
    assert {stem for stem in stems if stem.endswith("ing")} <= {"batching", "sampling"}, "not of the field"
    # in the package; the lab and the tests have classes of their own
    found = Counter(
        node.name
        for path in (ROOT / "src/cacheblend").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in found.items() if count > 1] == []
