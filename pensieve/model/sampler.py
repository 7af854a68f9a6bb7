"""From logits to tokens: every field of `Sampling`, each row as if it were alone.

**What happens to a row**, in this order:

1. A row with NaN or infinite raw logits answers None: that turn fails, its neighbours do not.
2. Repetition penalty over the ids of the whole context (a positive logit is divided by it, a
   negative one multiplied), then presence and frequency penalties over the ids of this reply, then
   logit_bias is added.  Overflow is clamped to float32.
3. Until `min_tokens` outputs exist, end-of-turn ids and stop_token_ids are impossible.  With
   `ignore_eos` an end-of-turn id is a token like any other.  A mask that would leave no token at
   all is not applied.
4. Temperature 0 takes the largest logit, of equals the lowest id.  Otherwise temperature, top_k,
   top_p (over what top_k keeps, renormalised) and min_p (relative to the likeliest token), and one
   token is drawn from what is left, which is never empty.

Columns beyond `vocab_size` (padding of the output matrix) are never looked at.  `logprob` and
`top_logprobs` are the log-softmax after step 3 and before temperature and cuts: what the model,
with the client's penalties and biases, believed.  `top_logprobs` lists the likeliest tokens,
whether or not the sampled one is among them, and never an impossible one.

**Whoever shares the batch changes nothing.**  Floating-point sums depend on how a library splits
them, and that depends on the batch's shape, the number of threads and the device.  So nothing here
sums floats: a token's probability becomes the integer `weight = floor(2^s exp((x - max) / T))`, an
elementwise function, and all sums, cumulative sums and comparisons are over integers and exact in
any order.  s is chosen so that a row's sum stays below 2^62; what falls below 2^-s of the likeliest
token (2^-44 for 150,000 tokens) is never drawn.

**The order of tokens** is by descending logit, then ascending id.  `_sort_keys` packs both into one
int64, so that no two tokens tie and a partial sort is the beginning of the full one.  Every cut
keeps a prefix of this order.  Usually the first 256 tokens show where the prefix ends, or (nothing
cut) already contain the drawn token; only a row for which they do not is looked at more widely.

**The random number** of a token is Philox4x32-10 of (seed, position): the seed is the key and the
token's absolute position in the conversation's log, `len(turn.tokens)`, is the counter.  Both are
in the stored log, so suspension, a restarted engine and another device repeat it, and no state
of a generator exists.  Hence `sample` must be called when the log ends with the token before.

**Memory** is `SamplingState`, kept in `turn.decoding.sampling_state`: which ids the context holds
and how often this reply used each.  It follows the log by reading what was appended since the last
call; where it is missing it is read from the whole log.  It can be thrown away at any time.

Greedy rows without further wishes cost one argmax.  The others are worked on a few rows at a time
(the two `…_PASS_ELEMENTS_MAX`), which bounds the memory and, on a CPU, keeps a row in the cache:
one row of 150,000 logits at a time is seven to nine times as fast as eight at once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from pensieve.core.iteration import Logprob
from pensieve.core.sampling import Sampling
from pensieve.core.turn import Turn
from pensieve.kernels import dense

CPU_PASS_ELEMENTS_MAX = 2**18  # logits worked on at once, but at least one row
DEVICE_PASS_ELEMENTS_MAX = 2**23  # about 300 MB of int64 and float64 on an accelerator
HEAD_WIDTHS = (256, 8192)  # likeliest tokens looked at, before the whole row is
FLOAT32_MAX = torch.finfo(torch.float32).max


class SampledToken(NamedTuple):
    token_id: int
    logprob: float | None
    top_logprobs: tuple[Logprob, ...]


class RemembersSampling(Protocol):
    """What the sampler needs of `turn.decoding`."""

    sampling_state: object | None


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()) -> None:
        assert vocab_size > 0
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def sample(self, logits: Tensor, turns: Sequence[Turn]) -> list[SampledToken | None]:
        """The next token of each turn; None where its row of (num_turns, vocab) is not finite."""
        assert logits.shape[0] == len(turns), (logits.shape, len(turns))
        if not turns:
            return []
        logits = logits[:, : self.vocab_size].float()
        likeliest = _likeliest_of_each(logits)
        sampled: list[SampledToken | None] = [None] * len(turns)
        others = []
        for row, turn in enumerate(turns):
            if likeliest[row] < 0:
                continue
            if _is_plain(turn):
                sampled[row] = SampledToken(likeliest[row], None, ())
            else:
                others.append(row)
        on_cpu = logits.device.type == "cpu"
        elements_max = CPU_PASS_ELEMENTS_MAX if on_cpu else DEVICE_PASS_ELEMENTS_MAX
        rows_max = max(1, elements_max // logits.shape[1])
        for first in range(0, len(others), rows_max):
            part = others[first : first + rows_max]
            answers = self._sample_part(logits[part], [turns[row] for row in part])
            for row, answer in zip(part, answers, strict=True):
                sampled[row] = answer
        return sampled

    def _sample_part(self, values: Tensor, turns: list[Turn]) -> list[SampledToken]:
        """`values` (num_turns, vocab) belongs to this call and is changed in place."""
        self._adjust(values, turns)
        drawn = [row for row, turn in enumerate(turns) if turn.sampling.temperature > 0]
        token_ids = [0] * len(turns)
        if len(drawn) < len(turns):
            token_ids = values.argmax(-1).tolist()
        if drawn:
            answers = _draw(_select(values, drawn), [turns[row] for row in drawn])
            for row, token_id in zip(drawn, answers, strict=True):
                token_ids[row] = token_id
        sampled = [SampledToken(token_id, None, ()) for token_id in token_ids]
        reported = [row for row, turn in enumerate(turns) if turn.sampling.logprobs is not None]
        if reported:
            reports = _report(
                _select(values, reported),
                [token_ids[row] for row in reported],
                [turns[row].sampling.logprobs or 0 for row in reported],
            )
            for row, report in zip(reported, reports, strict=True):
                sampled[row] = report
        return sampled

    def _adjust(self, values: Tensor, turns: list[Turn]) -> None:
        """Penalties, biases and the mask, in place, on the rows that have any."""
        states = {
            row: self._state_of(turn, values) for row, turn in enumerate(turns) if _adjusts(turn)
        }
        if not states:
            return
        options = [turn.sampling for turn in turns]
        repeated = [row for row in states if options[row].repetition_penalty != 1]
        if repeated:
            penalties = [options[row].repetition_penalty for row in repeated]
            penalty = _column(penalties, values, torch.float32)
            seen = torch.stack([states[row].seen for row in repeated])
            before = values[repeated]
            after = torch.where(before < 0, before * penalty, before / penalty)
            values[repeated] = torch.where(seen, after, before)
        counted = [row for row in states if _counts_reply(options[row])]
        if counted:
            presences = [options[row].presence_penalty for row in counted]
            frequencies = [options[row].frequency_penalty for row in counted]
            counts = torch.stack([states[row].counts for row in counted])
            values[counted] -= counts * _column(frequencies, values, torch.float32)
            values[counted] -= (counts > 0) * _column(presences, values, torch.float32)
        for row, state in states.items():
            if state.bias is not None:
                ids, biases = state.bias
                values[row].index_add_(0, ids, biases)
        values.clamp_(-FLOAT32_MAX, FLOAT32_MAX)
        for row, state in states.items():
            if _is_masked(turns[row]) and len(state.ending_ids) < values.shape[1]:
                values[row].index_fill_(0, state.ending_ids, -math.inf)

    def _state_of(self, turn: Turn, values: Tensor) -> SamplingState:
        decoding = cast(RemembersSampling, turn.decoding)
        state = decoding.sampling_state
        if state is None:
            state = SamplingState.of(turn.sampling, self.eos_token_ids, values)
            decoding.sampling_state = state
        assert isinstance(state, SamplingState)
        state.follow(turn)
        return state


def _likeliest_of_each(logits: Tensor) -> list[int]:
    """The largest logit of each row, of equals the lowest id; -1 for a row that is not finite."""
    token_ids: list[int]
    if logits.device.type == "cpu" and logits.stride(1) == 1 and dense.available(torch.float32):
        token_ids = dense.argmax(logits).tolist()
        return token_ids
    # A sum is finite only if every term is; one that is not may have overflowed: look again.
    finite = logits.sum(-1).isfinite().tolist()
    token_ids = logits.argmax(-1).tolist()
    return [
        token_id if finite[row] or bool(logits[row].isfinite().all()) else -1
        for row, token_id in enumerate(token_ids)
    ]


def _is_plain(turn: Turn) -> bool:
    sampling = turn.sampling
    return sampling.temperature == 0 and sampling.logprobs is None and not _adjusts(turn)


def _adjusts(turn: Turn) -> bool:
    sampling = turn.sampling
    return (
        sampling.repetition_penalty != 1
        or _counts_reply(sampling)
        or bool(sampling.logit_bias)
        or _is_masked(turn)
    )


def _counts_reply(sampling: Sampling) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _is_masked(turn: Turn) -> bool:
    return turn.num_output_tokens < turn.sampling.min_tokens


@dataclass(slots=True)
class SamplingState:
    """What the logits of one turn are adjusted by; `seen` and `counts` follow the log."""

    num_followed: int  # tokens of the log that `seen` and `counts` include
    seen: Tensor  # (vocab,) bool: the context holds this id; empty where nothing asks
    counts: Tensor  # (vocab,) int32: how often this reply used it; empty where nothing asks
    bias: tuple[Tensor, Tensor] | None  # ids and what is added to their logits
    ending_ids: Tensor  # ids that may not come before min_tokens

    @classmethod
    def of(cls, sampling: Sampling, eos_token_ids: frozenset[int], values: Tensor) -> SamplingState:
        vocab_size, device = values.shape[1], values.device
        num_seen = vocab_size if sampling.repetition_penalty != 1 else 0
        num_counts = vocab_size if _counts_reply(sampling) else 0
        biases: dict[int, float] = {}
        for token_id, bias in sampling.logit_bias:
            if token_id < vocab_size:
                biases[token_id] = biases.get(token_id, 0.0) + bias
        ending_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ending_ids |= eos_token_ids
        return cls(
            num_followed=0,
            seen=torch.zeros(num_seen, dtype=torch.bool, device=device),
            counts=torch.zeros(num_counts, dtype=torch.int32, device=device),
            bias=(
                torch.tensor(list(biases), dtype=torch.int64, device=device),
                torch.tensor(list(biases.values()), dtype=torch.float32, device=device),
            )
            if biases
            else None,
            ending_ids=torch.tensor(
                sorted(token_id for token_id in ending_ids if token_id < vocab_size),
                dtype=torch.int64,
                device=device,
            ),
        )

    def follow(self, turn: Turn) -> None:
        if len(self.seen):
            ids = _ids_of(turn.tokens[self.num_followed :], self.seen)
            self.seen.index_fill_(0, ids, True)
        if len(self.counts):
            ids = _ids_of(turn.tokens[max(self.num_followed, turn.prompt_end) :], self.counts)
            self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.num_followed = len(turn.tokens)


def _ids_of(tokens: array[int], like: Tensor) -> Tensor:
    """Those of `tokens` (a copy: a tensor over it would forbid the log to grow) that `like` has."""
    if not tokens:
        return torch.empty(0, dtype=torch.int64, device=like.device)
    ids = torch.frombuffer(tokens, dtype=torch.int32).to(like.device, torch.int64)
    return ids[(ids >= 0) & (ids < len(like))]


def _select(values: Tensor, rows: list[int]) -> Tensor:
    return values if len(rows) == len(values) else values[rows]


def _column(
    numbers: list[float] | list[int], like: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """(num_turns, 1), on the device of `like`."""
    return torch.tensor(numbers, dtype=dtype, device=like.device).unsqueeze(1)


def _draw(values: Tensor, turns: list[Turn]) -> list[int]:
    """One token for each row, from as many of its likeliest tokens as it takes."""
    token_ids = [-1] * len(turns)
    undecided = list(range(len(turns)))
    for width in (*(width for width in HEAD_WIDTHS if width < values.shape[1]), values.shape[1]):
        answers = _draw_from_head(
            _select(values, undecided), [turns[row] for row in undecided], width
        )
        for row, token_id in zip(undecided, answers, strict=True):
            token_ids[row] = token_id
        undecided = [row for row in undecided if token_ids[row] < 0]
        if not undecided:
            break
    assert not undecided, "the whole row did not decide"
    return token_ids


def _draw_from_head(values: Tensor, turns: list[Turn], width: int) -> list[int]:
    """A token for each row of `values`; -1 where its `width` likeliest tokens do not decide."""
    vocab_size = values.shape[1]
    options = [turn.sampling for turn in turns]
    top_k_of = [min(each.top_k or vocab_size, vocab_size) for each in options]
    draws = [uniform_limbs(turn.sampling.seed, len(turn.tokens)) for turn in turns]
    temperature = _column([each.temperature for each in options], values)
    top_p = _column([each.top_p for each in options], values)
    min_p = _column([each.min_p for each in options], values)
    top_k = _column(top_k_of, values, torch.int64)
    draw_high = _column([high for high, _ in draws], values, torch.int64)
    draw_low = _column([low for _, low in draws], values, torch.int64)

    ids = _likeliest(values, width)  # (num_turns, width)
    largest = values.gather(1, ids[:, :1])
    weights = _weights(values.gather(1, ids), largest, temperature, vocab_size)
    upto = weights.cumsum(-1)  # the weight of each token and all before it
    if width < vocab_size and vocab_size in top_k_of:
        total = _weights(values, largest, temperature, vocab_size).sum(-1, keepdim=True)
    else:
        total = upto[:, -1:]  # all there is, or (every row has a top_k) not looked at

    # Each cut keeps a prefix; `kept` is the shortest of them, as far as the head shows it.
    top_k_mass = torch.where(top_k < vocab_size, upto.gather(1, top_k.clamp(max=width) - 1), total)
    top_p_mass = (top_p * top_k_mass).ceil().to(torch.int64).clamp(min=1)  # exact to 2^-53 of it
    weight_min = (min_p * 2.0 ** _weight_bits(vocab_size)).ceil().to(torch.int64).clamp(min=1)
    rank = torch.arange(width, device=values.device)
    kept = (rank < top_k) & (upto - weights < top_p_mass) & (weights >= weight_min)
    num_kept = kept.sum(-1, keepdim=True)

    uncut = (top_k == vocab_size) & (top_p == 1) & (min_p == 0)
    ends_in_head = (num_kept < width) | (top_k <= width)
    knows_top_k_mass = (top_k <= width) | (top_k == vocab_size)
    mass = torch.where(ends_in_head, upto.gather(1, num_kept - 1), total)
    target = _scale(mass, draw_high, draw_low)
    index = (upto <= target).sum(-1, keepdim=True)
    decided = knows_top_k_mass & (ends_in_head | uncut) & (index < width)
    token_ids = torch.where(decided, ids.gather(1, index.clamp(max=width - 1)), -1)
    drawn: list[int] = token_ids.squeeze(1).tolist()
    return drawn


def _likeliest(values: Tensor, width: int) -> Tensor:
    """The ids of the `width` largest values of each row, in the order of tokens."""
    keys = _sort_keys(values)
    return (-keys.topk(width, dim=-1).values) & 0xFFFF_FFFF


def _sort_keys(values: Tensor) -> Tensor:
    """int64 keys, no two alike in a row: a larger value, or an equal one of lower id, is larger.

    The bits of a float32, read as an integer, sort as the float does once those of negative numbers
    are inverted.  Adding zero turns -0 into +0, which is equal and must tie.
    """
    bits = (values + 0.0).view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFF_FFFF
    ids = torch.arange(values.shape[1], device=values.device)
    return (bits.to(torch.int64) << 32) - ids


def _weight_bits(vocab_size: int) -> int:
    """s, such that vocab_size weights of at most 2^s sum to less than 2^62."""
    return 62 - vocab_size.bit_length()


def _weights(values: Tensor, largest: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """Fixed-point probabilities relative to the likeliest token's, whose weight is 2^s."""
    exponent = (values.to(torch.float64) - largest).div_(temperature)
    return exponent.exp_().mul_(2.0 ** _weight_bits(vocab_size)).to(torch.int64)


