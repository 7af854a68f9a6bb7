"""Under load through the SDK, kill the daemon and its engine at random moments, and fill the disk.

Every acknowledged turn must be in the history once, in order, as it was delivered. Every other turn is there
once (the SDK retried it), or not at all. Every sampled token must follow from the history before it.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import threading
import time
from array import array
from pathlib import Path

import pytest

from pensieve import errors
from pensieve.builtin import MODEL_PATH
from pensieve.client import Client, Conversation, Message, Reply, Restarted, Retry, Turn
from pensieve.client.admin import Admin
from pensieve.launch.echo_engine import digest, next_token
from pensieve.text import Tokenizer
from tests.conversations.rig_daemon import ServeProcess, wait_for
from tests.scale import SCALE, SEED

TOKENIZER = Tokenizer.load(MODEL_PATH)
NUM_TALKERS = 16
DAEMON_KILLS = 5 * SCALE
ENGINE_KILLS = 11 * SCALE
FULL_DISKS = 4 * SCALE


def wrong_tokens(messages: list[Message]) -> int:
    """Return the number of sampled tokens that do not follow, by the echo engine's rule, from the log."""
    log, wrong = array("I"), 0
    for message in messages:
        assert message.first_token == len(log)
        for token_id in message.token_ids:
            if message.finish_reason:
                wrong += token_id != next_token(digest(log), TOKENIZER.vocab_size, 2)
            log.append(token_id)
    return wrong


class Talker(threading.Thread):
    """A client that sends messages one after another in its own conversation, and keeps the replies."""

    def __init__(self, address: str, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.conversation_id = f"talk-{number}"
        self.acknowledged: list[tuple[str, str, Reply]] = []  # request id, message, reply
        self.num_restarts = 0
        self.num_suspected = 0
        self.failure: BaseException | None = None
        self._address = address
        self._random = random.Random(number)
        self._must_stop = stop

    def run(self) -> None:
        try:
            retry = Retry(retries=1000, first_seconds=0.02, most_seconds=0.2)
            with Client(self._address, retry=retry) as client:
                conversation = client.conversation(self.conversation_id)
                while not self._must_stop.is_set():
                    said = f"word {self._random.randrange(10**6)}"
                    max_tokens = self._random.choice((5, 30, 90))
                    turn = self._send(conversation, said, max_tokens)
                    self.acknowledged.append((turn.request_id, said, turn.reply))
        except BaseException as error:
            self.failure = error

    def _send(self, conversation: Conversation, said: str, max_tokens: int) -> Turn:
        request_id = f"{self.conversation_id}-{len(self.acknowledged)}"
        while True:
            turn = conversation.send(
                said, request_id=request_id, max_tokens=max_tokens, ignore_eos=True
            )
            try:
                self.num_restarts += sum(isinstance(event, Restarted) for event in turn)
                return turn
            except errors.TurnFailed as failure:
                if failure.reason != "ENGINE_DIED":
                    raise
                self.num_suspected += 1  # this turn only happened to run at three engine deaths


def fill_disk(process: ServeProcess, choose: random.Random) -> None:
    """Let no file of the daemon grow for a moment. Sometimes, kill the daemon in that state."""
    assert process.process is not None
    pid, free = process.process.pid, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    time.sleep(choose.uniform(0.2, 0.8))
    if choose.random() < 0.25:
        process.kill()
        process.start()
    else:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, free)


