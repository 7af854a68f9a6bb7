"""An iteration made real with torch: the executor that serves.

`launch` hands the swaps to the copier and runs the forward; `collect` samples, turns tokens into
text and says which copies have finished.  The contract is in core.iteration:

* page copies happen layer by layer inside the forward, before that layer is written, after it has
  waited for the swap-ins; an iteration without slices does them at once;
* an iteration without slices is collected when one outstanding copy has finished;
* a row of logits with NaN or infinity fails its turn and no other: rows of a flat batch meet only
  in attention, which reads one turn's pages, and slots that nobody wrote reach no result.

The executor is synchronous: `launch`, then `collect`, from one thread.  It reads turns and writes
nothing of them but `decoding`.
"""

from __future__ import annotations

import torch

from pensieve.core.iteration import Iteration, Outcome, Sample, TurnFailure
from pensieve.core.turn import Turn
from pensieve.errors import DeviceError
from pensieve.model.attention import PagedPass
from pensieve.model.batch import Batch
from pensieve.model.copier import Copier
from pensieve.model.decoding import Decoding
from pensieve.model.kv_memory import KVMemory, PageMoves
from pensieve.model.loader import LoadedModel
from pensieve.model.sampler import Sampler
from pensieve.text.tokenizer import Tokenizer


class TorchExecutor:
    """Carries out iterations on one model and one KV memory."""

    def __init__(
        self,
        model: LoadedModel,
        memory: KVMemory,
        sampler: Sampler,
        tokenizer: Tokenizer,
    ) -> None:
        """The sampler's `eos_token_ids` end a turn: the checkpoint's and the chat template's."""
        self.depth = 1
        self._model = model
        self._memory = memory
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._copier = Copier(memory)
        self._launched: Iteration | None = None
        self._logits: torch.Tensor | None = None  # (rows, vocab) of the launched iteration
        self._logit_turns: tuple[Turn, ...] = ()

    @torch.inference_mode()
    def launch(self, iteration: Iteration) -> None:
        """Start the iteration's copies and compute its slices."""
        assert self._launched is None, "the last iteration was not collected"
        self._launched = iteration
        self._copier.submit(iteration.swap_ins, iteration.swap_outs)
        copies = PageMoves.from_copies(iteration.copies) if iteration.copies else None
        if iteration.slices:
            batch = Batch.from_slices(iteration.slices, self._memory.chunk_tokens)
            self._logits = self._forward(batch, copies)
            self._logit_turns = batch.logit_turns
        elif copies is not None:
            for layer in range(self._memory.shape.num_layers):
                self._copier.wait_layer(layer)
                self._memory.copy_within(layer, copies)

    @torch.inference_mode()
    def collect(self) -> Outcome:
        """What the launched iteration brought."""
        iteration, self._launched = self._launched, None
        assert iteration is not None, "no iteration is launched"
        samples, failures = self._sample()
        finished = self._copier.poll() if iteration.slices else self._copier.wait_any()
        return Outcome(tuple(samples), finished, tuple(failures))

    def close(self) -> None:
        """End the copier; nothing can be launched afterwards."""
        self._copier.close()

    def _forward(self, batch: Batch, copies: PageMoves | None) -> torch.Tensor:
        forward_pass = PagedPass(batch, self._memory, self._copier.wait_layer, copies)
        try:
            logits = self._model.flat.logits(
                batch.input_ids, batch.positions, batch.logit_rows, forward_pass
            )
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "not enough memory" in str(error):
                tokens = len(batch.input_ids)
                raise DeviceError(f"out of memory in a batch of {tokens} tokens") from error
            raise
        return logits.float()

    def _sample(self) -> tuple[list[Sample], list[TurnFailure]]:
        logits, turns = self._logits, self._logit_turns
        self._logits, self._logit_turns = None, ()
        samples: list[Sample] = []
        failures: list[TurnFailure] = []
        if logits is None or not turns:
            return samples, failures
        decodings = [self._decoding(turn) for turn in turns]
        sampled = self._sampler.sample(logits, turns)
        for turn, decoding, token in zip(turns, decodings, sampled, strict=True):
            if token is None:
                message = f"the model's logits at position {len(turn.tokens) - 1} are not finite"
                failures.append(TurnFailure(turn.turn_id, "NAN_LOGITS", message))
                continue
            text, finish = decoding.accept(turn, token.token_id)
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
