"""Play chats and long documents to a daemon, and record what their clients see.

Conversations begin at a Poisson rate. In each conversation, the client sends a short message, waits for the
whole reply, pauses, and continues. Some conversations begin with a long document, of 0.5 to 1.5 times
`document_tokens`. So turns generate all the time, and long prompts arrive between them.

With one seed the conversations are the same at every rate; only the time between them differs. A longer load
begins with the conversations of a shorter load.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from pensieve.bench.random_model import words
from pensieve.bench.report import percentile
from pensieve.bench.workload import NUM_WORDS, Script, ScriptedMessage
from pensieve.client.aio import AsyncClient, AsyncConversation
from pensieve.client.values import Delta
from pensieve.errors import NotFound


@dataclass(frozen=True)
class OfferedLoad:
    """The conversations of a load, without their rate."""

    turns: int = 3
    input_tokens: int = 32
    output_tokens: int = 32
    document_share: float = 0.5  # fraction of the conversations that begin with a document
    document_tokens: int = 1000
    think_seconds: float = 1.0

    def scripts(self, rate: float, seconds: float, seed: int) -> list[Script]:
        """Return the conversations that begin within `seconds`."""
        draw, known = random.Random(seed), words()[:NUM_WORDS]
        scripts: list[Script] = []
        at = 0.0
        while (at := at + draw.expovariate(1.0)) < rate * seconds:
            turns = []
            for number in range(self.turns):
                length = self.input_tokens
                is_document = draw.random() < self.document_share
                if number == 0 and is_document:
                    length = round(self.document_tokens * draw.uniform(0.5, 1.5))
                text = "".join(draw.choices(known, k=length)).strip()
                think = draw.expovariate(1.0) * self.think_seconds if number else 0.0
                turns.append(ScriptedMessage(text, think))
            scripts.append(Script(at / rate, tuple(turns)))
        return scripts

    def __str__(self) -> str:
        return (
            f"conversations of {self.turns} turns x {self.input_tokens} in / {self.output_tokens} out, "
            f"{self.think_seconds:g} s between turns, {self.document_share:.0%} of them begin with a "
            f"document of about {self.document_tokens:,} tokens"
        )


@dataclass
class ObservedTurn:
    """One turn as its client saw it."""

    began: float  # seconds since the load began
    first_token_seconds: float = 0.0  # or the time waited so far without a token
    queue_seconds: float | None = None  # None: the reply was cut off after its first token
    gaps: list[float] = field(default_factory=list)
    output_tokens: int = 0
    is_complete: bool = False


class Played(NamedTuple):
    """The turns of one load, and how long it took."""

    turns: list[ObservedTurn]
    seconds: float  # until the last reply or the cut-off


async def play(
    address: str, scripts: Sequence[Script], output_tokens: int, seconds_max: float | None = None
) -> Played:
    """Play all conversations to their ends, or cut them off after `seconds_max` and delete them.

    For a client that is cut off, the time that it has waited so far counts.
    """
    turns: list[ObservedTurn] = []
    began = time.perf_counter()

    async def run_turn(conversation: AsyncConversation, text: str) -> None:
        sent = time.perf_counter()
        seen = ObservedTurn(sent - began)
        turns.append(seen)
        arrived: list[float] = []
        num_tokens = 0
        turn = conversation.send(
            text, max_tokens=output_tokens, ignore_eos=True, temperature=0.0, last_turn=False
        )
        try:
            async for delta in turn:
                if isinstance(delta, Delta):
                    arrived.append(time.perf_counter())
                    num_tokens += len(delta.token_ids)
            usage = (await turn.reply()).usage
            num_tokens, seen.queue_seconds = usage.output_tokens, usage.queue_seconds
            seen.is_complete = True
        finally:
            seen.first_token_seconds = (arrived[0] if arrived else time.perf_counter()) - sent
            if not arrived and not seen.is_complete:
                seen.queue_seconds = seen.first_token_seconds
            seen.gaps = [after - before for before, after in pairwise(arrived)]
            seen.output_tokens = num_tokens

    async def run_conversation(client: AsyncClient, number: int, script: Script) -> None:
        await asyncio.sleep(script.arrives_at)
        conversation = client.conversation(f"capacity-{time.time_ns()}-{number}")
        has_answer = False
        try:
            for message in script.turns:
                await asyncio.sleep(message.think_seconds)
                await run_turn(conversation, message.text)
                has_answer = True
        finally:
            try:
                await conversation.delete()
            except NotFound:
                # The load may have been cut off before the conversation began.
                if has_answer:
                    raise

    async with AsyncClient(address) as client:
        tasks = [
            asyncio.create_task(run_conversation(client, *each)) for each in enumerate(scripts)
        ]
        _, pending = await asyncio.wait(
            tasks, timeout=seconds_max, return_when=asyncio.FIRST_EXCEPTION
        )
        seconds = time.perf_counter() - began
        for task in pending:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
    return Played(turns, seconds)


@dataclass(frozen=True)
class Figures:
    """Figures of the turns that begin after the warm-up; None where nothing was timed."""

    turns: int
    unfinished: int
    seconds: float
    tokens_per_second: float  # includes turns of the warm-up
    gap_p50: float | None
    gap_p99: float | None
    first_token_p50: float | None
    first_token_p99: float | None
    queue_p50: float | None
    attained: float | None  # share of gaps within the objective

    @classmethod
    def of(cls, played: Played, warm_seconds: float, objective: float) -> Figures:
        turns = [each for each in played.turns if each.began >= warm_seconds]
        gaps = [gap for turn in turns for gap in turn.gaps]
        first = [turn.first_token_seconds for turn in turns]
        queued = [turn.queue_seconds for turn in turns if turn.queue_seconds is not None]

        def quantile(values: list[float], share: float) -> float | None:
            return percentile(values, share) if values else None

        return cls(
            turns=len(turns),
            unfinished=sum(not turn.is_complete for turn in turns),
            seconds=played.seconds,
            tokens_per_second=sum(turn.output_tokens for turn in played.turns) / played.seconds,
            gap_p50=quantile(gaps, 0.5),
            gap_p99=quantile(gaps, 0.99),
            first_token_p50=quantile(first, 0.5),
            first_token_p99=quantile(first, 0.99),
            queue_p50=quantile(queued, 0.5),
            attained=sum(gap <= objective for gap in gaps) / len(gaps) if gaps else None,
        )
