"""Run many clients over a real model with too small caches, and compare each token with transformers.

    RestartedRuntime   several runs of a process with the same history. The engine and the service run in the
                       test's own thread; a seed decides the order of their steps.
    DaemonUnderTest    a `pensieve serve`. It or its engine can be killed, and its connections can be reset.
    RandomSdkClient    a client in its own thread: the SDK over gRPC
    RandomHttpClient   a client in its own thread: chat completions, responses or Anthropic's messages

If a fault ends a request, the client sends the request again, as a user would.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from pensieve import errors
from pensieve.client import Client, Retry
from pensieve.client.admin import Admin
from pensieve.engine.messages import CheckIntegrity
from tests.conversations.in_process import Runtime
from tests.conversations.proxy import Proxy
from tests.conversations.rig import Reference, figures, query, started
from tests.conversations.rig_daemon import ServeProcess, wait_for
from tests.newcomer import free_port

WORDS = ("Oslo", "rain", "Grüße", "日本")
LENGTHS = (2, 12, 40)
MESSAGES_MAX = 14
PATIENCE_SECONDS = 200.0
RETRIED_ERRORS = r"^(429|5\d\d) |^lost: "  # a fault may cause them
TOO_LONG = re.compile("context_length_exceeded|prompt is too long")
Counts = tuple[int, int, int]  # sampled tokens, wrong tokens, ties
T = TypeVar("T")


def assert_exact(counts: Iterable[Counts], at_least: int) -> None:
    found = list(counts)
    sampled, wrong, ties = (sum(column) for column in zip(*found, strict=True))
    print(f"{sampled} sampled tokens of {len(found)} conversations: {wrong} wrong, {ties} ties")
    assert sampled > at_least
    assert wrong == 0


class RestartedRuntime:
    """Several runs of a process with the same history."""

    def __init__(
        self, folder: Path, data: Path, settings: Mapping[str, str], depth: int = 1
    ) -> None:
        self.folder, self.data = folder, data
        self.total: Counter[str] = Counter()  # metrics of all runs
        self.largest: dict[str, float] = defaultdict(float)
        self._depth, self._settings = depth, settings

    def started(self) -> Runtime:
        return started(self.folder, self.data, **self._settings)

    @contextmanager
    def next_run(self) -> Iterator[Runtime]:
        with self.started() as runtime:
            runtime.engine.executor.depth = self._depth  # type: ignore[misc]
            yield runtime
            now = figures(runtime)
            assert query(runtime, CheckIntegrity(2)).problems == ()
            assert runtime.store.verify() == []
        for name, value in now.items():
            self.total[name] += int(value)
            self.largest[name] = max(self.largest[name], value)

    def assert_fired(self, *names: str) -> None:
        missing = [name for name in names if not self.total[name]]
        assert not missing, f"never happened: {missing}"

    def assert_exact(self, names: Sequence[str], at_least: int) -> None:
        reference = Reference(self.folder)
        with self.started() as runtime:
            assert_exact([reference.wrong_tokens(runtime, name) for name in names], at_least)


class DaemonUnderTest:
    """A daemon process. Clients connect to `address` and `http` through proxies, which can be reset."""

    def __init__(self, data: Path, folder: Path, *arguments: str, **settings: str) -> None:
        address, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.total: Counter[str] = Counter()
        self._process = ServeProcess(
            data,
            *(str(folder), *arguments, "--http", http, "--address", address),
            engine="model",
            parameters={"settings": settings},
        )
        self.admin = Admin(f"unix:{data / 'admin.sock'}", retry=Retry(retries=0))
        self._proxies = (Proxy(address), Proxy(http))
        self.address, self.http = (each.address for each in self._proxies)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.admin.close()
        for proxy in self._proxies:
            proxy.close()
        assert self._process.stop() == 0

    def add_metrics(self) -> None:
        """Add to `total` the metrics since the process or its engine started."""
        self.total.update({name: int(value) for name, value in self.admin.stats().more.items()})

    def inject(self, fault: str) -> None:
        if fault == "connection":
            for _ in range(3):
                for proxy in self._proxies:
                    proxy.reset()
                time.sleep(0.2)
            return
        self.add_metrics()
        if fault == "engine":
            pid = self._process.engine_pid()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: self._process.engine_pid() not in (None, pid))
        else:
            self._process.kill()
            self._process.start()


class RandomClient(threading.Thread):
    """A client that acts at random, in its own conversations."""

    def __init__(self, number: int, num_actions: int) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self.read: list[tuple[str, str]] = []  # conversation, whole text of a reply
        self.num_done = 0
        self.failure: BaseException | None = None
        self._num_actions, self._random = num_actions, random.Random(number)

    def run(self) -> None:
        try:
            while self.num_done < self._num_actions:
                self.act()
                self.num_done += 1
        except BaseException as error:
            self.failure = error

    def act(self) -> None:
        raise NotImplementedError

    def words(self) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(5))


def run_clients(
    clients: Sequence[RandomClient], inject_fault: Callable[[], None] | None = None
) -> Counter[str]:
    """Run all clients at once. `inject_fault` is called when about half of their actions are done."""
    half = sum(client._num_actions for client in clients) // 2
    for client in clients:
        client.start()
    if inject_fault is not None:
        wait_for(lambda: sum(client.num_done for client in clients) >= half)
        inject_fault()
    for client in clients:
        client.join(PATIENCE_SECONDS)
        assert not client.is_alive()
        if client.failure is not None:
            raise client.failure
    return sum((client.counts for client in clients), Counter())


class RandomSdkClient(RandomClient):
    """Sends, cancels, forks and rewinds."""

    def __init__(self, address: str, number: int, num_actions: int) -> None:
        super().__init__(number, num_actions)
        self._names = [f"g{number}"]
        retry = Retry(retries=200, first_seconds=0.05, most_seconds=0.3)
        self._client = Client(address, retry=retry)

    def run(self) -> None:
        with self._client:
            super().run()

    def act(self) -> None:
        name = self._random.choice(self._names)
        try:
            try:
                self._act_at_random(name)
            except errors.ContextFull:
                self._rewind(name, 0.0)
        except errors.Unavailable:  # the SDK does not retry a fork or a rewind
            self.counts["given up"] += 1

    def _act_at_random(self, name: str) -> None:
        choose, conversation = self._random, self._client.conversation(name)
        roll = choose.random()
        if roll < 0.7 or not self.counts["turns"] or not list(conversation.messages()):
            length = choose.choice((2, 20, 70))
            turn = conversation.send(self.words(), max_tokens=length, ignore_eos=True)
            disconnect_at = choose.randrange(length) if choose.random() < 0.25 else None
            for number, _ in enumerate(turn):
                if number == disconnect_at and turn.cancel():
                    self.counts["cancels"] += 1
            self.counts["turns"] += 1
            self.read.append((name, turn.reply.text))
        elif roll < 0.85:
            copy = f"{self._names[0]}-{len(self._names)}"
            try:
                conversation.fork(conversation_id=copy)
            except errors.AlreadyExists:  # this fork succeeded earlier, but its answer was lost
                if not self.counts["given up"]:
                    raise
            self._names.append(copy)
            self.counts["forks"] += 1
        else:
            self._rewind(name, choose.random())

    def _rewind(self, name: str, share: float) -> None:
        self.read = [each for each in self.read if each[0] != name]
        conversation = self._client.conversation(name)
        revisions = [0, *(message.revision for message in conversation.messages())]
        try:
            conversation.rewind(revisions[int(share * len(revisions))])
        except errors.NotFound:  # an earlier rewind, whose answer was lost, has just been done
            if not self.counts["given up"]:
                raise
            return
        self.counts["rewinds"] += 1


class LongReplyClient(RandomClient):
    """Get a long reply beside many such clients, to suspend turns. Then send a second message."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__(number, 2)
        self._address, self._name = address, f"rush-{number}"

    def act(self) -> None:
        with Client(self._address) as client:
            length = 4 if self.num_done else 80
            reply = client.conversation(self._name).ask("Oslo", max_tokens=length, ignore_eos=True)
            self.read.append((self._name, reply.text))


