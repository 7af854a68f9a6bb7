"""The sampler against plain references: transformers' processors, and arithmetic written out."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pensieve.core.sampling import Sampling
from pensieve.model.sampling import draw as draw_module
from pensieve.model.sampling import sampler as sampler_module
from pensieve.model.sampling.draw import philox4x32, uniform_limbs
from pensieve.model.sampling.penalties import Row, TurnLog
from pensieve.model.sampling.sampler import DrawnToken, Sampler

MANY = 64  # positions at which a random draw is compared


def make_turn(
    sampling: Sampling, context: list[int] | None = None, reply: list[int] | None = None
) -> TurnLog:
    context = [1, 2, 3] if context is None else context
    return TurnLog(sampling, array("I", context + (reply or [])), len(context))


def make_row(sampling: Sampling) -> Row:
    turn = make_turn(sampling)
    return Row(turn, len(turn.tokens))


def make_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sample_one(row: torch.Tensor | list[float], turn: TurnLog, eos: frozenset[int] = frozenset()):
    row = torch.as_tensor(row, dtype=torch.float32)
    (sampled,) = Sampler(row.shape[0], eos).sample(row.unsqueeze(0), [turn])
    assert sampled is not None
    return sampled


def token_of(row: torch.Tensor | list[float], sampling: Sampling, **context: list[int]) -> int:
    return sample_one(row, make_turn(sampling, **context)).token_id


def expected_token(row: torch.Tensor, turn: TurnLog) -> int:
    """transformers' processors in transformers' order, then the inverse of the cumulated sum."""
    sampling = turn.sampling
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    scores = processors(torch.tensor([list(turn.tokens)]), row.unsqueeze(0).clone())
    for token_id in set(turn.tokens[turn.prompt_end :]):
        times = turn.tokens[turn.prompt_end :].count(token_id)
        scores[0, token_id] -= sampling.presence_penalty + times * sampling.frequency_penalty
    for token_id, bias in sampling.logit_bias:
        scores[0, token_id] += bias
    if sampling.temperature == 0:
        return int(scores.argmax())
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    probabilities = warpers(torch.tensor([list(turn.tokens)]), scores.double())[0].softmax(-1)
    high, low = uniform_limbs(sampling.seed, len(turn.tokens))
    uniform = (high * 2**31 + low) / 2**62
    cumulated = 0.0
    by_likelihood = sorted(range(len(row)), key=lambda i: (-scores[0, i].item(), i))
    for token_id in by_likelihood:
        cumulated += probabilities[token_id].item()
        if uniform < cumulated:
            return token_id
    raise AssertionError("the probabilities do not sum to one")


# -- the random number ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> tuple[int, ...]:
        return tuple(int(word, 16) for word in text.split())

    assert philox4x32(words(counter), words(key)) == words(expected)


def test_the_random_number_depends_on_all_bits_of_seed_and_position() -> None:
    points = [
        (0, 0),
        (1, 0),
        (2**32, 0),
        (2**63, 0),
        (0, 1),
        (0, 2),
        (0, 2**32),
        (2**64 - 1, 80_000),
    ]
    assert len({uniform_limbs(seed, position) for seed, position in points}) == len(points)
    assert uniform_limbs(0, 0) == (0x6627E8D5 >> 1, 0xE169C58D >> 1)
    assert all(0 <= limb < 2**31 for point in points for limb in uniform_limbs(*point))


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 1000, 151_936, 2**20])
def test_the_weights_of_a_row_sum_to_less_than_the_scaling_can_bear(vocab_size: int) -> None:
    assert 2**60 <= vocab_size * 2 ** draw_module._weight_bits(vocab_size) < 2**62


def test_scaling_by_the_random_number_is_exact_to_the_last_bit() -> None:
    rng = random.Random(5)
    masses = [0, 1, 2**31 - 1, 2**31, 2**62 - 1] + [rng.randrange(2**62) for _ in range(500)]
    draws = [0, 1, 2**31 - 1, 2**31, 2**62 - 1] + [rng.randrange(2**62) for _ in range(500)]
    draws = draws[::-1]
    scaled = draw_module._scale(
        torch.tensor(masses),
        torch.tensor([draw >> 31 for draw in draws]),
        torch.tensor([draw & 0x7FFFFFFF for draw in draws]),
    )
    assert scaled.tolist() == [mass * draw >> 62 for mass, draw in zip(masses, draws, strict=True)]


# -- against transformers ---------------------------------------------------------------------------

OPTIONS = {
    "temperature only": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.3),
    "hot": Sampling(temperature=4.0),
    "top_k": Sampling(temperature=1.0, top_k=7),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "top_k before top_p": Sampling(temperature=1.0, top_k=5, top_p=0.6),
    "min_p": Sampling(temperature=1.5, min_p=0.1),
    "all cuts": Sampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.02),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.7),
    "repetition below one": Sampling(temperature=1.0, repetition_penalty=0.6),
    "greedy repetition": Sampling(repetition_penalty=2.5),
    "presence": Sampling(temperature=1.0, presence_penalty=2.0),
    "frequency": Sampling(temperature=1.0, frequency_penalty=1.3),
    "negative frequency": Sampling(temperature=0.8, frequency_penalty=-0.7),
    "bias": Sampling(temperature=1.0, logit_bias=((3, 5.0), (4, -100.0))),
    "everything": Sampling(
        temperature=0.9,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias=((3, 4.0), (9, -3.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_draws_what_transformers_probabilities_say(name: str) -> None:
    """60 turns share a batch; each token equals the one drawn from the processors' distribution."""
    logits = make_logits(MANY, 120, seed=len(name))
    rng = random.Random(name)
    turns = [
        make_turn(
            replace(OPTIONS[name], seed=rng.randrange(2**64)),
            context=rng.choices(range(120), k=rng.randrange(1, 200)),
            reply=rng.choices(range(20), k=rng.randrange(30)),
        )
        for _ in range(MANY)
    ]
    sampled = Sampler(120).sample(logits, turns)
    assert [each and each.token_id for each in sampled] == [
        expected_token(row, turn) for row, turn in zip(logits, turns, strict=True)
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=8.0),
        Sampling(temperature=2.0, top_p=0.97),
        Sampling(temperature=5.0, top_p=0.999),
        Sampling(temperature=3.0, min_p=0.001),
        Sampling(temperature=5.0, min_p=0.16),
        Sampling(temperature=5.0, top_k=300),
        Sampling(temperature=5.0, top_k=300, top_p=0.99),
        Sampling(temperature=5.0, top_k=256),
        Sampling(temperature=5.0, top_k=999, top_p=0.9999),
    ],
)
def test_a_token_beyond_the_256_likeliest_is_drawn_like_any_other(sampling: Sampling) -> None:
    logits = make_logits(24, 1000, seed=4)
    turns = [make_turn(replace(sampling, seed=9), context=[0] * (n + 1)) for n in range(24)]
    sampled = Sampler(1000).sample(logits, turns)
    assert [each and each.token_id for each in sampled] == [
        expected_token(row, turn) for row, turn in zip(logits, turns, strict=True)
    ]


