"""Turns that leave nothing on disk: a prompt of token ids, and a reply that only its readers get.

    prompt ──> checked ──> LiveTurn ──> the engine ──> its readers
                                │
                                └─ ended: its KV is idle in the engine, for prompts that begin like it

An unstored turn belongs to no conversation.  To the engine it is a turn of one whose name no client can say
(`unstored_key`); to the rest of the service it is a `LiveTurn` like any other, so that its readers, a slow
one, a cancel, a client that leaves, a drain and the end of the engine are what they are elsewhere.  What
differs:

* Nothing of it is written: the store is not asked at its beginning and hears nothing of its end
  (conversations.py).  The log of the daemon has its figures, as of every turn, and no text.
* It brings all of its tokens, and keeps them while it is suspended.  So the engine never asks for its log.
* It is not begun twice under one request: who sends it again gets another turn.
* Its id is negative and made from what is asked, so that a prompt that kills the engine is known when it is
  sent again (suspects.py).  It tells nobody the prompt: Python salts such digests in each process.  Of those
  that run at once, each has its own.

**What the next one begins with** is found in unstored_prefixes.py, in whole chunks.  Where it begins with all
that is known of an idle one, it goes on as the next turn of that one, cut behind those chunks; so the engine
sees a conversation that returns.  Else it begins as a fork.  A prompt is known with its first token, a reply
when its turn has ended.  One that was given up or has failed is forgotten, in the engine too, and so is one
that is not needed any more.  The history is said to end one token behind the shared chunks, since only the
tokens before a history's last one count as having KV (core/turn.py).

All of it belongs to the loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pensieve.core.turn import TurnOptions
from pensieve.engine.messages import DeleteConversation, Message, RewindConversation, SubmitTurn
from pensieve.errors import ContextFull, InvalidArgument, PensieveError
from pensieve.service.history import PROMPT_TAIL_TOKENS, UNNUMBERED
from pensieve.service.live_turn import LiveTurn, Unstored
from pensieve.service.readers import Readers
from pensieve.service.turns import Turns
from pensieve.service.unstored_prefixes import Chain, UnstoredPrefixes

ID_BITS = 62
CHUNKS_MAX = 1 << 18  # whose digests are kept, and not more than the engine has pages


class _Running(NamedTuple):
    key: str  # the engine's name for it
    chain: Chain  # of its prompt


class UnstoredTurns:
    def __init__(
        self,
        turns: Turns,
        readers: Readers,
        loop: asyncio.AbstractEventLoop,
        put: Callable[[Message], None],
        tell: Callable[[Message], bool],
        weight_of: Callable[[str], float],
    ) -> None:
        """`put` raises where the engine does not take a message, `tell` does not."""
        self._turns, self._readers, self._loop = turns, readers, loop
        self._put, self._tell, self._weight_of = put, tell, weight_of
        self._running: dict[int, _Running] = {}  # by number
        self._keys: set[str] = set()  # of those that run
        self._prefixes, self._chunk_tokens = UnstoredPrefixes(0), 1

    def engine_started(self, num_pages: int, chunk_tokens: int) -> None:
        """Nothing has KV yet."""
        self._prefixes = UnstoredPrefixes(min(num_pages, CHUNKS_MAX))
        self._chunk_tokens = chunk_tokens

    def begin(self, prompt: array[int], options: TurnOptions, tenant: str, seed: int) -> LiveTurn:
        """A turn of a prompt that was checked; the seed is for one that names none."""
        sampling = replace(options.sampling, seed=options.sampling.seed or seed)
        submit = SubmitTurn(
            UNNUMBERED, "", prompt.tobytes(), 0, replace(options, sampling=sampling)
        )
        chain = Chain(tenant, self._chunk_tokens)
        chain.extend(prompt)
        submit = self._from_what_is_there(submit, chain, len(prompt))
        prompt_end = prompt[-PROMPT_TAIL_TOKENS:]
        unstored = Unstored(self._id(prompt, tenant), tenant, submit, prompt_end)
        now = self._loop.time()
        live, submit = self._turns.begin_unstored(unstored, now, self._weight_of(tenant))
        live.arrived_at = now
        try:
            self._put(submit)
        except PensieveError as error:
            self._turns.interrupt(live)  # nobody is told: the engine has not heard of it
            self._turns.fail(live, error)
            raise
        self._running[live.number] = _Running(submit.conversation_id, chain)
        self._keys.add(submit.conversation_id)
        self._readers.start_grace(live)  # until its first reader comes
        return live

    def prompt_computed(self, live: LiveTurn) -> None:
        """Its first token is there."""
        if (running := self._running.get(live.number)) is not None:
            self._register(running)

    def ended(self, live: LiveTurn) -> None:
        """Its readers are about to be told."""
        running = self._running.pop(live.number, None)
        if running is None:
            return
        if live.failure is None and live.num_tokens:
            reply = live.token_ids[: live.num_tokens]
            running.chain.extend(array("I", reply[:-1]))  # the last one has no KV
            self._register(running)
        else:
            self._prefixes.forget(running.key)
        self._keys.discard(running.key)
        if running.key not in self._prefixes:
            self._tell(DeleteConversation(running.key))

    def _from_what_is_there(self, submit: SubmitTurn, chain: Chain, num_tokens: int) -> SubmitTurn:
        """It begins with KV that the engine may still have; at least one token is to be computed."""
        most = (num_tokens - 1) // self._chunk_tokens
        found = self._prefixes.find(chain.digests[:most])
        if found is None:
            return submit
        shared = found.num_chunks * self._chunk_tokens
        submit = replace(submit, history_tokens=min(shared + 1, num_tokens - 1))
        if found.is_whole and found.holder not in self._keys:
            self._tell(RewindConversation(found.holder, shared))
            return replace(submit, conversation_id=found.holder)
        return replace(submit, prefix_of=found.holder, prefix_tokens=shared)

    def _register(self, running: _Running) -> None:
        for key in self._prefixes.register(running.key, running.chain.digests):
            if key not in self._keys:
                self._tell(DeleteConversation(key))

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
