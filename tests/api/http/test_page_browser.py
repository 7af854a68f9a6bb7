"""The web page in Debian's chromium, used by mouse and by keyboard. Its console stays empty.

`tiny` is a daemon with a model and room for 30 pages, so that chunks move. `slow` is an echo engine, slow
enough to look at a reply and to stop it while it streams.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pensieve.guard import callers
from pensieve.launch.model_folder import model_name
from pensieve.v1 import conversation_pb2 as pb
from tests.api.http.rig_http import HttpRig, http_rig
from tests.conversations.rig_daemon import ECHO, wait_for

axe = pytest.importorskip("axe_playwright_python.sync_playwright", exc_type=ImportError)
sync_api = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
pytestmark = pytest.mark.needs("browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
expect = sync_api.expect
expect.set_options(timeout=30_000)  # for busy machines

WIDE, PHONE = (1440, 800), (390, 800)
TINY = {"threads": "1", "chunk_tokens": "16", "device_cache": "480t", "host_cache": "480t"}
BUILTIN = model_name("")
LONG = "The grey cat walks along the river and looks at the boats. " * 3
AGAIN = "Write another reply"
EDIT = "Edit message (later messages will be removed)"
SEND = "**/pensieve.v1.ConversationService/SendMessage"
MESSAGES = "**/pensieve.v1.ConversationService/ListMessages"
LIST = "**/pensieve.v1.ConversationService/ListConversations"
RECONNECT = """() => {  // as after the end of the daemon
    Object.defineProperty(document, "hidden", { value: true, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
    delete document.hidden;
    onDisconnect(new Lost());
}"""
RETURN = """() => {  // as when the user returns to the tab after some time
    listedAt = 0;
    dispatchEvent(new Event("focus"));
}"""
CODE = (
    "### Deep\n\n###### Deeper\n\nOne `word` and **more**:\n\n```python\n"
    + "print('a long line of code') " * 8
    + "\n```\n\n- a\n- b\n\n"
    + "| key | value |\n|---|---:|\n| one | `1` |\n| "
    + "two " * 60
    + "| 2 |\n"
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
        rig.rig.daemon.engine.model_name = BUILTIN  # as `pensieve serve` names it
        yield rig


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpRig]:
    data = Path(tmp_path_factory.mktemp("slow")) / "data"
    with http_rig(data, program=(*ECHO, "--seconds", "0.02")) as rig:
        yield rig


@contextmanager
def open_page(
    browser: Any,
    rig: HttpRig,
    size: tuple[int, int] = WIDE,
    *,
    is_quiet: bool = True,
    **more: Any,
) -> Iterator[Any]:
    """Open the page. `is_quiet`: the console, which also reports violations of its CSP, must stay empty."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **more)
    page, console = context.new_page(), []
    page.on("console", lambda message: console.append(message.text))
    page.on("pageerror", lambda error: console.append(str(error)))
    try:
        page.goto(rig.url)
        yield page
    finally:
        context.close()
    assert console == [] or not is_quiet


def say(page: Any, text: str) -> str:
    """Send a message. Return the text under the reply: how much was cached, and the token counts."""
    num_replies = page.locator("article.reply").count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    cost = page.locator("article.reply").nth(num_replies).locator(".cost")
    expect(cost).to_be_visible(timeout=30_000)
    expect(page.locator("#send")).to_be_visible()
    return str(cost.text_content())


def row_act(page: Any, title: str, name: str) -> None:
    """Press a button of a conversation in the list. The buttons appear under the mouse pointer."""
    page.locator("#list .open", has_text=title).first.hover()
    page.get_by_role("button", name=f"{name} {title}").first.click()


def answer(page: Any, text: str, button: str = "#ask-yes") -> None:
    page.fill("#ask-text", text)
    page.click(button)


def act(page: Any, kind: str, number: int, name: str) -> None:
    page.locator(f"article.{kind}").nth(number).get_by_role("button", name=name, exact=True).click()


def shown_row(page: Any) -> Any:
    """Return the list's row of the shown conversation."""
    return page.locator("#list [aria-current=true]")


def sample(page: Any, **sampling: Any) -> None:
    """Send the next messages with this sampling."""

    def change(route: Any) -> None:
        value = json.loads(route.request.post_data)
        value["sampling"] = sampling
        route.continue_(post_data=json.dumps(value))

    page.route(SEND, change)


def endless(page: Any) -> None:
    """Let replies run until they are stopped."""
    sample(page, ignore_eos=True, max_tokens=5000)


def wait_for_routes(page: Any, held: list[Any]) -> None:
    """Wait until the page has made a request that a route of the test appends to `held`."""
    wait_for(lambda: held or page.wait_for_timeout(20))


def lose_answer(route: Any) -> None:
    """Let the daemon get a message, but lose its answer."""
    route.fetch()
    route.abort()


def history(rig: HttpRig, page: Any) -> list[Any]:
    return rig.rig.messages(shown_row(page).get_attribute("data-id"))


def user_messages(page: Any) -> list[str]:
    return [each.inner_text() for each in page.locator("article.user .body").all()]


def test_send_edit_another_reply_and_fork(browser: Any, tiny: HttpRig) -> None:
    with open_page(browser, tiny) as page:
        cost = say(page, "My name is Ada.")
        assert cost.startswith("First turn: nothing was in memory yet")
        expect(shown_row(page)).to_have_text("My name is Ada.")
        first = history(tiny, page)
        expect(page.locator("article.reply .body").first).to_contain_text(first[1].content.strip())
        assert re.match(
            r"[1-9]\d*\s% of the prompt came from memory", say(page, "What is my name?")
        )
        assert user_messages(page) == ["My name is Ada.", "What is my name?"]

        act(page, "user", 1, "Edit message")
        page.get_by_label(EDIT).fill("Who am I?")
        with page.expect_response(SEND):
            page.locator(".edit").get_by_role("button", name="Send").click()
        expect(page.locator("article.reply .cost").nth(1)).to_be_visible()
        assert user_messages(page) == ["My name is Ada.", "Who am I?"]
        assert [each.content for each in history(tiny, page)][::2] == user_messages(page)

        revision = history(tiny, page)[-1].revision
        with page.expect_response(SEND):
            act(page, "reply", 1, "Write another reply")
        expect(page.locator("article.reply .cost").nth(1)).to_be_visible()
        expect(page.locator("#send")).to_be_visible()
        assert user_messages(page) == ["My name is Ada.", "Who am I?"]
        assert history(tiny, page)[-1].revision > revision

        act(page, "user", 1, "New conversation from before this message")
        expect(shown_row(page)).to_have_text("Fork of My name is Ada.")
        assert user_messages(page) == ["My name is Ada."]
        assert [each.token_ids for each in history(tiny, page)] == [
            each.token_ids for each in first
        ]
        say(page, "Another way.")
        act(page, "reply", 0, "New conversation from here")
        expect(page.locator("article.user")).to_have_count(1)
        expect(shown_row(page)).to_have_text("Fork of My name is Ada.")
        assert user_messages(page) == ["My name is Ada."]


def test_another_reply_in_the_middle_asks_first(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow) as page:
        for text in ("One.", "Two.", "Three."):
            say(page, text)
        buttons = page.locator("article.reply .another")
        earlier = f"{AGAIN} (later messages will be removed)"
        for number, name in enumerate((earlier, earlier, AGAIN)):
            expect(buttons.nth(number)).to_have_attribute("title", name)
            expect(buttons.nth(number)).to_have_attribute("aria-label", name)
        box = page.get_by_role("dialog", name=f"{AGAIN}?")
        act(page, "reply", 0, earlier)
        expect(box).to_contain_text("4 later messages will be removed.")
        page.get_by_role("button", name="Cancel").click()
        expect(buttons.first).to_be_focused()
        assert user_messages(page) == ["One.", "Two.", "Three."]
        assert len(history(slow, page)) == 6
        act(page, "reply", 1, earlier)
        expect(box).to_contain_text("2 later messages will be removed.")
        with page.expect_response(SEND):
            page.click("#ask-yes")
        expect(page.locator("article.reply .cost")).to_have_count(2)
        assert user_messages(page) == ["One.", "Two."]
        assert [each.content for each in history(slow, page)][::2] == ["One.", "Two."]
        expect(buttons.first).to_have_attribute("title", earlier)
        expect(buttons.last).to_have_attribute("title", AGAIN)


def test_each_conversation_keeps_its_draft(browser: Any, slow: HttpRig) -> None:
    create_elsewhere(slow, "drafted", ("Hm?", "", "Yes."))
    create_elsewhere(slow, "not drafted", ("Hm?", "", "Yes."))
    with open_page(browser, slow) as page:
        field = page.locator("#text")

        def pick(title: str) -> None:
            page.get_by_role("button", name=title, exact=True).click()
            expect(shown_row(page)).to_have_text(title)

        page.fill("#text", "For a new one.")
        pick("drafted")
        expect(field).to_have_value("")
        page.fill("#text", "For the first.")
        pick("not drafted")
        expect(field).to_have_value("")
        page.click("#new")
        expect(field).to_have_value("For a new one.")
        pick("drafted")
        expect(field).to_have_value("For the first.")
        page.reload()
        expect(shown_row(page)).to_have_text("drafted")
        expect(field).to_have_value("For the first.")
        page.press("#text", "Enter")
        expect(page.locator("article.reply .cost")).to_be_visible()
        page.reload()
        expect(page.locator("article.user")).to_have_count(2)
        expect(field).to_have_value("")
        page.click("#new")
        expect(field).to_have_value("For a new one.")


def test_an_edit_keeps_the_lines_of_a_message(browser: Any, slow: HttpRig) -> None:
    text = "A list:\n\n- one\n- two"
    with open_page(browser, slow) as page:
        say(page, text)
        field = page.get_by_label(EDIT)
        act(page, "user", 0, "Edit message")
        expect(field).to_be_focused()
        expect(field).to_have_value(text)
        expect(page.locator("article.user .body")).to_be_hidden()
        page.keyboard.press("Escape")
        expect(field).to_have_count(0)
        assert user_messages(page) == [text]
        assert focused(page) == "Edit message"
        page.keyboard.press("Enter")
        page.keyboard.press("Control+End")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("- three")
        with page.expect_response(SEND):
            page.keyboard.press("Enter")
        expect(page.locator("article.reply .cost")).to_be_visible()
        expect(field).to_have_count(0)
        assert user_messages(page) == [f"{text}\n- three"]
        assert history(slow, page)[0].content == f"{text}\n- three"


def test_rename_export_and_delete(browser: Any, tiny: HttpRig, tmp_path: Path) -> None:
    with open_page(browser, tiny) as page:
        say(page, "Keep\nthis.")
        expect(shown_row(page)).to_have_text("Keep this.")
        row_act(page, "Keep this.", "Rename")
        answer(page, "Something <b>else</b> 🐈")
        expect(shown_row(page)).to_have_text("Something <b>else</b> 🐈")
        expect(page.locator(".strip .name").first).to_contain_text("Something <b>else</b> 🐈")
        conversation_id = shown_row(page).get_attribute("data-id")
        with page.expect_download() as download:
            page.click("#export")
        download.value.save_as(tmp_path / "out.jsonl")
        exported = json.loads((tmp_path / "out.jsonl").read_text())
        assert exported["id"] == conversation_id
        assert [each["role"] for each in exported["messages"]] == ["user", "assistant"]
        assert exported["messages"][0]["content"] == "Keep\nthis."
    with open_page(browser, tiny) as page:  # another browser
        row_act(page, "Something", "Delete")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#list .open", has_text="Something").first).to_be_focused()
        row_act(page, "Something", "Delete")
        page.click("#ask-yes")
        expect(page.locator(f'#list [data-id="{conversation_id}"]')).to_have_count(0)
    stored = tiny.rig.stub.ListConversations(pb.ListConversationsRequest()).conversations
    assert conversation_id not in {each.conversation_id for each in stored}


def test_a_message_goes_to_the_conversation_just_selected(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow, is_quiet=False) as page:
        say(page, "To the first.")
        first = shown_row(page).get_attribute("data-id")
        page.click("#new")
        say(page, "To the second.")
        second = shown_row(page).get_attribute("data-id")
        held: list[Any] = []
        page.route(MESSAGES, lambda route: route.continue_() if held else held.append(route))
        page.click(f'#list .open[data-id="{first}"]')
        page.fill("#text", "Who are you?")
        page.press("#text", "Enter")
        wait_for_routes(page, held)
        held[0].continue_()
        expect(shown_row(page)).to_have_attribute("data-id", first)
        expect(page.locator("article.reply .cost")).to_have_count(2)
        assert len(slow.rig.messages(first)) == 4
        assert len(slow.rig.messages(second)) == 2
        held.clear()
        page.click(f'#list .open[data-id="{second}"]')
        page.fill("#text", "Not for the first.")
        page.press("#text", "Enter")
        wait_for_routes(page, held)
        held[0].abort()
        expect(page.locator(".problem")).to_be_visible()
        expect(page.locator("#text")).to_have_value("")  # the shown conversation has no draft
        assert len(slow.rig.messages(first)) == 4
        page.get_by_role("button", name="Try again").click()
        expect(shown_row(page)).to_have_attribute("data-id", second)
        expect(page.locator("#text")).to_have_value("Not for the first.")


def test_chunks_move_under_a_tiny_cache(browser: Any, tiny: HttpRig) -> None:
    with open_page(browser, tiny) as page:
        sample(page, max_tokens=35)  # longer replies would soon drop the moved chunks
        say(page, f"First. {LONG}")
        conversation_id = shown_row(page).get_attribute("data-id")
        strip = page.locator(f'.strip[data-id="{conversation_id}"]')
        expect(strip.locator("i.d").first).to_be_visible()
        strip.click()
        expect(strip).to_have_attribute("aria-expanded", "true")
        expect(page.locator("#explained")).to_contain_text("device")
        for number in range(12):
            page.click("#new")
            say(page, f"Number {number}. {LONG}")
            page.wait_for_timeout(700)  # until the next picture of the cache
            if strip.locator("i.h").count():
                break
        expect(strip.locator("i.h").first).to_be_visible()
        expect(page.locator("#explained")).to_contain_text("host")
        expect(page.locator("#flow")).not_to_contain_text(re.compile("^0 tokens to the host"))
        page.locator(f'#list .open[data-id="{conversation_id}"]').click()
        cost = say(page, "Do you still know it?")
        assert "copied back from the host" in cost, cost
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
    with open_page(browser, slow) as page:
        endless(page)
        for stop in ("click", "Escape"):
            num_replies = page.locator("article.reply").count()
            page.fill("#text", "Talk to me.")
            page.press("#text", "Enter")
            body = page.locator("article.reply .text").nth(num_replies)
            expect(body).not_to_be_empty()
            early = body.inner_text().strip()
            expect(body).not_to_have_text(early)
            assert body.inner_text().strip().startswith(early[:20])
            expect(page.locator(".strip.runs")).to_have_count(1)
            expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
            expect(page.locator("#keys")).to_contain_text("Escape")
            page.locator("#stop").click() if stop == "click" else page.keyboard.press("Escape")
            expect(page.locator("#send")).to_be_visible()
            expect(page.locator(".strip.runs")).to_have_count(0)
            expect(page.locator("#keys")).not_to_contain_text("Escape")
            kept = history(slow, page)
            assert kept[-1].finish_reason == pb.FINISH_REASON_CANCELLED
            assert kept[-1].content.strip().startswith(early[:20])


def test_several_conversations_stream_at_the_same_time(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow) as page:
        reply, runs = page.locator("article.reply .text"), page.locator("#list .runs")

        def pick(title: str) -> None:
            page.locator("#list .open", has_text=title).click()
            expect(page.locator("article.user .body").first).to_have_text(title)

        say(page, "The quiet one.")
        endless(page)
        for number in range(4):
            page.click("#new")
            expect(page.locator("#stop")).to_be_hidden()
            page.fill("#text", f"Endless {number}.")
            page.press("#text", "Enter")
            expect(reply).not_to_be_empty()
            expect(page.locator("#keys")).to_contain_text("Escape")
        expect(runs).to_have_count(4)
        expect(runs.first).to_contain_text("a reply is being written")
        pick("The quiet one.")
        expect(page.locator("#stop")).to_be_hidden()
        expect(page.locator("#keys")).not_to_contain_text("Escape")
        page.keyboard.press("Escape")
        page.fill("#text", "One too many.")
        page.press("#text", "Enter")
        expect(page.get_by_role("alert")).to_contain_text("4 replies are being written")
        expect(page.locator("#text")).to_have_value("One too many.")
        expect(runs).to_have_count(4)
        for number in range(3):
            pick(f"Endless {number}.")
            expect(reply).not_to_be_empty()
            page.click("#stop")
            expect(page.locator("#send")).to_be_visible()
            expect(runs).to_have_count(3 - number)
        pick("The quiet one.")
        page.unroute(SEND)
        page.press("#text", "Enter")
        expect(page.locator("article.reply .cost").nth(1)).to_be_visible()
        pick("Endless 3.")
        page.keyboard.press("Escape")
        expect(page.locator("#send")).to_be_visible()
        expect(runs).to_have_count(0)
        assert user_messages(page) == ["Endless 3."]
    assert slow.rig.num_live == 0


def create_elsewhere(rig: HttpRig, name: str, *turns: tuple[str, str, str]) -> None:
    """Create a conversation as another client. A turn is a message, thinking and a reply."""
    messages = []
    for text, thinking, reply in turns:
        messages.append(pb.NewMessage(role=pb.ROLE_USER, content=text))
        messages.append(pb.NewMessage(role=pb.ROLE_ASSISTANT, content=reply, thinking=thinking))
    request = pb.CreateConversationRequest(
        conversation_id=re.sub(r"\W+", "-", name), messages=messages
    )
    request.metadata.update({"title": name})
    rig.rig.stub.CreateConversation(request)


def delete_elsewhere(rig: HttpRig, name: str) -> None:
    """Delete a conversation of `create_elsewhere` as another client."""
    request = pb.DeleteConversationRequest(conversation_id=re.sub(r"\W+", "-", name))
    rig.rig.stub.DeleteConversation(request)


def test_html_in_a_reply_is_shown_as_text_and_thinking_is_folded(
    browser: Any, slow: HttpRig
) -> None:
    bad = "<img src=x onerror=alert(1)> [a](javascript:alert(1)) <script>alert(1)</script>"
    worse = f"# {bad}\n\n| {bad} |\n|---|\n| {bad} |\n\n> - {bad}\n\n```<b>\n{bad}\n```"
    create_elsewhere(
        slow, "folded", ("Hm?", "Let me see.", CODE), ("And?", "", bad), ("Then?", "", worse)
    )
    with open_page(browser, slow) as page:
        page.get_by_role("button", name="folded", exact=True).click()
        fold = page.locator("details.thinking")
        expect(fold).to_have_count(1)
        expect(fold).not_to_have_attribute("open", "")
        fold.locator("summary").click()
        expect(fold).to_contain_text("Let me see.")
        reply = page.locator("article.reply").first
        expect(reply.locator("pre code")).to_contain_text("print(")
        expect(reply.locator("li")).to_have_text(["a", "b"])
        expect(reply.locator("th")).to_have_text(["key", "value"])
        expect(reply.locator("td code")).to_have_text("1")
        expect(page.locator("article.reply .body").nth(1)).to_contain_text(bad)
        last = page.locator("article.reply").nth(2)
        for tag in ("h3", "th", "td", "blockquote li", "pre"):
            expect(last.locator(tag)).to_have_text(bad)
        expect(last.locator("figcaption")).to_have_text("<b>")
        assert page.locator("#log :is(img, script, a, b)").count() == 0


MARKDOWN = """\
Before *one* and __two__ of snake_case_names, 2 * 3 * 4, `a*b*c`, **bold `code`**.
Second line with https://example.org/a_b_c. And \\*stars\\*. <https://example.org/?(a)>

1. first
   - inner

   more of it
2. second

7) seven

> quoted
> > deeper

- [x] done
- [ ] open<br>with ***both***

***
```python
def f(x):  # a "remark"
    '''Return "x" for
    all of it.'''
    return "# text" * 2.5
```
```sql
select name from users -- all
```
```html
<a href="https://example.org/#x">&amp; if</a>
```

~~~
<p>*not em*</p>
"""


def test_markdown_becomes_nodes(browser: Any, slow: HttpRig) -> None:
    create_elsewhere(slow, "markdown", ("Hm?", "", MARKDOWN))
    with open_page(browser, slow) as page:
        page.get_by_role("button", name="markdown", exact=True).click()
        text = page.locator("article.reply .text")
        first = text.locator("> p").first
        expect(first.locator("em")).to_have_text(["one"])
        expect(first.locator("strong > code")).to_have_text("code")
        expect(first.locator("br")).to_have_count(1)
        expect(first).to_contain_text("snake_case_names, 2 * 3 * 4, a*b*c")
        expect(first).to_contain_text("And *stars*.")
        expect(first.locator("a").nth(1)).to_have_attribute("href", "https://example.org/?(a)")
        expect(first).not_to_contain_text("<")
        link = first.locator("a").first
        expect(link).to_have_attribute("href", "https://example.org/a_b_c")
        expect(link).to_have_attribute("rel", "noreferrer noopener")
        expect(text.locator("> ol > li")).to_have_count(3)
        expect(text.locator("> ol > li").first).to_contain_text("more of it")
        expect(text.locator("ol ul li")).to_have_text("inner")
        expect(text.locator("blockquote blockquote")).to_have_text("deeper")
        expect(text.locator("> ul > li")).to_have_text(["☑ done", "☐ openwith both"])
        expect(text.locator("> ul strong > em")).to_have_text("both")
        expect(text.locator("hr")).to_have_count(1)
        code = text.locator("pre").first
        expect(code.locator(".word")).to_have_text(["def", "return"])
        expect(code.locator(".remark")).to_have_text('# a "remark"')
        quoted = ["'''Return \"x\" for\n    all of it.'''", '"# text"']
        expect(code.locator(".quoted")).to_have_text(quoted)
        expect(code.locator(".value")).to_have_text("2.5")
        expect(text.locator("pre").nth(1).locator(".word")).to_have_text(["select", "from"])
        markup = text.locator("pre").nth(2)
        expect(markup.locator(".quoted")).to_have_text('"https://example.org/#x"')
        expect(markup.locator(".word")).to_have_text(["<a", ">", "</a", ">"])
        expect(text.locator("pre").last).to_have_text("<p>*not em*</p>")  # an open fence


def test_markdown_of_any_text_takes_little_time(browser: Any, slow: HttpRig) -> None:
    """With these texts, a careless parser recurses without end or takes quadratic time."""
    with open_page(browser, slow) as page:
        for part in (
            "> ",
            "- ",
            "  - a\n" * 2,
            "[",
            "`",
            "*a",
            "**",
            "_a",
            "|",
            "| a\n|-",
            "# ",
            "~~",
        ):
            script = "text => markdown(document.createElement('div'), text)"
            page.evaluate(script, part * (30_000 // len(part)))
        for part in ("'", "'\\", '"\\', "/*", "/* ", "0x", "1_", "`\n", "return"):
            page.evaluate(script, "```js\n" + part * (30_000 // len(part)))


def test_a_running_reply_ends_with_a_caret(browser: Any, slow: HttpRig) -> None:
    script = """content => {
        const box = messageNode({ role: "ROLE_ASSISTANT", content, isRunning: true });
        $("log").replaceChildren(box);
        const hasCaret = each => getComputedStyle(each, "::after").content === '""';
        return [...box.querySelectorAll(".text *")].filter(hasCaret).map(each => each.textContent);
    }"""
    with open_page(browser, slow) as page:
        for content, ends in (
            ("One.\n\nTwo.", "Two."),
            ("- one\n- **two**", "two"),
            ("- one\n  - inner\n- two\n  - last", "last"),
            ("```python\nx = 1", "x = 1"),
        ):
            assert page.evaluate(script, content) == [ends]


def test_copies(browser: Any, slow: HttpRig) -> None:
    create_elsewhere(slow, "copied", ("Hm?\n\nYes.", "Let me see.", CODE))
    with open_page(browser, slow, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.get_by_role("button", name="copied", exact=True).click()
        for name, text in (
            ("Copy code", CODE.split("```")[1].removeprefix("python\n").removesuffix("\n")),
            ("Copy message", "Hm?\n\nYes."),
            ("Copy reply", CODE),
        ):
            page.get_by_role("button", name=name).click()
            expect(page.locator("#said")).to_have_text("Copied")
            assert page.evaluate("navigator.clipboard.readText()") == text
            page.wait_for_function("document.querySelector('#said').textContent = ''; true")


def test_settings_reach_the_daemon(browser: Any, slow: HttpRig) -> None:
    create_elsewhere(slow, "no such prompt", ("Hm?", "", "Yes."))
    with open_page(browser, slow) as page:
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("#set-temperature-value")).to_have_text(re.compile("^Default"))
        page.get_by_label("Temperature").fill("0.3")
        page.get_by_label("Maximum length of a reply").fill("5")
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#settings-used")).to_contain_text("Temperature 0.3")
        page.reload()
        with page.expect_request(SEND) as sent:
            say(page, "A long message of many words, so that its echo would be long.")
        sampling = json.loads(sent.value.post_data)["sampling"]
        assert sampling == {"temperature": 0.3, "max_tokens": 5}
        stored = history(slow, page)
        assert (stored[0].role, stored[0].content) == (pb.ROLE_SYSTEM, "Be brief.")
        assert stored[-1].finish_reason == pb.FINISH_REASON_LENGTH
        expect(page.locator("article.reply")).to_contain_text("reached its maximum length")
        expect(page.locator("article.system")).to_contain_text("Be brief.")
        expect(page.locator("#settings-used")).to_contain_text("system prompt")
        page.get_by_role("button", name="no such prompt", exact=True).click()
        expect(page.locator("article.user")).to_have_count(1)
        expect(page.locator("#settings-used")).not_to_contain_text("system prompt")
        page.click("#new")
        expect(page.locator("#settings-used")).to_contain_text("system prompt")

        page.locator("#settings-used").click()
        page.get_by_role("button", name="Restore defaults").click()
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#settings-used")).to_be_hidden()
        with page.expect_request(SEND) as sent:
            say(page, "Now with the defaults.")
        assert json.loads(sent.value.post_data)["sampling"] == {}


def set_days(page: Any, days: dict[str, int]) -> None:
    """Let the list say that each conversation changed this many days ago."""

    def change(route: Any) -> None:
        found = route.fetch()
        value = found.json()
        for each in value["conversations"]:
            if (ago := days.get(each["conversation_id"])) is not None:
                noon = datetime.now().astimezone().replace(hour=12) - timedelta(days=ago)
                each["update_time"] = noon.astimezone(UTC).isoformat()
        route.fulfill(response=found, json=value)

    page.route(LIST, change)


def test_the_list_has_titles_and_days_of_all_conversations(browser: Any, slow: HttpRig) -> None:
    """This includes conversations without a title that another client has begun."""
    days = {"aged-0": 0, "aged-1": 1, "aged-2": 2, "aged-7": 7, "aged-8": 8}
    for name, ago in days.items():
        messages = [pb.NewMessage(content=f"Asked\n{ago} days ago"), pb.NewMessage(content="Yes.")]
        messages[1].role = pb.ROLE_ASSISTANT
        request = pb.CreateConversationRequest(conversation_id=name, messages=messages)
        slow.rig.stub.CreateConversation(request)
    with open_page(browser, slow) as page:
        set_days(page, days)
        page.reload()
        for day, numbers in (
            ("Today", [0]),
            ("Yesterday", [1]),
            ("Previous 7 days", [2, 7]),
            ("Older", [8]),
        ):
            rows = page.get_by_role("list", name=day, exact=True).locator(".open")
            titles = [f"Asked {each} days ago" for each in numbers]
            expect(rows.filter(has_text=re.compile("^Asked"))).to_have_text(titles)
        page.get_by_role("button", name="Asked 7 days ago", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Asked 7 days ago")
        page.reload()  # the address names the conversation
        expect(page.get_by_role("heading", level=1)).to_have_text("Asked 7 days ago")


def test_search_finds_titles_and_texts(browser: Any, slow: HttpRig) -> None:
    create_elsewhere(slow, "Botany", ("Hm?", "", "The *Quercus* is an oak."))
    create_elsewhere(slow, "An oak chest", ("Hm?", "", "Of wood."))
    hay = [("Hm?", "", f"Hay. {LONG}") for _ in range(8)]
    hay[3] = ("Hm?", "", f"{LONG}\n\nHere is *the* needle. {LONG}")
    create_elsewhere(slow, "Haystack", *hay)
    create_elsewhere(slow, "Powers", ("Hm?", "", "A **bold** claim: 2**3 is 8."))
    create_elsewhere(
        slow, f"A title that has many words before the end {'and more ' * 3}", *hay[:1]
    )
    with open_page(browser, slow) as page:
        rows, found = page.locator("#list .open"), page.locator("#found")
        page.fill("#search", "OAK")
        expect(found).to_have_text("2 conversations found.")
        expect(rows.filter(has_text="Botany").locator("mark")).to_have_text("oak")
        expect(rows.filter(has_text="Botany")).to_contain_text("…Quercus is an oak.")
        expect(rows.filter(has_text="An oak chest").locator("mark")).to_have_text("oak")
        page.fill("#search", "quercus")
        expect(rows).to_have_count(1)
        rows.first.click()
        expect(page.locator("article.reply")).to_contain_text("Quercus")
        page.fill("#search", "claim")
        expect(rows.filter(has_text="Powers")).to_contain_text("A bold claim: 2**3 is 8.")
        page.fill("#search", "the* needle")
        rows.first.click()
        expect(page.locator("#title")).to_have_text("Haystack")
        match = page.locator("article.reply").nth(3)
        expect(match).to_be_in_viewport()
        expect(page.locator("article").last).not_to_be_in_viewport()
        marked = "[...CSS.highlights.get('found')].map(each => each.toString())"
        assert "Here is the needle." in page.evaluate(marked)[0]
        page.fill("#search", "cat walks")
        rows.filter(has_text="Haystack").click()
        page.wait_for_function(f"{marked} == 'cat walks'")
        page.fill("#search", "the end")
        row = rows.filter(has_text="the end")
        mark, box = row.locator("mark").bounding_box(), row.bounding_box()
        assert mark["x"] + mark["width"] < box["x"] + box["width"]
        page.fill("#search", "no such word")
        expect(found).to_have_text("0 conversations found.")
        expect(rows).to_have_count(0)
        page.fill("#search", "")
        expect(rows.filter(has_text="Botany")).to_have_count(1)


def test_an_opened_conversation_shows_its_title_and_has_the_focus(
    browser: Any, slow: HttpRig
) -> None:
    for number in range(20):
        create_elsewhere(slow, f"row {number}", ("Hm?", "", "Yes."))
    with open_page(browser, slow) as page:
        row = page.locator("#list li", has_text="row 0")
        icons = row.locator(".icon")
        row.locator(".open").click()
        expect(page.locator("#text")).to_be_focused()
        expect(icons.first).to_have_css("opacity", "1")
        page.mouse.move(600, 300)
        expect(icons.first).to_have_css("opacity", "0")
        row.locator(".open").focus()
        page.keyboard.press("Tab")  # with the keyboard, the buttons are visible
        expect(icons.first).to_be_focused()
        expect(icons.first).to_have_css("opacity", "1")
        page.reload()
        expect(page.locator("#text")).to_be_focused()
        expect(row).to_be_in_viewport()


def test_the_examples_are_for_the_model(browser: Any, tiny: HttpRig, slow: HttpRig) -> None:
    with open_page(browser, slow) as page:
        expect(page.locator(".examples")).to_contain_text("Python")
    with open_page(browser, tiny) as page:
        sample(page, temperature=0)
        expect(page.locator(".welcome")).to_contain_text("The built-in model is tiny.")
        for number, reply in enumerate(("Pixel", "4821", "piano", "I will remember")):
            page.click("#new")
            page.locator(".examples button").nth(number).click()
            expect(page.locator("article.reply .cost")).to_be_visible()
            expect(page.locator("article.reply .text")).to_contain_text(reply)


def test_a_long_name_of_a_model_takes_one_line(browser: Any, slow: HttpRig) -> None:
    def change(route: Any) -> None:
        found = route.fetch()
        value = found.json()
        value["server"]["model"] = "/models/organisation/a-name-" + "that-is-long-" * 6
        route.fulfill(response=found, json=value)

    with open_page(browser, slow, PHONE) as page:
        field = page.locator("#text")
        expect(field).to_have_attribute("placeholder", re.compile("^Message "))
        height = field.bounding_box()["height"]
        page.route("**/GetServerInfo", change)
        page.reload()
        expect(field).to_have_attribute("placeholder", re.compile("^Message a-name-that"))
        assert field.bounding_box()["height"] == height


def test_an_example_begins_a_conversation(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow) as page:
        example = page.locator(".examples button").first
        text = example.locator(".note").inner_text()
        page.fill("#text", "A draft.")
        example.click()
        expect(page.locator("article.reply .cost")).to_be_visible()
        assert user_messages(page) == [text]
        expect(page.locator("#text")).to_have_value("")
        page.click("#new")
        expect(page.locator(".examples button")).to_have_count(4)
        expect(page.locator("#text")).to_have_value("A draft.")


def test_the_drawer_says_how_much_was_saved(browser: Any, tiny: HttpRig) -> None:
    with open_page(browser, tiny) as page:
        headline = page.locator("#saved .headline")
        expect(headline).to_have_text("Nothing measured yet")
        say(page, "My name is Ada.")
        page.reload()
        expect(headline).to_have_text(re.compile(r"100\s% is in memory"))
        page.click("#new")
        say(page, "My name is Ada.")
        expect(headline).to_have_text("First turn: nothing was in memory yet")
        with page.expect_response(SEND) as answered:
            say(page, "What is my name?")
        events = [
            line[6:] for line in answered.value.text().splitlines() if line.startswith("data: ")
        ]
        usage = json.loads(events[-1])["completed"]["usage"]
        cached = int(usage["device_tokens"]) + int(usage.get("host_tokens", 0))
        percent = 100 * cached // int(usage["prompt_tokens"])
        assert 0 < percent < 100
        expect(headline).to_have_text(re.compile(rf"^{percent}\s% of the prompt came"))
        expect(page.locator("#saved")).to_contain_text(
            f"{cached} of {usage['prompt_tokens']} tokens"
        )
        endless(page)
        page.fill("#text", "And now?")
        page.press("#text", "Enter")
        expect(page.locator("#saved")).to_contain_text("Previous reply")
        page.click("#stop")
        expect(page.locator("#saved")).not_to_contain_text("Previous reply")
        toggle = page.get_by_role("button", name="Memory", exact=True)
        expect(toggle).to_have_attribute("aria-expanded", "true")
        page.get_by_role("button", name="Close memory").click()
        expect(page.locator("#memory")).to_be_hidden()
        expect(toggle).to_be_focused()
        page.reload()
        expect(page.locator("#memory")).to_be_hidden()
        toggle.click()
        expect(page.locator("#memory")).to_be_visible()


def test_the_drawer_opens_by_itself_in_a_spacious_window(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow, (1280, 800)) as page:
        drawer = page.locator("#memory")
        expect(page.locator(".examples")).to_be_visible()
        expect(drawer).to_be_hidden()
        page.get_by_role("button", name="Memory", exact=True).click()
        expect(drawer).to_be_visible()
        page.reload()
        expect(drawer).to_be_visible()  # the browser keeps the choice
    with open_page(browser, slow) as page:
        expect(page.locator("#memory")).to_be_visible()


def test_the_drawer_says_that_nothing_is_cached(browser: Any, slow: HttpRig) -> None:
    create_elsewhere(slow, "not cached", ("Hm?", "", "Yes."))
    with open_page(browser, slow) as page:
        headline = page.locator("#saved .headline")
        page.get_by_role("button", name="not cached", exact=True).click()
        expect(headline).to_have_text(re.compile(r"^0\s% is in memory"))
        page.reload()
        expect(headline).to_have_text(re.compile(r"^0\s% is in memory"))
        expect(page.locator("#saved")).to_contain_text("The next turn computes")


def test_a_new_conversation_is_named_before_the_daemon_answers(browser: Any, slow: HttpRig) -> None:
    seen = []

    def look(route: Any) -> None:
        seen.append(page.locator("#title").inner_text())
        route.continue_()

    with open_page(browser, slow) as page:
        page.route("**/CreateConversation", look)
        say(page, "The name of\nthis one.")
        assert seen == ["The name of this one."]
        expect(page.locator("#title")).to_have_text(seen[0])


def test_a_refused_first_message_leaves_no_conversation(browser: Any, tiny: HttpRig) -> None:
    def stored() -> set[str]:
        found = tiny.rig.stub.ListConversations(pb.ListConversationsRequest(page_size=500))
        return {each.conversation_id for each in found.conversations}

    before, text = stored(), "word " * 1200
    with open_page(browser, tiny, is_quiet=False) as page:
        alert = page.get_by_role("alert")
        page.fill("#text", text)
        for _ in range(2):
            with page.expect_response(SEND):
                page.press("#text", "Enter")
            expect(alert).to_have_text(
                re.compile(r"^This turn .* 1,2\d\d tokens .*\. Shorten the message\.$")
            )
            again = alert.get_by_role("button", name="Try again")
            expect(again).to_have_count(0)  # the same text cannot fit later
            expect(page.locator("#send")).to_be_visible()
            expect(page.locator("#text")).to_have_value(text.strip())
            expect(shown_row(page)).to_have_count(0)
            assert stored() == before
        say(page, "Short.")
        expect(shown_row(page)).to_have_text("Short.")
        assert len(stored() - before) == 1
        page.fill("#text", text)
        page.press("#text", "Enter")
        expect(alert).to_contain_text("Shorten the message.")
        expect(alert).not_to_contain_text("Start a new conversation")

    create_elsewhere(tiny, "almost full", (LONG * 3, "", LONG * 2))
    with open_page(browser, tiny, is_quiet=False) as page:
        page.get_by_role("button", name="almost full", exact=True).click()
        expect(shown_row(page)).to_have_text("almost full")
        page.fill("#text", LONG * 3)
        page.press("#text", "Enter")
        expect(page.get_by_role("alert")).to_contain_text("Start a new conversation")


def test_the_page_asks_for_a_token(browser: Any, tmp_path: Path) -> None:
    given_token, entry = callers.new_token("red", admin=False)
    tokens = callers.tokens_of(tmp_path / "tokens", entry.encode())
    with http_rig(tmp_path / "data", http={"tokens": tokens}) as rig:
        with open_page(browser, rig, is_quiet=False) as page:
            box = page.get_by_role("dialog", name="Enter your token")
            box.get_by_label("Token").fill("wrong")
            page.click("#ask-yes")
            box.get_by_label("Token").fill(given_token)
            page.click("#ask-yes")
            say(page, "Let in.")
            page.reload()  # the tab keeps the token
            expect(page.locator("#list .open")).to_have_text("Let in.")
        with open_page(browser, rig, is_quiet=False) as page:
            page.get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("alert")).to_be_visible()


def test_the_page_reports_a_lost_daemon_and_a_retry_runs_once(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow, is_quiet=False) as page:
        memory = "**/pensieve/memory"
        page.route(memory, lambda route: route.abort())
        page.reload()
        banner = page.locator("#banner")
        expect(banner).to_contain_text("Connection to the daemon lost")
        page.unroute(memory)
        expect(banner).to_be_hidden(timeout=30_000)

        page.route(SEND, lose_answer)
        page.fill("#text", "Said once.")
        page.press("#text", "Enter")
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("The reply was interrupted. The connection")
        assert user_messages(page) == ["Said once."]
        page.fill("#text", "The next one.")
        page.unroute(SEND)
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("article.reply .cost")).to_be_visible()
        assert user_messages(page) == ["Said once."]
        assert [each.content for each in history(slow, page)][0::2] == ["Said once."]
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator("#text")).to_have_value("The next one.")


def test_a_retry_sends_the_refused_message(browser: Any, slow: HttpRig) -> None:
    """The retry does not send the text that the message field contains by then."""
    refusal = {"error": {"message": "the daemon is busy", "code": "unavailable"}}
    sent = []

    def refuse(route: Any) -> None:
        sent.append(json.loads(route.request.post_data)["request_id"])
        route.fulfill(status=503, json=refusal)

    with open_page(browser, slow, is_quiet=False) as page:
        say(page, "Hello.")
        page.route(SEND, refuse)
        page.fill("#text", "Refused at first.")
        page.press("#text", "Enter")
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("the daemon is busy", ignore_case=True)
        expect(page.locator("#text")).to_have_value("Refused at first.")
        page.fill("#text", "Something else.")
        page.unroute(SEND)
        with page.expect_request(SEND) as again:
            page.get_by_role("button", name="Try again").click()
        assert json.loads(again.value.post_data)["request_id"] not in sent
        expect(page.locator("article.reply .cost").nth(1)).to_be_visible()
        assert user_messages(page) == ["Hello.", "Refused at first."]
        expect(page.locator("#text")).to_have_value("Something else.")


def test_a_refused_message_and_the_next_draft_are_kept(browser: Any, slow: HttpRig) -> None:
    held: list[Any] = []
    refusal = {"error": {"message": "the daemon is busy", "code": "unavailable"}}
    with open_page(browser, slow, is_quiet=False) as page:
        for before in ((), ("Hello.",)):
            page.click("#new")
            for text in before:
                say(page, text)
            page.route(SEND, lambda route: held.append(route))
            page.fill("#text", "Refused.")
            page.press("#text", "Enter")
            expect(page.locator("#text")).to_have_value("")
            page.fill("#text", "The next one.")
            wait_for_routes(page, held)
            held.pop().fulfill(status=503, json=refusal)
            expect(page.locator("#text")).to_have_value("Refused.\n\nThe next one.")
            page.unroute(SEND)
            page.get_by_role("button", name="Try again").click()
            expect(page.locator("article.reply .cost").last).to_be_visible()
            expect(page.locator("#send")).to_be_visible()
            assert user_messages(page) == [*before, "Refused."]
            page.fill("#text", "")


def test_a_refused_message_leaves_the_draft_of_the_next_conversation(
    browser: Any, slow: HttpRig
) -> None:
    """The daemon refuses a turn while another conversation is being opened."""
    create_elsewhere(slow, "opened meanwhile", ("Hm?", "", "Yes."))
    refusal = {"error": {"message": "the daemon is busy", "code": "unavailable"}}
    refused: list[Any] = []
    loading: list[Any] = []
    with open_page(browser, slow, is_quiet=False) as page:
        field = page.locator("#text")
        row = page.get_by_role("button", name="opened meanwhile", exact=True)
        row.click()
        expect(shown_row(page)).to_have_text("opened meanwhile")
        page.fill("#text", "For this conversation.")
        page.click("#new")
        page.route("**/CreateConversation", lambda route: refused.append(route))
        page.route(MESSAGES, lambda route: loading.append(route))
        page.fill("#text", "Refused.")
        page.press("#text", "Enter")
        expect(field).to_have_value("")
        row.click()
        expect(field).to_have_value("For this conversation.")
        wait_for_routes(page, refused)
        refused.pop().fulfill(status=503, json=refusal)
        expect(page.get_by_role("alert")).to_be_visible()
        expect(field).to_have_value("For this conversation.")
        wait_for_routes(page, loading)
        loading.pop().continue_()
        expect(shown_row(page)).to_have_text("opened meanwhile")
        expect(field).to_have_value("For this conversation.")
        page.click("#new")
        expect(field).to_have_value("Refused.")


def test_a_conversation_that_was_deleted_elsewhere(browser: Any, slow: HttpRig) -> None:
    """The page says so, and the unsent text becomes the draft of a new conversation."""
    with open_page(browser, slow, is_quiet=False) as page:
        field, alert = page.locator("#text"), page.get_by_role("alert")

        def pick(name: str) -> Any:
            """Open a new conversation and return its row."""
            create_elsewhere(slow, name, ("Hm?", "", "Yes."))
            page.reload()
            row = page.get_by_role("button", name=name, exact=True)
            row.click()
            expect(shown_row(page)).to_have_text(name)
            return row

        def check_forgotten(row: Any, words: str, text: str) -> None:
            expect(alert).to_have_text(words)
            expect(row).to_have_count(0)
            expect(page.locator("#title")).to_have_text("New conversation")
            expect(page.locator(".welcome")).to_be_visible()
            expect(field).to_have_value(text)
            page.fill("#text", "")

        row = pick("gone 1")
        delete_elsewhere(slow, "gone 1")
        page.fill("#text", "Who are you?")
        page.press("#text", "Enter")
        check_forgotten(row, "“gone 1” was deleted elsewhere.", "Who are you?")
        expect(field).to_be_focused()
        say(page, "And now?")
        expect(alert).to_have_count(0)
        assert user_messages(page) == ["And now?"]

        row = pick("gone 2")
        say(page, "Said.")
        act(page, "user", 1, "Edit message")
        page.get_by_label(EDIT).fill("Edited.")
        page.fill("#text", "The next one.")
        delete_elsewhere(slow, "gone 2")
        page.get_by_label(EDIT).press("Enter")
        check_forgotten(row, "“gone 2” was deleted elsewhere.", "Edited.\n\nThe next one.")

        row = pick("gone 3")
        endless(page)
        page.fill("#text", "Talk to me.")
        page.press("#text", "Enter")
        expect(page.locator("article.reply .text").last).not_to_be_empty()
        page.fill("#text", "The next one.")
        delete_elsewhere(slow, "gone 3")
        check_forgotten(row, "“gone 3” was deleted elsewhere.", "Talk to me.\n\nThe next one.")

        row = pick("gone 4")
        page.fill("#text", "Not yet sent.")
        page.click("#new")
        delete_elsewhere(slow, "gone 4")
        row.click()
        check_forgotten(row, "“gone 4” was deleted elsewhere.", "Not yet sent.")

        row = pick("gone 5")
        page.fill("#text", "Not yet sent.")
        delete_elsewhere(slow, "gone 5")
        page.reload()
        check_forgotten(row, "This conversation was deleted elsewhere.", "Not yet sent.")
        assert "gone" not in page.url

        row = pick("gone 6")
        delete_elsewhere(slow, "gone 6")
        row_act(page, "gone 6", "Rename")
        answer(page, "Another name")
        check_forgotten(row, "“gone 6” was deleted elsewhere.", "")

        row = pick("gone 7")
        delete_elsewhere(slow, "gone 7")
        row_act(page, "gone 7", "Delete")
        page.click("#ask-yes")
        expect(row).to_have_count(0)
        expect(alert).to_have_count(0)

        row = pick("gone 8")
        page.fill("#text", "Not yet sent.")
        delete_elsewhere(slow, "gone 8")
        page.evaluate(RETURN)
        check_forgotten(row, "“gone 8” was deleted elsewhere.", "Not yet sent.")


def test_a_deletion_on_the_page_ends_the_running_reply(browser: Any, slow: HttpRig) -> None:
    answers: list[Any] = []
    ended: list[Any] = []
    with open_page(browser, slow, is_quiet=False) as page:
        endless(page)
        page.fill("#text", "To be deleted.")
        with page.expect_request(SEND) as sent:
            page.press("#text", "Enter")
        page.on("requestfinished", lambda each: ended.append(each))
        expect(page.locator("article.reply .text")).not_to_be_empty()
        page.route("**/DeleteConversation", lambda route: answers.append((route, route.fetch())))
        row_act(page, "To be deleted.", "Delete")
        page.click("#ask-yes")
        wait_for_routes(page, answers)
        # The reply ends before the deletion is answered.
        wait_for(lambda: sent.value in ended or page.wait_for_timeout(20))
        route, answered = answers.pop()
        route.fulfill(response=answered)
        expect(page.locator(".welcome")).to_be_visible()
        expect(page.locator("#list .open", has_text="To be deleted.")).to_have_count(0)
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator("#text")).to_have_value("")


def test_the_list_is_loaded_again_when_the_user_returns(browser: Any, slow: HttpRig) -> None:
    for number in range(7):
        reply = "A lighthouse." if number > 2 else "Yes."
        create_elsewhere(slow, f"early {number}", ("Hm?", "", reply))
    lists: list[Any] = []

    def few(route: Any) -> None:
        """Let the list have only three conversations per page."""
        lists.append(route)
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "page_size": 3}))

    with open_page(browser, slow) as page:
        page.route(LIST, few)
        page.reload()
        rows, found = page.locator("#list .open"), page.locator("#found")

        def row(name: str) -> Any:
            return page.get_by_role("button", name=name, exact=True)

        page.click("#more")
        expect(rows).to_have_count(6)
        row("early 3").click()
        expect(shown_row(page)).to_have_text("early 3")
        page.fill("#text", "Not yet sent.")
        page.evaluate("$('text').setSelectionRange(4, 7)")
        create_elsewhere(slow, "begun elsewhere", ("Hm?", "", "Another lighthouse."))
        delete_elsewhere(slow, "early 6")
        lists.clear()
        page.evaluate(RETURN)
        expect(row("begun elsewhere")).to_have_count(1)
        expect(row("early 6")).to_have_count(0)
        expect(rows).to_have_count(6)  # the second page stays, too
        expect(page.locator("#more")).to_be_visible()
        expect(shown_row(page)).to_have_text("early 3")
        expect(page.locator("#text")).to_have_value("Not yet sent.")
        expect(page.locator("#text")).to_be_focused()
        assert page.evaluate("[$('text').selectionStart, $('text').selectionEnd]") == [4, 7]
        for _ in range(3):
            page.evaluate("dispatchEvent(new Event('focus'))")
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.wait_for_timeout(600)
        assert len(lists) == 1  # not more often than every three seconds

        page.fill("#search", "lighthouse")
        expect(found).to_have_text(re.compile(r"^4 conversations found\."))
        create_elsewhere(slow, "found elsewhere", ("Hm?", "", "The third lighthouse."))
        delete_elsewhere(slow, "early 5")
        page.evaluate(RETURN)
        expect(found).to_have_text(re.compile(r"^4 conversations found\."))
        expect(rows.filter(has_text="found elsewhere")).to_contain_text("The third lighthouse.")
        expect(page.locator("#search")).to_have_value("lighthouse")
        expect(page.locator("#search")).to_be_focused()
        expect(page.get_by_role("alert")).to_have_count(0)


