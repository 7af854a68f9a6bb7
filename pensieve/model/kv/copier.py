"""Move pages between the tiers while the device computes.

A CPU's copier copies in a thread, layer by layer.  A GPU's copier uses streams.  Both keep this order:

    submit ──> pages of layer 0 │ layer 1 │ layer 2 │ …          starts after earlier iterations have written
    forward ── wait_layer(0) ─ layer 0 computes ─ wait_layer(1) ─ layer 1 computes …

Swap-ins come first, lowest layer first, because a layer's attention may be waiting for them.  Swap-outs are
not urgent, because nothing waits for the pages that they free.  So they run only while no swap-in is
outstanding.

A copy is *finished* when all of its layers have arrived.  `poll` and `wait_any` report each finished copy
once.  Until a copy is reported, the core reuses neither of its pages.  Copies may finish in any order.

The thread that launches forwards calls `submit`, `wait_layer`, `launch_rest` and
`swap_ins_outstanding`.  Another thread may call `poll` and `wait_any`, one call at a time.  An error in a
copy ends the worker, and every present and later waiting call raises DeviceError.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from pensieve.core.iteration import SwapIn, SwapOut
from pensieve.errors import DeviceError
from pensieve.model.kv.memory import KVMemory, PageMoves

UNIT_BYTES = 16 << 20  # the bus takes a third of a millisecond for it
LAYERS_AHEAD = 2  # how far a GPU's swap-ins are launched ahead of the compute


def copier_for(memory: KVMemory) -> Copier:
    return CpuCopier(memory) if memory.device_arena.device.type == "cpu" else CudaCopier(memory)


class Copier(ABC):
    """Run a worker thread and report finished copies; one lock guards all shared state."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._num_layers = memory.shape.num_layers
        self._changed = threading.Condition()
        self._finished: list[int] = []
        self._error: BaseException | None = None
        self._closing = False
        self._worker = threading.Thread(target=self._run, name="pensieve-copier", daemon=True)
        self._worker.start()

    @abstractmethod
    def submit(self, swap_ins: Sequence[SwapIn], swap_outs: Sequence[SwapOut]) -> None:
        """Start these copies.  All forwards of earlier iterations must already be launched."""

    @abstractmethod
    def launch_rest(self) -> None:
        """Start the copies that no forward has waited for.  Call this after launching the forward."""

    @abstractmethod
    def wait_layer(self, layer: int) -> None:
        """Make later computations wait until every outstanding swap-in has copied this layer."""

    @property
    @abstractmethod
    def swap_ins_outstanding(self) -> bool:
        """Whether a swap-in is outstanding."""

    def poll(self) -> tuple[int, ...]:
        """Return the ids of copies that finished since the last report, without waiting."""
        with self._changed:
            return self._report()

    @abstractmethod
    def wait_any(self) -> tuple[int, ...]:
        """As `poll`, but wait for at least one copy if any is outstanding."""

    def close(self) -> None:
        """End the worker after its present unit of work; abandon outstanding copies."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join()

    @abstractmethod
    def _work(self) -> None:
        """Run in the worker thread until `_closing`."""

    def _report(self) -> tuple[int, ...]:
        self._raise_error()
        finished, self._finished = tuple(self._finished), []
        return finished

    def _raise_error(self) -> None:
        if self._error is not None:
            raise DeviceError(f"copying pages between the tiers failed: {self._error}")

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._work()
        except BaseException as error:  # stored; waiting calls raise it
            with self._changed:
                self._error = error
                self._changed.notify_all()


@dataclass(slots=True, eq=False)
class _Job:
    """The swap-ins, or the swap-outs, of one iteration."""

    copy_ids: list[int]
    moves: PageMoves
    move_layer: Callable[[int, PageMoves], None]
    next_layer: int = 0


class CpuCopier(Copier):
    """Copy in the worker thread, one layer of one job at a time: swap-ins first, the lowest layer first.

    Why no page is read or written wrongly:

    * A swap-in writes device pages that nothing reads before `wait_layer` of that layer.  The core gives
      these pages to no slice of an earlier iteration, and every layer of a later forward waits first.
    * A swap-out reads slots that earlier iterations wrote.  On a CPU, `launch` returns only after the
      forward has been computed.  So these forwards are over when `submit` is called, even if an earlier
      iteration was not collected yet.  Those slots are not written again.  Full chunks never change.  Only
      the first `num_slots` slots of a partly filled chunk are copied, and new tokens go to later slots.
    * The core reuses neither page of a copy before that copy is reported, so no target is written twice
      and no source is overwritten.  The copy is reported under the lock, after the last layer.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._swap_ins: list[_Job] = []
        self._swap_outs: list[_Job] = []
        super().__init__(memory)

    def submit(self, swap_ins: Sequence[SwapIn], swap_outs: Sequence[SwapOut]) -> None:
        if not swap_ins and not swap_outs:
            return
        with self._changed:
            if swap_ins:
                ids, moves = [each.copy_id for each in swap_ins], PageMoves.from_swap_ins(swap_ins)
                self._swap_ins.append(_Job(ids, moves, self._memory.swap_in))
            if swap_outs:
                ids, moves = (
                    [each.copy_id for each in swap_outs],
                    PageMoves.from_swap_outs(swap_outs),
                )
                self._swap_outs.append(_Job(ids, moves, self._memory.swap_out))
            self._changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        if not self._swap_ins:  # no race: only `submit` adds swap-ins, in this same thread
            return
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None or all(job.next_layer > layer for job in self._swap_ins)
                )
            )
            self._raise_error()

    def launch_rest(self) -> None:
        """Do nothing: the worker starts copies by itself."""

    @property
    def swap_ins_outstanding(self) -> bool:
        return bool(self._swap_ins)

    def wait_any(self) -> tuple[int, ...]:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or bool(self._finished)
                    or not (self._swap_ins or self._swap_outs)
                )
            )
            return self._report()

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            job.move_layer(job.next_layer, job.moves)
            self._advance(job)

    def _next_job(self) -> _Job | None:
        """Return the job whose next layer is to be moved now; None when closing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or bool(self._swap_ins) or bool(self._swap_outs)
            )
            if self._closing:
                return None
            if self._swap_ins:
                return min(self._swap_ins, key=lambda job: job.next_layer)
            return self._swap_outs[0]

    def _advance(self, job: _Job) -> None:
        with self._changed:
            job.next_layer += 1
            if job.next_layer == self._num_layers:
                (self._swap_ins if job in self._swap_ins else self._swap_outs).remove(job)
                self._finished.extend(job.copy_ids)
            self._changed.notify_all()


class Event(Protocol):
    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class DeviceStream(Protocol):
    def wait_event(self, event: Any) -> None: ...


class Streams(Protocol):
    """The device functions that the copier and the streamer use; tests replace them."""

    @property
    def swap_in(self) -> DeviceStream: ...

    @property
    def swap_out(self) -> DeviceStream: ...

    @property
    def staging(self) -> DeviceStream:
        """The stream of the streamer (streamer.py)."""

    @property
    def compute(self) -> DeviceStream:
        """The stream that forwards are launched on."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make this stream the current stream inside the block."""

    def record(self, stream: Any) -> Event:
        """Record an event after everything launched on the stream."""

    def adopt_thread(self) -> None:
        """Make this device the calling thread's current one."""


