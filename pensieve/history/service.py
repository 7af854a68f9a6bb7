"""gRPC's HistoryService: sessions of replicas, and their calls, which the store's thread carries out.

    a call comes ──> waits ──> carried out with all that wait ──commit──> answered
    a read comes ──> the read thread ──> answered           (verify: a thread of its own)

The loop puts calls into one line in the order in which they come, so a session's calls keep theirs.  A group
is what waits when the store's thread has time: one commit for many replicas when there are many, and no
delay when there is one.  An answer leaves when its group is on the disk, and a replica that is away by then
asks again when it is back; what it asks again while it still waits in line is not put there twice.

A session ends in the store's thread, between two groups; what its replica still has in the line is refused
there.  So from the end of a session on nothing of it is written, whatever is under way.

A replica that begins a session ends the one that its name had.  Who had that one, and comes back with it, is
another daemon of the same name and is refused for as long as the newer one lasts; only where the newer one
followed the very session that is named may it be the caller's own, of whose beginning it has not heard.

Everything that changes whose a conversation is goes to `record`, in the order of the commits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pensieve.conversations.threads import Threads, aside
from pensieve.errors import AlreadyExists, InvalidArgument, PensieveError, StoreError, Unavailable
from pensieve.history.connection import PROTOCOL_VERSION
from pensieve.history.presence import Presence, Present
from pensieve.store.conversation_store import ConversationStore
from pensieve.store.history_reader import HistoryReader
from pensieve.store.records import ID_PATTERN
from pensieve.store.remote import wire
from pensieve.store.remote.calls import Call, Calls, Outcome
from pensieve.store.remote.methods import METHODS, Kind
from pensieve.store.replica_sessions import NOBODY, Session
from pensieve.v1 import history_pb2 as pb
from pensieve.v1 import history_pb2_grpc

log = logging.getLogger("pensieve")
LEASE_SECONDS = 10.0
GROUP_MAX = 256  # calls of a commit
LOOKS_PER_LEASE = 8
Record = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class HistoryConfig:
    lease_seconds: float = LEASE_SECONDS


class HistoryService(history_pb2_grpc.HistoryServiceServicer):
    def __init__(
        self,
        store: ConversationStore,
        threads: Threads,
        config: HistoryConfig | None = None,
        *,
        refusal: Callable[[], PensieveError | None] = lambda: None,
        record: Record | None = None,
    ) -> None:
        """`refusal` of whatever would write, where the history is damaged; `record` gets events as JSON."""
        config = config or HistoryConfig()
        self.presence = Presence(config.lease_seconds, threads.loop.time)
        sessions = store.replica_sessions.open_sessions()
        self.presence.begin(sessions, store.replica_sessions.running_turns())
        self.num_calls = 0
        self.num_groups = 0
        self._store, self._threads = store, threads
        self._reader: HistoryReader = store.reader()
        self._calls = Calls(store, self.presence.may_be_back)
        self._line: deque[Call] = deque()
        self._is_at_work = False
        self._is_late = False  # what `watch` does, and the log says so
        self._verifying: dict[str, asyncio.Task[Outcome]] = {}  # by arguments
        self._refusal = refusal
        self._record = record
        self._note(event="started", sessions={each.number: each.replica for each in sessions})

    async def watch(self) -> None:
        """End the sessions of those that are silent, and balance; for as long as the service serves."""
        pause, now = self.presence.lease_seconds / LOOKS_PER_LEASE, self._threads.loop.time
        while True:
            began = now()
            await asyncio.sleep(pause)
            if (away := now() - began - pause) > pause:
                self.presence.excuse(away)
            try:
                for present in self.presence.overdue():
                    await self._end(present, "its lease ran out")
                for present, names in self.presence.over_share():
                    await self._balance(present, names)
                self._is_late = False
            except PensieveError as error:  # a full disk, a server that is away: tried again
                if not self._is_late:
                    log.error("sessions could not be looked through: %s", error)
                self._is_late = True

    async def _balance(self, present: Present, names: Sequence[tuple[str, str]]) -> None:
        """Have a replica give up conversations, so many at a time: calls wait meanwhile."""
        for start in range(0, len(names), GROUP_MAX):
            some = names[start : start + GROUP_MAX]
            await self._threads.in_store("", self._give_up, present.session.number, some)
            for name in some:
                present.recent.pop(name, None)
        log.info("%s gives up %d conversations", present.session.replica, len(names))

    def _give_up(self, session: int, names: Sequence[tuple[str, str]]) -> None:
        """In the store's thread: whoever is called for these conversations next takes them."""
        with self._store.group():
            for tenant, conversation_id in names:
                self._store.replica_sessions.give_up(conversation_id, session, tenant=tenant)

    def close(self) -> None:
        """The threads have ended."""
        self._reader.close()

    # -- gRPC --

    async def Serve(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        opening = await anext(aiter(requests), None)
        if opening is None or not opening.HasField("open"):
            raise InvalidArgument("open", "is the first word of a replica")
        session, goes_on = await self._opened(opening.open)
        outgoing: asyncio.Queue[pb.ServeResponse] = asyncio.Queue()
        present = self.presence.connect(session, outgoing)
        if not goes_on:
            present.follows = opening.open.session
        opened = pb.Opened(
            session=session.number, goes_on=goes_on, lease_seconds=self.presence.lease_seconds
        )
        outgoing.put_nowait(pb.ServeResponse(opened=opened))
        writing = asyncio.create_task(_write(outgoing, context))
        try:
            async for request in requests:
                self.presence.heard(present)
                if request.HasField("call"):
                    self._take(present, request.call)
                elif request.HasField("alive"):
                    outgoing.put_nowait(pb.ServeResponse(alive=pb.Alive()))
                elif request.HasField("open"):
                    await self._moved(present, request.open)
                elif request.HasField("drain"):
                    present.is_draining = True
                    await self._threads.in_store("", self._calls.drain, present.session.number)
                elif request.HasField("leave"):
                    await self._end(present, "it has left")
        except asyncio.CancelledError:
            if present.outgoing is outgoing:
                raise  # its replica is gone, or the service stops
            raise Unavailable("the session has ended, or goes on with another stream") from None
        finally:
            writing.cancel()
            self.presence.away(present, outgoing)

    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateResponse:
        owner = await self._threads.in_store(
            "", self._store.replica_sessions.owner, request.conversation_id, tenant=request.tenant
        )
        present = None if owner is None else self.presence.find(owner.session)
        if owner is None or present is None:
            return pb.LocateResponse()
        session = present.session
        return pb.LocateResponse(
            replica=session.replica,
            address=session.address,
            http_address=session.http_address,
            epoch=owner.epoch,
        )

    async def ListReplicas(
        self, request: pb.ListReplicasRequest, context: Any
    ) -> pb.ListReplicasResponse:
        now = self._threads.loop.time()
        return pb.ListReplicasResponse(
            replicas=[
                pb.Replica(
                    name=each.session.replica,
                    address=each.session.address,
                    http_address=each.session.http_address,
                    metrics_address=each.session.metrics_address,
                    connected=self.presence.is_connected(each.session.number),
                    num_running=len(each.running),
                    num_conversations=each.num_recent(now),
                    session=each.session.number,
                )
                for each in sorted(self.presence.all(), key=lambda each: each.session.replica)
            ]
        )

    # -- sessions --

    async def _opened(self, opening: pb.OpenSession) -> tuple[Session, bool]:
        if opening.version != PROTOCOL_VERSION:
            raise InvalidArgument(
                "version", f"is {opening.version}, and this history speaks {PROTOCOL_VERSION}"
            )
        if not ID_PATTERN.fullmatch(opening.replica):
            raise InvalidArgument("replica", "must be 1 to 128 of A-Z a-z 0-9 . _ ~ -")
        known = self.presence.find(opening.session)
        if known is not None and known.session.replica == opening.replica:
            await self._moved(known, opening)
            if self.presence.find(opening.session) is known:
                return known.session, True
        self._refuse_namesake(opening)
        session = Session(
            NOBODY,
            opening.replica,
            opening.address,
            opening.http_address,
            opening.metrics_address,
        )
        opened = await self._threads.in_store("", self._calls.open_session, session)
        for present in self.presence.all():
            if present.session.replica == opening.replica:
                self._ended(present.session.number, "its replica began another one")
        log.info("replica %s is here (session %d)", opened.replica, opened.number)
        self._note(event="opened", session=opened.number, replica=opened.replica)
        return opened, False

    def _refuse_namesake(self, opening: pb.OpenSession) -> None:
        """Another daemon has its name, and began later than the session that it wants to go on with."""
        for present in self.presence.all():
            if (
                present.session.replica == opening.replica
                and opening.session != NOBODY
                and present.follows not in (None, opening.session)
            ):
                raise AlreadyExists(
                    f"another daemon has the name {opening.replica!r} now"
                    f" ({present.session.address or 'it has no address yet'}): each needs its own"
                )

    async def _moved(self, present: Present, opening: pb.OpenSession) -> None:
        moved = replace(
            present.session,
            address=opening.address,
            http_address=opening.http_address,
            metrics_address=opening.metrics_address,
        )
        if moved != present.session:
            await self._threads.in_store("", self._store.replica_sessions.move_session, moved)
            present.session = moved

    async def _end(self, present: Present, why: str) -> None:
        number = present.session.number
        await self._threads.in_store("", self._calls.end_session, number)
        self._ended(number, why)

    def _ended(self, number: int, why: str) -> None:
        present = self.presence.remove(number)
        if present is not None:
            log.info("replica %s is gone: %s", present.session.replica, why)
            self._note(event="ended", session=number, replica=present.session.replica, why=why)

    # -- calls --

    def _take(self, present: Present, call: pb.Call) -> None:
        method = METHODS.get(call.method)
        if method is not None and method.kind is Kind.READ:
            self._threads.spawn(self._read(present, call))
            return
        if call.number in present.under_way:
            return  # it came on a stream that broke; its answer goes to the one that there is
        present.under_way.add(call.number)
        self._line.append(
            Call(
                *(present.session.number, call.number, call.method, call.arguments),
                list(call.parts),
                call.again,
            )
        )
        if not self._is_at_work:
            self._is_at_work = True
            self._threads.spawn(self._work())

    async def _work(self) -> None:
        """Until nothing waits."""
        while self._line:
            calls = [self._line.popleft() for _ in range(min(GROUP_MAX, len(self._line)))]
            damage = self._refusal()
            if damage is not None:
                calls = [each for each in calls if not self._refused(each, damage)]
            outcomes = await self._threads.in_store("", self._calls.carry_out, calls)
            self.num_calls += len(calls)
            self.num_groups += 1
            for call, outcome in zip(calls, outcomes, strict=True):
                self._tell(call, outcome)
        self._is_at_work = False

    def _refused(self, call: Call, damage: PensieveError) -> bool:
        method = METHODS.get(call.method)
        if method is None or not method.writes:
            return False
        self._tell(call, Outcome(call.number, wire.error_written(damage), failed=True))
        return True

    def _tell(self, call: Call, outcome: Outcome) -> None:
        if outcome.fault is not None:
            log.error("a call failed unexpectedly: %s", call.method, exc_info=outcome.fault)
        for session in outcome.ended_sessions:
            self._ended(session, "another replica could not reach it")
        present = self.presence.find(call.session)
        if (claimed := outcome.claimed) is not None:
            self._note(event="claimed", **claimed._asdict())
        if present is None:
            return
        present.under_way.discard(call.number)
        if outcome.turn_id:
            self._turn_changed(present, call.method, outcome)
        if outcome.name is not None:
            present.used(*outcome.name, self._threads.loop.time())
        self._send(present, outcome)

    def _turn_changed(self, present: Present, method: str, outcome: Outcome) -> None:
        """A turn has begun or ended; a call that came again may say so twice."""
        turn_id, running = outcome.turn_id, present.running
        has_begun = outcome.num_running > 0
        if (turn_id in running) is has_begun:
            return
        more: dict[str, Any] = {"how": method}
        if has_begun:
            running.add(turn_id)
            if outcome.name is not None:
                more["tenant"], more["conversation_id"] = outcome.name
        else:
            running.discard(turn_id)
        self._note(
            event="begun" if has_begun else "ended",
            session=present.session.number,
            turn_id=turn_id,
            epoch=outcome.turn_epoch,
            **more,
        )

    def _send(self, present: Present, outcome: Outcome) -> None:
        if present.outgoing is not None:
            answer = pb.Answer(
                number=outcome.number,
                result=outcome.result,
                parts=outcome.parts,
                failed=outcome.failed,
                epoch=outcome.epoch,
                previous_address=outcome.previous_address,
                source_epoch=outcome.source_epoch,
            )
            present.outgoing.put_nowait(pb.ServeResponse(answer=answer))

    async def _read(self, present: Present, call: pb.Call) -> None:
        if METHODS[call.method].is_long:
            outcome = replace(await self._verified(call), number=call.number)
        else:
            outcome = await self._threads.in_reader("", self._read_there, call)
        self._send(present, outcome)

    async def _verified(self, call: pb.Call) -> Outcome:
        """Beside the read thread, as verify has a connection of its own; once for all who ask meanwhile."""
        task = self._verifying.get(call.arguments)
        if task is None:
            task = asyncio.create_task(aside(self._read_there, call))
            self._verifying[call.arguments] = task
            task.add_done_callback(lambda done: self._verifying.pop(call.arguments, None))
        return await asyncio.shield(task)

    def _read_there(self, call: pb.Call) -> Outcome:
        """In the read thread, or beside it."""
        method = METHODS[call.method]
        try:
            arguments = method.read_arguments(call.arguments, list(call.parts))
            target = self._store if "." not in call.method else self._reader
            result, parts = method.write_result(method.run(target, arguments))
        except wire.Unreadable as error:
            refused = InvalidArgument("arguments", str(error))
            return Outcome(call.number, wire.error_written(refused), failed=True)
        except PensieveError as error:
            return Outcome(call.number, wire.error_written(error), failed=True)
        except Exception:
            log.exception("a read failed unexpectedly: %s", call.method)
            failed = StoreError(
                "the history could not be read; the history service's log says more"
            )
            return Outcome(call.number, wire.error_written(failed), failed=True)
        return Outcome(call.number, result, parts)

    def _note(self, **event: Any) -> None:
        if self._record is not None:
            self._record({"at": time.time(), **event})


async def _write(outgoing: asyncio.Queue[pb.ServeResponse], context: Any) -> None:
    while True:
        await context.write(await outgoing.get())
