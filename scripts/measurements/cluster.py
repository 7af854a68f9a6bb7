"""Simulate a cluster of replicas under one clock: conversations talk, replicas come, go and drain.

**Placement** is the routers' own (core/placement.py), with the ownership table of the history service: a
conversation has an owner and an epoch; the owner is asked first, and a new one has a higher epoch.  The loads
that bound it are conversations with a turn in the last `active_seconds`; who does not come back is no load,
and no router can know that earlier.

**A replica that fails** takes its KV and its running turns with it.  Until `lease_seconds` have passed nobody
knows: turns of its conversations wait, also new ones that hash to it.  Then they are run again, and each of
its conversations gets a new home with its next turn.  The new owner computes the log again.

**A replica that drains** ends what it runs and takes nothing more. Its conversations get new homes with their
next turns, and for `drain_seconds` their KV can be had: it is sent where that is through sooner than the new
owner, alone, would have computed it. Then the replica is gone. After a restart it comes back
`restart_seconds` later by the same name, and empty.

**Which replicas are simulated.**  `simulated` of them have the daemon's scheduler, the others count their
turns (cluster_replicas.py), under the same placement and the same conversations; of those that join, the same
share. So loads, moves, logs to compute again and hand-overs are those of all replicas, and first tokens and
what their caches lose are measured in a sample.  With all of them simulated, nothing is supposed.

Events are in one heap by time; of simulated replicas the one whose clock is furthest behind steps, when no
event is due before that.  All that is drawn comes from the seed.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pensieve.core.placement import BOUND, KEEP_BOUND, Loads, Placement
from pensieve.errors import InvalidArgument
from pensieve.sim.cost import CHUNK_TOKENS
from pensieve.sim.workload import HABITS
from scripts.measurements.cluster_events import Happening, Kind, Phase, Tally, parse, phases
from scripts.measurements.cluster_replicas import (
    Conversation,
    Ended,
    Replica,
    SimulatedReplica,
    Submitted,
    Talk,
    recompute_seconds,
    slowest_pace,
)
from scripts.measurements.machine_options import Machine, Progress, add_machine, machine_of, ms

OVER_SHARE = "over its share"
FORK_APART = "fork apart from its parent"
EVENTS = "60:fail:1,150:fail:5%,300:join:10%,420:restart:2%"
FORKS = 0.05  # share of the new conversations
LOOK_SECONDS = 5.0  # from one look at the loads to the next
LEAD_SECONDS = 30.0  # that do not count, after the clock's start: at least so many
EVENTS_PER_REPORT = 20_000


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


class Links:
    """The links over which KV is handed over: one of each direction for every replica, which is a host.

    A hand-over has the whole link of its source and of its target; another one of the same source or target
    waits until it is through.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._out_free: dict[str, float] = {}  # by source: from when on its link is free
        self._in_free: dict[str, float] = {}  # by target

    def ends(self, source: str, target: str, num_bytes: float, now: float) -> float:
        """When a hand-over would be through."""
        begins = max(now, self._out_free.get(source, 0.0), self._in_free.get(target, 0.0))
        return begins + num_bytes / self._rate if self._rate else math.inf

    def reserve(self, source: str, target: str, ends: float) -> None:
        self._out_free[source] = self._in_free[target] = ends


