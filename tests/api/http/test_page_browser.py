"""The page in Debian's chromium: all that it offers, by mouse and by keyboard, and nothing on its console.

Two daemons: one with a model and a memory of 30 pages, so that chunks move; one that echoes, slowly enough to
be looked at and stopped while it streams.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pensieve.v1 import conversation_pb2 as pb
from tests.api.http.rig_http import HttpRig, http_rig
from tests.conversations.rig_daemon import ECHO

axe = pytest.importorskip("axe_playwright_python.sync_playwright", exc_type=ImportError)
sync_api = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
pytestmark = pytest.mark.needs("browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
expect = sync_api.expect

WIDE, PHONE = (1280, 800), (390, 800)
TINY = {"threads": "1", "chunk_tokens": "16", "device_cache": "480t", "host_cache": "480t"}
LONG = "The grey cat walks along the river and looks at the boats. " * 3
EDIT = "Edit message (later messages will be removed)"
PARTS = ("nav", "#chat", "#memory")
SEND = "**/pensieve.v1.ConversationService/SendMessage"
CODE = (
    "One `word` and **more**:\n\n```python\n"
    + "print('a long line of code') " * 8
    + "\n```\n\n- a\n- b"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    data = Path(tmp_path_factory.mktemp("tiny")) / "data"
    with http_rig(data, model=True, settings=TINY) as rig:
        yield rig


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    data = Path(tmp_path_factory.mktemp("slow")) / "data"
    with http_rig(data, program=(*ECHO, "--seconds", "0.02")) as rig:
        yield rig


@contextmanager
def opened(browser: Any, rig: HttpRig, size: tuple[int, int] = WIDE, **more: Any) -> Iterator[Any]:
    """The page; what its console says, errors and what its policy forbids included, is nothing."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **more)
    page, told = context.new_page(), []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    try:
        page.goto(rig.url)
        yield page
    finally:
        context.close()
    assert told == []


def say(page: Any, text: str) -> str:
    """The line under the reply, which says where its context came from."""
    num_replies = page.locator("article.reply").count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    cost = page.locator("article.reply").nth(num_replies).locator(".cost")
    expect(cost).to_be_visible(timeout=30_000)
    expect(page.locator("#send")).to_be_visible()
    return str(cost.inner_text())


def answer(page: Any, text: str, button: str = "#ask-yes") -> None:
    page.fill("#ask-text", text)
    page.click(button)


def act(page: Any, kind: str, number: int, name: str) -> None:
    page.locator(f"article.{kind}").nth(number).get_by_role("button", name=name, exact=True).click()


def named(page: Any) -> Any:
    """The conversation that is shown, in the list."""
    return page.locator("#list [aria-current=true]")


def endless(page: Any) -> None:
    """Replies end when they are stopped."""

    def more(route: Any) -> None:
        value = json.loads(route.request.post_data)
        value["sampling"] = {"ignore_eos": True, "max_tokens": 5000}
        route.continue_(post_data=json.dumps(value))

    page.route(SEND, more)


def history(rig: HttpRig, page: Any) -> list[Any]:
    return rig.rig.messages(named(page).get_attribute("data-id"))


def told(page: Any) -> list[str]:
    return [each.inner_text() for each in page.locator("article.user .body").all()]


def test_send_edit_another_reply_and_fork(browser: Any, tiny: HttpRig) -> None:
    with opened(browser, tiny) as page:
        cost = say(page, "My name is Ada.")
        assert "0 were on the device" in cost
        expect(named(page)).to_have_text("My name is Ada.")
        first = history(tiny, page)
        expect(page.locator("article.reply .body").first).to_contain_text(first[1].content.strip())
        assert " 0 were on the device" not in say(page, "What is my name?")
        assert told(page) == ["My name is Ada.", "What is my name?"]

        act(page, "user", 1, "Edit")
        page.get_by_label(EDIT).fill("Who am I?")
        with page.expect_response(SEND):
            page.locator(".edit").get_by_role("button", name="Send").click()
        expect(page.locator("article.reply .cost").nth(1)).to_be_visible()
        assert told(page) == ["My name is Ada.", "Who am I?"]
        assert [each.content for each in history(tiny, page)][::2] == told(page)

        revision = history(tiny, page)[-1].revision
        with page.expect_response(SEND):
            act(page, "reply", 1, "Again")
        expect(page.locator("article.reply .cost").nth(1)).to_be_visible()
        expect(page.locator("#send")).to_be_visible()
        assert told(page) == ["My name is Ada.", "Who am I?"]
        assert history(tiny, page)[-1].revision > revision

        act(page, "user", 1, "Fork here")
        expect(named(page)).to_have_text("Fork of My name is Ada.")
        assert told(page) == ["My name is Ada."]
        assert [each.token_ids for each in history(tiny, page)] == [
            each.token_ids for each in first
        ]
        say(page, "Another way.")
        act(page, "reply", 0, "Fork after")
        expect(named(page)).to_have_text("Fork of Fork of My name is Ada.")
        assert told(page) == ["My name is Ada."]


