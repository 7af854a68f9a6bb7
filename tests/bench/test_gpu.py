"""Every section of the GPU bench runs small, on the CPU too, times nothing wrong, and holds up no other."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.bench import gpu as bench_gpu
from pensieve.bench import gpu_kernels, gpu_versions
from pensieve.bench.gpu_baselines import baselines, usable
from pensieve.bench.gpu_harness import figures_of
from pensieve.bench.gpu_pages import Paged
from pensieve.bench.gpu_section import NAMES, succeeded
from pensieve.bench.gpu_stages import (
    KERNELS,
    STAGES,
    After,
    Stage,
    Step,
    after,
    decisions,
    found_wrong,
    small,
    wrong_kernels,
)
from pensieve.errors import PensieveError
from pensieve.kernels import choices, cuda_launch
from pensieve.model.sampling.sampler import Sampler


def figure(section: str, **fields: Any) -> dict[str, Any]:
    return {"section": section, "small": False, "line": "…", **fields}


WRONG_COPY = figure("kernels", failed=True, kind="copy")


@pytest.mark.parametrize("section", NAMES)
def test_every_section_runs_small(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU it checks and measures the same things, on other kernels."""
    assert succeeded(section, tmp_path, "cpu", 60, True), capsys.readouterr()
    figures = figures_of(tmp_path)
    assert {each["section"] for each in figures} == {section}
    assert all("failed" not in each and each["small"] for each in figures)
    if section == "load":
        ratios = {each["kind"]: each["ratio"] for each in figures if "ratio" in each}
        assert set(ratios) == {"stateless", "device only", "two tiers", "two, LRU"}
        assert ratios["stateless"] == 1.0


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("section", [name for name in NAMES if name != "load"])
def test_a_gpu_says_what_the_references_say(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels, captured graphs, swaps, and replies under pressure, on the real thing."""
    assert succeeded(section, tmp_path, "cuda", 120, True), capsys.readouterr()


@pytest.mark.parametrize("section", ["kernels", "decode", "prefill", "attention"])
def test_the_gpu_bench_times_nothing_that_is_wrong(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Paged, "run", lambda self: self.out.fill_(0.5))
    assert not succeeded(section, tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    assert {each["section"] for each in figures if each.get("failed")} == {section}
    assert not any("seconds" in each or "fp8_speed" in each for each in figures)
    told = decisions(3, figures, [section])
    assert any(f"{section}: " in each and "failed" in each for each in told)
    assert not any("above its limit" in each for each in told)


def test_a_baseline_that_is_wrong_is_left_out_and_named() -> None:
    """Torch knows of causality by itself where there is nothing before the queries."""
    query, keys = torch.randn(1, 40, 4, 64), torch.randn(1, 2, 40, 64)
    ways = baselines(query, keys, keys)
    right = ways["fused, batch"]()
    assert {"fused, causal", "fused, folded"} < set(ways)
    ways["fused, folded"] = lambda: torch.zeros_like(right)
    reported: list[str] = []
    assert set(usable(ways, right, reported.append)) == {"fused, batch", "fused, causal"}
    assert len(reported) == 1
    assert reported[0].startswith("left out: torch (fused, folded) is off by")
    assert "fused, causal" not in baselines(query[:, :8], keys, keys)


# -- the run: a process for each section --


def test_a_section_that_does_not_end_costs_itself_alone(tmp_path: Path) -> None:
    log = io.StringIO()
    run = bench_gpu.Run(tmp_path, "cpu", 600, log)
    run.step(
        Step("device", 120, small=True)
    )  # the process that the others are copies of starts here
    run.step(Step("load", 1, small=True))
    run.step(Step("swap", 60, small=True))
    assert run.failed == ["load"]
    figures = figures_of(tmp_path)
    (failed,) = [each for each in figures if each.get("failed")]
    assert failed["line"] == "FAILED: it was ended after 1 s"
    assert figures[-1]["section"] == "swap"
    assert "swap_in, 10 pages" in log.getvalue(), "what a process printed is in the log"


def dies(*given: object) -> None:
    raise SystemExit(1)


def test_a_section_that_dies_before_it_begins_has_failed_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a choice that is none, of a device that is none, and of what nobody has thought of."""
    run = bench_gpu.Run(tmp_path, "cpu", 600, io.StringIO())
    run.step(Step("device", 120, small=True, choices="snake=yes"))
    assert not succeeded("swap", tmp_path, "cuda:99", 60, True)
    monkeypatch.setattr(bench_gpu, "run_section", dies)
    run.step(Step("decode", 60, small=True))
    assert run.failed == ["device", "decode"]
    figures = figures_of(tmp_path)
    assert [each["section"] for each in figures] == ["device", "swap", "decode"]
    assert all(each["failed"] for each in figures)
    assert "snake=NUMBER" in figures[0]["line"]


def sleeps_in_a_group(*given: Any) -> None:
    os.setsid()
    sleeps_without_a_group(*given)


def sleeps_without_a_group(*given: Any) -> None:
    os.write(given[-1].fileno(), f"{os.getpid()}\n".encode())
    time.sleep(20)
    os.write(given[-1].fileno(), b"nobody has ended it\n")


@pytest.mark.parametrize("process", [sleeps_in_a_group, sleeps_without_a_group])
def test_a_process_that_is_late_is_ended_even_before_it_has_a_group(
    process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "run_section", process)
    log = io.StringIO()
    run = bench_gpu.Run(tmp_path, "cpu", 600, log)
    run.step(Step("device", 3))
    assert run.failed == ["device"]
    assert "nobody has ended it" not in log.getvalue()


def starts_another_group(*given: Any) -> None:
    os.setsid()
    with subprocess.Popen(["sleep", "60"], process_group=0) as another:
        os.write(given[-1].fileno(), f"{another.pid}\n".encode())


def ended(pid: int) -> bool:
    """Within some seconds; nobody may be there to ask for its status."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_what_a_late_section_started_is_ended_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a group of its own, as compute-sanitizer is."""
    monkeypatch.setattr(bench_gpu, "run_section", starts_another_group)
    log = io.StringIO()
    bench_gpu.Run(tmp_path, "cpu", 600, log).step(Step("device", 3))
    assert ended(int(log.getvalue().split()[0]))


def test_a_sanitizer_that_takes_too_long_is_ended_with_what_it_examines(tmp_path: Path) -> None:
    program = ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $! >pid; wait"]
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_versions.outcome(program, str(tmp_path), 1)
    assert ended(int((tmp_path / "pid").read_text()))
    assert gpu_versions.outcome(["sh", "-c", "echo a; echo b >&2; exit 9"], str(tmp_path), 9) == (
        9,
        "a\nb\n",
    )


def test_an_interrupted_run_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "run_section", sleeps_in_a_group)
    run = bench_gpu.Run(tmp_path, "cpu", 600, io.StringIO())
    began = []

    def interrupted(line: str) -> None:
        began.append(int(line))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "say", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.step(Step("device", 60))
    with pytest.raises(ProcessLookupError):
        os.kill(began[0], 0)


