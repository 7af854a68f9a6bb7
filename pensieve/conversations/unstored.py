"""Run turns that leave nothing on disk: a prompt of token ids, and a reply for its followers only.

    prompt ──> check_prompt ──> LiveTurn ──> the engine ──> its followers
                                   │
                                   └─ ended: its KV is idle in the engine, for prompts with the same beginning

An unstored turn belongs to no conversation. The engine knows it by a key that no client can use
(`unstored_key`). For the rest of the service it is a `LiveTurn` like any other, with these differences:

* It is never stored.
* Its SubmitTurn has all of its tokens, so the engine never asks for its log.
* It has no request_id, so a retry gets another turn.
* Its id is a negative number made from a salted hash of the prompt. So if a prompt kills the engine, that
  prompt is recognised when it is sent again (`Suspects`).

Its conversation in the engine is temporary: it has no further turn. Its KV stays cached like any other, and a
later prompt with the same beginning finds the chunks by their content (core/content.py).

Everything belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace

from pensieve.conversations.admission import Admission
from pensieve.conversations.engine_client import EngineClient
from pensieve.conversations.followers import TurnFollowers
from pensieve.conversations.history import NO_ATTEMPT_ID, PROMPT_TAIL_TOKENS
from pensieve.conversations.live_turn import LiveTurn
from pensieve.conversations.turns import Turns
from pensieve.core.turn import TurnOptions
from pensieve.engine.messages import SubmitTurn
from pensieve.errors import ContextFull, InvalidArgument

ID_BITS = 62


class UnstoredTurns:
    def __init__(
        self,
        turns: Turns,
        followers: TurnFollowers,
        loop: asyncio.AbstractEventLoop,
        engine: EngineClient,
        admission: Admission,
    ) -> None:
        self._turns, self._followers, self._loop = turns, followers, loop
        self._engine, self._admission = engine, admission

    def begin(
        self, prompt: array[int], options: TurnOptions, tenant: str, root: str, seed: int
    ) -> LiveTurn:
        """Begin a turn with a prompt that `check_prompt` has returned.

        `seed` applies if the options have none. `root`: the root of the identities of the tenant's chunks.
        """
        sampling = replace(options.sampling, seed=options.sampling.seed or seed)
        submit = SubmitTurn(
            *(NO_ATTEMPT_ID, "", prompt.tobytes(), 0, replace(options, sampling=sampling)),
            root=root,
            is_temporary=True,
        )
        turn_id, prompt_end = self._id(prompt, tenant), prompt[-PROMPT_TAIL_TOKENS:]
        now = self._loop.time()
        weight = self._admission.weight_of(tenant, now)
        live, submit = self._turns.new_unstored(turn_id, tenant, submit, prompt_end, now, weight)
        live.accepted_at = now
        self._admission.prompts.submitted(live)
        self._turns.check_suspect(live)
        self._engine.put(submit)
        self._turns.add(live)
        self._followers.start_grace(live)  # until its first follower comes
        return live

    def _id(self, prompt: array[int], tenant: str) -> int:
        turn_id = -1 - hash((tenant, prompt.tobytes())) % (1 << ID_BITS)
        while self._turns.of_turn(turn_id) is not None:
            turn_id -= 1
        return turn_id


def check_prompt(
    prompt: Sequence[int], options: TurnOptions, vocab_size: int, context_max: int
) -> array[int]:
    """Check a prompt and its options against the model, and return the prompt's tokens."""
    if (problem := options.sampling.problem(vocab_size)) is not None:
        raise InvalidArgument(f"sampling.{problem[0]}", problem[1])
    if not len(prompt):
        raise InvalidArgument("prompt", "must not be empty")
    if len(prompt) >= context_max:
        raise ContextFull(len(prompt) + 1, context_max)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidArgument("prompt", f"token ids must lie in 0..{vocab_size - 1}")
    return array("I", prompt)
