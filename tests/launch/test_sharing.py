"""Two daemons as processes, started with `pensieve serve`, on one SQLite file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.client import Client, Reply, Retry
from pensieve.errors import PensieveError
from pensieve.store import ConversationStore
from pensieve.store.connection import preferred_driver
from pensieve.store.owners import LEASE_SECONDS
from pensieve.store.shared_file import SHARED_SQLITE_MIN
from pensieve.text import Tokenizer
from tests.cluster.checker import wrong_tokens
from tests.cluster.world import Part
from tests.newcomer import free_port

pytestmark = pytest.mark.skipif(
    preferred_driver.sqlite_version_info < SHARED_SQLITE_MIN, reason="needs another SQLite"
)
NO_RETRY = Retry(retries=0)


class Two:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "history.db"
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in "ab"]
        variables = {"PENSIEVE_ENGINE": "echo:0.01"}
        self.parts = [
            Part(
                name,
                folder,
                [
                    *("serve", "--data", str(folder / name), "--address", address),
                    *("--store", f"sqlite://{self.path}", "--replica", name),
                ],
                variables,
            )
            for name, address in zip("ab", self.addresses, strict=True)
        ]

    @contextmanager
    def client(self, number: int) -> Iterator[Client]:
        with Client(self.addresses[number], retry=NO_RETRY) as client:
            yield client

    def ask(self, number: int, name: str, text: str, **options: Any) -> Reply:
        with self.client(number) as client:
            return client.conversation(name).ask(text, **options)

    def ask_until_served(self, number: int, name: str, text: str, **options: Any) -> None:
        """Ask until the daemon has the conversation, which the other daemon's lease delays."""
        end = time.monotonic() + 6 * LEASE_SECONDS
        while True:
            try:
                self.ask(number, name, text, **options)
            except PensieveError:
                assert time.monotonic() < end
                time.sleep(0.1)
            else:
                return


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[Two]:
    found = Two(folder)
    try:
        for part in found.parts:
            await part.start(waits=False)
        for part in found.parts:
            await part.wait_until_ready()
        yield found
    finally:
        for part in found.parts:
            if part.is_running:
                part.go_on()
                await part.kill()


def test_a_conversation_continues_at_the_other_daemon_with_the_same_tokens(tmp_path: Path) -> None:
    asyncio.run(_talk(tmp_path))


async def _talk(tmp_path: Path) -> None:
    async with two(tmp_path) as both:
        a, b = both.parts
        limit = {"max_tokens": 40}
        both.ask(0, "tea", "Begun at A.", **limit)
        both.ask(1, "tea", "Sent to B, and answered by A.", **limit)
        both.ask(1, "cup", "Is B's.", **limit)
        await a.kill()
        both.ask_until_served(1, "tea", "Gone on with at B.", **limit)
        await a.start()
        both.ask(0, "tea", "Sent to A, and answered by B.", **limit)
        b.pause_between_writes(both.path)  # until its lease has expired
        both.ask_until_served(0, "cup", "Is A's now.", **limit)
        b.go_on()
        both.ask(1, "cup", "Sent to B, and answered by A.", **limit)
        assert [await each.terminate() for each in both.parts] == [0, 0]
        vocab_size = Tokenizer.load(MODEL_PATH).vocab_size
        url = f"sqlite://{both.path}"
        with ConversationStore.open(tmp_path / "last", "a test", url=url) as store:
            assert not store.integrity_check_due
            for name, num_messages in (("tea", 8), ("cup", 6)):
                messages = store.messages(name, include_token_ids=True)
                assert len(messages) == num_messages
                replies = [(m.role == "assistant", m.token_ids or ()) for m in messages]
                assert wrong_tokens(name, replies, vocab_size) == []
            assert store.verify() == []
