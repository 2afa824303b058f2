"""The page: what someone sees who tries it, at every width, in light and dark, by keyboard and for screen readers; and
what goes wrong: streams that are cut, a server that is gone, a library that cannot be loaded, results that are old.

`CACHEBLEND_SCREENSHOTS=docs/results` writes pictures of the page there. Skipped where there is no browser."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cacheblend.engines.settings import PROFILE_NAME, read_profile
from cacheblend.nano import model_path
from cacheblend.nano.examples import EXAMPLES
from cacheblend.serve.keys import ApiKey, KeyRing
from cacheblend.serve.settings import ServeSettings
from campaign import rotating
from serving import running

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    BROWSER is None or find_spec("playwright") is None,
    reason="needs a browser (Debian's package chromium) and playwright",
)
TIMEOUT_MS = 600_000  # a busy machine is no failure
CHAT, EXPLAIN = "**/v1/chat/completions", "**/playground/explain"
ASKED = "body[data-state=done], body[data-state=failed]"  # not a function: the page's policy forbids to evaluate one


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Any, str]]:
    """A browser, and the address of a server on the model that ships."""
    from playwright.sync_api import sync_playwright

    with running(ServeSettings(chunk_tokens=16)) as url, sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened, url
        opened.close()


GIVEN: dict[tuple[str, str | None], dict[str, Any]] = {}


def give_again(route: Any) -> None:
    """What the server has answered once is its answer to the same request, so that the model need not compute it."""
    asked = route.request.url, route.request.post_data
    if asked not in GIVEN:
        answer = route.fetch()
        GIVEN[asked] = {"status": answer.status, "body": answer.body(), "content_type": answer.headers["content-type"]}
    route.fulfill(**GIVEN[asked])


def open_page(opened: Any, url: str = "", *, width: int = 1400, scheme: str = "light", computes: bool = True) -> Any:
    """The page in a window of its own, or an empty one; ``complaints`` of it are what the browser's console says."""
    page = opened.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    page.set_default_timeout(TIMEOUT_MS)
    if not computes:
        for path in (CHAT, EXPLAIN):
            page.context.route(path, give_again)
    page.complaints = []
    page.on("console", lambda said: page.complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    if url:
        page.goto(url)
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


RATIO = str(read_profile(model_path() / PROFILE_NAME).selection.recompute_ratio)
EVENT = 'data: {"choices": [{"delta": {"content": "Pag"}}]}\n\n'


@pytest.fixture(scope="module")
def page(opened: tuple[Any, str]) -> Any:
    return open_page(*opened)


@pytest.fixture
def fresh(opened: tuple[Any, str]) -> Iterator[Any]:
    """A page of its own; `page` goes through one test after the other, and is answered by the model."""
    page = open_page(*opened, computes=False)
    yield page
    page.close()


def notes(*numbers: int) -> list[str]:
    return [f"Note {number}" for number in numbers]


def test_one_click_shows_that_full_reuse_is_wrong_and_blending_right_and_why(page: Any) -> None:
    assert "nano" in page.locator("#model").inner_text()
    assert "290 words" in page.locator("#about-examples").inner_text()
    assert "often right" in page.locator("#about-examples").inner_text()  # the examples were chosen, and it says so
    ask_example(page, 0)
    assert answers(page)["full"] == answers(page)["blend"] == "Pagon" != answers(page)["reuse"]
    marks = judged(page)
    assert (marks["full"], marks["blend"]) == ("right", "right") and marks["reuse"].startswith("wrong")
    for mode in ("full", "reuse", "blend"):
        pane = page.locator(f"#pane-{mode}")
        assert "tokens" in pane.locator(".facts").inner_text() and "s" in pane.locator(".time").inner_text()
        assert pane.locator(".bar i").bounding_box()["width"] > 0
    headline = page.locator(".headline").inner_text()
    assert headline.startswith("Blend is right") and "Full reuse is wrong." in headline and "1.0 times" not in headline
    why = page.locator("#verdict").inner_text()
    assert "Note 2 (“The sword passed to Pagon.”) and Note 3 (“The bowl now belongs to him.”)" in why

    # the map marks what was recomputed, and what the answer needs
    for source in ("loaded", "recomputed", "fresh", "prefix"):
        assert page.locator(f"#why .tokens .{source}").count() > 0
    opened = page.locator("#why details[open]")
    assert [part.get_attribute("data-title") for part in opened.all()] == ["Note 2", "Note 3"]
    marked = "".join(token.text_content() for token in page.locator("#why .tokens .needed").all())
    assert marked.strip() == "The sword passed to Pagon. The bowl now belongs to him."
    heat = page.evaluate(
        "[...new Set([...document.querySelectorAll('#why details[open] .tokens .loaded')]"
        ".map(each => getComputedStyle(each).backgroundColor))].length"
    )
    assert heat > 5
    assert " nats." in page.locator("#map-facts").inner_text()
    parts = [part.get_attribute("data-title") for part in page.locator("#why details").all()]
    assert parts == ["Beginning of the prompt", *notes(1, 2, 3, 4, 5, 6), "Question"]
    assert "darker" not in page.locator("body").inner_text()

    # the same notes in another order have another answer
    ask_example(page, 1)
    assert answers(page)["full"] == answers(page)["blend"] == "Moaln" != answers(page)["reuse"]
    changes = page.locator("#verdict").inner_text()
    assert "the passages have another order" in changes
    rows = [row.inner_text().split("\t") for row in page.locator("#changes tbody tr").all()]
    assert ["Right answer", "Pagon", "Moaln"] in rows
    assert next(row for row in rows if row[0] == "Passages stored for it")[2] == "0"  # all are there from before


@pytest.mark.parametrize("number", rotating(range(2, len(EXAMPLES))))
def test_each_example_does_what_it_says(page: Any, number: int) -> None:
    ask_example(page, number)
    marks = judged(page)
    assert (marks["full"], marks["blend"]) == ("right", "right")
    assert (marks["reuse"] == "right") == ("right, too" in EXAMPLES[number].about)


@pytest.mark.slow(4)
def test_shuffling_asks_about_the_new_order(page: Any) -> None:
    ask_example(page, 0)
    before = titles(page)
    page.get_by_role("button", name="Shuffle and ask").click()
    assert wait_until_asked(page) == "done"
    assert sorted(titles(page)) == sorted(before) and titles(page) != before
    assert page.locator("#results").get_attribute("data-stale") == "false"
    assert "another order" in page.locator("#verdict").inner_text()


@pytest.mark.slow(3)
def test_the_models_settings_are_used_unless_others_are_chosen(page: Any) -> None:
    page.select_option("#selector", "hkvd")
    page.locator("#ratio").fill("0.3")
    sent = ask(page)
    for body in (sent["explain"], sent["blend"]["cacheblend"]):
        assert (body["selector"], body["recompute_ratio"]) == ("hkvd", 0.3)
    assert sent["full"]["cacheblend"] == {"mode": "full"} and sent["reuse"]["cacheblend"] == {"mode": "reuse"}
    assert "what is recomputed: hkvd, 0.30 in place of the model's settings" in page.locator("#verdict").inner_text()
    page.select_option("#selector", "")
    assert page.locator("#selector option:checked").inner_text() == "the model's settings: hybrid"
    assert page.locator("#ratio").is_disabled()
    assert page.locator("#ratio-shown").inner_text() == page.locator("#ratio").input_value() == RATIO
    sent = ask(page)
    assert sent["blend"]["cacheblend"] == {"mode": "blend"}
    assert not {"selector", "recompute_ratio"} & sent["explain"].keys()


@pytest.mark.parametrize(
    ("selector", "legend"),
    rotating(
        [
            ("random", None),
            ("query", "more attention by the question"),
            ("", "larger KV deviation"),  # the model's settings: hybrid, which measures deviation last
        ]
    ),
)
def test_the_legend_says_what_is_drawn(page: Any, selector: str, legend: str | None) -> None:
    page.select_option("#selector", selector)
    ask(page)
    shown = page.locator("#heat")
    assert shown.is_visible() == (legend is not None)
    assert legend is None or shown.inner_text() == f"stronger colour: {legend}"
    page.select_option("#selector", "")


@pytest.mark.parametrize(
    ("offered", "expected"), rotating([("Recompute 30 %", "0.30"), ("Choose by KV deviation alone", "hkvd")])
)
def test_what_is_offered_to_try_says_what_it_changed(page: Any, offered: str, expected: str) -> None:
    ask_example(page, 0)
    page.select_option("#selector", "")
    page.get_by_role("button", name=offered).click()
    assert wait_until_asked(page) == "done"
    assert expected in page.locator("#verdict").inner_text()
    page.select_option("#selector", "")


@pytest.mark.slow(2)
def test_passages_are_moved_by_mouse(page: Any) -> None:
    ask_example(page, 0)
    page.get_by_role("button", name="Move Note 1 down", exact=True).click()
    assert titles(page) == notes(2, 1, 3, 4, 5, 6)
    page.locator("#prompt > li").nth(0).drag_to(page.locator("#prompt > li").nth(2))
    assert titles(page) == notes(1, 3, 2, 4, 5, 6)


def test_own_passages_are_written_edited_and_deleted(page: Any) -> None:
    page.click("#clear")
    page.click("#ask")
    assert "Add a passage" in page.locator("#error").inner_text()
    page.locator("#add > summary").click()
    for title, text in (("Who", "Later Pagon sat down."), ("What", "The boot belongs to him.")):
        page.fill("#own-name", title)
        page.fill("#own-text", text)
        page.get_by_role("button", name="Add to the prompt").click()
    assert titles(page) == ["Who", "What"]
    page.fill("#question", "")
    page.click("#ask")
    assert "Enter a question" in page.locator("#error").inner_text()
    page.fill("#question", "Who has the boot?")
    ask(page)
    assert judged(page)["full"] == "right" and answers(page)["full"] == "Pagon"
    page.get_by_role("button", name="Edit Who").click()
    page.fill("#edited-text", "Later Moaln sat down.")
    page.get_by_role("button", name="Save").click()
    assert page.locator("#stale").is_visible() and "Who was edited" in page.locator("#stale").inner_text()
    ask(page)
    assert answers(page)["full"] == "Moaln" and "Who was edited" in page.locator("#verdict").inner_text()
    page.get_by_role("button", name="Edit What").click()
    page.get_by_role("button", name="Delete").click()
    assert titles(page) == ["Who"] and "What was removed" in page.locator("#stale").inner_text()
    assert page.get_by_role("button", name="Add What").count() == 0  # gone from those to choose from, too


@pytest.mark.slow(2)
def test_an_edited_note_leaves_the_library_as_it_was(page: Any) -> None:
    ask_example(page, 3)
    page.get_by_role("button", name="Edit Note 1", exact=True).click()
    page.fill("#edited-text", "The saw passed to Moaln.")
    page.get_by_role("button", name="Shuffle", exact=True).click()
    assert page.locator("#edited-text").input_value() == "The saw passed to Moaln."  # what is written stays
    page.get_by_role("button", name="Save").click()
    assert "Note 1, edited" in titles(page)
    ask(page)
    assert answers(page)["full"] == "Moaln"
    ask_example(page, 3)
    assert titles(page) == notes(1, 2, 3, 4, 5, 6) and answers(page)["full"] == "Tagoa"


@pytest.mark.slow(3)
def test_a_model_that_does_not_ship_is_promised_nothing(opened: tuple[Any, str]) -> None:
    page = open_page(opened[0])

    def other(route: Any) -> None:
        found = route.fetch().json()
        found["model"] |= {"name": "other-7b", "parameters": 7_000_000_000, "is_shipped": False}
        for question in found["questions"]:
            question.pop("places", None)
        route.fulfill(json=found)

    page.route("**/playground/passages", other)
    page.route(EXPLAIN, lambda route: route.fulfill(json=route.fetch().json() | {"expected": None}))
    page.goto(opened[1])
    page.wait_for_selector("#examples button")
    assert "other-7b" in page.locator("#model").inner_text() and "7.0 billion" in page.locator("#model").inner_text()
    about = page.locator("#about-examples").inner_text()
    assert "may answer them in any way" in about and "290 words" not in about
    ask_example(page, 0)
    marks = judged(page)
    assert marks["full"] == "the reference" and marks["blend"] == "as full recompute"
    assert marks["reuse"] == "not as full recompute" and "right" not in page.locator(".headline").inner_text()
    assert "The answer's words stand in Note 2" in page.locator("#verdict").inner_text()
    page.close()


def counting(page: Any, path: str) -> list[str]:
    """The requests to a path, as they are made."""
    made: list[str] = []
    page.on("request", lambda request: made.append(request.method) if request.url.endswith(path) else None)
    return made


@pytest.mark.slow(4)
def test_enter_twice_asks_once(fresh: Any) -> None:
    explained, asked = counting(fresh, "/playground/explain"), counting(fresh, "/v1/chat/completions")
    held: list[Any] = []
    fresh.route(EXPLAIN, lambda route: held.append(route))
    fresh.focus("#question")
    fresh.keyboard.press("Enter")
    fresh.keyboard.press("Enter")
    fresh.locator("#ask").click(force=True)  # marked as disabled, and can be clicked all the same
    fresh.locator("[data-example='1']").click(force=True)
    assert fresh.locator("#ask").inner_text() == "Asking …"
    held[0].fallback()
    assert wait_until_asked(fresh) == "done"
    assert len(explained) == 1 and len(asked) == 3
    assert answers(fresh)["full"] == "Pagon"  # not "PagonPagon", and of the first question


def sse(body: str) -> Callable[[Any], None]:
    return lambda route: route.fulfill(body=body, headers={"Content-Type": "text/event-stream"})


BROKEN = {
    "in the middle": (sse(EVENT), "ended in the middle of an answer"),
    "at once": (sse(""), "ended in the middle of an answer"),
    "inside an event": (sse(EVENT + 'data: {"choices": [{"del'), "ended in the middle of an answer"),
    "with nonsense": (sse(EVENT + "data: nonsense\n\n"), "ended in the middle of an answer"),
    "with an error": (
        sse(EVENT + 'data: {"error": {"message": "shutting down"}}\n\ndata: [DONE]\n\n'),
        "shutting down",
    ),
    "reset": (lambda route: route.abort("connectionreset"), "cannot be reached"),
    "by a proxy": (lambda route: route.fulfill(status=502, body="<html>Bad gateway</html>"), "status 502"),
    "refused": (lambda route: route.fulfill(status=429, json={"error": {"message": "too many wait"}}), "too many wait"),
}


@pytest.mark.parametrize("how", rotating(BROKEN, core=["in the middle"]))
def test_an_answer_that_breaks_off_says_so_and_can_be_asked_again(fresh: Any, how: str) -> None:
    act, message = BROKEN[how]
    fresh.route(CHAT, act)
    fresh.click("#ask")
    assert wait_until_asked(fresh) == "failed"
    said = fresh.locator("#error").inner_text()
    assert message in said and "null" not in said and "undefined" not in said
    assert fresh.locator("#verdict").inner_text() == "" and not fresh.locator("#map").is_visible()
    assert judged(fresh)["full"] in ("broke off", "")
    fresh.unroute(CHAT)
    fresh.click("#ask")
    assert wait_until_asked(fresh) == "done" and not fresh.locator("#error").is_visible()


def test_a_server_that_is_gone_is_said_to_be(fresh: Any) -> None:
    fresh.context.unroute_all()
    ask_example(fresh, 0)
    fresh.context.set_offline(True)
    fresh.click("#ask")
    assert wait_until_asked(fresh) == "failed"
    assert "cannot be reached" in fresh.locator("#error").inner_text()
    fresh.context.set_offline(False)
    fresh.click("#ask")
    assert wait_until_asked(fresh) == "done"
    assert "asked once more" in fresh.locator("#verdict").inner_text()  # compared with the result before the failure


@pytest.mark.parametrize("status", rotating([None, 500, 200]))
def test_without_its_library_the_page_says_so_and_works_on(opened: tuple[Any, str], status: int | None) -> None:
    page = open_page(opened[0], computes=False)
    path = "**/playground/passages"
    page.route(path, lambda route: route.fulfill(status=status, body="{") if status else route.abort())
    page.goto(opened[1])
    page.wait_for_selector("#library-error")
    assert "could not be loaded" in page.locator("#library-error").inner_text()
    page.locator("#add > summary").click()
    page.fill("#own-text", "The boot belongs to Pagon.")
    page.get_by_role("button", name="Add to the prompt").click()
    page.fill("#question", "Who has the boot?")
    page.click("#ask")
    assert wait_until_asked(page) == "done" and answers(page)["full"] == "Pagon"
    page.unroute(path)
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("#examples button")
    assert not page.locator("#library-error").is_visible()
    assert page.locator("#question").input_value() == "Who has the boot?"  # what was written stays
    page.close()


@pytest.mark.slow(1)
def test_results_that_no_longer_fit_the_prompt_are_marked(fresh: Any) -> None:
    def is_stale() -> bool:
        stale = fresh.locator("#results").get_attribute("data-stale") == "true"
        assert fresh.locator("#stale").is_visible() == stale
        return stale

    ask_example(fresh, 0)
    assert not is_stale()
    changes: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
        (
            lambda: fresh.fill("#question", "Who has the cart?"),
            lambda: fresh.fill("#question", "Who has the bowl?"),
            "question",
        ),
        (
            lambda: fresh.get_by_role("button", name="Move Note 1 down", exact=True).click(),
            lambda: fresh.get_by_role("button", name="Move Note 1 up", exact=True).click(),
            "order",
        ),
        (lambda: fresh.select_option("#selector", "head"), lambda: fresh.select_option("#selector", ""), "head"),
    ]
    for change, back, what in changes:
        change()
        assert is_stale() and what in fresh.locator("#stale").inner_text()
        back()
        assert not is_stale()  # the same prompt again
    fresh.get_by_role("button", name="Remove Note 6").click()
    assert is_stale() and "Note 6 was removed" in fresh.locator("#stale").inner_text()
    fresh.get_by_role("button", name="Ask again").click()
    assert wait_until_asked(fresh) == "done" and not is_stale()


