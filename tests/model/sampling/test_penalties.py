"""Penalties, biases and masks change the scores before anything is drawn."""

from __future__ import annotations

import pytest
import torch

from pensieve.model.sampling.penalties import TurnLog
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from tests.model.sampling.test_cuts import tokens_drawn
from tests.model.sampling.world import make_logits, make_turn, sample_one, token_of


def test_repetition_counts_the_whole_context_and_the_others_only_this_reply() -> None:
    row = [2.0, 1.5, -1.0]
    assert token_of(row, Sampling(repetition_penalty=2.0), context=[0]) == 1
    assert token_of(row, Sampling(presence_penalty=2.0), context=[0]) == 0
    assert token_of(row, Sampling(presence_penalty=2.0), context=[5], reply=[0]) == 1
    assert token_of(row, Sampling(frequency_penalty=0.3), context=[0], reply=[0]) == 0
    assert token_of(row, Sampling(frequency_penalty=0.3), context=[0], reply=[0, 0]) == 1


def test_presence_does_not_grow_with_the_count_and_frequency_does() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, logprobs=0)
    row = torch.tensor([1.0, 0.0])
    sampled = sample_one(row, make_turn(sampling, context=[1], reply=[1, 1, 1]))
    assert sampled.token_id == 0
    expected = torch.tensor([1.0, 0.0 - 0.5 - 3 * 0.25]).log_softmax(-1)[0].item()
    assert sampled.logprob == pytest.approx(expected, abs=1e-6)


def test_penalty_counts_kept_between_tokens_equal_counts_rebuilt_from_the_log() -> None:
    """In a reply of 30 tokens, one turn keeps its counts. The other turn's are rebuilt before each token."""
    sampling = Sampling(
        temperature=1.0,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        seed=2**63 + 1,
        logprobs=3,
        min_tokens=4,
        stop_token_ids=(3,),
        logit_bias=((7, 2.0),),
    )
    sampler = Sampler(20, frozenset({0}))
    remembering = make_turn(sampling, context=[4, 4, 9])
    forgetting = make_turn(sampling, context=[4, 4, 9])
    for step in range(30):
        logits = make_logits(1, 20, seed=step, scale=1.0).expand(2, 20)
        forgetting.penalties = None
        one, other = sampler.sample(logits, [remembering, forgetting])
        assert one == other
        assert one is not None
        if step < 4:
            assert one.token_id not in {0, 3}
        remembering.tokens.append(one.token_id)
        forgetting.tokens.append(one.token_id)
        assert (
            one.token_id
            == sample_one(logits[0], one_token_ago(remembering), frozenset({0})).token_id
        )


def one_token_ago(turn: TurnLog) -> TurnLog:
    """Return the turn before its last token, as if the engine had restarted."""
    return make_turn(
        turn.sampling,
        context=list(turn.tokens[: turn.prompt_end]),
        reply=list(turn.tokens[turn.prompt_end : -1]),
    )


def test_memory_is_kept_between_tokens_and_only_where_it_is_needed() -> None:
    turn = make_turn(Sampling(repetition_penalty=1.5))
    sample_one([1.0] * 5, turn)
    state = turn.penalties
    sample_one([1.0] * 5, turn)
    assert state is not None
    assert turn.penalties is state
    plain = make_turn(Sampling(temperature=1.0, logprobs=3))
    sample_one([1.0] * 5, plain)
    assert plain.penalties is None


def test_a_turn_not_sampled_for_a_while_still_counts_every_token() -> None:
    turn = make_turn(Sampling(frequency_penalty=0.5), context=[2])
    assert sample_one([2.0, 1.6, 0.0], turn).token_id == 0
    turn.tokens.extend([0, 0, 1])
    assert sample_one([2.0, 1.6, 0.0], turn).token_id == 1


def test_logit_bias_forbids_and_forces_and_adds_up() -> None:
    assert token_of([9.0, 1.0, 0.0], Sampling(logit_bias=((0, -100.0),))) == 1
    assert token_of([9.0, 1.0, 0.0], Sampling(logit_bias=((2, 100.0),))) == 2
    assert token_of([9.0, 1.0, 0.0], Sampling(logit_bias=((2, 5.0), (2, 5.0)))) == 2
    assert tokens_drawn([9.0, 1.0, 0.0], Sampling(temperature=1.0, logit_bias=((2, 100.0),))) == {2}


def test_min_tokens_holds_back_every_end_until_enough_tokens_exist() -> None:
    sampling = Sampling(min_tokens=2, stop_token_ids=(1,))
    row = [9.0, 8.0, 1.0]
    eos = frozenset({0})
    assert sample_one(row, make_turn(sampling, reply=[]), eos).token_id == 2
    assert sample_one(row, make_turn(sampling, reply=[2]), eos).token_id == 2
    assert sample_one(row, make_turn(sampling, reply=[2, 2]), eos).token_id == 0


def test_ignore_eos_leaves_the_end_of_turn_id_a_token_like_any_other() -> None:
    sampling = Sampling(min_tokens=2, stop_token_ids=(1,), ignore_eos=True)
    assert sample_one([9.0, 8.0, 1.0], make_turn(sampling), frozenset({0})).token_id == 0
    assert sample_one([7.0, 8.0, 1.0], make_turn(sampling), frozenset({0})).token_id == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_would_leave_no_token_is_not_applied(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, min_tokens=5, stop_token_ids=(0, 1), logprobs=3)
    sampled = sample_one([1.0, 9.0, -20.0], make_turn(sampling), frozenset({2, 77}))
    assert sampled.token_id == 1
    assert len(sampled.top_logprobs) == 3
