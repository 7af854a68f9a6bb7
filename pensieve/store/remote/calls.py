"""Calls of replicas, carried out on the store: whose conversation it is, once, and many in one commit.

All of it is done in one thread, one call after the other, and the calls of a session come in the order of
their numbers.

**Whose.**  A call that writes to a conversation claims it first, in the same commit; one that makes a
conversation claims it behind.  A turn is ended by the owner of its conversation alone, and in the attempt
that it is at.  So of two replicas that write to one conversation one is refused, whatever they believe, and
so is a replica that lost its session and got the conversation back.

**Once.**  A replica whose stream breaks sends what was not answered again.  It has one writing call under
way at a time, and the number of a session's last one is committed with it, so a call that comes `again` and
is not above it was carried out: its answer is at hand, or is read from what it did (`RECALLED`).  A call that
failed has changed nothing, and may be carried out again.

**Many in one commit.**  The calls that wait are one group (transactions.py), and no answer leaves before
its commit.  If that fails, each is carried out again by itself, as a call that comes again is: one of them
may be to blame, and the commit may have come about.  Until then the turns of the group count as running, both
those that it began and those that it ended, since either may be so on the disk; and which sessions have ended
is read from the disk before anything else is done.  Those that erase from the files are alone.

**No more.**  The calls of a session that has ended are refused, also those that were waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pensieve.errors import (
    ErasurePending,
    InvalidArgument,
    NotFound,
    PensieveError,
    ServerFault,
    StoreError,
    StoreUnavailable,
    Unavailable,
)
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.records import PREFIX_MARK, BeginResult, Conversation, StoredTurnState
from pensieve.store.remote import wire
from pensieve.store.remote.methods import METHODS, Kind, Method
from pensieve.store.remote.recalled import RECALLED
from pensieve.store.remote.wire import Unreadable
from pensieve.store.replica_sessions import NOBODY, Session

ENDED_WITHOUT_REPLY = (StoredTurnState.INTERRUPTED, StoredTurnState.FAILED)


@dataclass(frozen=True, slots=True)
class Call:
    """What a replica wants carried out."""

    session: int
    number: int
    method: str
    arguments: str
    parts: Sequence[bytes] = ()
    again: bool = False


class Claimed(NamedTuple):
    """A conversation became a session's; for the log."""

    session: int
    tenant: str
    conversation_id: str
    epoch: int
    previous: int


@dataclass(slots=True)
class Outcome:
    """What the replica gets, and what others must hear of it."""

    number: int
    result: str = ""
    parts: Sequence[bytes] = ()
    failed: bool = False
    epoch: int = 0
    previous_address: str = ""
    source_epoch: int = 0
    ended_sessions: tuple[int, ...] = ()  # of replicas that are gone
    name: tuple[str, str] | None = None  # tenant and id of the conversation that it wrote to
    claimed: Claimed | None = None
    turn_id: int = 0  # that it has begun or ended
    num_running: int = 0  # what that makes of the number of its session's turns: 1 or -1
    turn_epoch: int = 0  # of that turn's conversation
    fault: BaseException | None = field(default=None, repr=False)  # of ours