def test_how_many_tokens_are_looked_at_first_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits rounded to bfloat16 tie everywhere, also at the edge of every head."""
    logits = make_logits(16, 600, seed=8).bfloat16()
    turns = [
        make_turn(replace(sampling, seed=n, logprobs=5), context=[5] * 20)
        for n, sampling in enumerate(OPTIONS.values())
    ]
    wide = Sampler(600).sample(logits, turns)
    for widths in ((1,), (2, 3), (7, 50), ()):
        monkeypatch.setattr(draw_module, "HEAD_WIDTHS", widths)
        assert Sampler(600).sample(logits, turns) == wide, widths


def test_the_first_look_decides_wherever_the_tokens_kept_end_within_it() -> None:
    values = make_logits(4, 5000, seed=1)
    values[:, 7] = 20.0
    decided = [
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, min_p=0.01),
        Sampling(temperature=9.0, top_k=20),
        Sampling(temperature=1.0),
    ]
    token_ids = draw_module._draw_from_head(values, [make_row(each) for each in decided], 256)
    assert bool((token_ids >= 0).all())
    undecided = [
        Sampling(temperature=9.0, top_p=0.9),
        Sampling(temperature=99.0, min_p=0.01),
        Sampling(temperature=9.0, top_k=257),
        Sampling(temperature=99.0, top_p=0.999999),
    ]
    rows = [make_row(each) for each in undecided]
    assert draw_module._draw_from_head(values, rows, 256).tolist() == [-1] * 4


@pytest.mark.parametrize(
    ("limbs", "expected"),
    [
        ((0, 0), [0, 0]),
        ((2**30 - 1, 2**31 - 1), [0, 31]),
        ((2**30, 0), [1, 31]),
        ((2**31 - 1, 2**31 - 1), [1, 62]),
    ],
)
def test_the_ends_and_the_middle_of_the_random_number_choose_exactly(
    monkeypatch: pytest.MonkeyPatch, limbs: tuple[int, int], expected: list[int]
) -> None:
    """Of 2 equal tokens and of 63 almost equal ones, whose weights come close to overflow."""
    monkeypatch.setattr(draw_module, "uniform_limbs", lambda seed, position: limbs)
    assert token_of([0.0] * 2, Sampling(temperature=1.0)) == expected[0]
    assert token_of([0.0] * 62 + [-0.01], Sampling(temperature=1.0)) == expected[1]


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 4000 draws of 8 tokens at 7 degrees of freedom: 24.3 has probability 0.001."""
    row = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    num_draws = 4000
    turns = [
        make_turn(Sampling(temperature=1.3, seed=17), context=[0] * (1 + n % 200), reply=[])
        for n in range(num_draws)
    ]
    for n, turn in enumerate(turns):
        turn.sampling = replace(turn.sampling, seed=n // 200)
    sampled = Sampler(8).sample(row.expand(num_draws, 8), turns)
    counts = [0] * 8
    for each in sampled:
        assert each is not None
        counts[each.token_id] += 1
    expected = ((row / 1.3).double().softmax(-1) * num_draws).tolist()
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert chi_square < 24.3, (chi_square, counts)


# -- what a cut keeps -------------------------------------------------------------------------------


def tokens_drawn(row: list[float], sampling: Sampling, num_draws: int = 200) -> set[int]:
    turns = [make_turn(sampling, context=[0] * (n + 1)) for n in range(num_draws)]
    sampled = Sampler(len(row)).sample(torch.tensor(row).expand(num_draws, len(row)), turns)
    return {each.token_id for each in sampled if each is not None}


def test_a_tiny_top_p_keeps_one_token() -> None:
    assert tokens_drawn([1.0, 1.1, 0.9], Sampling(temperature=1.0, top_p=1e-9)) == {1}
    assert tokens_drawn([0.0] * 5, Sampling(temperature=1.0, top_p=1e-300)) == {0}


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    row = [math.log(0.5), math.log(0.3), math.log(0.2)]
    assert tokens_drawn(row, Sampling(temperature=1.0, top_p=0.49)) == {0}
    assert tokens_drawn(row, Sampling(temperature=1.0, top_p=0.51)) == {0, 1}
    assert tokens_drawn(row, Sampling(temperature=1.0, top_p=0.81)) == {0, 1, 2}


def test_top_k_larger_than_the_vocabulary_keeps_everything() -> None:
    row = [0.1, 0.2, 0.3, 0.0]
    assert tokens_drawn(row, Sampling(temperature=1.0, top_k=2**31 - 1)) == {0, 1, 2, 3}
    assert tokens_drawn(row, Sampling(temperature=1.0, top_k=4)) == {0, 1, 2, 3}


def test_of_equal_tokens_top_k_keeps_those_of_lowest_id() -> None:
    assert tokens_drawn([0.0] * 9, Sampling(temperature=1.0, top_k=2)) == {0, 1}
    assert tokens_drawn([0.0, 1.0, 1.0, 1.0, 0.0], Sampling(temperature=1.0, top_k=2)) == {1, 2}


def test_minus_zero_ties_with_zero() -> None:
    assert tokens_drawn([-0.0, 0.0, -0.0], Sampling(temperature=1.0, top_k=1)) == {0}
    assert token_of([-1.0, -0.0, 0.0], Sampling(logprobs=1)) == 1


def test_min_p_one_keeps_the_likeliest_and_its_equals() -> None:
    assert tokens_drawn([1.0, 2.0, 2.0, 1.999], Sampling(temperature=1.0, min_p=1.0)) == {1, 2}


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    row = [0.0, math.log(0.5), math.log(0.25), math.log(0.24)]
    assert tokens_drawn(row, Sampling(temperature=1.0, min_p=0.245)) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-30, 1e-9])
