"""Hooks of the documentation site: pages that lie at the repository's root, and links to files outside of docs/.

A page is written so that its links work where the repository is browsed. Here they are made to work on the site, too:
a link to a root file that is a page leads to that page, any other link out of docs/ to the repository (its address is
`project.urls.Homepage` of pyproject.toml). A link to a file that is not there is a warning, which a strict build turns
into an error.
"""

import logging
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Files of the root and the pages that show them; the home page stands in for the README."""
LOG = "docs/log.md"
"""Read in the repository alone: notes, which do not render as a page."""
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(?=\))")
logger = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: Any) -> Files:
    """Adds the root's pages."""
    for source, page in PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links that lead out of docs/."""
    uri = page.file.src_uri
    sources = {shown: source for source, shown in PAGES.items() if shown != "index.md"}
    folder = posixpath.dirname(sources.get(uri, f"docs/{uri}"))
    return _LINK.sub(lambda found: _site_link(found[1], uri, folder) + (found[2] or ""), markdown)


def _site_link(target: str, uri: str, folder: str) -> str:
    """Where a link leads on the site.

    Args:
        target: the link as it is written, without its anchor.
        uri: the page it stands on, below docs/.
        folder: the folder of the file that it is written in, below the root.
    """
    path = posixpath.normpath(posixpath.join(folder, target))
    if not (ROOT / path).exists():
        logger.warning("%s links to %s, which is not in the repository", uri, path)
    if path in PAGES:
        return posixpath.relpath(PAGES[path], posixpath.dirname(uri) or ".")
    if path.startswith("docs/") and path != LOG and (ROOT / path).is_file():
        return posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(uri) or ".")
    return f"{REPOSITORY}/blob/main/{path}"
