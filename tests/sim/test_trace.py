"""The arrivals in a trace, and errors for lines that cannot be read."""

from __future__ import annotations

import json
import statistics
from collections import Counter

import pytest

from pensieve.sim.trace import Arrival, Problems, from_zero, read
from pensieve.sim.workload import WORKLOAD_PRESETS, drawn


def arrivals(*lines: object) -> list[Arrival]:
    problems = Problems()
    found = list(read((json.dumps(line) for line in lines), problems))
    assert not problems.count, problems.lines
    return found


def request(at: int, num_inputs: int, ids: list[int], num_outputs: int = 10) -> dict[str, object]:
    return {
        "timestamp": at,
        "input_length": num_inputs,
        "output_length": num_outputs,
        "hash_ids": ids,
    }


def test_a_request_continues_the_latest_conversation_with_the_same_first_blocks() -> None:
    first, other, second, third = arrivals(
        request(0, 1100, [0, 1, 2]),
        request(500, 1100, [0, 7, 8]),
        request(1000, 1300, [0, 1, 9]),  # the last block of the first request was partial
        request(2000, 2000, [0, 1, 9, 10]),
    )
    assert (first.conversation, other.conversation) == ("r0", "r1")
    assert first.history_tokens is None
    assert (second.conversation, second.history_tokens, second.input_tokens) == ("r0", 1110, 190)
    assert second.at == 1.0
    assert (third.conversation, third.history_tokens, third.input_tokens) == ("r0", 1310, 690)


def test_a_shared_first_block_alone_links_no_conversations() -> None:
    found = arrivals(request(0, 400, [0]), request(1, 900, [0, 3]), request(2, 900, [0, 4]))
    assert [arrival.conversation for arrival in found] == ["r0", "r1", "r2"]
    assert all(arrival.history_tokens is None for arrival in found)


def test_a_second_continuation_is_a_fork_and_a_shorter_one_a_cut() -> None:
    _, second, fork, cut = arrivals(
        request(0, 1100, [0, 1, 2], 400),
        request(1, 1600, [0, 1, 5, 6]),
        request(2, 1700, [0, 1, 3, 4]),
        request(3, 1650, [0, 1, 5, 9]),
    )
    assert second.conversation == "r0"
    assert (fork.conversation, fork.fork_of, fork.history_tokens) == ("r2", "r0", 1500)
    assert cut.conversation == "r0"
    assert cut.history_tokens == 1610

    _, shorter = arrivals(request(0, 1500, [0, 1, 2], 400), request(1, 1400, [0, 1, 2]))
    assert shorter.history_tokens == 1399, "a turn brings at least one token"
    assert shorter.input_tokens == 1


def test_lines_that_name_their_conversation_are_read() -> None:
    first, second = arrivals(
        {"conversation": "a", "at": 2, "input_tokens": 5, "output_tokens": 7},
        {"conversation": "a", "after": 3.5, "input_tokens": 1, "output_tokens": 1},
    )
    assert first == Arrival("a", 2.0, 5, 7)
    assert (second.at, second.after) == (None, 3.5)


def test_invalid_lines_are_counted_and_reported() -> None:
    good = json.dumps({"conversation": "a", "at": 0, "input_tokens": 5, "output_tokens": 7})
    lines = [
        good,
        "{",
        "[]",
        "",
        '{"conversation": "a", "at": 0, "input_tokens": 5}',
        '{"conversation": "a", "at": 0, "input_tokens": 0, "output_tokens": 7}',
        '{"conversation": "a", "at": NaN, "input_tokens": 1, "output_tokens": 7}',
        '{"timestamp": 1, "input_length": 3, "output_length": true, "hash_ids": []}',
        good,
    ]
    problems = Problems()
    assert len(list(read(lines, problems))) == 2
    assert problems.count == 6
    assert [line for line, _ in problems.lines] == [2, 3, 5, 6, 7, 8]
    assert "output_tokens is missing" in problems.lines[2][1]
    assert "at least 1, not 0" in problems.lines[3][1]


def test_generated_conversations_have_the_published_lengths() -> None:
    found = list(drawn(WORKLOAD_PRESETS["sharegpt"], 2.0, 3000.0, seed=1))
    first = [arrival for arrival in found if arrival.at is not None]
    assert len(first) == pytest.approx(6000, rel=0.05)
    assert len(found) / len(first) == pytest.approx(5.56, rel=0.05)
    assert statistics.mean(v.input_tokens for v in found) == pytest.approx(37.8, rel=0.05)
    assert statistics.mean(v.output_tokens for v in found) == pytest.approx(204.6, rel=0.05)
    assert [v.at for v in first] == sorted(v.at for v in first if v.at is not None)
    assert found == list(drawn(WORKLOAD_PRESETS["sharegpt"], 2.0, 3000.0, seed=1))
    assert max(v.after for v in found) > 120


def test_conversations_of_the_assistant_workload_return_as_often_as_published() -> None:
    found = list(drawn(WORKLOAD_PRESETS["assistant"], 2.0, 6000.0, seed=1))
    turns = Counter(arrival.conversation for arrival in found)
    num = [sum(count >= least for count in turns.values()) for least in (1, 2, 3)]
    assert len(found) / len(turns) == pytest.approx(
        WORKLOAD_PRESETS["assistant"].turns_mean, rel=0.05
    )
    assert num[1] / num[0] == pytest.approx(0.25, rel=0.05)
    assert num[2] / num[1] == pytest.approx(0.39, rel=0.05)
    gaps = sorted(arrival.after for arrival in found if arrival.at is None)
    assert statistics.median(gaps) == pytest.approx(126, rel=0.05)
    assert gaps[int(0.9 * len(gaps))] == pytest.approx(480, rel=0.1)
    first = [arrival.input_tokens for arrival in found if arrival.at is not None]
    later = [arrival.input_tokens for arrival in found if arrival.at is None]
    assert statistics.median(first) == pytest.approx(7000, rel=0.05)
    assert statistics.mean(later) == pytest.approx(1650, rel=0.1)


def test_a_problem_is_located_by_file_and_line() -> None:
    problems = Problems()
    assert problems.location(3) == "line 3"
    problems.files = [(0, "a.jsonl")]
    assert problems.location(3) == "line 3"
    problems.files = [(0, "a.jsonl"), (5, "b.jsonl"), (9, "an empty one"), (9, "c.jsonl")]
    assert problems.location(5) == "line 5 of a.jsonl"
    assert problems.location(9) == "line 4 of b.jsonl"
    assert problems.location(10) == "line 1 of c.jsonl"


def test_arrival_times_start_at_the_first_message() -> None:
    arrivals = [
        Arrival("a", 1800.5, 1, 1),
        Arrival("b", 1802.0, 1, 1),
        Arrival("a", None, 1, 1, 3.0),
    ]
    assert [arrival.at for arrival in from_zero(arrivals)] == [0.0, 1.5, None]
    early = [Arrival("a", 5.0, 1, 1), Arrival("b", 4.0, 1, 1)]
    assert [arrival.at for arrival in from_zero(early)] == [0.0, 0.0]
