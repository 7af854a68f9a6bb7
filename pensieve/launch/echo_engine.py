"""An engine process that computes with arithmetic instead of a model, to test and measure the service.

Started as `python -m pensieve.launch.echo_engine FD`. Everything except the executor is the real code:
mailbox, scheduler, cache, detokenizer and pipe. Each token is a pure function of all tokens before it, so a
wrong history gives a wrong reply. `--seconds S` makes each iteration take S seconds, so that tests can
overload the engine.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from array import array
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pensieve.config import Settings
from pensieve.core.cache import CacheConfig
from pensieve.core.cost import CostProfile
from pensieve.core.iteration import Iteration, Outcome, SampledToken, Slice
from pensieve.core.policies.registry import policy_named
from pensieve.core.scheduler_config import SchedulerConfig
from pensieve.engine.engine import Engine, EngineConfigs
from pensieve.engine.mailbox import Mailbox
from pensieve.engine.ports import Ports, Sink
from pensieve.launch import engine_process
from pensieve.launch.engine import BuiltEngine, SystemClock
from pensieve.launch.model_folder import Report, load_texts
from pensieve.launch.objectives import ESTIMATED, Pages, smallest_tbt
from pensieve.launch.sizing import TierPages, turns_max
from pensieve.text import Tokenizer
from pensieve.text.reply import ReplyText

PAGES = 4096
CONTEXT_MAX = 100_000
MULTIPLIER, MODULUS = 6_364_136_223_846_793_005, 1 << 64
WORDS_PER_REPLY = 24  # on average, unless max_tokens ends the reply earlier


def digest(tokens: array[int], state: int = 0) -> int:
    """Return the digest of a sequence that ends with `tokens`. `state` is the digest of the tokens before."""
    return zlib.crc32(tokens.tobytes(), state)


def next_token(state: int, num_tokens: int, end_id: int) -> int:
    """Return the token that follows a context with this digest. Sometimes it is the end-of-turn token."""
    drawn = (state * MULTIPLIER + 1) % MODULUS >> 33
    if drawn % WORDS_PER_REPLY == 0:
        return end_id
    return drawn % (num_tokens - 3) + 3  # the first three are control tokens


@dataclass(slots=True)
class _Turn:
    text: ReplyText
    digest: int  # digest of the context and of the reply so far


class EchoExecutor:
    """Completes each iteration immediately, or after `seconds`. Completes copies immediately."""

    depth = 1

    def __init__(self, tokenizer: Tokenizer, end_id: int, seconds: float) -> None:
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._seconds = seconds
        self._launched: deque[Iteration] = deque()
        self._turns: dict[int, _Turn] = {}

    def launch(self, iteration: Iteration) -> None:
        for start in iteration.started:
            options = start.sampling
            eos = frozenset() if options.ignore_eos else frozenset({self._end_id})
            ends = eos | frozenset(options.stop_token_ids)
            text = ReplyText(
                *(self._tokenizer, ends, options.stop, options.min_tokens, options.stop_repetition),
                continues_text=start.continues_text,
            )
            self._turns[start.attempt_id] = _Turn(text, digest(start.context))
        for attempt_id in iteration.ended:
            self._turns.pop(attempt_id, None)
        self._launched.append(iteration)

    def collect(self) -> Outcome:
        iteration = self._launched.popleft()
        if self._seconds and iteration.slices:
            time.sleep(self._seconds)
        samples = tuple(self._sample(each) for each in iteration.slices if each.needs_token)
        swapped_in = [copy.copy_id for copy in iteration.swap_ins]
        return Outcome(samples, (*swapped_in, *(copy.copy_id for copy in iteration.swap_outs)))

    def _sample(self, piece: Slice) -> SampledToken:
        turn = self._turns[piece.attempt_id]
        token_id = next_token(turn.digest, self._tokenizer.vocab_size, self._end_id)
        turn.digest = digest(array("I", [token_id]), turn.digest)
        text, stopped = turn.text.push(token_id, piece.is_last)
        return SampledToken(piece.attempt_id, token_id, text, stopped, repeats=turn.text.repeats)

    def close(self) -> None:
        self._launched.clear()


def build(
    seconds: float, settings: Settings, folder: Path, report: Report, mailbox: Mailbox, sink: Sink
) -> BuiltEngine:
    texts = load_texts(folder, report, settings.chat_template)
    tokenizer = texts.template.tokenizer
    end_id = texts.template.end_id
    assert end_id is not None
    size = settings.chunk_tokens
    pages = TierPages(PAGES, PAGES)
    executor = EchoExecutor(tokenizer, end_id, seconds)
    configs = EngineConfigs.fitted(
        CacheConfig(*pages, size),
        SchedulerConfig(
            settings.token_budget,
            turns_max(settings, pages.device),
            settings.prompt_seconds,
            settings.tbt,
            time_share=settings.share,
        ),
        min(settings.context_max or CONTEXT_MAX, CONTEXT_MAX),
        ttft_seconds=settings.ttft,
    )
    cost = CostProfile.analytic(1_000_000, 2, 4, 64, size)
    policy = policy_named(settings.policy, cost, size)
    engine = Engine(configs, policy, executor, Ports(SystemClock(), mailbox, sink))
    built = BuiltEngine(engine, executor, tokenizer.vocab_size, pages, size * 1024)
    if settings.tbt:
        predicted, now = configs.scheduler.cost, SystemClock().now
        built.smallest_tbt = smallest_tbt(predicted, ESTIMATED, executor, Pages(PAGES, size), now)
    return built


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("fd", type=int)
    arguments = parser.parse_args()
    sys.exit(engine_process.main(arguments.fd, partial(build, arguments.seconds)))
