"""Runs one section of the GPU bench, in a process of its own that `gpu.py` starts and ends.

Figures go to `figures.jsonl` in the folder as they come, so a process that is ended leaves what it had
measured.
The device's own rates, which shares are shares of, are those that section `device` wrote there before.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from pensieve.bench.gpu_harness import FIGURES, Bench, figures_of
from pensieve.bench.gpu_stages import wrong_kernels
from pensieve.errors import InvalidArgument
from pensieve.kernels import choices
from pensieve.model.loader import LoadedModel

NAMES = (
    *("versions", "device", "kernels", "sanitizer", "attention", "decode", "prefill", "swap"),
    *("choices", "iteration", "sampler", "hidden", "exactness", "load"),
)
# What a process imports beside this module, so that all of it can be imported once for all processes.
MODULES = (
    "pensieve.bench.gpu_choices",
    "pensieve.bench.gpu_device",
    "pensieve.bench.gpu_exactness",
    "pensieve.bench.gpu_hidden",
    "pensieve.bench.gpu_iteration",
    "pensieve.bench.gpu_kernels",
    "pensieve.bench.gpu_load",
    "pensieve.bench.gpu_versions",
    "transformers.models.llama.modeling_llama",
)


def run_section(
    name: str,
    folder: Path,
    device: str,
    seconds: float,
    small: bool,
    chosen: str,
    output: Connection,
) -> None:
    """What the process does: run one section, print to `output`, and end with status 0 or 1."""
    os.setsid()  # so that whatever it starts can be ended with it (`gpu.end_process`)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    raise SystemExit(0 if succeeded(name, folder, device, seconds, small, chosen) else 1)


def succeeded(
    name: str, folder: Path, device: str, seconds: float, small: bool, chosen: str | None = None
) -> bool:
    """Run one section with these choices (None: those of the process); why one fails is a figure, too."""
    with (folder / FIGURES).open("a", encoding="utf-8") as out, torch.inference_mode():
        bench = Bench(torch.device("cpu"), small, out, seconds, time.perf_counter())
        try:
            if chosen is not None:
                choices.current = choices.of_text(chosen)
                os.environ[choices.VARIABLE] = chosen
            bench.device = torch.device(device)
            if bench.device.type == "cuda":
                bench.device = torch.device("cuda", bench.device.index or 0)
                torch.cuda.set_device(bench.device)
            recall(bench, folder)
            section_named(name)(bench)
            return not bench.failed
        except Exception as error:
            kind = getattr(error, "kind", None)
            bench.report(name, f"FAILED: {type(error).__name__}: {error}", failed=True, kind=kind)
            traceback.print_exc(file=sys.stderr)
    return False


def recall(bench: Bench, folder: Path) -> None:
    """The device's rates, as section `device` last wrote them for shapes of this size; what is wrong."""
    for reported in figures_of(folder):
        if reported["section"] != "device" or reported["small"] != bench.small:
            continue
        bench.copy_bandwidth = reported.get("copy_bandwidth", bench.copy_bandwidth)
        bench.matrix_rate = reported.get("matrix_rate", bench.matrix_rate)
        if "swap_in" in reported:
            bench.bus = {name: reported[name] for name in ("swap_in", "swap_out")}
    bench.wrong = wrong_kernels(figures_of(folder))


def section_named(name: str) -> Callable[[Bench], None]:
    """The section's function; nothing else is imported."""
    if name in ("versions", "sanitizer"):
        from pensieve.bench import gpu_versions

        return {
            "versions": gpu_versions.section_versions,
            "sanitizer": gpu_versions.section_sanitizer,
        }[name]
    if name in ("device", "swap"):
        from pensieve.bench import gpu_device

        return {"device": gpu_device.section_device, "swap": gpu_device.section_swap}[name]
    if name in ("kernels", "attention", "decode", "prefill"):
        from pensieve.bench import gpu_kernels

        return {
            "kernels": gpu_kernels.section_kernels,
            "attention": gpu_kernels.section_attention,
            "decode": gpu_kernels.section_decode,
            "prefill": gpu_kernels.section_prefill,
        }[name]
    if name == "choices":
        from pensieve.bench.gpu_choices import section_choices

        return section_choices
    if name == "sampler":
        from pensieve.bench.gpu_iteration import section_sampler

        return section_sampler
    return _with_model(name)


def _with_model(name: str) -> Callable[[Bench], None]:
    from pensieve.bench.gpu_exactness import section_exactness
    from pensieve.bench.gpu_hidden import section_hidden
    from pensieve.bench.gpu_iteration import section_iteration
    from pensieve.bench.gpu_load import section_load
    from pensieve.bench.gpu_model import random_model

    sections: dict[str, Callable[[Bench, LoadedModel], None]] = {
        "iteration": section_iteration,
        "hidden": section_hidden,
        "exactness": section_exactness,
        "load": section_load,
    }
    if name not in sections:
        raise InvalidArgument("section", f"{name} is none of {', '.join(NAMES)}")
    return lambda bench: sections[name](bench, random_model(bench.device, bench.small))
