"""`pensieve bench swap`: what it costs that a history is not on the device.

The first part moves scattered pages between the arenas of both tiers, as the copier does, and holds the
speed against one large copy of as many bytes. The second asks a daemon: a conversation with a history of
`--history` tokens says something, again and again, with its history on the device, in the host tier, and
thrown away, and the time to the first token is compared. In between it is rewound, so that every time is
that of the same turn; its reply must be the same, and its usage must say that its history was where it
should be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pensieve.bench import plots
from pensieve.errors import InvalidArgument, PensieveError

PLACES = ("device", "host", "dropped")
SETTLE_SECONDS = 10.0  # for a history to move
REPLY_TOKENS = 4


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "swap",
        help="pages per second between the tiers, and the first token of a turn whose history is there",
        description=(__doc__ or "").split("\n\n", 1)[1],
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        help="a folder or a hub id (default: random weights of 0.37 B)",
    )
    parser.add_argument(
        "--history", type=int, default=2000, metavar="N", help="tokens (default: 2000)"
    )
    parser.add_argument(
        "--message", type=int, default=64, metavar="N", help="tokens of what is said (default: 64)"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, metavar="N", help="times for each median (default: 9)"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the times (needs the extra `bench`)"
    )
    parser.set_defaults(run=command)


def command(arguments: argparse.Namespace) -> int:
    from pensieve.bench.chat import serving
    from pensieve.bench.measured_model import measured_model

    if min(arguments.history, arguments.message, arguments.repeats) < 1:
        raise InvalidArgument("history, message, repeats", "are at least 1")
    out = sys.stderr if arguments.json else sys.stdout
    with measured_model(arguments.model, "0.37B") as folder:
        copies = measure_copies(folder, arguments.history)
        for row in copies:
            print(
                f"{row['direction']}: {row['pages']} pages, {row['bytes'] / 2**20:.1f} MiB, "
                f"{row['bytes'] / row['seconds'] / 1e9:.1f} GB/s, {row['ratio']:.2f} x one copy",
                file=out,
                flush=True,
            )
        tokens = 8 * (arguments.history + arguments.message + 64)
        flags = ["--device-cache", f"{tokens}t", "--host-cache", f"{tokens}t"]
        with serving(folder, flags) as (address, admin):
            turns = measure_turns(
                address, admin, arguments.history, arguments.message, arguments.repeats
            )
    for row in turns:
        print(
            f"history {row['place']}: first token after {row['ttft_seconds'] * 1e3:.1f} ms "
            f"(p90 {row['ttft_p90_seconds'] * 1e3:.1f}), {row['ratio']:.2f} x on the device",
            file=out,
            flush=True,
        )
    if arguments.json:
        print(json.dumps({"copies": copies, "turns": turns}))
    if arguments.plot is not None:
        plot(turns, arguments.plot)
    return 0


def measure_copies(folder: Path, tokens: int, repeats: int = 9) -> list[dict[str, Any]]:
    """All layers of as many scattered pages as hold these tokens, both ways."""
    import torch

    from pensieve.model.kv.memory import KVMemory, PageMoves
    from pensieve.model.loader import load

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
                raise PensieveError(f"{direction} brought something else")
            part = slice(turn % 4 * pages, (turn % 4 + 1) * pages)
            one, other = (arena[:, part].contiguous() for arena in (source, target))
            began = time.perf_counter()
            other.copy_(one)
            times["whole"].append(time.perf_counter() - began)
        seconds, whole = (statistics.median(each) for each in times.values())
        num_bytes = pages * slots * shape.kv_bytes_per_token
        rows.append(
            {
                "direction": direction,
                "pages": pages,
                "bytes": num_bytes,
                "seconds": seconds,
                "ratio": whole / seconds,  # of the speed of one copy
            }
        )
    return rows


def measure_turns(
    address: str, admin_address: str, history: int, message: int, repeats: int
) -> list[dict[str, Any]]:
    from pensieve.bench.chat import Shape, scripts_of
    from pensieve.client.admin import Admin
    from pensieve.client.client import Client

    (script,) = scripts_of(Shape(1, 1, history, 1), 1)
    (said,) = scripts_of(Shape(1, 1, message, 1), 2)
    times: dict[str, list[float]] = {place: [] for place in PLACES}
    replies = set()
    with Client(address) as client, Admin(admin_address) as admin:
        conversation = client.conversation(f"bench-swap-{time.time_ns()}")
        first = conversation.ask(
            script.turns[0].text, max_tokens=1, ignore_eos=True, temperature=0.0
        )
        name = conversation.conversation_id

        def leave(place: str) -> None:
            if place == "device":
                return
            admin.evict(name, to_host=place == "host")
            _wait(lambda: _device_tokens(admin, name) == 0, "the history stays on the device")

        for turn in range(repeats + 1):
            for place in PLACES:
                leave(place)
                began = time.perf_counter()
                stream = conversation.send(
                    said.turns[0].text, max_tokens=REPLY_TOKENS, ignore_eos=True, temperature=0.0
                )
                next(iter(stream))
                if turn:  # the first time is for warming up
                    times[place].append(time.perf_counter() - began)
                reply = stream.reply
                replies.add(reply.token_ids)
                usage = reply.usage
                found = {
                    "device": usage.device_tokens,
                    "host": usage.host_tokens,
                    "dropped": usage.recomputed_tokens,
                }
                if found[place] < 0.9 * history:
                    raise PensieveError(f"the history was not where it should be, {place}: {found}")
                conversation.rewind(first.revision)
        conversation.delete()
    if len(replies) != 1:
        raise PensieveError("the reply depends on where the history was")
    base = statistics.median(times["device"])
    return [
        {
            "place": place,
            "history_tokens": history,
            "message_tokens": message,
            "ttft_seconds": statistics.median(each),
            "ttft_p90_seconds": sorted(each)[int(0.9 * (len(each) - 1))],
            "ratio": statistics.median(each) / base,
        }
        for place, each in times.items()
    ]


def _device_tokens(admin: Any, name: str) -> int:
    for each in admin.cached(limit=1000):
        if each.conversation_id == name:
            return int(each.device_tokens)
    return 0


def _wait(true: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise PensieveError(otherwise)
        time.sleep(0.02)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The time to the first token for each place of the history."""
    figure, axes = plots.axes(6, 4)
    axes.bar([row["place"] for row in rows], [row["ttft_seconds"] * 1e3 for row in rows])
    axes.set(ylabel="time to first token (ms)", xlabel="where the history was")
    figure.savefig(path)
