"""Schedules of other servers to compare with: Orca, vLLM and FastServe, on the simulator's costs and clock.

These servers have requests, but no conversations and no cache between requests. A schedule decides which
requests are in the next iteration, and holds their KV. A request in an iteration computes all of its missing
KV and generates one token. At first, the KV of the whole prompt is missing. After a preemption, the KV of the
generated tokens is missing, too.

    arrive → [waits] → plan, plan, … (one token each) → last token → gone

An iteration takes the cost model's time for its slices in one pass, as with the daemon's own scheduler
(sim/executor.py). The figures are the same `SimulationFigures`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from pensieve.core.cost import IterationCost
from pensieve.sim.executor import VirtualClock
from pensieve.sim.simulator import SimulationFigures
from pensieve.sim.trace import Arrival


@dataclass(eq=False, slots=True)
class Request:
    number: int  # in the order of arrival
    arrived: float
    prompt_tokens: int
    output_tokens: int  # length of its reply; no schedule looks at it
    num_outputs: int = 0  # generated so far
    computed: int = 0  # positions with KV
    last_token: float | None = None  # time of its last token

    @property
    def length(self) -> int:
        """Return the number of positions with KV after its next iteration."""
        return self.prompt_tokens + self.num_outputs

    @property
    def has_ended(self) -> bool:
        return self.num_outputs == self.output_tokens


class Schedule(Protocol):
    def arrive(self, request: Request) -> None: ...

    def plan(self, now: float) -> Sequence[Request]:
        """Return the requests of the next iteration; empty if all wait or there are none."""
        ...

    def ran(self, requests: Sequence[Request], begun: float, ended: float) -> None:
        """Note that these requests got their tokens; remove those that have ended."""
        ...

    def wakes_at(self) -> float:
        """Return the next time when `plan` may return other requests although none arrives; inf: never."""
        ...

    def check(self) -> None:
        """Check that no more KV is held than fits."""
        ...


class ScheduleRun:
    """A run of one schedule, from the first arrival to the last token."""

    def __init__(self, schedule: Schedule, cost: IterationCost) -> None:
        self.schedule = schedule
        self.clock = VirtualClock()
        self.counts = SimulationFigures()
        self._cost = cost

    def finish(self, arrivals: Iterable[Arrival]) -> SimulationFigures:
        source = iter(arrivals)
        ahead = next(source, None)
        clock, schedule = self.clock, self.schedule
        while True:
            while ahead is not None and (ahead.at or 0.0) <= clock.now():
                self._arrive(ahead)
                ahead = next(source, None)
            batch = schedule.plan(clock.now())
            if batch:
                self._run(batch)
                continue
            moment = min((ahead.at or 0.0) if ahead is not None else math.inf, schedule.wakes_at())
            if moment == math.inf:
                assert self.counts.turns == self.counts.num_submitted, (
                    "a request still waits, but no event will come"
                )
                return self.counts
            assert moment >= clock.now(), "the awaited event is in the past"
            clock.advance_to(moment)

    def _arrive(self, arrival: Arrival) -> None:
        self.counts.num_submitted += 1
        at = arrival.at or 0.0
        self.schedule.arrive(
            Request(self.counts.num_submitted, at, arrival.input_tokens, arrival.output_tokens)
        )

    def _run(self, batch: Sequence[Request]) -> None:
        begun = self.clock.now()
        self.clock.advance(
            self._cost.iteration_seconds((each.computed, each.length) for each in batch)
        )
        now, counts = self.clock.now(), self.counts
        gaps: dict[float, int] = {}
        for request in batch:
            request.computed = request.length
            request.num_outputs += 1
            if request.last_token is None:
                counts.first_tokens.add(now - request.arrived)
            else:
                gap = now - request.last_token
                gaps[gap] = gaps.get(gap, 0) + 1
            request.last_token = now
            if request.has_ended:
                counts.turns += 1
                counts.input_tokens += request.prompt_tokens
                counts.output_tokens += request.num_outputs
                counts.latencies.add((now - request.arrived) / request.num_outputs)
        for gap, times in gaps.items():
            counts.gaps.add(gap, times)
        counts.delivered_tokens += len(batch)
        counts.iterations += 1
        counts.seconds = now
        self.schedule.ran(batch, begun, now)


class OrcaSchedule:
    """Orca's schedule: iterations, first come first served, KV reserved for the longest context.

    Each iteration is composed anew from all running requests: prompts and decodes in one batch (selective
    batching). A request is admitted when a contiguous piece of KV for its longest length is free, and keeps
    it until it ends. Here no request has its own limit, so the longest length is the model's context. All
    pieces have this size, and there are `device tokens / context` of them. No request overtakes another, and
    none is preempted.
    """

    def __init__(self, device_tokens: int, context_max: int, requests_max: int) -> None:
        self.num_places = min(device_tokens // context_max, requests_max)
        assert self.num_places >= 1, "no room for one request of the longest length"
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order of arrival

    def arrive(self, request: Request) -> None:
        self._waiting.append(request)

    def plan(self, now: float) -> Sequence[Request]:
        while self._waiting and len(self._running) < self.num_places:
            self._running.append(self._waiting.popleft())
        return self._running

    def ran(self, requests: Sequence[Request], begun: float, ended: float) -> None:
        self._running = [each for each in self._running if not each.has_ended]

    def wakes_at(self) -> float:
        return math.inf

    def check(self) -> None:
        assert len(self._running) <= self.num_places
        numbers = [each.number for each in (*self._running, *self._waiting)]
        assert numbers == sorted(numbers), "first come, first served"


BLOCK_TOKENS = 16
SPARE_BLOCKS_SHARE = 0.01  # blocks that must stay free when a prompt is admitted


class VllmSchedule:
    """vLLM's schedule of 2023: paged KV, first come first served, prompts first, preempt the latest.

    KV lies in blocks of 16 tokens. A request takes a new block when its last block is full. An iteration has
    one of two kinds:

        prompts    whole prompts of waiting requests, in their order, as long as blocks for them are free
                   (plus 1 % of all blocks) and they have at most `batch_tokens_max` tokens together
        decodes    of all running requests, when no prompt can be admitted

    If a decode needs a block and none is free, the latest running request is preempted. It gives up its KV,
    waits at the front, and computes its prompt and its generated tokens again (recomputation, vLLM's default
    for requests with one reply; nothing goes to the host).
    """

    def __init__(
        self, device_tokens: int, context_max: int, batch_tokens_max: int, requests_max: int
    ) -> None:
        self.num_blocks = device_tokens // BLOCK_TOKENS
        self._spare = int(SPARE_BLOCKS_SHARE * self.num_blocks)
        assert self.num_blocks - self._spare >= _blocks(context_max), (
            "no room for one request of the longest length"
        )
        self._batch_tokens_max = max(batch_tokens_max, context_max)
        self._requests_max = requests_max
        self._free = self.num_blocks
        self._blocks: dict[Request, int] = {}  # blocks of the running requests
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order of arrival
        self.num_preemptions = 0

    def arrive(self, request: Request) -> None:
        self._waiting.append(request)

    def plan(self, now: float) -> Sequence[Request]:
        prompts = self._admit_prompts()
        return prompts if prompts else self._plan_decodes()

    def _admit_prompts(self) -> list[Request]:
        admitted: list[Request] = []
        tokens = 0
        while self._waiting and len(self._running) < self._requests_max:
            request = self._waiting[0]
            tokens += request.length
            if self._free - _blocks(request.length) < self._spare:
                break
            if tokens > self._batch_tokens_max:
                break
            self._take(request)
            self._running.append(self._waiting.popleft())
            admitted.append(request)
        return admitted

    def _plan_decodes(self) -> list[Request]:
        """Return the running requests; preempt the latest ones if earlier ones lack a block."""
        kept: list[Request] = []
        left = deque(self._running)
        while left:
            request = left.popleft()
            while self._num_lacking(request) > self._free:
                latest = left.pop() if left else request
                self._preempt(latest)
                if latest is request:
                    break
            else:
                self._take(request)
                kept.append(request)
        self._running = kept
        return kept

    def _num_lacking(self, request: Request) -> int:
        return _blocks(request.length) - self._blocks.get(request, 0)

    def _take(self, request: Request) -> None:
        self._free -= self._num_lacking(request)
        self._blocks[request] = _blocks(request.length)

    def _preempt(self, request: Request) -> None:
        self._free += self._blocks.pop(request)
        request.computed = 0
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def ran(self, requests: Sequence[Request], begun: float, ended: float) -> None:
        for request in requests:
            if request.has_ended:
                self._free += self._blocks.pop(request)
        self._running = [each for each in self._running if not each.has_ended]

    def wakes_at(self) -> float:
        return math.inf

    def check(self) -> None:
        assert set(self._blocks) == set(self._running)
        assert self._free == self.num_blocks - sum(self._blocks.values()) >= 0
        for request in self._running:
            assert request.computed <= self._blocks[request] * BLOCK_TOKENS
        numbers = [each.number for each in (*self._running, *self._waiting)]
        assert numbers == sorted(numbers), "first come, first served"


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


STARVING_SECONDS = 10.0
SPARE_SHARE = 0.1  # part of the places that stays free


class KvPlace(Enum):
    """Where a job's KV is."""

    NEW = auto()  # no KV yet
    DEVICE = auto()
    OUT = auto()  # being copied to the host
    HOST = auto()
    IN = auto()


