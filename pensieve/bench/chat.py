"""`pensieve bench chat`: measure conversations with a daemon from the client's side.

Conversations arrive all at once or at a Poisson rate. Each client sends a message through gRPC, waits for the
whole reply, pauses, and continues. The client measures

    first, later      time to the first token of a conversation's first turn, and of later turns
    gap               time between two consecutive pieces of a streamed reply
    normalized        time of a turn over its number of output tokens
    tokens by source  context tokens of all turns: new, on the device, in the host tier, or recomputed

Before anything is timed, each turn of a test conversation runs twice. If this benchmark started the daemon,
the KV is evicted before the second run. Both runs must get the same tokens. On a GPU the order of a sum
depends on how many rows are computed together. So replies on a GPU may differ where two tokens are about
equally likely. Replies are greedy and have a fixed length, so two runs with one seed do the same work.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pensieve.bench.bench_daemon import serving
from pensieve.bench.measured_model import measured_model, model_in_words
from pensieve.bench.plot_scale import plain, time_unit
from pensieve.bench.plots import Sheet
from pensieve.bench.report import Report, machine, percentile
from pensieve.bench.workload import Script, WorkloadShape, scripts_of
from pensieve.client.admin import Admin
from pensieve.client.aio import AsyncClient, AsyncConversation
from pensieve.client.values import Delta, TokenLogprob
from pensieve.errors import PensieveError

DEFAULT_MODEL = "0.37B"  # random weights of this shape
NUM_LIKELY = 5  # alternatives with their probabilities, for each token of the check
NEAR_TIE = 0.2  # difference of log probabilities; rounding in 16 bits changes them by less


@dataclass(frozen=True)
class ChatOptions:
    shape: WorkloadShape
    seed: int
    model: str  # "" for random weights
    address: str  # of a running daemon; "" starts one
    # The following options are for a daemon that the benchmark starts.
    device_cache: str | None = None
    host_cache: str | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    stream: str | None = None

    def flags(self) -> list[str]:
        """Return the daemon's flags; `device_share` is relative to the KV of all conversations."""
        shape, device, host = self.shape, self.device_cache, self.host_cache
        if shape.device_share:
            conversation_tokens = shape.turns * shape.tokens_per_turn + 64  # one must fit
            device = (
                device or f"{max(int(shape.tokens * shape.device_share), conversation_tokens)}t"
            )
            host = host or f"{2 * shape.tokens}t"
        flags = {"--device-cache": device, "--host-cache": host, "--weights": self.weights}
        flags |= {"--kv-dtype": self.kv_dtype, "--stream": self.stream}
        return [part for name, value in flags.items() if value for part in (name, value)]


@dataclass
class MeasuredTurn:
    """One turn as its client saw it."""

    number: int  # in its conversation, from 0
    first_token_seconds: float
    total_seconds: float
    gaps: list[float]
    output_tokens: int
    new_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True)
class TokenSources:
    """The number of context tokens of all turns, by where their KV came from."""

    new: int
    device: int
    host: int
    recomputed: int


@dataclass(frozen=True)
class ChatFigures:
    turns: int
    seconds: float
    output_tokens_per_second: float
    first_turn_ttft_p50: float
    later_turn_ttft_p50: float | None
    later_turn_ttft_p90: float | None
    gap_p50: float | None
    gap_p99: float | None
    normalized_p50: float
    normalized_p90: float
    tokens: TokenSources
    reused_share: float | None  # of the context from earlier turns


def run(options: ChatOptions, report: Report) -> list[MeasuredTurn]:
    shape = options.shape
    scripts = scripts_of(shape, options.seed)
    with contextlib.ExitStack() as stack:
        address, admin_address = options.address, ""
        if not address:
            folder = stack.enter_context(measured_model(options.model, DEFAULT_MODEL))
            daemon = stack.enter_context(serving([str(folder), *options.flags()]))
            address, admin_address = daemon.address, daemon.admin_address
        report.about(*asyncio.run(facts_of(options, address)))
        asyncio.run(check(address, admin_address, options.seed))
        began = time.perf_counter()
        turns = asyncio.run(replay(address, scripts, shape.output_tokens))
        seconds = time.perf_counter() - began
    figures = figures_of(turns, seconds)
    for line in lines_of(figures):
        report.line(line)
    report.finish({"shape": asdict(shape), "seed": options.seed, **asdict(figures)})
    return turns


