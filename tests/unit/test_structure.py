"""Sizes of files and functions as CONTRIBUTING.md has them, and the page that draws the structure.

import-linter checks directions of imports and circles.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 350
BODY_LINES = 40  # of a function, without its docstring

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("src/cacheblend", "training") for path in (ROOT / folder).rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Every function of a file and the lines of its body, those of functions inside it included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body and body[-1].end_lineno is not None else 0
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", lines


def test_the_sources_are_found() -> None:
    assert len(FILES) > 150
    assert ROOT / "src/cacheblend/core/plan/plan.py" in FILES


def test_the_page_names_every_module_and_no_other() -> None:
    page = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    tree = page.split("## Folders")[1].split("```")[1].split("training/")[0]
    named = sorted(re.findall(r"[\w/]+\.py", tree))
    modules = (ROOT / "src/cacheblend").rglob("*.py")
    assert named == sorted(path.name for path in modules if path.name != "__init__.py")


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    assert {name: lines for path in FILES for name, lines in functions(path) if lines > BODY_LINES} == {}