def test_a_tiny_temperature_is_greedy_and_overflows_nowhere(temperature: float) -> None:
    row = [3e38, -3e38, 3.1e38, 0.0]
    assert tokens_drawn(row, Sampling(temperature=temperature), num_draws=20) == {2}
    assert tokens_drawn([5.0, 5.0, 4.0], Sampling(temperature=temperature)) == {0, 1}


def test_a_subnormal_temperature_survives_a_process_that_flushes_subnormal_numbers() -> None:
    torch.set_flush_denormal(True)
    try:
        assert token_of([5.0, 5.5, 4.0], Sampling(temperature=1e-310, logprobs=1)) == 1
    finally:
        torch.set_flush_denormal(False)


def test_greedy_takes_the_lowest_id_of_equals_on_both_paths() -> None:
    row = torch.zeros(5000)
    row[[4999, 77, 2048]] = 1.0
    assert token_of(row, Sampling()) == 77
    assert token_of(row, Sampling(logprobs=2)) == 77
    assert token_of(row, Sampling(logit_bias=((0, -1.0),))) == 77


# -- penalties, bias, masks -------------------------------------------------------------------------


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


def test_memory_that_follows_the_log_equals_memory_rebuilt_from_it() -> None:
    """30 tokens of a reply, one turn remembering, one forgetting before each: as after a restart."""
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
    """The same turn before its last token, as if the engine had restarted."""
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


