"""Rank 0: it starts the other ranks, and notices when one is gone.

Each follower is a program of its own with one inherited socket: no fork, no pickle.

    rank 0                                      rank n
    settings                         ──>
                                     <──        here
      ──────────────── all join the process group ────────────────
    reads its part of the weights               reads its part
                                     <──        met
    met                              ──>
      ──── all probe: the same forwards, collectives in them ─────
                                     <──        probed, and the shape of its part
  (a GPU's: measure                  ──>        the largest batch, together
                                     <──        measured)
    pages                            ──>        allocates both tiers
                                     <──        ready
    order, order, …                  ──>        follows (parallel.py)
                                     <──        finished, with the ids of copies

One thread per follower listens, so that no follower ever waits to be heard, and so that its end is
noticed at once.  The pipe of a follower that ends is closed by the kernel, whatever it died of;
then nothing can be launched or collected any more, and all that waits here raises DeviceError.  The
other way round, a follower whose pipe ends exits: none outlives rank 0, even when that is killed, nor
does the folder in which they met.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pensieve.errors import DeviceError, UnsupportedModel
from pensieve.model.parallel.ranks import Rank
from pensieve.model.parallel.wire import Pipe, Words
from pensieve.model.shape import ModelShape

STOP_SECONDS = 5.0
LAST_WORDS_SECONDS = 2.0  # from a broken collective to the end of the pipe that explains it


class Tally:
    """Counts on how many ranks each copy has finished; one that has on all is ready to be told."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._counts: Counter[int] = Counter()  # of copies that finished on some ranks, not on all
        self._finished: list[int] = []
        self._reason: str | None = None

    def add(self, copy_ids: Iterable[int]) -> None:
        """One rank, another each time, says that it has finished these."""
        with self._changed:
            for copy_id in copy_ids:
                self._counts[copy_id] += 1
                if self._counts[copy_id] == self._num_ranks:
                    del self._counts[copy_id]
                    self._finished.append(copy_id)
            self._changed.notify_all()

    def take(self, *, wait: bool) -> tuple[int, ...]:
        """What has finished everywhere; if nothing has, wait for what has somewhere."""
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
        """Why no copy will be counted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason is not None, seconds)
            return self._reason


@dataclass(eq=False)
class _Follower:
    index: int
    process: subprocess.Popen[bytes]
    pipe: Pipe
    said: queue.SimpleQueue[Words | None] = field(default_factory=queue.SimpleQueue)


class Leader(Rank):
    """Rank 0, and its end of the pipes."""

    def __init__(
        self,
        num_ranks: int,
        device: torch.device,
        settings: Mapping[str, Any],
        program: tuple[str, ...],
    ) -> None:
        """Start the followers; `settings` are what `follower` reads."""
        super().__init__(0, num_ranks)
        self.tally = Tally(num_ranks)
        self._closing = False
        self._refused = False  # a follower has found the model unfit
        self._folder = Path(tempfile.mkdtemp(prefix="pensieve-ranks-"))  # its user's alone
        self._followers: list[_Follower] = []
        try:
            for index in range(1, num_ranks):
                self._followers.append(self._started(index, program))
            for each in self._followers:
                threading.Thread(target=self._listen, args=(each,), daemon=True).start()
                each.pipe.say(
                    "settings",
                    index=each.index,
                    num_ranks=num_ranks,
                    device=device.type,
                    meeting_folder=str(self._folder),
                    **settings,
                )
            self._hear("here")
            self.join(self._folder, device)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the followers."""
        return [each.process.pid for each in self._followers]

    def meet(self) -> None:
        self._hear("met")
        self._say("met")

    def explain(self, error: Exception) -> None:
        """Raise what ended another rank while this one loaded, unless it refused the model too."""
        reason = self.tally.reason_within(LAST_WORDS_SECONDS)
        if reason is not None and not self._refused:
            raise DeviceError(reason) from error

    def check_shapes(self, shape: ModelShape) -> None:
        """Every part must be like this one: they share page numbers, and one page's bytes."""
        for index, values in enumerate(self._hear("probed"), 1):
            if values != parts_of(shape):
                raise UnsupportedModel(
                    f"its parts differ: rank {index} has {values}, rank 0 {parts_of(shape)}"
                )

    def say_measure(self, token_budget: int, turns_max: int, chunk_tokens: int) -> None:
        """Every rank tries out the largest batch; this one has to, at the same time."""
        self._say(
            "measure", token_budget=token_budget, turns_max=turns_max, chunk_tokens=chunk_tokens
        )

    def hear_measured(self) -> list[int]:
        """Bytes that the followers have left for KV."""
        return [values["num_bytes"] for values in self._hear("measured")]

    def allocate(self, device_pages: int, host_pages: int, chunk_tokens: int) -> None:
        """Return when every follower has its two tiers."""
        self._say(
            "pages", device_pages=device_pages, host_pages=host_pages, chunk_tokens=chunk_tokens
        )
        self._hear("ready")

    def order(self, packed: array[int]) -> None:
        try:
            for each in self._followers:
                each.pipe.order(packed)
        except OSError as error:
            raise self.failure("the order could not be sent") from error

    def failure(self, otherwise: str) -> DeviceError:
        """What to raise when something between the ranks has failed."""
        return DeviceError(self.tally.reason_within(LAST_WORDS_SECONDS) or otherwise)

    def close(self) -> None:
        """End the followers, then leave the process group."""
        self._closing = True
        for each in self._followers:
            each.pipe.close()
        for each in self._followers:
            try:
                each.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        self.leave()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- one follower --

    def _started(self, index: int, program: tuple[str, ...]) -> _Follower:
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
        return _Follower(index, process, Pipe(ours))

    def _listen(self, follower: _Follower) -> None:
        """Until its pipe ends: words to whoever waits for them, finished copies to the tally."""
        while (frame := follower.pipe.receive()) is not None:
            assert isinstance(frame, Words)
            if frame.what == "finished":
                self.tally.add(frame.values["copy_ids"])
            elif frame.what in ("refused", "failed"):
                self._refused = frame.what == "refused"
                self.tally.give_up(f"rank {follower.index} {frame.what}: {frame.values['text']}")
            else:
                follower.said.put(frame)
        if not self._closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.process.wait(LAST_WORDS_SECONDS / 2)
            status = follower.process.returncode
            self.tally.give_up(f"rank {follower.index} ended (status {status})")
            if dist.is_initialized() and dist.get_backend() == "nccl":
                # gloo sees a broken connection; NCCL would wait for its timeout
                dist.distributed_c10d._abort_process_group()
            shutil.rmtree(self._folder, ignore_errors=True)  # nobody may be left to do it later
        follower.said.put(None)

    def _say(self, what: str, **values: Any) -> None:
        try:
            for each in self._followers:
                each.pipe.say(what, **values)
        except OSError as error:
            raise self.failure(f"{what!r} could not be sent") from error

    def _hear(self, what: str) -> list[dict[str, Any]]:
        """What each follower has to say about this."""
        heard = []
        for each in self._followers:
            words = each.said.get()
            if words is None:
                raise self.failure(f"rank {each.index} ended")
            assert words.what == what, (words, what)
            heard.append(words.values)
        return heard


def parts_of(shape: ModelShape) -> dict[str, Any]:
    """What the parts of a model have in common."""
    return {
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "vocab_size": shape.vocab_size,
        "dtype": str(shape.dtype),
    }