def test_errors_do_not_pile_up(browser: Any, slow: HttpRig) -> None:
    create_elsewhere(slow, "unreachable 1", ("Hm?", "", "Yes."))
    create_elsewhere(slow, "unreachable 2", ("Hm?", "", "Yes."))
    with open_page(browser, slow, is_quiet=False) as page:
        page.route(MESSAGES, lambda route: route.abort())
        alert = page.get_by_role("alert")
        for title in ("unreachable 1", "unreachable 2"):
            page.get_by_role("button", name=title, exact=True).click()
            expect(alert).to_be_visible()
        page.wait_for_timeout(300)
        expect(alert).to_have_count(1)
        page.unroute(MESSAGES)
        page.evaluate(RECONNECT)
        expect(alert).to_have_count(0)
        page.evaluate("problem(new Lost())")
        alert.get_by_role("button", name="Dismiss").click()
        expect(alert).to_have_count(0)


def test_an_interrupted_reply_stays_in_its_conversation(browser: Any, slow: HttpRig) -> None:
    create_elsewhere(slow, "another one", ("Hm?", "", "Yes."))
    half = 'data: {"delta": {"text": "Half a reply"}}\n\n'
    with open_page(browser, slow, is_quiet=False) as page:
        page.route(SEND, lambda route: route.fulfill(content_type="text/event-stream", body=half))
        page.fill("#text", "A long\nquestion.")
        page.press("#text", "Enter")
        reply = page.locator("article.reply")
        for _ in range(2):
            expect(reply).to_contain_text("Half a reply")
            expect(reply.get_by_role("alert")).to_contain_text("The reply was interrupted.")
            expect(page.locator(".waiting, .running")).to_have_count(0)
            assert user_messages(page) == ["A long\nquestion."]
            expect(shown_row(page)).to_have_text("A long question.")
            page.get_by_role("button", name="another one", exact=True).click()
            expect(reply).to_have_text("ReplyYes.")
            page.get_by_role("button", name="A long question.", exact=True).click()
        expect(shown_row(page)).to_have_text("A long question.")
        page.reload()  # nothing of it is in the history
        expect(shown_row(page)).to_have_text("A long question.")
        expect(page.locator(".welcome")).to_have_count(0)
        expect(reply).to_contain_text("Half a reply")
        expect(reply.get_by_role("alert")).to_contain_text("The reply was interrupted.")
        assert user_messages(page) == ["A long\nquestion."]
        page.unroute(SEND)
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".cost")).to_be_visible()
        assert user_messages(page) == ["A long\nquestion."]
        act(page, "user", 0, "Edit message")
        page.get_by_label(EDIT).fill("A short question.")
        page.keyboard.press("Enter")
        expect(shown_row(page)).to_have_text("A short question.")