# -- logprobs ---------------------------------------------------------------------------------------


def test_logprobs_are_before_temperature_and_cuts_and_after_penalties() -> None:
    row = make_logits(1, 300, seed=3)[0]
    sampling = Sampling(
        temperature=0.1, top_k=1, repetition_penalty=1.8, logit_bias=((11, 1.5),), logprobs=4
    )
    turn = make_turn(sampling, context=list(range(0, 300, 3)))
    sampled = sample_one(row, turn)
    scores = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([list(turn.tokens)]), row[None])[0]
    scores[11] += 1.5
    expected = scores.double().log_softmax(-1)
    top = expected.topk(4)
    assert [each.token_id for each in sampled.top_logprobs] == top.indices.tolist()
    assert [each.logprob for each in sampled.top_logprobs] == pytest.approx(
        top.values.tolist(), abs=1e-12
    )
    assert sampled.logprob == pytest.approx(expected[sampled.token_id].item(), abs=1e-12)


def test_zero_alternatives_report_the_sampled_token_only() -> None:
    sampled = sample_one([0.0, 0.0], make_turn(Sampling(logprobs=0)))
    assert sampled == DrawnToken(0, pytest.approx(-math.log(2), abs=1e-15), ())
    assert sample_one([0.0, 0.0], make_turn(Sampling())) == DrawnToken(0, None, ())