@pytest.mark.slow(4)
def test_a_prompt_that_is_changed_while_it_is_asked_leaves_stale_results(fresh: Any) -> None:
    def change_and_go_on(route: Any) -> None:
        fresh.evaluate("document.getElementById('clear').click()")
        route.fallback()

    fresh.route(EXPLAIN, change_and_go_on)
    fresh.click("#ask")
    assert wait_until_asked(fresh) == "done" and answers(fresh)["full"] == "Pagon"
    assert fresh.locator("#stale").is_visible() and "were removed" in fresh.locator("#stale").inner_text()


@pytest.mark.slow(3)
def test_a_question_can_be_stopped(fresh: Any) -> None:
    fresh.route(CHAT, lambda route: None)  # never answered
    fresh.click("#ask")
    fresh.wait_for_selector("#pane-full[data-state=asking]")
    fresh.click("#stop")
    assert wait_until_asked(fresh) == "failed" and fresh.locator("#error").inner_text() == "Stopped."
    assert not fresh.locator("#stop").is_visible()


@pytest.mark.slow(4)
def test_a_server_with_keys_asks_for_one(opened: tuple[Any, str]) -> None:
    page = open_page(*opened)
    assert not page.locator("#key-field").is_visible()  # none is needed here
    page.close()
    ring = KeyRing((ApiKey("alice", hashlib.sha256(b"cb-secret").hexdigest(), "t"),))
    with running(ServeSettings(chunk_tokens=16, keys=ring)) as url:
        page = open_page(opened[0], url)
        assert page.locator("#key-field").is_visible()
        assert "needs one" in page.locator("#key").get_attribute("placeholder")
        page.click("#ask")
        assert wait_until_asked(page) == "failed" and "needs an API key" in page.locator("#error").inner_text()
        assert page.evaluate("document.activeElement.id") == "key"
        page.fill("#key", "cb-secret")
        ask_example(page, 0)
        assert answers(page)["blend"] == "Pagon"
        page.close()