class Refused(Exception):
    """A response with an error."""


class RandomHttpClient(RandomClient):
    """Uses one API. Edits messages, asks for several replies, continues old responses, disconnects."""

    def __init__(
        self, addresses: Sequence[str], number: int, num_actions: int, retried_errors: str = "$^"
    ) -> None:
        """Each request goes to a random address. Errors that match `retried_errors` are retried."""
        super().__init__(number, num_actions)
        self._addresses, self._retried_errors = addresses, re.compile(retried_errors)
        self._address_choice = random.Random(-number)
        self._act = (self._create_chat, self._create_response, self._create_message)[number % 3]
        self._messages: list[dict[str, str]] = []
        self._responses: list[str] = []

    def act(self) -> None:
        try:
            self._act()
        except Refused as error:
            if not TOO_LONG.search(str(error)):
                raise
            self._messages.clear()
            self._responses.clear()

    def _create_chat(self) -> None:
        choose, sent = self._random, self._messages
        if len(sent) >= MESSAGES_MAX:
            sent.clear()
        if sent and choose.random() < 0.2:
            del sent[choose.randrange(0, len(sent), 2) :]
            self.counts["edited"] += 1
        sent.append({"role": "user", "content": self.words()})
        body = {"messages": sent, "max_tokens": choose.choice(LENGTHS), "temperature": 0}
        roll = choose.random()
        if roll < 0.4:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            disconnect_at = choose.randrange(8) if choose.random() < 0.4 else None
            name, reply = self._post("/v1/chat/completions", body, disconnect_at)
            if disconnect_at is not None:
                sent.pop()
                self.counts["disconnected"] += 1
                return
            self.counts["streamed"] += 1
        elif roll < 0.55:
            body["n"] = 2
            name, answer = self._post("/v1/chat/completions", body)
            replies = [each["message"]["content"] for each in answer["choices"]]
            assert replies[0] == replies[1], "greedy replies to the same messages differ"
            reply, name = choose.choice(replies), ""
            self.counts["branches"] += 1
        elif roll < 0.65:
            body["store"] = False
            _, answer = self._post("/v1/chat/completions", body)
            sent.pop()
            self.counts["unstored"] += 1
            assert answer["choices"][0]["message"]["content"]
            return
        else:
            name, answer = self._post("/v1/chat/completions", body)
            reply = answer["choices"][0]["message"]["content"]
        if name:
            self.read.append((name, reply))
        self.counts["appended"] += len(sent) > 1
        sent.append({"role": "assistant", "content": reply})

    def _create_response(self) -> None:
        choose, before = self._random, self._responses
        body: dict[str, Any] = {
            "input": self.words(),
            "max_output_tokens": choose.choice(LENGTHS),
            "temperature": 0,
        }
        if before and choose.random() < 0.8:
            is_earlier = choose.random() < 0.3
            body["previous_response_id"] = choose.choice(before) if is_earlier else before[-1]
            self.counts["earlier_response"] += is_earlier
        name, answer = self._post("/v1/responses", body)
        parts = [
            part["text"]
            for item in answer["output"]
            if item["type"] == "message"
            for part in item["content"]
        ]
        if name:
            self.read.append((name, "".join(parts)))
        before.append(answer["id"])
        self.counts["responses"] += 1

    def _create_message(self) -> None:
        choose, sent = self._random, self._messages
        if len(sent) >= MESSAGES_MAX:
            sent.clear()
        sent.append({"role": "user", "content": self.words()})
        body = {"messages": sent, "max_tokens": choose.choice(LENGTHS), "temperature": 0}
        name, answer = self._post("/v1/messages", body)
        reply = "".join(each["text"] for each in answer["content"] if each["type"] == "text")
        self.read.append((name, reply))
        if not reply:
            sent.clear()
            return
        sent.append({"role": "assistant", "content": reply})
        self.counts["anthropic"] += 1

    def _post(
        self, path: str, body: dict[str, Any], disconnect_at: int | None = None
    ) -> tuple[str, Any]:
        """Return the conversation and the response. A stream's response is the text up to the disconnect."""
        key, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self._post_once(path, body, disconnect_at, key)
            except (Refused, OSError, http.client.HTTPException) as error:
                text = str(error) if isinstance(error, Refused) else f"lost: {error!r}"
                if not self._retried_errors.search(text) or time.monotonic() > deadline:
                    raise
                self.counts["retried"] += 1
                time.sleep(0.1)

    def _post_once(
        self, path: str, body: dict[str, Any], disconnect_at: int | None, key: str
    ) -> tuple[str, Any]:
        address = self._address_choice.choice(self._addresses)
        sent = json.dumps({"model": "model", **body}).encode()
        with closing(http.client.HTTPConnection(address, timeout=PATIENCE_SECONDS)) as connection:
            connection.request("POST", path, sent, {"Idempotency-Key": key})
            with closing(connection.getresponse()) as response:
                if response.status != 200:
                    raise Refused(f"{response.status} {response.read().decode()}")
                name = response.headers["x-pensieve-conversation-id"] or ""
                if not body.get("stream"):
                    return name, json.loads(response.read())
                return name, _streamed_text(response, disconnect_at)


def _streamed_text(response: http.client.HTTPResponse, disconnect_at: int | None) -> str:
    text, number = "", 0
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]" or (data.startswith("{") and number == disconnect_at):
            return text
        if data.startswith("{"):
            chunk = json.loads(data)
            if "error" in chunk:
                raise Refused(f"500 {data}")
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
            number += 1
    raise Refused("lost: the stream ended early")