def test_more_alternatives_than_tokens_report_what_there_is_and_nothing_impossible() -> None:
    sampling = Sampling(logprobs=20, min_tokens=1, stop_token_ids=(1,))
    sampled = sample_one([0.0, 5.0, 0.0], make_turn(sampling))
    assert [each.token_id for each in sampled.top_logprobs] == [0, 2]
    assert [each.logprob for each in sampled.top_logprobs] == pytest.approx([-math.log(2)] * 2)


def test_rows_that_want_different_numbers_of_alternatives_share_a_batch() -> None:
    turns = [make_turn(Sampling(logprobs=number)) for number in (0, 2, 1)]
    sampled = Sampler(3).sample(torch.tensor([[1.0, 2.0, 3.0]]).expand(3, 3), turns)
    assert [len(each.top_logprobs) for each in sampled if each is not None] == [0, 2, 1]
    assert len({each.logprob for each in sampled if each is not None}) == 1


# -- one token ahead, and on a device -----------------------------------------------------------------


def make_turns() -> list[TurnLog]:
    """Every option at several places; min_tokens and logprobs for some."""
    rng = random.Random(11)
    return [
        make_turn(
            replace(
                sampling,
                seed=rng.randrange(2**64),
                logprobs=rng.choice((None, 0, 3)),
                min_tokens=rng.choice((0, 0, 4)),
            ),
            context=rng.choices(range(300), k=rng.randrange(1, 50)),
            reply=rng.choices(range(20), k=rng.randrange(1, 8)),
        )
        for sampling in [*OPTIONS.values(), Sampling(), Sampling(logprobs=2)] * 4
    ]


def test_a_row_ahead_is_sampled_as_if_its_log_were_complete() -> None:
    """Whether its memory was made before or is made now; the newest id is on the device alone."""
    logits = make_logits(len(make_turns()), 300, seed=2)
    sampler = Sampler(300, frozenset({2, 9}))
    complete = make_turns()
    expected = sampler.sample(logits, complete)
    for remembers in (False, True):
        short = make_turns()
        if remembers:
            for turn in short:
                turn.tokens, whole = turn.tokens[:-2], turn.tokens
                sampler.sample(logits[:1], [turn])
                turn.tokens = whole
        newest = torch.tensor([turn.tokens.pop() for turn in short])
        rows = [Row(turn, len(turn.tokens) + 1) for turn in short]
        assert all(row.is_ahead for row in rows)
        assert sampler.draw(logits, rows, newest).read() == expected
        # Nothing of it was remembered: the log may still say otherwise.
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


def test_a_row_ahead_without_newest_ids_is_a_mistake() -> None:
    turn = make_turn(Sampling(presence_penalty=1.0))
    with pytest.raises(AssertionError, match="newest_ids are missing"):
        Sampler(5).draw(torch.zeros(1, 5), [Row(turn, len(turn.tokens) + 1)])