def test_a_section_is_not_begun_with_too_little_time_to_end_it(tmp_path: Path) -> None:
    log = io.StringIO()
    bench_gpu.Run(tmp_path, "cpu", 4, log).step(Step("device", 60, small=True))
    assert "left out: the time is over" in log.getvalue()
    assert not figures_of(tmp_path)


def test_a_run_that_examined_nothing_has_failed(tmp_path: Path) -> None:
    given = ["--small", "--device", "cpu", "--out", str(tmp_path), "--minutes", "0.1"]
    assert bench_gpu.main(given) == 1


def test_what_is_wrong_is_switched_off_until_the_kernels_are_right_or_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First Hopper's kernel is wrong, then the search, then nothing; or Hopper's, switched off or not."""
    right = [figure("kernels", kind=kind) for kind in KERNELS]
    wide, drawn = ([figure("kernels", failed=True, kind=kind)] for kind in ("wide", "draw"))
    stages = [
        Stage(1, 1, "", (Step("kernels", 9),)),
        Stage(6, 1, "", (Step("load", 9),)),
    ]
    for index, (answers, ran, chosen) in enumerate(
        [
            ([wide, drawn, right], ["kernels"] * 3 + ["load"], ["hopper=0", "radix=0"]),
            ([wide, wide], ["kernels"] * 2, ["hopper=0"]),
        ]
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        run = bench_gpu.Run(folder, "cpu", 600, io.StringIO())
        seen: list[str] = []

        def step(
            step: Step,
            seen: list[str] = seen,
            answers: list[Any] = answers,
            folder: Path = folder,
        ) -> None:
            seen.append(step.section)
            with (folder / "figures.jsonl").open("a") as out:
                for each in answers.pop(0) if answers else ():
                    out.write(json.dumps(each) + "\n")

        monkeypatch.setattr(run, "step", step)
        run.stages(stages)
        assert seen == ran
        assert run._choices == chosen


def test_a_run_keeps_figures_log_and_decisions_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody names the folder; `choices` of the environment reach the processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setenv("PENSIEVE_GPU_CHOICES", "snake=0")
    given = ["--small", "--device", "cpu", "--stages", "1,3", "--sections", "versions,device"]
    assert bench_gpu.main(given) == 0
    (folder,) = tmp_path.glob("bench_gpu_*")
    assert {each.name for each in folder.iterdir()} == {"figures.jsonl", "log.txt", "decisions.txt"}
    figures = figures_of(folder)
    assert any("snake=0" in each["line"] for each in figures)
    assert sum("copy_bandwidth" in each for each in figures) == 2


def test_a_stage_that_has_no_time_left_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_gpu.Run(tmp_path, "cpu", 60, io.StringIO()).stages(small(STAGES))
    assert capsys.readouterr().out.count("is left out") == len(STAGES)
    assert not figures_of(tmp_path)


def test_every_stage_begins_in_45_minutes_however_long_those_before_it_take() -> None:
    """With what it needs to begin, also where a kernel was switched off and all were examined again."""
    (examined,) = (step for step in STAGES[0].steps if step.section == "kernels")
    begins = examined.seconds
    for stage in STAGES:
        assert 45 * 60 - begins >= stage.minutes * 60 / 2, stage.number
        begins += sum(step.seconds for step in stage.steps)
    (watched,) = (step for step in STAGES[0].steps if step.section == "sanitizer")
    assert watched.seconds >= len(gpu_versions.TOOLS) * gpu_versions.TOOL_SECONDS + 15, (
        "and to begin"
    )


def test_a_line_that_was_cut_off_is_no_figure(tmp_path: Path) -> None:
    whole = json.dumps({"section": "device", "small": True, "line": "here"})
    (tmp_path / "figures.jsonl").write_text(f'{whole}\n{{"section": "dec\n{whole}\n')
    assert len(figures_of(tmp_path)) == 2


# -- what figures decide --


@pytest.mark.parametrize(
    ("found", "means"),
    [
        ([figure("kernels", kind="narrow"), figure("kernels", kind="wide")], After()),
        ([figure("kernels", failed=True, kind="narrow")], After(stop=True)),
        (
            [figure("kernels", kind="narrow"), figure("kernels", failed=True, kind="wide")],
            After(choices="hopper=0", again=("kernels",)),
        ),
        # Its process was ended, so it could not say which: the narrow one had been found right, or not.
        (
            [figure("kernels", kind="narrow"), figure("kernels", failed=True)],
            After(choices="hopper=0", again=("kernels",)),
        ),
        ([figure("kernels", failed=True)], After(stop=True)),
        ([figure("versions", failed=True)], After(stop=True)),
        ([figure("sanitizer", failed=True), figure("kernels", kind="narrow")], After()),
        ([figure("kernels", kind="narrow"), figure("kernels", failed=True, kind="fused")], After()),
        ([figure("kernels", kind="narrow"), figure("kernels", failed=True, kind="fp8")], After()),
        ([figure("kernels", kind="narrow"), WRONG_COPY], After(stop=True)),
        (
            [figure("kernels", kind="narrow"), figure("kernels", failed=True, kind="draw")],
            After(choices="radix=0", again=("kernels",)),
        ),
        # Nobody has examined them.
        ([figure("sanitizer", failed=True)], After(stop=True)),
        ([], After(stop=True)),
    ],
)
def test_wrong_kernels_are_switched_off_or_end_the_run(
    found: list[dict[str, Any]], means: After
) -> None:
    assert after(1, found) == means
    assert after(3, found) == After()


def test_what_section_kernels_found_wrong_is_not_timed(tmp_path: Path) -> None:
    """Nor what it never came to."""
    right = [figure("kernels", kind=kind) for kind in KERNELS]
    assert wrong_kernels([]) == frozenset()
    assert wrong_kernels([*right, figure("decode", failed=True)]) == frozenset()
    wrong = [*right[:4], figure("kernels", failed=True, kind="draw")]
    assert wrong_kernels(wrong) == {"draw", "fused", "fp8"}
    assert wrong_kernels([*wrong, *right]) == frozenset(), "it was run again, with a switch"
    assert wrong_kernels([*right, figure("kernels", failed=True, kind="fused")]) == {"fused"}
    (tmp_path / "figures.jsonl").write_text("".join(json.dumps(each) + "\n" for each in wrong))
    for section in ("decode", "prefill", "iteration", "exactness"):
        assert succeeded(section, tmp_path, "cpu", 60, True)
    lines = [each["line"] for each in figures_of(tmp_path)[len(wrong) :] if "fp8" in each["line"]]
    assert len(lines) == 5
    assert all("left out" in line for line in lines)


@pytest.mark.parametrize(
    ("number", "found", "told"),
    [
        (2, [figure("decode", failed=True)], "mean nothing"),
        (3, [figure("decode", share=0.7)], "three blocks"),
        (3, [figure("decode", share=0.9), figure("prefill", share=0.7)], "above its limit"),
        (3, [figure("prefill", share=0.5)], "ping-pong"),
        (3, [figure("decode", fp8_speed=1.2)], "what unpacks it is the limit"),
        (4, [figure("sampler", seconds=1e-3, kind="greedy")], "sampler takes 1.00 ms"),
        (4, [figure("iteration", host_seconds=3e-3, seconds=4e-3, kind="eager", rows=1)], "host"),
        (
            4,
            [figure("iteration", host_seconds=1e-3, seconds=4e-3, kind="eager", rows=1)],
            "nothing",
        ),
        (4, [figure("hidden", ratio=1.2)], "earlier swap-ins"),
        (5, [figure("attention", mean=1.2, heads="16/4")], "at most 32 rows"),
        (6, [figure("load", kind="two tiers", ratio=1.4)], "1.40 x stateless"),
    ],
)
def test_each_stage_says_what_its_figures_decide(
    number: int, found: list[dict[str, Any]], told: str
) -> None:
    wanted = [each["section"] for each in found]
    assert any(told in sentence for sentence in decisions(number, found, wanted))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_stage_that_left_no_figures_was_not_examined_and_is_not_praised(number: int) -> None:
    told = decisions(number, [])
    for name in {step.section for step in STAGES[number - 1].steps}:
        assert f"{name}: it was not examined" in told
    for praise in ("go on", "mean something", "above its limit"):
        assert not any(praise in sentence for sentence in told)


@pytest.mark.parametrize("section", ["attention", "decode", "prefill", "swap"])
def test_a_share_of_a_rate_that_nobody_measured_is_unknown_and_not_nothing(
    section: str, tmp_path: Path
) -> None:
    assert succeeded(section, tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    assert {each["share"] for each in figures if "share" in each} == {None}
    assert "is unknown" in figures[0]["line"]
    told = decisions(3, figures, [section])
    assert not any("0%" in each or "above its limit" in each for each in told)


def test_kernels_that_nobody_asked_for_end_no_run_and_are_not_praised() -> None:
    assert after(1, [figure("device")], ["device"]) == After()
    assert decisions(1, [figure("device")], ["device"]) == []


@pytest.mark.parametrize("kind", ["write", "copy"])
def test_each_kernel_that_is_wrong_is_called_by_its_own_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only after attention, which more depends on, was found right."""
    monkeypatch.setattr(gpu_kernels, "write_kv" if kind == "write" else "copy_pages", dies_not)
    assert not succeeded("kernels", tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    assert [each["kind"] for each in figures][:2] == ["narrow", "wide"]
    assert found_wrong(figures) == [kind]
    assert KERNELS[kind] in decisions(1, figures)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_fused_norm_that_forgets_its_weights_is_found(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def norm(*given: Any) -> None:
        residual, added, weight, eps, whole, normed = given
        whole.copy_(residual + added)
        given_weight = None if forgets else weight.float()
        normed.copy_(torch.nn.functional.rms_norm(whole.float(), (4096,), given_weight, eps))

    def gate(rows: torch.Tensor, out: torch.Tensor) -> None:
        left, right = rows.float().chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(left) * right)

    monkeypatch.setattr(gpu_kernels, "add_and_norm_launch", norm)
    monkeypatch.setattr(gpu_kernels, "gate_and_multiply_launch", gate)
    monkeypatch.setattr(cuda_launch, "launch", dies_not)
    told = pytest.raises(PensieveError, match="add_and_norm is off") if forgets else nullcontext()
    with told:
        gpu_kernels._check_fused(torch.device("cpu"), torch.bfloat16)


def dies_not(*given: object) -> None:
    """Does nothing at all."""


def test_what_was_switched_off_stays_so_in_every_choice_that_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "current", choices.Choices(hopper=0, radix=0))
    seen: list[choices.Choices] = []
    run, drawn = Paged.run, Sampler.draw

    def attend(self: Paged) -> torch.Tensor:
        seen.append(choices.current)
        return run(self)

    def draw(self: Sampler, *given: Any) -> Any:
        seen.append(choices.current)
        return drawn(self, *given)

    monkeypatch.setattr(Paged, "run", attend)
    monkeypatch.setattr(Sampler, "draw", draw)
    for section in ("choices", "iteration", "sampler"):
        before = len(seen)
        assert succeeded(section, tmp_path, "cpu", 60, True)
        assert len(seen) > before
    assert {(each.hopper, each.radix) for each in seen} == {(0, 0)}
    tried = [each["choice"] for each in figures_of(tmp_path) if "70 tokens" in each["line"]]
    assert len(tried) == len(set(tried)) > 1, "one was tried twice"
    assert [each["choice"] for each in figures_of(tmp_path) if each.get("default")] == [
        "hopper=0, radix=0"
    ] * 5


