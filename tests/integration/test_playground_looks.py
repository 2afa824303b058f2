"""The page at every width, in light and dark, by keyboard and for screen readers, and its pictures for the docs.

`CACHEBLEND_SCREENSHOTS=docs/results` writes the pictures there.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import answers, ask_example, browser, needs_browser, open_page, titles, wait_until_asked
from campaign import rotating

pytestmark = needs_browser
HEIGHTS = {390: 1540, 768: 1240, 1400: 1640}
"""By width: of a picture, from the top of a wide page, or of a narrow one where a click on an example brings it."""
LARGEST = 200_000  # bytes of a picture
STATES = ("first", "answered", "again", "stale", "editing")


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Any, str]]:
    with browser() as found:
        yield found


def bring_to(page: Any, state: str) -> None:
    """Brings the page to one of `STATES`, each from the one before."""
    if state == "answered":
        ask_example(page, 0)
    elif state == "again":
        ask_example(page, 1)
        assert page.locator("#changes").is_visible()
    elif state == "stale":
        page.get_by_role("button", name="Move Note 1 down", exact=True).click()
        assert page.locator("#stale").is_visible()
    elif state == "editing":
        page.locator("#add > summary").click()
        page.get_by_role("button", name="Edit Note 2", exact=True).click()
        page.evaluate("for (const part of document.querySelectorAll('#why details')) part.open = true")


@pytest.mark.parametrize("width", rotating([320, *HEIGHTS], core=[320]))
def test_nothing_is_wider_than_the_window(opened: tuple[Any, str], width: int, tmp_path: Path) -> None:
    page = open_page(*opened, width=width)
    for state in STATES:
        bring_to(page, state)
        if state == "answered" and width in HEIGHTS:
            take_picture(page, Path(os.environ.get("CACHEBLEND_SCREENSHOTS", tmp_path)) / f"playground-{width}.png")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), state
        outside = page.evaluate(
            "[...document.querySelectorAll('header, header *, main *')].filter(e => e.getClientRects().length)"
            ".filter(e => { const r = e.getBoundingClientRect(); return r.left < -.5 || r.right > innerWidth + .5; })"
            ".map(e => e.tagName + '#' + e.id + '.' + e.className)"
        )
        assert outside == [], state
    head, body = page.locator("header").bounding_box(), page.locator("main").bounding_box()
    assert (head["x"], head["width"]) == (body["x"], body["width"])  # the key's field stands in the same grid
    page.close()


def take_picture(page: Any, path: Path) -> None:
    """What is in the window after a click on an example, in 256 colours."""
    from PIL import Image

    width = page.viewport_size["width"]
    page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
    page.evaluate("innerWidth < 1000 ? document.getElementById('results').scrollIntoView() : scrollTo(0, 0)")
    page.screenshot(path=path)
    page.set_viewport_size({"width": width, "height": 900})
    with Image.open(path) as drawn:
        few = drawn.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=5, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    assert 10_000 < path.stat().st_size < LARGEST


@pytest.mark.parametrize("scheme", rotating(["light", "dark"], core=["light"]))
def test_axe_finds_nothing_serious(opened: tuple[Any, str], scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page = open_page(*opened, scheme=scheme)
    for state in STATES:
        bring_to(page, state)
        found = axe.Axe().run(page).response["violations"]
        assert [
            (each["id"], [node["target"] for node in each["nodes"]][:3], each["nodes"][0]["failureSummary"])
            for each in found
            if each["impact"] in ("serious", "critical")
        ] == [], state
    page.close()


def press(page: Any, *keys: str) -> str:
    """Presses keys, and returns what has the focus then: its label, or its id."""
    for key in keys:
        page.keyboard.press(key)
    focused = page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.id")
    assert focused, f"the focus is lost after {keys}"
    return str(focused)


def tab_to(page: Any, wanted: str) -> None:
    for _ in range(80):
        if press_any(page, "Tab") == wanted:
            return
    raise AssertionError(f"{wanted} is not reached by Tab")


def press_any(page: Any, key: str) -> str:
    page.keyboard.press(key)
    return str(
        page.evaluate(
            "(e => e.getAttribute('aria-label') || e.id || (e.dataset.example && `example ${e.dataset.example}`)"
            " || e.textContent)(document.activeElement)"
        )
    )


def test_by_keyboard_alone(opened: tuple[Any, str]) -> None:
    page = open_page(*opened)
    tab_to(page, "example 0")
    page.keyboard.press("Enter")
    assert wait_until_asked(page) == "done" and answers(page)["blend"] == "Pagon"
    tab_to(page, "Move Note 1 down")
    assert press(page, "Enter") == press(page, "Enter") == "Move Note 1 down"  # the focus moves with the passage
    for _ in range(6):
        assert press(page, "Space") == "Move Note 1 down"  # at the end it stays, and nothing happens
    assert titles(page)[-1] == "Note 1"
    tab_to(page, "Edit Note 1")
    assert press(page, "Enter") == "edited-text"
    assert press(page, "Escape") == "Edit Note 1"
    assert press(page, "Tab", "Enter") == "Remove Note 6"  # removed: the next one is at hand
    for left in (4, 3, 2, 1):
        press(page, "Enter")
        assert len(titles(page)) == left
    assert press(page, "Enter") == "prompt-title" and titles(page) == []
    tab_to(page, "Add passages")
    page.keyboard.press("Enter")
    tab_to(page, "Add Note 1")
    assert press(page, "Enter") == "Note 1 is in the prompt" and titles(page) == ["Note 1"]
    tab_to(page, "own-name")
    page.keyboard.type("Mine")
    page.keyboard.press("Tab")
    page.keyboard.type("The boot belongs to Pagon.")
    assert press(page, "Tab", "Enter") == "own-name" and titles(page) == ["Note 1", "Mine"]
    tab_to(page, "question")
    page.keyboard.press("Control+A")
    page.keyboard.type("Who has the boot?")
    page.keyboard.press("Enter")
    assert wait_until_asked(page) == "done" and answers(page)["full"] == "Pagon"
    assert page.evaluate("document.activeElement.id") == "question"
    page.close()


def test_the_page_is_loaded_without_complaints_and_from_its_own_server(opened: tuple[Any, str]) -> None:
    page = open_page(opened[0], "about:blank", wait=False)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(opened[1])
    page.wait_for_selector("#examples button")
    assert page.complaints == []  # neither the content security policy nor a missing picture
    assert all(url.startswith(opened[1]) for url in asked) and any(url.endswith("favicon.svg") for url in asked)
    policy = page.evaluate("fetch('/').then(r => r.headers.get('content-security-policy'))")
    assert "unsafe" not in policy and "default-src 'none'" in policy
    page.close()
