"""The named events of a daemon, to which its parts subscribe.

    turn      begun ──> admitted ──> first_token ──> ended          or refused, before it begins
    engine    engine_up, engine_events, engine_down
    daemon    serving, draining, closing, failed

A feature subscribes when it is configured, or while it has work to do. A feature that is off is never called.
Subscribers are called on the event loop, in the order in which they subscribed. All subscribers of a `Signal`
are called even if one of them fails. Then the first exception is raised to the publisher.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, ParamSpec

from pensieve.conversations.live_turn import LiveTurn
from pensieve.engine.messages import EngineTurnEvent
from pensieve.errors import PensieveError

P = ParamSpec("P")


class Signal(Generic[P]):
    """An event: calling it calls its subscribers."""

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[P, object], ...] = ()

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        self._subscribers = (*self._subscribers, subscriber)

    def unsubscribe(self, subscriber: Callable[P, object]) -> None:
        self._subscribers = tuple(each for each in self._subscribers if each != subscriber)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> None:
        first: Exception | None = None
        for subscriber in self._subscribers:
            try:
                subscriber(*arguments, **named)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first


class AwaitedSignal(Generic[P]):
    """An event whose publisher waits for each subscriber."""

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[P, Awaitable[None]], ...] = ()

    def subscribe(self, subscriber: Callable[P, Awaitable[None]]) -> None:
        self._subscribers = (*self._subscribers, subscriber)

    async def __call__(self, *arguments: P.args, **named: P.kwargs) -> None:
        for subscriber in self._subscribers:
            await subscriber(*arguments, **named)


class TurnEvents:
    def __init__(self) -> None:
        # The store has the turn. The engine gets it once all subscribers have returned.
        self.begun = AwaitedSignal[[LiveTurn]]()
        # The engine has room for the turn. Second argument: the number of context tokens whose KV must be
        # computed.
        self.admitted = Signal[[LiveTurn, int]]()
        self.first_token = Signal[[LiveTurn]]()
        # The end is stored and the followers can see it. Second argument: the loop's time.
        self.ended = Signal[[LiveTurn, float]]()
        # A turn or a warm was refused.
        self.refused = Signal[[PensieveError]]()
        # An engine has started, the first one or another one. Its cache is empty.
        self.engine_up = Signal[[]]()
        # The engine process is gone, and all its turns are lost. Argument: the reason.
        self.engine_down = Signal[[str]]()
        # A frame of the engine's events, including those of background turns.
        self.engine_events = Signal[[list[EngineTurnEvent]]]()
        # The daemon has possibly begun or stopped taking new turns. Argument: whether it takes them now.
        self.serving = Signal[[bool]]()
        # The daemon takes no new turns.
        self.draining = Signal[[]]()
        # The engine is about to be stopped.
        self.closing = AwaitedSignal[[]]()
        # An unexpected exception: turns would wait for ever, so the service must end.
        self.failed = Signal[[BaseException]]()