class Cluster:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        talk = setting.talk
        self._starts = talk.before_seconds  # on the replicas' clocks; before it their caches fill
        self._zero = self._starts + max(talk.reaction / 2, LEAD_SECONDS)  # figures count from here
        self._ends = self._zero + setting.seconds
        self._now = self._starts
        names = [f"replica-{number}" for number in range(setting.replicas)]
        self.placement = Placement(names, bound=setting.bound, keep_bound=setting.keep_bound)
        self.loads = Loads()  # conversations with a turn of late, by owner
        self._active: deque[tuple[float, Conversation]] = deque()  # by the begins of their turns
        self.replicas: dict[str, Replica] = {}
        self._num_seen = 0  # replicas so far, also those that are gone
        self._is_simulated: dict[str, bool] = {}
        for name in names:
            self._come(name, 0.0)
        self.links = Links(setting.link_bytes_per_second)
        self.pace = slowest_pace(setting.machine)
        self.tally = Tally(phases(setting.script, setting.seconds))
        self._draw = random.Random(setting.talk.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._busy: list[tuple[float, int, SimulatedReplica]] = []
        self._source: Iterator[Conversation] = iter(())

    def run(self, progress: Callable[[str], None] = lambda line: None) -> Tally:
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
                turns = sum(each.turns for each in self.tally.phases)
                progress(f"at {self._now - self._zero:,.0f} s: {turns:,} turns")
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
            if conversation.messages:
                self._at(conversation.begins, partial(self._come_message, conversation))
            if self._is_simulated[home]:
                past.setdefault(home, []).append(conversation)
            else:
                conversation.past.clear()
        for conversation in sorted(found, key=lambda each: each.active_at):
            self._active.append((conversation.active_at, conversation))
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
        self._expire(now)
        conversation.came_at, conversation.moved_by = now, ""
        if (phase := self._phase(now)) is not None:
            phase.turns += 1
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
        conversation.active_at = now
        self._active.append((now, conversation))
        if not conversation.counted:
            conversation.counted = True
            loads.add(home)
        lost = conversation.length if why else 0
        arrives = 0.0
        if source is not None and lost:
            arrives = self._fetched(source, home, lost)
        received = lost if arrives else 0
        turn = Submitted(conversation, lost - received, received)
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
                    cause.handed_over_bytes += self._bytes_of(received)
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
        """It has a new owner, and a higher epoch."""
        if conversation.counted:
            self.loads.add(conversation.owner, -1)
            self.loads.add(home)
        conversation.owner, conversation.incarnation = home, self.replicas[home].incarnation
        conversation.epoch += 1

    def _expire(self, now: float) -> None:
        """Who has not talked for so long is no load any more."""
        active, least = self._active, now - self.setting.active_seconds
        while active and active[0][0] < least:
            at, conversation = active.popleft()
            if conversation.counted and conversation.active_at == at:
                conversation.counted = False
                self.loads.add(conversation.owner, -1)

    def _bytes_of(self, tokens: int) -> int:
        """Of whole chunks."""
        whole = -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS
        return whole * self.setting.machine.cost.kv_bytes_per_token

    def _fetched(self, source: Replica, target: str, tokens: int) -> float:
        """When its KV is there; 0 if it is not to be had, or sooner computed again."""
        if source.gone or 0 < source.answers_until <= self._now:
            return 0.0
        num_bytes = self._bytes_of(tokens)
        ends = self.links.ends(source.name, target, num_bytes, self._now)
        if ends - self._now >= recompute_seconds(self.setting.machine, tokens):
            return 0.0
        self.links.reserve(source.name, target, ends)
        return ends

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
            self._expire(self._now)
            phase.look(self.placement.serving, self.loads)
            self._at(self._now + LOOK_SECONDS, self._look)

    def _phase(self, at: float) -> Phase | None:
        return self.tally.phase_at(at - self._zero)


def _add_waited(phase: Phase, conversation: Conversation, waited: float) -> None:
    phase.first_tokens.add(waited)
    if conversation.moved_by:
        phase.first_tokens_moved.add(waited)


# -- the command --


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure cluster", description=__doc__)
    add_machine(parser)
    parser.add_argument("--replicas", type=int, default=1000, help="(default: 1000)")
    parser.add_argument("--simulated", type=int, default=8, help="with a scheduler (default: 8)")
    parser.add_argument(
        "--rate", type=float, default=0.5, help="conversations a second of each replica"
    )
    parser.add_argument("--workload", choices=sorted(HABITS), default="sharegpt")
    parser.add_argument("--reaction", type=float, help="seconds (default: the workload's)")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--events", default=EVENTS, help="SECONDS:KIND:COUNT,… (default: %(default)r)"
    )
    parser.add_argument(
        "--network", type=float, default=100.0, help="Gb/s of a host; 0: no hand-over"
    )
    parser.add_argument(
        "--lease", type=float, default=10.0, help="seconds until a failure is known"
    )
    arguments = parser.parse_args(given)
    try:
        script = parse(arguments.events)
    except ValueError as error:
        raise InvalidArgument("events", str(error)) from error
    rate = arguments.rate * arguments.replicas
    talk = Talk(HABITS[arguments.workload], rate, arguments.seed, arguments.reaction, FORKS)
    cluster = Cluster(
        Setting(
            machine_of(arguments),
            talk,
            script,
            arguments.replicas,
            arguments.simulated,
            arguments.seconds,
            link_bytes_per_second=arguments.network * 1e9 / 8,
            lease_seconds=arguments.lease,
        )
    )
    print(
        f"{cluster.setting.machine.cost.source}; {rate:g} conversations a second, {FORKS:.0%} forks"
    )
    print("\n".join(tables(cluster.run(Progress()))))


def tables(tally: Tally) -> Iterator[str]:
    yield "fullest replica over the mean; first tokens, of the replicas that are simulated"
    yield (
        f"{'phase':<26}{'replicas':>9}{'talks':>9}{'turns/s':>9}{'talks':>7}{'turns':>7}{'tokens':>7}"
        f"{'P50 ms':>9}{'P99 ms':>9}{'moved':>8}{'P50 ms':>9}{'P99 ms':>9}{'tokens again':>14}"
    )
    for phase in tally.phases:
        ratios = phase.load_ratios
        spreads = (
            sum(ratios) / len(ratios) if ratios else None,
            phase.spread(phase.turns_of),
            phase.spread(phase.tokens_of),
        )
        first, moved = phase.first_tokens, phase.first_tokens_moved
        yield (
            f"{phase.name[:25]:<26}{phase.replicas:>9,}{phase.conversations:>9,.0f}"
            f"{phase.turns / (phase.until - phase.since):>9,.0f}"
            + "".join("      -" if each is None else f"{each:>7.2f}" for each in spreads)
            + f"{ms(first.quantile(0.5)):>9}{ms(first.quantile(0.99)):>9}{moved.count:>8,}"
            f"{ms(moved.quantile(0.5)):>9}{ms(moved.quantile(0.99)):>9}{phase.recomputed:>14,}"
        )
    yield (
        f"{'cause':<30}{'replicas':>9}{'had':>9}{'lost':>7}{'moved':>9}{'tokens again':>14}"
        f"{'sent':>9}{'GB':>9}"
    )
    for cause in tally.causes.values():
        yield (
            f"{cause.name[:29]:<30}{cause.replicas:>9,}{cause.owned:>9,}{cause.running:>7,}{cause.moved:>9,}"
            f"{cause.recomputed_tokens:>14,}{cause.handed_over:>9,}{cause.handed_over_bytes / 1e9:>9,.1f}"
        )
    yield "(had: conversations active of late; lost: turns that ran, and are run again; sent: by their KV)"


if __name__ == "__main__":
    main()
