"""The server is killed, damaged, filled and replaced by its standby. No acknowledged turn may be lost."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pensieve.errors import StoreCorrupt, StoreUnavailable
from pensieve.store import ConversationStore, NewMessage
from tests.scale import SCALE
from tests.store import postgres_server
from tests.store.postgres_server import PostgresServer
from tests.store.talk import begin, create, reply, say, user
from tests.store.test_crash import check

NUM_KILLS = 3 * SCALE
SECONDS_MAX = 60.0  # from a restart of the server to the next turn; usually one or two seconds

# Runs turns on four conversations, and retries failed writes as the service does.
CHILD = """
import os, sys, time
from pathlib import Path
from pensieve.errors import StoreUnavailable
from pensieve.store import ConversationStore, NewTurn
from tests.store.talk import create, reply, user

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def retry(act):
    while True:
        try:
            return act()
        except StoreUnavailable:
            time.sleep(0.01)

store = retry(lambda: ConversationStore.open(Path(sys.argv[1]), "pensieve test", url=sys.argv[2]))
names = [f"c{number}" for number in range(4)]
for name in names:
    create(store, name, user("head", 1))
number = 0
while True:
    name, request_id = names[number % 4], f"r{number}"
    question = NewTurn(request_id, [user(f"question {number}", number, number)])
    begun = retry(lambda: store.begin_turn(name, question))
    answer = reply(f"answer {number}" * 300, *[number] * 50)

    def finish():
        turn_id = retry(lambda: store.begin_turn(name, question)).turn.turn_id
        return store.finish_turn(turn_id, answer, "stop", {})

    retry(finish)
    tell(name, request_id, number)
    number += 1
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PostgresServer]:
    """A server for one test. It syncs acknowledged data to the disk."""
    if problem := postgres_server.missing():
        pytest.skip(problem)
    made = PostgresServer()
    try:
        made.initialise()
        made.start()
        yield made
    finally:
        made.close()


class Talker:
    """A process that runs turns. `acknowledged` lists the turns that it reported."""

    def __init__(self, path: Path, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), url], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""
        self.acknowledged: list[tuple[str, str, int]] = []

    def num_acknowledged(self) -> int:
        """Return how many turns were acknowledged so far."""
        assert self._process.poll() is None, "the process ended by itself"
        self._read()
        return len(self.acknowledged)

    def wait_for(self, number: int) -> None:
        end = time.monotonic() + SECONDS_MAX
        while self.num_acknowledged() < number:
            assert time.monotonic() < end, "no more turns were acknowledged"
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill the process. A second call does nothing."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            self._read()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while data := self._process.stdout.read():
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                name, request_id, number = line.decode().split()
                self.acknowledged.append((name, request_id, int(number)))


def test_a_killed_server_loses_no_acknowledged_turn(tmp_path: Path, server: PostgresServer) -> None:
    seed = 21
    rng, url = random.Random(seed), server.new_database()
    talker = Talker(tmp_path / "data", url)
    try:
        talker.wait_for(1)
        for number in range(NUM_KILLS):
            talker.wait_for(talker.num_acknowledged() + rng.randrange(1, 12))
            time.sleep(rng.uniform(0.0, 0.02))
            server.kill(postmaster_only=number % 2 == 0)
            server.start()
        talker.wait_for(talker.num_acknowledged() + 3)
    finally:
        talker.kill()
    with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
        assert store.verify() == store.integrity_check() == []
        assert len(store.interrupted_at_open) <= 1
        check(store, talker.acknowledged, seed)


def long_question(number: int) -> NewMessage:
    return user(random.Random(number).randbytes(100_000).hex(), 1)


