"""`pensieve bench swap` measures what it costs that a history is not on the device.

The first part moves scattered pages between the arenas of both tiers, as the copier does, and compares the
speed with one large copy of as many bytes. The second runs a daemon: the same message is sent to a
conversation with a history of `--history` tokens, again and again, with its KV on the device, in the host
tier, and dropped, and the time to the first token is compared. In between it is rewound, so that every
time is that of the same turn; its reply must be the same, and its usage must say that its KV was in that
tier.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pensieve.bench.bench_daemon import BenchDaemon, serving
from pensieve.bench.machine import machine
from pensieve.bench.measured_model import measured_model, model_in_words
from pensieve.bench.plot_scale import time_unit
from pensieve.bench.plots import Sheet
from pensieve.bench.report import Report, percentile
from pensieve.bench.workload import Shape, scripts_of
from pensieve.client.admin import Admin
from pensieve.client.client import Client
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.model.kv.memory import KVMemory, PageMoves
from pensieve.model.loader import load

DEFAULT_MODEL = "0.37B"  # random weights of that shape
TIERS = ("device", "host", "dropped")  # where the history's KV is; the last is none
EVICT_SECONDS = 10.0  # for a history to leave the device
REPLY_TOKENS = 4


@dataclass(frozen=True)
class CopyRow:
    direction: str
    pages: int
    bytes: int
    seconds: float
    ratio: float  # of the speed of one copy


@dataclass(frozen=True)
class TurnRow:
    place: str  # one of TIERS
    history_tokens: int
    message_tokens: int
    ttft_seconds: float
    ttft_p90_seconds: float
    ratio: float  # to the history on the device


def run(model: str, history: int, message: int, repeats: int, report: Report) -> list[TurnRow]:
    if min(history, message, repeats) < 1:
        raise InvalidArgument("history, message, repeats", "are at least 1")
    report.about(
        model_in_words(model, DEFAULT_MODEL),
        machine(),
        f"history of {history:,} tokens, message of {message:,}, {repeats} repeats",
    )
    with measured_model(model, DEFAULT_MODEL) as folder:
        copies = measure_copies(folder, history)
        for copy in copies:
            report.line(
                f"{copy.direction}: {copy.pages} pages, {copy.bytes / 2**20:.1f} MiB, "
                f"{copy.bytes / copy.seconds / 1e9:.1f} GB/s, {copy.ratio:.2f} x one copy"
            )
        size = f"{8 * (history + message + 64)}t"
        with serving([str(folder), "--device-cache", size, "--host-cache", size]) as daemon:
            turns = measure_turns(daemon, history, message, repeats)
    for turn in turns:
        report.line(
            f"history {turn.place}: first token after {turn.ttft_seconds * 1e3:.1f} ms "
            f"(p90 {turn.ttft_p90_seconds * 1e3:.1f}), {turn.ratio:.2f} x on the device"
        )
    report.finish(
        {"copies": [asdict(copy) for copy in copies], "turns": [asdict(turn) for turn in turns]}
    )
    return turns


def measure_copies(folder: Path, tokens: int, repeats: int = 9) -> list[CopyRow]:
    """All layers of as many scattered pages as hold these tokens, both ways."""
    slots = 32
    shape = load(folder).shape
    pages = -(-tokens // slots)
    memory = KVMemory(shape, 4 * pages, 4 * pages, slots)
    draw = torch.Generator().manual_seed(0)
    memory.device_arena.normal_(generator=draw)
    memory.host_arena.normal_(generator=draw)
    rows = []
    for direction, move in (("swap-in", memory.swap_in), ("swap-out", memory.swap_out)):
        arenas = [memory.host_arena, memory.device_arena]
        source, target = arenas if direction == "swap-in" else arenas[::-1]
        times: dict[str, list[float]] = {"pages": [], "whole": []}
        for turn in range(repeats):
            order = torch.randperm(4 * pages, generator=draw)
            moves = PageMoves(
                order[:pages],
                torch.randperm(4 * pages, generator=draw)[:pages],
                torch.full((pages,), slots),
            )
            began = time.perf_counter()
            for layer in range(shape.num_layers):
                move(layer, moves)
            times["pages"].append(time.perf_counter() - began)
            if not torch.equal(source[:, moves.source_pages], target[:, moves.target_pages]):
                raise PensieveError(f"{direction} moved something else")
            part = slice(turn % 4 * pages, (turn % 4 + 1) * pages)
            one, other = (arena[:, part].contiguous() for arena in (source, target))
            began = time.perf_counter()
            other.copy_(one)
            times["whole"].append(time.perf_counter() - began)
        seconds, whole = (statistics.median(each) for each in times.values())
        num_bytes = pages * slots * shape.kv_bytes_per_token
        rows.append(CopyRow(direction, pages, num_bytes, seconds, whole / seconds))
    return rows


def measure_turns(daemon: BenchDaemon, history: int, message: int, repeats: int) -> list[TurnRow]:
    (script,) = scripts_of(Shape(1, 1, history, 1), 1)
    (message_script,) = scripts_of(Shape(1, 1, message, 1), 2)
    times: dict[str, list[float]] = {tier: [] for tier in TIERS}
    replies = set()
    with Client(daemon.address) as client, Admin(daemon.admin_address) as admin:
        conversation = client.conversation(f"bench-swap-{time.time_ns()}")
        first = conversation.ask(
            script.turns[0].text, max_tokens=1, ignore_eos=True, temperature=0.0
        )
        name = conversation.conversation_id

        def evict_to(tier: str) -> None:
            if tier == "device":
                return
            admin.evict(name, to_host=tier == "host")
            _wait(lambda: _device_tokens(admin, name) == 0, "the history stays on the device")

        for turn in range(repeats + 1):
            for tier in TIERS:
                evict_to(tier)
                began = time.perf_counter()
                stream = conversation.send(
                    message_script.turns[0].text,
                    max_tokens=REPLY_TOKENS,
                    ignore_eos=True,
                    temperature=0.0,
                )
                next(iter(stream))
                if turn:  # the first time is for warming up
                    times[tier].append(time.perf_counter() - began)
                reply = stream.reply
                replies.add(reply.token_ids)
                usage = reply.usage
                found = {
                    "device": usage.device_tokens,
                    "host": usage.host_tokens,
                    "dropped": usage.recomputed_tokens,
                }
                if found[tier] < 0.9 * history:
                    raise PensieveError(
                        f"the KV of the history was not in the tier {tier}: {found}"
                    )
                conversation.rewind(first.revision)
        conversation.delete()
    if len(replies) != 1:
        raise PensieveError("the reply depends on where the KV of its history was")
    base = statistics.median(times["device"])
    return [
        TurnRow(
            place=tier,
            history_tokens=history,
            message_tokens=message,
            ttft_seconds=statistics.median(each),
            ttft_p90_seconds=percentile(each, 0.9),
            ratio=statistics.median(each) / base,
        )
        for tier, each in times.items()
    ]


def _device_tokens(admin: Admin, name: str) -> int:
    for each in admin.cached(limit=1000):
        if each.conversation_id == name:
            return int(each.device_tokens)
    return 0


def _wait(true: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + EVICT_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise PensieveError(otherwise)
        time.sleep(0.02)


def plot(rows: Sequence[TurnRow], path: Path, facts: Sequence[str]) -> None:
    """The time to the first token for each tier that held the history."""
    factor, unit = time_unit([row.ttft_p90_seconds for row in rows])
    sheet = Sheet(
        "First token, by where the history was", [*facts, "medians; whiskers: to the P90"], 4.6
    )
    medians = [row.ttft_seconds * factor for row in rows]
    p90s = [row.ttft_p90_seconds * factor for row in rows]
    panel = sheet.panel("", f"time to first token ({unit})")
    panel.bars([row.place for row in rows], medians, medians, p90s)
    sheet.save(path)
