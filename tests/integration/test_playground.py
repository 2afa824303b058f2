"""The page: what someone sees who tries it, at every width, in light and dark, by keyboard and for screen readers; and
what goes wrong: streams that are cut, a server that is gone, a library that cannot be loaded, results that are old.

`CACHEBLEND_SCREENSHOTS=docs/results` writes pictures of the page there. Skipped where there is no browser."""

import hashlib
import json
import os
import re
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
from cacheblend.serve.routes.playground import EXAMPLES_FILE, _texts
from cacheblend.serve.settings import ServeSettings
from campaign import rotating
from serving import running
from tiny_folder import TinyShape, build_tiny

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    BROWSER is None or find_spec("playwright") is None,
    reason="needs a browser (Debian's package chromium) and playwright",
)
TIMEOUT_MS = 600_000  # a busy machine is no failure
CHAT, EXPLAIN = "**/v1/chat/completions", "**/playground/explain"
ASKED = "body:is([data-state=done], [data-state=failed], [data-state=stopped])"
"""Not a function: the page's policy forbids to evaluate one."""


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


def open_page(
    opened: Any, url: str = "", *, width: int = 1400, scheme: str = "light", forced: str = "none", computes: bool = True
) -> Any:
    """The page in a window of its own, or an empty one; ``complaints`` of it are what the browser's console says."""
    page = opened.new_page(
        viewport={"width": width, "height": 844 if width < 500 else 900},
        color_scheme=scheme,
        forced_colors=forced,
        reduced_motion="reduce",
    )
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
    """Waits for the end of a question; ``done``, ``failed`` or ``stopped``."""
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
    assert "KV" not in page.locator(".lead").inner_text().split(". ")[0]  # what it is about, for anyone
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
    assert "All passages were stored already" in changes
    assert changed(page) == [[what, "Pagon", "Moaln"] for what in ("Right answer", "Blend", "Full recompute")]


def changed(page: Any) -> list[list[str]]:
    """The rows of what changed; none of them is the same as before, and none in bold."""
    rows = [row.inner_text().split("\t") for row in page.locator("#changes tbody tr").all()]
    assert all(old != now for _, old, now in rows)
    weights = "[...document.querySelectorAll('#changes tbody td')].every(e => getComputedStyle(e).fontWeight === '400')"
    assert page.evaluate(weights)
    return rows


def test_what_is_shown_of_the_work_is_its_share_of_a_full_prefill(fresh: Any) -> None:
    ask_example(fresh, 0)
    made = [given["body"].decode() for (_, sent), given in GIVEN.items() if sent and '"mode":"blend"' in sent]
    report = json.loads(next(line for line in made[0].splitlines() if '"row_layers"' in line)[6:])["cacheblend"]
    share = f"{100 * report['row_layers'] / (report['prompt_tokens'] * 12):.1f}\xa0%"
    assert 10 < float(share[:-2]) < 20  # though 2 % of the loaded tokens pass all layers
    for place in ("#pane-blend .facts", ".headline", "#map-facts"):
        assert f"{share} of " in fresh.locator(place).inner_text()
    assert "all of the work" in fresh.locator("#pane-full .facts").inner_text()
    assert not re.search(r"\d of [\d,]+ (loaded )?tokens? recomputed", fresh.locator("main").inner_text())
    fresh.click("#ask")
    assert wait_until_asked(fresh) == "done" and changed(fresh) == []
    assert "Neither the answers nor the work" in fresh.locator("#changes").inner_text()
    fresh.get_by_role("button", name="Recompute ratio 0.30").click()
    assert wait_until_asked(fresh) == "done"
    [row] = [row for row in changed(fresh) if row[0] == "Blend, share of the work"]
    assert row[1] == share and float(row[2][:-2]) > 30


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
    ("offered", "expected"),
    rotating(
        [("Recompute ratio 0.30", "0.30"), ("By KV deviation alone, as in the paper", "hkvd, 0.15")],
        core=[("By KV deviation alone, as in the paper", "hkvd, 0.15")],
    ),
)
def test_what_is_offered_to_try_says_what_it_changed(page: Any, offered: str, expected: str) -> None:
    ask_example(page, 0)
    page.select_option("#selector", "")
    page.get_by_role("button", name=offered).click()
    assert wait_until_asked(page) == "done"
    assert expected in page.locator("#verdict").inner_text()
    assert judged(page)["blend"] == "right"
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
    assert "Add a passage" in page.locator("#refused").inner_text()
    page.locator("#add > summary").click()
    for title, text in (("Who", "Later Pagon sat down."), ("What", "The boot belongs to him.")):
        page.fill("#own-name", title)
        page.fill("#own-text", text)
        page.get_by_role("button", name="Add to the prompt").click()
    assert titles(page) == ["Who", "What"]
    page.fill("#question", "")
    page.click("#ask")
    assert "Enter a question" in page.locator("#refused").inner_text()
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


TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %} Answer:"
ARABIC = "القاهرة عاصمة مصر 🏙️. تقع على نهر النيل، e\u0301tude 👨‍👩‍👧."


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: Any) -> Iterator[str]:
    """The address of a server on random weights, which is to the page a model of someone's."""
    folder = tmp_path_factory.mktemp("drawn")
    texts = [each["text"] for each in json.loads(EXAMPLES_FILE.read_text())["passages"]]
    build_tiny(folder, texts, TinyShape(layers=4, width=64, mlp_width=128, heads=4, vocab_size=512))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with running(ServeSettings(chunk_tokens=16), model=folder) as url:
        yield url


def test_another_model_is_asked_questions_of_its_kind_and_compared_with_itself(
    opened: tuple[Any, str], drawn: str
) -> None:
    page = open_page(opened[0], drawn)
    page.locator("#add > summary").click()
    texts = page.locator("#library p").all_inner_texts()
    assert len(texts) >= 6 and all(len(text.split()) > 50 for text in texts)  # paragraphs, not notes of 290 words
    assert "290 words" not in page.locator("main").inner_text()
    assert "places that do not exist" in page.locator("#about-examples").inner_text()
    asked = page.locator("#examples q").all_inner_texts()
    assert len(asked) == 4 and all(text.split()[0] in ("In", "Who", "How") for text in asked)
    ask_example(page, 0)
    marks = judged(page)
    assert marks["full"] == "the reference" and all("full recompute" in marks[mode] for mode in ("blend", "reuse"))
    assert not re.search("right|wrong", page.locator("#results").inner_text())
    # nor is it told what is right in the language of another model
    page.click("#clear")
    page.fill("#own-text", "The boot belongs to Pagon.")
    page.get_by_role("button", name="Add to the prompt").click()
    page.fill("#question", "Who has the boot?")
    ask(page)
    assert judged(page)["full"] == "the reference"
    page.close()


