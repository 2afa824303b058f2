"""The page when something goes wrong, and what it says then.

Situations: Enter twice, and a click on top; a stream that is cut in the middle, or ends with an error event; a server
that is gone before or between answers; answers that are no JSON; a library that cannot be loaded; results older than
the prompt; a prompt that is changed while it is asked; a question that is stopped; a server with keys.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from browsing import answers, ask_example, browser, judged, needs_browser, open_page, wait_until_asked
from cacheblend.serve.keys import ApiKey, KeyRing
from cacheblend.serve.settings import ServeSettings
from serving import running

pytestmark = needs_browser
CHAT = "**/v1/chat/completions"
EVENT = 'data: {"choices": [{"delta": {"content": "Pag"}}]}\n\n'


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Any, str]]:
    with browser() as found:
        yield found


@pytest.fixture
def page(opened: tuple[Any, str]) -> Iterator[Any]:
    page = open_page(*opened)
    yield page
    page.close()


def counting(page: Any, path: str) -> list[str]:
    """The requests to a path, as they are made."""
    made: list[str] = []
    page.on("request", lambda request: made.append(request.method) if request.url.endswith(path) else None)
    return made


def test_enter_twice_asks_once(page: Any) -> None:
    explained, asked = counting(page, "/playground/explain"), counting(page, "/v1/chat/completions")
    held: list[Any] = []
    page.route("**/playground/explain", lambda route: held.append(route))
    page.focus("#question")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.locator("#ask").click(force=True)  # marked as disabled, and can be clicked all the same
    page.locator("[data-example='1']").click(force=True)
    assert page.locator("#ask").inner_text() == "Asking …"
    held[0].continue_()
    assert wait_until_asked(page) == "done"
    assert len(explained) == 1 and len(asked) == 3
    assert answers(page)["full"] == "Pagon"  # not "PagonPagon", and of the first question


def sse(body: str) -> Callable[[Any], None]:
    return lambda route: route.fulfill(body=body, headers={"Content-Type": "text/event-stream"})


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (sse(EVENT), "ended in the middle of an answer"),
        (sse(""), "ended in the middle of an answer"),
        (sse(EVENT + 'data: {"choices": [{"del'), "ended in the middle of an answer"),
        (sse(EVENT + "data: nonsense\n\n"), "ended in the middle of an answer"),
        (sse(EVENT + 'data: {"error": {"message": "shutting down"}}\n\ndata: [DONE]\n\n'), "shutting down"),
        (lambda route: route.abort("connectionreset"), "cannot be reached"),
        (lambda route: route.fulfill(status=502, body="<html>Bad gateway</html>"), "status 502"),
        (lambda route: route.fulfill(status=429, json={"error": {"message": "too many wait"}}), "too many wait"),
    ],
)
def test_an_answer_that_breaks_off_says_so_and_can_be_asked_again(
    page: Any, act: Callable[[Any], None], message: str
) -> None:
    page.route(CHAT, act)
    page.click("#ask")
    assert wait_until_asked(page) == "failed"
    said = page.locator("#error").inner_text()
    assert message in said and "null" not in said and "undefined" not in said
    assert page.locator("#verdict").inner_text() == "" and not page.locator("#map").is_visible()
    assert judged(page)["full"] in ("broke off", "")
    page.unroute(CHAT)
    page.click("#ask")
    assert wait_until_asked(page) == "done" and not page.locator("#error").is_visible()


def test_a_server_that_is_gone_is_said_to_be(page: Any) -> None:
    ask_example(page, 0)
    page.context.set_offline(True)
    page.click("#ask")
    assert wait_until_asked(page) == "failed"
    assert "cannot be reached" in page.locator("#error").inner_text()
    page.context.set_offline(False)
    page.click("#ask")
    assert wait_until_asked(page) == "done"
    assert "asked once more" in page.locator("#verdict").inner_text()  # compared with the result before the failure


@pytest.mark.parametrize("status", [None, 500, 200])
def test_without_its_library_the_page_says_so_and_works_on(opened: tuple[Any, str], status: int | None) -> None:
    page = open_page(opened[0], "about:blank", wait=False)
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


def test_results_that_no_longer_fit_the_prompt_are_marked(page: Any) -> None:
    def is_stale() -> bool:
        stale = page.locator("#results").get_attribute("data-stale") == "true"
        assert page.locator("#stale").is_visible() == stale
        return stale

    ask_example(page, 0)
    assert not is_stale()
    changes: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
        (
            lambda: page.fill("#question", "Who has the cart?"),
            lambda: page.fill("#question", "Who has the bowl?"),
            "question",
        ),
        (
            lambda: page.get_by_role("button", name="Move Note 1 down", exact=True).click(),
            lambda: page.get_by_role("button", name="Move Note 1 up", exact=True).click(),
            "order",
        ),
        (lambda: page.select_option("#selector", "head"), lambda: page.select_option("#selector", ""), "head"),
    ]
    for change, back, what in changes:
        change()
        assert is_stale() and what in page.locator("#stale").inner_text()
        back()
        assert not is_stale()  # the same prompt again
    page.get_by_role("button", name="Remove Note 6").click()
    assert is_stale() and "Note 6 was removed" in page.locator("#stale").inner_text()
    page.get_by_role("button", name="Ask again").click()
    assert wait_until_asked(page) == "done" and not is_stale()


def test_a_prompt_that_is_changed_while_it_is_asked_leaves_stale_results(page: Any) -> None:
    def change_and_go_on(route: Any) -> None:
        page.evaluate("document.getElementById('clear').click()")
        route.continue_()

    page.route("**/playground/explain", change_and_go_on)
    page.click("#ask")
    assert wait_until_asked(page) == "done" and answers(page)["full"] == "Pagon"
    assert page.locator("#stale").is_visible() and "were removed" in page.locator("#stale").inner_text()


def test_a_question_can_be_stopped(page: Any) -> None:
    page.route(CHAT, lambda route: None)  # never answered
    page.click("#ask")
    page.wait_for_selector("#pane-full[data-state=asking]")
    page.click("#stop")
    assert wait_until_asked(page) == "failed" and page.locator("#error").inner_text() == "Stopped."
    assert not page.locator("#stop").is_visible()


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
