"""The page in a real browser: pick passages, reorder them, ask, and look at what is drawn."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cacheblend.engines.settings import PROFILE_NAME, read_profile
from cacheblend.nano import model_path
from cacheblend.serve.settings import ServeSettings
from serving import running

RATIO = str(read_profile(model_path() / PROFILE_NAME).selection.recompute_ratio)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    BROWSER is None or find_spec("playwright") is None,
    reason="needs a browser (Debian's package chromium) and playwright",
)


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with running(ServeSettings(chunk_tokens=16)) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1200, "height": 1500})
        opened.complaints = []
        opened.on(
            "console",
            lambda message: opened.complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        opened.goto(url)
        yield opened
        browser.close()


def titles(page: Any) -> list[str]:
    return [item.get_attribute("data-title") for item in page.locator("#prompt li").all()]


def sent_by_asking(page: Any) -> dict[str, dict[str, Any]]:
    """Asks, waits for both answers, and returns what was sent to explain and for the blended answer."""
    sent: dict[str, dict[str, Any]] = {}

    def note(request: Any) -> None:
        if request.method == "POST":
            body = request.post_data_json
            sent[body.get("cacheblend", {}).get("mode", "explain")] = body

    page.on("request", note)
    page.click("#ask")
    page.wait_for_function("document.body.dataset.state === 'asking'")
    page.wait_for_function("document.body.dataset.state !== 'asking'", timeout=60_000)
    page.remove_listener("request", note)
    assert page.evaluate("document.body.dataset.state") == "done", page.locator("#error").inner_text()
    return sent


def test_picking_reordering_and_asking(page: Any, tmp_path: Path) -> None:
    page.wait_for_selector("#library li")
    question = page.evaluate("fetch('/playground/passages').then(r => r.json()).then(f => f.questions[2])")
    for number in question["passages"]:
        page.get_by_role("button", name=f"Add note {number + 1}", exact=True).click()
    picked = [f"note {number + 1}" for number in question["passages"]]
    assert titles(page) == picked
    page.get_by_role("button", name=f"Move {picked[0]} down", exact=True).click()
    assert titles(page) == [picked[1], picked[0], *picked[2:]]
    page.locator("#prompt li").nth(0).drag_to(page.locator("#prompt li").nth(2))
    assert sorted(titles(page)) == sorted(picked) and titles(page) != [picked[1], picked[0], *picked[2:]]

    page.fill("#question", question["text"])
    page.click("#ask")
    page.wait_for_function("document.body.dataset.state === 'done'", timeout=60_000)
    for pane in ("blend", "full"):
        assert page.locator(f"#pane-{pane} .answer").inner_text().strip()
        assert "tokens" in page.locator(f"#pane-{pane} .facts").inner_text()
        assert page.locator(f"#bar-{pane}").bounding_box()["width"] > 0
        assert "ms" in page.locator(f"#time-{pane}").inner_text()
    assert " nats." in page.locator("#quality").inner_text()
    for source in ("loaded", "recomputed", "fresh"):
        assert page.locator(f"#why span.{source}").count() > 0
    heat = {span.evaluate("s => s.style.backgroundColor") for span in page.locator("#why span.loaded").all()[:200]}
    assert len(heat) > 5
    assert "prefix" in {span.get_attribute("class") for span in page.locator("#why span").all()}
    shots = Path(os.environ.get("CACHEBLEND_SCREENSHOTS", tmp_path))
    page.screenshot(path=shots / "playground.png", full_page=True)
    assert (shots / "playground.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("selector", "legend"),
    [
        ("", "darker: larger KV deviation"),  # the model's settings: hybrid, which measures deviation last
        ("hybrid", "darker: larger KV deviation"),
        ("hkvd", "darker: larger KV deviation"),
        ("query", "darker: more attention by the question"),
        ("random", None),
    ],
)
def test_the_legend_says_what_is_drawn(page: Any, selector: str, legend: str | None) -> None:
    page.select_option("#selector", selector)
    page.click("#ask")
    page.wait_for_function("document.body.dataset.state === 'asking'")
    page.wait_for_function("document.body.dataset.state === 'done'", timeout=60_000)
    shown = page.locator("#heat")
    assert shown.is_visible() == (legend is not None)
    assert legend is None or shown.inner_text() == legend


def test_the_models_settings_are_used_unless_others_are_chosen(page: Any) -> None:
    page.select_option("#selector", "hkvd")
    assert page.locator("#ratio").is_enabled()
    page.locator("#ratio").fill("0.3")
    sent = sent_by_asking(page)
    for body in (sent["explain"], sent["blend"]["cacheblend"]):
        assert (body["selector"], body["recompute_ratio"]) == ("hkvd", 0.3)
    page.select_option("#selector", "")
    assert page.locator("#selector option:checked").inner_text() == "the model's settings: hybrid"
    assert page.locator("#ratio").is_disabled()
    assert page.locator("#ratio-shown").inner_text() == page.locator("#ratio").input_value() == RATIO
    sent = sent_by_asking(page)
    assert sent["blend"]["cacheblend"] == {"mode": "blend"}
    assert not {"selector", "recompute_ratio"} & sent["explain"].keys()


def test_own_passages_and_what_is_missing(page: Any) -> None:
    page.click("#clear")
    page.click("#ask")
    assert "Add a passage" in page.locator("#error").inner_text()
    page.locator("summary").click()
    page.fill("#own", "The boot is Anna's. It is red.")
    page.click("#add-own")
    assert len(titles(page)) == 1
    page.fill("#question", "")
    page.click("#ask")
    assert "Enter a question" in page.locator("#error").inner_text()
    page.fill("#question", "Who has the boot?")
    page.select_option("#selector", "head")
    page.locator("#ratio").fill("1")
    page.click("#ask")
    page.wait_for_function("document.body.dataset.state !== 'asking'", timeout=60_000)
    assert page.evaluate("document.body.dataset.state") == "done"
    assert "Both answers are the same" in page.locator("#quality").inner_text()


@pytest.mark.parametrize("width", [320, 360, 390, 1280])
def test_nothing_is_wider_than_the_window(page: Any, width: int) -> None:
    """After an answer, with passages in both lists: also the parts that are empty at first."""
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    edges = page.evaluate(
        "[...document.querySelectorAll('header, header *, main *')].filter(e => e.getClientRects().length)"
        ".map(e => e.getBoundingClientRect()).filter(r => r.left < -0.5 || r.right > innerWidth + 0.5).length"
    )
    assert edges == 0
    head, card = page.locator("header").bounding_box(), page.locator("main").bounding_box()
    assert (head["x"], head["width"]) == (card["x"], card["width"])


def test_the_page_is_loaded_without_complaints(page: Any) -> None:
    page.complaints.clear()
    page.reload()
    page.wait_for_selector("#library li")
    assert page.complaints == []
    assert page.locator("#selector").input_value() == "" and page.locator("#ratio-shown").inner_text() == RATIO