def test_characters_of_several_tokens_are_drawn_as_one(opened: tuple[Any, str], drawn: str) -> None:
    cut = [bytes([byte]) for byte in "aé🏙b".encode()]
    assert _texts(cut) == ["a", "é", "", "🏙", "", "", "", "b"]
    assert _texts([b"a\xc3", b"\xa9\xf0\x9f", b"\x8f\x99b", b"c"]) == ["aé🏙b", "", "", "c"]
    page = open_page(opened[0], drawn, width=390)
    page.click("#clear")
    page.locator("#add > summary").click()
    page.fill("#own-text", ARABIC)
    page.get_by_role("button", name="Add to the prompt").click()
    page.fill("#question", "ما هي عاصمة مصر؟")
    ask(page)
    part = page.locator("#why details").nth(1)
    part.locator("summary").click()
    pieces = [each.text_content() for each in part.locator(".tokens span").all()]
    assert ARABIC in "".join(pieces) and "\ufffd" not in page.locator("#map").inner_text()
    assert {"👨‍👩‍👧", "e\u0301"} <= {piece.strip() for piece in pieces}
    assert part.locator("rect").count() > 2 * len(pieces)  # the strip has each token
    sides = "e => [getComputedStyle(e).direction, e.scrollWidth <= e.clientWidth]"
    assert part.locator(".tokens").evaluate(sides) == page.locator("#prompt p").evaluate(sides) == ["rtl", True]
    assert page.locator("#question").evaluate("e => getComputedStyle(e).direction") == "rtl"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def fake(page: Any, text: str = "Pagon", explain: Callable[[Any], None] | None = None) -> None:
    """The page's server answers as if it had a model that says this, which knows nothing to be right."""

    def explained(route: Any) -> None:
        asked = route.request.post_data_json
        segments = [
            {
                "is_chunk": True,
                "title": each["title"],
                "tokens": [
                    {"text": piece, "source": "loaded", "strength": 0.0}
                    for piece in re.findall(r"\s*\S+", each["text"])
                ],
            }
            for each in asked["documents"]
        ]
        question = {"text": asked["question"], "source": "fresh", "strength": 0.0}
        segments.append({"is_chunk": False, "title": "", "tokens": [question]})
        known = {"expected": None, "strength": "", "kl": 0.0, "top_1": True, "stored": 0, "layers": 4}
        route.fulfill(json=known | {"segments": segments})

    def answered(route: Any) -> None:
        report = {"prompt_tokens": 100, "hit_tokens": {"memory": 90}, "row_layers": 100, "recomputed_tokens": 9}
        events = [{"choices": [{"delta": {"content": text}}]}, {"choices": [], "cacheblend": report | {"ttft_s": 0.5}}]
        sse("".join(f"data: {json.dumps(event)}\n\n" for event in events))(route)

    page.route(EXPLAIN, explain or explained)
    page.route(CHAT, answered)


def write_passages(page: Any, count: int) -> None:
    page.click("#clear")
    page.evaluate(
        "count => { for (let n = 1; n <= count; n++) { document.getElementById('own-name').value = `Town ${n}`;"
        " document.getElementById('own-text').value = `The boot of town ${n} belongs to Pagon and to nobody else.`;"
        " document.getElementById('own').requestSubmit(); } }",
        count,
    )


def is_seen(page: Any, *selectors: str) -> bool:
    """Whether all of these are in the window as a whole."""
    inside = (
        "e => { const r = e.getBoundingClientRect(); return r.height > 0 && r.top >= 0 && r.bottom <= innerHeight; }"
    )
    return all(page.locator(selector).evaluate(inside) for selector in selectors)


@pytest.mark.parametrize("width", [390, 1400])
def test_fifty_passages_leave_the_answers_in_sight_and_the_verdict_short(opened: tuple[Any, str], width: int) -> None:
    page = open_page(*opened, width=width, computes=False)
    fake(page)
    write_passages(page, 50)
    page.fill("#question", "Who has the boot?")
    page.click("#ask")
    assert wait_until_asked(page) == "done" and len(titles(page)) == 50
    assert is_seen(page, "#pane-blend", "#pane-reuse", ".headline")
    assert "stand in Town 1, Town 2, Town 3 and 47 more." in page.locator("#verdict").inner_text()
    assert page.locator("#verdict").evaluate("e => e.clientHeight") < 330
    page.click("#clear")
    said = page.locator("#stale").inner_text()
    assert "and 47 more were removed" in said and len(said) < 200
    write_passages(page, 50)
    assert page.evaluate("document.documentElement.scrollHeight") < 4500
    # an error is in sight, too, wherever the page was scrolled to
    page.unroute(CHAT)
    page.route(CHAT, lambda route: route.fulfill(status=429, json={"error": {"message": "too many wait"}}))
    page.locator("#ask").scroll_into_view_if_needed()
    page.click("#ask")
    assert wait_until_asked(page) == "failed" and is_seen(page, "#error")
    page.fill("#question", "")
    page.locator("#ask").scroll_into_view_if_needed()
    page.click("#ask")
    assert is_seen(page, "#refused", "#question") and not page.locator("#error").is_visible()
    page.close()


