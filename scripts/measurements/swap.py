"""Measure the time to the first token when a history is not on the device.

The same message is sent repeatedly to a conversation with a history of `--history` tokens. The history's KV
is on the device, in the host tier, or dropped. The conversation is rewound in between, so that all times are
of the same turn. The turn's reply must always be the same, and its usage must report the right tier.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pensieve.bench.bench_daemon import serving
from pensieve.bench.measured_model import measured_model, model_in_words
from pensieve.bench.report import machine, percentile
from pensieve.bench.workload import WorkloadShape, scripts_of
from pensieve.client.admin import Admin
from pensieve.client.client import Client
from pensieve.errors import PensieveError

DEFAULT_MODEL = "0.37B"  # random weights of this shape
TIERS = ("device", "host", "dropped")  # where the history's KV is; dropped: nowhere
EVICT_SECONDS = 10.0  # limit for a history to leave the device
REPLY_TOKENS = 4
MESSAGE_TOKENS = 64


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure swap", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="(default: random weights of 0.37 B)")
    parser.add_argument("--history", type=int, default=2000, help="tokens (default: 2000)")
    parser.add_argument("--repeats", type=int, default=9, help="for each median (default: 9)")
    arguments = parser.parse_args(given)
    print(f"{model_in_words(arguments.model, DEFAULT_MODEL)}, {machine()}")
    with measured_model(arguments.model, DEFAULT_MODEL) as folder:
        found = first_tokens(folder, arguments.history, arguments.repeats)
    on_device = statistics.median(found["device"])
    for tier, seconds in found.items():
        median = statistics.median(seconds)
        print(
            f"history {tier}: first token after {median * 1e3:.1f} ms "
            f"(p90 {percentile(seconds, 0.9) * 1e3:.1f}), {median / on_device:.2f} x on the device"
        )


def first_tokens(folder: Path, history: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds to the first token, by tier."""
    (script,) = scripts_of(WorkloadShape(1, 1, history, 1), 1)
    (message,) = scripts_of(WorkloadShape(1, 1, MESSAGE_TOKENS, 1), 2)
    times: dict[str, list[float]] = {tier: [] for tier in TIERS}
    replies = set()
    size = f"{8 * (history + MESSAGE_TOKENS + 64)}t"
    with (
        serving([str(folder), "--device-cache", size, "--host-cache", size]) as daemon,
        Client(daemon.address) as client,
        Admin(daemon.admin_address) as admin,
    ):
        conversation = client.conversation(f"bench-swap-{time.time_ns()}")
        first = conversation.ask(
            script.turns[0].text, max_tokens=1, ignore_eos=True, temperature=0.0
        )
        name = conversation.conversation_id
        for number in range(repeats + 1):
            for tier in TIERS:
                if tier != "device":
                    admin.evict(name, to_host=tier == "host")
                    _wait(
                        lambda: not _device_tokens(admin, name), "the history stays on the device"
                    )
                began = time.perf_counter()
                stream = conversation.send(
                    message.turns[0].text,
                    max_tokens=REPLY_TOKENS,
                    ignore_eos=True,
                    temperature=0.0,
                )
                next(iter(stream))
                if number:  # the first time is a warm-up
                    times[tier].append(time.perf_counter() - began)
                replies.add(stream.reply.token_ids)
                usage = stream.reply.usage
                found = dict(
                    zip(
                        TIERS,
                        (usage.device_tokens, usage.host_tokens, usage.recomputed_tokens),
                        strict=True,
                    )
                )
                if found[tier] < 0.9 * history:
                    raise PensieveError(
                        f"the KV of the history was not in the tier {tier}: {found}"
                    )
                conversation.rewind(first.revision)
    if len(replies) != 1:
        raise PensieveError("the reply depends on where the KV of its history was")
    return times


def _device_tokens(admin: Admin, name: str) -> int:
    cached = (each for each in admin.cached(limit=1000) if each.conversation_id == name)
    return sum(int(each.device_tokens) for each in cached)


def _wait(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + EVICT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise PensieveError(failure)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
