"""A part of the GPU bench that fails costs itself alone, and none is found right unseen."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.bench import gpu_iteration, gpu_kernels, gpu_load, gpu_pages, gpu_smallest
from pensieve.bench.gpu_conversations import Conversations, EngineKind
from pensieve.bench.gpu_harness import Bench, figures_of
from pensieve.bench.gpu_pages import Paged
from pensieve.bench.gpu_section import succeeded
from pensieve.bench.gpu_stages import KERNELS, After, after, decisions, found_wrong
from pensieve.errors import PensieveError
from pensieve.kernels import cuda_launch, multi_token_attention, write_kv
from pensieve.kernels.attention import cuda, reference
from pensieve.kernels.kv_format import FP8
from pensieve.model.kv.memory import KVMemory
from tests.kernels.emulated import needs_x86, run


def raises(*given: object) -> None:
    raise PensieveError("planted")


@pytest.mark.parametrize("section", ["decode", "prefill"])
def test_kv_in_fp8_that_is_wrong_hides_no_figure_of_elements(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Paged.run

    def attend(self: Paged) -> torch.Tensor:
        return run(self) if self.kv_scales is None else self.out.fill_(0.5)

    monkeypatch.setattr(Paged, "run", attend)
    assert not succeeded(section, tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    failed = [bool(each.get("failed")) for each in figures]
    assert failed == sorted(failed), "fp8 comes when all else has its figures"
    assert sum("share" in each for each in figures) == sum(failed) > 0
    (told,) = (each for each in decisions(3, figures, [section]) if section in each)
    assert "a part of it failed, and the rest was examined" in told
    assert told.count("KV in fp8") == sum(failed)


def test_where_torch_takes_no_shape_the_kernel_has_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "usable", raises)
    assert not succeeded("prefill", tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    assert sum("share" in each for each in figures) == 2
    assert sum("fp8_speed" in each for each in figures) == 2
    assert not any("speed" in each for each in figures)


def test_iterations_decode_over_numbers_whatever_the_memory_held_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that are no numbers take other ways through kernels and the sampler: they get no figure."""
    allocated = KVMemory._allocate

    def with_nan(*given: Any) -> torch.Tensor:
        arena = allocated(*given)
        arena.view(torch.uint8).fill_(0xFF)
        return arena

    monkeypatch.setattr(KVMemory, "_allocate", with_nan)
    assert succeeded("iteration", tmp_path, "cpu", 60, True)
    executor_of = vars(gpu_iteration)["executor_of"]
    monkeypatch.setattr(
        gpu_iteration, "executor_of", lambda *given, **more: executor_of(*given, graphs=False)
    )
    (tmp_path / "figures.jsonl").unlink()
    assert not succeeded("iteration", tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    assert all("0 tokens" in each["line"] and each["failed"] for each in figures)
    assert len(figures) == 2, "each kind"


def test_an_iteration_of_one_kind_that_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor_of = vars(gpu_iteration)["executor_of"]

    def of_kind(model: Any, *given: Any, **more: Any) -> Any:
        if model.shape.kv_dtype == "auto":
            raise PensieveError("planted")
        return executor_of(model, *given, **more)

    monkeypatch.setattr(gpu_iteration, "executor_of", of_kind)
    assert not succeeded("iteration", tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    assert [each["kind"] for each in figures if each.get("failed")] == ["eager"]
    assert {each["kind"] for each in figures if "seconds" in each} == {"eager, KV in fp8"}


@pytest.mark.parametrize("dimension", [0, 1])
def test_replies_over_kv_in_fp8_are_far_off_where_scales_are_of_another_side_or_head(
    dimension: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = reference.multi_token_attention

    def by_others(*given: Any) -> None:
        *rest, scales = given
        attend(*(*rest, None if scales is None else scales.flip(dimension)))

    monkeypatch.setattr(reference, "multi_token_attention", by_others)
    assert not succeeded("exactness", tmp_path, "cpu", 60, True)
    elements, in_bytes = figures_of(tmp_path)
    assert "0 wrong" in elements["line"]
    assert "tokens lie far below" in in_bytes["line"]


def test_a_swap_that_moves_nothing_is_found_where_another_has_moved_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the copy engine has the pages that the kernel had before."""
    kept: dict[int, Any] = {}
    prepared, swap_in = KVMemory.prepared, KVMemory.swap_in
    ways: list[Any] = []

    def same(self: KVMemory, moves: Any) -> Any:
        return kept.setdefault(id(self), prepared(self, moves))

    def once(self: Bench, runs: Any, **more: Any) -> float:
        ways.append(runs)
        runs[0]()
        return 1.0

    monkeypatch.setattr(KVMemory, "prepared", same)
    monkeypatch.setattr(
        KVMemory, "swap_in", lambda *given: swap_in(*given) if len(ways) == 1 else None
    )
    monkeypatch.setattr(Bench, "seconds", once)
    assert not succeeded("swap", tmp_path, "cpu", 60, True)
    failed = [each["what"] for each in figures_of(tmp_path) if each.get("failed")]
    assert failed == ["swap_in, neighbours"]


def test_engines_are_compared_although_another_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(model: Any, executor: Any, kind: EngineKind, *given: Any) -> tuple[Any, float]:
        people = Conversations(kind.stateless, 0.0)
        people.latencies, people.output_tokens = [0.1, 0.2], 100
        people.failures = int(kind.name in wrong)
        return people, 1.0

    monkeypatch.setattr(gpu_load, "serve", serve)
    for wrong in ({"device only"}, {"stateless"}):
        (tmp_path / "figures.jsonl").unlink(missing_ok=True)
        assert not succeeded("load", tmp_path, "cpu", 60, True)
        compared = {each["kind"] for each in figures_of(tmp_path) if "ratio" in each}
        assert compared == (
            {"stateless", "two tiers", "two, LRU"} - wrong if len(compared) else set()
        )
        assert bool(compared) == ("stateless" not in wrong)


def test_an_error_of_the_device_that_sticks_ends_its_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an error that nobody has foreseen it is told where it came from: there is one run."""
    bench = Bench(torch.device("cpu"), True, io.StringIO(), 60, 0.0)
    with bench.noting("swap", "the first"):
        raise PensieveError("planted")
    assert bench.failed
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setattr(bench, "synchronize", raises)
    with pytest.raises(ValueError, match="another"), bench.noting("swap", "the second"):
        raise ValueError("another")
    assert "Traceback" in capsys.readouterr().err


@needs_x86
@pytest.mark.parametrize("fp8", [False, True])
def test_a_rotation_that_is_wrong_is_found(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On emulated threads; then with keys, values or queries that go elsewhere or are another's."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(cuda_launch, "launch", lambda launch, device: run(launch))
    gpu_kernels.check_rotation(cpu, torch.bfloat16, fp8=fp8)
    launch_of = cuda.rotate_and_write_kv_launch
    for index, planted in enumerate(
        [
            lambda each: each * 1.2,  # query
            lambda each: each * 1.2,  # key
            lambda each: each * 1.2,  # value
            lambda each: each * 0.7,  # cosine
            lambda each: -each,  # sine
            lambda each: each.flip(0),  # slots
        ]
    ):
        kept: list[torch.Tensor] = []

        def wrong(*given: Any, index: int = index, planted: Any = planted, kept: Any = kept) -> Any:
            kept += [planted(each) if i == index else each for i, each in enumerate(given)]
            return launch_of(*kept)

        monkeypatch.setattr(cuda, "rotate_and_write_kv_launch", wrong)
        with pytest.raises(PensieveError, match="rotate_and_write_kv"):
            gpu_kernels.check_rotation(cpu, torch.bfloat16, fp8=fp8)


def test_the_smallest_program_reads_and_writes_elements_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is what compute-sanitizer looks at."""
    seen: set[tuple[str, torch.dtype]] = set()

    def noting(name: str, function: Any, pages: int) -> Any:
        def noted(*given: Any) -> Any:
            seen.add((name, given[pages].dtype))
            return function(*given)

        return noted

    read = multi_token_attention
    monkeypatch.setattr(gpu_pages, "multi_token_attention", noting("read", read, 1))
    monkeypatch.setattr(gpu_kernels, "write_kv", noting("write", write_kv, 3))
    monkeypatch.setattr("sys.argv", ["gpu_smallest", "cpu"])
    assert gpu_smallest.main() == 0
    assert seen == {
        (name, dtype) for name in ("read", "write") for dtype in (torch.bfloat16, FP8.element)
    }


def test_a_kernel_that_nobody_needs_hides_none_behind_it_where_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the fused ones before those for fp8; here pages that are copied, as if nobody needed that."""
    monkeypatch.setattr(gpu_kernels, "OPTIONAL", ("copy", "fp8"))
    monkeypatch.setattr(gpu_kernels, "copy_pages", lambda *given: None)
    assert not succeeded("kernels", tmp_path, "cpu", 60, True)
    figures = figures_of(tmp_path)
    assert [each["kind"] for each in figures] == ["narrow", "wide", "write", "copy", "fp8"]
    assert [bool(each.get("failed")) for each in figures] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([("fused", True), ("fp8", False)], ["fused"]),
        ([("fused", True), ("fp8", True)], ["fused", "fp8"]),
        # Its process was ended.
        ([("fused", True), (None, True)], ["fused", "fp8"]),
        ([(None, True)], ["fused"]),
    ],
)
def test_all_kernels_that_were_found_wrong_are_named(
    answers: list[tuple[str | None, bool]], wrong: list[str]
) -> None:
    right = [(kind, False) for kind in KERNELS if kind not in ("fused", "fp8")]
    found = [
        {"section": "kernels", "line": "…", "kind": kind, "failed": failed}
        for kind, failed in [*right, *answers]
    ]
    assert found_wrong(found) == wrong
    assert after(1, found) == After()
    told = decisions(1, found)
    assert [kind for kind in KERNELS if KERNELS[kind] in told] == wrong
    assert "the kernels agree with the reference: go on" not in told
