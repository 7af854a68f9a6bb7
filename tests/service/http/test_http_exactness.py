"""M1 through HTTP: a real model, a real daemon process, clients as they are, tiers far too small.

Clients that send their whole history back, that go on from responses, and of Anthropic's API talk at once;
they edit what they sent, ask for several replies, go back to earlier responses, hang up in the middle of a
reply; the daemon is killed in between.  Every sampled token is the one that plain transformers says after the
same tokens (fp32, greedy), and what a client read is what is stored.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pensieve.client import Client, Retry
from pensieve.client.admin import Admin
from tests.newcomer import free_port
from tests.service.rig import Reference, write_model
from tests.service.rig_daemon import ServeProcess
from tests.service.test_wire_exactness import PARAMETERS, SETTINGS
from tests.text.families import QWEN_2_5

WORDS = ("Oslo", "rain", "Grüße", "日本")
TOO_LONG = re.compile("context_length_exceeded|prompt is too long")
MESSAGES_MAX = 14
FIRED = ("chunks_swapped_out", "chunks_swapped_in", "chunks_dropped", "tokens_computed_again")
DONE = (
    *("appended", "edited", "streamed", "left", "branches", "unstored"),
    *("responses", "earlier", "anthropic"),
)


class Refused(Exception):
    """An answer that is no reply."""


class Guest(threading.Thread):
    """One client after the other, in one kind of API."""

    def __init__(self, address: str, number: int, num_actions: int, *others: str) -> None:
        """Of daemons with one history, `address` and the `others`, each request goes to any."""
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self.read: list[tuple[str, str]] = []  # conversation, and a reply's whole text
        self.failure: BaseException | None = None
        self._addresses, self._num_actions = (address, *others), num_actions
        self._random, self._wandering = random.Random(number), random.Random(-number)
        self._act = (self._chat, self._respond, self._message)[number % 3]
        self._messages: list[dict[str, str]] = []
        self._responses: list[str] = []

    def run(self) -> None:
        try:
            for _ in range(self._num_actions):
                try:
                    self._act()
                except Refused as error:
                    if not TOO_LONG.search(str(error)):
                        raise
                    self._messages.clear()
                    self._responses.clear()
        except BaseException as error:
            self.failure = error

    def _words(self) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(5))

    def _chat(self) -> None:
        choose, sent = self._random, self._messages
        if len(sent) >= MESSAGES_MAX:
            sent.clear()
        if sent and choose.random() < 0.2:
            del sent[choose.randrange(0, len(sent), 2) :]
            self.counts["edited"] += 1
        sent.append({"role": "user", "content": self._words()})
        body: dict[str, Any] = {
            "messages": sent,
            "max_tokens": choose.choice((2, 12, 40)),
            "temperature": 0,
        }
        roll = choose.random()
        if roll < 0.4:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            leave_at = choose.randrange(8) if choose.random() < 0.4 else None
            name, reply = self._stream("/v1/chat/completions", body, leave_at)
            if leave_at is not None:
                sent.pop()
                self.counts["left"] += 1
                return
            self.counts["streamed"] += 1
        elif roll < 0.55:
            body["n"] = 2
            name, answer = self._ask("/v1/chat/completions", body)
            replies = [each["message"]["content"] for each in answer["choices"]]
            assert replies[0] == replies[1], "greedy replies to the same messages differ"
            reply, name = choose.choice(replies), ""
            self.counts["branches"] += 1
        elif roll < 0.65:
            body["store"] = False
            _, answer = self._ask("/v1/chat/completions", body)
            sent.pop()
            self.counts["unstored"] += 1
            assert answer["choices"][0]["message"]["content"]
            return
        else:
            name, answer = self._ask("/v1/chat/completions", body)
            reply = answer["choices"][0]["message"]["content"]
        if name:
            self.read.append((name, reply))
        self.counts["appended"] += len(sent) > 1
        sent.append({"role": "assistant", "content": reply})

    def _respond(self) -> None:
        choose, before = self._random, self._responses
        body: dict[str, Any] = {
            "input": self._words(),
            "max_output_tokens": choose.choice((2, 12, 40)),
            "temperature": 0,
        }
        if before and choose.random() < 0.8:
            is_earlier = choose.random() < 0.3
            body["previous_response_id"] = choose.choice(before) if is_earlier else before[-1]
            self.counts["earlier"] += is_earlier
        name, answer = self._ask("/v1/responses", body)
        text = "".join(
            part["text"]
            for item in answer["output"]
            if item["type"] == "message"
            for part in item["content"]
        )
        if name:
            self.read.append((name, text))
        before.append(answer["id"])
        self.counts["responses"] += 1

    def _message(self) -> None:
        choose, sent = self._random, self._messages
        if len(sent) >= MESSAGES_MAX:
            sent.clear()
        sent.append({"role": "user", "content": self._words()})
        body = {"messages": sent, "max_tokens": choose.choice((2, 12, 40)), "temperature": 0}
        name, answer = self._ask("/v1/messages", body)
        reply = "".join(each["text"] for each in answer["content"] if each["type"] == "text")
        self.read.append((name, reply))
        if not reply:
            sent.clear()
            return
        sent.append({"role": "assistant", "content": reply})
        self.counts["anthropic"] += 1

    @contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        address = self._wandering.choice(self._addresses)
        with closing(http.client.HTTPConnection(address, timeout=200)) as connection:
            connection.request("POST", path, json.dumps({"model": "model", **body}).encode())
            with closing(connection.getresponse()) as response:
                if response.status != 200:
                    raise Refused(f"{response.status} {response.read().decode()}")
                yield response

    def _ask(self, path: str, body: dict[str, Any]) -> tuple[str, Any]:
        with self._post(path, body) as response:
            return name_of(response), json.loads(response.read())

    def _stream(self, path: str, body: dict[str, Any], leave_at: int | None) -> tuple[str, str]:
        text = ""
        with self._post(path, body) as response:
            for number, chunk in enumerate(chunks_of(response)):
                if number == leave_at:
                    break
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
            return name_of(response), text


def name_of(response: http.client.HTTPResponse) -> str:
    return response.headers["x-pensieve-conversation-id"] or ""


def chunks_of(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data.startswith("{"):
            yield json.loads(data)
    raise Refused("the stream broke off")


@pytest.mark.timeout(600)
def test_every_reply_through_http_is_what_plain_transformers_would_have_said(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "model", QWEN_2_5, "llama-gqa")
    url = f"127.0.0.1:{free_port()}"
    process = ServeProcess(
        tmp_path / "data",
        str(folder),
        *SETTINGS,
        "--http",
        url,
        engine="model",
        parameters=PARAMETERS,
    )
    admin = Admin(f"unix:{tmp_path / 'data' / 'admin.sock'}", retry=Retry(retries=0))
    done: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    guests: list[Guest] = []
    for life in range(2):
        address = process.start()
        crowd = [Guest(url, life * 100 + number, 14) for number in range(12)]
        for guest in crowd:
            guest.start()
        for guest in crowd:
            guest.join(200)
            assert not guest.is_alive()
            if guest.failure is not None:
                raise guest.failure
            done.update(guest.counts)
        guests += crowd
        more = admin.stats().more
        fired.update({name: int(more[name]) for name in FIRED})
        assert admin.check() == []
        if life == 0:
            process.kill()
    assert not [name for name in FIRED if not fired[name]], fired
    assert not [name for name in DONE if done[name] < 4], done

    reference = Reference(folder)
    counts = []
    stored: dict[str, list[str]] = {}
    with Client(address) as client:
        for state in client.conversations():
            conversation = client.conversation(state.conversation_id)
            messages = list(conversation.messages(include_token_ids=True))
            counts.append(reference.wrong_of(messages))
            stored[state.conversation_id] = [each.text for each in messages]
    sampled, wrong, ties = (sum(column) for column in zip(*counts, strict=True))
    print(f"{sampled} sampled tokens of {len(counts)} conversations: {wrong} wrong, {ties} ties")
    assert sampled > 1000
    assert wrong == 0
    num_read = 0
    for guest in guests:
        for name, text in guest.read:
            if name in stored:
                assert text in stored[name]
                num_read += 1
    assert num_read > 50
    admin.close()
    assert process.stop() == 0
