"""The server's page in a real browser, for the tests of the page; they are skipped where there is no browser."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from cacheblend.serve.settings import ServeSettings
from serving import running

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    BROWSER is None or find_spec("playwright") is None,
    reason="needs a browser (Debian's package chromium) and playwright",
)
TIMEOUT_MS = 600_000  # a busy machine is no failure
ASKED = "body[data-state=done], body[data-state=failed]"  # not a function: the page's policy forbids to evaluate one


@contextmanager
def browser() -> Iterator[tuple[Any, str]]:
    """A browser, and the address of a server on the model that ships."""
    from playwright.sync_api import sync_playwright

    with running(ServeSettings(chunk_tokens=16)) as url, sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened, url
        opened.close()


def open_page(opened: Any, url: str, *, width: int = 1400, scheme: str = "light", wait: bool = True) -> Any:
    """The page in a window of its own; ``complaints`` of it are what the browser's console says."""
    page = opened.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    page.set_default_timeout(TIMEOUT_MS)
    page.complaints = []
    page.on("console", lambda said: page.complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.goto(url)
    if wait:
        page.wait_for_selector("#examples button")
    return page


def wait_until_asked(page: Any) -> str:
    """Waits for the end of a question; ``done`` or ``failed``."""
    page.wait_for_selector(ASKED)
    return str(page.evaluate("document.body.dataset.state"))


def ask_example(page: Any, number: int) -> None:
    """Clicks on an example and waits for its three answers."""
    page.locator(f"[data-example='{number}']").click()
    assert wait_until_asked(page) == "done", page.locator("#error").inner_text()


def ask(page: Any) -> dict[str, dict[str, Any]]:
    """Asks, waits, and returns what was sent: to ``explain``, and for the answer of each mode."""
    sent: dict[str, dict[str, Any]] = {}

    def note(request: Any) -> None:
        if request.method == "POST":
            body = request.post_data_json
            sent[body.get("cacheblend", {}).get("mode", "explain")] = body

    page.on("request", note)
    page.click("#ask")
    assert wait_until_asked(page) == "done", page.locator("#error").inner_text()
    page.remove_listener("request", note)
    return sent


def answers(page: Any) -> dict[str, str]:
    """The three answers, by mode."""
    return {mode: page.locator(f"#pane-{mode} .answer").inner_text() for mode in ("full", "reuse", "blend")}


def judged(page: Any) -> dict[str, str]:
    """What the page says of them, by mode: right or wrong."""
    return {mode: page.locator(f"#pane-{mode} .judged").inner_text() for mode in ("full", "reuse", "blend")}


def titles(page: Any) -> list[str]:
    """The titles of the prompt's passages, in order."""
    return [item.get_attribute("data-title") for item in page.locator("#prompt > li").all()]
