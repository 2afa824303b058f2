"""The page that draws the structure. import-linter checks directions of imports and circles, ruff complexity."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_names_every_module_and_no_other() -> None:
    page = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    tree = page.split("## Folders")[1].split("```")[1].split("training/")[0]
    named = sorted(re.findall(r"[\w/]+\.py", tree))
    modules = (ROOT / "src/cacheblend").rglob("*.py")
    assert named == sorted(path.name for path in modules if path.name != "__init__.py")
