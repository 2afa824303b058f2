"""The page that draws the structure, and names. import-linter checks directions of imports, ruff complexity."""

import ast
import re
from collections import Counter
from pathlib import Path

import typer

from lab.cli import app

ROOT = Path(__file__).parents[2]


def test_the_page_names_every_folder_and_fits_on_a_screen_and_a_half() -> None:
    page = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    tree = page.split("## Folders")[1].split("```")[1].split("\nlab/")[0]
    named = sorted(re.findall(r"(?:^ +|\()(\w+)/", tree, re.MULTILINE))
    package = ROOT / "src/cacheblend"
    folders = {each.parent for each in package.rglob("*.*") if "__pycache__" not in each.parts} - {package}
    assert named == sorted(each.name for each in folders)
    assert len(page.splitlines()) <= 90
    for file in re.findall(r"`([\w/]+\.py)`", page):
        assert (package / file).is_file(), file


def test_the_page_names_every_folder_of_the_lab_and_its_readme_every_command() -> None:
    tree = (ROOT / "docs/structure.md").read_text(encoding="utf-8").split("\nlab/")[1].split("\ntests/")[0]
    folders = [path.parent.name for path in (ROOT / "lab").glob("*/__init__.py")]
    assert sorted(re.findall(r"(\w+)/", tree.split("\n", 1)[1])) == sorted(folders)
    readme = (ROOT / "lab/README.md").read_text(encoding="utf-8")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if f"`{name}" not in readme] == []


TERMS = {"batching", "sampling"}
"""Of the field; any other module is named by a noun."""


def test_no_module_is_named_by_a_gerund() -> None:
    stems = {path.stem for path in (ROOT / "src/cacheblend").rglob("*.py")}
    assert {stem for stem in stems if stem.endswith("ing")} <= TERMS


def test_a_class_name_means_one_thing() -> None:
    """In the package; the lab and the tests have their own."""
    found = Counter(
        node.name
        for path in (ROOT / "src/cacheblend").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in found.items() if count > 1] == []
