"""Run a rank other than 0, which executes the iterations that rank 0 sends.

    reader thread     frames from rank 0   → the iterations that are not executed yet
    main thread       one iteration after another: copies, then the forward over this rank's pages
    reporter thread   copies that have finished here → rank 0

With `--check-kv` a worker checks its own part of the host pages.  If a page has changed, the worker fails and
all ranks restart, because rank 0 checks only its own part and would not recompute the page.

A worker decides nothing and samples nothing.  Its part of the logits reaches rank 0 through the collectives.
As a stage it sends its activations to the next stage (stages.py).  When the pipe is closed, rank 0 is gone
and the results are useless, so the process exits at once, even inside a collective.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from pensieve.core.iteration import Iteration
from pensieve.errors import DeviceError, ModelError, one_line, whole_line
from pensieve.model.forward import Forward
from pensieve.model.free_memory import free_for_kv
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.copier import copier_for
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel, load
from pensieve.model.parallel.leader import parts_of, sizes_of
from pensieve.model.parallel.rank_messages import ControlMessage, Frame, RankPipe
from pensieve.model.parallel.rank_store import RankStore
from pensieve.model.parallel.ranks import Rank
from pensieve.model.parallel.stages import StageModel


def serve(sock: socket.socket) -> None:
    """Execute rank 0's iterations until rank 0 is gone; never return.

    A rank on another machine is reachable at the local address of its connection to rank 0.
    """
    address = "" if sock.family == socket.AF_UNIX else str(sock.getsockname()[0])
    pipe = RankPipe(sock)
    try:
        settings = pipe.receive()
        if settings is None:
            os._exit(0)
        assert isinstance(settings, ControlMessage)
        _run(pipe, settings.values, address)
    except ModelError as error:  # rank 0 finds the same error
        with contextlib.suppress(OSError):
            pipe.send("refused", text=one_line(error))
    except BaseException as error:
        # The reporter may meet the same error at the same time; both send the same text.
        with contextlib.suppress(OSError):
            pipe.send("failed", text=whole_line(error))
        # If the collective failed because rank 0 ended, the pipe closes within this second, and this process
        # exits without a traceback.
        time.sleep(1)
        traceback.print_exc()
    os._exit(1)


def _run(pipe: RankPipe, settings: Mapping[str, Any], address: str) -> None:
    index, num_ranks, num_stages = (settings[key] for key in ("index", "num_ranks", "num_stages"))
    rank = WorkerRank(index, num_ranks, num_stages, pipe)
    torch.set_num_threads(settings["num_threads"])
    cuda = settings["device"] == "cuda"
    device = torch.device("cuda", settings["device_index"]) if cuda else torch.device("cpu")
    pipe.send("started")
    rank.enter_group(device, address or settings["address"])
    dtype = settings["dtype"]
    model = load(
        settings["folder"],
        dtype=None if dtype is None else getattr(torch, dtype),
        device=device,
        int8=settings["int8"],
        kv_dtype=settings["kv_dtype"],
        context_max=settings["context_max"],
        rank=rank,
    )
    probed = parts_of(model.shape) | sizes_of(model.shape)
    pipe.send("probed", **probed, first_layer=model.flat.first_layer)
    message = rank.next_message()
    if message.name == "measure":
        pipe.send("measured", num_bytes=free_for_kv(model, **message.values, device=device))
        message = rank.next_message()
    assert message.name == "pages", message
    memory = KVMemory(model.shape, **message.values, device=device)
    checksums = PageChecksums(memory.host_arena) if settings["check_kv"] else None
    executor = WorkerExecutor(model, memory, pipe, checksums)
    if isinstance(model.flat, StageModel):
        model.flat.connect()
    pipe.send("ready")
    while True:
        iteration = rank.next_frame()
        assert isinstance(iteration, Iteration), iteration
        executor.launch(iteration)


class WorkerRank(Rank):
    """This process as one of the ranks, with its end of the pipe."""

    def __init__(self, index: int, num_ranks: int, num_stages: int, pipe: RankPipe) -> None:
        super().__init__(index, num_ranks, num_stages)
        self._pipe = pipe
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        # Rank 0's answers to the requests of RankStore (see `_ask`).
        self._values: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._asking = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_all_loaded(self) -> None:
        self._pipe.send("loaded")
        message = self.next_message()
        assert message.name == "all_loaded", message

    def next_message(self) -> ControlMessage:
        frame = self.next_frame()
        assert isinstance(frame, ControlMessage), frame
        return frame

    def next_frame(self) -> Frame:
        return self._frames.get()

    def store(self) -> RankStore:
        return RankStore(self._ask)

    def _ask(self, verb: str, key: str, value: str) -> str | None:
        with self._asking:
            self._pipe.send("key", verb=verb, key=key, value=value)
            return self._values.get()

    def _read(self) -> None:
        while (frame := self._pipe.receive()) is not None:
            if isinstance(frame, ControlMessage) and frame.name == "value":
                self._values.put(frame.values["value"])
            else:
                self._frames.put(frame)
        os._exit(0)


class WorkerExecutor:
    """Execute the same iterations as rank 0's executor, over this rank's part of the pages."""

    def __init__(
        self,
        model: LoadedModel,
        memory: KVMemory,
        pipe: RankPipe,
        checksums: PageChecksums | None = None,
    ) -> None:
        self._pipe = pipe
        self._checksums = checksums
        self._device = memory.device_arena.device
        self._copier = copier_for(memory)
        self._forward = Forward(model.flat, memory, self._copier, may_halve=False)
        self._num_outstanding = 0  # copies that were submitted and not yet reported
        self._submitted = threading.Condition()
        threading.Thread(target=self._report, daemon=True).start()

    @torch.inference_mode()
    def launch(self, iteration: Iteration) -> None:
        self._submit(iteration)
        copies = self._forward.page_copies(iteration)
        if iteration.slices:
            self._forward.run(iteration.slices, copies, groups=iteration.groups)
            if iteration.groups and self._checksums is not None:
                self._forward.wait_stored()
                self._checksums.stored(iteration.groups)
        elif copies is not None:
            self._forward.copy_pages(copies)
        self._copier.launch_rest()

    def _submit(self, iteration: Iteration) -> None:
        num_copies = len(iteration.swap_ins) + len(iteration.swap_outs)
        if num_copies:
            if self._checksums is not None:
                if not all(
                    self._checksums.is_intact(each.host_page) for each in iteration.swap_ins
                ):
                    raise DeviceError("its part of the host tier has changed since it was written")
                self._checksums.begin(iteration.swap_outs)
            self._copier.submit(iteration.swap_ins, iteration.swap_outs)
            with self._submitted:
                self._num_outstanding += num_copies
                self._submitted.notify()

    def _report(self) -> None:
        """Run the reporter thread: send rank 0 the ids of finished copies."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while True:
                with self._submitted:
                    self._submitted.wait_for(lambda: self._num_outstanding > 0)
                copy_ids = self._copier.wait_any()
                if self._checksums is not None:
                    self._checksums.finish(copy_ids)
                self._pipe.send("finished", copy_ids=copy_ids)
                with self._submitted:
                    self._num_outstanding -= len(copy_ids)
        except OSError:
            os._exit(0)  # rank 0 is gone
        except Exception as error:
            self._pipe.send("failed", text=whole_line(error))
            os._exit(1)
