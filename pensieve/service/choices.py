"""Several replies to one prompt: the first one computes it, the others begin behind it.

Turns that begin at once would each compute the prompt.  So the others wait until the first has its first
token: then the engine has the prompt's KV, and they begin as forks of it.  Whoever waits for that is a reader
of the first turn, so that it lives meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from pensieve.core.turn import TurnOptions
from pensieve.service.conversations import Conversations
from pensieve.service.daemon import Daemon
from pensieve.service.live_turn import LiveTurn


class _Came(Exception):
    """The first token has come; no more is to be read."""


async def prompt_computed(conversations: Conversations, live: LiveTurn) -> None:
    """Until a turn has its first token or has ended; if it has failed, its error."""

    async def write(start: int, stop: int) -> None:
        raise _Came

    try:
        await conversations.follow(live, write)
    except _Came:
        return


async def begin_unstored(
    daemon: Daemon,
    prompt: Sequence[int],
    choices: Sequence[TurnOptions],
    tenant: str,
) -> AsyncIterator[LiveTurn]:
    """An unstored turn for each choice; those that have begun are the caller's to end."""
    for number, options in enumerate(choices):
        live = await daemon.begin_unstored(prompt, options, tenant)
        yield live
        if not number and len(choices) > 1:
            await prompt_computed(daemon.conversations, live)
