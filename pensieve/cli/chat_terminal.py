"""`pensieve chat` at a terminal: lines in, which are messages or /commands, and what comes of them out.

Each command shows what it did, or is refused in one line.  Ctrl-C ends the turn and keeps the text of its
reply so far, which is what the screen shows; at the prompt it clears the line (ctrl_c.py).  Ctrl-D ends the
program.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pensieve.cli.chat_list import ChatList
from pensieve.cli.chat_sampling import SETTINGS
from pensieve.cli.chat_screen import Screen
from pensieve.cli.chat_talk import Manner, Talk, new_id
from pensieve.cli.conversation_lines import line_of, markdown_of, openai_message
from pensieve.cli.ctrl_c import CtrlC
from pensieve.cli.line_editor import LineEditor
from pensieve.client import Client, Message
from pensieve.client.admin import Admin
from pensieve.errors import InvalidArgument, PensieveError, Unavailable

HELP = """\
/help              this list
/new [ID]          begin another conversation
/system [TEXT]     begin another one with this system prompt; alone: which it is
/list [PAGE]       your conversations, the latest first
/resume WHICH      go on with one: its number in the list, or how its id begins
/messages          the messages of this one
/thinking          what the model thought before its last reply
/retry             take back the last reply and have another one
/edit [TEXT]       say the last message in other words; alone: change it here
/rewind [N]        take back the last turn, or the last N; also /undo
/fork [ID]         go on with a copy of this conversation
/save FILE         write it as Markdown, or as JSON if FILE ends with .jsonl
/set [NAME VALUE]  temperature, top_p, min_p, top_k, max_tokens or seed, until
                   you leave; alone: what is in force. `default` takes it back
/delete            forget this conversation, on disk as well
/stats             what the engine has done
/bye               leave; also /quit, /exit or Ctrl-D
Several lines      paste them; or end a line with \\; or Alt-Enter begins
                   another; or put \"\"\" before the first and after the last
Ctrl-C             stop the reply; its text so far stays. At the prompt: clear
                   the line
