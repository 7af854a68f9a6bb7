"""Execute iterations on a model with torch, and sample their tokens.

`launch` gives the swaps to the copier, and the forward and the sampling to the device.  `collect` waits for
the sampled ids, turns them into text and reports finished copies.  One thread calls both.  The contract of
core.iteration is kept as follows:

* The forward does page copies layer by layer: after the layer's swap-ins have arrived, and before the layer's
  pages are written.  An iteration without slices does all page copies at once.
* For an iteration without slices, `collect` waits until one outstanding copy has finished.
* Tokens of turns with a constraint are sampled under masks.  Threads make the masks while the forward runs
  (constraints.py).
* A row of logits with NaN or infinity fails only its own turn.  Rows of a batch affect each other only in
  attention, and attention reads only the pages of the row's own turn.  Slots that were never written affect
  no result.

At depth 2 an iteration may be launched before the previous iteration is collected.  The new iteration then
uses sampled tokens that only the device knows:

    launch n      forward n ─ sample n ─> ids of n (on the device) ─── one copy ───> collect n
    launch n + 1  ids of n into the batch ─> forward n + 1 ─ sample n + 1 ─> …

Replies and logprobs are bit for bit the same as at depth 1, because each step has all of its inputs:

* A slice holds copies of what it needs (core/iteration.py), and the sampler can work with a log that lacks
  its last token.
* `collect n` runs after `collect n - 1`, so text and stop strings see the same log as at depth 1.  If the
  turn has ended meanwhile, only the token's id is reported.

The executor keeps a turn's log and the text of its reply, from the iteration that lists the turn as started
to the iteration that lists it as ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from pensieve.core.iteration import (
    Iteration,
    Outcome,
    PageGroup,
    SampledToken,
    Slice,
    TurnFailure,
    TurnStart,
)
from pensieve.model.batch import SampledIds
from pensieve.model.constraints import TurnConstraints
from pensieve.model.forward import Computed, Forward, is_out_of_memory
from pensieve.model.graphs import DecodeGraphs
from pensieve.model.kv.checksums import PageChecksums
from pensieve.model.kv.copier import copier_for
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel
from pensieve.model.sampling.penalties import Row, TurnLog
from pensieve.model.sampling.sampler import Drawn, Sampler
from pensieve.text.reply import ReplyText
from pensieve.text.tokenizer import Tokenizer


class _Reply(NamedTuple):
    """The state of a running turn."""

    log: TurnLog
    text: ReplyText


class _Launched(NamedTuple):
    """An iteration that is launched and not yet collected."""

    has_slices: bool
    sampled: list[Slice]
    drawn: Drawn | None  # a token for each sampled slice
    groups: tuple[PageGroup, ...]
    failures: Mapping[int, TurnFailure]  # by attempt_id: turns whose sampled token must not be used


class TorchExecutor:
    """Execute iterations on one model and one KV memory."""

    def __init__(
        self,
        model: LoadedModel,
        memory: KVMemory,
        sampler: Sampler,
        tokenizer: Tokenizer,
        depth: int | None = None,
        graphs: DecodeGraphs | None = None,
        checksums: PageChecksums | None = None,
    ) -> None:
        """The sampler's `eos_token_ids`, from the checkpoint and the chat template, end a turn.

        `depth` None means 1 on a CPU and 2 on a GPU.  On a CPU `launch` itself computes, so depth 2 would
        gain nothing.
        """
        self.depth = depth or (1 if memory.device_arena.device.type == "cpu" else 2)
        assert self.depth in (1, 2), "the scheduler plans one iteration ahead"
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._copier = copier_for(memory)
        self._checksums = checksums
        flat = model.flat
        self._forward = Forward(flat, memory, self._copier, may_halve=flat.alone, graphs=graphs)
        self._replies: dict[int, _Reply] = {}  # by attempt_id
        self.constraints = TurnConstraints(tokenizer, sampler.eos_token_ids, sampler.vocab_size)
        self._launched: deque[_Launched] = deque()

    @torch.inference_mode()
    def launch(self, iteration: Iteration) -> None:
        """Start the iteration's copies, its slices and its samples."""
        assert len(self._launched) < self.depth, "an earlier iteration was not collected"
        self._copier.submit(iteration.swap_ins, iteration.swap_outs)
        if self._checksums is not None:
            self._checksums.begin(iteration.swap_outs)
        for start in iteration.started:
            self._replies[start.attempt_id] = self._start_reply(start)
        for attempt_id in iteration.ended:
            self._forget(attempt_id)
        copies = self._forward.page_copies(iteration)
        sampled = [piece for piece in iteration.slices if piece.needs_token]
        drawn: Drawn | None = None
        failures: Mapping[int, TurnFailure] = {}
        if iteration.slices:
            rows = [Row(self._replies[each.attempt_id].log, each.stop) for each in sampled]
            jobs = self.constraints.start_masks(rows)
            computed = self._forward.run(
                iteration.slices, copies, self._sampled_ids(), iteration.groups
            )
            if jobs.ahead:
                self.constraints.start_ahead(jobs, rows, self._newest_ids())
            if sampled:
                rows, failures = self.constraints.masks(jobs, rows)
                drawn = self._draw(computed, rows)
        elif copies is not None:
            self._forward.copy_pages(copies)
        self._copier.launch_rest()
        has_slices = bool(iteration.slices)
        self._launched.append(_Launched(has_slices, sampled, drawn, iteration.groups, failures))

    @torch.inference_mode()
    def collect(self) -> Outcome:
        """Wait for the oldest launched iteration and return its outcome."""
        assert self._launched, "no iteration is launched"
        launched = self._launched.popleft()
        samples, failures = self._read(launched)
        finished = self._copier.poll() if launched.has_slices else self._copier.wait_any()
        if self._checksums is not None:
            self._checksums.finish(finished)
            if launched.groups:
                self._forward.wait_stored()
                self._checksums.stored(launched.groups)
        return Outcome(tuple(samples), finished, tuple(failures))

    @property
    def rows_padded(self) -> int:
        """Padding rows that captured graphs have computed since the start."""
        return self._forward.rows_padded

    def close(self) -> None:
        """Stop the copier and the streamer; nothing can be launched afterwards."""
        self.constraints.close()
        self._forward.close()
        self._copier.close()

    def _draw(self, computed: Computed, rows: list[Row]) -> Drawn:
        try:
            return self._sampler.draw(computed.logits, rows, computed.newest_ids)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        if computed.logits.is_cuda:
            torch.cuda.empty_cache()
        return self._sampler.draw(computed.logits, rows, computed.newest_ids)

    def _sampled_ids(self) -> SampledIds | None:
        """Return the tokens that the last launched iteration samples, if it is not collected yet."""
        if not self._launched or (drawn := self._launched[-1].drawn) is None:
            return None
        rows = {each.attempt_id: row for row, each in enumerate(self._launched[-1].sampled)}
        return SampledIds(drawn.ids, rows)

    def _newest_ids(self) -> dict[int, int]:
        """Wait for the last launched iteration's sampled ids; return them by attempt_id.

        This does not wait for the forward of the iteration that is now being launched.
        """
        launched = self._launched[-1]
        assert launched.drawn is not None
        ids = launched.drawn.read_ids()
        return {
            each.attempt_id: each_id for each, each_id in zip(launched.sampled, ids, strict=True)
        }

    def _forget(self, attempt_id: int) -> None:
        self._replies.pop(attempt_id, None)
        self.constraints.end(attempt_id)

    def _read(self, launched: _Launched) -> tuple[list[SampledToken], list[TurnFailure]]:
        samples: list[SampledToken] = []
        failures: list[TurnFailure] = []
        drawn = launched.drawn.read() if launched.drawn is not None else []
        for piece, token in zip(launched.sampled, drawn, strict=True):
            attempt_id = piece.attempt_id
            if (failure := launched.failures.get(attempt_id)) is not None:
                failures.append(failure)
                continue
            if token is None:
                message = f"the model's logits at position {piece.stop - 1} are not finite"
                failures.append(TurnFailure(attempt_id, "NAN_LOGITS", message))
                continue
            reply = self._replies.get(attempt_id)
            if reply is None or len(reply.log.tokens) != piece.stop:  # the turn has ended meanwhile
                samples.append(SampledToken(attempt_id, token.token_id))
                continue
            reply.log.tokens.append(token.token_id)
            text, stopped = reply.text.push(token.token_id, piece.is_last)
            if stopped or piece.is_last:
                self._forget(attempt_id)
            samples.append(replace(token, text=text, stopped=stopped, repeats=reply.text.repeats))
        return samples, failures

    def _start_reply(self, start: TurnStart) -> _Reply:
        self.constraints.begin(start)
        sampling = start.sampling
        eos = frozenset() if sampling.ignore_eos else self._sampler.eos_token_ids
        end_token_ids = eos | frozenset(sampling.stop_token_ids)
        text = ReplyText(
            self._tokenizer,
            end_token_ids,
            sampling.stop,
            sampling.min_tokens,
            sampling.stop_repetition,
            continues_text=start.continues_text,
        )
        return _Reply(TurnLog.of(start), text)