def test_an_edit_keeps_the_lines_of_a_message(browser: Any, slow: HttpRig) -> None:
    text = "A list:\n\n- one\n- two"
    with opened(browser, slow) as page:
        say(page, text)
        field = page.get_by_label(EDIT)
        act(page, "user", 0, "Edit")
        expect(field).to_be_focused()
        expect(field).to_have_value(text)
        expect(page.locator("article.user .body")).to_be_hidden()
        page.keyboard.press("Escape")
        expect(field).to_have_count(0)
        assert told(page) == [text]
        assert focused(page) == "Edit"
        page.keyboard.press("Enter")
        page.keyboard.press("Control+End")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("- three")
        with page.expect_response(SEND):
            page.keyboard.press("Enter")
        expect(page.locator("article.reply .cost")).to_be_visible()
        expect(field).to_have_count(0)
        assert told(page) == [f"{text}\n- three"]
        assert history(slow, page)[0].content == f"{text}\n- three"


def test_names_are_the_daemons_and_what_is_deleted_is_gone(
    browser: Any, tiny: HttpRig, tmp_path: Path
) -> None:
    with opened(browser, tiny) as page:
        say(page, "Keep\nthis.")
        expect(named(page)).to_have_text("Keep this.")
        page.get_by_role("button", name="Rename Keep this.").click()
        answer(page, "Something <b>else</b> 🐈")
        expect(named(page)).to_have_text("Something <b>else</b> 🐈")
        expect(page.locator(".strip .name").first).to_contain_text("Something <b>else</b> 🐈")
        conversation_id = named(page).get_attribute("data-id")
        with page.expect_download() as download:
            page.click("#export")
        download.value.save_as(tmp_path / "out.jsonl")
        exported = json.loads((tmp_path / "out.jsonl").read_text())
        assert exported["id"] == conversation_id
        assert [each["role"] for each in exported["messages"]] == ["user", "assistant"]
        assert exported["messages"][0]["content"] == "Keep\nthis."
        page.fill("#search", "no such name")
        expect(page.locator("#list li:visible")).to_have_count(0)
        page.fill("#search", "SOMETHING")
        expect(page.locator("#list li:visible")).to_have_count(1)
    with opened(browser, tiny) as page:  # another browser
        page.locator(f'[data-id="{conversation_id}"].open').hover()
        page.get_by_role("button", name="Delete Something").click()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Delete Something").click()
        page.click("#ask-yes")
        expect(page.locator(f'#list [data-id="{conversation_id}"]')).to_have_count(0)
    stored = tiny.rig.stub.ListConversations(pb.ListConversationsRequest()).conversations
    assert conversation_id not in {each.conversation_id for each in stored}


