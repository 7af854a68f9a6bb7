"""Streams and events that behave like a GPU's, on a CPU: launched work happens late, in any order.

A stream is a queue of work. Nothing runs until the code waits for an event or queries it. Then the heads of
the queues run one at a time, always from a random queue. A head that waits for an event stays in its queue
until that event has been reached. So if the code misses a wait, some seed runs the work in a wrong order.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class FakeEvent:
    def __init__(self, device: FakeStreams) -> None:
        self._device = device
        self.reached = False

    def query(self) -> bool:
        if not self._device.going.is_set():
            return self.reached
        self._device.advance(self._device.draw.randrange(4))
        return self.reached

    def synchronize(self) -> None:
        self._device.going.wait()
        while True:
            with self._device.lock:
                if self.reached:
                    return
                assert self._device.advance(1), "an event that nothing will reach"


class FakeStream:
    def __init__(self, device: FakeStreams) -> None:
        self._device = device
        self.queue: deque[FakeEvent | Callable[..., object]] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        with self._device.lock:
            self.queue.append(event)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._device)

        def reach() -> None:
            event.reached = True

        self.launch(reach)
        return event

    def launch(self, work: Callable[..., object]) -> None:
        with self._device.lock:
            self.queue.append(work)


class FakeStreams:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.lock = threading.RLock()
        self.going = threading.Event()  # while it is cleared, nothing runs
        self.going.set()
        self.compute = FakeStream(self)
        self.swap_in = FakeStream(self)
        self.swap_out = FakeStream(self)
        self.staging = FakeStream(self)
        self._current = threading.local()

    @property
    def current(self) -> FakeStream:
        """Return the current stream of the calling thread."""
        found: FakeStream = getattr(self._current, "stream", self.compute)
        return found

    def record(self, stream: FakeStream) -> FakeEvent:
        return stream.record_event()

    def adopt_thread(self) -> None:
        """Do nothing: there is only one device."""

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def advance(self, steps: int) -> bool:
        """Run up to `steps` heads. Return whether anything ran."""
        happened = False
        for _ in range(steps):
            with self.lock:
                ready = []
                for stream in (self.compute, self.swap_in, self.swap_out, self.staging):
                    while stream.queue and getattr(stream.queue[0], "reached", False):
                        stream.queue.popleft()
                    if stream.queue and not isinstance(stream.queue[0], FakeEvent):
                        ready.append(stream)
                if not ready:
                    return happened
                work = self.draw.choice(ready).queue.popleft()
                assert not isinstance(work, FakeEvent)
                work()
                happened = True
        return happened
