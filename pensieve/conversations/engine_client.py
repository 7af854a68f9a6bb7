"""Start the engine process, write to it, and restart it when it dies. Belongs to the event loop.

    STOPPED ──start──> STARTING ──ready──> SERVING ──pipe ends──> DOWN ──after a pause──> STARTING
                           └──the first process dies: `start` raises its error

A SERVING process that hangs is killed (`Heartbeat`). A STARTING process may take as long as its model needs.
The pause doubles while processes die without having published an event.

A message goes only to the process that serves when `put` is called, never to a later process. When a process
dies, `put` first begins to refuse messages. Then `engine_down` is published, and then queries fail. Messages
that the process has not read wait here, up to UNSENT_BYTES_MAX. Beyond that, `put` takes only messages that
free memory.

A failed restart is retried, whatever the reason. Any other unexpected exception, here or in a subscriber, is
published as `failed`. Then the service must exit, because turns would wait for ever. Starting a process needs
a few file descriptors, which are held in reserve.

The child is a separate program with one inherited socket: no fork, no pickle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pensieve.conversations.engine_child import EngineChild, start_child
from pensieve.conversations.turn_events import TurnEvents
from pensieve.core.cost import IterationCost
from pensieve.engine import pipe as channel
from pensieve.engine.messages import (
    Answer,
    EngineEvent,
    EngineMessage,
    EngineTurnEvent,
    Freeing,
    KvExported,
    QueryReply,
)
from pensieve.errors import (
    ConfigError,
    DeviceError,
    ModelError,
    PensieveError,
    QueueFull,
    Unavailable,
)

log = logging.getLogger("pensieve")
R = TypeVar("R", Answer, KvExported)
GONE = "the engine has stopped and is restarting; retry in a few seconds"
ENDED = "the engine process ended"
ENDED_SECONDS = 1.0  # between the end of the pipe and the end of the process
RESTART_SECONDS_MIN = 0.1
RESTART_SECONDS_MAX = 30.0
STOP_SECONDS = 5.0
REPORT_SECONDS = 60.0  # between log lines about a process that does not start, or does not die
UNSENT_BYTES_MAX = 16 << 20
DOES_NOT_END = "the engine (process %d) was killed but does not end"
TICK_SECONDS_MAX = 1.0  # between two ticks of the heartbeat
DESCRIPTORS_OF_A_START = 8  # a pair of sockets, and the descriptors that Popen opens


@dataclass(frozen=True)
class Ready:
    """The facts that the engine reports when it is ready."""

    context_max: int
    vocab_size: int
    device_pages: int
    host_pages: int
    page_bytes: int
    chunk_tokens: int
    dtype: str = ""  # of the computation; "": no model computes
    kv_dtype: str = ""  # of the stored KV
    weights: str = ""
    device: str = ""
    layers: str = ""  # how the layers run, for people
    iteration_cost: Mapping[str, Any] = field(default_factory=dict)  # as in core/cost.py
    tbt_seconds_min: float = (
        0.0  # the smallest token-gap objective that can be met; 0: none was given
    )
    tbt_source: str = ""  # where that figure comes from, for people
    kv_compatibility: Mapping[str, str] = field(default_factory=dict)  # {}: KV is not transferred
    kv_refusal: str = ""  # why KV is not transferred

    @property
    def cost(self) -> IterationCost | None:
        return IterationCost(**self.iteration_cost) if self.iteration_cost else None


@dataclass(frozen=True)
class EngineProgram:
    """The command that starts the engine, and the settings that the engine reads first."""

    command: tuple[str, ...]
    settings: Mapping[str, str]
    model_folder: Path
    model_name: str = ""  # for people
    # Returns an engine process that was started before the settings were complete, if there is one.
    take_prestarted_engine: Callable[[], EngineChild | None] = lambda: None


@dataclass(frozen=True)
class Patience:
    silent_seconds_max: float
    round_seconds_max: float  # 0: no limit

    @property
    def tick_seconds(self) -> float:
        return min(TICK_SECONDS_MAX, self.silent_seconds_max / 4)


class Heartbeat:
    """Detect a hanging engine process by its frames.

        SILENT   no frame for `silent_seconds_max`: the process was stopped, or none of its threads runs
        STUCK    frames arrive, but the main thread has been in one round for `round_seconds_max`

    A round is an iteration or an idle wait (`Engine.num_rounds`). Time passes only in `tick`. So if the
    service itself was stopped for an hour, only one tick counts.
    """

    def __init__(self, patience: Patience) -> None:
        self.silent_seconds = 0.0
        self.round_seconds = 0.0
        self._patience = patience
        self._num_rounds = -1

    def published(self) -> None:
        """Record that events arrived. The main thread is alive, because only this thread publishes events."""
        self.silent_seconds = self.round_seconds = 0.0

    def alive(self, num_rounds: int) -> None:
        """Record a sign of life, with the number of rounds until now."""
        self.silent_seconds = 0.0
        if num_rounds != self._num_rounds:
            self._num_rounds = num_rounds
            self.round_seconds = 0.0

    def tick(self) -> str | None:
        """Count a tick. Return why the engine is considered hung, or None if it is not considered hung."""
        patience = self._patience
        self.silent_seconds += patience.tick_seconds
        self.round_seconds += patience.tick_seconds
        if self.silent_seconds > patience.silent_seconds_max:
            return f"the engine has been silent for {self.silent_seconds:.0f} s"
        if 0 < patience.round_seconds_max < self.round_seconds:
            return f"the engine has been in one iteration for {self.round_seconds:.0f} s"
        return None


class EngineClient:
    def __init__(
        self,
        program: EngineProgram,
        events: TurnEvents,
        *,
        patience: Patience,
        report: Callable[[str], None] = lambda line: None,
        answer_seconds: float = 30.0,
    ) -> None:
        """`answer_seconds`: the timeout of a query."""
        self.ready: Ready | None = None
        self.num_restarts = 0
        self.pid: int | None = None
        self.model_name = program.model_name
        self._hello = channel.pack(["settings", dict(program.settings), str(program.model_folder)])
        self._events = events
        self._report = report
        self._command = program.command
        self._take_prestarted_engine = program.take_prestarted_engine
        self._patience = patience
        self._spare = SpareDescriptors(DESCRIPTORS_OF_A_START)
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._stopping = False
        self._has_published = False  # the current process has published an event
        self.heartbeat = Heartbeat(patience)  # of the current process
        self._hung = ""  # why the process was killed; "": it was not
        self._task: asyncio.Task[None] | None = None
        self._answer_seconds = answer_seconds
        self._queries: dict[int, asyncio.Future[QueryReply]] = {}  # by id
        self._num_queries = 0

    @property
    def serving(self) -> bool:
        return self._writer is not None

    async def start(self) -> Ready:
        """Start the first process and supervise it: whenever it dies, another one starts."""
        ready = await self._spawn()
        self._task = self._loop.create_task(self._supervise(), name="engine process")
        self._task.add_done_callback(self._supervisor_ended)
        return ready

    def put(self, message: EngineMessage) -> None:
        """Send a message to the current process. Raises Unavailable if there is none."""
        if self._writer is None:
            raise Unavailable("the engine is restarting; retry in a few seconds")
        num_unsent = self._writer.transport.get_write_buffer_size()
        if num_unsent > UNSENT_BYTES_MAX and not isinstance(message, Freeing):
            raise Unavailable("the engine is not reading its messages; retry in a few seconds")
        packed = channel.pack_message(message)
        if not self._writer.is_closing():  # if it is closing, `_listen` soon notices the end
            self._writer.write(packed)

    def try_put(self, message: EngineMessage) -> bool:
        """Send a message without raising; return whether it was sent."""
        try:
            self.put(message)
        except (Unavailable, QueueFull):
            return False
        return True

    async def query(self, message_for: Callable[[int], EngineMessage]) -> Answer:
        """Send the message that `message_for` makes for a query id, and wait for the answer."""
        return await self._reply(message_for, Answer)

    async def export(self, message_for: Callable[[int], EngineMessage]) -> KvExported:
        """Send the message that `message_for` makes for a query id, and wait for the exported KV."""
        return await self._reply(message_for, KvExported)

    async def _reply(self, message_for: Callable[[int], EngineMessage], kind: type[R]) -> R:
        self._num_queries += 1
        query_id = self._num_queries
        future = self._queries[query_id] = self._loop.create_future()
        try:
            self.put(message_for(query_id))
            reply = await asyncio.wait_for(future, self._answer_seconds)
            assert isinstance(reply, kind), f"{reply} is not of {kind}"
            return reply
        except TimeoutError:
            raise Unavailable("the engine does not answer") from None
        finally:
            self._queries.pop(query_id, None)

    async def stop(self) -> None:
        """Close the pipe, which ends the process, and wait for its end. Kill it after STOP_SECONDS."""
        self._stopping = True
        self._close_pipe()
        self._spare.release()
        process = self._process
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                try:
                    await asyncio.to_thread(process.wait, STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    log.error(DOES_NOT_END, process.pid)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # -- one process --

    async def _spawn(self) -> Ready:
        our_end = self._begin_process()
        reader, writer = await _open(our_end)
        try:
            writer.write(self._hello)
            while (frame := await self._read_patiently(reader)) is not None:
                (kind, *rest), _ = frame
                if kind == "stage":
                    self._report(rest[0])
                elif kind == "died":
                    raise _death(rest[0], rest[1])
                elif kind == "ready":
                    self.ready = Ready(**rest[0])
                    self._reader, self._writer = reader, writer
                    return self.ready
            raise DeviceError(f"{await self._describe_end()} while it was starting")
        except BaseException:
            writer.transport.abort()
            raise

    def _begin_process(self) -> socket.socket:
        """Start a process and return our end of its pipe.

        Not a coroutine, because a cancellation in between would leak descriptors.
        """
        self._spare.release()
        try:
            child = self._take_prestarted_engine() or start_child(self._command)
        finally:
            self._spare.take()
        self._process = child.process
        self.pid = child.process.pid
        return child.pipe

    async def _read_patiently(self, reader: asyncio.StreamReader) -> channel.Frame | None:
        """Read the next frame of a starting process; log at intervals until the frame arrives."""
        reading, seconds = self._loop.create_task(_read(reader)), 0.0
        try:
            while not (await asyncio.wait({reading}, timeout=REPORT_SECONDS))[0]:
                seconds += REPORT_SECONDS
                log.warning(
                    "the engine (process %s) is still starting; no progress for %.0f s",
                    *(self.pid, seconds),
                )
            return reading.result()
        finally:
            reading.cancel()

    async def _supervise(self) -> None:
        pause = RESTART_SECONDS_MIN
        while True:
            self._has_published = False
            reason = await self._listen()
            down_since = self._loop.time()
            self._close_pipe()
            if self._stopping:
                return
            self._events.engine_down(reason)
            for query in self._queries.values():
                if not query.done():
                    query.set_exception(Unavailable(GONE))
            if self._has_published:
                pause = RESTART_SECONDS_MIN
            while self._writer is None:
                await self._reap()
                self._spare.take()  # descriptors may be free again
                await asyncio.sleep(pause)
                pause = min(pause * 2, RESTART_SECONDS_MAX)
                if self._stopping:
                    return
                try:
                    self._report("restarting the engine")
                    await self._spawn()
                except (PensieveError, OSError) as error:
                    self._report(f"the engine did not start: {error}")
                    continue
                except Exception:
                    log.exception("the engine did not start")
                    continue
                self.num_restarts += 1
                seconds = self._loop.time() - down_since
                self._report(f"the engine is ready again (it was gone for {seconds:.1f} s)")
                self._events.engine_up()

    async def _listen(self) -> str:
        """Publish events until the pipe ends; return why it ended."""
        assert self._reader is not None
        reason, self._hung = "", ""
        heartbeat = self.heartbeat = Heartbeat(self._patience)
        watching = self._loop.create_task(self._watch(heartbeat), name="heartbeat")
        watching.add_done_callback(self._supervisor_ended)
        try:
            while (frame := await _read(self._reader)) is not None:
                if frame[0][0] == "died":
                    reason = frame[0][1]
                elif (num_rounds := channel.rounds_of(frame)) is not None:
                    heartbeat.alive(num_rounds)
                else:
                    heartbeat.published()
                    self._has_published = True
                    self._events.engine_events(self._without_replies(channel.events_of(frame)))
        except (OSError, PensieveError) as error:
            reason = str(error)
        except Exception as error:  # a bug in handling an event: restart rather than lose events
            log.exception("an event of the engine could not be handled")
            reason = f"an event of the engine could not be handled: {error}"
        finally:
            watching.cancel()
        return self._hung or reason or await self._describe_end()

    async def _describe_end(self) -> str:
        """Name the signal or the exit code of a process whose pipe has ended."""
        process = self._process
        if process is None or self._stopping:
            return ENDED
        try:
            code = await asyncio.to_thread(process.wait, ENDED_SECONDS)
        except subprocess.TimeoutExpired:
            return "the engine process closed its pipe"
        if code >= 0:
            return f"{ENDED} with exit code {code}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            perhaps = ", perhaps out of memory" if name == "SIGKILL" else ""
            return f"the engine process was killed by {name}{perhaps}"
        return f"the engine process was killed by signal {-code}"

    def _without_replies(self, events: list[EngineEvent]) -> list[EngineTurnEvent]:
        """Pass each reply to its query; return the other events."""
        others: list[EngineTurnEvent] = []
        for event in events:
            if not isinstance(event, QueryReply):
                others.append(event)
            elif (query := self._queries.get(event.query_id)) is not None and not query.done():
                query.set_result(event)
        return others

    async def _watch(self, heartbeat: Heartbeat) -> None:
        """Kill the process if it hangs. `_listen` then notices the end of the pipe."""
        while True:
            await asyncio.sleep(self._patience.tick_seconds)
            if (reason := heartbeat.tick()) is not None:
                break
        self._hung = f"{reason}; it was killed"
        if self._process is not None:
            self._process.kill()
        self._close_pipe()  # a killed process that waits for its device may not end

    async def _reap(self) -> None:
        """Wait until the old process is gone: two processes would compete for the device."""
        process = self._process
        if process is None:
            return
        process.kill()
        while True:
            try:
                await asyncio.to_thread(process.wait, REPORT_SECONDS)
                return
            except subprocess.TimeoutExpired:
                log.error(DOES_NOT_END, process.pid)

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the engine's supervisor failed", exc_info=error)
            self._close_pipe()
            self._events.failed(error)

    def _close_pipe(self) -> None:
        """Close the pipe at once, and drop unsent messages, because the process may never read them."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()


