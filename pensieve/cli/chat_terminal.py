"""A conversation in a terminal (messages in, replies streamed out, /commands).

Ctrl-C ends the turn and keeps the text of its reply so far, which is what the screen shows.  At the prompt
it clears the line.  ctrl_c.py explains why it does nothing else.  Ctrl-D ends the program.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pensieve.cli.chat_list import ChatList
from pensieve.cli.chat_sampling import SETTINGS, ChatSampling
from pensieve.cli.chat_screen import Screen
from pensieve.cli.ctrl_c import CtrlC
from pensieve.cli.line_editor import LineEditor
from pensieve.cli.repetition import Repetition
from pensieve.client import Client, Conversation, Message, Reply, Restarted, Turn, Usage
from pensieve.client.admin import Admin
from pensieve.client.requests import MessageInput
from pensieve.errors import (
    InvalidArgument,
    NotFound,
    PensieveError,
    TurnInterrupted,
    Unavailable,
)

HELP = """\
/new [ID]          begin another conversation
/list [PAGE]       your conversations, the latest first
/resume WHICH      go on with one: its number in the list, or how its id begins
/messages          the messages of this one
/retry             take back the last reply and have another one
/undo              take back the last turn
/fork [ID]         go on with a copy of this conversation
/set [NAME VALUE]  temperature, top_p, min_p, top_k, max_tokens or seed, until you
                   leave; alone: what is in force. The value `default` takes it back
/delete            forget this conversation, on disk as well
/stats             what the engine has done
/bye               leave; also /quit, /exit or Ctrl-D
Several lines      paste them; or Alt-Enter begins another line; or put \"\"\" before
                   the first and after the last
