"""The streamer of a CPU, a thread that copies pages beside the compute; `streamer` is its interface.

The thread that computes and the worker share three counts of a pass, under one lock: the steps that were
loaded, attended to, and stored.  Each grows by one at a time, so it also says which steps are done:

    stored <= attended <= loaded <= stored + 2

The worker loads the next step while `loaded < stored + 2`, and stores the next one while `stored < attended`;
a load goes first, because somebody may be waiting for it.  `end` returns when all steps are stored.

An error in the worker ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pensieve.core.iteration import PageGroup
from pensieve.errors import DeviceError
from pensieve.model.kv.memory import STAGING_ARENAS, GroupMoves, KVMemory
from pensieve.model.kv.streamer import arena_of


@dataclass(slots=True, eq=False)
class _Pass:
    moves: list[GroupMoves]
    num_steps: int
    loaded: int = 0
    attended: int = 0
    stored: int = 0


class CpuStreamer:
    """The worker, and the pass that it copies for."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._changed = threading.Condition()
        self._pass: _Pass | None = None
        self._moving = False
        self._error: BaseException | None = None
        self._closing = False
        self._worker = threading.Thread(target=self._run, name="pensieve-streamer", daemon=True)
        self._worker.start()

    # -- called by the thread that computes --

    def begin(self, groups: Sequence[PageGroup]) -> None:
        assert self._pass is None, "a pass is under way"
        num_steps = self._memory.shape.num_layers * len(groups)
        with self._changed:
            self._raise_error()
            self._pass = _Pass(self._memory.moves_of(groups), num_steps)
            self._changed.notify_all()

    def wait_loaded(self, step: int) -> None:
        of_now = self._current
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or of_now.loaded > step)
            self._raise_error()

    def attended(self, step: int) -> None:
        of_now = self._current
        with self._changed:
            assert step == of_now.attended < of_now.loaded, "steps are attended to in their order"
            of_now.attended += 1
            self._changed.notify_all()

    def end(self) -> None:
        of_now = self._current
        with self._changed:
            assert of_now.attended == of_now.num_steps, "a layer has not attended"
            self._changed.wait_for(
                lambda: self._error is not None or of_now.stored == of_now.num_steps
            )
            self._raise_error()
            self._pass = None

    def abandon(self) -> None:
        with self._changed:
            self._pass = None
            self._changed.wait_for(lambda: not self._moving)

    def wait_stored(self) -> None:
        """`end` has waited."""

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join()

    @property
    def _current(self) -> _Pass:
        assert self._pass is not None, "no pass is under way"
        return self._pass

    def _raise_error(self) -> None:
        if self._error is not None:
            raise DeviceError(f"copying pages of streamed turns failed: {self._error}")

    # -- the worker --

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while (unit := self._next_unit()) is not None:
                    self._do(*unit)
        except BaseException as error:  # kept, and raised in whatever waits
            with self._changed:
                self._error, self._moving = error, False
                self._changed.notify_all()

    def _next_unit(self) -> tuple[_Pass, bool] | None:
        """A pass, and whether its next load, or its next store, is to be done; None when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._can_load() or self._can_store())
            if self._closing:
                return None
            self._moving = True
            assert self._pass is not None
            return self._pass, self._can_load()

    def _can_load(self) -> bool:
        each = self._pass
        return each is not None and each.loaded < min(each.num_steps, each.stored + STAGING_ARENAS)

    def _can_store(self) -> bool:
        return self._pass is not None and self._pass.stored < self._pass.attended

    def _do(self, of_now: _Pass, is_load: bool) -> None:
        step = of_now.loaded if is_load else of_now.stored
        layer, group = divmod(step, len(of_now.moves))
        loads, stores = of_now.moves[group]
        if is_load:
            self._memory.load(layer, arena_of(step), loads)
        else:
            self._memory.store(layer, arena_of(step), stores)
        with self._changed:
            if is_load:
                of_now.loaded += 1
            else:
                of_now.stored += 1
            self._moving = False
            self._changed.notify_all()