def test_an_interrupted_message_is_removed_only_after_confirmation(
    browser: Any, slow: HttpRig
) -> None:
    half = 'data: {"delta": {"text": "Half a reply"}}\n\n'
    with open_page(browser, slow, is_quiet=False) as page:
        say(page, "Hello.")
        page.route(SEND, lambda route: route.fulfill(content_type="text/event-stream", body=half))
        page.fill("#text", "Interrupted.")
        page.press("#text", "Enter")
        expect(page.get_by_role("alert")).to_be_visible()
        page.unroute(SEND)
        page.fill("#text", "Another one.")
        page.press("#text", "Enter")
        box = page.get_by_role("dialog", name="Send another message?")
        expect(box).to_contain_text("“Interrupted.” and its partial reply will be removed.")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#text")).to_have_value("Another one.")
        assert user_messages(page) == ["Hello.", "Interrupted."]
        act(page, "reply", 0, AGAIN)
        expect(page.locator("#ask")).to_contain_text("2 later messages will be removed.")
        page.get_by_role("button", name="Cancel").click()
        act(page, "user", 0, "Edit message")
        page.get_by_label(EDIT).fill("Hello again.")
        page.keyboard.press("Enter")
        expect(box).to_be_visible()
        page.click("#ask-no")
        expect(page.get_by_label(EDIT)).to_have_value("Hello again.")
        page.locator(".edit").get_by_role("button", name="Cancel").click()
        page.route(SEND, lambda route: route.abort())
        page.get_by_role("button", name="Try again").click()
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
        expect(page.locator("article.reply").last).to_contain_text("Half a reply")
        page.unroute(SEND)
        page.press("#text", "Enter")
        page.click("#ask-yes")
        expect(page.locator("article.reply .cost")).to_have_count(2)
        assert user_messages(page) == ["Hello.", "Another one."]


