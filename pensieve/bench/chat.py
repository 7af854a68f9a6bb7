"""`pensieve bench chat`: conversations with a daemon, as its clients see them.

Conversations arrive (all at once, or at a Poisson rate), each says something, waits for the whole reply,
thinks, and goes on. Everything goes through gRPC. Measured at the client:

    first, later      time to the first token of a conversation's first turn, and of later ones
    gap               between the messages of a stream
    normalized        time of a turn over its tokens
    tokens by source  what later turns found on the device, in the host tier, or had to recompute

Before anything is timed, a conversation is held twice, the second time (if the daemon was started here)
with its KV thrown away between the turns: both must get the same replies, token for token. Replies do
not end by themselves and are greedy, so two runs with one seed do the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.bench import plots
from pensieve.errors import InvalidArgument, PensieveError, Unavailable

START_SECONDS = 300.0


@dataclass(frozen=True)
class Shape:
    conversations: int
    turns: int
    input_tokens: int
    output_tokens: int
    rate: float = 0.0  # conversations arriving per second; 0: all at once
    think_seconds: float = 0.0  # between a reply and the next message, on average
    device_share: float = 0.0  # of what all conversations need together; 0: the daemon's default


SHAPES = {
    "short": Shape(16, 4, 64, 64),
    "long": Shape(8, 6, 256, 96),
    "pressure": Shape(24, 6, 256, 96, rate=8.0, think_seconds=1.5, device_share=0.25),
}
TEMPLATE_TOKENS = 16  # of a turn, beside what is said


class Said(NamedTuple):
    text: str
    think_seconds: float  # before it


class Script(NamedTuple):
    """One conversation."""

    arrives_at: float
    turns: tuple[Said, ...]


@dataclass
class Turn:
    """What a client saw."""

    number: int  # in its conversation
    first_token_seconds: float
    total_seconds: float
    gaps: list[float]
    output_tokens: int
    new_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    recomputed_tokens: int = 0


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "chat",
        help="conversations with a daemon: time to first token, gaps, tokens per second",
        description=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        help="a folder or a hub id (default: random weights of 0.37 B)",
    )
    parser.add_argument(
        "--address", default="", metavar="HOST:PORT", help="of a daemon (default: one is started)"
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="short",
        help="; ".join(
            f"{name}: {shape.conversations} conversations x {shape.turns} turns x "
            f"{shape.input_tokens} in / {shape.output_tokens} out"
            + (
                f", {shape.rate:g} arriving a second and thinking for {shape.think_seconds:g} s, "
                f"on a device tier for {shape.device_share * 100:g} percent of it"
                if shape.device_share
                else ", all at once and without thinking"
            )
            for name, shape in SHAPES.items()
        ),
    )
    for name in ("conversations", "turns", "input-tokens", "output-tokens"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="instead of the shape's")
    parser.add_argument(
        "--rate",
        type=float,
        metavar="N",
        help="conversations per second, arriving at random; 0: all at once",
    )
    parser.add_argument(
        "--think",
        type=float,
        metavar="S",
        help="seconds between a reply and the next message, exponential",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the texts (default: another each time)"
    )
    for tier in ("device", "host"):
        parser.add_argument(f"--{tier}-cache", metavar="SIZE", help="of the daemon that is started")
    parser.add_argument(
        "--weights", metavar="TYPE", help="of the daemon that is started; see `pensieve serve`"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the times (needs the extra `bench`)"
    )
    parser.set_defaults(run=command)


def command(arguments: argparse.Namespace) -> int:
    from pensieve.bench.measured_model import measured_model

    shape = shape_of(arguments)
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 30)
    scripts = scripts_of(shape, seed)
    with contextlib.ExitStack() as stack:
        address, admin = arguments.address, ""
        if not address:
            folder = stack.enter_context(measured_model(arguments.model, "0.37B"))
            address, admin = stack.enter_context(serving(folder, flags_of(arguments, shape)))
        asyncio.run(check(address, admin, seed))
        began = time.perf_counter()
        turns = asyncio.run(replay(address, scripts, shape.output_tokens))
        seconds = time.perf_counter() - began
    figures = figures_of(turns, seconds)
    if arguments.json:
        print(json.dumps({"shape": asdict(shape), "seed": seed, **figures}))
    else:
        print(told(figures))
    if arguments.plot is not None:
        plot(turns, arguments.plot)
    return 0


def shape_of(arguments: argparse.Namespace) -> Shape:
    named = SHAPES[arguments.shape]
    changes = {
        name: value
        for name in ("conversations", "turns", "input_tokens", "output_tokens")
        if (value := getattr(arguments, name)) is not None
    }
    if any(value < 1 for value in changes.values()):
        raise InvalidArgument(", ".join(changes), "are at least 1")
    for field, name in (("rate", "rate"), ("think_seconds", "think")):
        value = getattr(arguments, name)
        if value is not None:
            if value < 0:
                raise InvalidArgument(name, "is not negative")
            changes[field] = value
    return Shape(**{**asdict(named), **changes})


def flags_of(arguments: argparse.Namespace, shape: Shape) -> list[str]:
    """Of the daemon. A share of the device tier counts what all turns will have said in the end."""
    per_turn = shape.input_tokens + shape.output_tokens + TEMPLATE_TOKENS
    needed = shape.conversations * shape.turns * per_turn
    device, host = arguments.device_cache, arguments.host_cache
    if shape.device_share:
        alone = shape.turns * per_turn + 64  # a conversation has to fit
        device = device or f"{max(int(needed * shape.device_share), alone)}t"
        host = host or f"{2 * needed}t"
    named = {"--device-cache": device, "--host-cache": host, "--weights": arguments.weights}
    return [part for name, value in named.items() if value for part in (name, value)]


def scripts_of(shape: Shape, seed: int) -> list[Script]:
    """Texts of words that the tokenizer of scripts/make_random_model knows as one token each."""
    from pensieve.bench.random_model import words

    draw = random.Random(seed)
    known = words()[:7_000]  # those of the smallest of its shapes
    scripts, now = [], 0.0
    for _ in range(shape.conversations):
        now += draw.expovariate(shape.rate) if shape.rate else 0.0
        turns = [
            Said(
                "".join(draw.choices(known, k=shape.input_tokens)).strip(),
                draw.expovariate(1 / shape.think_seconds)
                if shape.think_seconds and number
                else 0.0,
            )
            for number in range(shape.turns)
        ]
        scripts.append(Script(now, tuple(turns)))
    return scripts


@contextlib.contextmanager
def serving(folder: Path, flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A daemon with this model; its address, and where it can be asked to evict."""
    from pensieve.launch.admin_socket import socket_path

    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as data:
        ready = Path(data) / "ready"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pensieve", "serve", str(folder)),
                *("--data", str(Path(data) / "data"), "--address", "127.0.0.1:0"),
                *("--ready-file", str(ready), *flags),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        lines: list[str] = []
        listening = _drained(process, lines)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    listening.join(1.0)
                    raise Unavailable("the daemon did not start: " + "".join(lines[-3:]).strip())
                time.sleep(0.02)
            yield ready.read_text().strip(), f"unix:{socket_path(Path(data) / 'data')}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            listening.join()


