"""An engine process that computes prompts and decodes in separate passes, as a baseline for benchmarks.

PENSIEVE_ENGINE=separate starts this engine as `python -m pensieve.launch.separate_engine FD`. It is used by
`bench capacity`. Only the executor differs from the normal engine. It computes an iteration in two passes:
first the prompts, then the decodes. So the weights are read twice, and generating turns wait for whole
prompts. vLLM v0 works in the same way. The simulator option `--phases separate` simulates this engine.

The scheduler is unchanged. The executor may compute the slices of an iteration in any order in which each
slice comes after the slices that it reads. Here, the decodes are moved to the end. That is allowed, because
no other slice reads the KV that a decode writes. A decode writes to the last, unfinished chunk of its
conversation. A fork has its own copy of that chunk, and copies are done before all slices.

vLLM v0 delivers the first token of a prompt before the decode pass. Here, all tokens of an iteration are
delivered together, so first tokens are one decode pass later.
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

    depth = 1  # one iteration in flight, so the input token of each decode is known at the launch

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._prompt_ends: dict[int, int] = {}  # by attempt_id
        self._first: Outcome | None = None  # outcome of the prompt pass, if there are two passes

    def launch(self, iteration: Iteration) -> None:
        for start in iteration.started:
            self._prompt_ends[start.attempt_id] = len(start.context)
        prompts: list[Slice] = []
        decodes: list[Slice] = []
        for piece in iteration.slices:
            (decodes if self._is_decode(piece) else prompts).append(piece)
        for attempt_id in iteration.ended:
            self._prompt_ends.pop(attempt_id, None)
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
        return piece.num_tokens == 1 and piece.start >= self._prompt_ends[piece.attempt_id]


def build(
    settings: Settings, folder: Path, report: Report, mailbox: Mailbox, sink: Sink
) -> BuiltEngine:
    built = build_with_model(settings, folder, report, mailbox, sink)
    built.engine.executor = SeparatePhases(built.engine.executor)
    return built


if __name__ == "__main__":
    sys.exit(engine_process.main(int(sys.argv[1]), build, import_torch))