class Calls:
    """Belongs to the store's thread."""

    def __init__(
        self,
        store: ConversationStore,
        is_connected: Callable[[int], bool] = lambda session: True,
    ) -> None:
        """`is_connected`: a session's stream is there, or was so a moment ago; any thread may ask."""
        self._store = store
        self._is_connected = is_connected
        self._answered: dict[int, Outcome] = {}  # by session: its last writing call
        # Turns that may run, whose ends failed: session, turn and attempt.
        self._in_vain: dict[tuple[int, int, int], None] = {}
        self._open = {each.number for each in store.replica_sessions.open_sessions()}
        self._may_have_ended = False  # sessions of `_open`, in a commit that failed
        self._unsaid: tuple[int, ...] = ()  # sessions of which that has turned out to be so
        self._draining: set[int] = set()

    def carry_out(self, calls: Sequence[Call]) -> list[Outcome]:
        """In their order."""
        outcomes: list[Outcome] = []
        group: list[Call] = []
        for call in calls:
            method = METHODS.get(call.method)
            if method is None:
                refusal = InvalidArgument("method", f"there is no {call.method!r}")
                outcomes += [*self._grouped(group), _failed(call, refusal)]
                group = []
                continue
            if not method.alone:
                group.append(call)
                continue
            outcomes += self._grouped(group)
            group = []
            outcomes.append(self._alone(call))
        outcomes += self._grouped(group)
        if self._unsaid and outcomes:
            outcomes[0].ended_sessions += self._unsaid
            self._unsaid = ()
        return outcomes

    @property
    def num_remembered(self) -> int:
        """Sessions of which something is known that is not on the disk."""
        return len({*self._answered, *self._draining})

    # -- sessions --

    def open_session(self, session: Session) -> Session:
        """Another one, with its number; one that its replica had has ended."""
        opened = self._store.replica_sessions.open_session(session)
        self._read_sessions()
        return opened

    def drain(self, session: int) -> None:
        """Whoever wants one of its conversations gets it, once no turn of it runs."""
        self._draining.add(session)

    def end_session(self, session: int) -> None:
        """It writes no more."""
        self._store.replica_sessions.end_session(session)
        self._open.discard(session)
        self._forget(session)

    # -- inside --

    def _read_sessions(self) -> None:
        """As they are on the disk."""
        found = {each.number for each in self._store.replica_sessions.open_sessions()}
        self._unsaid += tuple(sorted(self._open - found))
        self._open, self._may_have_ended = found, False
        for session in {*self._answered, *self._draining} - found:
            self._forget(session)

    def _be_sure_of_sessions(self) -> None:
        if self._may_have_ended:
            self._read_sessions()

    def _forget(self, session: int) -> None:
        self._draining.discard(session)
        self._answered.pop(session, None)

    def _grouped(self, calls: Sequence[Call]) -> list[Outcome]:
        if not any(METHODS[each.method].writes for each in calls):
            return [self._alone(each) for each in calls]
        self._abandon_what_ended_in_vain()
        outcomes: list[Outcome] = []
        owners, open_before = self._store.replica_sessions, self._open
        live_before = owners.live_turns
        try:
            self._be_sure_of_sessions()
            open_before = set(self._open)
            with self._store.group():
                for call in calls:
                    outcomes.append(Outcome(call.number))
                    outcomes[-1] = self._one(call, outcomes[-1])
        except Exception as error:
            self._may_have_ended = True
            self._open = open_before
            owners.restore(live_before)
            if len(calls) > 1:
                again = [replace(call, again=True) for call in calls]
                return [outcome for call in again for outcome in self._grouped([call])]
            (outcome,) = outcomes or [Outcome(calls[0].number)]
            owners.abandon([outcome.turn_id])  # begun or ended, nobody computes it
            lost = outcome.turn_id, -1, outcome.turn_epoch
            failed = _failed(calls[0], error)
            failed.turn_id, failed.num_running, failed.turn_epoch = lost
            if not outcome.turn_id and METHODS[calls[0].method].kind is Kind.TURN:
                self._ends_in_vain(calls[0])
            self._remember(calls[0], failed)
            return [failed]
        for call, outcome in zip(calls, outcomes, strict=True):
            for session in outcome.ended_sessions:
                self._forget(session)
            self._remember(call, outcome)
        return outcomes

    def _abandon_what_ended_in_vain(self) -> None:
        """Turns that their replicas have ended, in calls that failed before it was known whose they are."""
        for session, turn_id, attempt in tuple(self._in_vain):
            try:
                found = self._store.replica_sessions.turn(turn_id)
            except PensieveError:  # the database is away, or cannot be read there: another time
                return
            is_its = (
                found is not None and found.session == session and attempt in (0, found.attempt)
            )
            if is_its and found is not None and found.state is StoredTurnState.RUNNING:
                self._store.replica_sessions.abandon([turn_id])
            del self._in_vain[session, turn_id, attempt]

    def _ends_in_vain(self, call: Call) -> None:
        """Its turn is looked at again before the next group."""
        with contextlib.suppress(Unreadable):
            given = METHODS[call.method].read_arguments(call.arguments, call.parts)
            self._in_vain[call.session, given["turn_id"], given.get("attempt", 0)] = None

    def _alone(self, call: Call) -> Outcome:
        try:
            self._be_sure_of_sessions()
            outcome = self._one(call, Outcome(call.number))
        except Exception as error:
            return _failed(call, error)
        self._remember(call, outcome)
        return outcome

    def _remember(self, call: Call, outcome: Outcome) -> None:
        if METHODS[call.method].writes:
            self._answered[call.session] = outcome

    def _one(self, call: Call, outcome: Outcome) -> Outcome:
        """Errors of ours are its outcome; those of the database go on, since they end a group."""
        method = METHODS[call.method]
        if method.kind is Kind.READ:
            return _failed(call, InvalidArgument("method", f"{call.method} is for the read thread"))
        if call.session not in self._open:
            return _failed(call, StoreUnavailable("the history service has ended this session"))
        try:
            arguments = method.read_arguments(call.arguments, call.parts)
        except Unreadable as error:
            return _failed(call, InvalidArgument("arguments", str(error)))
        if call.again and method.writes and (known := self._known(call, method, arguments)):
            return known
        try:
            result = self._carried_out(call, method, arguments, outcome)
        except PensieveError as error:
            if _is_of_the_database(error):
                raise
            outcome.result, outcome.failed = wire.error_written(error), True
            return outcome
        outcome.result, outcome.parts = method.write_result(result)
        if method.writes:
            self._store.replica_sessions.note_call(call.session, call.number)
        return outcome

    def _carried_out(
        self, call: Call, method: Method, arguments: dict[str, Any], outcome: Outcome
    ) -> Any:
        tenant = arguments.get("tenant", "")
        if method.kind is Kind.WRITE:
            self._claim(call, arguments["conversation_id"], tenant, outcome)
        elif method.kind is Kind.TURN:
            if not self._may_end(call, arguments, outcome):
                return self._store.get_turn(arguments["turn_id"])
        elif call.method == "give_up":
            name = arguments["conversation_id"]
            self._store.replica_sessions.give_up(name, call.session, tenant=tenant)
            return None
        result = method.run_on(self._store, arguments)
        if isinstance(result, BeginResult):
            _note_begun(result, outcome)
        elif method.kind is Kind.CREATE:
            self._claim(call, result.conversation_id, result.tenant, outcome)
            if call.method == "fork_conversation":
                outcome.source_epoch = self._epoch(call, arguments["source_id"], tenant)
        elif call.method == "prefixes.num_shared_tokens" and result:
            outcome.source_epoch = self._declared_at(arguments["conversation"])
        return result

    def _claim(self, call: Call, conversation_id: str, tenant: str, outcome: Outcome) -> None:
        """Make it the caller's; one that is not there, or is a declared prefix, has no owner."""
        if conversation_id.startswith(PREFIX_MARK):
            return
        owners = self._store.replica_sessions
        takes = call.method == "take"
        if takes:
            outcome.ended_sessions += self._end_lost_owner(conversation_id, tenant, call.session)
        try:
            claim = owners.claim(
                conversation_id,
                call.session,
                tenant=tenant,
                may_take=lambda owner: takes or owner in self._draining,
            )
        except NotFound:
            return  # the method says so
        outcome.epoch, outcome.name = claim.epoch, (tenant, conversation_id)
        if not claim.is_new:
            return
        outcome.claimed = Claimed(
            call.session, tenant, conversation_id, claim.epoch, claim.previous
        )
        if claim.previous not in (NOBODY, call.session) and self._is_connected(claim.previous):
            with contextlib.suppress(NotFound):
                outcome.previous_address = owners.session(claim.previous).address

    def _end_lost_owner(self, conversation_id: str, tenant: str, taker: int) -> tuple[int, ...]:
        """End the session of an owner whose stream is gone."""
        owner = self._store.replica_sessions.owner(conversation_id, tenant=tenant)
        if owner is None or owner.session in (taker, NOBODY) or owner.session < 0:
            return ()
        if self._is_connected(owner.session):
            return ()
        self._store.replica_sessions.end_session(owner.session)
        self._open.discard(
            owner.session
        )  # what else there was of it is forgotten behind the commit
        return (owner.session,)

    def _may_end(self, call: Call, arguments: dict[str, Any], outcome: Outcome) -> bool:
        """Refuse to end what is not the caller's: it says the same again and finds what became of it.

        False: what is to be interrupted is so already.
        """
        turn_id, attempt = arguments["turn_id"], arguments.pop("attempt", 0)
        found = self._store.replica_sessions.turn(turn_id)
        if found is None:
            return True  # the method says so
        is_late = found.session != call.session or attempt not in (0, found.attempt)
        if is_late and call.method == "interrupt_turn":
            return False
        if is_late or (call.method == "finish_turn" and found.state in ENDED_WITHOUT_REPLY):
            raise Unavailable(f"turn {turn_id} was given up meanwhile; say it again")
        if found.state is StoredTurnState.RUNNING:
            outcome.turn_id, outcome.num_running = turn_id, -1
            outcome.turn_epoch = found.epoch
        return True

    def _epoch(self, call: Call, conversation_id: str, tenant: str) -> int:
        """In which the caller has the conversation; 0 if it does not."""
        owner = self._store.replica_sessions.owner(conversation_id, tenant=tenant)
        return owner.epoch if owner is not None and owner.session == call.session else 0

    def _declared_at(self, conversation: Conversation) -> int:
        found = self._store.prefixes.find(conversation.prefix_id, tenant=conversation.tenant)
        return 0 if found is None else prefix_epoch(found.conversation)

    # -- calls that come again --

    def _known(self, call: Call, method: Method, arguments: dict[str, Any]) -> Outcome | None:
        """What was answered to it, or would have been; None if it was not carried out."""
        answered = self._answered.get(call.session)
        if answered is not None and answered.number == call.number:
            return replace(answered, claimed=None, ended_sessions=())  # which was told
        if call.number > self._store.replica_sessions.session(call.session).last_call:
            return None
        recall = RECALLED.get(call.method)
        outcome, tenant = Outcome(call.number), arguments.get("tenant", "")
        if method.kind is Kind.WRITE:
            outcome.name = tenant, arguments["conversation_id"]
            outcome.epoch = self._epoch(call, arguments["conversation_id"], tenant)
        elif method.kind is Kind.TURN:
            turn_id = arguments["turn_id"]
            arguments.pop("attempt", 0)
            if (found := self._store.replica_sessions.turn(turn_id)) is not None:
                outcome.turn_id, outcome.num_running = turn_id, -1
                outcome.turn_epoch = found.epoch
        try:
            result = recall(self._store, arguments) if recall is not None else None
        except PensieveError as error:
            outcome.result, outcome.failed = wire.error_written(error), True
            return outcome
        if isinstance(result, BeginResult):
            _note_begun(result, outcome)
        elif method.kind is Kind.CREATE and result is not None:
            outcome.name = result.tenant, result.conversation_id
            outcome.epoch = self._epoch(call, result.conversation_id, result.tenant)
        if call.method == "fork_conversation":
            outcome.source_epoch = self._epoch(call, arguments["source_id"], tenant)
        outcome.result, outcome.parts = method.write_result(result)
        return outcome


def _note_begun(begun: BeginResult, outcome: Outcome) -> None:
    if begun.must_run:
        outcome.turn_id, outcome.num_running = begun.turn.turn_id, 1
        outcome.turn_epoch = outcome.epoch


def prefix_epoch(declared: Conversation) -> int:
    """What tells a declared prefix from another one that had its id before."""
    return round(1_000_000 * declared.created_at)


def _is_of_the_database(error: PensieveError) -> bool:
    """A disk, a lock, a damaged page: not a refusal of what was wanted."""
    return isinstance(error, StoreUnavailable | StoreError) and not isinstance(
        error, ErasurePending
    )


def _failed(call: Call, error: Exception) -> Outcome:
    if isinstance(error, PensieveError):
        return Outcome(call.number, wire.error_written(error), failed=True)
    fault = ServerFault("the history service did not foresee this; its log says more")
    return Outcome(call.number, wire.error_written(fault), failed=True, fault=error)