ON_DEVICE = (KvPlace.DEVICE, KvPlace.OUT, KvPlace.IN)
ON_HOST = (KvPlace.HOST, KvPlace.OUT, KvPlace.IN)


@dataclass(eq=False, slots=True)
class Job:
    request: Request
    level: int
    entered: int  # sequence number of its entry into the level
    last_ran: float
    used_seconds: float = 0.0  # time used in its level
    place: KvPlace = KvPlace.NEW

    @property
    def order(self) -> tuple[int, int]:
        return (self.level, self.entered)


class FastServeSchedule:
    """FastServe's schedule: a skip-join multi-level feedback queue, with KV that swaps to the host and back.

    The length of a reply is unknown. So a job that has used little time goes first, which approximates the
    shortest remaining time. The levels have quanta that double; the first is one iteration of a lone
    generating turn.

        joins      the highest level whose quantum fits its prompt's iteration (higher levels are skipped,
                   because they would only demote the job)
        demoted    to the end of the next level, when it has used its level's quantum
        promoted   to the end of the first level, when it has not run for `STARVING_SECONDS`

    Preemption is between iterations. Like in Orca, KV is reserved for the longest context, in places on the
    device. A job that loses its place keeps its KV on the host:

        NEW → DEVICE ⇄ (copied OUT, HOST, copied IN)

    The queue's order predicts which jobs run next. The first jobs, as many as there are places minus a few
    (`SPARE_SHARE`), are `wanted`. Places are kept free for wanted jobs without a place, and a few for new
    arrivals (proactive swapping). While too few places are free, the unwanted job that is last in the order
    is copied out. Copies in the same direction run one after another, in parallel with iterations. A job does
    not run while its KV is copied, and its place is free when the copy has ended. All other jobs with a place
    run, wanted or not, so nothing is idle while there is work. KV on the host takes its actual length. A job
    for which the host has no room keeps its place.
    """

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
        assert self.num_places >= 1, "no room for one request of the longest length"
        self.host_tokens = host_tokens
        self._host_free = host_tokens
        self._num_spare = int(SPARE_SHARE * self.num_places)
        self._cost, self._copy_seconds = cost, copy_seconds
        self.quanta = _quanta(cost, context_max)
        self._jobs: dict[Request, Job] = {}
        self._counts = dict.fromkeys(KvPlace, 0)
        self._copies: list[tuple[float, Job]] = []  # end of the copy, job
        self._out_free = self._in_free = 0.0
        self._num_entered = 0
        self.num_preemptions = 0

    def arrive(self, request: Request) -> None:
        prompt_seconds = self._cost.iteration_seconds([(0, request.prompt_tokens)])
        last = len(self.quanta) - 1
        level = next((n for n in range(last) if self.quanta[n] >= prompt_seconds), last)
        job = Job(request, level, self._next_entry(), request.arrived)
        self._jobs[request] = job
        self._counts[KvPlace.NEW] += 1

    def plan(self, now: float) -> Sequence[Request]:
        self._end_copies(now)
        self._promote(now)
        ordered = sorted(self._jobs.values(), key=lambda job: job.order)
        wanted = ordered[: self.num_places - self._num_spare]
        lacking = [job for job in wanted if job.place in (KvPlace.NEW, KvPlace.HOST)]
        num_placed = 0
        for job in lacking:
            if not self._num_free:
                break
            self._give_place(job, now)
            num_placed += 1
        if len(ordered) > self.num_places - self._num_spare:
            self._make_room(ordered, set(wanted), len(lacking) - num_placed, now)
        return [job.request for job in ordered if job.place is KvPlace.DEVICE]

    @property
    def _num_free(self) -> int:
        return self.num_places - sum(self._counts[place] for place in ON_DEVICE)

    def _give_place(self, job: Job, now: float) -> None:
        if job.place is KvPlace.NEW:
            self._move(job, KvPlace.DEVICE)
            return
        self._in_free = max(now, self._in_free) + self._copy_seconds(job.request.computed)
        self._copies.append((self._in_free, job))
        self._move(job, KvPlace.IN)

    def _make_room(
        self, ordered: Sequence[Job], wanted: set[Job], num_lacking: int, now: float
    ) -> None:
        """Copy out the jobs that run last, until there is room for waiting jobs and new arrivals."""
        room = self._num_free + self._counts[KvPlace.OUT]
        needed = max(num_lacking, self._num_spare)
        for job in reversed(ordered):
            if room >= needed or job in wanted:
                break  # wanted jobs come first, so only wanted jobs are left
            tokens = job.request.computed
            if job.place is KvPlace.DEVICE and tokens <= self._host_free:
                self._host_free -= tokens
                self._out_free = max(now, self._out_free) + self._copy_seconds(tokens)
                self._copies.append((self._out_free, job))
                self._move(job, KvPlace.OUT)
                self.num_preemptions += 1
                room += 1

    def _end_copies(self, now: float) -> None:
        for ended, job in self._copies:
            if ended <= now and job.place is KvPlace.IN:
                self._host_free += job.request.computed
                self._move(job, KvPlace.DEVICE)
            elif ended <= now:
                self._move(job, KvPlace.HOST)
        self._copies = [copy for copy in self._copies if copy[0] > now]

    def _promote(self, now: float) -> None:
        for job in self._jobs.values():
            if job.level and now - job.last_ran >= STARVING_SECONDS:
                job.last_ran = now  # its waiting time begins again
                self._enter(job, 0)

    def ran(self, requests: Sequence[Request], begun: float, ended: float) -> None:
        for request in requests:
            job = self._jobs[request]
            if request.has_ended:
                self._counts[job.place] -= 1
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

    def _move(self, job: Job, place: KvPlace) -> None:
        self._counts[job.place] -= 1
        self._counts[place] += 1
        job.place = place

    def wakes_at(self) -> float:
        return min((ended for ended, _ in self._copies), default=math.inf)

    def level_of(self, request: Request) -> int:
        return self._jobs[request].level

    def check(self) -> None:
        places = [job.place for job in self._jobs.values()]
        assert all(self._counts[place] == places.count(place) for place in KvPlace)
        assert sum(self._counts[place] for place in ON_DEVICE) <= self.num_places
        on_host = sum(job.request.computed for job in self._jobs.values() if job.place in ON_HOST)
        assert self._host_free == self.host_tokens - on_host >= 0
        copied = {job for _, job in self._copies}
        assert all(
            (job.place in (KvPlace.OUT, KvPlace.IN)) == (job in copied)
            for job in self._jobs.values()
        )
        for request, job in self._jobs.items():
            assert job.place is not KvPlace.NEW or not request.computed


def _quanta(cost: IterationCost, context_max: int) -> list[float]:
    """Double the quanta until the last one fits a longest prompt and a longest reply alone."""
    quanta = [cost.decode_seconds(1, 1)]
    longest = cost.iteration_seconds([(0, context_max)]) + context_max * quanta[0]
    while quanta[-1] < longest:
        quanta.append(2 * quanta[-1])
    return quanta
