"""Measure how many tokens the service itself delivers, or how much CPU time a turn takes.

A real `pensieve serve` runs on one core, with a fake model. The engine and the clients have
the other cores. Every stream is one conversation with one long turn. The measurement counts the tokens that
arrive at the clients, from the first to the last, and the gaps between the messages of a stream.

With --history the same short turns run in conversations with histories of several lengths. While the engine
holds a conversation's KV, the engine also knows its tokens. So the service's time per turn should not depend
on the length of the history.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc

from pensieve.bench.bench_daemon import BenchDaemon
from pensieve.bench.report import percentile
from pensieve.client import Client, Conversation
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.v1 import conversation_pb2 as pb
from scripts.measurements.processes import counts, cpu_seconds, pinned

PIECE_WORDS = 4000  # words of a message that fills a history
TURN_TOKENS = 4
ROUNDS = 5  # each conversation gets its share of the turns in each round


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure service", description=__doc__)
    parser.add_argument(
        "--streams", type=int, default=256, help="turns that run at once (default: 256)"
    )
    parser.add_argument("--tokens", type=int, default=400, help="per reply; with --history: turns")
    parser.add_argument(
        "--iteration-seconds", type=float, default=0.0, help="time of an iteration (default: 0)"
    )
    parser.add_argument("--history", type=counts, metavar="N,N,…", help="tokens of conversations")
    arguments = parser.parse_args(given)
    if arguments.history is not None:
        with pinned(["--turns-max", "16"]) as daemon:
            for cost in turn_costs(daemon, arguments.history, arguments.tokens):
                print(
                    f"history of {cost.history_tokens:7,} tokens: {cost.service_cpu_seconds * 1e3:6.2f} ms "
                    f"of the service's CPU a turn, first token after {cost.first_token_seconds * 1e3:6.2f} ms"
                )
        return
    with pinned(["--turns-max", str(arguments.streams)], arguments.iteration_seconds) as daemon:
        found = asyncio.run(delivered(daemon, arguments.streams, arguments.tokens))
    p50, p99 = (percentile(found.gaps, share) * 1e3 for share in (0.5, 0.99))
    print(
        f"{found.tokens / found.seconds:,.0f} tokens/s over {arguments.streams} streams, "
        f"{found.tokens / found.messages:.2f} tokens a message, "
        f"gap p50 {p50:.1f} ms, p99 {p99:.1f} ms; "
        f"the service used {found.cpu_seconds:.1f} s of CPU in {found.seconds:.1f} s"
    )


class Delivery(NamedTuple):
    tokens: int
    messages: int
    seconds: float
    gaps: list[float]
    cpu_seconds: float  # of the service


async def delivered(daemon: BenchDaemon, num_streams: int, num_tokens: int) -> Delivery:
    gaps: list[float] = []
    counted = num_messages = 0
    first: float | None = None

    async def stream(channel: Any, number: int, length: int) -> None:
        nonlocal counted, num_messages, first
        call = channel.unary_stream(
            "/pensieve.v1.ConversationService/SendMessage",
            request_serializer=pb.SendMessageRequest.SerializeToString,
            response_deserializer=pb.SendMessageResponse.FromString,
        )
        request = pb.SendMessageRequest(
            conversation_id=f"stream-{number}",
            messages=[pb.NewMessage(content=f"Good morning, {number}.")],
            create_if_missing=True,
            sampling=pb.Sampling(max_tokens=length, ignore_eos=True),
        )
        before: float | None = None
        async for response in call(request):
            if response.WhichOneof("event") == "delta":
                now = time.perf_counter()
                first = first or now
                if before is not None:
                    gaps.append(now - before)
                before = now
                counted += len(response.delta.token_ids)
                num_messages += 1

    async with grpc.aio.insecure_channel(daemon.address) as channel:
        await asyncio.gather(*(stream(channel, -1 - number, 5) for number in range(8)))
        counted = num_messages = 0
        gaps.clear()
        first = None
        cpu = cpu_seconds(daemon.pid)
        await asyncio.gather(
            *(stream(channel, number, num_tokens) for number in range(num_streams))
        )
        assert first is not None
        seconds = time.perf_counter() - first
        cpu = cpu_seconds(daemon.pid) - cpu
    if not gaps:
        raise InvalidArgument("tokens", "too few: each stream was one message")
    return Delivery(counted, num_messages, seconds, gaps, cpu)


class TurnCost(NamedTuple):
    """The cost of one turn, as the median over the rounds."""

    history_tokens: int
    service_cpu_seconds: float
    first_token_seconds: float


def turn_costs(daemon: BenchDaemon, histories: Sequence[int], num_turns: int) -> list[TurnCost]:
    with Client(daemon.address) as client:
        talks = [_fill_conversation(client, num_tokens) for num_tokens in histories]
        states = [talk.get() for talk in talks]
        samples: list[list[tuple[float, float]]] = [[] for _ in talks]
        turns_per_round = max(num_turns // ROUNDS, 1)
        for _ in range(ROUNDS):
            for talk, state, found in zip(talks, states, samples, strict=True):
                cpu = cpu_seconds(daemon.pid)
                firsts = [_turn(talk) for _ in range(turns_per_round)]
                found.append(
                    ((cpu_seconds(daemon.pid) - cpu) / turns_per_round, statistics.median(firsts))
                )
                talk.rewind(state.revision)  # so that turns do not lengthen the history
    return [
        TurnCost(
            state.num_tokens, *(statistics.median(column) for column in zip(*found, strict=True))
        )
        for state, found in zip(states, samples, strict=True)
    ]


def _fill_conversation(client: Client, num_tokens: int) -> Conversation:
    """Return a conversation with at least `num_tokens` tokens, whose KV the engine holds."""
    talk = client.conversation(f"history-{num_tokens}")
    talk.ask("Good morning.", max_tokens=TURN_TOKENS)
    while (missing := num_tokens - (before := talk.get().num_tokens)) > 0:
        talk.ask("hello " * min(PIECE_WORDS, missing), max_tokens=TURN_TOKENS)
        if talk.get().num_tokens <= before:
            raise InvalidArgument("history", f"{num_tokens} tokens were not reached")
    return talk


def _turn(talk: Conversation) -> float:
    reply = talk.ask("And now?", max_tokens=TURN_TOKENS, ignore_eos=True)
    if reply.usage.recomputed_tokens:
        raise PensieveError("a history was not on the device: the tiers are too small for this")
    return reply.usage.first_token_seconds


if __name__ == "__main__":
    main()
