"""FastServe's schedule: a skip-join multi-level feedback queue, with KV that goes to the host and back.

Nobody knows how long a reply will be.  So whoever has had little time goes first (which approximates the
shortest remaining time): there are levels with quanta that double, the first of one iteration of a turn that
generates alone.

    joins      the highest level whose quantum its prompt's iteration fits into (it skips those above, in
               which it would only be demoted)
    demoted    to the end of the next level, when it has used its level's quantum
    promoted   to the end of the first level, when it has not run for `STARVING_SECONDS`

Preemption is between iterations.  KV is reserved as Orca's is, for the longest context, in places on the
device; whoever loses its place keeps its KV on the host:

    NEW → DEVICE ⇄ (copied OUT, HOST, copied IN)

Who would run soonest is known from the queue's order.  The first of it, as many as there are places but for a
few (`SPARE_SHARE`), are `wanted`; a place is kept for each wanted one that has none, and a few for whoever
comes (proactive swapping): while too few are free, the last in the order that is not wanted is copied out.
Copies take the link, one after another each way, beside iterations; whose KV is being copied does not run,
and its place is free when it is out.  All others with a place run, wanted or not: nothing is idle while there
is work.  On the host KV takes what it is long, and who finds no room there loses no place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from pensieve.core.iteration_cost import IterationCost
from pensieve.sim.schedules.serving import Request

STARVING_SECONDS = 10.0
SPARE_SHARE = 0.1  # of the places


class Where(Enum):
    """Of a job's KV."""

    NEW = auto()  # there is none yet
    DEVICE = auto()
    OUT = auto()  # on its way to the host
    HOST = auto()
    IN = auto()


ON_DEVICE = (Where.DEVICE, Where.OUT, Where.IN)
ON_HOST = (Where.HOST, Where.OUT, Where.IN)


@dataclass(eq=False, slots=True)
class Job:
    request: Request
    level: int
    entered: int  # its level, as the so-manieth
    last_ran: float
    used_seconds: float = 0.0  # in its level
    where: Where = Where.NEW

    @property
    def order(self) -> tuple[int, int]:
        return (self.level, self.entered)


