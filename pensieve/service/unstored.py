"""Turns that leave nothing on disk: a prompt of token ids, and a reply that only its readers get.

    prompt ──> checked ──> LiveTurn ──> the engine ──> its readers
                                │
                                └─ ended, however: the engine forgets it

An unstored turn belongs to no conversation.  To the engine it is the only turn of one whose name no client
can say (`unstored_key`); to the rest of the service it is a `LiveTurn` like any other, so that its readers,
a slow one, a cancel, a client that leaves, a drain and the end of the engine are what they are elsewhere.
What differs:

* Nothing of it is written: the store is not asked at its beginning and hears nothing of its end
  (turn_ends.py).  The log of the daemon has its figures, as of every turn, and no text.
* It brings all of its tokens, and keeps them while it is suspended.  So the engine never asks for its log.
* It is not begun twice under one request: who sends it again gets another turn.
* Its id is negative and made from what is asked, so that a prompt that kills the engine is known when it is
  sent again (suspects.py).  It tells nobody the prompt: Python salts such digests in each process.  Of those
  that run at once, each has its own.

All of it belongs to the loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from pensieve.core.turn import TurnOptions
from pensieve.engine.messages import DeleteConversation, Message, SubmitTurn
from pensieve.errors import ContextFull, InvalidArgument, PensieveError
from pensieve.service.history import PROMPT_TAIL_TOKENS, UNNUMBERED
from pensieve.service.live_turn import LiveTurn, Unstored, unstored_key
from pensieve.service.readers import Readers
from pensieve.service.turns import Turns

ID_BITS = 62


class UnstoredTurns:
    def __init__(
        self,
        turns: Turns,
        readers: Readers,
        loop: asyncio.AbstractEventLoop,
        put: Callable[[Message], None],
        weight_of: Callable[[str], float],
    ) -> None:
        self._turns, self._readers, self._loop = turns, readers, loop
        self._put, self._weight_of = put, weight_of

    def begin(self, prompt: array[int], options: TurnOptions, tenant: str, seed: int) -> LiveTurn:
        """A turn of a prompt that was checked; the seed is for one that names none."""
        sampling = replace(options.sampling, seed=options.sampling.seed or seed)
        unstored = Unstored(
            self._id(prompt, tenant),
            tenant,
            SubmitTurn(UNNUMBERED, "", prompt.tobytes(), 0, replace(options, sampling=sampling)),
            prompt[-PROMPT_TAIL_TOKENS:],
        )
        now = self._loop.time()
        live, submit = self._turns.begin_unstored(unstored, now, self._weight_of(tenant))
        live.arrived_at = now
        try:
            self._put(submit)
        except PensieveError as error:
            self._turns.interrupt(live)  # nobody is told: the engine has not heard of it
            self._turns.fail(live, error)
            raise
        self._readers.start_grace(live)  # until its first reader comes
        return live

    def ended(self, live: LiveTurn) -> Message:
        """What the engine is to hear of a turn that has ended."""
        return DeleteConversation(unstored_key(live.tenant, live.number))

    def _id(self, prompt: array[int], tenant: str) -> int:
        turn_id = -1 - hash((tenant, prompt.tobytes())) % (1 << ID_BITS)
        while self._turns.of_turn(turn_id) is not None:
            turn_id -= 1
        return turn_id


def checked(
    prompt: Sequence[int], options: TurnOptions, vocab_size: int, context_max: int
) -> array[int]:
    """The tokens of a prompt that this model can be given, or our error."""
    if (problem := options.sampling.problem(vocab_size)) is not None:
        raise InvalidArgument(f"sampling.{problem[0]}", problem[1])
    if not len(prompt):
        raise InvalidArgument("prompt", "must not be empty")
    if len(prompt) >= context_max:
        raise ContextFull(len(prompt) + 1, context_max)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidArgument("prompt", f"token ids must lie in 0..{vocab_size - 1}")
    return array("I", prompt)
