"""M1 over the wire: a real model, a real daemon process, the real SDK, tiers far too small.

Clients talk at once, cancel, fork and rewind; the engine and the daemon are killed in between.  Every
sampled token is the one that plain transformers says after the same tokens (fp32, greedy).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from pensieve import errors
from pensieve.client import Client, Retry
from pensieve.client.admin import Admin
from tests.service.rig import Reference, write_model
from tests.service.rig_daemon import ServeProcess, wait_for
from tests.text.families import QWEN_2_5

SETTINGS = (
    *("--device-cache", "480t", "--host-cache", "480t"),
    *("--token-budget", "48", "--turns-max", "12", "--threads", "1"),
)
PARAMETERS = {"settings": {"chunk_tokens": "8"}}
FIRED = (
    *("chunks_swapped_out", "chunks_reclaimed", "chunks_swapped_in", "chunks_dropped"),
    *("suspensions", "resumptions", "tokens_computed_again", "turns_cancelled"),
)


class Guest(threading.Thread):
    """Does in its own conversations whatever clients do."""

    def __init__(self, address: str, number: int, num_actions: int) -> None:
        super().__init__(daemon=True)
        self.names = [f"g{number}"]
        self.counts = dict.fromkeys(("turns", "cancels", "forks", "rewinds"), 0)
        self.failure: BaseException | None = None
        self._address = address
        self._num_actions = num_actions
        self._random = random.Random(number)

    def run(self) -> None:
        try:
            retry = Retry(retries=200, first_seconds=0.05, most_seconds=0.3)
            with Client(self._address, retry=retry) as client:
                client.conversation(self.names[0]).create()
                for _ in range(self._num_actions):
                    self.act(client)
        except BaseException as error:
            self.failure = error

    def act(self, client: Client) -> None:
        choose = self._random
        conversation = client.conversation(choose.choice(self.names))
        roll = choose.random()
        try:
            if roll < 0.7 or not list(conversation.messages()):
                words = " ".join(choose.choice(("Oslo", "rain", "Grüße", "日本")) for _ in range(5))
                length = choose.choice((2, 20, 70))
                turn = conversation.send(words, max_tokens=length, ignore_eos=True)
                leave_at = choose.randrange(length) if choose.random() < 0.25 else None
                for number, _ in enumerate(turn):
                    if number == leave_at and turn.cancel():
                        self.counts["cancels"] += 1
                self.counts["turns"] += 1
            elif roll < 0.85:
                name = f"{self.names[0]}-{len(self.names)}"
                conversation.fork(conversation_id=name)
                self.names.append(name)
                self.counts["forks"] += 1
            else:
                revisions = [0, *(message.revision for message in conversation.messages())]
                conversation.rewind(choose.choice(revisions))
                self.counts["rewinds"] += 1
        except errors.ContextFull:
            conversation.rewind(0)
        except errors.Unavailable:  # a fork or a rewind is not tried again by itself
            return


def rush(address: str, name: str) -> None:
    """So many long replies at once that some are suspended; then each conversation goes on."""

    def talk(number: int) -> None:
        with Client(address) as client:
            conversation = client.conversation(f"{name}-{number}")
            for length in (80, 4):
                conversation.ask("Oslo", max_tokens=length, ignore_eos=True)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.timeout(600)
def test_every_reply_over_the_wire_is_what_plain_transformers_would_have_said(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "model", QWEN_2_5, "llama-gqa")
    process = ServeProcess(
        tmp_path / "data", str(folder), *SETTINGS, engine="model", parameters=PARAMETERS
    )
    address = process.start()
    process.arguments = (*process.arguments, "--address", address)
    admin = Admin(f"unix:{tmp_path / 'data' / 'admin.sock'}", retry=Retry(retries=0))
    total: dict[str, float] = {}
    guests: list[Guest] = []
    for life in range(2):
        crowd = [Guest(address, life * 100 + number, 12) for number in range(12)]
        for guest in crowd:
            guest.start()
        for guest in crowd:
            guest.join(200)
            assert not guest.is_alive()
            assert guest.failure is None, guest.failure
        rush(address, f"rush{life}")
        guests += crowd
        more = admin.stats().more
        total = {name: total.get(name, 0) + value for name, value in more.items()}
        assert more["tokens_idle"] == 0
        assert admin.check() == []
        pid = process.engine_pid()
        assert pid is not None
        if life == 0:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda before=pid: process.engine_pid() not in (None, before))
            process.kill()
            process.start(120)
    assert not [name for name in FIRED if not total[name]], total
    for name in ("turns", "cancels", "forks", "rewinds"):
        assert sum(guest.counts[name] for guest in guests) > 5, name

    reference = Reference(folder)
    counts = []
    with Client(address) as client:
        rushed = [f"rush{life}-{number}" for life in range(2) for number in range(12)]
        for names in (rushed, *(guest.names for guest in guests)):
            for name in names:
                try:
                    messages = list(client.conversation(name).messages(include_token_ids=True))
                except errors.NotFound:
                    continue
                counts.append(reference.wrong_of(messages))
    sampled, wrong, ties = (sum(column) for column in zip(*counts, strict=True))
    print(f"{sampled} sampled tokens of {len(counts)} conversations: {wrong} wrong, {ties} ties")
    assert sampled > 1000
    assert wrong == 0
    admin.close()
    assert process.stop() == 0
