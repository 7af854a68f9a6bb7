"""The options of `pensieve simulate`, and which combinations of them are refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pensieve.core.policies.registry import POLICIES
from pensieve.errors import InvalidArgument
from pensieve.sim.cost import HARDWARE, INSTANT, MODELS
from pensieve.sim.executor import PHASES
from pensieve.sim.workload import HABITS

Value = TypeVar("Value")

COMPARED = ("lru", "value", "return")
AUTO = -1  # tokens: as many as fit
PROMPT_SECONDS = 0.05  # a daemon's default, see config/tables.py


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="files of JSON lines")
    parser.add_argument(
        "--workload", choices=sorted(HABITS), help="conversations drawn like these, and no file"
    )
    parser.add_argument(
        "--rate",
        type=_several(float),
        default=[1.0],
        metavar="N,…",
        help="conversations drawn per second (default: 1)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        metavar="N",
        help="draw arrivals for so long (default: 600)",
    )
    parser.add_argument(
        "--until",
        type=float,
        metavar="SECONDS",
        help="stop the clock then; turns that have not ended are not counted (default: --seconds for a "
        "--workload, so that figures are those of the load; else the end of the trace)",
    )
    parser.add_argument(
        "--reaction",
        type=float,
        metavar="SECONDS",
        help="mean time from a reply to the next message (default: the --workload's)",
    )
    parser.add_argument(
        "--seed",
        type=_several(int),
        default=[0],
        metavar="N,…",
        help="seeds of what is drawn: with several, figures are medians over them (default: 0)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME,…",
        help=f"policies to compare: {', '.join(POLICIES)}, and clairvoyant, which knows the trace and can "
        "hardly be beaten "
        f"(default: {','.join(COMPARED)}; with --stateless it does not matter)",
    )
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        default="llama3-8b",
        help="model that is simulated (default: llama3-8b)",
    )
    parser.add_argument(
        "--hardware",
        choices=[*sorted(HARDWARE), INSTANT],
        default="h200",
        help="device that is simulated (default: h200)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="number of devices that share each layer; communication takes no time (default: 1)",
    )
    parser.add_argument(
        "--device-tokens",
        type=_several(tokens),
        default=[AUTO],
        metavar="N,…",
        help="size of the device tier, like 500k; auto: 0.9 of the device's memory less the weights "
        "(default: auto; 500k with --hardware instant or --cost)",
    )
    parser.add_argument(
        "--host-tokens",
        type=_several(tokens),
        default=[AUTO],
        metavar="N,…",
        help="size of the host tier; 0: none; auto: what the "
        "machine's preset has per device, like 220 GB with an H200 and 32 GB for cpu "
        "(default: auto; 2M with --hardware instant or --cost)",
    )
    parser.add_argument(
        "--stateless",
        action="store_true",
        help="forget a conversation's KV after each turn and recompute its history with the next "
        "message: the stateless server to compare with",
    )
    parser.add_argument(
        "--phases",
        choices=PHASES,
        default="unified",
        help="separate: an iteration with prompts and with turns that generate takes two passes, "
        "prompts first; with a --token-budget of 1000000 whole prompts go first, as in schedulers that "
        "put prefill first (default: unified)",
    )
    parser.add_argument(
        "--token-budget",
        type=int,
        default=2048,
        metavar="N",
        help="most tokens of an iteration (default: 2048)",
    )
    parser.add_argument(
        "--prompt-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="how much longer an iteration may take for prompts while other turns generate; a daemon's own "
        f"default is {PROMPT_SECONDS} (default: 0, no limit)",
    )
    parser.add_argument(
        "--tbt",
        type=float,
        default=0.0,
        metavar="S",
        help="objective for the time between two tokens: prompts join an iteration as far as it is "
        "predicted to take no longer (default: 0, none)",
    )
    parser.add_argument(
        "--share",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a reply, after which a turn gives its place to one that waits (default: 0, never)",
    )
    parser.add_argument(
        "--turns-max",
        type=int,
        default=256,
        metavar="N",
        help="most turns that run at once (default: 256)",
    )
    parser.add_argument(
        "--count-from",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="do not count turns that begin before this time; times count from a trace's first "
        "message",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help="draw simulate.png into this folder: one sheet of what was compared or swept, and of tiers and "
        "turns over time (needs the extra bench)",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def policies_of(arguments: argparse.Namespace) -> list[str]:
    """The names of --policy, or the default ones."""
    if arguments.policy is not None:
        return list(arguments.policy.split(","))
    return list(COMPARED[:1] if arguments.stateless else COMPARED)


def check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be simulated, with the reason."""
    from pensieve.sim.sweep import CLAIRVOYANT

    known = (*POLICIES, CLAIRVOYANT)
    if unknown := [name for name in policies_of(arguments) if name not in known]:
        raise InvalidArgument("policy", f"{unknown[0]!r} is none of {', '.join(known)}")
    if CLAIRVOYANT in policies_of(arguments) and arguments.record is not None:
        raise InvalidArgument("policy", "clairvoyant knows a trace: it cannot serve or record")
    if bool(arguments.traces) == (arguments.workload is not None):
        raise InvalidArgument("TRACE", "name files, or draw a --workload; not both")
    if arguments.workload is None and len(arguments.rate) > 1:
        raise InvalidArgument("rate", "a recorded trace has its own; several are for a --workload")
    if arguments.workload is None and len(arguments.seed) > 1:
        raise InvalidArgument("seed", "nothing of a recorded trace is drawn; for a --workload")
    if min(*arguments.rate, arguments.seconds) <= 0 or (arguments.reaction or 1) <= 0:
        raise InvalidArgument("rate, seconds, reaction", "are above 0")
    if arguments.until is not None and arguments.until <= arguments.count_from:
        raise InvalidArgument("until", "is after --count-from, or nothing is counted")
    if arguments.workload is not None and arguments.seconds <= arguments.count_from:
        raise InvalidArgument("count_from", "is before --seconds, or nothing is counted")
    if min(arguments.token_budget, arguments.turns_max, arguments.devices) < 1:
        raise InvalidArgument("token_budget, turns_max, devices", "are 1 or more")
    if arguments.token_budget < arguments.turns_max:
        raise InvalidArgument(
            "token_budget",
            f"{arguments.token_budget} tokens an iteration are fewer than the {arguments.turns_max} "
            "turns (--turns-max) that may generate in it, one token each",
        )
    for name in ("prompt_seconds", "tbt", "share"):
        if not getattr(arguments, name) >= 0:
            raise InvalidArgument(name, "is at least 0")
    timeless = arguments.hardware == INSTANT and arguments.cost is None
    if timeless and arguments.phases != "unified":
        raise InvalidArgument("phases", "differ in time, and with --hardware instant there is none")


def _several(one: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """For argparse: values between commas."""

    def several(text: str) -> list[Value]:
        try:
            return [one(each) for each in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no number, nor several with commas between"
            ) from None

    return several


def tokens(text: str) -> int:
    """`500k`, `3M` or a plain number; `auto`."""
    if text == "auto":
        return AUTO
    factors = {"k": 1_000, "m": 1_000_000}
    factor = factors.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    try:
        count = int(float(digits) * factor)
    except (ValueError, OverflowError):
        count = -1
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens (500000, 500k, 3M)")
    return count
