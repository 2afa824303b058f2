"""Sizes of files and functions, as CONTRIBUTING.md has them. Directions of imports and circles: import-linter."""

import ast
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


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    assert {name: lines for path in FILES for name, lines in functions(path) if lines > BODY_LINES} == {}