async def facts_of(options: ChatOptions, address: str) -> list[str]:
    """Return the model, machine, load and seed in words."""
    async with AsyncClient(address) as client:
        info = await client.server_info()
    if options.address:
        model, place = info.model, f"daemon at {options.address}"
    else:
        model, place = model_in_words(options.model, DEFAULT_MODEL), machine(info.device)
    weights = "int8 weights" if info.weights == "int8" else ""
    kv = f"{info.kv_dtype} KV" if info.kv_dtype not in ("", info.dtype) else ""
    shape = options.shape
    load = (
        f"{shape.conversations} conversations x {shape.turns} turns x {shape.input_tokens} in / "
        f"{shape.output_tokens} out"
    )
    if shape.rate:
        load += f", {shape.rate:g} conversations/s"
    if shape.think_seconds:
        load += f", {shape.think_seconds:g} s between turns"
    return [
        " ".join(filter(None, (model, info.dtype, weights, kv))),
        place,
        load,
        f"seed {options.seed}",
    ]


async def check(address: str, admin_address: str, seed: int) -> None:
    """Check that each reply of a conversation is the same when its turn runs again.

    With an `admin_address` the KV of the conversation is evicted before a turn runs again.
    """
    shape = WorkloadShape(1, 2, 40, 12)
    (script,) = scripts_of(shape, seed + 1)
    async with AsyncClient(address) as client:
        on_gpu = (await client.server_info()).device.startswith("cuda")
        conversation = client.conversation(f"bench-check-{seed}")

        def evict() -> None:
            if admin_address:
                with Admin(admin_address) as admin:
                    admin.evict(conversation.conversation_id)

        texts = [message.text for message in script.turns]
        await check_turns(conversation, texts, shape.output_tokens, evict, near_ties=on_gpu)
        await conversation.delete()


async def check_turns(
    conversation: AsyncConversation,
    texts: Sequence[str],
    output_tokens: int,
    evict: Callable[[], None],
    *,
    near_ties: bool,
) -> None:
    """Run a conversation, then repeat each turn. Raise PensieveError if a reply changes.

    Turns are repeated in reverse order. A rewind to a turn keeps the first run's replies before this turn. So
    every turn is compared, even if an earlier reply changes when it is repeated. With `near_ties` a reply may
    change at a token that was about as likely as its alternative. The later tokens of such a reply have
    another context, and are not compared.
    """
    revisions, replies = [0], list[CheckedReply]()
    for text in texts:
        reply, revision = await checked_reply(conversation, text, output_tokens)
        replies.append(reply)
        revisions.append(revision)
    for number in reversed(range(len(texts))):
        await conversation.rewind(revisions[number])
        evict()
        again, _ = await checked_reply(conversation, texts[number], output_tokens)
        if replies[number].token_ids == again.token_ids:
            continue
        if not (near_ties and differ_at_near_tie(replies[number], again)):
            raise PensieveError(f"turn {number + 1} got another reply when it ran again")


class CheckedReply(NamedTuple):
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]


async def checked_reply(
    conversation: AsyncConversation, text: str, output_tokens: int
) -> tuple[CheckedReply, int]:
    """Send a message; return its greedy reply and the conversation's revision after the turn."""
    turn = conversation.send(
        text, max_tokens=output_tokens, ignore_eos=True, temperature=0.0, logprobs=NUM_LIKELY
    )
    deltas: list[Delta] = []
    async for delta in turn:
        if isinstance(delta, Delta):
            deltas.append(delta)
        else:  # the server restarted the reply
            deltas.clear()
    reply = CheckedReply(
        [each for delta in deltas for each in delta.token_ids],
        [each for delta in deltas for each in delta.logprobs],
    )
    return reply, (await turn.reply()).revision


def differ_at_near_tie(first: CheckedReply, second: CheckedReply) -> bool:
    """Return whether both tokens at the first difference were about as likely in each of the replies."""
    pairs = zip(first.token_ids, second.token_ids, strict=True)
    at = next(index for index, (mine, theirs) in enumerate(pairs) if mine != theirs)
    for reply, wanted in ((first, second.token_ids[at]), (second, first.token_ids[at])):
        sampled = reply.logprobs[at]
        likely = dict(sampled.alternatives).get(wanted)
        if likely is None or sampled.logprob - likely > NEAR_TIE:
            return False
    return True