def _scale(mass: Tensor, draw_high: Tensor, draw_low: Tensor) -> Tensor:
    """floor(mass * draw / 2^62), exactly, for mass < 2^62 and a draw of two limbs of 31 bits.

    With mass = a 2^31 + b, every product and sum below stays under 2^63.
    """
    mass_high, mass_low = mass >> 31, mass & 0x7FFF_FFFF
    middle = mass_high * draw_low + mass_low * draw_high + ((mass_low * draw_low) >> 31)
    return mass_high * draw_high + (middle >> 31)


def _report(values: Tensor, token_ids: list[int], num_top: list[int]) -> list[SampledToken]:
    """The sampled tokens with their log-probabilities and those of the likeliest tokens."""
    vocab_size = values.shape[1]
    width = min(max(num_top), vocab_size)
    sampled_ids = _column(token_ids, values, torch.int64)
    top_ids = _likeliest(values, max(width, 1))
    largest = values.gather(1, top_ids[:, :1])
    one = torch.ones_like(largest, dtype=torch.float64)
    total = _weights(values, largest, one, vocab_size).sum(-1, keepdim=True)
    log_total = largest + (total.to(torch.float64) / 2.0 ** _weight_bits(vocab_size)).log()
    reported = values.gather(1, torch.cat((sampled_ids, top_ids), dim=1)) - log_total
    reports = []
    for token_id, row_ids, row, num in zip(
        token_ids, top_ids.tolist(), reported.tolist(), num_top, strict=True
    ):
        top = zip(row_ids[:num], row[1 : num + 1], strict=True)
        possible = tuple(Logprob(*each) for each in top if each[1] > -math.inf)
        reports.append(SampledToken(token_id, row[0], possible))
    return reports


def uniform_limbs(seed: int, position: int) -> tuple[int, int]:
    """The random number of a token: (high, low) of 31 bits each, uniform in 0..2^62-1."""
    counter = (position & 0xFFFF_FFFF, position >> 32, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & 0xFFFF_FFFF, seed >> 32))
    return high >> 1, low >> 1


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011): ten rounds of multiply and exchange."""
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(10):
        product0, product2 = 0xD251_1F53 * word0, 0xCD9E_8D57 * word2
        word0, word1, word2, word3 = (
            (product2 >> 32) ^ word1 ^ key0,
            product2 & 0xFFFF_FFFF,
            (product0 >> 32) ^ word3 ^ key1,
            product0 & 0xFFFF_FFFF,
        )
        key0, key1 = (key0 + 0x9E37_79B9) & 0xFFFF_FFFF, (key1 + 0xBB67_AE85) & 0xFFFF_FFFF
    return word0, word1, word2, word3
