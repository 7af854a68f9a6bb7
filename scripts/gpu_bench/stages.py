"""Define the stages in which a GPU is examined, and what each stage's figures decide.

Time on a machine with a GPU is short. So correctness comes first, then what is likely to be slow, and the
long runs last. If time runs out, the last stages are skipped. A stage is a list of steps. Each step is a
section of the bench, in its own process with a time limit: a hang or a lasting device error affects only that
step.

The functions are pure: they turn figures into sentences (`decisions`) and consequences (`after`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Figures = Mapping[str, Any]  # one line of figures.jsonl


class Step(NamedTuple):
    section: str
    seconds: int  # time limit
    small: bool = False
    choices: str = ""  # of kernels/choices.py


class Stage(NamedTuple):
    number: int
    minutes: int
    title: str
    steps: tuple[Step, ...]


WATCHDOG = "watchdog=1"
STAGES = (
    Stage(
        1,
        4,
        "Are the results right?",
        (
            Step("versions", 60),
            Step("device", 60, small=True),
            Step(
                "kernels", 120, small=True, choices=WATCHDOG
            ),  # also compiles them, if that was not done before
            Step("swap", 45, small=True),
            Step("sanitizer", 150, small=True),
        ),
    ),
    Stage(
        2,
        3,
        "Do the kernels work together, from attention to whole replies?",
        (
            Step("attention", 60, small=True, choices=WATCHDOG),
            Step("decode", 45, small=True, choices=WATCHDOG),
            Step("prefill", 45, small=True, choices=WATCHDOG),
            Step("hidden", 60, small=True, choices=WATCHDOG),
            Step("exactness", 90, small=True, choices=WATCHDOG),
        ),
    ),
    Stage(
        3,
        6,
        "How fast are the kernels?",
        (
            Step("device", 90),
            Step("kernels", 120),
            Step("decode", 90),
            Step("prefill", 90),
            Step("swap", 90),
        ),
    ),
    Stage(
        4,
        6,
        "How fast is an iteration, and does it wait for the sampler, the host or copies?",
        (Step("iteration", 180), Step("sampler", 60), Step("hidden", 120)),
    ),
    Stage(
        5,
        9,
        "Against torch, and exact under pressure",
        (Step("attention", 300), Step("exactness", 240)),
    ),
    Stage(6, 9, "Under load", (Step("load", 540),)),
)


def small(stages: Iterable[Stage]) -> list[Stage]:
    """Return the stages with all steps on small shapes."""
    return [
        stage._replace(steps=tuple(step._replace(small=True) for step in stage.steps))
        for stage in stages
    ]


class Consequences(NamedTuple):
    """The consequences of a stage for later stages."""

    stop: bool = False
    choices: str = ""  # for all later steps; section `kernels` runs again with them


# What section `kernels` checks, in this order.
KERNELS = {
    "narrow": "the kernel for narrow items is wrong: stop and fix it",
    "wide": "Hopper's kernel is wrong: it is switched off (hopper=0), and the run continues",
    "write": "the kernel that writes keys and values is wrong: stop and fix it",
    "copy": "the kernel that copies pages is wrong: stop and fix it",
    "draw": "the kernel that draws tokens (a radix search) is wrong: it is switched off (radix=0), and the "
    "run continues",
    "fused": "the kernels between a layer's products are wrong: stop and fix them",
    "fp8": "the kernels for KV in fp8 are wrong: do not use --kv-dtype fp8 before a fix; the run continues",
}
OPTIONAL = ("fp8",)  # used only on request
SWITCHED_OFF = {"wide": "hopper=0", "draw": "radix=0"}


def after(number: int, found: Sequence[Figures]) -> Consequences:
    """Return the consequences. Only stage 1 has any: wrong kernels are switched off or end the run."""
    if number != 1:
        return Consequences()
    if any(each["section"] == "versions" and each.get("failed") for each in found):
        return Consequences(stop=True)
    needed = [kind for kind in failed_kernels(found) if kind not in OPTIONAL]
    if needed and needed[-1] in SWITCHED_OFF:
        return Consequences(choices=SWITCHED_OFF[needed[-1]])
    return Consequences(stop=bool(needed) or "narrow" not in _right_kernels(found))


def _right_kernels(found: Sequence[Figures]) -> set[str | None]:
    return {
        each.get("kind") for each in section_figures(found, "kernels") if not each.get("failed")
    }


def failed_kernels(found: Sequence[Figures]) -> list[str]:
    """Return which of `KERNELS` section `kernels` found wrong, in the order of its checks.

    If the process was killed without a report, the first kernel that it had not finished counts as wrong.
    """
    wrong = [each for each in section_figures(found, "kernels") if each.get("failed")]
    kinds = [each["kind"] for each in wrong if each.get("kind") in KERNELS]
    if any(each.get("kind") not in KERNELS for each in wrong):
        known = _right_kernels(found) | set(kinds)
        kinds.append(next((kind for kind in KERNELS if kind not in known), "narrow"))
    return list(dict.fromkeys(kinds))


def unverified_kernels(found: Sequence[Figures]) -> frozenset[str]:
    """Return the kernels that section `kernels` did not find right in its last run; none if it never ran.

    The section ends at the first wrong kernel that is not optional, so all later kernels count as wrong.
    """
    examined = section_figures(found, "kernels")
    wrong = set(KERNELS) if examined else set()
    for each in examined:
        if each.get("failed"):
            wrong.add(each.get("kind") or "")
        else:
            wrong.discard(each.get("kind") or "")
    return frozenset(wrong) - {""}


def section_figures(found: Sequence[Figures], section: str, *names: str) -> list[Figures]:
    """Return the figures of a section that have all of these fields."""
    return [
        each
        for each in found
        if each["section"] == section and all(each.get(name) is not None for name in names)
    ]


def decisions(number: int, found: Sequence[Figures], wanted: Sequence[str]) -> list[str]:
    """Return in sentences what to do after a stage; `wanted` are its sections."""
    failed = [each for each in found if each.get("failed")]
    wrong = sorted({each["section"] for each in failed})
    missing = [name for name in wanted if not section_figures(found, name)]
    sentences = [
        _failure_sentence(name, [each for each in failed if each["section"] == name])
        for name in wrong
    ]
    sentences += [f"{name}: not examined" for name in missing]
    is_all_right = not wrong and not missing
    match number:
        case 1:
            if kernels := failed_kernels(found):
                sentences += [KERNELS[kind] for kind in kernels]
            elif "narrow" in _right_kernels(found):
                sentences.append("the kernels agree with the reference: continue")
            else:
                sentences.append("the kernels were not all checked: stop here")
        case 2:
            sentences.append(
                "attention, decode, prefill and replies are right: the following figures are meaningful"
                if is_all_right
                else "figures are meaningless until everything was examined and is right"
            )
        case 3:
            shares = [
                section_figures(found, name, "share")
                for name in ("decode", "prefill")
                if name in wanted
            ]
            fine = "every share is above its limit" if all(shares) else "some shares are unknown"
            sentences += _kernel_sentences(found) or [fine] * (is_all_right and bool(shares))
        case 4:
            sentences += (
                _iteration_sentences(found) or ["nothing is above its limit"] * is_all_right
            )
        case 5:
            for each in section_figures(found, "attention", "mean"):
                mean = each["mean"]
                what = "tune the path for at most 32 rows" if mean > 1 else "nothing to do"
                sentences.append(
                    f"attention {each['heads']}: {mean:.2f} x torch's time (should be at most 1.0): {what}"
                )
        case 6:
            best = {
                each["kind"]: each["ratio"]
                for each in section_figures(found, "load", "kind", "ratio")
            }
            sentences += [
                f"throughput at equal latency, {kind}: {ratio:.2f} x stateless"
                for kind, ratio in best.items()
            ]
    return sentences


def _failure_sentence(section: str, failed: Sequence[Figures]) -> str:
    """Name the parts that failed; without names, the whole section has failed."""
    parts = [each.get("what") for each in failed]
    if not all(parts):
        return f"{section}: failed; fix it before trusting its figures"
    return f"{section}: parts of it failed, and the rest was examined: {'; '.join(map(str, parts))}"


def _kernel_sentences(found: Sequence[Figures]) -> list[str]:
    sentences = []
    for each in section_figures(found, "decode", "share"):
        if each["share"] < 0.8:
            sentences.append(
                f"decode reaches {each['share']:.0%} of the bandwidth, below 80 %: look at the merge "
                f"inside the kernel ({each['line']})"
            )
    for each in section_figures(found, "prefill", "share"):
        if each["share"] < 0.6:
            sentences.append(
                f"prefill reaches {each['share']:.0%} of the product's rate, below 60 %: look at the "
                f"ping-pong of the warpgroups ({each['line']})"
            )
    for each in section_figures(found, "decode", "fp8_speed"):
        if each["fp8_speed"] < 1.5:
            sentences.append(
                f"with KV in fp8, decode is {each['fp8_speed']:.2f} x as fast, but half the bytes would "
                f"allow 2 x: check whether unpacking is the limit ({each['line']})"
            )
    return sentences


def _iteration_sentences(found: Sequence[Figures]) -> list[str]:
    sentences = []
    for each in section_figures(found, "sampler", "seconds"):
        if each["seconds"] > 0.5e-3:
            sentences.append(
                f"the sampler takes {each['seconds'] * 1e3:.2f} ms ({each['kind']}): improve it first"
            )
    for each in section_figures(found, "iteration", "host_seconds", "seconds"):
        if each["kind"].startswith("eager"):  # replaced by graphs
            continue
        if each["host_seconds"] > each["seconds"] - each["host_seconds"]:
            sentences.append(
                f"{each['kind']} at {each['rows']} rows: launching takes the host most of an iteration: "
                "reduce the launches between the captured pieces (piecewise_graphs.py)"
            )
    for each in section_figures(found, "hidden", "ratio"):
        if each["ratio"] > 1.05:
            sentences.append(
                f"a turn whose KV is copied from the host tier takes {each['ratio']:.2f} x as long as a turn "
                "with its KV on the device: find out what waits for the copy"
            )
    return sentences
