"""Make the pictures in docs/images from a real daemon, a real model and a real browser.

`pensieve serve smollm2` runs with tiers of 480 tokens each, so that conversations evict each other. The
script first creates some conversations. Then it records a scene of twenty seconds in Debian's chromium. The
GIF shows each frame for as long as the browser did, and the replies are the model's own.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
CACHE = ("--device-cache", "480t", "--host-cache", "480t")
WIDE, PHONE = {"width": 1240, "height": 700}, {"width": 390, "height": 780}
GIF_WIDTH, GIF_COLOURS, FRAME_SECONDS = 1000, 96, 0.15
# Colours of the page that are rare in a frame. The palette of the GIF must contain them.
PALETTE = (
    "#2f7de1",
    "#0b8f80",
    "#c07a00",
    "#c02f99",
    "#c4452f",
    "#1257a8",
    "#a06600",
)
SCENE_SECONDS = 20.0
NOTES = (
    "Ada lives in Oslo with her sister Ines and a grey cat called Pixel. On Friday they take the night "
    "train to Paris, and on Sunday evening they come back. Ada likes museums, good bread and long walks "
    "by the river. Ines likes old bookshops and strong coffee."
)
EARLIER_CONVERSATIONS = {  # titles and messages of the conversations before the recording
    "The moon": (
        "Why does the moon have phases? Answer in one sentence.",
        "Is there water on the moon? Answer in one sentence.",
    ),
    "Adding in Python": ("Write a Python function that adds two numbers.",),
    "Baking bread": (
        "What do I need to bake bread? Answer in one sentence.",
        "How hot must the oven be?",
    ),
    "Ada and Ines": (f"{NOTES} Where does Ada live?", "What does Ines like?"),
    "Paris": (
        "What is the capital of France?",
        "Name one famous museum in Paris.",
        "And a famous tower?",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/record_page", description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("scripts/record_page needs Debian's chromium: apt-get install chromium")
    options.out.mkdir(parents=True, exist_ok=True)
    with served(options.model) as url:
        for title, texts in EARLIER_CONVERSATIONS.items():
            hold_conversation(url, title, texts)
        record(url, chromium, options.out)


@contextmanager
def served(model: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        ready, log = Path(folder, "ready"), Path(folder, "log")
        places = ("--data", f"{folder}/data", "--ready-file", str(ready))
        listening = ("--address", "127.0.0.1:0", "--http", "127.0.0.1:0")
        command = [sys.executable, "-m", "pensieve.cli.main", "serve", model]
        with log.open("wb") as written:
            daemon = subprocess.Popen([*command, *places, *listening, *CACHE], stderr=written)
        try:
            while not ready.exists():
                if daemon.poll() is not None:
                    sys.exit(log.read_text())
                time.sleep(0.1)
            yield next(
                word.rstrip(",")
                for word in log.read_text().replace('"', " ").split()
                if word.startswith("http://")
            )
        finally:
            daemon.terminate()
            daemon.wait(60)


def hold_conversation(url: str, title: str, texts: Sequence[str]) -> None:
    """Create a conversation and send its messages."""

    def call(method: str, value: Any) -> None:
        path = f"{url}/pensieve.v1.ConversationService/{method}"
        head = {"content-type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(path, json.dumps(value).encode(), head)
        ) as answer:
            answer.read()

    name = title.lower().replace(" ", "-")
    call("CreateConversation", {"conversation_id": name, "metadata": {"title": title}})
    for text in texts:
        sampling = {"temperature": 0, "max_tokens": 90}
        message = {"messages": [{"content": text}], "sampling": sampling}
        call("SendMessage", {"conversation_id": name, **message})


def record(url: str, chromium: str, out: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = open_page(browser, url, WIDE)
        page.locator(".strip").nth(3).wait_for()
        frames = record_frames(page, out)
        write_gif(frames, out / "page.gif")
        open_named(page, "Fork of Ada and Ines")
        page.emulate_media(color_scheme="dark")
        page.locator("#memory").evaluate("each => { each.scrollTop = 0; }")
        page.wait_for_timeout(800)
        page.screenshot(path=out / "page-dark.png")
        phone = open_page(browser, url, PHONE)
        phone.click("#sidebar-open")
        phone.locator("#list .open").first.click()
        phone.locator("article.reply").first.wait_for()
        phone.fill("#text", "And who was with him?")
        phone.click("#send")
        phone.locator(".cost").wait_for()
        phone.wait_for_timeout(800)
        shots = [phone.screenshot()]
        phone.click("#memory-open")
        phone.locator(".strip").first.wait_for()
        phone.wait_for_timeout(1500)
        shots.append(phone.screenshot())
        write_side_by_side(shots, out / "page-phone.png")
        browser.close()


def open_page(browser: Any, url: str, viewport: Any) -> Any:
    """Open the page with the temperature 0, so that each recording has the same replies."""
    page = browser.new_page(viewport=viewport, color_scheme="light")
    page.add_init_script("localStorage.setItem('settings', '{\"temperature\": 0}')")
    page.add_init_script("localStorage.setItem('memory', 'open')")
    page.goto(url)
    return page


def record_frames(page: Any, out: Path) -> list[tuple[float, bytes]]:
    """Play the scene and return its frames, each with its time."""
    frames: list[tuple[float, bytes]] = []
    camera = page.context.new_cdp_session(page)

    def keep(frame: Any) -> None:
        frames.append((time.monotonic(), base64.b64decode(frame["data"])))
        camera.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

    camera.on("Page.screencastFrame", keep)
    camera.send("Page.startScreencast", {"format": "png"})
    began = time.monotonic()
    scene(page, out)
    while time.monotonic() < began + SCENE_SECONDS:
        page.wait_for_timeout(100)
    camera.send("Page.stopScreencast")
    frames = [each for each in frames if each[0] < began + SCENE_SECONDS]
    return [*frames, (began + SCENE_SECONDS, frames[-1][1])]


def scene(page: Any, out: Path) -> None:
    """Show chunks that return from the host, chunks that are evicted for them, a fork, and an explanation.

    The explanation is below a conversation's row of chunks and says what happened to them.
    """

    def say(text: str) -> None:
        num_replies = page.locator("article.reply").count()
        page.locator("#text").press_sequentially(text, delay=40)
        page.keyboard.press("Enter")
        page.locator("article.reply").nth(num_replies).locator(".cost").wait_for()
        page.wait_for_timeout(1500)

    page.wait_for_timeout(1000)
    open_named(page, "Ada and Ines")
    say("When do they take the train?")
    reply = page.locator("article.reply").last
    reply.get_by_role("button", name="New conversation from here").click()
    page.locator('#list .open[aria-current=true][title="Fork of Ada and Ines"]').wait_for()
    say("What does Ada like?")
    open_named(page, "The moon")
    say("Who walked on it first?")
    page.screenshot(path=out / "page-light.png")
    page.get_by_role("button", name="Paris, ").click()


def open_named(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()
    page.locator(f'#list .open[aria-current=true][title="{name}"]').wait_for()
    page.wait_for_timeout(500)


def write_gif(frames: Sequence[tuple[float, bytes]], path: Path) -> None:
    """Write all frames with one palette, so that unchanged parts of the picture take no space."""
    from PIL import Image

    kept: list[tuple[float, Any]] = []
    for at, data in frames:
        if kept and at - kept[-1][0] < FRAME_SECONDS and at != frames[-1][0]:
            continue
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        size = (GIF_WIDTH, round(picture.height * GIF_WIDTH / picture.width))
        kept.append((at, picture.resize(size, Image.Resampling.LANCZOS)))
    samples = kept[:: max(1, len(kept) // 8)]
    height = samples[0][1].height
    sheet = Image.new("RGB", (GIF_WIDTH, (len(samples) + 1) * height))
    for number, (_, picture) in enumerate(samples):
        sheet.paste(picture, (0, number * height))
    for number, colour in enumerate(PALETTE):
        wide = GIF_WIDTH // len(PALETTE)
        sheet.paste(
            colour, (number * wide, len(samples) * height, (number + 1) * wide, sheet.height)
        )
    palette = sheet.quantize(GIF_COLOURS)
    pictures = [each.quantize(palette=palette, dither=Image.Dither.NONE) for _, each in kept[:-1]]
    durations = [
        max(round((after - at) * 100) * 10, 20) for (at, _), (after, _) in itertools.pairwise(kept)
    ]
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=False
    )
    print(
        f"{path}: {len(pictures)} frames, {sum(durations) / 1000:.1f} s, {path.stat().st_size:,} bytes"
    )


def write_side_by_side(shots: Sequence[bytes], path: Path) -> None:
    """Write screenshots side by side."""
    from PIL import Image

    pictures = [Image.open(io.BytesIO(each)).convert("RGB") for each in shots]
    gap = 16
    width = sum(each.width for each in pictures) + gap * (len(pictures) - 1)
    sheet = Image.new("RGB", (width, pictures[0].height), "#8b97a8")
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number * (picture.width + gap), 0))
    sheet.save(path, optimize=True)


if __name__ == "__main__":
    main()
