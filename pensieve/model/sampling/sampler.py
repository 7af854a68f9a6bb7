"""Sample a token for each row of logits by all fields of the row's `Sampling`, as if the row were alone.

**Steps for a row**, in this order:

1. A row with NaN or infinite raw logits yields None: only that turn fails.
2. The repetition penalty applies to the ids of the whole context: a positive logit is divided by the
   penalty, a negative logit is multiplied by it.  Presence and frequency penalties apply to the ids of this
   reply.  Then logit_bias is added.  The results are clamped to the range of float32.
3. Until `min_tokens` outputs exist, end-of-turn ids and stop_token_ids are masked.  With
   `ignore_eos` an end-of-turn id is an ordinary token.  A mask that would leave no token is not applied.
4. If the turn has a constraint, tokens that its mask forbids are left out (masks.py).  If the mask allows
   only the end of the reply, step 3 is skipped.
5. Temperature 0 takes the largest logit; the lowest id wins a tie.  Otherwise temperature, top_k,
   top_p (over the tokens that top_k keeps, renormalised) and min_p (relative to the likeliest token) are
   applied, and one of the remaining tokens is drawn.  At least one token always remains.

Columns beyond `vocab_size` (padding of the output matrix) are never read.  `logprob` and `top_logprobs` are
the log-softmax after step 3, before constraint, temperature and cuts: the model's own probabilities, with the
client's penalties and biases.  `top_logprobs` lists the likeliest tokens, even if the sampled token is not
among them, and never a masked token.

**Drawing** is in draw.py.  A row's token depends on its logits, its `Sampling` and its position in the log,
never on other rows of the batch.

**State** is `Penalties` (penalties.py).  It is derived from the turn's log and can be dropped at any time.

**One token ahead.**  The log may lack the token before the drawn token (`Row.is_ahead`).  That token is then
on the device but not yet on the host.  Steps that need only the position (the random number, min_tokens) use
the position.  The penalties need the token itself.  Each batch copies `seen` and `counts` anyway, and the
token is added to these copies on the device.  So the row is treated as if its log were complete, and the
state includes only tokens of the log.

**No waiting for the device.**  `draw` only launches work.  A row that is not finite gets the id -1 on the
device (and is computed as zeros, so that no index is out of range).  `Drawn.read` waits for one copy of
everything that the host needs.

Greedy rows without other options cost one argmax.  Other rows are processed a few at a time (the two
`…_PASS_ELEMENTS_MAX`).  This bounds the memory and, on a CPU, keeps a row in the cache: processing rows of
150,000 logits one by one is seven to nine times as fast as eight rows together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pensieve.core.iteration import Logprob, SampledToken
from pensieve.kernels.layer import cpu as dense
from pensieve.model.sampling.draw import column, draw, report, select
from pensieve.model.sampling.masks import masked
from pensieve.model.sampling.penalties import Penalties, Row, TurnLog, counts_reply
from pensieve.model.transfer import ReadBack, indices, reading_is_free

CPU_PASS_ELEMENTS_MAX = 2**18  # logits processed at once, but at least one row
DEVICE_PASS_ELEMENTS_MAX = 2**23  # about 300 MB of int64 and float64 on an accelerator
FLOAT32_MAX = torch.finfo(torch.float32).max


class _Report(NamedTuple):
    """Values to copy to the host for rows with `logprobs`: int64 (rows, 1 + width + width).

    They are the log-probabilities of the drawn token and of the likeliest tokens (the bits of float64), then
    the ids of the likeliest tokens.
    """

    rows: list[int]
    num_top: list[int]  # for each row
    values: Tensor


class Drawn:
    """Tokens that the device draws, and their pending copy to the host."""

    def __init__(self, rows: Sequence[Row], ids: Tensor, reports: list[_Report]) -> None:
        self._rows = rows
        self.ids = ids  # int64 (rows), on the device; -1 for a row that was not finite
        self._reports = reports
        reported = [each.values.flatten() for each in reports]
        self._read_back = ReadBack(torch.cat([ids, *reported]) if reported else ids)

    def read_ids(self) -> list[int]:
        """Wait for the ids; -1 means that a row of logits was not finite."""
        found: list[int] = self._read_back.wait()[: len(self.ids)].tolist()
        return found

    def read(self) -> list[SampledToken | None]:
        """Wait for the tokens, without text; None means that a row of logits was not finite."""
        arrived = self._read_back.wait()
        token_ids = arrived[: len(self.ids)].tolist()
        sampled = [
            SampledToken(row.log.attempt_id, token_id) if token_id >= 0 else None
            for row, token_id in zip(self._rows, token_ids, strict=True)
        ]
        offset = len(token_ids)
        for rows, num_top, on_device in self._reports:
            reported = arrived[offset : offset + on_device.numel()].view(on_device.shape)
            offset += on_device.numel()
            width = (reported.shape[1] - 1) // 2
            logprobs = reported[:, : 1 + width].contiguous().view(torch.float64).tolist()
            top_ids = reported[:, 1 + width :].tolist()
            for row, num, ids, values in zip(rows, num_top, top_ids, logprobs, strict=True):
                if token_ids[row] >= 0:
                    top = zip(ids[:num], values[1 : num + 1], strict=True)
                    possible = tuple(Logprob(*each) for each in top if each[1] > -math.inf)
                    sampled[row] = SampledToken(
                        self._rows[row].log.attempt_id,
                        token_ids[row],
                        logprob=values[0],
                        top_logprobs=possible,
                    )
        return sampled


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()) -> None:
        assert vocab_size > 0
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, logs: Sequence[TurnLog]) -> list[SampledToken | None]:
        """Draw the next token of each turn and wait for it.  The logs must be complete."""
        return self.draw(logits, [Row(log, len(log.tokens)) for log in logs]).read()

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Sequence[Row], newest_ids: Tensor | None = None) -> Drawn:
        """Start drawing a token for each row of `logits` (rows, vocab).

        `newest_ids` (rows), on the device, are the tokens before the drawn tokens, for rows that are ahead.
        """
        assert logits.shape[0] == len(rows), (logits.shape, len(rows))
        logits = logits[:, : self.vocab_size].float()
        ids = _likeliest_of_each(logits)
        others = [row for row, each in enumerate(rows) if not _is_plain(each)]
        on_cpu = logits.device.type == "cpu"
        elements_max = CPU_PASS_ELEMENTS_MAX if on_cpu else DEVICE_PASS_ELEMENTS_MAX
        rows_max = max(1, elements_max // logits.shape[1])
        reports: list[_Report] = []
        for first in range(0, len(others), rows_max):
            part = others[first : first + rows_max]
            index = indices(part, logits.device)
            is_finite = ids.index_select(0, index) >= 0
            values = logits.index_select(0, index)
            if not (reading_is_free(values) and bool(is_finite.all())):
                values.masked_fill_(~is_finite.unsqueeze(1), 0.0)
            newest = newest_ids.index_select(0, index) if newest_ids is not None else None
            drawn = self._draw_part(values, [rows[row] for row in part], newest)
            ids.index_copy_(0, index, torch.where(is_finite, drawn, -1))
            reported = [n for n, row in enumerate(part) if rows[row].sampling.logprobs is not None]
            if reported:
                num_top = [rows[part[n]].sampling.logprobs or 0 for n in reported]
                logprobs, top_ids = report(
                    select(values, reported),
                    select(drawn, reported),
                    min(max(num_top), self.vocab_size, values.shape[1]),
                )
                to_host = torch.cat((logprobs.view(torch.int64), top_ids), dim=1)
                reports.append(_Report([part[n] for n in reported], num_top, to_host))
        return Drawn(rows, ids, reports)

    def _draw_part(self, values: Tensor, rows: list[Row], newest_ids: Tensor | None) -> Tensor:
        """Draw for some rows; adjust `values` (rows, vocab) in place, but mask a copy."""
        self._adjust(values, rows, newest_ids)
        masked_rows = [n for n, row in enumerate(rows) if row.mask is not None]
        if masked_rows:
            values = masked(
                values, masked_rows, [mask for row in rows if (mask := row.mask) is not None]
            )
        drawn_rows = [n for n, row in enumerate(rows) if row.sampling.temperature > 0]
        if len(drawn_rows) == len(rows):
            return draw(values, rows)
        token_ids = values.argmax(-1)
        if drawn_rows:
            drawn = draw(select(values, drawn_rows), [rows[n] for n in drawn_rows])
            token_ids.index_copy_(0, indices(drawn_rows, values.device), drawn)
        return token_ids

    def _adjust(self, values: Tensor, rows: list[Row], newest_ids: Tensor | None) -> None:
        """Apply penalties, biases and the min_tokens mask, in place, to the rows that have any."""
        states = {
            n: self._penalties_of(row.log, values) for n, row in enumerate(rows) if _adjusts(row)
        }
        if not states:
            return
        options = [row.sampling for row in rows]
        repeated = [n for n in states if options[n].repetition_penalty != 1]
        if repeated:
            index = indices(repeated, values.device)
            penalties = [options[n].repetition_penalty for n in repeated]
            penalty = column(penalties, values, torch.float32)
            seen = torch.stack([states[n].seen for n in repeated])
            if (previous := _previous_ids(rows, repeated, newest_ids, seen)) is not None:
                previous_ids, is_ahead = previous
                seen.scatter_(1, previous_ids, seen.gather(1, previous_ids) | is_ahead)
            before = values.index_select(0, index)
            after = torch.where(before < 0, before * penalty, before / penalty)
            values.index_copy_(0, index, torch.where(seen, after, before))
        counted = [n for n in states if counts_reply(options[n])]
        if counted:
            index = indices(counted, values.device)
            presences = [options[n].presence_penalty for n in counted]
            frequencies = [options[n].frequency_penalty for n in counted]
            counts = torch.stack([states[n].counts for n in counted])
            if (previous := _previous_ids(rows, counted, newest_ids, counts)) is not None:
                previous_ids, is_ahead = previous
                counts.scatter_add_(1, previous_ids, is_ahead.to(torch.int32))
            values[index] -= counts * column(frequencies, values, torch.float32)
            values[index] -= (counts > 0) * column(presences, values, torch.float32)
        for n, state in states.items():
            if state.bias is not None:
                ids, biases = state.bias
                values[n].index_add_(0, ids, biases)
        values.clamp_(-FLOAT32_MAX, FLOAT32_MAX)
        for n, state in states.items():
            if _is_masked(rows[n]) and len(state.ending_ids) < values.shape[1]:
                values[n].index_fill_(0, state.ending_ids, -math.inf)

    def _penalties_of(self, log: TurnLog, values: Tensor) -> Penalties:
        if log.penalties is None:
            log.penalties = Penalties.of(log.sampling, self.eos_token_ids, values)
        log.penalties.follow(log)
        return log.penalties


def _likeliest_of_each(logits: Tensor) -> Tensor:
    """Return the largest logit's id in each row, the lowest id in a tie, -1 for a row that is not finite."""
    if logits.device.type == "cpu" and logits.stride(1) == 1 and dense.available(torch.float32):
        return dense.argmax(logits)
    lowest, highest = logits.aminmax(dim=-1)  # both are NaN if any logit is NaN
    return torch.where(lowest.isfinite() & highest.isfinite(), logits.argmax(-1), -1)


def _previous_ids(
    rows: list[Row], row_numbers: list[int], newest_ids: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the id of the token before the drawn token, and whether the log lacks it, both (rows, 1).

    Return None if no row is ahead.
    """
    if not any(rows[n].is_ahead for n in row_numbers):
        return None
    assert newest_ids is not None, "a row is ahead, but newest_ids are missing"
    previous_ids = newest_ids.index_select(0, indices(row_numbers, like.device)).clamp(
        0, like.shape[1] - 1
    )
    return previous_ids.unsqueeze(1), column(
        [rows[n].is_ahead for n in row_numbers], like, torch.bool
    )


def _is_plain(row: Row) -> bool:
    sampling = row.sampling
    plain = sampling.temperature == 0 and sampling.logprobs is None and row.mask is None
    return plain and not _adjusts(row)


def _adjusts(row: Row) -> bool:
    sampling = row.sampling
    return (
        sampling.repetition_penalty != 1
        or counts_reply(sampling)
        or bool(sampling.logit_bias)
        or _is_masked(row)
    )


def _is_masked(row: Row) -> bool:
    if row.mask is not None and row.mask.must_end:
        return False
    return row.position - row.log.prompt_end < row.sampling.min_tokens
