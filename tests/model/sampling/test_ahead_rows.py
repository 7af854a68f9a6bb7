"""A row whose newest token exists only on the device is sampled like any other row."""

from __future__ import annotations

import pytest
import torch

from pensieve.model.sampling.penalties import Row
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from tests.model.sampling.world import make_logits, make_turn, make_turns


def test_a_row_ahead_is_sampled_as_if_its_log_were_complete() -> None:
    """The penalty counts exist already, or are made by this call. The newest id is only on the device."""
    logits = make_logits(len(make_turns()), 300, seed=2)
    sampler = Sampler(300, frozenset({2, 9}))
    complete = make_turns()
    expected = sampler.sample(logits, complete)
    for remembers in (False, True):
        short = make_turns()
        if remembers:
            for turn in short:
                turn.tokens, tokens = turn.tokens[:-2], turn.tokens
                sampler.sample(logits[:1], [turn])
                turn.tokens = tokens
        newest = torch.tensor([turn.tokens.pop() for turn in short])
        rows = [Row(turn, len(turn.tokens) + 1) for turn in short]
        assert all(row.is_ahead for row in rows)
        assert sampler.draw(logits, rows, newest).read() == expected
        # The sampler must not remember the newest ids, because the log may still get other tokens.
        for turn, whole in zip(short, make_turns(), strict=True):
            turn.tokens.append(whole.tokens[-1])
        assert sampler.sample(logits, short) == expected


def test_rows_ahead_and_others_share_a_batch() -> None:
    logits = make_logits(len(make_turns()), 300, seed=2)
    sampler = Sampler(300, frozenset({2, 9}))
    expected = sampler.sample(logits, make_turns())
    turns = make_turns()
    newest = torch.tensor([turn.tokens[-1] for turn in turns])
    rows = [Row(turn, len(turn.tokens)) for turn in turns]
    for turn in turns[::3]:
        turn.tokens.pop()
    assert sampler.draw(logits, rows, newest).read() == expected


def test_a_row_ahead_without_newest_ids_is_an_error() -> None:
    turn = make_turn(Sampling(presence_penalty=1.0))
    with pytest.raises(AssertionError, match="newest_ids are missing"):
        Sampler(5).draw(torch.zeros(1, 5), [Row(turn, len(turn.tokens) + 1)])