@pytest.mark.parametrize("width", [390, 1400])
def test_cards_keep_their_place_and_size_while_they_are_asked(opened: tuple[Any, str], width: int) -> None:
    page = open_page(*opened, width=width, computes=False)

    def boxes() -> list[tuple[int, int]]:
        top = page.locator("#outcome-title").bounding_box()["y"]
        found = [page.locator(f"#pane-{mode}").bounding_box() for mode in ("blend", "full", "reuse")]
        return [(round(box["y"] - top), round(box["height"])) for box in found]

    held: list[Any] = []
    page.route(CHAT, lambda route: held.append(route))
    seen = [] if width == 390 else [boxes()]  # on a phone they are not shown before
    for number in (0, 1):
        page.locator(f"[data-example='{number}']").click()
        for mode in ("blend", "full", "reuse"):
            page.wait_for_selector(f"#pane-{mode}[data-state=asking]")
            seen.append(boxes())
            while not held:
                page.wait_for_timeout(20)
            turn = page.evaluate(
                "(({width, height, flexShrink}) => [width === height, flexShrink])"
                "(getComputedStyle(document.getElementById('progress'), '::before'))"
            )
            assert turn == [True, "0"]  # what turns is round
            give_again(held.pop())
        assert wait_until_asked(page) == "done"
        seen.append(boxes())
    assert all(each == seen[0] for each in seen), seen
    page.close()


def test_on_a_phone_blend_and_the_verdict_are_in_sight_and_fingers_hit(opened: tuple[Any, str]) -> None:
    page = open_page(*opened, width=390, computes=False)
    ask_example(page, 0)
    assert is_seen(page, "#pane-blend", "#pane-full", "#pane-reuse", ".headline")
    assert page.locator("article h2").first.inner_text() == "Blend"
    assert page.evaluate("document.documentElement.scrollHeight") < 3400
    page.locator("#add > summary").click()
    page.get_by_role("button", name="Edit Note 1", exact=True).click()
    small = page.evaluate(
        "[...document.querySelectorAll('button, summary, select, input')].filter(e => e.getClientRects().length)"
        ".map(e => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])"
        ".filter(([, r]) => r.height < 44 || r.width < 44).map(([html, r]) => [html, r.width, r.height])"
    )
    assert small == []
    page.close()


CONTRAST = """([selector, name]) => {
  const brightness = (colour) => {
    const drawn = new OffscreenCanvas(1, 1).getContext('2d');
    drawn.fillStyle = colour;
    drawn.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...drawn.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
      .map((v) => (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const colours = new Set([...document.querySelectorAll(selector)].map((e) => getComputedStyle(e)[name]));
  const found = [...colours].map(brightness);
  return (Math.max(...found) + .05) / (Math.min(...found) + .05);
}"""


@pytest.mark.parametrize(("scheme", "forced"), [("light", "none"), ("dark", "none"), ("dark", "active")])
def test_the_map_is_told_apart_in_any_colours(opened: tuple[Any, str], scheme: str, forced: str) -> None:
    page = open_page(*opened, scheme=scheme, forced=forced, computes=False)
    ask_example(page, 0)

    # the hottest and the coldest; of text less, which has to be read
    assert page.evaluate(CONTRAST, ["#why .strip rect.loaded", "fill"]) > 2.5
    assert forced == "active" or page.evaluate(CONTRAST, ["#why .tokens .loaded", "backgroundColor"]) > 1.6
    colours = page.evaluate(
        "['#why .tokens .recomputed', '#map .legend .recomputed', '#map .legend .loaded', '#map .legend .prefix',"
        " '#map .legend .fresh'].map((s, at) => getComputedStyle(document.querySelector(s), at && '::before')"
        ".backgroundColor)"
    )
    assert colours[0] == colours[1] and len(set(colours[1:])) == 4 and "rgba(0, 0, 0, 0)" not in colours
    heights = page.evaluate(
        "['loaded', 'recomputed'].map(s => document.querySelector(`#why rect.${s}`).height.baseVal.value)"
    )
    assert heights[0] < heights[1]  # without any colour, too
    page.close()