def test_chunks_move_under_a_tiny_cache(browser: Any, tiny: HttpRig) -> None:
    with opened(browser, tiny) as page:
        say(page, f"First. {LONG}")
        conversation_id = named(page).get_attribute("data-id")
        strip = page.locator(f'.strip[data-id="{conversation_id}"]')
        expect(strip.locator("i.d").first).to_be_visible()
        strip.click()
        expect(strip).to_have_attribute("aria-expanded", "true")
        expect(page.locator("#explained")).to_contain_text("device")
        for number in range(12):
            page.click("#new")
            say(page, f"Number {number}. {LONG}")
            page.wait_for_timeout(700)  # a picture
            if strip.locator("i.h").count():
                break
        expect(strip.locator("i.h").first).to_be_visible()
        expect(page.locator("#explained")).to_contain_text("host")
        expect(page.locator("#flow")).not_to_contain_text(": 0 tokens to the host")
        page.locator(f'#list [data-id="{conversation_id}"]').click()
        cost = say(page, "Do you still know it?")
        assert " 0 came from the host" not in cost, cost
        expect(strip.locator("i.h")).to_have_count(0)
        expect(page.locator(".sources .h").last).to_be_visible()
        strip.click()
        expect(page.locator("#explained")).to_be_hidden()
        lost = page.locator(".strip i.hole")
        for number in range(30):
            page.click("#new")
            say(page, f"More {number}. {LONG}")
            page.wait_for_timeout(700)
            if lost.count():
                break
        expect(lost.first).to_be_visible()


def test_a_reply_streams_and_is_stopped(browser: Any, slow: HttpRig) -> None:
    with opened(browser, slow) as page:
        endless(page)
        for stop in ("click", "Escape"):
            num_replies = page.locator("article.reply").count()
            page.fill("#text", "Talk to me.")
            page.press("#text", "Enter")
            body = page.locator("article.reply .body").nth(num_replies)
            expect(body).not_to_be_empty()
            early = body.inner_text().strip()
            expect(body).not_to_have_text(early)
            assert body.inner_text().strip().startswith(early[:20])
            expect(page.locator(".strip.runs")).to_have_count(1)
            expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
            page.locator("#stop").click() if stop == "click" else page.keyboard.press("Escape")
            expect(page.locator("#send")).to_be_visible()
            expect(page.locator(".strip.runs")).to_have_count(0)
            kept = history(slow, page)
            assert kept[-1].finish_reason == pb.FINISH_REASON_CANCELLED
            assert kept[-1].content.strip().startswith(early[:20])


def test_other_conversations_are_looked_at_while_one_streams(browser: Any, slow: HttpRig) -> None:
    with opened(browser, slow) as page:
        say(page, "The quiet one.")
        endless(page)
        page.click("#new")
        page.fill("#text", "The endless one.")
        page.press("#text", "Enter")
        expect(page.locator("article.reply .body")).not_to_be_empty()
        page.get_by_role("button", name="The quiet one.", exact=True).click()
        expect(page.locator("article.user .body")).to_have_text("The quiet one.")
        act(page, "user", 0, "Edit")
        expect(page.get_by_role("alert")).to_contain_text("stop it first")
        page.get_by_role("button", name="The endless one.", exact=True).click()
        expect(page.locator("article.user .body")).to_have_text("The endless one.")
        expect(page.locator("article.reply .body")).not_to_be_empty()
        page.click("#stop")
        expect(page.locator("#send")).to_be_visible()
        assert told(page) == ["The endless one."]
    assert slow.rig.num_live == 0


def given(rig: HttpRig, name: str, *turns: tuple[str, str, str]) -> None:
    """A conversation that began elsewhere: what was asked, thought and answered."""
    messages = []
    for text, thinking, reply in turns:
        messages.append(pb.NewMessage(role=pb.ROLE_USER, content=text))
        messages.append(pb.NewMessage(role=pb.ROLE_ASSISTANT, content=reply, thinking=thinking))
    request = pb.CreateConversationRequest(conversation_id=name, messages=messages)
    request.metadata.update({"title": name})
    rig.rig.stub.CreateConversation(request)


def test_what_a_model_writes_is_text_and_its_thinking_is_folded(
    browser: Any, slow: HttpRig
) -> None:
    bad = "<img src=x onerror=alert(1)> [a](javascript:alert(1)) <script>alert(1)</script>"
    given(slow, "folded", ("Hm?", "Let me see.", CODE), ("And?", "", bad))
    with opened(browser, slow) as page:
        page.get_by_role("button", name="folded", exact=True).click()
        fold = page.locator("details.thinking")
        expect(fold).to_have_count(1)
        expect(fold).not_to_have_attribute("open", "")
        fold.locator("summary").click()
        expect(fold).to_contain_text("Let me see.")
        expect(page.locator("article.reply pre code")).to_contain_text("print(")
        expect(page.locator("article.reply li")).to_have_count(2)
        expect(page.locator("article.reply .body").nth(1)).to_contain_text(bad)
        assert page.locator("#log :is(img, script, a)").count() == 0


