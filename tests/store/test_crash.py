"""kill -9 at random moments: acknowledged turns are stored, and nothing is half written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from pensieve.store import ConversationStore, NewMessage, StoredTurnState
from tests.scale import SCALE
from tests.store.postgres_server import PostgresServer

NUM_KILLS = 15 * SCALE

# Each thread runs turns on four conversations, and between them forks, rewinds and deletions. It prints a
# line when a turn is durable. The process imports everything once, and forks a worker for each number read.
CHILD = """
import os, sys, threading
from pathlib import Path
from pensieve.store import ConversationStore
from tests.store.talk import begin, create, reply, say, user

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole or not at all

while True:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    worker = os.fork()
    if not worker:
        tell(os.getpid())
        break
    os.waitpid(worker, 0)
    tell("gone")
round_number = int(line)
store = ConversationStore.open(Path(sys.argv[1]), "pensieve test", url=sys.argv[2])

def talk(thread):
    names = [f"c{round_number}-{4 * thread + each}" for each in range(4)]
    fork = f"fork-{round_number}-{thread}"
    for name in names:
        create(store, name, user("head", 1))
    tell("ready")
    number = 0
    while True:
        name = names[number % 4]
        request_id = f"r{number}"
        turn_id = begin(store, name, request_id, f"question {number}", number, number)
        if number % 7 == 6:
            store.interrupt_turn(turn_id)
        else:
            store.finish_turn(turn_id, reply(f"answer {number}" * 300, *[number] * 50), "stop", {})
            tell(name, request_id, number)
        if number % 5 == 4:
            store.fork_conversation(name, store.get_conversation(name).revision, fork)
            store.rewind_conversation(fork, 0)
            store.delete_conversation(fork)
        number += 1

for thread in range(1, int(sys.argv[3])):
    threading.Thread(target=talk, args=(thread,), daemon=True).start()
talk(0)
"""


def run_and_kill_worker(
    forker: subprocess.Popen[str], number: int, num_turns: int, seconds: float
) -> list[tuple[str, str, int]]:
    """Kill a worker `seconds` after its `num_turns`-th turn. Return its acknowledged turns."""
    assert forker.stdin is not None
    assert forker.stdout is not None
    print(number, file=forker.stdin, flush=True)
    pid = int(forker.stdout.readline())
    lines: list[str] = []
    if number % 5:  # otherwise the worker is killed while it opens the store
        while len(lines) < 1 + num_turns:
            lines.append(forker.stdout.readline())
            assert lines[-1] not in ("gone\n", ""), "the worker ended by itself"
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    while (line := forker.stdout.readline()) != "gone\n":
        lines.append(line)
    turns = [line.split() for line in lines if line != "ready\n"]
    return [(name, request_id, int(number)) for name, request_id, number in turns]


def test_no_acknowledged_turn_is_lost_or_half_written(tmp_path: Path) -> None:
    kill_workers(tmp_path)


def test_no_acknowledged_turn_is_lost_if_calls_share_a_commit(tmp_path: Path) -> None:
    kill_workers(tmp_path, num_threads=16)


def test_no_acknowledged_turn_is_lost_or_half_written_in_postgresql(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    kill_workers(tmp_path, postgres.new_database())


def kill_workers(tmp_path: Path, url: str = "", num_threads: int = 1) -> None:
    seed = 20
    rng = random.Random(seed)
    acknowledged: list[tuple[str, str, int]] = []
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), url, str(num_threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forker:
        for kill in range(NUM_KILLS):
            num_lines = rng.randrange(12) + (num_threads - 1) * rng.randrange(8)
            acknowledged += run_and_kill_worker(forker, kill, num_lines, rng.uniform(0.0, 0.01))
            with ConversationStore.open(tmp_path, "pensieve test", url=url) as store:
                assert store.integrity_check_due or kill % 5 == 0 or url
                assert store.integrity_check() == []
                assert store.verify() == []
                assert len(store.interrupted_at_open) <= num_threads
    assert len(acknowledged) > 2 * NUM_KILLS
    with ConversationStore.open(tmp_path, "pensieve test", url=url) as store:
        assert not store.integrity_check_due
        check(store, acknowledged, seed)


def check(store: ConversationStore, acknowledged: list[tuple[str, str, int]], seed: int) -> None:
    """Check that the acknowledged turns are complete, and that the history verifies."""
    for name, request_id, number in acknowledged:
        turn = store.find_turn(name, request_id)
        assert turn is not None, (seed, name, request_id)
        assert turn.state is StoredTurnState.COMPLETED
        prompt, reply = store.turn_messages(turn.turn_id)
        assert [list(message.token_ids) for message in prompt] == [[number, number]]
        assert isinstance(reply, NewMessage)
        assert (reply.content, list(reply.token_ids)) == (
            f"answer {number}" * 300,
            [number] * 50,
        )
    for name in {name for name, _, _ in acknowledged}:
        log = list(store.log(name))
        assert log[0] == 1
        assert len(log) % 52 == 1  # only whole turns
        numbers = log[1::52]
        assert log[1:] == [number for number in numbers for _ in range(52)]
        assert set(numbers) >= {n for other, _, n in acknowledged if other == name}