def test_an_interrupted_question_that_is_stored_stays(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow, is_quiet=False) as page:
        page.route(SEND, lose_answer)
        page.fill("#text", "Stored.")
        page.press("#text", "Enter")
        expect(page.get_by_role("alert")).to_contain_text("The reply was interrupted.")
        page.unroute(SEND)
        page.fill("#text", "Another one.")
        page.press("#text", "Enter")
        expect(page.locator("article.reply .cost")).to_be_visible()
        expect(page.locator("#ask")).to_be_hidden()
        assert user_messages(page) == ["Stored.", "Another one."]
        assert [each.content for each in history(slow, page)][::2] == user_messages(page)


def test_an_edit_does_not_remove_a_reply_that_was_stored_meanwhile(
    browser: Any, slow: HttpRig
) -> None:
    with open_page(browser, slow, is_quiet=False) as page:
        say(page, "Hello.")
        page.route(SEND, lose_answer)
        page.fill("#text", "Stored.")
        page.press("#text", "Enter")
        expect(page.get_by_role("alert")).to_contain_text("The reply was interrupted.")
        page.unroute(SEND)
        act(page, "user", 0, "Edit message")
        page.get_by_label(EDIT).fill("Hello again.")
        page.keyboard.press("Enter")
        expect(page.locator("#text")).to_have_value("Hello again.")
        expect(page.get_by_label(EDIT)).to_have_count(0)
        expect(page.get_by_role("alert")).to_have_count(0)
        assert user_messages(page) == ["Hello.", "Stored."]
        assert [each.content for each in history(slow, page)][::2] == user_messages(page)


