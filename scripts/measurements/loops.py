"""Count how many replies loop in 200 short conversations (talks.txt) with one `pensieve serve`.

Each conversation (a talk) runs through each API: the SDK over gRPC, OpenAI chat, and the page's
calls. Many talks run concurrently. A reply counts as a loop if its finish reason says so, if it ends with a
piece of text that is repeated at least four times, or if it has a sentence of four words at least four times.

--sampling names what is compared: `default` sends no sampling values, `greedy` sends temperature 0, and
comma-separated NAME=VALUE pairs send these values.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.bench.bench_daemon import BenchDaemon, serving
from pensieve.client import AsyncClient

TALKS = Path(__file__).with_name("talks.txt")
CLIENTS = 48  # concurrent talks
REPEATS = 4  # a piece of text that is repeated so often is a loop
UNIT_CHARACTERS_MAX = 400  # longest piece of text
TAIL_CHARACTERS = 120  # the repeated pieces must fill at least so much of a reply's end
SENTENCE_WORDS = 4
NAMED_SAMPLINGS: dict[str, dict[str, float]] = {"default": {}, "greedy": {"temperature": 0.0}}


class Reply(NamedTuple):
    text: str
    finish_reason: str

    @property
    def loops(self) -> bool:
        return "repetition" in self.finish_reason.lower() or repeats(self.text)


Sampling = Mapping[str, float]
Api = Callable[[Sequence[str], Sampling], Awaitable[list[Reply]]]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure loops", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as for serve (default: smollm2)")
    parser.add_argument(
        "--talks", type=int, default=200, help="number of conversations (default: 200)"
    )
    parser.add_argument(
        "--tokens", type=int, default=512, help="maximum tokens of each reply (default: 512)"
    )
    parser.add_argument(
        "--apis", default="sdk,http,page", help="APIs to measure (default: sdk,http,page)"
    )
    parser.add_argument(
        "--sampling",
        nargs="+",
        type=sampling_of,
        default=[sampling_of("greedy"), sampling_of("default")],
        metavar="NAME",
        help="default, greedy, or NAME=VALUE,… (default: greedy default)",
    )
    parser.add_argument("--texts", type=Path, help="a file for all replies, as JSON lines")
    parser.add_argument("--serve", nargs="*", default=(), metavar="FLAG=VALUE", help="for serve")
    arguments = parser.parse_args(given)
    talks = [line.split(" | ") for line in TALKS.read_text(encoding="utf-8").splitlines()]
    with socket.create_server(("127.0.0.1", 0)) as free:
        http = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [arguments.model, "--http", http, *(f"--{each}" for each in arguments.serve)]
    with serving(flags) as daemon:
        for name, sampling in arguments.sampling:
            values = {**sampling, "max_tokens": arguments.tokens}
            for api in arguments.apis.split(","):
                began = time.monotonic()
                found = asyncio.run(
                    replies_of_talks(daemon, http, api, talks[: arguments.talks], values)
                )
                print(summary(api, name, found, time.monotonic() - began), flush=True)
                if arguments.texts is not None:
                    _write(arguments.texts, api, name, found)


def sampling_of(text: str) -> tuple[str, dict[str, float]]:
    """Parse a value of --sampling into its name and what is sent."""
    if text in NAMED_SAMPLINGS:
        return text, NAMED_SAMPLINGS[text]
    pairs = [each.partition("=") for each in text.split(",")]
    return text, {name: json.loads(value) for name, _, value in pairs}


def summary(api: str, name: str, talks: Sequence[Sequence[Reply]], seconds: float) -> str:
    replies = [each for talk in talks for each in talk]
    reasons = Counter(each.finish_reason for each in replies)
    words = sum(len(each.text.split()) for each in replies) / len(replies)
    return (
        f"{api:<5} {name}: {sum(any(each.loops for each in talk) for talk in talks)} of {len(talks)} talks "
        f"loop; {words:.0f} words a reply; "
        f"{', '.join(f'{number} {reason}' for reason, number in sorted(reasons.items()))}; {seconds:.0f} s"
    )


def repeats(text: str) -> bool:
    """Return whether the end of a text, or one of its sentences, is repeated so often that it is a loop."""
    tail = text[-REPEATS * UNIT_CHARACTERS_MAX :].rstrip()
    for period in range(1, UNIT_CHARACTERS_MAX + 1):
        size = max(REPEATS * period, TAIL_CHARACTERS)
        end = tail[-size:]
        if len(end) == size and end[period:] == end[:-period]:
            return True
    sentences = [" ".join(each.split()) for each in re.split(r"[.!?\n]", text.lower())]
    counted = Counter(each for each in sentences if len(each.split()) >= SENTENCE_WORDS)
    return any(number >= REPEATS for number in counted.values())


async def replies_of_talks(
    daemon: BenchDaemon,
    http: str,
    api: str,
    talks: Sequence[Sequence[str]],
    sampling: Sampling,
) -> list[list[Reply]]:
    """Return the replies of each talk; CLIENTS talks run concurrently."""
    free = asyncio.Semaphore(CLIENTS)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(CLIENTS))
    async with AsyncClient(daemon.address, timeout=None) as client:
        model = (await client.server_info()).model
        apis: dict[str, Api] = {
            "sdk": functools.partial(sdk_replies, client),
            "http": functools.partial(http_replies, f"http://{http}", model),
            "page": functools.partial(page_replies, f"http://{http}"),
        }

        async def replies_of_talk(messages: Sequence[str]) -> list[Reply]:
            async with free:
                return await apis[api](messages, sampling)

        return list(await asyncio.gather(*map(replies_of_talk, talks)))


async def sdk_replies(
    client: AsyncClient, messages: Sequence[str], sampling: Sampling
) -> list[Reply]:
    conversation = client.conversation()
    options: dict[str, Any] = dict(sampling)
    replies = [await conversation.ask(each, **options) for each in messages]
    return [Reply(each.text, each.finish_reason) for each in replies]


async def http_replies(
    server: str, model: str, messages: Sequence[str], sampling: Sampling
) -> list[Reply]:
    history: list[dict[str, str]] = []
    replies = []
    for message in messages:
        history.append({"role": "user", "content": message})
        body = {"model": model, "messages": history, **sampling}
        answer = json.loads(await _post(f"{server}/v1/chat/completions", body))
        choice = answer["choices"][0]
        reply = Reply(
            choice["message"]["content"] or "", choice.get("stop_reason") or choice["finish_reason"]
        )
        history.append({"role": "assistant", "content": reply.text})
        replies.append(reply)
    return replies


async def page_replies(server: str, messages: Sequence[str], sampling: Sampling) -> list[Reply]:
    service = f"{server}/pensieve.v1.ConversationService"
    created = json.loads(await _post(f"{service}/CreateConversation", {}))
    name = created["conversation"]["conversation_id"]
    replies = []
    for message in messages:
        body = {
            "conversation_id": name,
            "messages": [{"content": message}],
            "sampling": dict(sampling),
        }
        lines = (await _post(f"{service}/SendMessage", body)).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        text = "".join(each["delta"].get("text", "") for each in events if "delta" in each)
        replies.append(Reply(text, events[-1]["completed"]["finish_reason"]))
    return replies


async def _post(address: str, body: Mapping[str, Any]) -> str:
    def send() -> str:
        request = urllib.request.Request(
            address, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(send)


def _write(path: Path, api: str, name: str, talks: Sequence[Sequence[Reply]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for number, talk in enumerate(talks):
            for turn, reply in enumerate(talk):
                line = {
                    "api": api,
                    "sampling": name,
                    "talk": number,
                    "turn": turn,
                    "loops": reply.loops,
                    **reply._asdict(),
                }
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