def test_a_full_disk_refuses_the_turn_and_keeps_the_history(
    tmp_path: Path, server: PostgresServer
) -> None:
    small = server.path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m,mode=777", "tmpfs", str(small)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a small disk needs root and the right to mount")
    try:
        server.execute(
            f"CREATE TABLESPACE small LOCATION '{server.create_folder(small / 'space')}'"
        )
        url = server.new_database(more="TABLESPACE small")
        with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
            create(store, "tea")
            numbers = itertools.count()

            def talk() -> None:
                for number in numbers:
                    say(store, "tea", f"r{number}", long_question(number), reply("yes", 2))

            with pytest.raises(StoreUnavailable, match="the server's disk is full"):
                talk()
            number = next(numbers) - 1  # the number of the turn that was refused
            assert number > 3
            assert len(store.messages("tea")) == 2 * number
            assert store.get_conversation("tea").running_turn_id is None
            subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
            # Retry as a client would. The beginning of the turn may be stored, as interrupted.
            say(store, "tea", f"r{number}", long_question(number), reply("yes", 2))
            assert len(store.messages("tea")) == 2 * number + 2
            assert store.verify() == []
    finally:
        server.kill()
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_a_damaged_page_is_reported_as_damage(tmp_path: Path, server: PostgresServer) -> None:
    # Autovacuum would record that the damaged page has room, and that a scan of the table is cheap. Then the
    # last `create` would use the damaged page, or read all pages.
    server.execute("ALTER SYSTEM SET autovacuum = off")
    server.execute("SELECT pg_reload_conf()")
    url = server.new_database()
    with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
        for number in range(40):
            create(store, f"c{number}")
            text = (
                random.Random(number).randbytes(700).hex()
            )  # so that no query plan reads the whole table
            say(store, f"c{number}", "r", user(text, 1), reply("hello", 2))
    database = url.split("/")[3].split("?")[0]
    ((path,),) = server.execute("SELECT pg_relation_filepath('pensieve.bodies')", database)
    server.stop()
    file = server.data / path
    data = bytearray(file.read_bytes())
    data[data.index(b'"hello"')] ^= 1
    file.write_bytes(data)
    server.start()
    with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
        assert "a page of the database is damaged" in store.integrity_check()[0]
        with pytest.raises(StoreCorrupt, match="a page of the database is damaged"):
            [store.log(f"c{number}") for number in range(40)]
        create(store, "new")  # the service would now refuse changes, but the store does not


def test_a_starting_daemon_waits_for_an_unreachable_server(
    tmp_path: Path, server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.new_database()
    server.stop()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(ConversationStore.open, tmp_path / "data", "test", url=url)
        end = time.monotonic() + SECONDS_MAX
        while "cannot reach the database" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.02)
        server.start()
        with opening.result() as store:
            create(store, "tea")
            assert store.num_conversations() == 1


def test_a_refused_login_is_not_retried(
    tmp_path: Path, server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreUnavailable, match="does not exist"):
        ConversationStore.open(tmp_path / "data", "test", url=server.url("nowhere"))
    assert "cannot reach the database" not in caplog.text


def test_a_standby_takes_over_with_every_acknowledged_turn(
    tmp_path: Path, server: PostgresServer
) -> None:
    """Commits wait for the standby (streaming replication), and the URL has both hosts."""
    url = server.new_database()
    standby = PostgresServer(cluster_name="standby")
    talker = None
    try:
        server.call(
            "pg_basebackup",
            "-D",
            str(standby.data),
            "-R",
            *server.connection_options(),
            "-c",
            "fast",
        )
        standby.start()
        server.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
        server.execute("SELECT pg_reload_conf()")
        end = time.monotonic() + SECONDS_MAX
        while server.execute("SELECT sync_state FROM pg_stat_replication") != [("sync",)]:
            assert time.monotonic() < end
            time.sleep(0.02)
        name = url.split("/")[3].split("?")[0]
        both = f"postgresql://{postgres_server.USER}@/{name}?host={standby.path},{server.path}"
        talker = Talker(tmp_path / "data", both)
        talker.wait_for(20)
        server.kill()
        standby.execute("SELECT pg_promote()")
        talker.wait_for(talker.num_acknowledged() + 20)
        talker.kill()
        with ConversationStore.open(tmp_path / "data", "test", url=both) as store:
            assert store.verify() == []
            check(store, talker.acknowledged, 0)
    finally:
        if talker is not None:
            talker.kill()
        standby.close()


def test_a_restored_dump_has_the_same_history(tmp_path: Path, server: PostgresServer) -> None:
    url, other = server.new_database(), server.new_database()
    with ConversationStore.open(tmp_path / "data", "test", url=url) as store:
        create(store, "tea")
        say(store, "tea", "r1", user("hi", 1), reply("hello", 2))
        running = begin(store, "tea", "r2", "more", 3)
        dump = server.path / "dump"
        server.call("pg_dump", "-Fc", "-f", str(dump), url)
        store.finish_turn(running, reply("yes", 4), "stop", {})
    server.call("pg_restore", "--exit-on-error", "-d", other, str(dump))
    with ConversationStore.open(tmp_path / "data", "test", url=other) as store:
        assert [each.turn_id for each in store.interrupted_at_open] == [running]
        assert list(store.log("tea")) == [1, 2]
        assert say(store, "tea", "r3", user("again", 5), reply("yes", 6)) == 2
        assert store.verify() == store.integrity_check() == []
