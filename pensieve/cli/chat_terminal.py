"""A conversation in a terminal (lines in, replies streamed out, /commands).

Ctrl-C ends the turn and keeps the text of its reply so far; a second one ends the program.  At the
prompt it clears the line.  Ctrl-D ends the program.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from pensieve.client import (
    Client,
    Conversation,
    ConversationState,
    Message,
    Restarted,
    Turn,
    Usage,
)
from pensieve.client.admin import Admin
from pensieve.errors import InvalidArgument, NotFound, PensieveError, Unavailable

HELP = """\
/new [ID]        begin another conversation
/list            the latest conversations
/resume ID       go on with one of them
/messages        the messages of this one
/fork [ID]       go on with a copy of this conversation
/undo            take back the last turn
/delete          forget this conversation, on disk as well
/stats           what the engine has done
/bye             leave (or Ctrl-D)
Ctrl-C           stop the reply; its text so far stays"""
LISTED_MAX = 20


@dataclass(frozen=True)
class Manner:
    """How a person wants to talk."""

    sampling: Mapping[str, Any]
    system: str  # prompt of new conversations
    stats: bool  # after each reply


class Chat:
    """One terminal, one conversation at a time."""

    def __init__(
        self,
        client: Client,
        admin: Callable[[], Admin],
        manner: Manner,
        ended: Callable[[], bool],  # whether nothing will ever be answered again
    ) -> None:
        self.conversation_id = _new_id()
        self._client = client
        self._admin = admin
        self._manner = manner
        self._ended = ended

    def open(self, conversation_id: str) -> None:
        """Go on with a conversation; one that is new is created with its first message."""
        self.conversation_id = conversation_id

    def check_system(self, conversation_id: str) -> None:
        """Refuse a system prompt for a conversation that has begun without it."""
        conversation = self._client.conversation(conversation_id)
        try:
            first = next(conversation.messages(), None)
        except NotFound:
            return
        present = first.text if first is not None and first.role == "system" else ""
        if self._manner.system != present:
            what = "a system prompt of its own" if present else "no system prompt"
            raise InvalidArgument(
                "--system", f"the conversation {conversation_id} is there already, with {what}"
            )

    def loop(self, history: Path) -> None:
        self._read_history(history)
        prompt = "> " if sys.stdin.isatty() else ""  # replies alone, where a program reads them
        try:
            while True:
                try:
                    line = input(prompt).strip()
                except KeyboardInterrupt:
                    print()
                    continue
                except EOFError:
                    if prompt:
                        print()
                    return
                if line == "/bye":
                    return
                try:
                    if line.startswith("/"):
                        self.command(line)
                    elif line:
                        self.say(line)
                except PensieveError as error:
                    if isinstance(error, Unavailable) and self._ended():
                        raise
                    print(f"! {error}", file=sys.stdout if prompt else sys.stderr)
        finally:
            self._write_history(history)

    # -- a turn --

    def say(self, text: str) -> None:
        """Stream the reply to the terminal."""
        conversation = self._conversation()
        if self._manner.system:
            try:
                conversation.get()
            except NotFound:
                conversation.create(system_prompt=self._manner.system)
        turn = conversation.send(text, **self._manner.sampling)
        with _cancelled_by_ctrl_c(turn):
            for event in turn:
                if isinstance(event, Restarted):
                    print("\n[the engine was started again]")
                else:
                    sys.stdout.write(str(event))
                    sys.stdout.flush()
        print()
        if self._manner.stats:
            print(cost_line(turn.reply.usage), file=sys.stderr)

    # -- commands --

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        commands = {
            "/help": self._help,
            "/new": self._new,
            "/list": self._list,
            "/resume": self._resume,
            "/messages": self._messages,
            "/fork": self._fork,
            "/undo": self._undo,
            "/delete": self._delete,
            "/stats": self._stats,
        }
        if name not in commands:
            raise InvalidArgument(name, "is no command; /help lists them")
        commands[name](argument)

    def _help(self, argument: str) -> None:
        print(HELP)

    def _new(self, argument: str) -> None:
        self.open(argument or _new_id())
        print(f"conversation {self.conversation_id}")

    def _list(self, argument: str) -> None:
        found: list[ConversationState] = list(islice(self._client.conversations(), LISTED_MAX))
        for each in found:
            mark = "*" if each.conversation_id == self.conversation_id else " "
            print(
                f"{mark} {each.conversation_id:<28} {each.updated_at.astimezone():%Y-%m-%d %H:%M}  "
                f"{each.num_messages:>4} messages  {each.num_tokens:>7,} tokens"
            )
        if not found:
            print("none yet")

    def _resume(self, argument: str) -> None:
        name = argument or self.conversation_id
        messages = list(self._client.conversation(name).messages())
        self.open(name)
        self._show(messages[-2:])

    def _messages(self, argument: str) -> None:
        self._show(self._messages_of())

    def _show(self, messages: list[Message]) -> None:
        for message in messages:
            print(f"{message.role}: {message.text}")

    def _fork(self, argument: str) -> None:
        target = argument or _new_id()
        self._conversation().fork(conversation_id=target)
        self.open(target)
        print(f"conversation {self.conversation_id}")

    def _undo(self, argument: str) -> None:
        revisions = sorted({each.revision for each in self._messages_of()})
        if not revisions or revisions[-1] == 0:
            raise InvalidArgument("/undo", "there is no turn yet")
        self._conversation().rewind(revisions[-2] if len(revisions) > 1 else 0)
        print("the last turn is taken back")

    def _delete(self, argument: str) -> None:
        self._conversation().delete()
        self._new("")

    def _stats(self, argument: str) -> None:
        with self._admin() as admin:
            figures = sorted(admin.stats().more.items())
        for name, value in figures:
            print(f"{name.replace('_', ' '):<32} {value:>14,.6g}")

    def _conversation(self) -> Conversation:
        return self._client.conversation(self.conversation_id)

    def _messages_of(self) -> list[Message]:
        return list(self._conversation().messages())

    # -- the line editor's history --

    @staticmethod
    def _read_history(path: Path) -> None:
        try:
            import readline
        except ImportError:  # a Python without it still reads lines
            return
        readline.set_auto_history(True)
        with contextlib.suppress(OSError):
            readline.read_history_file(path)

    @staticmethod
    def _write_history(path: Path) -> None:
        try:
            import readline
        except ImportError:
            return
        readline.set_history_length(1000)
        with contextlib.suppress(OSError):
            readline.write_history_file(path)
            path.chmod(0o600)


def _new_id() -> str:
    return f"chat-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@contextlib.contextmanager
def _cancelled_by_ctrl_c(turn: Turn) -> Iterator[None]:
    """The first Ctrl-C ends the turn, a second one the program.

    A KeyboardInterrupt within gRPC's own code could leave its locks held.  So the first one starts a
    thread that cancels the turn, and the stream ends in order.
    """
    pressed = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        threading.Thread(target=turn.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def cost_line(usage: Usage) -> str:
    """Where the tokens of a turn came from, and how fast it was."""
    seconds = usage.total_seconds - usage.first_token_seconds
    rate = max(usage.output_tokens - 1, 0) / seconds if seconds > 0 else 0.0
    return (
        f"[{usage.prompt_tokens} tokens: {usage.new_tokens} new, "
        f"{usage.device_tokens} device, {usage.host_tokens} host, "
        f"{usage.recomputed_tokens} recomputed | "
        f"first token {usage.first_token_seconds * 1e3:.0f} ms | "
        f"{usage.output_tokens} tokens at {rate:.1f}/s]"
    )
