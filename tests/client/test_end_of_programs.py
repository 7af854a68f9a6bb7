"""A program that ends during a turn, without closing its client, stops that turn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from pensieve.client import Client
from pensieve.conversations.daemon_config import DaemonConfig
from tests.conversations.rig_daemon import ECHO, DaemonRig

NUM_PIECES = 4
READ = f"""
import atexit, itertools, sys, threading
from pensieve.client import Client, connection

connection.END_SECONDS = 50.0  # a busy machine may answer late
client, pieces = Client(sys.argv[1]), []
turn = client.conversation(sys.argv[2]).send("hello", max_tokens=90_000, ignore_eos=True)

def say_tokens():
    print(sum(len(piece.token_ids) for piece in pieces))

atexit.register(say_tokens)

def read_some():
    pieces.extend(itertools.islice(turn, {NUM_PIECES}))
"""
ENDS = {
    "drops the turn": "read_some(); del turn",
    "drops the turn and the client": "read_some(); del turn, client",
    "keeps the turn": "read_some()",
    "calls sys.exit": "read_some(); sys.exit(0)",
    "fails": "read_some(); raise KeyError",
    "can start no thread any more": """
import _thread

def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 does

atexit.register(setattr, _thread, "start_new_thread", refuse)
read_some()
""",
    "has a thread that reads": f"""
def read():
    for piece in turn:
        pieces.append(piece)
        if len(pieces) == {NUM_PIECES}:
            enough.set()
        if len(pieces) >= {NUM_PIECES}:
            threading.Event().wait()  # for ever

enough = threading.Event()
threading.Thread(target=read, daemon=True).start()
enough.wait()
""",
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    config = DaemonConfig(grace_seconds=3600)
    data = tmp_path_factory.mktemp("ends") / "data"
    with DaemonRig(data, config=config, program=(*ECHO, "--seconds=0.005")) as rig:
        yield rig


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_during_a_turn_ends_the_turn(rig: DaemonRig, end: str) -> None:
    name = end.replace(" ", "-")
    ended = run(READ + ENDS[end], rig.server.address, name)
    assert ended.returncode == (end == "fails"), ended.stderr
    assert ended.stderr == "" or end == "fails"
    with Client(rig.server.address) as client:
        talk = client.conversation(name)
        assert talk.ask("again", max_tokens=2).revision == 2
        messages = list(talk.messages(include_token_ids=True))
    assert [message.finish_reason for message in messages][1] == "cancelled"
    assert len(messages[1].token_ids) == int(ended.stdout)
