"""Run lines of a job in one engine process, from tokens to the engine's answers. Runs on the event loop.

    go               send messages to the engine; called after each frame (engine/pipe.py) of its events, and
                     regularly by the worker, because `is_held` may have changed
    engine_events    take a frame of the engine's events; a line is `ready` when all its choices have ended
    is_over          true if all lines are ready, the engine is lost, or the run was stopped; `changed` is set
                     then, and whenever a line is ready

Each choice of a line is a request of a `BatchRun` (engine/batch_run.py), so choices share their whole
prompt.

If the engine dies, any line that was in the engine may be the cause. `begun` has these lines, so that they
can be retried alone (worker.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pensieve.conversations.turns import BACKGROUND_ATTEMPT_ID_MIN
from pensieve.core.group_feed import FeedConfig
from pensieve.core.iteration import SampledToken
from pensieve.core.turn import FinishReason, Usage
from pensieve.engine.batch_run import BatchRequest, BatchRun, Finished, PrefixSharing
from pensieve.engine.messages import (
    EngineMessage,
    EngineTurnEvent,
    SubmitTurn,
    TurnAdmitted,
    TurnEnded,
)
from pensieve.errors import PensieveError
from pensieve.jobs.prepared import PreparedLine


class ReadyLine(NamedTuple):
    prepared: PreparedLine
    choices: Sequence[Finished]

    @property
    def num_tokens(self) -> int:
        usages = [each.usage for each in self.choices]
        computed = sum(each.new_tokens + each.recomputed_tokens for each in usages)
        return computed + sum(len(each.samples) for each in self.choices)


@dataclass(slots=True)
class _Line:
    prepared: PreparedLine
    choices: dict[int, Finished] = field(default_factory=dict)


class JobRun:
    def __init__(
        self,
        name: str,
        prepared: Sequence[PreparedLine],
        feed: FeedConfig,
        next_attempt_id: Callable[[], int],
        share: str,
        weight: float,
        send: Callable[[EngineMessage], None],
        sharing: PrefixSharing = "groups",
        *,
        root: str,
    ) -> None:
        """Prepare a run, in any thread. With many lines, this may take seconds.

        `name` must be unique in this engine. `next_attempt_id` returns a new id; `share`, `weight` and `root`
        are as in `SubmitTurn`.
        """
        self._send = send
        self.changed = asyncio.Event()
        self.is_over = self.was_lost = self.had_others = False
        self.begun: set[int] = set()  # lines that were in the engine when it died
        self._lines = [_Line(each) for each in prepared]
        self._requests = [
            (index, choice)
            for index, each in enumerate(prepared)
            for choice in range(len(each.samplings))
        ]
        requests = [
            BatchRequest(
                prepared[index].tokens,
                prepared[index].options(choice),
                prepared[index].line.request.turn.cache_salt,
            )
            for index, choice in self._requests
        ]
        self._batch = BatchRun(
            name, requests, feed, next_attempt_id, share, weight, sharing, root=root
        )
        self._ready: list[ReadyLine] = []
        self.is_held = False  # submit nothing more for now; running lines continue
        self._admitted: dict[int, int] = {}  # line, by attempt_id

    # -- to the engine --

    def go(self) -> None:
        """Send messages to the engine. If its mailbox refuses a turn, a later `go` submits the turn again."""
        if self.is_over:
            return
        for message in self._batch.go(submits=not self.is_held):
            try:
                self._send(message)
            except PensieveError:
                if isinstance(message, SubmitTurn):
                    self._turn_refused(message)
        self._end_if_done()

    def stop(self) -> None:
        """End the run and remove its requests from the engine."""
        if self.is_over:
            return
        self._end()
        for message in self._batch.stop():
            try:
                self._send(message)
            except PensieveError:
                return  # the engine is gone or ending

    # -- from the engine --

    def engine_events(self, events: Sequence[EngineTurnEvent]) -> None:
        """Take a frame, which may have events of other turns, and continue."""
        for event in events:
            if event.attempt_id >= BACKGROUND_ATTEMPT_ID_MIN:
                self._take(event)
        self.go()

    def _take(self, event: EngineTurnEvent) -> None:
        if not isinstance(event, SampledToken | TurnAdmitted | TurnEnded):
            return
        request = self._batch.request_of(event.attempt_id)
        if request is None:
            return
        index, choice = self._requests[request]
        line = self._lines[index].prepared.line.line
        if isinstance(event, TurnAdmitted):
            self._admitted[event.attempt_id] = line
        elif isinstance(event, TurnEnded):
            self._admitted.pop(event.attempt_id, None)
            if event.failure == "ENGINE_FAILED":
                self.begun.add(line)
        finished = self._batch.take(event)
        if finished is not None:
            self._finish(index, choice, finished)

    def engine_lost(self, had_others: bool) -> None:
        """Note that the engine process died. With `had_others`, another turn may be the cause."""
        self.had_others = had_others
        self.begun.update(self._admitted.values())
        self.was_lost = True
        self._end()

    # -- reading --

    def take_ready(self) -> list[ReadyLine]:
        ready, self._ready = self._ready, []
        return ready

    @property
    def is_idle(self) -> bool:
        """Whether nothing of the run is in the engine."""
        return not self._batch.num_active

    @property
    def num_running(self) -> int:
        """The number of lines with at least one choice that the engine has begun."""
        return len(set(self._admitted.values()))

    # -- inside --

    def _finish(self, index: int, choice: int, finished: Finished) -> None:
        line = self._lines[index]
        line.choices[choice] = finished
        if len(line.choices) == len(line.prepared.samplings):
            self._ready.append(
                ReadyLine(line.prepared, [line.choices[n] for n in sorted(line.choices)])
            )
            self.changed.set()

    def _turn_refused(self, message: SubmitTurn) -> None:
        failed, usage = FinishReason.FAILED, Usage()
        ended = TurnEnded(message.attempt_id, message.conversation_id, failed, usage, "QUEUE_FULL")
        self._batch.take(ended)

    def _end_if_done(self) -> None:
        if self._batch.is_done:
            self._end()

    def _end(self) -> None:
        self.is_over = True
        self.changed.set()
