"""An echo engine that generates scripted replies, started with SCRIPT … FD.

SCRIPT is a JSON file with a list of replies. A turn that starts removes the first reply from the file,
generates it, and ends. Names of control tokens in the text become these tokens. A test may write new replies
at any time. The scheduler, the cache and the pipe are real.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pensieve.config import Settings
from pensieve.core.iteration import Iteration, Outcome, SampledToken
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.ports import Sink
from pensieve.launch import echo_engine, engine_process
from pensieve.launch.engine import BuiltEngine
from pensieve.launch.model_folder import Report
from pensieve.text import Tokenizer
from pensieve.text.template_text import written

NOTHING_LEFT = "The script has no reply for this turn."


def write_script(script: Path, replies: Sequence[str]) -> None:
    """Replace the file in one step, because the engine may be reading it."""
    new = script.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(list(replies)))
    new.replace(script)


class ScriptedExecutor(echo_engine.EchoExecutor):
    def __init__(self, tokenizer: Tokenizer, end_id: int, script: Path) -> None:
        super().__init__(tokenizer, end_id, 0.0)
        self._script = script
        self._left: dict[int, list[int]] = {}  # turn -> remaining tokens

    def launch(self, iteration: Iteration) -> None:
        for start in iteration.started:
            text = written(self._next_reply())
            self._left[start.attempt_id] = [*self._tokenizer.encode(text).ids, self._end_id]
        super().launch(iteration)

    def collect(self) -> Outcome:
        iteration = self._launched.popleft()
        samples = []
        for piece in iteration.slices:
            if piece.needs_token:
                token_id = self._left[piece.attempt_id].pop(0)
                text, stopped = self._turns[piece.attempt_id].text.push(token_id, piece.is_last)
                repeats = self._turns[piece.attempt_id].text.repeats
                samples.append(
                    SampledToken(piece.attempt_id, token_id, text, stopped, repeats=repeats)
                )
        copied = (each.copy_id for each in iteration.swap_ins)
        stored = (each.copy_id for each in iteration.swap_outs)
        return Outcome(tuple(samples), (*copied, *stored))

    def _next_reply(self) -> str:
        replies = json.loads(self._script.read_text())
        if not replies:
            return NOTHING_LEFT
        write_script(self._script, replies[1:])
        return replies[0]


def build(
    script: Path, settings: Settings, folder: Path, report: Report, mailbox: Mailbox, sink: Sink
) -> BuiltEngine:
    def make_executor(tokenizer: Tokenizer, end_id: int, seconds: float) -> ScriptedExecutor:
        return ScriptedExecutor(tokenizer, end_id, script)

    echo_engine.EchoExecutor = make_executor  # type: ignore[assignment, misc]
    return echo_engine.build(0.0, settings, folder, report, mailbox, sink)


if __name__ == "__main__":
    sys.exit(engine_process.main(int(sys.argv[-1]), partial(build, Path(sys.argv[1]))))