@pytest.mark.timeout(600 * SCALE)
def test_no_acknowledged_turn_is_lost_or_half_written(tmp_path: Path) -> None:
    choose = random.Random(5 + SEED)
    process = ServeProcess(
        tmp_path / "data",
        engine="echo:0.002",
        parameters={"config": {"heartbeat_seconds": 2.0}},
    )
    address = process.start()
    process.arguments = (*process.arguments, "--address", address)
    stop = threading.Event()
    talkers = [Talker(address, number, stop) for number in range(NUM_TALKERS)]
    for talker in talkers:
        talker.start()
    plan = ["daemon"] * DAEMON_KILLS + ["engine"] * ENGINE_KILLS + ["disk"] * FULL_DISKS
    choose.shuffle(plan)
    ready_seconds: list[float] = []
    admin = Admin(f"unix:{tmp_path / 'data' / 'admin.sock'}", retry=Retry(retries=0))

    def serving() -> bool:
        try:
            return admin.stats().serving
        except errors.PensieveError:
            return False

    def num_acknowledged() -> int:
        return sum(len(talker.acknowledged) for talker in talkers)

    killed = {"daemon": 0, "engine": 0, "disk": 0}
    for victim in plan:
        if choose.random() < 0.75:  # else the next fault may come before any new reply
            floor = num_acknowledged() + 2
            wait_for(lambda floor=floor: num_acknowledged() >= floor)
        time.sleep(choose.uniform(0.05, 0.5))
        if victim == "daemon":
            process.kill()
            killed[victim] += 1
            began = time.monotonic()
            process.start()
            ready_seconds.append(time.monotonic() - began)
        elif victim == "disk":
            fill_disk(process, choose)
            killed[victim] += 1
        else:
            pid = process.engine_pid()
            if pid is not None:  # a stopped engine has no heartbeat, so the daemon kills it
                os.kill(pid, choose.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))
                killed[victim] += 1
        wait_for(serving)
    stop.set()
    for talker in talkers:
        talker.join(120)
        assert not talker.is_alive()
        assert talker.failure is None, talker.failure
    assert sum(killed.values()) >= 15 * SCALE, killed
    print(
        f"killed {killed}; {num_acknowledged()} turns acknowledged, "
        f"{sum(t.num_restarts for t in talkers)} restarted, "
        f"{sum(t.num_suspected for t in talkers)} suspected of killing the engine; "
        f"ready again after at most {max(ready_seconds):.2f} s"
    )
    assert num_acknowledged() > 3 * NUM_TALKERS
    assert admin.check() == []
    with Client(address) as client:
        for talker in talkers:
            conversation = client.conversation(talker.conversation_id)
            messages = list(conversation.messages(include_token_ids=True))
            assert wrong_tokens(messages) == 0
            pairs = [
                (said.text, reply.text, reply.token_ids, reply.revision)
                for said, reply in zip(messages[::2], messages[1::2], strict=True)
            ]
            assert pairs == [
                (said, reply.text, reply.token_ids, reply.revision)
                for _, said, reply in talker.acknowledged
            ]
            request_id, said, reply = choose.choice(talker.acknowledged)
            length = len(reply.token_ids)
            again = conversation.ask(
                said, request_id=request_id, max_tokens=length, ignore_eos=True
            )
            assert again.replayed
            assert (again.text, again.token_ids) == (reply.text, reply.token_ids)
    admin.close()
    assert process.stop() == 0


@pytest.mark.executed
def test_after_an_unclean_stop_the_history_is_checked_while_the_daemon_serves(
    tmp_path: Path,
) -> None:
    """A check finds a damaged page that nothing has read yet. From then on, the daemon writes nothing."""
    process = ServeProcess(tmp_path / "data")
    with Client(process.start()) as client:
        client.conversation("c").ask("hello", max_tokens=4)
    process.kill()
    with Client(process.start()) as client:
        wait_for(lambda: "the history is not damaged" in process.log.read_text())
        client.conversation("c").ask("go on", max_tokens=4)
    process.kill()
    _damage(process.data / "conversations.db", "turns_body")
    with Client(process.start(), retry=Retry(retries=0)) as client:
        wait_for(lambda: "the history is damaged" in process.log.read_text())
        assert len(list(client.conversation("c").messages())) == 4
        with pytest.raises(errors.StoreCorrupt):
            client.conversation("c").ask("and now", max_tokens=4)
    assert process.stop() == 0


def _damage(database: Path, index: str) -> None:
    connection = sqlite3.connect(database)
    (page,) = connection.execute(
        "SELECT rootpage FROM sqlite_schema WHERE name = ?", (index,)
    ).fetchone()
    connection.close()  # this empties the write-ahead log
    content = bytearray(database.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    database.write_bytes(content)
