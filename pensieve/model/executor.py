"""An iteration made real with torch: the executor that serves.

`launch` hands the swaps to the copier, and the device the forward and the sampling; `collect` waits
for the sampled ids, turns them into text and says which copies have finished.  The contract is in
core.iteration:

* page copies happen layer by layer inside the forward, before that layer is written, after it has
  waited for the swap-ins; an iteration without slices does them at once;
* an iteration without slices is collected when one outstanding copy has finished;
* a row of logits with NaN or infinity fails its turn and no other: rows of a flat batch meet only
  in attention, which reads one turn's pages, and slots that nobody wrote reach no result.

At depth 2 an iteration may be launched before the one before it is collected, and then feeds tokens
that it alone samples:

    launch n      forward n ─ sample n ─> ids of n (on the device) ─── one copy ───> collect n
    launch n + 1  ids of n into the batch ─> forward n + 1 ─ sample n + 1 ─> …

Replies are those of depth 1, to the last bit of a logprob, because whatever a step depends on is
complete when the step is taken:

* `launch` asks a turn for its tokens, its pages and its sampler's memory, and nothing later changes
  what it took: positions are captured, and the sampler is told when a log is one token short.
* `collect n` runs after `n - 1` was committed, so text, stop strings and lengths see the very log
  that they see at depth 1.  Of a turn that has ended meanwhile only the id is reported.

One thread launches and collects.  The executor reads turns and writes nothing of them but `decoding`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from pensieve.core.iteration import Iteration, Outcome, Sample, TurnFailure
from pensieve.core.turn import Turn
from pensieve.model.batch import SampledIds
from pensieve.model.forward import Computed, Forward, copier_for, is_out_of_memory
from pensieve.model.graphs import DecodeGraphs
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import LoadedModel
from pensieve.model.parallel.ranks import ParallelModel
from pensieve.model.reply import Decoding
from pensieve.model.sampling.draw import Row
from pensieve.model.sampling.sampler import Drawn, Sampler
from pensieve.text.tokenizer import Tokenizer


class _Launched(NamedTuple):
    """An iteration that is not collected."""

    iteration: Iteration
    rows: list[Row]  # that are sampled
    drawn: Drawn | None  # for each of them


class TorchExecutor:
    """Carries out iterations on one model and one KV memory."""

    def __init__(
        self,
        model: LoadedModel,
        memory: KVMemory,
        sampler: Sampler,
        tokenizer: Tokenizer,
        depth: int | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """The sampler's `eos_token_ids` end a turn: the checkpoint's and the chat template's.

        On a CPU `launch` computes, so running ahead would gain nothing: its depth is 1 unless asked.
        """
        self.depth = depth or (1 if memory.device_arena.device.type == "cpu" else 2)
        assert self.depth in (1, 2), "the scheduler plans one iteration ahead"
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._copier = copier_for(memory)
        alone = not isinstance(model.flat, ParallelModel)
        self._forward = Forward(model.flat, memory, self._copier, halves=alone, graphs=graphs)
        self._launched: deque[_Launched] = deque()

    @torch.inference_mode()
    def launch(self, iteration: Iteration) -> None:
        """Start the iteration's copies, its slices and its samples."""
        assert len(self._launched) < self.depth, "an earlier iteration was not collected"
        self._copier.submit(iteration.swap_ins, iteration.swap_outs)
        copies = self._forward.page_copies(iteration)
        rows: list[Row] = []
        drawn: Drawn | None = None
        if iteration.slices:
            computed = self._forward.run(iteration.slices, copies, self._sampled_ids())
            pairs = zip(computed.turns, computed.positions, strict=True)
            rows = [Row(*each) for each in pairs]
            for turn in computed.turns:
                self._decoding(turn)  # where the sampler's memory is
            if rows:
                drawn = self._draw(computed, rows)
        elif copies is not None:
            self._forward.copy_pages(copies)
        self._launched.append(_Launched(iteration, rows, drawn))

    @torch.inference_mode()
    def collect(self) -> Outcome:
        """What the oldest launched iteration brought."""
        assert self._launched, "no iteration is launched"
        launched = self._launched.popleft()
        samples, failures = self._read(launched)
        wait = not launched.iteration.slices
        finished = self._copier.wait_any() if wait else self._copier.poll()
        return Outcome(tuple(samples), finished, tuple(failures))

    def close(self) -> None:
        """End the copier; nothing can be launched afterwards."""
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
        """Tokens that the iteration launched last samples and the core does not know."""
        if not self._launched or (drawn := self._launched[-1].drawn) is None:
            return None
        rows = {row.turn.turn_id: index for index, row in enumerate(self._launched[-1].rows)}
        return SampledIds(drawn.ids, rows)

    def _read(self, launched: _Launched) -> tuple[list[Sample], list[TurnFailure]]:
        samples: list[Sample] = []
        failures: list[TurnFailure] = []
        sampled = launched.drawn.read() if launched.drawn is not None else []
        for (turn, position), token in zip(launched.rows, sampled, strict=True):
            if token is None:
                message = f"the model's logits at position {position - 1} are not finite"
                failures.append(TurnFailure(turn.turn_id, "NAN_LOGITS", message))
                continue
            if turn.finish is not None:  # it was computed for nothing
                samples.append(Sample(turn.turn_id, token.token_id))
                continue
            assert position == len(turn.tokens), "the iteration before it was not committed"
            text, finish = self._decoding(turn).accept(turn, token.token_id)
            samples.append(
                Sample(
                    turn.turn_id,
                    token.token_id,
                    finish,
                    text,
                    token.logprob,
                    token.top_logprobs,
                )
            )
        return samples, failures

    def _decoding(self, turn: Turn) -> Decoding:
        if turn.decoding is None:
            turn.decoding = Decoding(turn.sampling, self._tokenizer, self._sampler.eos_token_ids)
        assert isinstance(turn.decoding, Decoding)
        return turn.decoding