Ctrl-C             stop the reply; its text so far stays. At the prompt: clear the line
Tab                completes commands, what can be set, and ids after /resume"""

GOODBYES = ("/bye", "/quit", "/exit")


@dataclass(frozen=True)
class Manner:
    """How a person wants to talk."""

    sampling: ChatSampling
    system: str  # prompt of new conversations
    stats: bool  # after each reply


class Waiting:
    """How the client waits between two tries: a line says so, and Ctrl-C gives up."""

    def __init__(self, ctrl_c: CtrlC, screen: Screen, name: str) -> None:
        self._ctrl_c = ctrl_c
        self._screen = screen
        self._name = name

    def __call__(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)  # of a call that stops a reply
            return
        if not self._ctrl_c.at_prompt:  # there, it is for completion, which cannot wait
            self._screen.passing(f"[{self._name} cannot answer yet; trying again, Ctrl-C gives up]")
            if self._ctrl_c.sleep(seconds):
                return
        raise Unavailable(f"{self._name} cannot answer yet")


class Chat:
    """One terminal, one conversation at a time."""

    def __init__(
        self,
        client: Client,
        admin: Callable[[], Admin],
        manner: Manner,
        ended: Callable[[], bool],  # whether nothing will ever be answered again
        ctrl_c: CtrlC,
        screen: Screen,
    ) -> None:
        self.conversation_id = _new_id()
        self._client = client
        self._admin = admin
        self._manner = manner
        self._ended = ended
        self._ctrl_c = ctrl_c
        self._screen = screen
        self._listed = ChatList(client)
        self._prefix_id = ""  # of new conversations
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/new": self._new,
            "/list": self._list,
            "/resume": self._resume,
            "/messages": self._messages,
            "/retry": self._retry,
            "/undo": self._undo,
            "/fork": self._fork,
            "/set": self._set,
            "/delete": self._delete,
            "/stats": self._stats,
        }

    def open(self, conversation_id: str) -> None:
        """Go on with a conversation; one that is new is created with its first message."""
        self.conversation_id = conversation_id

    def begin_under(self, prefix_id: str) -> None:
        """Have new conversations begin under a prefix; NotFound if it is not declared."""
        self._client.prefix(prefix_id).get()
        self._prefix_id = prefix_id

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
        editor = LineEditor(self._ctrl_c, history, self._completions)
        complain = self._screen.line if editor.is_terminal else self._screen.notice
        presses = 0  # of Ctrl-C at the prompt, with nothing between them
        while True:
            try:
                text = editor.message()
            except UnicodeDecodeError:
                complain("! what was typed is no UTF-8")
                continue
            except EOFError:
                if editor.is_terminal:
                    self._screen.line("")
                return
            if text is None:
                presses += 1
                self._screen.line("")
                if presses > 1:
                    self._screen.notice("[Ctrl-D or /bye leaves]")
                continue
            presses = 0
            if text in GOODBYES:
                return
            try:
                if text.startswith("/") and "\n" not in text:
                    self.command(text)
                elif text:
                    self.say(text)
            except PensieveError as error:
                if isinstance(error, Unavailable) and self._ended():
                    raise
                complain(f"! {error}")

    # -- a turn --

    def say(self, message: MessageInput, **options: Any) -> Reply:
        """Stream the reply to the terminal; `options` outrank what is set."""
        conversation = self._conversation()
        if self._manner.system or self._prefix_id:
            system = "" if self._prefix_id else self._manner.system
            try:
                conversation.get()
            except NotFound:
                conversation.create(system_prompt=system, prefix_id=self._prefix_id)
        turn = conversation.send(message, **{**self._manner.sampling.options, **options})
        with self._ctrl_c.stopping(partial(_cancel, turn), turn.close):
            self._stream(turn)
        self._screen.reply_ended()
        try:
            reply = turn.reply
        except TurnInterrupted as error:  # it was given up
            raise TurnInterrupted(f"{error}; /messages shows what is in the history") from None
        if self._manner.stats:
            self._screen.notice(cost_line(reply.usage))
        return reply

    def _stream(self, turn: Turn) -> None:
        repetition: Repetition | None = Repetition()  # until it is noticed
        for event in turn:
            if isinstance(event, Restarted):
                self._screen.notice("[the engine was started again; so is the reply]")
                repetition = repetition and Repetition()
                continue
            self._screen.reply(event.text)
            if repetition is not None and repetition.push(event.token_ids):
                repetition = None
                advice = self._manner.sampling.advice
                self._screen.notice(
                    f"[the reply repeats itself: Ctrl-C stops it, {advice} makes that rarer]"
                )

    # -- commands --

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            raise InvalidArgument(name, "is no command; /help lists them")
        self._commands[name](argument.strip())

    def _completions(self, line: str) -> list[str]:
        """Words that may stand where a line ends."""
        name, space, _ = line.partition(" ")
        if not space and line.startswith("/"):
            return [*self._commands, *GOODBYES]
        if name == "/set":
            return list(SETTINGS)
        if name == "/resume":
            with contextlib.suppress(PensieveError):
                return self._listed.latest()
        return []

    def _help(self, argument: str) -> None:
        self._screen.line(HELP)

    def _new(self, argument: str) -> None:
        self.open(argument or _new_id())
        self._screen.line(f"conversation {self.conversation_id}")

    def _list(self, argument: str) -> None:
        if argument and not (argument.isdecimal() and int(argument)):
            raise InvalidArgument("/list", f"takes the number of a page, not {argument!r}")
        lines = self._listed.page(int(argument or "1"), self.conversation_id)
        self._screen.line("\n".join(lines or ["none yet" if not argument else "no more"]))

    def _resume(self, argument: str) -> None:
        name = self._listed.find(argument) if argument else self.conversation_id
        messages = list(self._client.conversation(name).messages())
        self.open(name)
        self._screen.line(f"conversation {name}")
        self._show(messages[-2:])

    def _messages(self, argument: str) -> None:
        messages = self._messages_of()
        if not messages:
            self._screen.line("none yet")
        self._show(messages)

    def _show(self, messages: list[Message]) -> None:
        for message in messages:
            if self._ctrl_c.pressed:
                return
            self._screen.line(f"{message.role}: {message.text}")

    def _fork(self, argument: str) -> None:
        target = argument or _new_id()
        self._conversation().fork(conversation_id=target)
        self._new(target)

    def _undo(self, argument: str) -> None:
        self._take_back("/undo")
        self._screen.line("the last turn is taken back")

    def _retry(self, argument: str) -> None:
        taken = self._take_back("/retry")
        before = "".join(each.text for each in taken if each.role == "assistant")
        sent = [
            {"role": each.role, "content": each.text, "tool_call_id": each.tool_call_id}
            for each in taken
            if each.role != "assistant"
        ]
        options: dict[str, Any] = {"metadata": taken[0].metadata} if taken[0].metadata else {}
        if "seed" in self._manner.sampling.options:
            options["seed"] = secrets.randbits(63)
        try:
            reply = self.say(sent, **options)
        except PensieveError as error:
            texts = "\n".join(each["content"] for each in sent)
            self._screen.line(f"! the last turn is taken back, and was not said again:\n{texts}")
            raise error
        if reply.text == before:
            self._screen.notice(f"[the same again: {self._manner.sampling.advice} varies it]")

    def _take_back(self, command: str) -> list[Message]:
        """Rewind the last turn; the messages that it had."""
        messages = self._messages_of()
        revisions = sorted({each.revision for each in messages})
        if not revisions or revisions[-1] == 0:
            raise InvalidArgument(command, "there is no turn yet")
        self._conversation().rewind(revisions[-2] if len(revisions) > 1 else 0)
        return [each for each in messages if each.revision == revisions[-1]]

    def _set(self, argument: str) -> None:
        sampling = self._manner.sampling
        name, _, text = argument.replace("=", " ", 1).partition(" ")
        if text.strip():
            sampling.set(name, text.strip())
        self._screen.line(sampling.line(name) if name else "\n".join(sampling.lines()))

    def _delete(self, argument: str) -> None:
        self._conversation().delete()
        self._new("")

    def _stats(self, argument: str) -> None:
        with self._admin() as admin:
            figures = sorted(admin.stats().more.items())
        for name, value in figures:
            self._screen.line(f"{name.replace('_', ' '):<32} {value:>14,.6g}")

    def _conversation(self) -> Conversation:
        return self._client.conversation(self.conversation_id)

    def _messages_of(self) -> list[Message]:
        return list(self._conversation().messages())


def _new_id() -> str:
    return f"chat-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _cancel(turn: Turn) -> None:
    """In a thread of its own.  Where it fails, the reply has ended, or another press gives up."""
    with contextlib.suppress(
        PensieveError, ValueError
    ):  # gRPC's, for a client that is closed meanwhile
        turn.cancel()


def cost_line(usage: Usage) -> str:
    """Where the tokens of a turn came from, and how fast it was."""
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
