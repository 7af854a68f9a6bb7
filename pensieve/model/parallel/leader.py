"""Run rank 0: start the workers, load the model with them, and notice when a worker ends.

Each worker (rank 1 … n-1) is a separate program with one inherited socket, without fork or pickle.  Rank 0
starts the workers of its machine.  Workers of other machines connect to it (arrivals.py) and get the highest
numbers.

    rank 0                                      rank n
    settings                         ──>
                                     <──        started
      ─── all enter the process group, through rank 0's key-value store (rank_store.py) ───
    reads its part of the weights               reads its part
                                     <──        loaded
    all_loaded                       ──>
      ──── all probe: the same forwards, with collectives ─────
                                     <──        probed, and the shape of its part
  (on a GPU: measure                 ──>        the largest batch, together
                                     <──        measured)
    pages                            ──>        allocates both tiers
                                     <──        ready
    iteration, iteration, …          ──>        executes them (executor.py)
                                     <──        finished, with the ids of copies

Stages of a pipeline (stages.py) do the same, but each stage probes alone.  A stage with several shards uses
collectives.  A stage with one shard uses no collectives, and does not wait until all have loaded.  Before any
turn is computed, rank 0 checks that the stages together have all layers, each once.

Rank 0 has one receiving thread per worker, so no worker ever blocks while it sends.  When a worker ends, the
kernel closes the worker's pipe and rank 0 notices at once.  From then on every launch, collect and waiting
call raises DeviceError.  When rank 0 ends, even if it is killed, each worker's pipe closes and the worker
exits.  A machine that dies silently is noticed by a timeout (handshake.py, `tuned`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from pensieve.core.iteration import Iteration
from pensieve.errors import DeviceError, UnsupportedModel
from pensieve.model.parallel.arrivals import Arrivals, RemoteRanks
from pensieve.model.parallel.handshake import RankIdentity
from pensieve.model.parallel.rank_messages import ControlMessage, RankPipe, packed
from pensieve.model.parallel.rank_store import Keys, RankStore
from pensieve.model.parallel.ranks import Rank
from pensieve.model.shape import ModelShape

STOP_SECONDS = 5.0
# These figures may differ between stages; only the last stage has logits.
STAGES_DIFFER = ("num_layers", "vocab_size")
# When a rank ends, a collective fails first.  The rank's pipe closes within this time after that.
EXPLANATION_SECONDS = 2.0


class Tally:
    """Count the ranks that have finished each copy; report a copy when all ranks have."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._counts: Counter[int] = Counter()  # copies that only some ranks have finished
        self._finished: list[int] = []
        self._reason: str | None = None

    def add(self, copy_ids: Iterable[int]) -> None:
        """Add copies that one rank has finished; each rank must add each copy once."""
        with self._changed:
            for copy_id in copy_ids:
                self._counts[copy_id] += 1
                if self._counts[copy_id] == self._num_ranks:
                    del self._counts[copy_id]
                    self._finished.append(copy_id)
            self._changed.notify_all()

    def take(self, *, wait: bool) -> tuple[int, ...]:
        """Return the copies finished on all ranks; with `wait`, wait for a copy if any is pending."""
        with self._changed:
            if wait:
                self._changed.wait_for(
                    lambda: self._finished or self._reason is not None or not self._counts
                )
            self.check()
            finished, self._finished = tuple(self._finished), []
            return finished

    def check(self) -> None:
        """Raise DeviceError if a rank has ended. Copies are not counted after that."""
        if self._reason is not None:
            raise DeviceError(self._reason)

    def give_up(self, reason: str) -> None:
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()

    def reason_within(self, seconds: float) -> str | None:
        """Wait up to `seconds` for the reason that a rank ended; return None if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason is not None, seconds)
            return self._reason


@dataclass(eq=False)
class _Worker:
    index: int  # its rank
    pipe: RankPipe
    process: subprocess.Popen[bytes] | None = None  # None for a worker on another machine
    arrival: RankIdentity | None = None
    replies: queue.SimpleQueue[ControlMessage | None] = field(default_factory=queue.SimpleQueue)

    def __str__(self) -> str:
        return f"rank {self.index}{f' ({self.arrival.host})' if self.arrival is not None else ''}"

    def how_it_ended(self) -> str:
        if self.process is None:
            return "its connection ended"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXPLANATION_SECONDS / 2)
        return f"status {self.process.returncode}"


class Leader(Rank):
    """Act as rank 0, and hold its end of each worker's pipe."""

    def __init__(
        self,
        num_ranks: int,
        device: torch.device,
        settings: Mapping[str, Any],
        program: tuple[str, ...],
        num_stages: int = 1,
        remote_ranks: RemoteRanks | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start this machine's workers and wait for the others; `worker.py` reads `settings`."""
        super().__init__(0, num_ranks, num_stages)
        self.tally = Tally(num_ranks)
        self.num_layers: list[int] = []  # by rank, set when all have loaded their parts
        self._closing = False
        self._refused = False  # a worker has found that the model cannot be served
        self._keys = Keys()
        self._workers: list[_Worker] = []
        num_local = num_ranks - (remote_ranks.num_ranks if remote_ranks is not None else 0)
        try:
            if remote_ranks is not None:
                for index, (pipe, arrival) in enumerate(
                    Arrivals(remote_ranks, report).wait(), num_local
                ):
                    pipe.trust()
                    self._workers.append(_Worker(index, pipe, arrival=arrival))
            for index in reversed(range(1, num_local)):
                self._workers.insert(0, self._start_worker(index, program))
            for each in self._workers:
                threading.Thread(target=self._listen, args=(each,), daemon=True).start()
                each.pipe.send(
                    "settings",
                    **{
                        **settings,
                        **_worker_settings(each),
                        "num_ranks": num_ranks,
                        "num_stages": num_stages,
                        "device": device.type,
                        "address": remote_ranks.host if remote_ranks is not None else "",
                    },
                )
            self._receive("started")
            self.enter_group(device, remote_ranks.host if remote_ranks is not None else "")
        except BaseException:
            self.close()
            raise

    def store(self) -> RankStore:
        return RankStore(self._keys.answer)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers on this machine."""
        return [each.process.pid for each in self._workers if each.process is not None]

    def wait_until_all_loaded(self) -> None:
        self._receive("loaded")
        self._send("all_loaded")

    def explain(self, error: Exception) -> None:
        """Raise the reason why another rank ended while this rank loaded.

        Raise nothing if that rank refused the model, because this rank has found the same reason.
        """
        reason = self.tally.reason_within(EXPLANATION_SECONDS)
        if reason is not None and not self._refused:
            raise DeviceError(reason) from error

    def check_shapes(self, shape: ModelShape, first_layer: int = 0) -> ModelShape:
        """Return the shape of the whole model; raise UnsupportedModel unless every rank's part fits.

        `shape` and `first_layer` describe rank 0's own part.  The ranks use the same page numbers, so a page
        of a layer must have the same size on each rank.
        """
        rank_values = [parts_of(shape) | sizes_of(shape) | {"first_layer": first_layer}]
        for index, values in enumerate(self._receive("probed"), 1):
            differ = STAGES_DIFFER if self.num_stages > 1 else ()
            theirs, own = (
                {name: each[name] for name in parts_of(shape) if name not in differ}
                for each in (values, rank_values[0])
            )
            if theirs != own:
                raise UnsupportedModel(f"its parts differ: rank {index} has {theirs}, rank 0 {own}")
            rank_values.append(values)
        self.num_layers = [each["num_layers"] for each in rank_values]
        _check_layers([(each["first_layer"], each["num_layers"]) for each in rank_values], self)
        if self.num_stages == 1:
            return shape
        stage_values = rank_values[:: self.num_shards]  # one shard of each stage, like rank 0
        return replace(
            shape, **{name: sum(each[name] for each in stage_values) for name in sizes_of(shape)}
        )

    def start_measuring(self, token_budget: int, turns_max: int, chunk_tokens: int) -> None:
        """Make every worker run the largest batch; rank 0 must run it at the same time."""
        self._send(
            "measure", token_budget=token_budget, turns_max=turns_max, chunk_tokens=chunk_tokens
        )

    def measured_bytes(self) -> list[int]:
        """Return the bytes that each worker has left for KV."""
        return [values["num_bytes"] for values in self._receive("measured")]

    def allocate(
        self, device_pages: int, host_pages: int, chunk_tokens: int, staging_pages: int = 0
    ) -> None:
        """Make every worker allocate its tiers and staging arenas; return when all have."""
        self._send(
            "pages",
            device_pages=device_pages,
            host_pages=host_pages,
            chunk_tokens=chunk_tokens,
            staging_pages=staging_pages,
        )
        self._receive("ready")

    def send_iteration(self, iteration: Iteration, with_tokens: bool = False) -> None:
        frame = packed(iteration, with_tokens)
        try:
            for each in self._workers:
                each.pipe.write(frame)
        except OSError as error:
            raise self.failure("the iteration could not be sent to every rank") from error

    def failure(self, otherwise: str) -> DeviceError:
        """Return the error for failed communication: why a rank ended, if one did, or `otherwise`."""
        return DeviceError(self.tally.reason_within(EXPLANATION_SECONDS) or otherwise)

    def close(self) -> None:
        """End the workers, then leave the process group."""
        self._closing = True
        for each in self._workers:
            each.pipe.close()
        for process in (each.process for each in self._workers if each.process is not None):
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.exit_group()

    # -- one worker --

    def _start_worker(self, index: int, program: tuple[str, ...]) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # so that only rank 0 gets Ctrl-C from the terminal
                env={**os.environ, "LOCAL_RANK": str(index)},
            )
        return _Worker(index, RankPipe(ours), process)

    def _listen(self, worker: _Worker) -> None:
        """Run the thread that receives from a worker: queue replies, and count finished copies."""
        while (frame := worker.pipe.receive()) is not None:
            assert isinstance(frame, ControlMessage)
            if frame.name == "finished":
                self.tally.add(frame.values["copy_ids"])
            elif frame.name == "key":
                self._answer_key(worker, **frame.values)
            elif frame.name in ("refused", "failed"):
                self._refused = frame.name == "refused"
                self._give_up(f"{worker} {frame.name}: {frame.values['text']}")
            else:
                worker.replies.put(frame)
        if not self._closing:
            self._give_up(f"{worker} ended ({worker.how_it_ended()})")
            if dist.is_initialized() and dist.get_backend() == "nccl":
                # gloo notices a broken connection; NCCL would wait for its timeout
                dist.distributed_c10d._abort_process_group()
        worker.replies.put(None)

    def _give_up(self, reason: str) -> None:
        self._keys.give_up(reason)
        self.tally.give_up(reason)

    def _answer_key(self, worker: _Worker, verb: str, key: str, value: str) -> None:
        with contextlib.suppress(DeviceError, OSError):  # this rank or another rank has ended
            worker.pipe.send("value", value=self._keys.answer(verb, key, value))

    def _send(self, name: str, **values: Any) -> None:
        try:
            for each in self._workers:
                each.pipe.send(name, **values)
        except OSError as error:
            raise self.failure(f"the message {name!r} could not be sent to every rank") from error

    def _receive(self, name: str) -> list[dict[str, Any]]:
        """Return the values of each worker's next reply, which must have this name."""
        received = []
        for each in self._workers:
            message = each.replies.get()
            if message is None:
                raise self.failure(f"{each} ended")
            assert message.name == name, (message, name)
            received.append(message.values)
        return received


def _worker_settings(worker: _Worker) -> dict[str, Any]:
    """Return the settings that are specific to a worker."""
    arrival = worker.arrival
    if arrival is None:
        return {"index": worker.index, "device_index": worker.index}
    return {
        "index": worker.index,
        "device_index": arrival.device_index,
        "folder": arrival.folder,
        "num_threads": arrival.num_threads,
    }


def _check_layers(rank_layers: Sequence[tuple[int, int]], rank: Rank) -> None:
    """Raise UnsupportedModel unless the stages' layers follow each other, and shards have equal layers."""
    stages = [rank_layers[start : start + rank.num_shards] for start in _starts(rank)]
    expected = 0
    for number, shards in enumerate(stages, 1):
        if set(shards) != {(expected, shards[0][1])}:
            found = ", ".join(f"{first} to {first + count - 1}" for first, count in shards)
            raise UnsupportedModel(
                f"its stages do not fit: stage {number} should begin with layer {expected}, but has {found}"
            )
        expected += shards[0][1]


def _starts(rank: Rank) -> list[int]:
    """Return the first rank of each stage, in the order of the stages."""
    starts = list(range(0, rank.num_ranks, rank.num_shards))
    return [*starts[1:], starts[0]]


def parts_of(shape: ModelShape) -> dict[str, Any]:
    """Return the figures of a part's shape that must be the same on every rank."""
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
    """Return the figures of a part that add up over stages."""
    return {
        "num_layers": shape.num_layers,
        "num_parameters": shape.num_parameters,
        "weight_bytes": shape.weight_bytes,
    }
