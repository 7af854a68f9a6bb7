"""A cluster of replicas under one clock: conversations talk, replicas come, go and drain.

**Placement** is the routers' own (core/placement.py), with the ownership table of the history service: a
conversation has an owner and an epoch; the owner is asked first, and a new one has a higher epoch.  The loads
that bound it are conversations with a turn in the last `active_seconds`; who does not come back is no load,
and no router can know that earlier.

**A replica that fails** takes its KV and its running turns with it.  Until `lease_seconds` have passed nobody
knows: turns of its conversations wait, also new ones that hash to it.  Then they are run again, and each of
its conversations gets a new home with its next turn.  The new owner computes the log again.

**A replica that drains** ends what it runs and takes nothing more.  Its conversations get new homes with
their next turns, and for `drain_seconds` their KV can be had: it is sent where that is through
sooner than the new owner, alone, would have computed it (hand_over.py).  With `push`
those that were active of late move at once, the latest first, or when their turn ends, and all their KV is
sent.  Then the replica is gone.  After a restart it comes back `restart_seconds` later by the same
name, and empty.

**Which replicas are simulated.**  `simulated` of them have the daemon's scheduler, the others count their
turns (replica.py), under the same placement and the same conversations; of those that join, the same share.
So loads, moves, logs to compute again and hand-overs are those of all replicas, and first tokens and what
their caches lose are measured in a sample.  With all of them simulated, nothing is supposed.

Events are in one heap by time; of simulated replicas the one whose clock is furthest behind steps, when no
event is due before that.  All that is drawn comes from the seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pensieve.core.placement import BOUND, KEEP_BOUND
from pensieve.sim.cluster.conversations import Conversation, Talk
from pensieve.sim.cluster.hand_over import HandOver
from pensieve.sim.cluster.network import Links
from pensieve.sim.cluster.owners import Owners
from pensieve.sim.cluster.replica import (
    Ended,
    Machine,
    Replica,
    SimulatedReplica,
    Submitted,
    slowest_pace,
)
from pensieve.sim.cluster.script import Happening, Kind, phases
from pensieve.sim.cluster.tally import Phase, Tally

OVER_SHARE = "over its share"
FORK_APART = "fork apart from its parent"
SENT_AHEAD = "sent ahead"
LOOK_SECONDS = 5.0  # from one look at the loads to the next
LEAD_SECONDS = 30.0  # that do not count, after the clock's start: at least so many
EVENTS_PER_REPORT = 20_000

Progress = Callable[[float, int], None]  # seconds, turns so far


@dataclass(frozen=True)
class Setting:
    """What is simulated."""

    machine: Machine
    talk: Talk
    script: tuple[Happening, ...]
    replicas: int = 1000
    simulated: int = 8
    seconds: float = 600.0
    bound: float = BOUND
    keep_bound: float = KEEP_BOUND
    link_bytes_per_second: float = 12.5e9  # of a host, each way; 0: no KV is handed over
    lease_seconds: float = 10.0
    drain_seconds: float = 60.0
    restart_seconds: float = 60.0
    active_seconds: float = 300.0
    push: bool = False  # who drains sends all KV at once; else what is wanted is fetched


class Cluster:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        talk = setting.talk
        self._starts = talk.before_seconds  # on the replicas' clocks; before it their caches fill
        self._zero = self._starts + max(talk.reaction / 2, LEAD_SECONDS)  # figures count from here
        self._ends = self._zero + setting.seconds
        self._now = self._starts
        names = [f"replica-{number}" for number in range(setting.replicas)]
        self._owners = Owners(names, setting.bound, setting.keep_bound, setting.active_seconds)
        self.placement, self.loads = self._owners.placement, self._owners.loads
        self.replicas: dict[str, Replica] = {}
        self._num_seen = 0  # replicas so far, also those that are gone
        self._is_simulated: dict[str, bool] = {}
        for name in names:
            self._come(name, 0.0)
        self._hand_over = HandOver(setting.machine, setting.link_bytes_per_second)
        self.pace = slowest_pace(setting.machine)
        self.tally = Tally(phases(setting.script, setting.seconds))
        self._draw = random.Random(setting.talk.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._busy: list[tuple[float, int, SimulatedReplica]] = []
        self._source: Iterator[Conversation] = iter(())

    @property
    def links(self) -> Links | None:
        """None where no KV is handed over."""
        return self._hand_over.links

    def run(self, progress: Progress = lambda now, turns: None) -> Tally:
        self._begin_load()
        for happening in self.setting.script:
            self._at(self._zero + happening.at, partial(self._happens, happening))
        self._at(self._zero, self._look)
        num_done = 0
        while True:
            due = self._events[0][0]
            if self._busy and self._busy[0][0] < due:
                self._step(heapq.heappop(self._busy)[2])
            elif due > self._ends:
                break
            else:
                self._now, _, act = heapq.heappop(self._events)
                act()
            num_done += 1
            if num_done % EVENTS_PER_REPORT == 0:
                progress(self._now - self._zero, sum(each.turns for each in self.tally.phases))
        self._count_waiting()
        return self.tally

    def _at(self, at: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, act))

    def _step(self, replica: SimulatedReplica) -> None:
        if replica.gone:
            return
        busy, ended = replica.step()
        for each in ended:
            self._at(each.at, partial(self._end, replica, each))
        replica.is_busy = busy
        if busy:
            self._awake(replica)

    def _awake(self, replica: SimulatedReplica) -> None:
        replica.is_busy = True
        self._num_events += 1
        heapq.heappush(self._busy, (replica.clock.now(), self._num_events, replica))

    # -- the load --

    def _begin_load(self) -> None:
        """Those in progress get their homes as they began, and their logs are in the caches."""
        self._source = self.setting.talk.conversations(
            self._starts, self._ends, self.setting.active_seconds
        )
        past: dict[str, list[Conversation]] = {}
        found = []
        for conversation in self._source:
            if not conversation.length:
                self._at(conversation.begins, partial(self._first, conversation))
                break
            found.append(conversation)
            home = self.placement.home(conversation.name, self.loads)
            self._own(conversation, home)
            self.loads.add(home)
            conversation.counted = True
            conversation.plain = self.placement.home(conversation.name)
            if conversation.messages:
                self._at(conversation.begins, partial(self._come_message, conversation))
            if self._is_simulated[home]:
                past.setdefault(home, []).append(conversation)
            else:
                conversation.past.clear()
        self._owners.fill(found)
        for name, conversations in past.items():
            replica = self.replicas[name]
            assert isinstance(replica, SimulatedReplica)
            replica.fill(conversations)

    def _first(self, conversation: Conversation) -> None:
        """A new conversation begins, and the one after it is due."""
        following = next(self._source, None)
        if following is not None:
            self._at(following.begins, partial(self._first, following))
        if conversation.parent is not None:
            conversation.length = conversation.parent.length
        self._come_message(conversation)

    def _come_message(self, conversation: Conversation) -> None:
        """A message comes: its turn counts, once."""
        now = self._now
        self._owners.expire(now)
        conversation.came_at, conversation.moved_by = now, ""
        plain = self.placement.home(conversation.name)
        phase = self._phase(now)
        if phase is not None:
            message = conversation.messages[0]
            tokens = message.input_tokens + message.output_tokens
            phase.turns += 1
            phase.by_second[int(now - self._zero)] += 1
            phase.plain_turns_of[plain] += 1
            if conversation.plain and plain != conversation.plain:
                phase.plain_moved += 1
                tokens += conversation.length
            phase.plain_tokens_of[plain] += tokens
        conversation.plain = plain
        self._begin(conversation)

    def _begin(self, conversation: Conversation) -> None:
        """Its turn begins at its home, which may be a new one; or later, if that is gone unknown to all."""
        now, loads = self._now, self.loads
        owner = self.replicas.get(conversation.owner)
        if owner is not None and self._waits_for(owner, conversation):
            return
        parent = conversation.parent if not conversation.epoch else None
        home = self.placement.home(
            conversation.name,
            loads,
            owner=conversation.owner,
            parent=parent.owner if parent else "",
        )
        replica = self.replicas[home]
        if self._waits_for(replica, conversation):
            return
        back = owner is not None and owner.incarnation != conversation.incarnation
        fresh = home != conversation.owner or back
        source, why = None if back else owner, ""
        if parent is not None and home != parent.owner:
            source, why = self.replicas.get(parent.owner), FORK_APART
        elif owner is not None and fresh:
            why = (owner.returned_from if back else owner.cause) or OVER_SHARE
        if fresh:
            self._own(conversation, home)
            conversation.arrives = 0.0
        self._owners.begin(conversation, now)
        lost = conversation.length if why else 0
        arrives = 0.0
        if source is not None and lost:
            arrives = self._hand_over.fetched(source, home, lost, now)
        received = lost if arrives else 0
        turn = Submitted(conversation, lost - received, received)
        if conversation.arrives:  # it was sent ahead
            turn = Submitted(conversation, 0, conversation.length)
            conversation.moved_by = SENT_AHEAD
            arrives, fresh, conversation.arrives = max(conversation.arrives, now), True, 0.0
        replica.running[conversation.name] = turn
        phase = self._phase(conversation.came_at)
        if phase is not None:
            message = conversation.messages[0]
            phase.turns_of[home] += 1
            phase.tokens_of[home] += message.input_tokens + message.output_tokens + turn.recomputed
            phase.recomputed += turn.recomputed
        if why:
            conversation.moved_by = why
            if now >= self._zero:
                cause = self.tally.cause(why)
                cause.moved += 1
                cause.recomputed_tokens += turn.recomputed
                if received:
                    cause.handed_over += 1
                    cause.handed_over_bytes += self._hand_over.bytes_of(received)
        fork_of = parent.name if parent is not None and not why and conversation.length else ""
        submit = partial(self._submit, replica, turn, fork_of, fresh)
        if arrives:
            self._at(arrives, submit)
        else:
            submit()

    def _waits_for(self, replica: Replica, conversation: Conversation) -> bool:
        """Until it is known that this one is gone."""
        if not replica.gone or replica.found_gone_at <= self._now:
            return False
        self._at(replica.found_gone_at, partial(self._begin, conversation))
        return True

    def _submit(self, replica: Replica, turn: Submitted, fork_of: str, fresh: bool) -> None:
        if replica.running.get(turn.conversation.name) is not turn:
            return  # the replica is gone, and the turn begins elsewhere
        if isinstance(replica, SimulatedReplica):
            replica.submit(turn, self._now, fork_of, fresh)
            if not replica.is_busy:
                self._awake(replica)
        else:
            ended = replica.counted_end(turn, self._now, self.setting.machine, self.pace)
            self._at(ended.at, partial(self._end, replica, ended))

    def _end(self, replica: Replica, ended: Ended) -> None:
        """Of a turn; its conversation goes on after a while."""
        conversation = ended.turn.conversation
        if replica.running.get(conversation.name) is not ended.turn:
            return  # the replica is gone: nobody has seen this end
        del replica.running[conversation.name]
        message = conversation.messages.popleft()
        if ended.first_token_at is None:
            self.tally.refused += 1
        else:
            conversation.length += message.input_tokens + message.output_tokens
            if isinstance(replica, SimulatedReplica):
                self._measure(conversation, ended, ended.first_token_at, message.output_tokens)
        if self._pushes(replica):
            self._push(replica, conversation)
        if conversation.messages:
            after = conversation.messages[0].after
            self._at(ended.at + after, partial(self._come_message, conversation))

    def _measure(
        self, conversation: Conversation, ended: Ended, first_token_at: float, outputs: int
    ) -> None:
        waited = first_token_at - conversation.came_at
        if not conversation.moved_by:
            self.pace.learn(waited, (ended.at - first_token_at) / max(outputs, 1))
        phase = self._phase(conversation.came_at)
        if phase is not None:
            phase.history_tokens += ended.history_tokens
            phase.history_recomputed += ended.recomputed_tokens
            _add_waited(phase, conversation, waited)

    def _count_waiting(self) -> None:
        """Turns that wait at the end count as if their first tokens came now."""
        for replica in self.replicas.values():
            if isinstance(replica, SimulatedReplica) and not replica.gone:
                for turn in replica.waiting():
                    conversation = turn.conversation
                    phase = self._phase(conversation.came_at)
                    if phase is not None:
                        _add_waited(phase, conversation, self._ends - conversation.came_at)

    # -- owners --

    def _own(self, conversation: Conversation, home: str) -> None:
        self._owners.own(conversation, home, self.replicas[home].incarnation)

    def _push(self, replica: Replica, conversation: Conversation) -> None:
        """It moves now, before its next turn, and all its KV is sent."""
        if conversation.name in replica.running or not conversation.length:
            return
        self._own(conversation, self.placement.home(conversation.name, self.loads))
        conversation.arrives = self._hand_over.pushed(
            replica,
            conversation.owner,
            conversation.length,
            self._now,
            self.tally.cause(replica.cause),
        )

    def _pushes(self, replica: Replica) -> bool:
        """It drains, and sends what it has."""
        drains = not replica.gone and replica.answers_until > self._now
        return drains and self.setting.push and self._hand_over.links is not None

    # -- what happens to replicas --

    def _come(self, name: str, now: float) -> None:
        """A replica, empty; the simulated ones are spread evenly over those that come."""
        share = self.setting.simulated / self.setting.replicas
        if name not in self._is_simulated:
            self._num_seen += 1
            before, after = ((self._num_seen - each) * share for each in (1, 0))
            self._is_simulated[name] = int(after + 1e-9) > int(before + 1e-9)
        before_it = self.replicas.get(name)
        incarnation = before_it.incarnation + 1 if before_it else 0
        returned_from = before_it.cause if before_it else ""
        if self._is_simulated[name]:
            self.replicas[name] = SimulatedReplica(
                name, incarnation, returned_from, self.setting.machine, now
            )
        else:
            self.replicas[name] = Replica(name, incarnation, returned_from)

    def _happens(self, happening: Happening) -> None:
        serving = self.placement.serving
        count = happening.replicas(len(serving))
        cause = self.tally.cause(f"{happening} at {happening.at:g} s")
        cause.at, cause.replicas = happening.at, count
        if happening.kind is Kind.JOIN:
            names = [f"replica-{self._num_seen + number}" for number in range(count)]
            for name in names:
                self._come(name, self._now)
            self.placement.add(*names)
            return
        if not count:
            return  # the last one stays
        chosen = sorted(self._draw.sample(serving, count))
        for name in chosen:
            replica = self.replicas[name]
            replica.cause = cause.name
            cause.owned += self.loads.of(name)
        if happening.kind is Kind.FAIL:
            self._at(self._now + self.setting.lease_seconds, partial(self._found_gone, chosen))
            self._fail(chosen, self.setting.lease_seconds)
            return
        self.placement.drain(*chosen)
        gone_at = self._now + self.setting.drain_seconds
        for name in chosen:
            self.replicas[name].answers_until = gone_at
        if self._pushes(self.replicas[chosen[0]]):
            for conversation in self._owners.active_of(set(chosen)):
                self._push(self.replicas[conversation.owner], conversation)
        self._at(gone_at, partial(self._drained, chosen))
        if happening.kind is Kind.RESTART:
            back_at = gone_at + self.setting.restart_seconds
            self._at(back_at, partial(self._come_back, chosen))

    def _fail(self, names: Sequence[str], lease_seconds: float) -> None:
        for name in names:
            replica = self.replicas[name]
            replica.gone, replica.found_gone_at = True, self._now + lease_seconds
            lost, replica.running = list(replica.running.values()), {}
            self.tally.cause(replica.cause).running += len(lost)
            for turn in lost:
                self._at(replica.found_gone_at, partial(self._begin, turn.conversation))

    def _found_gone(self, names: Sequence[str]) -> None:
        self.placement.remove(*names)

    def _drained(self, names: Sequence[str]) -> None:
        """A turn that still runs is interrupted, and run again elsewhere at once."""
        self.placement.remove(*names)
        self._fail(names, 0.0)

    def _come_back(self, names: Sequence[str]) -> None:
        for name in names:
            self._come(name, self._now)
        self.placement.add(*names)

    def _look(self) -> None:
        phase = self._phase(self._now)
        if phase is not None:
            self._owners.expire(self._now)
            phase.look(self.placement.serving, self.loads, self._owners.plain_loads)
            self._at(self._now + LOOK_SECONDS, self._look)

    def _phase(self, at: float) -> Phase | None:
        return self.tally.phase_at(at - self._zero)


def _add_waited(phase: Phase, conversation: Conversation, waited: float) -> None:
    phase.first_tokens.add(waited)
    if conversation.moved_by:
        phase.first_tokens_moved.add(waited)
