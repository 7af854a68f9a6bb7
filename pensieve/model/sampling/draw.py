"""Draw a token from each row of logits, reproducibly, and compute log-probabilities.

**A row's result does not depend on the batch.**  Floating-point sums depend on the order of addition.  A
library chooses the order by the batch's shape, the number of threads and the device.  So this module never
sums floats.  A token's probability becomes the integer `weight = floor(2^s exp((x - max) / T))`, which is an
elementwise function.  All sums, cumulative sums and comparisons use integers and are exact in any order.
s keeps a row's sum below 2^62.  A token is never drawn if its probability is less than 2^-s times that of the
likeliest token (2^-44 for 150,000 tokens).

**The order of tokens** is by descending logit, then ascending id.  `_sort_keys` packs both into one
int64, so that no two tokens tie and a partial sort is a prefix of the full sort.  Every cut keeps a prefix of
this order.  Usually the first 256 tokens contain the end of the prefix or, without a cut, the drawn token.
If not, the row is tried again with more of its tokens.

* On a CPU, checking this costs nothing.
* On a GPU, checking means waiting for all launched work.  So a kernel searches each row without sorting it
  (kernels/sampling.py).  With the choice `radix=0` each row is instead tried once, with as many tokens as its
  `Sampling` may need: 256 for a top_k of at most 256, else all tokens, sorted.

top_n_sigma comes before the other cuts and before the temperature, as in llama.cpp.  For later steps, the
logits of the tokens that top_n_sigma cuts are -infinity.

**The random number** of a token is Philox4x32-10 of (seed, position): the seed is the key and the
token's absolute position in the conversation's log is the counter.  The store keeps the seed and the log.  So
the number is the same after a suspension, in a restarted engine and on another device.  There is no generator
state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pensieve.kernels import choices, cuda_launch
from pensieve.kernels.sampling import RowOptions, draw_tokens_launch, table_of
from pensieve.model.sampling.penalties import Row
from pensieve.model.transfer import indices, reading_is_free, upload
from pensieve.sampling import Sampling

SIGMA_STEPS = 1 << 12  # steps per unit of logit; distances are rounded to whole steps
SIGMA_DISTANCE_MAX = 256.0  # larger distances from the largest logit are clamped to this
HEAD_WIDTHS = (256, 8192)  # numbers of likeliest tokens to try before the whole row


def draw(values: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return int64 (rows): a token for each row of `values`, which must be finite or -infinity."""
    if any(row.sampling.top_n_sigma for row in rows):
        values = _within_sigmas(values, rows)
    if reading_is_free(values):
        return _draw_by_trying(values, rows)
    if values.is_cuda and choices.current.radix:
        return _draw_by_searching(values, rows)
    return _draw_at_once(values, rows)


