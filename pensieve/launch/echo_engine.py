"""An engine process whose model is arithmetic: `python -m pensieve.launch.echo_engine FD`.

Everything is real but the tensors: mailbox, scheduler, cache, detokeniser, pipe.  The next token is a
pure function of every token before it, so a reply is wrong if and only if its history was.  It is
what `pensieve bench service` and the tests of the service put in the engine's place: what they measure
or break is then the service.

`--seconds S` lets an iteration take S seconds, so that a load can exceed what the engine carries.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import deque
from functools import partial
from pathlib import Path

from pensieve.config import Settings
from pensieve.core.cache import CacheConfig, KVCache
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Iteration, Outcome, Sample
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler import Scheduler, SchedulerConfig
from pensieve.core.turn import Turn
from pensieve.engine.engine import Engine, EngineConfig
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.ports import Sink
from pensieve.launch import engine_process as engine_main
from pensieve.launch.engine import BuiltEngine, Report, SystemClock, load_texts
from pensieve.text import Tokenizer

PAGES = 4096
CONTEXT_MAX = 100_000
MULTIPLIER, MODULUS = 6_364_136_223_846_793_005, 1 << 64
WORDS_PER_REPLY = 24  # on average, unless the turn says how long


def digest(tokens: array[int], state: int = 0) -> int:
    for token in tokens:
        state = ((state ^ token) * MULTIPLIER + 1) % MODULUS
    return state


def next_token(state: int, num_tokens: int, end_id: int) -> int:
    """The token after a context with this digest; sometimes the end."""
    drawn = state >> 33
    if drawn % WORDS_PER_REPLY == 0:
        return end_id
    return drawn % (num_tokens - 3) + 3  # the first three are control tokens


class EchoExecutor:
    """Answers each iteration at once, or after `seconds`; copies are done when they are asked for."""

    depth = 1

    def __init__(self, tokenizer: Tokenizer, end_id: int, seconds: float) -> None:
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._seconds = seconds
        self._launched: deque[Iteration] = deque()
        self._states: dict[int, tuple[int, int]] = {}  # by turn: tokens taken in, their digest

    def launch(self, iteration: Iteration) -> None:
        self._launched.append(iteration)

    def collect(self) -> Outcome:
        iteration = self._launched.popleft()
        if self._seconds and iteration.slices:
            time.sleep(self._seconds)
        samples = tuple(self._sample(piece.turn) for piece in iteration.slices if piece.needs_token)
        inward = [copy.copy_id for copy in iteration.swap_ins]
        return Outcome(samples, (*inward, *(copy.copy_id for copy in iteration.swap_outs)))

    def _sample(self, turn: Turn) -> Sample:
        from pensieve.model.reply import Decoding

        if turn.decoding is None:
            turn.decoding = Decoding(turn.sampling, self._tokenizer, frozenset({self._end_id}))
        assert isinstance(turn.decoding, Decoding)
        known, state = self._states.pop(turn.turn_id, (0, 0))
        state = digest(turn.tokens[known:], state)
        token_id = next_token(state, self._tokenizer.vocab_size, self._end_id)
        text, finish = turn.decoding.accept(turn, token_id)
        if finish is None:
            self._states[turn.turn_id] = (len(turn.tokens), state)
        return Sample(turn.turn_id, token_id, finish, text)

    def close(self) -> None:
        self._launched.clear()


def build(
    seconds: float, settings: Settings, folder: Path, report: Report, mailbox: Mailbox, sink: Sink
) -> BuiltEngine:
    texts = load_texts(folder, report)
    tokenizer = texts.template.tokenizer
    end_id = texts.template.end_id
    assert end_id is not None
    size = settings.chunk_tokens
    cost = CostProfile.analytic(1_000_000, 2, 4, 64, size)
    cache_config = CacheConfig(PAGES, PAGES, size)
    executor = EchoExecutor(tokenizer, end_id, seconds)
    engine = Engine(
        EngineConfig(min(CONTEXT_MAX, cache_config.device_tokens_max)),
        Scheduler(
            KVCache(cache_config, policy_named(settings.policy, cost, size)),
            SchedulerConfig(settings.token_budget, settings.turns_max),
        ),
        executor,
        SystemClock(),
        mailbox,
        sink,
    )
    context_max = engine.config.context_max
    return BuiltEngine(
        engine, executor, context_max, tokenizer.vocab_size, PAGES, PAGES, size * 1024, None
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("fd", type=int)
    arguments = parser.parse_args()
    sys.exit(engine_main.main(arguments.fd, partial(build, arguments.seconds)))
