"""A store in a separate process. It shares a history with other processes, and follows commands.

A command is a line of JSON, `[method, arguments…]`. The answer is a line with the result, or `["error",
class, text]`. After the command `run_random_turns`, the process writes without further commands until it is
killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pensieve.errors import NotFound, OwnedElsewhere, PensieveError, StoreUnavailable, TurnRunning
from pensieve.store import ConversationStore, NewConversation, NewTurn
from pensieve.store.shared_file import is_stopped
from tests.store.talk import reply, user

LEASE_SECONDS = 1.0  # the lease of a daemon that the test lets expire
KEEP_OWNERS = "UPDATE owners SET epoch = epoch RETURNING 1"
LONG_SECONDS = 60.0  # a lease that does not expire, even on a slow machine


class Worker:
    """Executes the commands in the process."""

    def __init__(self, path: Path, name: str, lease_seconds: float, url: str) -> None:
        self.stale: list[str] = []
        self.store = ConversationStore.open(
            path.parent / name,
            "a test",
            url=url,
            replica=name,
            lease_seconds=lease_seconds,
        )
        self.store.watch(lambda tenant, conversation_id: self.stale.append(conversation_id))
        self.store.announce(f"{name}:1", "", "")
        self._renewing = threading.Lock()  # held while the lease thread may write
        leases = vars(self.store)["_leases"]
        renew = leases._renew_and_tidy

        def renew_if_not_stopped() -> None:
            with self._renewing:
                renew()

        leases._renew_and_tidy = renew_if_not_stopped

    def create(self, conversation_id: str) -> None:
        self.store.create_conversation(NewConversation(conversation_id, "f", [user("head", 1)]))

    def begin(self, conversation_id: str, request_id: str, *tokens: int) -> list[Any]:
        begun = self.store.begin_turn(
            conversation_id, NewTurn(request_id, [user(request_id, *tokens)])
        )
        return [begun.turn.turn_id, begun.turn.attempts, begun.must_run, begun.turn.state.value]

    def finish(self, turn_id: int, attempt: int, *tokens: int) -> int:
        return self.store.finish_turn(turn_id, reply("reply", *tokens), "stop", {}, attempt=attempt)

    def say(self, conversation_id: str, request_id: str, *tokens: int) -> int:
        turn_id, attempt, *_ = self.begin(conversation_id, request_id, *tokens)
        return self.finish(turn_id, attempt, *tokens)

    def log(self, conversation_id: str) -> list[int]:
        return list(self.store.log(conversation_id))

    def delete(self, conversation_id: str) -> None:
        self.store.delete_conversation(conversation_id)

    def running(self, conversation_id: str) -> int | None:
        return self.store.get_conversation(conversation_id).running_turn_id

    def owner(self, conversation_id: str) -> list[Any] | None:
        found = self.store.owners.owner(conversation_id)
        return found and [found.replica, found.epoch, found.is_alive, found.is_ours]

    def stale_and_kv_sources(self) -> list[Any]:
        """Return the conversations that became stale since the last call, and the sources of KV."""
        stale, self.stale = self.stale, []
        return [stale, {name: at for (_, name), at in self.store.kv_sources.items()}]

    def drain(self) -> None:
        self.store.drain()

    def is_housekeeper(self) -> bool:
        return self.store.is_housekeeper

    def hold_write_lock(self, statement: str = KEEP_OWNERS) -> None:
        """Stop the process in the middle of a write, until the test continues it."""
        with vars(self.store)["_writer"].writing() as conn:
            conn.execute(statement).fetchall()
            os.kill(os.getpid(), signal.SIGSTOP)

    def stop_between_writes(self) -> None:
        """Stop the process while it writes nothing, until the test continues it.

        Other daemons kill a process that was stopped in the middle of a write.
        """
        with self._renewing:
            os.kill(os.getpid(), signal.SIGSTOP)

    def race(self, prefix: str, num: int, seed: int) -> list[list[Any]]:
        """Run a turn in each of these conversations, in random order. Return the epochs."""
        won = []
        names = [f"{prefix}{number}" for number in range(num)]
        random.Random(seed).shuffle(names)
        for name in names:
            try:
                turn_id, attempt, *_ = self.begin(name, f"r{seed}", seed)
            except (OwnedElsewhere, TurnRunning):
                continue
            won.append([name, self.owner(name)[1], self.finish(turn_id, attempt, seed)])  # type: ignore[index]
        return won

    def close(self) -> None:
        self.store.close()

    def run_random_turns(self, seed: int, num: int) -> None:
        """Run random turns, and take over conversations where that is allowed. Print a line for each."""
        chance, number = random.Random(seed), 0
        while True:
            name, number = f"w{chance.randrange(num)}", number + 1
            request_id, token = f"{seed}-{number}", seed * 100_000 + number
            try:
                if chance.random() < 0.05:
                    self.create(name)
                    continue
                turn_id, attempt, must_run, _ = self.begin(name, request_id, token)
                owner = self.owner(name)
                if chance.random() < 0.3:
                    time.sleep(chance.random() * 0.01)
                revision = self.finish(turn_id, attempt, token)
            except NotFound:
                tell(["lost", name])
            except (OwnedElsewhere, TurnRunning, StoreUnavailable, PensieveError) as error:
                tell(["refused", name, type(error).__name__])
                time.sleep(0.002)
            else:
                assert must_run
                tell(["said", name, token, revision, owner and owner[1], seed])


def tell(answer: Any) -> None:
    """Write one line in a single call."""
    os.write(1, (json.dumps(answer) + "\n").encode())


def main() -> None:
    path, name, lease_seconds, url = sys.argv[1:]
    worker = Worker(Path(path), name, float(lease_seconds), url)
    tell("ready")
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            tell(getattr(worker, method)(*arguments))
        except PensieveError as error:
            tell(["error", type(error).__name__, str(error)])


class Process:
    """The test's side of a Worker process."""

    def __init__(
        self, path: Path, name: str, lease_seconds: float = LONG_SECONDS, url: str = ""
    ) -> None:
        """`url` is a PostgreSQL database. Without `url`, the history is the SQLite file `path`."""
        command = (sys.executable, "-m", "tests.store.sharing_process", str(path), name)
        self.child = subprocess.Popen(
            (*command, str(lease_seconds), url or f"sqlite://{path}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.name = name

    def ready(self) -> Process:
        assert self.child.stdout is not None
        if self.child.stdout.readline() != '"ready"\n':
            raise AssertionError(self.child.communicate()[1])
        return self

    def put(self, method: str, *arguments: Any) -> None:
        assert self.child.stdin is not None
        print(json.dumps([method, *arguments]), file=self.child.stdin, flush=True)

    def answer(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, self.child.communicate()[1]
        return json.loads(line)

    def __call__(self, method: str, *arguments: Any) -> Any:
        self.put(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process between two writes, and let it continue at the end."""
        self.put("stop_between_writes")
        while not is_stopped(self.child.pid):
            assert self.child.poll() is None, "the process has ended"
            time.sleep(0.01)
        yield
        self.resume()
        assert self.answer() is None

    def stop(self) -> None:
        """Stop the process at once, perhaps in the middle of a write."""
        self.child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.child.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.child.poll() is None:
            self.resume()
            self.child.kill()
        self.child.communicate()


if __name__ == "__main__":
    main()