def focused(page: Any) -> str:
    script = "() => document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    return str(page.evaluate(script))


def tab_to(page: Any, name: str, key: str = "Tab") -> None:
    for _ in range(80):
        page.keyboard.press(key)
        if focused(page).startswith(name):
            return
    raise AssertionError(f"no Tab leads to {name!r}")


def test_the_keyboard_is_enough(browser: Any, tiny: HttpRig) -> None:
    with opened(browser, tiny) as page:
        expect(page.locator("#text")).to_be_focused()
        page.keyboard.type("By hand")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("alone.")
        page.keyboard.press("Enter")
        expect(page.locator("article.reply .cost")).to_be_visible()
        assert told(page) == ["By hand\nalone."]
        expect(page.locator("#text")).to_be_focused()
        tab_to(page, "Fork after", "Shift+Tab")
        page.keyboard.press("Enter")
        expect(named(page)).to_have_text("Fork of By hand alone.")
        tab_to(page, "Rename Fork of By hand", "Shift+Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#ask-text")).to_be_focused()
        page.keyboard.type(
            "By keys"
        )  # in place of what was there: a field that is focused is selected
        page.keyboard.press("Enter")
        expect(named(page)).to_contain_text("By keys")
        assert focused(page) == "By keys"
        tab_to(page, "Delete By keys")
        page.keyboard.press("Enter")
        expect(page.locator("#ask")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#ask")).to_be_hidden()
        page.locator("#text").focus()
        tab_to(page, "By hand alone., ")
        page.keyboard.press("Enter")
        expect(page.locator("#explained")).to_contain_text("chunks 0")


def rules_broken(page: Any) -> list[str]:
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing(browser: Any, tiny: HttpRig, size: tuple[int, int], scheme: str) -> None:
    """axe-core's rules, in each part of the page; its script is let past the page's own policy."""
    name = f"axe-{size[0]}-{scheme}"
    given(tiny, name, ("Hm?", "Let me see.", CODE))
    looks = {"color_scheme": scheme, "bypass_csp": True, "reduced_motion": "reduce"}
    with opened(browser, tiny, size, **looks) as page:
        tabs = page.locator("[data-show]") if size == PHONE else None
        say(page, "A message.")
        page.wait_for_timeout(700)
        act(page, "user", 0, "Edit")
        assert rules_broken(page) == []
        if tabs:
            tabs.nth(0).click()
            assert rules_broken(page) == []
        page.get_by_role("button", name=name, exact=True).click()
        page.locator("summary").click()
        assert rules_broken(page) == []
        if tabs:
            tabs.nth(2).click()
        page.locator(".strip").first.click()
        expect(page.locator("#explained")).to_contain_text("chunks")
        assert rules_broken(page) == []
        if tabs:
            tabs.nth(0).click()
        page.get_by_role("button", name=f"Rename {name}").click()
        assert rules_broken(page) == []


def test_a_phone_scrolls_in_one_direction(browser: Any, slow: HttpRig) -> None:
    given(slow, "x" * 100, ("y" * 300, "z" * 300, f"{CODE} {'w' * 300}"))
    with opened(browser, slow, (320, 640)) as page:
        for number, part in enumerate(PARTS):
            page.locator("[data-show]").nth(number).click()
            expect(page.locator(part)).to_be_visible()
            for other in set(PARTS) - {part}:
                expect(page.locator(other)).to_be_hidden()
            if part == "nav":
                page.get_by_role("button", name="x" * 100, exact=True).click()
                expect(page.locator("article.reply")).to_be_visible()
                page.locator("[data-show]").nth(0).click()
            for selector in ("html", part, "#log"):
                script = "each => [each.scrollWidth, each.clientWidth]"
                wide, seen = page.locator(selector).evaluate(script)
                assert wide <= seen, (part, selector)
        expect(page.locator("#text")).to_be_hidden()
        page.locator("[data-show]").nth(1).click()
        say(page, "Small.")