Ctrl-R             search what you have typed before
Tab                completes commands, what can be set, and ids after /resume"""

GOODBYES = ("/bye", "/quit", "/exit")


class Commands:
    """What a person may do with conversations beside talking."""

    def __init__(
        self,
        talk: Talk,
        client: Client,
        admin: Callable[[str], Admin],  # of a conversation's daemon
        ctrl_c: CtrlC,
        screen: Screen,
    ) -> None:
        self._talk = talk
        self._client = client
        self._admin = admin
        self._ctrl_c = ctrl_c
        self._screen = screen
        self._listed = ChatList(client)
        self._editor: LineEditor | None = None  # from which the command came
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/new": self._new,
            "/system": self._system,
            "/list": self._list,
            "/resume": self._resume,
            "/messages": self._messages,
            "/thinking": self._thinking,
            "/retry": self._retry,
            "/edit": self._edit,
            "/rewind": self._rewind,
            "/undo": self._undo,
            "/fork": self._fork,
            "/save": self._save,
            "/set": self._set,
            "/delete": self._delete,
            "/stats": self._stats,
        }

    def run(self, line: str, editor: LineEditor) -> None:
        """One command, as it was typed."""
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            raise InvalidArgument(name, "is no command; /help lists them")
        self._editor = editor
        self._commands[name](argument.strip())

    def completions(self, line: str) -> list[str]:
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

    # -- conversations --

    def _help(self, argument: str) -> None:
        self._screen.line(HELP)

    def _new(self, argument: str) -> None:
        self._talk.open(argument or new_id())
        self._screen.line(f"conversation {self._talk.conversation_id}")

    def _system(self, argument: str) -> None:
        """It is fixed for a conversation's life, so another one begins."""
        if argument:
            self._talk.begin_with(argument)
            self._new("")
        else:
            new = self._talk.system or "none"
            self._screen.line(f"system prompt of new conversations: {new}")

    def _list(self, argument: str) -> None:
        if argument and not (argument.isdecimal() and int(argument)):
            raise InvalidArgument("/list", f"takes the number of a page, not {argument!r}")
        lines = self._listed.page(int(argument or "1"), self._talk.conversation_id)
        self._screen.line("\n".join(lines or ["none yet" if not argument else "no more"]))

    def _resume(self, argument: str) -> None:
        name = self._listed.find(argument) if argument else self._talk.conversation_id
        messages = list(self._client.conversation(name).messages())
        self._talk.open(name)
        self._screen.line(f"conversation {name}")
        self._show(messages[-2:])

    def _messages(self, argument: str) -> None:
        messages = self._talk.messages()
        if not messages:
            self._screen.line("none yet")
        self._show(messages)

    def _thinking(self, argument: str) -> None:
        self._screen.line(self._talk.thinking.strip() or "none")

    def _show(self, messages: list[Message]) -> None:
        for message in messages:
            if self._ctrl_c.pressed:
                return
            self._screen.line(f"{message.role}: {message.text}")

    def _fork(self, argument: str) -> None:
        target = argument or new_id()
        self._talk.conversation.fork(conversation_id=target)
        self._new(target)

    def _save(self, argument: str) -> None:
        if not argument:
            raise InvalidArgument("/save", "takes the name of a file")
        path = Path(argument).expanduser()
        conversation = self._talk.conversation
        state, messages = conversation.get(), conversation.messages()
        write = line_of if path.suffix == ".jsonl" else markdown_of
        try:
            with path.open("x", encoding="utf-8") as file:
                try:
                    file.writelines(write(state, messages))
                except BaseException:
                    path.unlink(missing_ok=True)  # half of it would be taken for all
                    raise
        except FileExistsError:
            raise InvalidArgument("/save", f"{path} is there already") from None
        except OSError as error:
            raise InvalidArgument("/save", f"{path}: {error.strerror}") from None
        self._screen.line(f"saved in {path}")

    def _delete(self, argument: str) -> None:
        self._talk.conversation.delete()
        self._new("")

    # -- the last turns --

    def _undo(self, argument: str) -> None:
        self._talk.take_back("/undo")
        self._screen.line("the last turn is taken back")

    def _rewind(self, argument: str) -> None:
        if argument and not (argument.isdecimal() and int(argument)):
            raise InvalidArgument("/rewind", f"takes a number of turns, not {argument!r}")
        num_turns = int(argument or "1")
        self._talk.take_back("/rewind", num_turns)
        turns = "turn is" if num_turns == 1 else f"{num_turns} turns are"
        self._screen.line(f"the last {turns} taken back")

    def _retry(self, argument: str) -> None:
        taken = self._talk.take_back("/retry")
        before = "".join(each.text for each in taken if each.role == "assistant")
        after = self._say_again(taken, [each.text for each in taken])
        if after == before:
            self._screen.notice(f"[the same again: {self._talk.sampling.advice} varies it]")

    def _edit(self, argument: str) -> None:
        """Nothing is taken back before the new message is there."""
        messages = self._talk.messages()
        last = next((each for each in reversed(messages) if each.role == "user"), None)
        if last is None or not last.revision:
            raise InvalidArgument("/edit", "there is no turn yet")
        text: str | None = argument
        if not argument:
            if self._editor is None or not self._editor.edits:
                raise InvalidArgument("/edit", "takes the new message")
            text = self._editor.message(last.text)
        if not text:
            self._screen.line("" if text is None else "nothing is changed")
            return
        num_turns = len({each.revision for each in messages if each.revision >= last.revision})
        taken = self._talk.take_back("/edit", num_turns)
        turn = [each for each in taken if each.revision == last.revision]
        self._say_again(turn, [text if each.index == last.index else each.text for each in turn])

    def _say_again(self, taken: list[Message], texts: list[str]) -> str:
        """Send what was sent with a turn that is taken back; the new reply."""
        sent = [
            {**openai_message(each), "content": text}
            for each, text in zip(taken, texts, strict=True)
            if not each.finish_reason  # a history that somebody brought may have replies, too
        ]
        options: dict[str, Any] = {"metadata": taken[0].metadata} if taken[0].metadata else {}
        if "seed" in self._talk.sampling.options:
            options["seed"] = secrets.randbits(63)
        try:
            return self._talk.say(sent, **options).text
        except PensieveError as error:
            texts_sent = "\n".join(each["content"] for each in sent)
            self._screen.line(
                f"! the last turn is taken back, and was not said again:\n{texts_sent}"
            )
            raise error

    # -- settings and figures --

    def _set(self, argument: str) -> None:
        sampling, words = self._talk.sampling, argument.split()
        pairs = [each.split("=", 1) for each in words]
        if not all(len(each) == 2 for each in pairs):
            pairs = [argument.replace("=", " ", 1).split(None, 1)]
        for name, *text in pairs:
            if text and text[0]:
                sampling.set(name, text[0])
        names = [each[0] for each in pairs]
        self._screen.line("\n".join(map(sampling.line, names) if names else sampling.lines()))

    def _stats(self, argument: str) -> None:
        with self._admin(self._talk.conversation_id) as admin:
            figures = sorted(admin.stats().more.items())
        for name, value in figures:
            self._screen.line(f"{name.replace('_', ' '):<32} {value:>14,.6g}")


class RetryNotice:
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


class ChatTerminal:
    """One terminal, one conversation at a time."""

    def __init__(
        self,
        client: Client,
        admin: Callable[[str], Admin],  # of a conversation's daemon
        manner: Manner,
        ended: Callable[[], bool],  # whether nothing will ever be answered again
        ctrl_c: CtrlC,
        screen: Screen,
    ) -> None:
        self.talk = Talk(client, manner, ctrl_c, screen)
        self._commands = Commands(self.talk, client, admin, ctrl_c, screen)
        self._ended = ended
        self._ctrl_c = ctrl_c
        self._screen = screen

    def loop(self, history: Path) -> None:
        editor = LineEditor(self._ctrl_c, history, self._commands.completions)
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
                    self._commands.run(text, editor)
                elif text:
                    self.talk.say(text)
            except PensieveError as error:
                if isinstance(error, Unavailable) and self._ended():
                    raise
                complain(f"! {error}")