def _drained(process: subprocess.Popen[str], lines: list[str]) -> threading.Thread:
    """Somebody has to read what it says, or it would wait one day."""

    def drain() -> None:
        assert process.stderr is not None
        with process.stderr:
            lines.extend(process.stderr)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    return thread


async def check(address: str, admin_address: str, seed: int) -> None:
    """The same replies with and without what was kept; of a stranger's daemon, the same twice."""
    from pensieve.client.admin import Admin
    from pensieve.client.aio import AsyncClient

    shape = Shape(1, 2, 40, 12)
    (script,) = scripts_of(shape, seed + 1)
    replies = []
    async with AsyncClient(address) as client:
        for kept in (True, False):
            conversation = client.conversation(f"bench-check-{seed}-{kept}")
            said = []
            for turn in script.turns:
                reply = await conversation.ask(
                    turn.text, max_tokens=shape.output_tokens, ignore_eos=True, temperature=0.0
                )
                said.append(reply.token_ids)
                if admin_address and not kept:
                    with Admin(admin_address) as admin:
                        admin.evict(conversation.conversation_id)
            replies.append(said)
            await conversation.delete()
    if replies[0] != replies[1]:
        raise PensieveError("a conversation says something else once its KV is thrown away")


async def replay(address: str, scripts: Sequence[Script], output_tokens: int) -> list[Turn]:
    from pensieve.client.aio import AsyncClient

    turns: list[Turn] = []

    async def hold(client: AsyncClient, number: int, script: Script) -> None:
        await asyncio.sleep(script.arrives_at)
        conversation = client.conversation(f"bench-{time.time_ns()}-{number}")
        for index, said in enumerate(script.turns):
            await asyncio.sleep(said.think_seconds)
            began = time.perf_counter()
            turn = conversation.send(
                said.text,
                max_tokens=output_tokens,
                ignore_eos=True,
                temperature=0.0,
                last_turn=False,
            )
            arrived = [time.perf_counter() async for delta in turn if delta.text]
            ended = time.perf_counter()  # a reply may consist of what is no text
            usage = (await turn.reply()).usage
            turns.append(
                Turn(
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
            *(hold(client, number, script) for number, script in enumerate(scripts))
        )
    return turns


def figures_of(turns: Sequence[Turn], seconds: float) -> dict[str, Any]:
    first = [turn.first_token_seconds for turn in turns if turn.number == 0]
    later = [turn.first_token_seconds for turn in turns if turn.number > 0]
    gaps = [gap for turn in turns for gap in turn.gaps]
    normalized = [turn.total_seconds / turn.output_tokens for turn in turns]
    sources = {
        name: sum(getattr(turn, f"{name}_tokens") for turn in turns)
        for name in ("new", "device", "host", "recomputed")
    }
    reusable = sources["device"] + sources["host"] + sources["recomputed"]
    return {
        "turns": len(turns),
        "seconds": seconds,
        "output_tokens_per_second": sum(turn.output_tokens for turn in turns) / seconds,
        "first_turn_ttft_p50": statistics.median(first),
        "later_turn_ttft_p50": statistics.median(later) if later else None,
        "later_turn_ttft_p90": share(later, 0.9) if later else None,
        "gap_p50": share(gaps, 0.5) if gaps else None,
        "gap_p99": share(gaps, 0.99) if gaps else None,
        "normalized_p50": share(normalized, 0.5),
        "normalized_p90": share(normalized, 0.9),
        "tokens": sources,
        "reused_share": 1 - sources["recomputed"] / reusable if reusable else None,
    }


def share(values: Sequence[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


def told(figures: dict[str, Any]) -> str:
    def milliseconds(name: str) -> str:
        value = figures[name]
        return "-" if value is None else f"{value * 1e3:,.1f} ms"

    sources = figures["tokens"]
    reused = figures["reused_share"]
    return "\n".join(
        (
            f"{figures['output_tokens_per_second']:,.1f} output tokens/s "
            f"({figures['turns']} turns in {figures['seconds']:.1f} s)",
            f"time to first token: first turn {milliseconds('first_turn_ttft_p50')}, later turns "
            f"{milliseconds('later_turn_ttft_p50')} (p90 {milliseconds('later_turn_ttft_p90')})",
            f"gap p50 {milliseconds('gap_p50')}, p99 {milliseconds('gap_p99')}",
            f"time per token of a turn p50 {milliseconds('normalized_p50')}, "
            f"p90 {milliseconds('normalized_p90')}",
            f"tokens: {sources['new']:,} new, {sources['device']:,} on the device, "
            f"{sources['host']:,} from the host, {sources['recomputed']:,} recomputed"
            + ("" if reused is None else f"; {reused:.1%} of what was there before was reused"),
        )
    )


def plot(turns: Sequence[Turn], path: Path) -> None:
    """Distributions of the time to first token and of the gaps."""
    figure, axes = plots.axes()
    lines = {
        "first token, first turn": [t.first_token_seconds for t in turns if t.number == 0],
        "first token, later turns": [t.first_token_seconds for t in turns if t.number > 0],
        "gap": [gap for t in turns for gap in t.gaps],
    }
    for name, values in lines.items():
        if values:
            ordered = sorted(values)
            heights = [(i + 1) / len(ordered) for i in range(len(ordered))]
            axes.step([value * 1e3 for value in ordered], heights, where="post", label=name)
    axes.set(xlabel="milliseconds", ylabel="share of turns or gaps", xscale="log", ylim=(0, 1))
    axes.legend()
    figure.savefig(path)
