"""Rank 0, which starts the workers, loads the model with them, and notices when one ends.

Each worker (rank 1 … n-1) is a program of its own with one inherited socket: no fork, no pickle.

    rank 0                                      rank n
    settings                         ──>
                                     <──        started
      ─────────── all enter the process group (a rendezvous) ───────────
    reads its part of the weights               reads its part
                                     <──        loaded
    all_loaded                       ──>
      ──── all probe: the same forwards, collectives in them ─────
                                     <──        probed, and the shape of its part
  (a GPU's: measure                  ──>        the largest batch, together
                                     <──        measured)
    pages                            ──>        allocates both tiers
                                     <──        ready
    iteration, iteration, …          ──>        carries them out (executor.py)
                                     <──        finished, with the ids of copies

Stages of a pipeline (stages.py) do the same, but each probes alone, with no collective, and does not wait
until all have loaded.

Rank 0 has one thread per worker that receives, so no worker ever blocks while it sends, and the end of one
is noticed at once.  The kernel closes the pipe of a worker that ends, for whatever reason; from then on
nothing can be launched or collected, and every call that waits here raises DeviceError.  The other way
round, a worker whose pipe ends exits.  So no worker outlives rank 0, even when rank 0 is killed, nor does
the rendezvous folder.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import tempfile
import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pensieve.errors import DeviceError, UnsupportedModel
from pensieve.model.parallel.rank_messages import ControlMessage, RankPipe
from pensieve.model.parallel.ranks import Rank
from pensieve.model.shape import ModelShape

STOP_SECONDS = 5.0
STAGES_DIFFER = ("num_layers", "vocab_size")  # the last one alone has logits
EXPLANATION_SECONDS = (
    2.0  # how long after a broken collective the pipe of the rank that ended closes
)


class Tally:
    """Counts on how many ranks each copy has finished; one that has finished on all can be reported."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._counts: Counter[int] = Counter()  # of copies that finished on some ranks, not on all
        self._finished: list[int] = []
        self._reason: str | None = None

    def add(self, copy_ids: Iterable[int]) -> None:
        """One rank reports copies that it has finished; each rank reports each copy once."""
        with self._changed:
            for copy_id in copy_ids:
                self._counts[copy_id] += 1
                if self._counts[copy_id] == self._num_ranks:
                    del self._counts[copy_id]
                    self._finished.append(copy_id)
            self._changed.notify_all()

    def take(self, *, wait: bool) -> tuple[int, ...]:
        """The copies that have finished on all ranks; if there are none, wait for one that has on some."""
        with self._changed:
            if wait:
                self._changed.wait_for(
                    lambda: self._finished or self._reason is not None or not self._counts
                )
            if self._reason is not None:
                raise DeviceError(self._reason)
            finished, self._finished = tuple(self._finished), []
            return finished

    def give_up(self, reason: str) -> None:
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()

    def reason_within(self, seconds: float) -> str | None:
        """Why no copy will be counted any more, as soon as that is known; None after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason is not None, seconds)
            return self._reason


@dataclass(eq=False)
class _Worker:
    index: int  # its rank
    process: subprocess.Popen[bytes]
    pipe: RankPipe
    replies: queue.SimpleQueue[ControlMessage | None] = field(default_factory=queue.SimpleQueue)


class Leader(Rank):
    """Rank 0 as one of the ranks, and its end of each worker's pipe."""

    def __init__(
        self,
        num_ranks: int,
        device: torch.device,
        settings: Mapping[str, Any],
        program: tuple[str, ...],
        num_stages: int = 1,
    ) -> None:
        """Start the workers; `settings` are what `worker.py` reads."""
        super().__init__(0, num_ranks, num_stages)
        self.tally = Tally(num_ranks)
        self.num_layers: list[int] = []  # by rank, when all have loaded their parts
        self._closing = False
        self._refused = False  # a worker has found that the model cannot be served
        self._folder = Path(tempfile.mkdtemp(prefix="pensieve-ranks-"))  # its user's alone
        self._workers: list[_Worker] = []
        try:
            for index in range(1, num_ranks):
                self._workers.append(self._started(index, program))
            for each in self._workers:
                threading.Thread(target=self._listen, args=(each,), daemon=True).start()
                each.pipe.send(
                    "settings",
                    index=each.index,
                    num_ranks=num_ranks,
                    num_stages=num_stages,
                    device=device.type,
                    rendezvous_folder=str(self._folder),
                    **settings,
                )
            self._receive("started")
            self.enter_group(self._folder, device)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the worker processes."""
        return [each.process.pid for each in self._workers]

    def wait_until_all_loaded(self) -> None:
        self._receive("loaded")
        self._send("all_loaded")

    def explain(self, error: Exception) -> None:
        """Raise the reason why another rank ended while this one loaded.

        Nothing is raised when that rank refused the model: then this one has found the same.
        """
        reason = self.tally.reason_within(EXPLANATION_SECONDS)
        if reason is not None and not self._refused:
            raise DeviceError(reason) from error

    def check_shapes(self, shape: ModelShape) -> ModelShape:
        """The shape of the whole model; UnsupportedModel unless every rank's part fits to this one.

        The ranks use the same page numbers, so a page of a layer must have as many bytes on each.
        """
        of_ranks = [parts_of(shape) | sizes_of(shape)]
        for index, values in enumerate(self._receive("probed"), 1):
            differ = STAGES_DIFFER if self.num_stages > 1 else ()
            kept, own = (
                {name: each[name] for name in parts_of(shape) if name not in differ}
                for each in (values, of_ranks[0])
            )
            if kept != own:
                raise UnsupportedModel(f"its parts differ: rank {index} has {kept}, rank 0 {own}")
            of_ranks.append(values)
        self.num_layers = [each["num_layers"] for each in of_ranks]
        if self.num_stages == 1:
            return shape
        return replace(
            shape, **{name: sum(each[name] for each in of_ranks) for name in sizes_of(shape)}
        )

    def start_measuring(self, token_budget: int, turns_max: int, chunk_tokens: int) -> None:
        """Have every worker run the largest batch; rank 0 must run it at the same time."""
        self._send(
            "measure", token_budget=token_budget, turns_max=turns_max, chunk_tokens=chunk_tokens
        )

    def measured_bytes(self) -> list[int]:
        """Bytes that each worker has left for KV."""
        return [values["num_bytes"] for values in self._receive("measured")]

    def allocate(
        self, device_pages: int, host_pages: int, chunk_tokens: int, staging_pages: int = 0
    ) -> None:
        """Have every worker allocate its two tiers and its staging arenas; returns when all have."""
        self._send(
            "pages",
            device_pages=device_pages,
            host_pages=host_pages,
            chunk_tokens=chunk_tokens,
            staging_pages=staging_pages,
        )
        self._receive("ready")

    def send_iteration(self, packed: array[int]) -> None:
        try:
            for each in self._workers:
                each.pipe.send_iteration(packed)
        except OSError as error:
            raise self.failure("the iteration could not be sent to every rank") from error

    def failure(self, otherwise: str) -> DeviceError:
        """The error to raise when communication has failed: the reason why a rank ended, if one did."""
        return DeviceError(self.tally.reason_within(EXPLANATION_SECONDS) or otherwise)

    def close(self) -> None:
        """End the workers, then exit the process group."""
        self._closing = True
        for each in self._workers:
            each.pipe.close()
        for each in self._workers:
            try:
                each.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        self.exit_group()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- one worker --

    def _started(self, index: int, program: tuple[str, ...]) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at a terminal is rank 0's to handle
                env={**os.environ, "LOCAL_RANK": str(index)},
            )
        return _Worker(index, process, RankPipe(ours))

    def _listen(self, worker: _Worker) -> None:
        """A worker's thread: replies go to the call that waits for them, finished copies to the tally."""
        while (frame := worker.pipe.receive()) is not None:
            assert isinstance(frame, ControlMessage)
            if frame.name == "finished":
                self.tally.add(frame.values["copy_ids"])
            elif frame.name in ("refused", "failed"):
                self._refused = frame.name == "refused"
                self.tally.give_up(f"rank {worker.index} {frame.name}: {frame.values['text']}")
            else:
                worker.replies.put(frame)
        if not self._closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(EXPLANATION_SECONDS / 2)
            status = worker.process.returncode
            self.tally.give_up(f"rank {worker.index} ended (status {status})")
            if dist.is_initialized() and dist.get_backend() == "nccl":
                # gloo sees a broken connection; NCCL would wait for its timeout
                dist.distributed_c10d._abort_process_group()
            shutil.rmtree(
                self._folder, ignore_errors=True
            )  # rank 0 may be killed before it gets to close()
        worker.replies.put(None)

    def _send(self, name: str, **values: Any) -> None:
        try:
            for each in self._workers:
                each.pipe.send(name, **values)
        except OSError as error:
            raise self.failure(f"the message {name!r} could not be sent to every rank") from error

    def _receive(self, name: str) -> list[dict[str, Any]]:
        """The values of each worker's next reply, which must have this name."""
        received = []
        for each in self._workers:
            message = each.replies.get()
            if message is None:
                raise self.failure(f"rank {each.index} ended")
            assert message.name == name, (message, name)
            received.append(message.values)
        return received


def parts_of(shape: ModelShape) -> dict[str, Any]:
    """The figures of a part's shape that must be the same on every rank."""
    return {
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "vocab_size": shape.vocab_size,
        "dtype": str(shape.dtype),
        "kv_dtype": shape.kv_dtype,
    }


def sizes_of(shape: ModelShape) -> dict[str, int]:
    """The figures of a part that add up over stages."""
    return {
        "num_layers": shape.num_layers,
        "num_parameters": shape.num_parameters,
        "weight_bytes": shape.weight_bytes,
    }
