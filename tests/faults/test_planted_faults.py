"""Plant each bug in the real code. At least one simulated run (a *world*, world.py) must notice it.

These bugs are in the code where the engine, the conversations and the store meet. Bugs of the core and the
cache are in tests/core/test_planted_faults.py. The last bug here was found by the search itself.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.conversations.daemon import Daemon
from pensieve.conversations.engine_client import EngineClient, Heartbeat
from pensieve.conversations.followers import TurnFollowers
from pensieve.conversations.live_turn import LiveTurn
from pensieve.conversations.turn_ends import TurnEnds
from pensieve.conversations.turns import Turns
from pensieve.core import identities
from pensieve.core.scheduler import Scheduler
from pensieve.core.turn import TurnState
from pensieve.engine import pipe as channel
from pensieve.errors import StoreUnavailable
from pensieve.store import conversation_store, message_rows, turn_rows
from pensieve.store.shared_commits import Group, SharedCommits
from tests.faults.disk import shelf
from tests.faults.world import run

SEEDS = 120
# Where the search begins: shortly before a seed that finds this rare bug.
FIRST = {"a queued turn that was cancelled counts KV of a lost turn as history": 100}
Plant = Callable[[pytest.MonkeyPatch], None]


def replace_by(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Return a function that replaces `name` by `change(original, *arguments)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **named: change(original, *args, **named))

    return plant


def do_nothing(*arguments: Any, **named: Any) -> None:
    return


async def report_before_it_is_stored(
    original: Any, self: TurnEnds, live: LiveTurn, reply: Any, reason: str
) -> None:
    if reply is not None:
        live.revision, live.finish = live.first_revision + 1, reply.finish
        self._followers.wake(live.attempt_id)
    await original(self, live, reply, reason)


async def report_success_after_an_error(
    original: Any, self: TurnEnds, live: LiveTurn, reply: Any, reason: str
) -> None:
    await original(self, live, reply, reason)
    if reply is not None and live.failure is not None:
        live.revision, live.finish, live.failure = live.first_revision + 1, reply.finish, None


def lose_the_last_event(original: Any, frame: Any) -> list[Any]:
    events: list[Any] = original(frame)
    return events[:-1] if len(events) > 3 else events


def apply_twice(original: Any, conn: Any, number: int, links: Any) -> None:
    original(conn, number, links)
    if len(links) > 1:
        original(conn, number, links[-1:])


def continue_after_a_cancel(original: Any, self: Turns, token: Any) -> Any:
    live = self._live.get(token.turn_id)
    if live is not None:
        live.take(token)
    return live


def digest_without_the_tokens(original: Any, data: bytes) -> Any:
    return original(data[: identities.IDENTITY_BYTES])


def fork_all_messages(original: Any, conn: Any, number: int, conversation: Any, _: int) -> Any:
    return original(conn, number, conversation, conversation.revision)


def forget_to_tell_the_engine(original: Any, self: EngineClient, message: Any) -> bool:
    return type(message).__name__ != "DeleteConversation" and original(self, message)


def attach_without_the_first_token(
    original: Any, self: TurnFollowers, live: Any, *write: Any
) -> Any:
    if live.finish is None and live.num_tokens > 1:
        del live.reply.token_ids[0], live.reply.texts[0], live.reply.parts[0]
    return original(self, live, *write)


def count_kept_tokens_as_history(original: Any, self: Scheduler, turn: Any, now: float) -> None:
    if turn.state is TurnState.QUEUED and turn.keep_tokens is not None:
        turn.history_tokens = turn.keep_tokens
    original(self, turn, now)


@contextlib.contextmanager
def return_before_the_commit(original: Any, self: SharedCommits, group: Group) -> Iterator[Any]:
    try:
        with self._savepoint(group):
            yield group.conn
    finally:
        self._queue.hand_over(self._next_to_join(group) or group.leader)


@contextlib.contextmanager
def ignore_the_failed_commit(original: Any, self: SharedCommits, group: Group) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(original(self, group))
        with contextlib.suppress(StoreUnavailable):
            stack.close()


FAULTS: dict[str, Plant] = {
    "a client gets a reply before it is stored": replace_by(
        TurnEnds, "_commit", report_before_it_is_stored
    ),
    "a client gets a reply although it could not be stored": replace_by(
        TurnEnds, "_commit", report_success_after_an_error
    ),
    "running turns keep waiting for a dead engine": replace_by(Daemon, "_on_down", do_nothing),
    "an event is lost when many arrive at once": replace_by(
        channel, "events_of", lose_the_last_event
    ),
    "an end is applied twice": replace_by(message_rows, "append_history", apply_twice),
    "a cancelled turn continues": replace_by(Turns, "take", continue_after_a_cancel),
    "a fork includes messages after its revision": replace_by(
        message_rows, "require_links", fork_all_messages
    ),
    "the engine keeps a deleted conversation": replace_by(
        EngineClient, "try_put", forget_to_tell_the_engine
    ),
    "chunks are found by their position and not by their tokens": replace_by(
        identities, "_digest", digest_without_the_tokens
    ),
    "a restart does not interrupt running turns": replace_by(
        turn_rows, "interrupt_turn", do_nothing
    ),
    "the request_id of an earlier request is not recognised": replace_by(
        turn_rows, "find_turn_of_request", do_nothing
    ),
    "a restarted turn keeps the state and messages of its failed attempt": replace_by(
        turn_rows, "restart_turn", do_nothing
    ),
    "a client that attaches misses the beginning of the reply": replace_by(
        TurnFollowers, "follow", attach_without_the_first_token
    ),
    "a failed turn is marked in memory only": replace_by(
        conversation_store.ConversationStore, "fail_turn", do_nothing
    ),
    "a queued turn that was cancelled counts KV of a lost turn as history": replace_by(
        Scheduler, "_release", count_kept_tokens_as_history
    ),
    "a hanging engine is not noticed": replace_by(Heartbeat, "tick", do_nothing),
    "a call returns before the commit that it shares": replace_by(
        SharedCommits, "_join", return_before_the_commit
    ),
    "a call does not learn that the shared commit has failed": replace_by(
        SharedCommits, "_join", ignore_the_failed_commit
    ),
}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with shelf() as path:
        yield path


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    first = FIRST.get(name, 0)
    for seed in range(first, first + SEEDS):
        try:
            run(seed, place)
        except Exception as error:
            print(f"{name}: seed {seed}: {type(error).__name__} {str(error)[:200]}")
            return
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(place / f"world-{seed}")
    pytest.fail(f"{SEEDS} worlds did not notice that {name}")
