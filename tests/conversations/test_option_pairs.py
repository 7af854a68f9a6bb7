"""Every pair of values of the engine's settings starts and gives right replies.

A few starts cover every pair (a covering array), though not every triple. So any two incompatible settings
are found. Each start runs two conversations of two turns at once, and moves one of them to the host in
between. Replies are compared with plain transformers: exactly, or within the rounding of the type, the
weights and the KV. A token computed from a wrong position is much further off.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pensieve.core.policies.registry import POLICIES
from pensieve.engine.messages import CheckIntegrity, EvictConversation
from pensieve.sampling import Sampling
from tests.conversations.rig import Reference, finish, query, started, step, write_model
from tests.scale import SCALE
from tests.text.families import QWEN_2_5

Row = Mapping[str, str]
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "device_cache": ("192t", "960t"),
    "host_cache": ("0t", "160t", "960t"),
    "check_kv": ("false", "true"),
    "policy": tuple(POLICIES),
    "chunk_tokens": ("8", "16", "32"),
    "context_max": ("256", "128"),
    "token_budget": ("7", "48", "512"),
    "turns_max": ("1", "12"),
    "share": ("0", "5"),
    "dtype": ("float32", "bfloat16"),
    "weights": ("native", "int8"),
    "kv_dtype": ("auto", "int8"),
    "threads": ("1", "2"),
    "journal": ("no", "yes"),
}
GAPS_MAX = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 0.1}  # a random token has 0.6 or more
REPLY = Sampling(max_tokens=12, ignore_eos=True)
TEXTS = {"a": ("Oslo rain fine", "and today"), "b": ("weather", "Grüße 日本 today 7")}


def covering_array(options: Mapping[str, Sequence[str]], seed: int) -> list[Row]:
    """Return rows that contain every pair of values. Each row has the most new pairs of 200 random rows."""
    choose = random.Random(seed)
    missing = {
        frozenset(((one, value), (other, another)))
        for one, other in itertools.combinations(options, 2)
        for value in options[one]
        for another in options[other]
    }
    rows: list[Row] = []
    while missing:
        wanted = choose.choice(sorted(missing, key=sorted))
        candidates = [
            {name: choose.choice(values) for name, values in options.items()} | dict(wanted)
            for _ in range(200)
        ]
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append(best)
    return rows


def pairs_of(row: Row) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


ROWS = [row for seed in range(SCALE) for row in covering_array(OPTIONS, seed)]


class RunResult(NamedTuple):
    logs: dict[str, list[int]]
    outputs: dict[str, list[int]]  # conversation -> positions of sampled tokens


def run_with(folder: Path, data: Path, settings: Row) -> RunResult:
    written = {name: value for name, value in settings.items() if name != "journal"}
    if settings.get("journal") == "yes":
        written["journal"] = str(data.with_suffix(".journal"))
    with started(folder, data, **written) as runtime:
        for name in TEXTS:
            runtime.conversations.create(name)
        for turn in range(2):
            texts = [(name, said[turn]) for name, said in TEXTS.items()]
            finish(runtime, [runtime.conversations.send(*each, sampling=REPLY) for each in texts])
            runtime.mailbox.put(EvictConversation("a", True, 1))
            while step(runtime):
                pass
        assert query(runtime, CheckIntegrity(2)).problems == ()
        assert runtime.store.verify() == []
        logs, outputs = {}, {}
        for name in TEXTS:
            logs[name] = list(runtime.store.log(name))
            messages = runtime.store.messages(name, include_token_ids=True)
            assert len(messages) == 4
            outputs[name] = [
                position
                for message in messages
                if message.finish_reason
                for position in range(
                    message.first_token_index, message.first_token_index + message.num_tokens
                )
            ]
        return RunResult(logs, outputs)


@torch.inference_mode()
def largest_gap(reference: Reference, result: RunResult) -> float:
    """Return the largest error: largest logit minus sampled token's logit, divided by the logits' range."""
    gaps = []
    for name, log in result.logs.items():
        logits = reference.model(input_ids=torch.tensor([log]), use_cache=False).logits[0]
        for position in result.outputs[name]:
            row = logits[position - 1]
            gaps.append(float((row.max() - row[log[position]]) / (row.max() - row.min())))
    return max(gaps)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("pairs") / "model", QWEN_2_5, "mistral"
    )  # this model has two KV heads


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def test_the_covering_array_contains_every_pair() -> None:
    rows = covering_array(OPTIONS, 0)
    covered = set().union(*(pairs_of(row) for row in rows))
    for one, other in itertools.combinations(OPTIONS, 2):
        for value in OPTIONS[one]:
            for another in OPTIONS[other]:
                assert frozenset(((one, value), (other, another))) in covered
    assert len(rows) < 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_every_pair_of_settings_gives_right_replies(
    row: Row, model: Path, reference: Reference, tmp_path: Path
) -> None:
    rounded = "int8" in (row["weights"], row["kv_dtype"])
    gap_max = GAPS_MAX["int8" if rounded else row["dtype"]]
    assert largest_gap(reference, run_with(model, tmp_path / "data", row)) <= gap_max


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(3 if SCALE > 1 else 1))
def test_two_ranks_give_right_replies_with_every_other_setting(
    number: int, model: Path, reference: Reference, tmp_path: Path
) -> None:
    """In nightly runs, three starts cover each value of the other options. Rounded weights need one rank."""
    row = {name: values[number % len(values)] for name, values in OPTIONS.items()}
    row |= {"weights": "native", "tensor_parallel": "2", "turns_max": "12"}
    result = run_with(model, tmp_path / "data", row)
    gap_max = GAPS_MAX["int8" if row["kv_dtype"] == "int8" else row["dtype"]]
    assert largest_gap(reference, result) <= gap_max


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(3 if SCALE > 1 else 1))
def test_two_stages_give_right_replies_with_every_other_setting(
    number: int, model: Path, reference: Reference, tmp_path: Path
) -> None:
    row = {name: values[number % len(values)] for name, values in OPTIONS.items()}
    row |= {"pipeline_stages": "2", "turns_max": "12"}
    result = run_with(model, tmp_path / "data", row)
    rounded = "int8" in (row["weights"], row["kv_dtype"])
    assert largest_gap(reference, result) <= GAPS_MAX["int8" if rounded else row["dtype"]]