@pytest.mark.parametrize("vocab_size", [100, 255, 256, 257, 1000])
def test_a_device_that_is_never_asked_draws_the_same(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = make_logits(len(make_turns()), vocab_size, seed=6).bfloat16()
    logits[5, 7] = math.nan
    logits[6, vocab_size - 1] = math.inf
    looking = Sampler(vocab_size, frozenset({2})).sample(logits, make_turns())
    for module in (draw_module, sampler_module):
        monkeypatch.setattr(module, "reading_is_free", lambda values: False)
    monkeypatch.setattr(sampler_module.dense, "available", lambda dtype: False)
    assert Sampler(vocab_size, frozenset({2})).sample(logits, make_turns()) == looking
    assert [n for n, each in enumerate(looking) if each is None] == [5, 6]


@pytest.mark.parametrize(("top_k", "width"), [(1, 256), (256, 256), (257, 999), (0, 999)])
def test_a_row_is_looked_at_as_widely_as_it_may_take(top_k: int, width: int) -> None:
    sampling = Sampling(temperature=9.0, top_k=top_k)
    assert draw_module._width_surely_enough(sampling, 999) == width
    answers = draw_module._draw_from_head(make_logits(1, 999), [make_row(sampling)], width)
    assert answers.item() >= 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_without_compiled_kernels_a_row_that_is_not_finite_fails_alone_too(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module.dense, "available", lambda dtype: False)
    logits = make_logits(4, 100)
    logits[1, 99] = value
    logits[2] = 3.4e38
    sampled = Sampler(100).sample(logits, [make_turn(Sampling()) for _ in range(4)])
    assert [each is None for each in sampled] == [False, True, False, False]
    assert sampled[2] == DrawnToken(0, None, ())


# -- batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [37, 1003])
def test_no_row_depends_on_who_shares_the_batch(vocab_size: int) -> None:
    """Alone, shuffled, among NaN rows, and in small passes: equal to the last bit of a logprob."""
    rng = random.Random(vocab_size)
    options = list(OPTIONS.values())
    logits = make_logits(2 * len(options), vocab_size, seed=vocab_size)
    sampler = Sampler(vocab_size, frozenset({2}))

    def make_turns() -> list[TurnLog]:
        draws = random.Random(7)
        return [
            make_turn(
                replace(options[n % len(options)], seed=n, logprobs=3 if n % 3 else None),
                context=draws.choices(range(37), k=10),
                reply=draws.choices(range(37), k=5),
            )
            for n in range(len(logits))
        ]

    together = sampler.sample(logits, make_turns())
    alone = [sampler.sample(logits[n : n + 1], [turn])[0] for n, turn in enumerate(make_turns())]
    assert together == alone
    for _ in range(3):
        order = rng.sample(range(len(logits)), len(logits))
        turns = make_turns()
        shuffled = logits[order].clone()
        broken = set(rng.sample(range(len(order)), 5))
        for at in broken:
            shuffled[at, rng.randrange(vocab_size)] = math.nan
        answers = sampler.sample(shuffled, [turns[n] for n in order])
        for at, n in enumerate(order):
            assert answers[at] == (None if at in broken else together[n])


def test_small_passes_give_what_one_pass_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(len(OPTIONS), 50)

    def turns() -> list[TurnLog]:
        asked = (
            replace(each, logprobs=(None, 0, 2)[n % 3]) for n, each in enumerate(OPTIONS.values())
        )
        return [make_turn(sampling, context=[3], reply=[4]) for sampling in asked]

    whole = Sampler(50).sample(logits, turns())
    for elements in (1, 100, 149, 150):
        monkeypatch.setattr(sampler_module, "CPU_PASS_ELEMENTS_MAX", elements)
        assert Sampler(50).sample(logits, turns()) == whole


def test_the_number_of_threads_changes_nothing() -> None:
    logits = make_logits(3, 40_000)
    turns = [make_turn(Sampling(temperature=2.0, seed=n, logprobs=2)) for n in range(3)]
    num_threads = torch.get_num_threads()
    answers = []
    try:
        for each in (1, 2):
            torch.set_num_threads(each)
            answers.append(Sampler(40_000).sample(logits, turns))
            answers.append([Sampler(40_000).sample(logits[:1], turns[:1])[0], *answers[-1][1:]])
    finally:
        torch.set_num_threads(num_threads)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, logprobs=2)])
def test_a_row_that_is_not_finite_fails_alone(value: float, sampling: Sampling) -> None:
    logits = make_logits(3, 100)
    logits[1, 99] = value
    sampled = Sampler(100).sample(logits, [make_turn(sampling) for _ in range(3)])
    assert [each is None for each in sampled] == [False, True, False]
    logits[1, 50] = -value
    assert Sampler(100).sample(logits, [make_turn(sampling) for _ in range(3)])[1] is None


