"""Masks of constrained replies: where a reply may end, thinking, tokens ahead, and failures."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Iterator

import pytest
import torch

from pensieve.core.constraint import Constraint, ConstraintKind
from pensieve.core.iteration import TurnFailure, TurnStart
from pensieve.model.constraints import FAILED, NO_JOBS, TurnConstraints
from pensieve.model.sampling.masks import TokenMask
from pensieve.model.sampling.penalties import Row, TurnLog
from pensieve.model.sampling.sampler import Sampler
from pensieve.sampling import Sampling
from tests.model.sampling.world import OPTIONS, make_logits, make_turn
from tests.model.world import LetterTokenizer

VOCAB_SIZE = 128  # vocabulary of the model, which has more ids than the tokenizer
EOS, STOP = 0, 110
THINK, THOUGHT = 1, 2  # tokens that open and close the thinking


def ids_of(text: str) -> list[int]:
    return [26 + ord(each) - ord("a") for each in text]


def tokens_of(mask: TokenMask | None) -> set[int]:
    assert mask is not None
    return {each for each in range(VOCAB_SIZE) if mask.packed[each >> 3] >> (each & 7) & 1}


def tokens_of_letters(letters: str) -> set[int]:
    """Return all tokens whose text is one of these letters."""
    return {
        each
        for each in range(3, 120)
        if not 100 <= each < 103 and chr(ord("a") + each % 26) in letters
    }


class Reply:
    """A turn with a constraint. The test chooses its tokens."""

    def __init__(
        self,
        pattern: str,
        prompt: list[int] | None = None,
        *,
        thinks: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        vocabulary = LetterTokenizer(thinks)
        vocabulary.eos_token_ids = frozenset({EOS})
        self.constraints = TurnConstraints(vocabulary, frozenset({EOS}), VOCAB_SIZE)
        context = array("I", prompt or ids_of("hi"))
        constraint = Constraint(ConstraintKind.REGEX, pattern)
        start = TurnStart(7, context, sampling or Sampling(), constraint)
        self.constraints.begin(start)
        self.log = TurnLog.of(start)

    def mask(self) -> TokenMask | None:
        rows = [Row(self.log, len(self.log.tokens))]
        found = self.constraints.masks(self.constraints.start_masks(rows), rows)
        assert not found.failures
        return found.rows[0].mask

    def allowed_tokens(self) -> set[int]:
        return tokens_of(self.mask())

    def say(self, *token_ids: int) -> None:
        self.log.tokens.extend(token_ids)


@pytest.fixture(autouse=True)
def _close_constraints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[TurnConstraints] = []
    begin = TurnConstraints.__init__

    def remembered(self: TurnConstraints, *arguments: object) -> None:
        begin(self, *arguments)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(TurnConstraints, "__init__", remembered)
    yield
    for each in made:
        each.close()


def test_a_reply_may_end_only_where_its_constraint_is_met() -> None:
    reply = Reply("ab?c", sampling=Sampling(stop_token_ids=(STOP,)))
    assert reply.allowed_tokens() == tokens_of_letters("a") - {STOP}
    reply.say(*ids_of("a"))
    assert reply.allowed_tokens() == tokens_of_letters("bc") - {STOP}
    reply.say(*ids_of("c"))
    mask = reply.mask()
    assert tokens_of(mask) == {EOS, STOP}
    assert mask is not None
    assert mask.must_end


def test_a_reply_may_end_or_continue_if_its_constraint_allows_both() -> None:
    reply = Reply("ab*")
    reply.say(*ids_of("ab"))
    mask = reply.mask()
    assert tokens_of(mask) == tokens_of_letters("b") | {EOS}
    assert mask is not None
    assert not mask.must_end


def test_many_tokens_at_once_advance_a_constraint_like_single_tokens() -> None:
    """The log has grown by a whole reply, as after a turn that was begun again."""
    slow, quick = Reply("(ab|cd){9}"), Reply("(ab|cd){9}")
    for token_id in ids_of("abcdab"):
        slow.allowed_tokens()
        slow.say(token_id)
    quick.say(*ids_of("abcdab"))
    assert quick.mask() == slow.mask()


@pytest.mark.parametrize("opened_by", ["prompt", "reply"])
def test_thinking_is_unconstrained_and_does_not_end_the_reply(opened_by: str) -> None:
    prompt = [*ids_of("hi"), *([THINK] if opened_by == "prompt" else [])]
    reply = Reply("yes", prompt, thinks=True)
    if opened_by == "reply":
        assert reply.allowed_tokens() == tokens_of_letters("y") | {THINK}
        reply.say(THINK)
    for token_id in ids_of("qq"):
        assert reply.allowed_tokens() == set(range(VOCAB_SIZE)) - {EOS}
        reply.say(token_id)
    reply.say(THOUGHT)
    assert reply.allowed_tokens() == tokens_of_letters("y")
    reply.say(*ids_of("yes"))
    assert reply.allowed_tokens() == {EOS}


@pytest.mark.parametrize(
    ("prompt", "may_open"),
    [
        (ids_of("hi"), True),
        ([THINK, THOUGHT], False),  # the template has closed the thinking, so the reply has none
        (
            [THINK, *ids_of("hm"), THOUGHT, *ids_of("yes"), EOS, *ids_of("hi")],
            True,
        ),  # an earlier reply has ended its thinking
    ],
)
def test_a_reply_may_start_thinking_unless_its_prompt_ended_the_thinking(
    prompt: list[int], may_open: bool
) -> None:
    reply = Reply("yes", prompt, thinks=True)
    assert (THINK in reply.allowed_tokens()) == may_open
    reply.say(*ids_of("y"))
    assert reply.allowed_tokens() == tokens_of_letters("e")


def test_without_thinking_the_thinking_token_is_masked() -> None:
    assert Reply("yes").allowed_tokens() == tokens_of_letters("y")


def test_a_token_ahead_advances_the_constraint_once_it_is_known() -> None:
    reply = Reply("abc")
    reply.allowed_tokens()
    position = len(reply.log.tokens) + 1
    for newest, expected in ((ids_of("a")[0], tokens_of_letters("b")), (-1, None), (EOS, None)):
        rows = [Row(reply.log, position)]
        jobs = reply.constraints.start_masks(rows)
        assert (jobs.by_row, jobs.ahead) == ({}, [0])
        reply.constraints.start_ahead(jobs, rows, {7: newest})
        found = reply.constraints.masks(jobs, rows).rows[0].mask
        assert (found if found is None else tokens_of(found)) == expected
        if newest >= 0:
            reply.say(newest)
            position += 1


def test_a_constraint_that_no_token_can_meet_fails_its_turn() -> None:
    reply = Reply("aB")
    reply.allowed_tokens()
    reply.say(*ids_of("a"))
    for _ in range(2):
        rows = [Row(reply.log, len(reply.log.tokens))]
        found = reply.constraints.masks(reply.constraints.start_masks(rows), rows)
        assert found.rows[0].mask is None
        assert isinstance(found.failures[7], TurnFailure)
        assert found.failures[7].reason == FAILED
        reply.say(5)


def test_turns_without_a_constraint_need_no_masks_and_no_threads() -> None:
    constraints = TurnConstraints(LetterTokenizer(), frozenset({EOS}), VOCAB_SIZE)
    start = TurnStart(1, array("I", [5]), Sampling())
    constraints.begin(start)
    rows = [Row(TurnLog.of(start), 1)]
    jobs = constraints.start_masks(rows)
    assert jobs is NO_JOBS
    assert constraints.masks(jobs, rows).rows is rows
    assert constraints._threads is None


# -- the sampler, with masks made by the test --------------------------------------------------------


def mask_of(allowed: set[int], size: int, must_end: bool = False) -> TokenMask:
    packed = bytearray(-(-size // 8))
    for each in allowed:
        packed[each >> 3] |= 1 << (each & 7)
    return TokenMask(bytes(packed), must_end)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_masked_row_is_drawn_as_if_there_were_no_other_tokens(name: str) -> None:
    size, chance = 301, random.Random(name)
    sampler = Sampler(size, frozenset({4}))
    for seed in range(5):
        sampling = dataclasses.replace(OPTIONS[name], seed=seed)
        logits = make_logits(1, size, seed)
        turn = make_turn(sampling)
        allowed = {4, *chance.sample(range(size), chance.choice((1, 5, 200)))}
        row = Row(turn, len(turn.tokens), mask_of(allowed, size))
        (drawn,) = sampler.draw(logits, [row]).read()
        assert drawn is not None
        assert drawn.token_id in allowed
        others = torch.full_like(logits, -1e30)
        others[:, sorted(allowed)] = logits[:, sorted(allowed)]
        counts_others = sampling.top_n_sigma  # uses the deviation of all logits
        penalties = sampling.logit_bias or sampling.frequency_penalty or sampling.presence_penalty
        if not (counts_others or penalties):
            (alone,) = sampler.draw(others, [row._replace(mask=None)]).read()
            assert alone is not None
            assert drawn.token_id == alone.token_id


def test_masked_rows_change_no_bit_of_other_rows() -> None:
    size = 301
    sampler = Sampler(size, frozenset({4}))
    logits = make_logits(2 * len(OPTIONS), size)
    turns = [make_turn(dataclasses.replace(each, logprobs=3)) for each in OPTIONS.values()] * 2
    rows = [Row(each, len(each.tokens)) for each in turns]
    alone = sampler.draw(logits, rows).read()
    mask = mask_of({7, 8, 9}, size)
    mixed = [row._replace(mask=mask) if n % 2 else row for n, row in enumerate(rows)]
    for number, (one, other) in enumerate(
        zip(alone, sampler.draw(logits, mixed).read(), strict=True)
    ):
        assert one is not None
        assert other is not None
        if number % 2:
            assert other.token_id in (7, 8, 9)
            assert other.top_logprobs == one.top_logprobs  # from the unmasked logits
        else:
            assert other == one


def test_min_tokens_is_ignored_if_the_constraint_allows_only_the_end() -> None:
    size = 40
    turn = make_turn(Sampling(min_tokens=9))
    row = Row(turn, len(turn.tokens), mask_of({4}, size, must_end=True))
    (drawn,) = Sampler(size, frozenset({4})).draw(make_logits(1, size), [row]).read()
    assert drawn is not None
    assert drawn.token_id == 4
    row = Row(turn, len(turn.tokens), mask_of({4, 9}, size))
    (drawn,) = Sampler(size, frozenset({4})).draw(make_logits(1, size), [row]).read()
    assert drawn is not None
    assert drawn.token_id == 9


def test_nan_logits_fail_a_masked_row_too() -> None:
    size = 40
    logits = make_logits(1, size)
    logits[0, 3] = float("nan")
    turn = make_turn(Sampling())
    row = Row(turn, len(turn.tokens), mask_of({9}, size))
    assert Sampler(size).draw(logits, [row]).read() == [None]
