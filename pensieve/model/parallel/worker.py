"""Ranks 1 … n-1: the process that follows rank 0's orders.

    reader thread     frames from rank 0   → the orders that are not carried out yet
    main thread       one order after another: copies, then the forward over its part of the pages
    reporter thread   copies that have finished here → rank 0

It decides nothing and samples nothing: what it computes of the logits leaves in the collectives.
When the pipe ends, rank 0 is gone, and with it every reason to go on: the process ends at once,
also out of the middle of a collective.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pensieve.core.iteration import Iteration
from pensieve.errors import ModelError, PensieveError, one_line
from pensieve.model.forward import Forward, copier_for
from pensieve.model.free_memory import free_for_kv
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel, load
from pensieve.model.parallel.leader import parts_of
from pensieve.model.parallel.ranks import Rank
from pensieve.model.parallel.wire import Frame, Pipe, Words


def serve(sock: socket.socket) -> None:
    """Follow rank 0 until it is gone; never returns."""
    pipe = Pipe(sock)
    try:
        settings = pipe.receive()
        if settings is None:
            os._exit(0)
        assert isinstance(settings, Words)
        _follow(pipe, settings.values)
    except ModelError as error:  # rank 0 finds the same
        with contextlib.suppress(OSError):
            pipe.say("refused", text=one_line(error))
    except BaseException as error:
        # The reporter may meet the same error at the same time: whoever is first says the same of it.
        is_ours = isinstance(error, PensieveError)
        name = "" if is_ours else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):
            pipe.say("failed", text=name + one_line(error))
        time.sleep(1)  # if it is rank 0's end that broke the collective, nobody need hear of it
        traceback.print_exc()
    os._exit(1)


def _follow(pipe: Pipe, settings: Mapping[str, Any]) -> None:
    folder = Path(settings["meeting_folder"])
    rank = Follower(settings["index"], settings["num_ranks"], pipe, folder)
    torch.set_num_threads(settings["num_threads"])
    cuda = settings["device"] == "cuda"
    device = torch.device("cuda", settings["index"]) if cuda else torch.device("cpu")
    pipe.say("here")
    rank.join(folder, device)
    dtype = settings["dtype"]
    model = load(
        settings["folder"],
        dtype=None if dtype is None else getattr(torch, dtype),
        device=device,
        rank=rank,
    )
    pipe.say("probed", **parts_of(model.shape))
    words = rank.next_words()
    if words.what == "measure":
        pipe.say("measured", num_bytes=free_for_kv(model, **words.values, device=device))
        words = rank.next_words()
    assert words.what == "pages", words
    executor = FollowingExecutor(model, KVMemory(model.shape, **words.values, device=device), pipe)
    pipe.say("ready")
    while True:
        order = rank.next_frame()
        assert isinstance(order, Iteration), order
        executor.launch(order)


class Follower(Rank):
    """This process, and its end of the pipe."""

    def __init__(self, index: int, num_ranks: int, pipe: Pipe, folder: Path) -> None:
        super().__init__(index, num_ranks)
        self._pipe = pipe
        self._folder = folder
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def meet(self) -> None:
        self._pipe.say("met")
        self.hear("met")

    def hear(self, what: str) -> dict[str, Any]:
        words = self.next_words()
        assert words.what == what, words
        return words.values

    def next_words(self) -> Words:
        words = self.next_frame()
        assert isinstance(words, Words), words
        return words

    def next_frame(self) -> Frame:
        return self._frames.get()

    def _read(self) -> None:
        while (frame := self._pipe.receive()) is not None:
            self._frames.put(frame)
        shutil.rmtree(self._folder, ignore_errors=True)  # rank 0 may not have come to it
        os._exit(0)


class FollowingExecutor:
    """Carries out the same iterations as rank 0's executor, over this rank's part of the pages."""

    def __init__(self, model: LoadedModel, memory: KVMemory, pipe: Pipe) -> None:
        self._pipe = pipe
        self._device = memory.device_arena.device
        self._copier = copier_for(memory)
        self._forward = Forward(model.flat, memory, self._copier, halves=False)
        self._num_outstanding = 0  # copies that were submitted and not yet told
        self._submitted = threading.Condition()
        threading.Thread(target=self._report, daemon=True).start()

    @torch.inference_mode()
    def launch(self, iteration: Iteration) -> None:
        self._submit(iteration)
        copies = self._forward.page_copies(iteration)
        if iteration.slices:
            self._forward.run(iteration.slices, copies)
        elif copies is not None:
            self._forward.copy_pages(copies)

    def _submit(self, iteration: Iteration) -> None:
        num_copies = len(iteration.swap_ins) + len(iteration.swap_outs)
        if num_copies:
            self._copier.submit(iteration.swap_ins, iteration.swap_outs)
            with self._submitted:
                self._num_outstanding += num_copies
                self._submitted.notify()

    def _report(self) -> None:
        """The reporter thread."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while True:
                with self._submitted:
                    self._submitted.wait_for(lambda: self._num_outstanding > 0)
                copy_ids = self._copier.wait_any()
                self._pipe.say("finished", copy_ids=copy_ids)
                with self._submitted:
                    self._num_outstanding -= len(copy_ids)
        except PensieveError as error:
            self._pipe.say("failed", text=one_line(error))
            os._exit(1)
        except OSError:
            os._exit(0)  # rank 0 is gone