def test_enormous_finite_logits_are_not_taken_for_infinite_ones() -> None:
    row = [3.4e38] * 7 + [3.3e38]
    assert token_of(row, Sampling()) == 0
    assert token_of(row, Sampling(repetition_penalty=0.01), context=[7]) == 7
    assert token_of([-3.4e38, -3.3e38], Sampling(repetition_penalty=100.0), context=[1]) == 0


def test_columns_beyond_the_vocabulary_are_never_looked_at() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 99.0, math.nan]])
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3, logprobs=5)):
        (sampled,) = Sampler(3).sample(logits, [make_turn(sampling)])
        assert sampled is not None
        assert sampled.token_id < 3
        assert all(each.token_id < 3 for each in sampled.top_logprobs)


def test_ids_that_the_logits_lack_are_left_alone() -> None:
    sampling = Sampling(
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        logit_bias=((900, 5.0),),
        min_tokens=9,
        stop_token_ids=(900,),
    )
    turn = make_turn(sampling, context=[900, 2**31 + 5], reply=[900])
    assert Sampler(1000).sample(torch.tensor([[1.0, 2.0]]), [turn]) == [DrawnToken(1, None, ())]


def test_bfloat16_logits_give_what_their_float32_values_give() -> None:
    logits = make_logits(len(OPTIONS), 64).bfloat16()
    turns = [make_turn(replace(each, logprobs=2), reply=[4]) for each in OPTIONS.values()]
    assert Sampler(64).sample(logits, turns) == Sampler(64).sample(logits.float(), turns)


def test_the_callers_logits_are_not_changed() -> None:
    logits = make_logits(len(OPTIONS), 50)
    before = logits.clone()
    Sampler(50).sample(logits, [make_turn(each, reply=[4]) for each in OPTIONS.values()])
    assert torch.equal(logits, before)


def test_an_empty_batch_samples_nothing() -> None:
    assert Sampler(5).sample(torch.empty(0, 5), []) == []


def test_the_log_can_grow_after_it_was_read() -> None:
    turn = make_turn(Sampling(repetition_penalty=1.1, frequency_penalty=0.1), reply=[1])
    sample_one([1.0] * 9, turn)
    turn.tokens.append(3)
    assert turn.tokens[-1] == 3


EXTREMES: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 1e-300, 1.0, 100.0),
    "top_p": (1e-300, 0.5, 1.0),
    "top_k": (0, 1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 1.0, 100.0),
    "presence_penalty": (-2.0, 0.0, 2.0),
    "frequency_penalty": (-2.0, 0.0, 2.0),
    "seed": (0, 2**64 - 1),
    "min_tokens": (0, 512),
    "stop_token_ids": ((), tuple(range(64))),
    "ignore_eos": (False, True),
    "logprobs": (None, 0, 20),
    "logit_bias": ((), tuple((n, 100.0 if n % 2 else -100.0) for n in range(64))),
}


def test_every_pair_of_extreme_values_samples_a_token() -> None:
    samplings = []
    for (one, ones), (other, others) in itertools.combinations(EXTREMES.items(), 2):
        for value, other_value in itertools.product(ones, others):
            for temperature in (0.0, 1.0):
                pair = {"temperature": temperature, one: value, other: other_value}
                samplings.append(Sampling(**pair))
    assert all(sampling.problem(64) is None for sampling in samplings)
    rows = torch.stack(
        [
            make_logits(1, 64)[0],
            torch.zeros(64),
            torch.linspace(-1.0, 1.0, 64) * 3e38,
            torch.full((64,), -1e-40),
        ]
    )
    for row in rows:
        turns = [make_turn(each, context=[5, 6], reply=[6, 63]) for each in samplings]
        sampled = Sampler(64, frozenset({0})).sample(row.expand(len(turns), 64), turns)
        for each, sampling in zip(sampled, samplings, strict=True):
            assert each is not None, sampling
            assert 0 <= each.token_id < 64, sampling
            assert (each.logprob is None) == (sampling.logprobs is None)
            assert each.logprob is None or -math.inf < each.logprob <= 1e-9, sampling
