"""Hooks of the documentation site: pages that lie at the repository's root, links to files outside of docs/, the
header's link to the repository, and what the site's search leaves out.

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
INTERNALS, RESULTS = "Internals", "results/"
"""The section of the navigation, and the folder, that the site's search leaves out: a user finds the guides first."""
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(?=\))")
logger = logging.getLogger("mkdocs.hooks")


def on_config(config: Any) -> Any:
    """Gives the header the repository's address and the version."""
    found = re.search(r'^__version__ = "(.+)"', (ROOT / "src/cacheblend/__init__.py").read_text(), re.MULTILINE)
    config.repo_url = REPOSITORY
    config.repo_name = f"{config.repo_name} {found[1]}" if found else config.repo_name
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the root's pages."""
    for source, page in PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links that lead out of docs/; takes internals out of the search."""
    uri = page.file.src_uri
    if uri.startswith(RESULTS) or any(section.title == INTERNALS for section in page.ancestors):
        page.meta["search"] = {"exclude": True}
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


def on_post_page(output: str, **_: Any) -> str:
    """Lets the header's link load nothing: the theme would ask the repository's host for stars and releases."""
    return output.replace(' data-md-component="source"', "")
