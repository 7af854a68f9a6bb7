"""An engine process that computes prompts and decodes in separate passes, as a baseline for benchmarks.

PENSIEVE_ENGINE=separate starts it as `python -m pensieve.launch.separate_engine FD`; `bench capacity` uses
it. Only the executor differs from the normal engine. It computes an iteration in two passes: first the
prompts, then the decodes. So the weights are read twice, and generating turns wait for whole prompts, as in
engines that prefer prompts and batch the phases separately (vLLM v0). The simulator has `--phases separate`
for this.

The scheduler is unchanged. The executor may group the slices of an iteration freely, as long as each slice is
computed after the slices that it reads. Only decodes move, to the end. No other slice reads the KV that they
write: the last, unfinished chunk belongs to one conversation, a fork gets a copy of it, and copies are done
before all slices.

One difference to such engines: they deliver a prompt's first token before the decode pass. Here all tokens of
an iteration arrive together, so first tokens are late by one decode pass.
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

    depth = 1  # one iteration in flight, so no slice waits for a token

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._prompt_ends: dict[int, int] = {}  # by turn_id
        self._first: Outcome | None = None  # of the prompt pass, if there were two passes

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