def test_a_message_waits_while_its_conversation_loads(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow, is_quiet=False) as page:
        say(page, "Hello.")
        page.fill("#text", "For this conversation.")
        held: list[Any] = []
        page.route(LIST, lambda route: held.append(route))
        page.reload()
        page.press("#text", "Enter")
        expect(page.get_by_role("alert")).to_contain_text("This conversation is loading.")
        wait_for_routes(page, held)
        held.pop().continue_()
        expect(shown_row(page)).to_have_text("Hello.")
        expect(page.get_by_role("alert")).to_have_count(0)
        page.press("#text", "Enter")
        expect(page.locator("article.reply .cost")).to_be_visible()
        assert user_messages(page) == ["Hello.", "For this conversation."]
        page.reload()
        page.click("#new")  # before the list is loaded
        wait_for_routes(page, held)
        held.pop().continue_()
        expect(page.locator("#list")).to_contain_text("Hello.")
        page.wait_for_timeout(300)
        expect(page.locator(".examples")).to_be_visible()


def test_replies_continue_after_a_reload(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow, is_quiet=False) as page:
        reply, runs = page.locator("article.reply .text"), page.locator("#list .runs")
        endless(page)
        for text in ("Left behind.", "Reloaded."):
            page.click("#new")
            page.fill("#text", text)
            with page.expect_request(SEND) as sent:
                page.press("#text", "Enter")
            expect(reply).not_to_be_empty()
        early = reply.inner_text().strip()[:20]
        with page.expect_request(
            lambda each: '"content":"Reloaded."' in (each.post_data or "")
        ) as again:
            page.reload()
        first, second = (json.loads(each.value.post_data) for each in (sent, again))
        assert first["request_id"] == second["request_id"]
        expect(shown_row(page)).to_have_text(re.compile("^Reloaded."))
        expect(reply).to_contain_text(early)
        assert user_messages(page) == ["Reloaded."]
        expect(runs).to_have_count(2)
        expect(page.locator("#text")).to_have_value("")
        page.wait_for_timeout(6000)  # the daemon gives up a turn without a reader after 5 s
        expect(runs).to_have_count(2)
        for text in ("Reloaded.", "Left behind."):
            page.locator("#list .open", has_text=text).click()
            expect(page.locator("article.user .body")).to_have_text(text)
            page.click("#stop")
            expect(page.locator("article.reply .cost")).to_be_visible()
            assert [each.content for each in history(slow, page)][::2] == [text]
        page.reload()
        expect(page.locator("article.reply .ended")).to_be_visible()
        assert user_messages(page) == ["Left behind."]
        expect(page.get_by_role("alert")).to_have_count(0)


