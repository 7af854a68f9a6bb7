"""Plant each bug in the real code; some world must notice it.

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
FIRST = {
    "KV of a lost turn is taken for a cancelled one's": 100
}  # each near a seed that finds the rare bug
Plant = Callable[[pytest.MonkeyPatch], None]


def around(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Return a plant that replaces a function by `change(original, *arguments)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **named: change(original, *args, **named))

    return plant


def never(*arguments: Any, **named: Any) -> None:
    return


async def tell_before_it_is_stored(
    original: Any, self: TurnEnds, live: LiveTurn, reply: Any, reason: str
) -> None:
    if reply is not None:
        live.revision, live.finish = live.first_revision + 1, reply.finish
        self._followers.wake(live.attempt_id)
    await original(self, live, reply, reason)


async def take_an_error_for_done(
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


def go_on_after_a_cancel(original: Any, self: Turns, token: Any) -> Any:
    live = self._live.get(token.turn_id)
    if live is not None:
        live.take(token)
    return live


def without_the_tokens(original: Any, data: bytes) -> Any:
    return original(data[: identities.IDENTITY_BYTES])


def fork_everything(original: Any, conn: Any, number: int, conversation: Any, _: int) -> Any:
    return original(conn, number, conversation, conversation.revision)


def forget_to_tell_the_engine(original: Any, self: EngineClient, message: Any) -> bool:
    return type(message).__name__ != "DeleteConversation" and original(self, message)


def attach_without_what_was_said(original: Any, self: TurnFollowers, live: Any, *write: Any) -> Any:
    if live.finish is None and live.num_tokens > 1:
        del live.reply.token_ids[0], live.reply.texts[0], live.reply.parts[0]
    return original(self, live, *write)


def keep_what_lies_behind_the_history(
    original: Any, self: Scheduler, turn: Any, now: float
) -> None:
    if turn.state is TurnState.QUEUED and turn.keep_tokens is not None:
        turn.history_tokens = turn.keep_tokens
    original(self, turn, now)


@contextlib.contextmanager
def go_on_before_the_commit(original: Any, self: SharedCommits, group: Group) -> Iterator[Any]:
    try:
        with self._savepoint(group):
            yield group.conn
    finally:
        self._queue.hand_over(self._next_to_join(group) or group.leader)


@contextlib.contextmanager
def forget_that_the_commit_failed(
    original: Any, self: SharedCommits, group: Group
) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(original(self, group))
        with contextlib.suppress(StoreUnavailable):
            stack.close()


FAULTS: dict[str, Plant] = {
    "an answer is told before it is stored": around(TurnEnds, "_commit", tell_before_it_is_stored),
    "an answer is told although it was not stored": around(
        TurnEnds, "_commit", take_an_error_for_done
    ),
    "running turns go on waiting for a dead engine": around(Daemon, "_on_down", never),
    "an event is lost when many come at once": around(channel, "events_of", lose_the_last_event),
    "an end is applied twice": around(message_rows, "append_history", apply_twice),
    "a cancelled turn goes on": around(Turns, "take", go_on_after_a_cancel),
    "a fork takes what came later": around(message_rows, "require_links", fork_everything),
    "the engine keeps what was deleted": around(EngineClient, "try_put", forget_to_tell_the_engine),
    "chunks are found by their place and not by their words": around(
        identities, "_digest", without_the_tokens
    ),
    "a restart does not interrupt": around(turn_rows, "interrupt_turn", never),
    "an id that came before is not known": around(turn_rows, "find_turn_of_request", never),
    "a prompt is kept when its turn begins again": around(turn_rows, "restart_turn", never),
    "whoever attaches misses the beginning": around(
        TurnFollowers, "follow", attach_without_what_was_said
    ),
    "a turn is failed in memory only": around(
        conversation_store.ConversationStore, "fail_turn", never
    ),
    "KV of a lost turn is taken for a cancelled one's": around(
        Scheduler, "_release", keep_what_lies_behind_the_history
    ),
    "an engine that hangs is not noticed": around(Heartbeat, "tick", never),
    "a call goes on before the commit that it shares": around(
        SharedCommits, "_joining", go_on_before_the_commit
    ),
    "a call does not hear that the commit has failed": around(
        SharedCommits, "_joining", forget_that_the_commit_failed
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