class FastServeSchedule:
    def __init__(
        self,
        cost: IterationCost,
        copy_seconds: Callable[[int], float],
        device_tokens: int,
        host_tokens: int,
        context_max: int,
        requests_max: int,
    ) -> None:
        self.num_places = min(device_tokens // context_max, requests_max)
        assert self.num_places >= 1, "not one longest request fits"
        self.host_tokens = host_tokens
        self._host_free = host_tokens
        self._num_spare = int(SPARE_SHARE * self.num_places)
        self._cost, self._copy_seconds = cost, copy_seconds
        self.quanta = _quanta(cost, context_max)
        self._jobs: dict[Request, Job] = {}
        self._counts = dict.fromkeys(Where, 0)
        self._copies: list[tuple[float, Job]] = []  # when they are through
        self._out_free = self._in_free = 0.0
        self._num_entered = 0
        self.num_preemptions = 0

    def arrive(self, request: Request) -> None:
        prompt_seconds = self._cost.iteration_seconds([(0, request.prompt_tokens)])
        last = len(self.quanta) - 1
        level = next((n for n in range(last) if self.quanta[n] >= prompt_seconds), last)
        job = Job(request, level, self._next_entry(), request.arrived)
        self._jobs[request] = job
        self._counts[Where.NEW] += 1

    def plan(self, now: float) -> Sequence[Request]:
        self._end_copies(now)
        self._promote(now)
        ordered = sorted(self._jobs.values(), key=lambda job: job.order)
        wanted = ordered[: self.num_places - self._num_spare]
        lacking = [job for job in wanted if job.where in (Where.NEW, Where.HOST)]
        num_placed = 0
        for job in lacking:
            if not self._num_free:
                break
            self._give_place(job, now)
            num_placed += 1
        if len(ordered) > self.num_places - self._num_spare:
            self._make_room(ordered, set(wanted), len(lacking) - num_placed, now)
        return [job.request for job in ordered if job.where is Where.DEVICE]

    @property
    def _num_free(self) -> int:
        return self.num_places - sum(self._counts[where] for where in ON_DEVICE)

    def _give_place(self, job: Job, now: float) -> None:
        if job.where is Where.NEW:
            self._move(job, Where.DEVICE)
            return
        self._in_free = max(now, self._in_free) + self._copy_seconds(job.request.computed)
        self._copies.append((self._in_free, job))
        self._move(job, Where.IN)

    def _make_room(
        self, ordered: Sequence[Job], wanted: set[Job], num_lacking: int, now: float
    ) -> None:
        """Copies out those that run last, until there is room for who lacks a place and for who comes."""
        room = self._num_free + self._counts[Where.OUT]
        needed = max(num_lacking, self._num_spare)
        for job in reversed(ordered):
            if room >= needed or job in wanted:
                break  # wanted ones are the first: from here on there are only those
            tokens = job.request.computed
            if job.where is Where.DEVICE and tokens <= self._host_free:
                self._host_free -= tokens
                self._out_free = max(now, self._out_free) + self._copy_seconds(tokens)
                self._copies.append((self._out_free, job))
                self._move(job, Where.OUT)
                self.num_preemptions += 1
                room += 1

    def _end_copies(self, now: float) -> None:
        for ended, job in self._copies:
            if ended <= now and job.where is Where.IN:
                self._host_free += job.request.computed
                self._move(job, Where.DEVICE)
            elif ended <= now:
                self._move(job, Where.HOST)
        self._copies = [copy for copy in self._copies if copy[0] > now]

    def _promote(self, now: float) -> None:
        for job in self._jobs.values():
            if job.level and now - job.last_ran >= STARVING_SECONDS:
                job.last_ran = now  # it waits anew
                self._enter(job, 0)

    def ran(self, requests: Sequence[Request], begun: float, ended: float) -> None:
        for request in requests:
            job = self._jobs[request]
            if request.has_ended:
                self._counts[job.where] -= 1
                del self._jobs[request]
                continue
            job.last_ran = ended
            job.used_seconds += ended - begun
            if job.used_seconds >= self.quanta[job.level] and job.level < len(self.quanta) - 1:
                self._enter(job, job.level + 1)

    def _enter(self, job: Job, level: int) -> None:
        job.level, job.used_seconds, job.entered = level, 0.0, self._next_entry()

    def _next_entry(self) -> int:
        self._num_entered += 1
        return self._num_entered

    def _move(self, job: Job, where: Where) -> None:
        self._counts[job.where] -= 1
        self._counts[where] += 1
        job.where = where

    def wakes_at(self) -> float:
        return min((ended for ended, _ in self._copies), default=math.inf)

    def level_of(self, request: Request) -> int:
        return self._jobs[request].level

    def check(self) -> None:
        places = [job.where for job in self._jobs.values()]
        assert all(self._counts[where] == places.count(where) for where in Where)
        assert sum(self._counts[where] for where in ON_DEVICE) <= self.num_places
        on_host = sum(job.request.computed for job in self._jobs.values() if job.where in ON_HOST)
        assert self._host_free == self.host_tokens - on_host >= 0
        copied = {job for _, job in self._copies}
        assert all(
            (job.where in (Where.OUT, Where.IN)) == (job in copied) for job in self._jobs.values()
        )
        for request, job in self._jobs.items():
            assert job.where is not Where.NEW or not request.computed


def _quanta(cost: IterationCost, context_max: int) -> list[float]:
    """Double until a longest prompt and a longest reply fit into the last, alone."""
    quanta = [cost.decode_seconds(1, 1)]
    longest = cost.iteration_seconds([(0, context_max)]) + context_max * quanta[0]
    while quanta[-1] < longest:
        quanta.append(2 * quanta[-1])
    return quanta