class TorchStreams:
    """The streams of a CUDA device; the streams that the compute waits for have higher priority."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.swap_in: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.swap_out: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.staging: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def compute(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Event:
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return cast(Event, event)

    def adopt_thread(self) -> None:
        torch.cuda.set_device(self._device)


@dataclass(slots=True, eq=False)
class _SwapInJob:
    copy_ids: tuple[int, ...]
    moves: PageMoves
    events: list[Event]  # one after each launched layer


@dataclass(slots=True, eq=False)
class _SwapOutJob:
    copy_ids: tuple[int, ...]
    moves: PageMoves
    after: Event  # after the forwards that wrote these pages
    next_layer: int = 0


class CudaCopier(Copier):
    """Copy on two streams, in parallel with the computing stream: one for swap-ins, one for swap-outs.

        compute    ├ wait e0 ┤ layer 0 ├ wait e1 ┤ layer 1 ├ …        the host never waits
        swap-in    ├ 0 ┤e0├ 1 ┤e1├ 2 ┤e2 …                            launched some layers ahead
        swap-out               ├ some layers ┤    ├ some layers ┤     unit by unit, by the worker

    Each layer of a swap-in is followed by an event.  `submit` launches the first `LAYERS_AHEAD` layers.
    `wait_layer(n)` launches the copies of all layers up to n + `LAYERS_AHEAD`.  It also makes the computing
    stream, not the host, wait for the events of layer n.  `launch_rest` launches the remaining layers after
    the forward.  Launching all layers at once would delay the launch of the first layer's compute.

    Swap-outs are not urgent.  A worker thread launches them a unit at a time (some layers, about
    `UNIT_BYTES`), and only while no swap-in is outstanding.  A new swap-in waits, on the device, for the
    running unit, so the two directions do not compete for the bus.

    Why no page is read or written wrongly:

    * A swap-in reads only host pages whose swap-out was reported.  A swap-out is reported after the host has
      seen its event.
    * A swap-in writes device pages that a launched iteration may still read or write: an iteration that
      samples nothing is committed before the device has finished it.  So the swap-in waits for an event that
      `submit` records on the computing stream, after all launched iterations.  A layer that reads the pages
      later waits for the layer's event.
    * A swap-out reads slots that earlier iterations wrote.  Their forwards may still run, so the first unit
      waits for an event that `submit` records on the computing stream, after all of these forwards.  Those
      slots are not written again.  Full chunks never change.  Only the first `num_slots` slots of a partly
      filled chunk are copied.
    * The core reuses neither page of a copy before that copy is reported.  A copy is reported when the host
      has seen the event after its last layer.
    * A job keeps its tensors of page numbers, which may be on the device, until its copies are reported.

    One lock guards all state that threads share.  The worker holds it while it launches a unit.  If `submit`
    comes later, it sees the unit (`_unit`), and its swap-ins wait for the unit.  If `submit` comes earlier,
    the worker sees the swap-ins and launches no unit.
    """

    def __init__(self, memory: KVMemory, streams: Streams | None = None) -> None:
        self._streams = streams or TorchStreams(memory.device_arena.device)
        self._swap_ins: list[_SwapInJob] = []
        self._swap_outs: list[_SwapOutJob] = []
        self._unit: Event | None = None  # after the last unit of swap-outs
        super().__init__(memory)

    def submit(self, swap_ins: Sequence[SwapIn], swap_outs: Sequence[SwapOut]) -> None:
        if swap_ins:
            moves = self._memory.prepared_for_swap(PageMoves.from_swap_ins(swap_ins))
            ready = self._streams.record(self._streams.compute)
            job = _SwapInJob(tuple(each.copy_id for each in swap_ins), moves, [])
            with self._changed:
                self._raise_error()
                stream = self._streams.swap_in
                stream.wait_event(ready)
                if self._unit is not None:
                    stream.wait_event(self._unit)
                self._swap_ins.append(job)
                self._launch_swap_ins(LAYERS_AHEAD)
        if swap_outs:
            moves = self._memory.prepared_for_swap(PageMoves.from_swap_outs(swap_outs))
            ids = tuple(each.copy_id for each in swap_outs)
            after = self._streams.record(self._streams.compute)
            with self._changed:
                self._swap_outs.append(_SwapOutJob(ids, moves, after))
                self._changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        if not self._swap_ins:
            return
        with self._changed:
            self._launch_swap_ins(layer + 1 + LAYERS_AHEAD)
            events = [job.events[layer] for job in self._swap_ins]
        for event in events:
            self._streams.compute.wait_event(event)

    def launch_rest(self) -> None:
        if self._swap_ins:
            with self._changed:
                self._launch_swap_ins(self._num_layers)

    @property
    def swap_ins_outstanding(self) -> bool:
        with self._changed:
            self._sweep()
            return bool(self._swap_ins)

    def wait_any(self) -> tuple[int, ...]:
        while True:
            with self._changed:
                self._sweep()
                self._changed.wait_for(
                    lambda: (
                        self._finished
                        or self._error
                        or (self._swap_ins and self._is_launched(self._swap_ins[0]))
                        or not (self._swap_ins or self._swap_outs)
                    )
                )
                if self._finished or self._error or not (self._swap_ins or self._swap_outs):
                    return self._report()
                event = self._swap_ins[0].events[-1]
            event.synchronize()

    def close(self) -> None:
        super().close()
        if self._error is None:  # running copies still use the memory
            for stream in (self._streams.swap_in, self._streams.swap_out):
                self._streams.record(stream).synchronize()

    def _launch_swap_ins(self, num_layers: int) -> None:
        """Launch the first `num_layers` layers of every swap-in, unless already launched."""
        stream, num_layers = self._streams.swap_in, min(num_layers, self._num_layers)
        try:
            for job in self._swap_ins:
                if len(job.events) >= num_layers:
                    continue
                with self._streams.on(stream):
                    for layer in range(len(job.events), num_layers):
                        self._memory.swap_in(layer, job.moves)
                        job.events.append(self._streams.record(stream))
        except BaseException as error:
            self._error = error
        self._changed.notify_all()
        self._raise_error()

    def _is_launched(self, job: _SwapInJob) -> bool:
        return len(job.events) == self._num_layers

    def _sweep(self) -> None:
        """Mark swap-ins, in order, as finished if the device has passed their last event."""
        while self._swap_ins and self._is_launched(job := self._swap_ins[0]):
            if not job.events[-1].query():
                return
            self._finished.extend(self._swap_ins.pop(0).copy_ids)
            self._changed.notify_all()

    def _report(self) -> tuple[int, ...]:
        self._sweep()
        return super()._report()

    def _work(self) -> None:
        self._streams.adopt_thread()
        while (launched := self._launch_next_unit()) is not None:
            job, event = launched
            event.synchronize()
            with self._changed:
                if job.next_layer == self._num_layers:
                    self._swap_outs.remove(job)
                    self._finished.extend(job.copy_ids)
                    self._changed.notify_all()

    def _launch_next_unit(self) -> tuple[_SwapOutJob, Event] | None:
        """Wait for a swap-out and launch some layers of the oldest; return None when closing."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._closing
                        or (self._swap_outs and all(map(self._is_launched, self._swap_ins)))
                    )
                )
                if self._closing:
                    return None
                self._sweep()
                if not self._swap_ins:
                    return self._launch_unit(self._swap_outs[0])
                event = self._swap_ins[-1].events[-1]
            event.synchronize()

    def _launch_unit(self, job: _SwapOutJob) -> tuple[_SwapOutJob, Event]:
        layer_bytes = len(job.moves.num_slots) * self._memory.page_bytes // self._num_layers
        count = max(UNIT_BYTES // max(layer_bytes, 1), 1)
        stream = self._streams.swap_out
        with self._streams.on(stream):
            if job.next_layer == 0:
                stream.wait_event(job.after)
            for layer in range(job.next_layer, min(job.next_layer + count, self._num_layers)):
                self._memory.swap_out(layer, job.moves)
                job.next_layer = layer + 1
            self._unit = self._streams.record(stream)
        return job, self._unit
