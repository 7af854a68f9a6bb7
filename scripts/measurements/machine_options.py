"""Command-line options of simulations: the model and the machine."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pensieve.cli.simulate import AUTO, tokens
from pensieve.sim import cost_file
from pensieve.sim.cost import HARDWARE, MODELS, CostModel
from pensieve.sim.sweep import TierRoom


@dataclass(frozen=True)
class Machine:
    """The costs and the memory of an engine."""

    cost: CostModel
    device_tokens: int
    host_tokens: int


def add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), default="llama3-8b")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h200")
    parser.add_argument("--devices", type=int, default=1, help="tensor parallel (default: 1)")
    parser.add_argument(
        "--cost", type=Path, help="file of a profile, instead of model and hardware"
    )
    for tier in ("device", "host"):
        parser.add_argument(
            f"--{tier}-tokens", type=tokens, default=AUTO, help="(default: as many as fit)"
        )


def machine_of(arguments: argparse.Namespace) -> Machine:
    if arguments.cost is not None:
        cost, room = cost_file.load(arguments.cost), TierRoom()
    else:
        model = MODELS[arguments.model]
        hardware = replace(HARDWARE[arguments.hardware], devices=arguments.devices)
        cost, room = CostModel.of(model, hardware), TierRoom.of(model, hardware)
    device, host = (
        fits if given == AUTO else given
        for given, fits in (
            (arguments.device_tokens, room.device_tokens),
            (arguments.host_tokens, room.host_tokens),
        )
    )
    room.check([device], arguments.model, f"{arguments.devices} x {arguments.hardware}")
    return Machine(cost, device, host)


class Progress:
    """Print lines to standard error with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {line}", file=sys.stderr, flush=True)


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.1f}"