def _within_sigmas(values: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return a copy in which top_n_sigma has cut tokens.

    The standard deviation is over the logits that are not -infinity.  It comes from sums of integers: for
    2^18 tokens with distances of at most 2^20, the squares sum to at most 2^58.
    """
    num_sigmas = column([row.sampling.top_n_sigma for row in rows], values)
    below = values.amax(-1, keepdim=True) - values
    counted = values > -math.inf
    steps = (below.clamp(max=SIGMA_DISTANCE_MAX) * SIGMA_STEPS).round().to(torch.int64) * counted
    num = counted.sum(-1, keepdim=True).to(torch.float64)
    mean = steps.sum(-1, keepdim=True).to(torch.float64) / num
    variance = (steps * steps).sum(-1, keepdim=True).to(torch.float64) / num - mean * mean
    sigma = variance.clamp(min=0.0).sqrt() / SIGMA_STEPS
    is_cut = (num_sigmas > 0) & (below > num_sigmas * sigma)
    return values.masked_fill(is_cut, -math.inf)


def select(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the given rows, which must ascend.  Return `values` itself if all rows are given."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, indices(rows, values.device))


def column(
    numbers: Sequence[float] | Sequence[int], like: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return the numbers as (rows, 1) on the device of `like`."""
    return upload(torch.tensor(numbers, dtype=dtype), like.device).unsqueeze(1)


def _draw_by_trying(values: Tensor, rows: Sequence[Row]) -> Tensor:
    """For each row, try its few likeliest tokens first, and more only while they do not decide the draw."""
    vocab_size = values.shape[1]
    token_ids = [-1] * len(rows)
    undecided = list(range(len(rows)))
    for width in (*(width for width in HEAD_WIDTHS if width < vocab_size), vocab_size):
        answers = _draw_from_head(
            select(values, undecided), [rows[each] for each in undecided], width
        )
        for each, token_id in zip(undecided, answers.tolist(), strict=True):
            token_ids[each] = token_id
        undecided = [each for each in undecided if token_ids[each] < 0]
        if not undecided:
            break
    assert not undecided, "a whole row was not enough to draw from"
    return torch.tensor(token_ids)


def _draw_at_once(values: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw from as many likeliest tokens as a row may need, without reading from the device."""
    vocab_size = values.shape[1]
    widths = [_sufficient_width(row.sampling, vocab_size) for row in rows]
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=values.device)
    for width in sorted(set(widths)):
        part = [each for each, row_width in enumerate(widths) if row_width == width]
        answers = _draw_from_head(select(values, part), [rows[each] for each in part], width)
        token_ids.index_copy_(0, indices(part, values.device), answers)
    return token_ids


def _draw_by_searching(values: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw with the kernel; upload one table of options."""
    table = upload(table_of(options_of(rows, values.shape[1])), values.device)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=values.device)
    launch = draw_tokens_launch(values, table, _weight_bits(values.shape[1]), token_ids)
    cuda_launch.launch(launch, values.device)
    return token_ids


def options_of(rows: Sequence[Row], vocab_size: int) -> list[RowOptions]:
    """Return the kernel's options of each row."""
    found = []
    for row in rows:
        sampling = row.sampling
        high, low = uniform_limbs(sampling.seed, row.position)
        weight_min = max(math.ceil(sampling.min_p * 2.0 ** _weight_bits(vocab_size)), 1)
        top_k = min(sampling.top_k or vocab_size, vocab_size)
        draw = high << 31 | low
        found.append(RowOptions(sampling.temperature, sampling.top_p, top_k, weight_min, draw))
    return found


def _sufficient_width(sampling: Sampling, vocab_size: int) -> int:
    short = 0 < sampling.top_k <= HEAD_WIDTHS[0] < vocab_size
    return HEAD_WIDTHS[0] if short else vocab_size


def _draw_from_head(values: Tensor, rows: Sequence[Row], width: int) -> Tensor:
    """Return a token for each row, or -1 where the `width` likeliest tokens do not decide."""
    vocab_size = values.shape[1]
    options = [row.sampling for row in rows]
    top_ks = [min(each.top_k or vocab_size, vocab_size) for each in options]
    draws = [uniform_limbs(row.sampling.seed, row.position) for row in rows]
    temperature = column([each.temperature for each in options], values)
    top_p = column([each.top_p for each in options], values)
    min_p = column([each.min_p for each in options], values)
    top_k = column(top_ks, values, torch.int64)
    draw_high = column([high for high, _ in draws], values, torch.int64)
    draw_low = column([low for _, low in draws], values, torch.int64)

    ids = _likeliest(values, width)  # (rows, width)
    largest = values.gather(1, ids[:, :1])
    weights = _weights(values.gather(1, ids), largest, temperature, vocab_size)
    cumulative = weights.cumsum(-1)  # the weight of each token and all before it
    if width < vocab_size and vocab_size in top_ks:
        total = _weights(values, largest, temperature, vocab_size).sum(-1, keepdim=True)
    else:
        total = cumulative[:, -1:]  # exact for whole rows; unused if every row has a top_k

    # Each cut keeps a prefix.  `kept` is the shortest of them, as far as the first `width` tokens show it.
    top_k_mass = torch.where(
        top_k < vocab_size, cumulative.gather(1, top_k.clamp(max=width) - 1), total
    )
    top_p_mass = (top_p * top_k_mass).ceil().to(torch.int64).clamp(min=1)  # relative error: 2^-53
    weight_min = (min_p * 2.0 ** _weight_bits(vocab_size)).ceil().to(torch.int64).clamp(min=1)
    rank = torch.arange(width, device=values.device)
    kept = (rank < top_k) & (cumulative - weights < top_p_mass) & (weights >= weight_min)
    num_kept = kept.sum(-1, keepdim=True)

    uncut = (top_k == vocab_size) & (top_p == 1) & (min_p == 0)
    ends_in_head = (num_kept < width) | (top_k <= width)
    knows_top_k_mass = (top_k <= width) | (top_k == vocab_size)
    mass = torch.where(ends_in_head, cumulative.gather(1, num_kept - 1), total)
    target = _scale(mass, draw_high, draw_low)
    index = (cumulative <= target).sum(-1, keepdim=True)
    decided = knows_top_k_mass & (ends_in_head | uncut) & (index < width)
    return torch.where(decided, ids.gather(1, index.clamp(max=width - 1)), -1).squeeze(1)


def report(values: Tensor, token_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities float64 (rows, 1 + width) and token ids int64 (rows, width).

    The log-probabilities are of the drawn token and of the likeliest tokens; the ids are of the likeliest.
    """
    top_ids = _likeliest(values, max(width, 1))
    largest = values.gather(1, top_ids[:, :1])
    temperature = torch.ones_like(largest, dtype=torch.float64)
    total = _weights(values, largest, temperature, values.shape[1]).sum(-1, keepdim=True)
    log_total = largest + (total.to(torch.float64) / 2.0 ** _weight_bits(values.shape[1])).log()
    top_ids = top_ids[:, :width]
    return values.gather(
        1, torch.cat((token_ids.unsqueeze(1), top_ids), dim=1)
    ) - log_total, top_ids


def _likeliest(values: Tensor, width: int) -> Tensor:
    """Return the ids of the `width` largest values of each row, in the order of tokens."""
    keys = _sort_keys(values)
    if width < values.shape[1]:
        keys = keys.topk(width, dim=-1).values
    else:
        keys = keys.sort(dim=-1, descending=True).values
    return (-keys) & 0xFFFF_FFFF


def _sort_keys(values: Tensor) -> Tensor:
    """Return distinct int64 keys that sort by larger value, then by lower id.

    Invert the bits of negative numbers, so that float32 bit patterns sort as integers in the order of the
    floats. Adding zero turns -0 into +0, because the two must tie.
    """
    bits = (values + 0.0).view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFF_FFFF
    ids = torch.arange(values.shape[1], device=values.device)
    return (bits.to(torch.int64) << 32) - ids


def _weight_bits(vocab_size: int) -> int:
    """Return s such that vocab_size weights of at most 2^s sum to less than 2^62."""
    return 62 - vocab_size.bit_length()


def _weights(values: Tensor, largest: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """Return fixed-point probabilities relative to the likeliest token, whose weight is 2^s."""
    exponent = (values.to(torch.float64) - largest).div_(temperature)
    return exponent.exp_().mul_(2.0 ** _weight_bits(vocab_size)).to(torch.int64)


def _scale(mass: Tensor, draw_high: Tensor, draw_low: Tensor) -> Tensor:
    """Return floor(mass * draw / 2^62), exactly, for mass < 2^62 and a draw of two 31-bit limbs.

    With mass = a 2^31 + b, every product and sum below stays under 2^63.
    """
    mass_high, mass_low = mass >> 31, mass & 0x7FFF_FFFF
    middle = mass_high * draw_low + mass_low * draw_high + ((mass_low * draw_low) >> 31)
    return mass_high * draw_high + (middle >> 31)


def uniform_limbs(seed: int, position: int) -> tuple[int, int]:
    """Return the random number of a token: (high, low) of 31 bits each, uniform in 0..2^62-1."""
    counter = (position & 0xFFFF_FFFF, position >> 32, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & 0xFFFF_FFFF, seed >> 32))
    return high >> 1, low >> 1


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Compute Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011): ten rounds of multiply and exchange."""
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