class _PipeReader(asyncio.StreamReader):
    """Treat a connection reset as the end of the stream, after the data before it.

    A process that ends with unread messages resets the pipe, often right after its last frame.
    """

    def set_exception(self, exc: Exception) -> None:
        if isinstance(exc, ConnectionResetError):
            self.feed_eof()
        else:
            super().set_exception(exc)


async def _open(our_end: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = _PipeReader(channel.FRAME_BYTES_MAX, loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, sock=our_end)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _read(reader: asyncio.StreamReader) -> channel.Frame | None:
    try:
        num_head, num_body = channel.lengths(await reader.readexactly(channel.LENGTHS.size))
        head = await reader.readexactly(num_head)
        body = await reader.readexactly(num_body) if num_body else b""
    except asyncio.IncompleteReadError:
        return None  # also in the middle of a frame: the process was killed
    return channel.unpack(head, body)


def _death(text: Any, code: Any) -> PensieveError:
    for kind in (ConfigError, ModelError):
        if code == kind.exit_code:
            return kind(str(text))
    return DeviceError(str(text))


class SpareDescriptors:
    """Hold file descriptors in reserve, to be released right before others are opened.

    Another thread may take the released descriptors first, so an open may still fail and must be retried.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []

    def take(self) -> None:
        """Fill the reserve as far as possible."""
        while len(self._held) < self._count:
            try:
                self._held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                return

    def release(self) -> None:
        while self._held:
            os.close(self._held.pop())