HEIGHTS = {390: 1540, 768: 1240, 1400: 1640}
"""By width: of a picture, from the top of a wide page, or of a narrow one where a click on an example brings it."""
LARGEST = 200_000  # bytes of a picture
STATES = ("first", "answered", "again", "stale", "editing")


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


@pytest.mark.parametrize("width", rotating([320, *HEIGHTS]))
def test_nothing_is_wider_than_the_window(opened: tuple[Any, str], width: int, tmp_path: Path) -> None:
    page = open_page(*opened, width=width, computes=False)
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


@pytest.mark.parametrize(
    "scheme", [pytest.param("light", marks=pytest.mark.slow(1)), pytest.param("dark", marks=pytest.mark.slow(3))]
)
def test_axe_finds_nothing_serious(opened: tuple[Any, str], scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page = open_page(*opened, scheme=scheme, computes=False)
    for state in STATES:
        bring_to(page, state)
        if state in ("answered", "stale"):
            continue  # what they show is still there in the next one
        found = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
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


@pytest.mark.slow(4)
def test_by_keyboard_alone(opened: tuple[Any, str]) -> None:
    page = open_page(*opened, computes=False)
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
    page = open_page(opened[0])
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(opened[1])
    page.wait_for_selector("#examples button")
    assert page.complaints == []  # neither the content security policy nor a missing picture
    assert all(url.startswith(opened[1]) for url in asked) and any(url.endswith("favicon.svg") for url in asked)
    policy = page.evaluate("fetch('/').then(r => r.headers.get('content-security-policy'))")
    assert "unsafe" not in policy and "default-src 'none'" in policy
    page.close()
