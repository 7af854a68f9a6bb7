"""Which daemon may write to which conversation, where several share a history service.

A daemon has a *session*: a row that says who and where it is, until it has ended.  A conversation has an
*owner*, the session whose engine keeps its KV, and the *epoch* that began when it became that:

    without one ──claim by A──> A's, in epoch 7 ──claim by B──> B's, in epoch 12
                                                 only if A's session has ended, or A gives it up

* An epoch is a number that was never given out before, to any conversation.  So two owners are never in one
  epoch, and who remembers an epoch can tell whether what it knows of the conversation is still so.
* A claim is a part of the transaction that writes to the conversation, so whoever does not own it has
  written nothing.
* A turn is written to by the owner of its conversation alone.  When a session ends, its running turns are
  abandoned (transactions.py) and the next transaction interrupts them; so a late writer finds its turn
  ended or its conversation another's, and is refused either way.

Sessions that ended are kept as long as a conversation was theirs last, to tell the next owner where KV may
still be.  Of writing calls a session remembers the number of the last one that was committed, in the same
transaction, so that a call which comes again after a broken connection is known (remote/calls.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pensieve.errors import NotFound, OwnedElsewhere, Unavailable
from pensieve.store import conversation_rows
from pensieve.store.records import StoredTurnState
from pensieve.store.transactions import StoreTransactions, repeated

if TYPE_CHECKING:
    from sqlite3 import Connection

NOBODY = 0  # no session; of a conversation that its owner gave up, minus the number of that


@dataclass(frozen=True, slots=True)
class Session:
    """A daemon that writes to the history."""

    number: int
    replica: str  # its name among the daemons
    address: str = ""  # of its gRPC
    http_address: str = ""
    metrics_address: str = ""
    last_call: int = 0
    has_ended: bool = False


class Claim(NamedTuple):
    """What became of a claim."""

    epoch: int
    is_new: bool = False  # it was not the session's before
    previous: int = NOBODY  # the session that had it before


class Ownership(NamedTuple):
    session: int
    epoch: int


class OwnedTurn(NamedTuple):
    """A turn, and who owns its conversation."""

    session: int  # NOBODY without an owner
    epoch: int
    state: StoredTurnState
    attempt: int


class ReplicaSessions:
    """Used in the thread of the store."""

    def __init__(self, transactions: StoreTransactions, now: Callable[[], float]) -> None:
        self._transactions = transactions
        self._now = now

    # -- sessions --

    @repeated
    def open_session(self, session: Session) -> Session:
        """Another one, with the number that it gets; one that its replica had before has ended."""
        with self._transactions.writing() as conn:
            for (number,) in conn.execute(
                "SELECT session FROM sessions WHERE replica = ? AND ended_at IS NULL",
                (session.replica,),
            ).fetchall():
                self._end(conn, number)
            conn.execute(
                "DELETE FROM sessions WHERE ended_at IS NOT NULL AND NOT EXISTS"
                " (SELECT 1 FROM owners o WHERE o.session IN (sessions.session, -sessions.session))"
            )
            (number,) = conn.execute(
                "INSERT INTO sessions (session, replica, address, http_address, metrics_address,"
                " last_call, opened_at) VALUES (?, ?, ?, ?, ?, 0, ?) RETURNING session",
                (
                    _next_number(conn),
                    session.replica,
                    session.address,
                    session.http_address,
                    session.metrics_address,
                    self._now(),
                ),
            ).fetchone()
            return _session(conn, number)

    @repeated
    def move_session(self, session: Session) -> None:
        """It has other addresses."""
        with self._transactions.writing() as conn:
            conn.execute(
                "UPDATE sessions SET address = ?, http_address = ?, metrics_address = ?"
                " WHERE session = ?",
                (session.address, session.http_address, session.metrics_address, session.number),
            )

    @repeated
    def end_session(self, number: int) -> None:
        """It writes no more; its turns are interrupted before anything else is written."""
        with self._transactions.writing() as conn:
            self._end(conn, number)

    def _end(self, conn: Connection, number: int) -> None:
        turns = conn.execute(
            "SELECT t.turn_id FROM turns t JOIN owners o USING (conversation)"
            " WHERE t.state = 'running' AND o.session = ?",
            (number,),
        ).fetchall()
        self._transactions.abandon(turn_id for (turn_id,) in turns)
        conn.execute(
            "UPDATE sessions SET ended_at = ? WHERE session = ? AND ended_at IS NULL",
            (self._now(), number),
        )

    def session(self, number: int) -> Session:
        """NotFound if there is none, or none any more."""
        with self._transactions.reading() as conn:
            return _session(conn, number)

    def open_sessions(self) -> list[Session]:
        """Those that have not ended."""
        with self._transactions.reading() as conn:
            rows = conn.execute(SESSION + "WHERE ended_at IS NULL ORDER BY session").fetchall()
        return [_session_of(row) for row in rows]

    def abandon(self, turn_ids: Iterable[int]) -> None:
        """Nobody computes these turns; the next transaction interrupts those that run."""
        self._transactions.abandon(turn_ids)

    @property
    def live_turns(self) -> frozenset[int]:
        """Those that somebody computes, as far as is known."""
        return self._transactions.live

    def restore(self, turn_ids: Iterable[int]) -> None:
        """Somebody computes these turns, after a transaction that failed."""
        self._transactions.restore(turn_ids)

    def running_turns(self) -> dict[int, list[int]]:
        """By the session that owns their conversations."""
        found: dict[int, list[int]] = {}
        with self._transactions.reading() as conn:
            for turn_id, session in conn.execute(
                "SELECT t.turn_id, o.session FROM turns t JOIN owners o USING (conversation)"
                " WHERE t.state = 'running'"
            ).fetchall():
                found.setdefault(session, []).append(turn_id)
        return found

    @repeated
    def note_call(self, session: int, number: int) -> None:
        """This writing call of the session is part of the transaction."""
        with self._transactions.writing() as conn:
            conn.execute("UPDATE sessions SET last_call = ? WHERE session = ?", (number, session))

    @repeated
    def begin_epochs(self) -> None:
        """From now on numbers are above all that were given out, also where the history is a restored one.

        A microsecond is a number, so a history of before has had fewer of them.
        """
        now = round(1_000_000 * self._now())
        with self._transactions.writing() as conn:
            conn.execute("UPDATE epochs SET last = ? WHERE last < ?", (now, now))

    # -- conversations --

    @repeated
    def claim(
        self,
        conversation_id: str,
        session: int,
        *,
        tenant: str = "",
        may_take: Callable[[int], bool] = lambda owner: False,
    ) -> Claim:
        """Make the session the owner of a conversation, if it is no one else's.

        OwnedElsewhere if its owner's session goes on; where it `may_take` from that one, only if a turn of it
        runs.  What the session gave up, and no other one took, is its own as before.  NotFound without the
        conversation.
        """
        with self._transactions.writing() as conn:
            row = conn.execute(
                "SELECT c.conversation, o.session, o.epoch, s.ended_at IS NULL, s.replica, s.address,"
                " EXISTS (SELECT 1 FROM turns t WHERE t.conversation = c.conversation"
                "   AND t.state = 'running')"
                " FROM conversations c LEFT JOIN owners o USING (conversation)"
                " LEFT JOIN sessions s ON s.session = o.session WHERE c.key = ?",
                (conversation_rows.conversation_key(conversation_id, tenant),),
            ).fetchone()
            if row is None:
                raise NotFound(f"there is no conversation {conversation_id!r}")
            number, owner, epoch, is_open, replica, address, is_running = row
            if owner == session:
                if not is_open:
                    raise Unavailable("the history service has ended this session")
                return Claim(epoch)
            if owner == -session:
                conn.execute(
                    "UPDATE owners SET session = ? WHERE conversation = ?", (session, number)
                )
                return Claim(epoch)
            is_elsewhere = owner and is_open and replica is not None
            if is_elsewhere and (is_running or not may_take(owner)):
                raise OwnedElsewhere(conversation_id, replica, address)
            taken = _next_number(conn)
            conn.execute(
                "INSERT INTO owners (conversation, session, epoch) VALUES (?, ?, ?)"
                " ON CONFLICT (conversation) DO UPDATE"
                " SET session = excluded.session, epoch = excluded.epoch",
                (number, session, taken),
            )
            return Claim(taken, True, abs(owner or NOBODY))

    @repeated
    def give_up(self, conversation_id: str, session: int, *, tenant: str = "") -> bool:
        """The next one that claims the conversation gets it; whether it was the session's, and idle."""
        with self._transactions.writing() as conn:
            found = conn.execute(
                "UPDATE owners SET session = -session WHERE session = ? AND conversation ="
                " (SELECT conversation FROM conversations WHERE key = ?) AND NOT EXISTS"
                " (SELECT 1 FROM turns t WHERE t.conversation = owners.conversation"
                "   AND t.state = 'running') RETURNING 1",
                (session, conversation_rows.conversation_key(conversation_id, tenant)),
            ).fetchone()
        return found is not None

    def owner(self, conversation_id: str, *, tenant: str = "") -> Ownership | None:
        """None if it has none."""
        with self._transactions.reading() as conn:
            return owner_of(conn, conversation_id, tenant)

    def turn(self, turn_id: int) -> OwnedTurn | None:
        """None if there is no such turn, or none any more."""
        with self._transactions.reading() as conn:
            row = conn.execute(
                "SELECT o.session, o.epoch, t.state, t.attempts"
                " FROM turns t LEFT JOIN owners o USING (conversation) WHERE t.turn_id = ?",
                (turn_id,),
            ).fetchone()
            if row is None:
                return None
            session, epoch, state, attempt = row
            is_dead = state == StoredTurnState.RUNNING and self._transactions.is_dead(conn, turn_id)
        found = StoredTurnState.INTERRUPTED if is_dead else StoredTurnState(state)
        return OwnedTurn(session or NOBODY, epoch or 0, found, attempt)


SESSION = (
    "SELECT session, replica, address, http_address, metrics_address, last_call, ended_at IS NOT NULL"
    " FROM sessions "
)


def _session_of(row: tuple[int, str, str, str, str, int, int]) -> Session:
    return Session(*row[:6], has_ended=bool(row[6]))


def _session(conn: Connection, number: int) -> Session:
    row = conn.execute(SESSION + "WHERE session = ?", (number,)).fetchone()
    if row is None:
        raise NotFound(f"there is no session {number}")
    return _session_of(row)


def owner_of(conn: Connection, conversation_id: str, tenant: str) -> Ownership | None:
    row = conn.execute(
        "SELECT o.session, o.epoch FROM owners o JOIN conversations c USING (conversation)"
        " WHERE c.key = ?",
        (conversation_rows.conversation_key(conversation_id, tenant),),
    ).fetchone()
    return None if row is None else Ownership(*row)


def _next_number(conn: Connection) -> int:
    """A number that no session and no epoch has had."""
    row = conn.execute("UPDATE epochs SET last = last + 1 RETURNING last").fetchone()
    return int(row[0])
