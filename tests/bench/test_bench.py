"""Benches run small, check what they time, and print what scripts read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from pensieve.bench import attention as bench_attention
from pensieve.bench import chat as bench_chat
from pensieve.bench import gpu as bench_gpu
from pensieve.bench import gpu_conversations, workload
from pensieve.bench import gpu_load as bench_load
from pensieve.bench import random_model as random_model_of
from pensieve.bench import step as bench_step
from pensieve.bench import swap as bench_swap
from pensieve.bench.gpu_pages import Paged
from pensieve.bench.random_model import RandomShape
from pensieve.cli.main import main
from pensieve.core.iteration import Slice
from pensieve.core.turn import Turn
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.kernels import cpu_library
from pensieve.model.loader import load
from pensieve.text.tokenizer import Tokenizer

KEYS = {
    *("batch", "queries", "context", "heads", "kv_heads", "head_size", "dtype", "seconds", "ratio"),
    *("contiguous_seconds", "copy_out_seconds", "token_by_token_seconds"),
}


def test_attention_prints_a_row_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--context", "40,96", "--batch", "2", "--repeats", "2", "--dtype", "float32", "--json"]
    assert main(["bench", "attention", *small]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["rows"]) == 2 * 2 * 2
    for row in told["rows"]:
        assert set(row) >= KEYS
        assert row["ratio"] == pytest.approx(row["seconds"] / row["contiguous_seconds"])
    assert set(told["ratios"]) == {
        "float32 16/16, context below 512",
        "float32 16/4, context below 512",
    }


def test_attention_times_nothing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: bench_attention.Inputs) -> torch.Tensor:
        return self.out.fill_(0.5)

    monkeypatch.setattr(bench_attention.Inputs, "here", wrong)
    shape = bench_attention.Shape(2, 8, 64, 4, 2, 32, "float32")
    with pytest.raises(PensieveError, match="here is off by"):
        bench_attention.measure(shape, 1, 1e9)


def test_all_contenders_of_a_shape_agree() -> None:
    one = bench_attention.Inputs(bench_attention.Shape(3, 5, 70, 8, 2, 32, "float32"), 0)
    right = one.right()
    answers = {"here": one.here().clone(), "one": one.token_by_token().clone()}
    answers |= {name: run().reshape(right.shape) for name, run in one.contiguous().items()}
    assert len(answers) == 6
    for name, answer in answers.items():
        assert float((answer - right).abs().max()) < 1e-5, name


def test_queries_longer_than_the_context_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--context", "4", "--queries", "8"]) == 2
    assert "at least as long" in capsys.readouterr().err


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random-model")
    random_model_of.make(folder, RandomShape(2, 64, 2, 1, 128, 8000), context=1024)
    return folder


def test_replies_of_a_random_model_survive_being_read_again(random_model: Path) -> None:
    tokenizer = Tokenizer.load(random_model)
    model = load(random_model)
    assert model.flat.whole is not None or cpu_library.compiled_library() is None
    draw = random.Random(3)
    text = "".join(draw.choices(random_model_of.words()[:1000], k=50)).strip()
    ids = tokenizer.encode(text).ids
    bench = bench_step.Bench(model, tokenizer, 1, 200)
    with torch.inference_mode():
        turn = bench.turn(0, ids)
        bench.prefill([turn])
        for _ in range(60):
            bench.decode([turn])
    bench.close()
    said = list(turn.tokens[len(ids) :])
    whole = tokenizer.decode(list(turn.tokens))
    assert tokenizer.encode(whole).ids == list(turn.tokens)
    assert len(said) == 61
    for strange in ("Grüße, 你好!\n\n  x", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(strange).ids) == strange


def test_a_vocabulary_that_is_impossible_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is at least"):
        random_model_of.make(tmp_path, RandomShape(1, 8, 1, 1, 8, 300))
    with pytest.raises(InvalidArgument, match="there are no more words"):
        random_model_of.make(tmp_path, RandomShape(1, 8, 1, 1, 8, 2_000_000))


def test_step_prints_a_row_for_each_batch(
    random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--batch", "1,3", "--context", "20", "--prompt", "30", "--repeats", "2", "--json"]
    assert main(["bench", "step", str(random_model), "--weights", "int8", *small]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["kind"], row["batch"]) for row in told["rows"]] == [
        *(("decode", 1), ("mixed", 1), ("decode", 3), ("mixed", 3))
    ]
    for row in told["rows"]:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_seconds"])
    assert 0 < told["accuracy"]["kl_divergence"] < 1
    assert 0.5 < told["accuracy"]["same_token_share"] <= 1


def test_step_times_nothing_that_depends_on_company(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = bench_step.Bench.decode

    def wrong(self: bench_step.Bench, turns: list[Turn], *others: Slice) -> float:
        took = decode(self, turns, *others)
        if len(turns) > 1:
            turns[0].tokens[-1] ^= 1
        return took

    monkeypatch.setattr(bench_step.Bench, "decode", wrong)
    model, tokenizer = load(random_model), Tokenizer.load(random_model)
    rows = bench_step.measure(model, tokenizer, batches=(2,), context=9, prompt_tokens=8, repeats=1)
    with pytest.raises(PensieveError, match="turn 0 gets another reply when it is alone"):
        next(iter(rows))


def test_the_floor_counts_what_is_read(random_model: Path) -> None:
    shape = RandomShape(2, 64, 2, 1, 128, 8000)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128  # and norms
    right = 2 * (2 * layer + 64 + 8000 * 64)
    assert (
        load(random_model).shape.weight_bytes == right + 2 * 4 * 64 + 2 * 8000 * 64
    )  # the table, too
    read = bench_step.weight_bytes_read(load(random_model))
    assert right <= read <= right * 1.02, shape  # panels are filled up


def test_chat_replays_conversations_with_a_daemon(
    random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--conversations", "3", "--turns", "3", "--input-tokens", "40", "--output-tokens", "9"]
    assert (
        main(
            [
                *("bench", "chat", str(random_model), "--shape", "pressure", *small),
                *("--think", "0.05", "--rate", "50", "--seed", "7", "--json"),
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["turns"] == 9
    assert told["shape"]["conversations"] == 3
    assert told["tokens"]["new"] >= 9 * 40
    reused = told["tokens"]["device"] + told["tokens"]["host"]
    assert reused >= 0.99 * 3 * (60 + 120)  # after the first and the second turn
    assert told["reused_share"] >= 0.99
    assert told["output_tokens_per_second"] == pytest.approx(81 / told["seconds"])


def test_chat_scripts_are_the_same_for_a_seed_and_others_for_another() -> None:
    shape = workload.Shape(4, 3, 20, 5, rate=10.0, think_seconds=1.0)
    first, again, other = (workload.scripts_of(shape, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [len(script.turns) for script in first] == [3] * 4
    assert all(len(message.text.split()) == 20 for script in first for message in script.turns)
    assert all(script.turns[0].think_seconds == 0 for script in first)
    assert sorted(script.arrives_at for script in first) == [s.arrives_at for s in first]


def test_swap_compares_where_a_history_is(
    random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--history", "150", "--message", "10", "--repeats", "2", "--json"]
    assert main(["bench", "swap", str(random_model), *small]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["direction"] for row in told["copies"]] == ["swap-in", "swap-out"]
    assert [row["place"] for row in told["turns"]] == ["device", "host", "dropped"]
    assert told["turns"][0]["ratio"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--batch", "0"], "at least 1"),
        (["step", "--shape", "7T"], "is one of 0.03B, 0.37B, 1.1B"),
        (["chat", "--turns", "0"], "at least 1"),
        (["chat", "--think", "-1"], "not negative"),
        (["swap", "--history", "0"], "at least 1"),
        (["step", "./nowhere"], "no model folder"),
    ],
)
def test_impossible_wishes_are_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    turns = [bench_chat.Turn(number, 0.1, 1.0, [0.1, 0.2], 3) for number in (0, 1)]
    bench_chat.plot(turns, tmp_path / "chat.png")
    row = bench_step.Row("decode", 1, 8, 0, 0.02, 0.02, 0.01, 2.0, 50.0)
    bench_step.plot([row], tmp_path / "step.png")
    bench_swap.plot([bench_swap.TurnRow("host", 9, 9, 0.1, 0.1, 1.0)], tmp_path / "swap.png")
    for path in tmp_path.glob("*.png"):
        assert path.stat().st_size > 1000


def test_every_section_of_the_gpu_bench_runs_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU it checks and measures the same things, on other kernels."""
    out = tmp_path / "figures.jsonl"
    sections = "device,kernels,attention,decode,prefill,swap,hidden,exactness,load"
    small = ["--small", "--device", "cpu", "--out", str(out), "--sections", sections]
    assert bench_gpu.main(small) == 0, capsys.readouterr()
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert {each["section"] for each in told} == set(sections.split(","))
    assert all("failed" not in each for each in told)
    ratios = {each["kind"]: each["ratio"] for each in told if "ratio" in each and "kind" in each}
    assert set(ratios) == {"stateless", "device only", "two tiers", "two, LRU"}
    assert ratios["stateless"] == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_gpu_says_what_the_references_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels, captured graphs, swaps, and replies under pressure, on the real thing."""
    out = str(tmp_path / "figures.jsonl")
    checks = "device,kernels,attention,decode,prefill,swap,hidden,exactness"
    small = ["--small", "--device", "cuda", "--out", out, "--sections", checks]
    assert bench_gpu.main(small) == 0, capsys.readouterr()


def test_the_gpu_bench_times_nothing_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Paged, "run", lambda self: self.out.fill_(0.5))
    out = tmp_path / "figures.jsonl"
    small = ["--small", "--device", "cpu", "--out", str(out), "--sections", "kernels,decode"]
    assert bench_gpu.main(small) == 1
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["section"] for each in told if each.get("failed")] == ["kernels", "decode"]
    assert not any("seconds" in each for each in told)


def test_throughput_is_compared_at_one_latency() -> None:
    points = [(0.01, 100.0), (0.03, 300.0), (0.02, 220.0)]
    assert bench_load.throughput_at(points, 0.025) == pytest.approx(260.0)
    assert bench_load.throughput_at(points, 0.5) == 300.0
    assert bench_load.throughput_at(points, 0.001) == 100.0


def test_conversations_are_as_long_as_theirs() -> None:
    found = gpu_conversations.talks(5.0, 200.0, 3.0, 1000, 1)
    assert len(found) == pytest.approx(1000, rel=0.15)
    talks = [talk for _, talk in found]
    turns = sum(len(talk.messages) for talk in talks)
    assert turns / len(talks) == pytest.approx(5.56, rel=0.1)
    assert sum(len(each) for t in talks for each in t.messages) / turns == pytest.approx(
        37.8, rel=0.1
    )
    assert sum(sum(talk.outputs) for talk in talks) / turns == pytest.approx(204.6, rel=0.1)