async def replay(address: str, scripts: Sequence[Script], output_tokens: int) -> list[MeasuredTurn]:
    turns: list[MeasuredTurn] = []

    async def run_conversation(client: AsyncClient, number: int, script: Script) -> None:
        await asyncio.sleep(script.arrives_at)
        conversation = client.conversation(f"bench-{time.time_ns()}-{number}")
        for index, message in enumerate(script.turns):
            await asyncio.sleep(message.think_seconds)
            began = time.perf_counter()
            turn = conversation.send(
                message.text,
                max_tokens=output_tokens,
                ignore_eos=True,
                temperature=0.0,
                last_turn=False,
            )
            arrived = [time.perf_counter() async for delta in turn if delta.text]
            ended = time.perf_counter()  # counts as the first token if no token has text
            usage = (await turn.reply()).usage
            turns.append(
                MeasuredTurn(
                    number=index,
                    first_token_seconds=(arrived or [ended])[0] - began,
                    total_seconds=time.perf_counter() - began,
                    gaps=[after - before for before, after in pairwise(arrived)],
                    output_tokens=usage.output_tokens,
                    new_tokens=usage.new_tokens,
                    device_tokens=usage.device_tokens,
                    host_tokens=usage.host_tokens,
                    recomputed_tokens=usage.recomputed_tokens,
                )
            )
        await conversation.delete()

    async with AsyncClient(address) as client:
        await asyncio.gather(
            *(run_conversation(client, number, script) for number, script in enumerate(scripts))
        )
    return turns


def figures_of(turns: Sequence[MeasuredTurn], seconds: float) -> ChatFigures:
    first = [turn.first_token_seconds for turn in turns if turn.number == 0]
    later = [turn.first_token_seconds for turn in turns if turn.number > 0]
    gaps = [gap for turn in turns for gap in turn.gaps]
    normalized = [turn.total_seconds / turn.output_tokens for turn in turns]
    sources = TokenSources(
        *(
            sum(getattr(turn, f"{field.name}_tokens") for turn in turns)
            for field in fields(TokenSources)
        )
    )
    reusable = sources.device + sources.host + sources.recomputed
    return ChatFigures(
        turns=len(turns),
        seconds=seconds,
        output_tokens_per_second=sum(turn.output_tokens for turn in turns) / seconds,
        first_turn_ttft_p50=statistics.median(first),
        later_turn_ttft_p50=statistics.median(later) if later else None,
        later_turn_ttft_p90=percentile(later, 0.9) if later else None,
        gap_p50=percentile(gaps, 0.5) if gaps else None,
        gap_p99=percentile(gaps, 0.99) if gaps else None,
        normalized_p50=percentile(normalized, 0.5),
        normalized_p90=percentile(normalized, 0.9),
        tokens=sources,
        reused_share=1 - sources.recomputed / reusable if reusable else None,
    )


def lines_of(figures: ChatFigures) -> list[str]:
    def milliseconds(value: float | None) -> str:
        return "-" if value is None else f"{value * 1e3:,.1f} ms"

    sources, reused = figures.tokens, figures.reused_share
    return [
        f"{figures.output_tokens_per_second:,.1f} output tokens/s "
        f"({figures.turns} turns in {figures.seconds:.1f} s)",
        f"time to first token: first turn {milliseconds(figures.first_turn_ttft_p50)}, later turns "
        f"{milliseconds(figures.later_turn_ttft_p50)} "
        f"(p90 {milliseconds(figures.later_turn_ttft_p90)})",
        f"gap p50 {milliseconds(figures.gap_p50)}, p99 {milliseconds(figures.gap_p99)}",
        f"time per token of a turn p50 {milliseconds(figures.normalized_p50)}, "
        f"p90 {milliseconds(figures.normalized_p90)}",
        f"tokens: {sources.new:,} new, {sources.device:,} on the device, "
        f"{sources.host:,} from the host, {sources.recomputed:,} recomputed"
        + ("" if reused is None else f"; {reused:.1%} of earlier context was reused"),
    ]


def plot(turns: Sequence[MeasuredTurn], path: Path, facts: Sequence[str]) -> None:
    """Draw the distributions of the time to the first token and of the gaps."""
    kinds = {
        "First token, first turns": [t.first_token_seconds for t in turns if t.number == 0],
        "First token, later turns": [t.first_token_seconds for t in turns if t.number > 0],
        "Gap between pieces of a streamed reply": [gap for t in turns for gap in t.gaps],
    }
    sheet = Sheet("Times that clients of a daemon see", facts, width=5.0)
    for name, values in kinds.items():
        if not values:
            continue
        factor, unit = time_unit([percentile(values, 0.99)])
        ordered = [value * factor for value in sorted(values)]
        shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
        sheet.row()
        panel = sheet.panel(
            f"{name}: P50 {plain(p50)} {unit}, P99 {plain(p99)} {unit}, n = {len(ordered):,}",
            f"{unit}; dotted: P50 and P99",
            "% not longer",
            most=100.0,
            height=1.4,
        )
        panel.line("", [ordered[0], *ordered], [0.0, *shares], marked=False, step=True)
        for value in (p50, p99):
            panel.vertical_line(value)
    sheet.save(path)