def test_a_failed_reconnection_closes_its_stream(browser: Any, slow: HttpRig) -> None:
    """A browser opens only six connections to a host. With six forgotten streams, all calls would hang."""
    with open_page(browser, slow, is_quiet=False) as page:
        memory = "**/pensieve/memory"
        page.route(memory, lambda route: route.abort())
        page.route(LIST, lambda route: route.fulfill(status=500, json={}))
        page.reload()
        expect(page.locator("#banner")).to_contain_text("Connection to the daemon lost")
        page.unroute(memory)
        with page.expect_event("requestfailed", lambda each: each.url.endswith("memory")):
            pass


@contextmanager
def loading(rig: HttpRig) -> Iterator[None]:
    """Let the daemon answer as if its model were still loading."""
    daemon = rig.rig.daemon
    conversations, daemon._conversations = daemon._conversations, None
    try:
        yield
    finally:
        daemon._conversations = conversations


@pytest.mark.parametrize("is_open", [True, False])
def test_the_page_waits_while_the_model_loads(browser: Any, slow: HttpRig, is_open: bool) -> None:
    """The page is opened before or after the start of the daemon."""
    title = f"stored before, {is_open}"
    create_elsewhere(slow, title, ("Hm?", "", "Yes."))
    with open_page(browser, slow, is_quiet=False) as page:
        banner = page.locator("#banner")
        page.get_by_role("button", name=title, exact=True).click()
        expect(shown_row(page)).to_have_text(title)
        with loading(slow):
            page.evaluate(RECONNECT) if is_open else page.reload()
            expect(banner).to_have_text("The model is loading …")
            expect(banner).not_to_have_class("bad")
            expect(page.get_by_role("alert")).to_have_count(0)
            if not is_open:
                expect(page.locator("#list")).to_have_text("Loading conversations …")
        expect(banner).to_be_hidden()
        expect(shown_row(page)).to_have_text(title)
        expect(page.locator("article.user")).to_have_count(1)