def test_a_note_is_read_without_being_edited(fresh: Any) -> None:
    text = fresh.locator("#prompt > li").nth(1).locator("p")
    assert text.inner_text().endswith("…")
    title = fresh.get_by_role("button", name="Note 2", exact=True)
    assert title.get_attribute("aria-expanded") == "false"
    title.click()
    assert title.get_attribute("aria-expanded") == "true" and fresh.locator("#edited-text").count() == 0
    assert text.inner_text().startswith("The road was crowded.") and text.inner_text().endswith("long winter.")
    assert text.evaluate("e => e.scrollHeight <= e.clientHeight && getComputedStyle(e).display === 'block'")
    assert text.locator("mark").inner_text() == "The sword passed to Pagon."
    assert fresh.evaluate("document.activeElement.textContent") == "Note 2"
    title.press("Enter")
    assert title.get_attribute("aria-expanded") == "false"


def test_what_was_written_is_there_after_a_reload(fresh: Any) -> None:
    fresh.locator("#add > summary").click()
    fresh.fill("#own-name", "Mine")
    fresh.fill("#own-text", "The boot belongs to Pagon.")
    fresh.get_by_role("button", name="Add to the prompt").click()
    fresh.get_by_role("button", name="Remove Note 3").click()
    fresh.get_by_role("button", name="Move Mine up").click()
    fresh.fill("#question", "Who has the boot?")
    fresh.evaluate("document.getElementById('key').value = 'cb-secret'")
    before = titles(fresh)
    fresh.reload()
    fresh.wait_for_selector("#examples button")
    fresh.wait_for_selector("#prompt > li[data-title=Mine]")
    assert titles(fresh) == before == [*notes(1, 2, 4, 5), "Mine", "Note 6"]
    assert fresh.locator("#question").input_value() == "Who has the boot?"
    kept = fresh.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")
    assert "boot" in kept and "cb-secret" not in kept  # until the tab is closed; never the key
    fresh.locator("#add > summary").click()
    assert fresh.get_by_role("button", name="Mine is in the prompt").count() == 1
    fresh.get_by_role("button", name="Edit Mine").click()
    fresh.get_by_role("button", name="Delete").click()
    fresh.reload()
    fresh.wait_for_selector("#prompt > li")
    assert "Mine" not in titles(fresh)


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
    assert judged(fresh)["blend"] in ("broke off", "")
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


def test_a_question_can_be_stopped_and_the_former_result_stays(fresh: Any) -> None:
    def stop() -> None:
        fresh.wait_for_selector("#pane-blend[data-state=asking]")
        fresh.focus("#stop")
        fresh.keyboard.press("Enter")
        assert wait_until_asked(fresh) == "stopped" and fresh.locator("#progress").inner_text() == "Stopped."
        assert not fresh.locator("#error").is_visible() and not fresh.locator("#stop").is_visible()
        assert fresh.evaluate("document.activeElement.id") == "ask"

    fresh.route(CHAT, lambda route: None)  # never answered
    fresh.click("#ask")
    stop()
    assert judged(fresh)["blend"] == "stopped"  # there is none before it
    fresh.unroute(CHAT)
    ask_example(fresh, 0)
    told = fresh.locator("#results").inner_text()
    fresh.route(CHAT, lambda route: None)
    fresh.click("#ask")
    stop()
    assert fresh.locator("#results").inner_text().replace("Stopped.", "").split() == told.split()
    assert fresh.locator("#results").get_attribute("data-stale") == "false"
    fresh.fill("#question", "Who has the cart?")
    fresh.click("#ask")
    stop()
    assert answers(fresh)["full"] == "Pagon" and "another question" in fresh.locator("#stale").inner_text()


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