def test_a_choice_that_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Paged.run

    def attend(self: Paged) -> torch.Tensor:
        return run(self) if choices.current.snake else self.out.fill_(0.5)

    monkeypatch.setattr(Paged, "run", attend)
    assert not succeeded("choices", tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    failed = [each.get("choice") for each in figures if each.get("failed")]
    assert failed == ["snake=0", "wide_blocks=2, snake=0"]
    measured = {each["choice"] for each in figures if "seconds" in each}
    assert {"the defaults", "wide_blocks=2", "hopper=0", "few_rows=1", "shared=0"} < measured
    assert not {"snake=0", "wide_blocks=2, snake=0"} & measured
    lacking = [figure("choices", what="w", choice="snake=0", default=False, seconds=1.0)]
    assert "w: the present choice has no figure, so nothing is decided" in decisions(3, lacking)


@pytest.mark.parametrize(
    ("shares", "means"),
    [
        ({"swap_in": 0.95, "swap_out": 0.91}, "they replace the copy kernel"),
        ({"swap_in": 0.95, "swap_out": 0.8}, "the copy kernel stays"),
        ({"swap_in": 0.95}, "the copy kernel stays"),
    ],
)
def test_batched_copies_replace_the_kernel_where_both_directions_gain(
    shares: dict[str, float], means: str
) -> None:
    rows = [
        figure(
            "choices",
            what=what,
            choice="copy_engine=1",
            default=False,
            seconds=1.0,
            bus_share=share,
        )
        for what, share in shares.items()
    ]
    (told,) = (each for each in decisions(3, rows) if "batched" in each)
    assert means in told
    assert "95% (swap_in)" in told


def test_a_choice_becomes_the_default_only_where_it_is_faster() -> None:
    rows = [
        figure("choices", what="decode", choice="the defaults", default=True, seconds=1.0),
        figure("choices", what="decode", choice="narrow_blocks=3", default=False, seconds=0.8),
        figure("choices", what="prefill", choice="the defaults", default=True, seconds=1.0),
        figure("choices", what="prefill", choice="snake=0", default=False, seconds=0.99),
    ]
    told = decisions(3, rows)
    assert "decode: narrow_blocks=3 is 25% faster than the defaults: make it the default" in told
    assert "prefill: the defaults stay" in told