def test_a_message_waits_while_the_model_loads(browser: Any, slow: HttpRig) -> None:
    with open_page(browser, slow, is_quiet=False) as page:
        expect(page.locator(".strip, #strips .note").first).to_be_visible()
        say(page, "Before the restart.")
        expect(page.locator(".strip").first).to_be_visible()
        page.click("#new")
        sent = []
        page.on("request", lambda each: sent.append(each.url))
        with loading(slow):
            page.evaluate(RECONNECT)
            expect(page.locator("#banner")).to_have_text("The model is loading …")
            expect(page.locator(".strip")).to_have_count(0)
            expect(page.locator("#engine")).to_be_hidden()
            example = page.locator(".examples button").nth(1)
            example.focus()
            page.wait_for_timeout(1500)  # the page asks for the state each second
            expect(example).to_be_focused()
            page.fill("#text", "Wait for it.")
            page.press("#text", "Enter")
            page.wait_for_timeout(1500)
            expect(page.get_by_role("alert")).to_contain_text("The model is loading.")
            expect(page.locator("#send")).to_be_disabled()
            expect(page.locator("#text")).to_have_value("Wait for it.")
        expect(page.locator("#banner")).to_be_hidden()
        expect(page.get_by_role("alert")).to_have_count(0)
        assert not [each for each in sent if each.endswith(("CreateConversation", "SendMessage"))]
        page.click("#send")
        expect(page.locator("article.reply .cost")).to_be_visible()
        assert user_messages(page) == ["Wait for it."]


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
    with open_page(browser, tiny) as page:
        expect(page.locator("#text")).to_be_focused()
        page.keyboard.type("By hand")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("alone.")
        page.keyboard.press("Enter")
        expect(page.locator("article.reply .cost")).to_be_visible()
        assert user_messages(page) == ["By hand\nalone."]
        expect(page.locator("#text")).to_be_focused()
        tab_to(page, "New conversation from here", "Shift+Tab")
        page.keyboard.press("Enter")
        expect(shown_row(page)).to_have_text("Fork of By hand alone.")
        tab_to(page, "Rename Fork of By hand", "Shift+Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#ask-text")).to_be_focused()
        page.keyboard.type("By keys")  # replaces the selected text
        page.keyboard.press("Enter")
        expect(shown_row(page)).to_contain_text("By keys")
        assert focused(page) == "By keys"
        tab_to(page, "Delete By keys")
        page.keyboard.press("Enter")
        expect(page.locator("#ask")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#ask")).to_be_hidden()
        page.locator("#text").focus()
        tab_to(page, "By hand alone., ")
        page.keyboard.press("Enter")
        expect(page.locator("#explained")).to_contain_text(re.compile("chunks? 0"))


def rules_broken(page: Any) -> list[str]:
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]


