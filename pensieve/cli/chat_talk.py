"""Send the messages of a chat and stream the replies to the screen.

If the user stops a reply, the conversation keeps the text that is on the screen (ctrl_c.py).
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from functools import partial
from typing import Any

from pensieve.cli.chat_sampling import ChatSampling
from pensieve.cli.chat_screen import Screen
from pensieve.cli.ctrl_c import CtrlC
from pensieve.client import Client, Conversation, Message, Reply, Restarted, Turn, Usage
from pensieve.client.requests import MessageInput
from pensieve.errors import InvalidArgument, NotFound, PensieveError, TurnInterrupted

NO_TURN = "this conversation has no turn yet"


@dataclass(frozen=True)
class TalkSettings:
    """The settings of a chat."""

    sampling: ChatSampling
    system: str  # system prompt for new conversations
    stats: bool  # show statistics after each reply


class Talk:
    """The current conversation, and the settings for new conversations."""

    def __init__(
        self, client: Client, settings: TalkSettings, ctrl_c: CtrlC, screen: Screen
    ) -> None:
        self.conversation_id = new_id()
        self.sampling = settings.sampling
        self.system = settings.system
        self.thinking = ""  # the thinking of the last reply
        self.usage: Usage | None = None  # the usage of the last turn
        self._client = client
        self._stats = settings.stats
        self._ctrl_c = ctrl_c
        self._screen = screen
        self._prefix_id = ""  # declared prefix for new conversations

    def open(self, conversation_id: str) -> None:
        """Continue the conversation with this id. If it does not exist, the first message creates it."""
        self.conversation_id = conversation_id

    def begin_under_prefix(self, prefix_id: str) -> None:
        """Start new conversations with a declared prefix. Raises NotFound if the prefix does not exist."""
        self._client.prefix(prefix_id).get()
        self._prefix_id = prefix_id

    def begin_with_system(self, system: str) -> None:
        """Start new conversations with this system prompt."""
        if self._prefix_id:
            raise InvalidArgument("/system", "the prefix has a system prompt of its own")
        self.system = system

    def check_system(self, conversation_id: str) -> None:
        """Raise an error if the conversation exists and has another system prompt than the settings."""
        conversation = self._client.conversation(conversation_id)
        try:
            first = next(conversation.messages(), None)
        except NotFound:
            return
        existing = first.text if first is not None and first.role == "system" else ""
        if self.system != existing:
            difference = "with another system prompt" if existing else "without a system prompt"
            raise InvalidArgument(
                "--system", f"the conversation {conversation_id} exists already, {difference}"
            )

    def say(self, message: MessageInput, **options: Any) -> Reply:
        """Send a message and stream the reply to the screen. `options` override the settings."""
        conversation = self.conversation
        if self.system or self._prefix_id:
            system = "" if self._prefix_id else self.system
            try:
                conversation.get()
            except NotFound:
                conversation.create(system_prompt=system, prefix_id=self._prefix_id)
        turn = conversation.send(message, **{**self.sampling.options, **options})
        with self._ctrl_c.stopping(partial(_cancel, turn), turn.close):
            self._stream(turn)
        self._screen.reply_ended()
        try:
            reply = turn.reply
        except TurnInterrupted as error:
            raise TurnInterrupted(f"{error}; /messages shows what was kept") from None
        self.usage = reply.usage
        if reply.finish_reason == "repetition":
            advice = self.sampling.advice
            self._screen.notice(f"[stopped: the reply repeated itself. {advice} makes this rarer]")
        if self._stats:
            self._screen.notice(cost_line(reply.usage))
        return reply

    def _stream(self, turn: Turn) -> None:
        self.thinking = ""
        for event in turn:
            if isinstance(event, Restarted):
                self._screen.begin_again("[the engine restarted; the reply begins again]")
                self.thinking = ""
                continue
            self._screen.reply(event.text, event.kind)
            if event.kind == "thinking":
                self.thinking += event.text

    # -- the history of the conversation --

    @property
    def conversation(self) -> Conversation:
        return self._client.conversation(self.conversation_id)

    def messages(self) -> list[Message]:
        """Return the messages of the current conversation; [] if it does not exist yet."""
        try:
            return list(self.conversation.messages())
        except NotFound:
            return []

    def take_back(self, command: str, num_turns: int = 1) -> list[Message]:
        """Rewind the last `num_turns` turns, and return their messages."""
        try:
            expected_revision = self.conversation.get().revision
        except NotFound:
            raise InvalidArgument(command, NO_TURN) from None
        messages = self.messages()
        revisions = sorted({each.revision for each in messages if each.revision})
        if not revisions:
            raise InvalidArgument(command, NO_TURN)
        if num_turns > len(revisions):
            found = "one turn" if len(revisions) == 1 else f"{len(revisions)} turns"
            raise InvalidArgument(command, f"this conversation has only {found}")
        to_revision = revisions[-1 - num_turns] if num_turns < len(revisions) else 0
        self.conversation.rewind(to_revision, expected_revision=expected_revision)
        return [each for each in messages if each.revision > to_revision]


def new_id() -> str:
    """Return a random id that is short enough to type."""
    return f"chat-{secrets.token_hex(6)}"


def _cancel(turn: Turn) -> None:
    """Cancel a turn. Called in a separate thread.

    Errors are ignored: either the turn has already ended, or the user presses Ctrl-C again to give up.
    """
    with contextlib.suppress(
        PensieveError, ValueError
    ):  # gRPC raises ValueError if the client was closed meanwhile
        turn.cancel()


def cost_line(usage: Usage) -> str:
    """Return a line that says where the tokens of a turn came from, and how fast the turn was."""
    seconds = usage.total_seconds - usage.first_token_seconds
    shared = f"; {usage.shared_tokens} of {usage.shared_from}" if usage.shared_tokens else ""
    rate = max(usage.output_tokens - 1, 0) / seconds if seconds > 0 else 0.0
    return (
        f"[{usage.prompt_tokens} tokens: {usage.new_tokens} new, "
        f"{usage.device_tokens} device, {usage.host_tokens} host, "
        f"{usage.recomputed_tokens} recomputed{shared} | "
        f"first token {usage.first_token_seconds * 1e3:.0f} ms | "
        f"{usage.output_tokens} tokens at {rate:.1f}/s]"
    )
