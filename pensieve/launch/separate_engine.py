"""An engine process that computes prompts in passes of their own, to compare ours with.

Started as `python -m pensieve.launch.separate_engine FD` by PENSIEVE_ENGINE=separate; `bench capacity`
uses it.  All is that of an engine that runs a model but its executor, which computes an iteration in two
passes, the prompts' and then that of the turns that generate: the weights are read twice, and who generates
waits for whole prompts, as in engines that give prompts precedence and batch the phases apart (vLLM v0).  The
simulator does the same with `--phases separate`.

It wraps the executor, and leaves the scheduler alone, because an iteration is data: which of its slices are
computed together is the executor's to decide, as long as every slice comes after those that it reads.  The
only slices that change places are those of turns that generate, which move to the end.  No other slice reads
what they write: the last chunk of a conversation that is still being written is its own, whoever forks it
gets a copy, and copies are done before any slice.

The prompts' first tokens are out before the second pass elsewhere; here an iteration's tokens come together,
so they are late by a pass of decodes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from pensieve.config import Settings
from pensieve.core.iteration import Iteration, Outcome, Slice
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.ports import Executor, Sink
from pensieve.launch import engine_process
from pensieve.launch.engine import BuiltEngine
from pensieve.launch.engine_process import build_with_model, import_torch
from pensieve.launch.model_folder import Report


class SeparatePhases:
    """Computes an iteration's prompts, and then its decodes, on another executor."""

    depth = 1  # so no slice awaits a token

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._prompt_ends: dict[int, int] = {}  # by turn_id
        self._first: Outcome | None = None  # of the prompts' pass, if there were two

    def launch(self, iteration: Iteration) -> None:
        for start in iteration.started:
            self._prompt_ends[start.turn_id] = len(start.context)
        prompts: list[Slice] = []
        decodes: list[Slice] = []
        for piece in iteration.slices:
            (decodes if self._is_decode(piece) else prompts).append(piece)
        for turn_id in iteration.ended:
            self._prompt_ends.pop(turn_id, None)
        if prompts and decodes:
            self._executor.launch(replace(iteration, slices=tuple(prompts)))
            self._first = self._executor.collect()
            iteration = Iteration(iteration.index, tuple(decodes))
        self._executor.launch(iteration)

    def collect(self) -> Outcome:
        outcome, first, self._first = self._executor.collect(), self._first, None
        if first is None:
            return outcome
        return Outcome(
            first.samples + outcome.samples,
            first.finished_copies + outcome.finished_copies,
            first.failures + outcome.failures,
        )

    def _is_decode(self, piece: Slice) -> bool:
        return piece.num_tokens == 1 and piece.start >= self._prompt_ends[piece.turn_id]


def build(
    settings: Settings, folder: Path, report: Report, mailbox: Mailbox, sink: Sink
) -> BuiltEngine:
    built = build_with_model(settings, folder, report, mailbox, sink)
    built.engine.executor = SeparatePhases(built.engine.executor)
    return built


if __name__ == "__main__":
    sys.exit(engine_process.main(int(sys.argv[1]), build, import_torch))