def drawer(page: Any, name: str) -> None:
    """In a narrow window, open the drawer or the menu with this name."""
    if page.viewport_size["width"] == PHONE[0]:
        page.get_by_role("button", name=name, exact=True).click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing(browser: Any, tiny: HttpRig, size: tuple[int, int], scheme: str) -> None:
    """Apply axe-core's rules in each state of the page. Its script is exempt from the page's policy."""
    name = f"axe-{size[0]}-{scheme}"
    create_elsewhere(tiny, name, ("Hm?", "Let me see.", CODE))
    looks: dict[str, Any] = {"color_scheme": scheme, "bypass_csp": True, "reduced_motion": "reduce"}
    with open_page(browser, tiny, size, **looks) as page:
        expect(page.locator(".examples")).to_be_visible()
        assert rules_broken(page) == []
        say(page, "A message.")
        say(page, "And another.")
        page.locator(".cost summary").last.click()
        page.wait_for_timeout(700)
        assert rules_broken(page) == []
        act(page, "user", 0, "Edit message")
        assert rules_broken(page) == []
        page.keyboard.press("Escape")
        page.evaluate("onDisconnect(new Lost()); problem(new Lost(), () => {})")
        assert rules_broken(page) == []
        drawer(page, "More")
        assert rules_broken(page) == []
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Maximum length of a reply").fill("50")
        assert rules_broken(page) == []
        page.get_by_role("button", name="Save").click()
        assert rules_broken(page) == []
        drawer(page, "Conversations")
        page.fill("#search", "print")
        expect(page.locator("#list mark").first).to_be_visible()
        assert rules_broken(page) == []
        page.get_by_role("button", name=f"Delete {name}").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#ask")).to_be_visible()
        assert rules_broken(page) == []
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#list .open", has_text=name)).to_be_focused()
        page.get_by_role("button", name=f"Rename {name}").focus()
        page.keyboard.press("Enter")
        assert rules_broken(page) == []
        page.get_by_role("button", name="Cancel").click()
        page.locator("#list .open", has_text=name).click()
        page.locator(".thinking summary").click()
        assert rules_broken(page) == []
        drawer(page, "Memory")
        page.locator(".strip").first.click()
        expect(page.locator("#explained")).to_contain_text("chunk")
        assert rules_broken(page) == []


def test_a_phone_scrolls_in_one_direction(browser: Any, slow: HttpRig) -> None:
    title = "x" * 80
    create_elsewhere(slow, title, ("y" * 300, "z" * 300, f"{CODE} {'w' * 300}"))

    def check_narrow(*selectors: str) -> None:
        for selector in ("html", *selectors):
            wide, seen = page.locator(selector).evaluate(
                "each => [each.scrollWidth, each.clientWidth]"
            )
            assert wide <= seen, selector

    with open_page(browser, slow, (320, 640)) as page:
        lists = page.get_by_role("button", name="Conversations", exact=True)
        memory = page.get_by_role("button", name="Memory", exact=True)
        expect(page.locator("#server")).to_contain_text("builtin")
        check_narrow("#chat", "#log")
        lists.click()
        expect(page.locator("#sidebar")).to_be_visible()
        check_narrow("#sidebar")
        page.keyboard.press("Escape")
        expect(page.locator("#sidebar")).to_be_hidden()
        expect(lists).to_be_focused()
        lists.click()
        page.get_by_role("button", name=title, exact=True).click()
        expect(page.locator("#sidebar")).to_be_hidden()
        expect(page.locator("article.reply")).to_be_visible()
        check_narrow("#chat", "#log")
        memory.click()
        expect(page.locator("#memory")).to_be_visible()
        expect(page.locator("#memory-close")).to_be_focused()
        check_narrow("#memory")
        page.locator("#shade").click(position={"x": 5, "y": 300})
        expect(page.locator("#memory")).to_be_hidden()
        expect(memory).to_be_focused()
        say(page, "Small.")
        page.get_by_role("button", name="New conversation", exact=True).click()
        expect(page.locator(".examples")).to_be_visible()
        assert user_messages(page) == []


def test_a_touch_screen_has_menus_and_large_buttons(browser: Any, slow: HttpRig) -> None:
    create_elsewhere(slow, "touched", ("Hm?", "", CODE))
    create_elsewhere(slow, "not touched", ("Hm?", "", CODE))
    touch: dict[str, Any] = {"has_touch": True, "is_mobile": True}
    small = """() => [...document.querySelectorAll("button, summary")]
        .filter(each => each.checkVisibility() && !each.closest(".examples"))
        .filter(each => Math.min(each.offsetWidth, each.offsetHeight) < 44).map(each => each.outerHTML)"""
    with open_page(browser, slow, PHONE, **touch) as page:
        more = page.get_by_role("button", name="More", exact=True)
        more.tap()
        expect(page.locator("#menu button")).to_have_text(["Settings"])
        page.keyboard.press("Escape")
        expect(page.locator("#menu")).to_be_hidden()
        page.locator("#sidebar-open").tap()
        assert page.evaluate(small) == []
        page.get_by_role("button", name="More for not touched").tap()
        page.get_by_role("button", name="Rename", exact=True).tap()
        answer(page, "renamed")
        page.get_by_role("button", name="More for renamed").tap()
        page.get_by_role("button", name="Delete", exact=True).tap()
        page.click("#ask-yes")
        expect(page.locator("#list .open", has_text="renamed")).to_have_count(0)
        page.get_by_role("button", name="touched", exact=True).tap()
        expect(page.locator("article.reply")).to_be_visible()
        assert page.evaluate(small) == []
        more.tap()
        with page.expect_download() as download:
            page.get_by_role("button", name="Export conversation").tap()
        assert download.value.suggested_filename == "touched.jsonl"
